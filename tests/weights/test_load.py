"""A whole file of one's own: tensors, settings and vocabulary become an LLM, or one line says why not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tinyllm import LLM, ConfigError, ModelFileError, SamplingParams, TokenizerError
from tinyllm.errors import TinyllmError
from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.gguf_config import config_from_gguf
from tinyllm.weights.load import build_decoder, load_model
from tinyllm.weights.names import parameters_from_gguf

TWIN = Path(__file__).parents[1] / "data" / "gguf" / "llama_f32.gguf"
HF_TWIN = TWIN.parents[1] / "tiny" / "llama_gqa"
VOCABULARY = {"model": "gpt2", "pre": "smollm", "tokens": list(BYTE_TO_CHAR), "merges": ["t h", "th e"]}


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """write_model(**vocabulary changes): the tiny checkpoint's GGUF with a byte vocabulary in it."""

    def write_model(bos: bool = False, **changes: Any) -> Path:
        source = read_gguf(TWIN)
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        for key, value in source.metadata.items():
            if key.startswith("llama."):
                add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
                add(key, value)
        vocabulary = VOCABULARY | changes
        tokens = [*vocabulary["tokens"][:-2], "th", "the"]
        writer.add_tokenizer_model(vocabulary["model"])
        writer.add_tokenizer_pre(vocabulary["pre"])
        writer.add_token_list(tokens + ["extra"] * vocabulary.get("extra", 0))
        writer.add_token_types([1] * (len(tokens) + vocabulary.get("extra", 0)))
        writer.add_token_merges(vocabulary["merges"])
        writer.add_bos_token_id(7)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(bos)
        for name in source.tensors:
            writer.add_tensor(name, source.read(name).numpy().astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "model.gguf"

    return write_model


def test_a_file_of_one_s_own_generates(write_model):
    llm = LLM(write_model(), max_model_len=64)
    (answer,) = llm.generate("the", SamplingParams(max_tokens=4, ignore_eos=True))
    assert answer.prompt_token_ids == (255,) and len(answer.token_ids) == 4
    again = LLM(llm.loaded, max_model_len=64).generate([[255]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert again[0].token_ids == answer.token_ids


def test_the_begin_token_is_put_in_front_where_the_file_says_so(write_model):
    assert load_model(write_model(bos=True)).encode_prompt("the") == [7, 255]
    assert load_model(write_model(bos=False)).encode_prompt("the") == [255]


def test_bfloat16_parameters(write_model):
    loaded = load_model(write_model(), dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.decoder.parameters()} == {torch.bfloat16}


BOS_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """write_folder(**tokenizer.json changes): the tiny checkpoint's folder with a byte vocabulary in it."""

    def write_folder(**changes: Any) -> Path:
        folder = tmp_path / "folder"
        shutil.copytree(HF_TWIN, folder, ignore=shutil.ignore_patterns("golden*", "config_v4.json"))
        tokens = [*list(BYTE_TO_CHAR)[:-2], "th", "the"]
        model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": ["t h", "th e"]}
        bytes_only = {"type": "ByteLevel", "add_prefix_space": False}
        values = {"model": model, "pre_tokenizer": bytes_only, "decoder": bytes_only, **changes}
        (folder / "tokenizer.json").write_text(json.dumps(values))
        return folder

    return write_folder


def test_a_folder_generates_what_its_gguf_twin_does(write_folder, write_model):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (answer,) = LLM(write_folder(), max_model_len=64).generate("the", params)
    (twin,) = LLM(write_model(), max_model_len=64).generate("the", params)
    assert answer.prompt_token_ids == twin.prompt_token_ids == (255,)
    assert answer.token_ids == twin.token_ids


def test_a_folder_s_template_puts_the_begin_token_in_front(write_folder):
    assert load_model(write_folder(post_processor=BOS_TEMPLATE)).encode_prompt("the") == [1, 255]


def test_a_folder_s_chat_template_comes_along(write_folder):
    folder = write_folder()
    assert load_model(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert load_model(folder).chat_template == "{{ messages[0]['content'] }}"


def test_a_folder_s_end_token_is_what_its_tokenizer_says(write_folder):
    folder = write_folder()
    by_id = load_model(folder).template_tokens
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert load_model(folder).template_tokens == {**by_id, "eos_token": "<|im_end|>"}


def test_an_unusable_tokenizer_json_names_the_folder(write_folder):
    with pytest.raises(TokenizerError, match=r"^folder: "):
        load_model(write_folder(decoder={"type": "Metaspace"}))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"pre": "novel"}, TokenizerError, ["model.gguf", "novel", "smollm"]),
        ({"model": "llama"}, TokenizerError, ["model.gguf", "llama", "gpt2"]),
        ({"extra": 1}, TinyllmError, ["model.gguf"]),
    ],
)
def test_an_unusable_vocabulary_names_the_file(write_model, changes, error, words):
    with pytest.raises(error) as raised:
        load_model(write_model(**changes))
    message = str(raised.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_settings_are_checked_before_a_file_is_read():
    with pytest.raises(ConfigError, match="dtype 'float16' is not supported; expected one of float32, bfloat16"):
        load_model("no/such/file", dtype="float16")
    with pytest.raises(ConfigError, match="attention backend 'flash' is unknown; expected one of reference, sdpa"):
        load_model("no/such/file", attention="flash")
    with pytest.raises(ModelFileError, match="no/such/file"):
        load_model("no/such/file")


def test_a_decoder_takes_all_parameters_and_no_other():
    file = read_gguf(TWIN)
    config = config_from_gguf(file)
    parameters = parameters_from_gguf(file, config)
    assert not any(parameter.requires_grad for parameter in build_decoder(config, parameters).parameters())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        build_decoder(config, parameters | {"surplus.weight": torch.zeros(1)})
    parameters.pop("norm.weight")
    with pytest.raises(RuntimeError, match="Missing key"):
        build_decoder(config, parameters)
