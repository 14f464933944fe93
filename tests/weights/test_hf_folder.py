"""Hugging Face folders: both spellings and every layout of the weights load; hostile and broken ones are one clear line.

The folders of bad_dirs/manifest.jsonl are made here from two good ones, each by the change that its name tells.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tinyllm.errors import ConfigError, ModelFileError, TinyllmError, TokenizerError
from tinyllm.weights.hf_folder import begins_with_bos, read_chat_template, read_config, read_json, read_special_tokens
from tinyllm.weights.load import build_decoder, load_model, load_weights

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "tiny"
NAMES = sorted(path.name for path in TINY.iterdir())
ROWS = [json.loads(line) for line in (DATA / "bad_dirs" / "manifest.jsonl").read_text().splitlines()]
LAYER_1 = "model.layers.1."
NORM = "model.norm.weight"
SHARD = "model-00001-of-00005.safetensors"


def copy(source: str, folder: Path, *leave_out: str) -> Path:
    """The good folder `source` again, without its goldens."""
    shutil.copytree(TINY / source, folder, ignore=shutil.ignore_patterns("golden*", "config_v4.json", *leave_out))
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


# ---- the changes -------------------------------------------------------------------------------------------------------


def config_change(source: str = "llama_gqa", *, drop: tuple[str, ...] = (), **change: Any) -> Callable[[Path], None]:
    """Another config.json, the weights as they are."""

    def make(folder: Path) -> None:
        copy(source, folder)
        edit_json(folder / "config.json", lambda values: [values.pop(key) for key in drop] and None)
        edit_json(folder / "config.json", lambda values: values.update(change))

    return make


def weight_change(
    change: Callable[[dict[str, torch.Tensor]], Any], source: str = "llama_gqa"
) -> Callable[[Path], None]:
    """Other tensors, the config as it is."""

    def make(folder: Path) -> None:
        copy(source, folder, "*.safetensors")
        tensors = load_file(TINY / source / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return make


def index_change(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        copy("llama_sharded", folder)
        edit_json(folder / "model.safetensors.index.json", change)

    return make


def file_change(change: Callable[[Path], Any], source: str = "llama_gqa") -> Callable[[Path], None]:
    return lambda folder: change(copy(source, folder))


def add_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    second = {name: tensor for name, tensor in tensors.items() if name.startswith(LAYER_1)}
    tensors.update({name.replace(LAYER_1, "model.layers.2."): tensor.clone() for name, tensor in second.items()})


def write_out_kv_heads(folder: Path) -> None:
    """Two query heads share a key/value head here; written out twice, every query head has its own."""

    def twice(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "k_proj" in name or "v_proj" in name:
                tensors[name] = tensor.view(2, 16, 64).repeat_interleave(2, dim=0).reshape(64, 64)

    weight_change(twice)(folder)
    edit_json(folder / "config.json", lambda values: values.pop("num_key_value_heads"))


def add_remote_code(folder: Path) -> None:
    config_change(auto_map={"AutoModelForCausalLM": "evil.EvilModel"})(folder)
    (folder / "evil.py").write_text(f"open({str(folder / 'PWNED')!r}, 'w').write('x')\n")


class Evil:
    """A pickle of this runs a shell command when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.path}'",)


def only_pickle(folder: Path) -> None:
    copy("llama_gqa", folder, "*.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder / "PWNED2"), protocol=2))


def move_shard(place: str, keep: bool = True) -> Callable[[Path], None]:
    """The first shard lies at `place`, from the folder on, and the index says so."""

    def make(folder: Path) -> None:
        copy("llama_sharded", folder)
        target = folder / place
        target.parent.mkdir(exist_ok=True)
        shutil.move(folder / SHARD, target)
        name = str(target.absolute()) if place == "../absolute.safetensors" else place
        move_in_index = {SHARD: name}
        edit_json(
            folder / "model.safetensors.index.json",
            lambda values: values.update(
                weight_map={key: move_in_index.get(shard, shard) for key, shard in values["weight_map"].items()}
            ),
        )
        if not keep:
            target.unlink()

    return make


def link_shards(folder: Path) -> None:
    """Every file a link to one outside the folder, as in the Hugging Face cache."""
    copy("llama_sharded", folder)
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        shutil.move(path, blobs / path.name)
        path.symlink_to(Path("..") / "blobs" / path.name)


def set_place(name: str, shard: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values["weight_map"].update({name: shard})


def with_bom(folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


LINEAR_ROPE = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 0.0}
OLD_LINEAR_ROPE = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
MAKERS: dict[str, Callable[[Path], None]] = {
    "extra_inv_freq": weight_change(lambda tensors: tensors.update({INV_FREQ: torch.ones(8)})),
    "extra_layer": weight_change(add_a_layer),
    "int_weight": weight_change(lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int64)})),
    "nan_weight": weight_change(lambda tensors: tensors[NORM].fill_(float("nan"))),
    "tied_but_lm_head_in_file": weight_change(
        lambda tensors: tensors.update({"lm_head.weight": torch.ones(256, 64)}), "llama_tied"
    ),
    "untied_but_no_lm_head": weight_change(lambda tensors: tensors.pop("lm_head.weight")),
    "heads_zero": config_change(num_attention_heads=0),
    "hidden_not_divisible": config_change(num_attention_heads=5, drop=("head_dim",)),
    "kv_heads_absent": write_out_kv_heads,
    "no_architectures": config_change(drop=("architectures",)),
    "auto_map_remote_code": add_remote_code,
    "rope_legacy_type_key": config_change("llama_linear", drop=("rope_parameters",), **OLD_LINEAR_ROPE),
    "rope_theta_int": config_change(drop=("rope_parameters",), rope_theta=10000, rope_scaling=None),
    "rope_factor_zero": config_change(rope_parameters=LINEAR_ROPE),
    "eos_list": config_change(eos_token_id=[2, 5, 7]),
    "hidden_act_gelu": config_change(hidden_act="gelu"),
    "config_not_json": file_change(lambda folder: (folder / "config.json").write_text("{nope")),
    "config_bom": file_change(with_bom),
    "no_weights": file_change(lambda folder: (folder / "model.safetensors").unlink()),
    "only_pickle": only_pickle,
    "shard_absolute": move_shard("../absolute.safetensors"),
    "shard_subfolder": move_shard("sub/" + SHARD),
    "index_tensor_not_in_shard": index_change(set_place(UP_PROJ, "model-00005-of-00005.safetensors")),
    "index_omits_tensor": index_change(lambda values: values["weight_map"].pop(NORM)),
    "index_weight_map_list": index_change(lambda values: [values.clear(), values.update(weight_map=[])]),
    "index_empty": index_change(lambda values: [values.clear(), values.update(weight_map={})]),
    "index_no_metadata": index_change(lambda values: values.pop("metadata")),
    "shard_symlink_out": link_shards,
}
# Cases that the manifest does not have; each is refused, and its words must be in the message.
MORE_WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "shard_traversal": (
        move_shard("../shard.safetensors"),
        "in '../shard.safetensors'; expected a .safetensors file of",
    ),
    "shard_backslash": (
        index_change(set_place(NORM, "..\\x.safetensors")),
        "expected a .safetensors file of this folder",
    ),
    "shard_drive": (index_change(set_place(NORM, "C:/x.safetensors")), "expected a .safetensors file of this folder"),
    "shard_missing": (move_shard("shard.safetensors", keep=False), "shard.safetensors: does not exist"),
    "shard_is_pickle": (index_change(set_place(NORM, "pytorch_model.bin")), "in 'pytorch_model.bin'; expected a .safe"),
    "shard_odd_name": (index_change(set_place(NORM, "a\nb\0.safetensors")), "in 'a\\nb\\x00.safetensors'; expected"),
    "shard_long_name": (
        index_change(lambda values: values.update(weight_map={NORM: "a" * 999 + ".safetensors"})),
        "expected a .safetensors file of this folder",
    ),
    "index_no_weight_map": (
        index_change(lambda values: values.pop("weight_map")),
        "weight_map is None; expected an obj",
    ),
    "index_value_not_string": (index_change(set_place(NORM, 7)), "places tensor 'model.norm.weight' in 7; expected"),
    "index_not_json": (
        file_change(lambda folder: (folder / "model.safetensors.index.json").write_text("]"), "llama_sharded"),
        "model.safetensors.index.json: is no JSON: Expecting value",
    ),
    "weights_lfs": (
        file_change(
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec")
        ),
        "model.safetensors: this is a Git LFS pointer",
    ),
    "config_lfs": (
        file_change(lambda folder: (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1")),
        "config.json: this is a Git LFS pointer",
    ),
    "config_absent": (file_change(lambda folder: (folder / "config.json").unlink()), "config.json: does not exist"),
    "config_is_folder": (
        file_change(lambda folder: [(folder / "config.json").unlink(), (folder / "config.json").mkdir()]),
        "config.json: is a directory; expected a file",
    ),
    "config_latin1": (
        file_change(lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xe9"}')),
        "config.json: is no UTF-8 text; fetch it again",
    ),
    "config_deep": (
        file_change(lambda folder: (folder / "config.json").write_text("[" * 100_000)),
        "config.json: is nested too deeply; expected a JSON object",
    ),
    "config_list": (
        file_change(lambda f: (f / "config.json").write_text("[]")),
        "holds a list; expected a JSON object",
    ),
    "config_long_number": (
        file_change(lambda folder: (folder / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")),
        "config.json: holds a number of thousands of digits; expected a usable one",
    ),
    "config_huge": (
        file_change(lambda folder: (folder / "config.json").write_text(" " * 2**21)),
        "config.json: is larger than 1048576 bytes; expected less",
    ),
    "generation_config_list": (
        file_change(lambda folder: (folder / "generation_config.json").write_text("[]")),
        "generation_config.json: holds a list; expected a JSON object",
    ),
    "generation_config_eos": (
        file_change(lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [2, 256]}')),
        "generation_config.json: special token id 256 is outside the vocabulary of 256",
    ),
    "weights_link_to_nothing": (
        file_change(lambda f: [(f / "model.safetensors").unlink(), (f / "model.safetensors").symlink_to("gone")]),
        "model.safetensors: is no regular file, or a link to nothing",
    ),
    "only_gguf": (
        file_change(lambda folder: (folder / "model.safetensors").rename(folder / "model-Q8_0.gguf")),
        "give the path of its GGUF file instead, such as 'model-Q8_0.gguf'",
    ),
    "float8_weight": (
        weight_change(lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.float8_e4m3fn)})),
        "'model.norm.weight' is torch.float8_e4m3fn; expected floating point of 16 to 64 bits",
    ),
    "other_architecture": (config_change(model_type="qwen2"), "model_type 'qwen2' is not supported; expected 'llama'"),
    "no_model_type": (
        config_change(drop=("model_type",)),
        "config.json has no model_type; expected 'llama', the one architecture",
    ),
    "other_class": (
        config_change(architectures=["MistralForCausalLM"]),
        "architectures ['MistralForCausalLM'] is not supported; expected ['LlamaForCausalLM']",
    ),
    "norm_missing": (
        weight_change(lambda tensors: tensors.pop(NORM)),
        "tensor 'model.norm.weight' is missing; expected [hidden_size] = [64]",
    ),
    "norm_missing_of_a_bare_decoder": (
        weight_change(
            lambda tensors: (
                [tensors.pop(NORM)]
                + [tensors.update({name.removeprefix("model."): tensors.pop(name)}) for name in list(tensors)]
            )
        ),
        "tensor 'norm.weight' is missing; expected [hidden_size] = [64]",
    ),
}


@pytest.fixture
def make(tmp_path):
    """make(name): a folder of the manifest, or one of the cases beyond it, as 'model' in a fresh place."""

    def make_folder(name: str) -> Path:
        folder = tmp_path / name / "model"
        folder.parent.mkdir()
        (MAKERS.get(name) or MORE_WRONG[name][0])(folder)
        return folder

    return make_folder


def expects_error(row: dict[str, Any]) -> bool:
    return row["expect"] == "error"


# ---- what must load ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["config.json", "config_v4.json"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_folder_gives_the_golden_logits(name, spelling, tmp_path, check_golden):
    folder = copy(name, tmp_path / "model", "config.json")
    shutil.copy(TINY / name / spelling, folder / "config.json")
    check_golden(*load_weights(folder), name)


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_are_the_same_settings(name, tmp_path):
    folder = copy(name, tmp_path / name, "config.json")
    shutil.copy(TINY / name / "config_v4.json", folder / "config.json")
    assert read_config(folder) == read_config(TINY / name)


def test_the_manifest_is_made_completely():
    assert [row["name"] for row in ROWS] == list(MAKERS)


@pytest.mark.parametrize("row", [row for row in ROWS if row["golden"]], ids=lambda row: row["name"])
@pytest.mark.filterwarnings("ignore:.*lm_head")
def test_odd_folder_gives_the_golden_logits(row, make, check_golden):
    check_golden(*load_weights(make(row["name"])), row["golden"])


def test_the_activation_of_the_config_is_honoured(make, logits_of):
    """transformers' logits move by 1.16 where gelu stands for silu (the manifest's `reference`); so do ours."""
    with np.load(TINY / "llama_gqa" / "golden.npz") as golden:
        token_ids, silu_logits = golden["input_ids"][0].tolist(), torch.from_numpy(golden["logits"])
    gelu_logits = logits_of(*load_weights(make("hidden_act_gelu")), token_ids)
    assert gelu_logits.shape == silu_logits.shape
    assert (gelu_logits - silu_logits).abs().max() == pytest.approx(1.16, abs=0.01)


def test_nan_weights_load_and_show_in_the_logits(make, logits_of):
    assert logits_of(*load_weights(make("nan_weight")), [1, 2, 3]).isnan().all()


def test_a_tied_config_wins_with_one_warning(make):
    with pytest.warns(
        UserWarning, match="^model: lm_head.weight differs from the embedding, but the config ties them"
    ) as caught:
        config, parameters = load_weights(make("tied_but_lm_head_in_file"))
    assert len(caught) == 1 and config.tie_word_embeddings and "lm_head.weight" not in parameters
    assert caught[0].filename == __file__  # the line that called us, not one of ours


def test_each_model_of_a_process_has_its_warning(make, tmp_path):
    folder = make("tied_but_lm_head_in_file")
    folder.rename(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # Python shows a warning once for each line and text
        for name in ("first", "second", "first"):
            load_weights(tmp_path / name)
    assert [str(warning.message).partition(":")[0] for warning in caught] == ["first", "second"]


def test_a_tied_config_takes_an_equal_lm_head_in_silence(tmp_path):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    weight_change(add, "llama_tied")(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(tmp_path / "model")


def test_float16_weights_are_their_values(tmp_path):
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})

    weight_change(halve)(tmp_path / "model")
    (_, halves), (_, exact) = load_weights(tmp_path / "model"), load_weights(TINY / "llama_gqa")
    assert all(torch.equal(halves[name], exact[name].half().float()) for name in exact)
    assert {weight.dtype for weight in load_weights(TINY / "llama_bf16", "bfloat16")[1].values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, (2,)),
        (2, 2, (2,)),
        (2, 5, (2, 5)),
        (2, [7, 2, 5], (2, 7, 5)),
        ([2, 5], [5], (2, 5)),
        (None, [3], (3,)),
    ],
)
def test_end_tokens_of_both_files_stop(config, generation, ids, tmp_path):
    config_change(eos_token_id=config)(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert read_config(tmp_path / "model").eos_token_ids == ids
    (tmp_path / "model" / "generation_config.json").unlink()
    assert read_config(tmp_path / "model").eos_token_ids == (tuple(config or ()) if config != 2 else (2,))


@pytest.mark.parametrize(
    ("tokenizer_config", "expected"),
    [
        (None, {}),
        ({"bos_token": None, "eos_token": 7}, {}),
        ({"bos_token": "<s>", "eos_token": "</s>"}, {"bos_token": "<s>", "eos_token": "</s>"}),
        ({"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}, {"eos_token": "<|im_end|>"}),
    ],
)
def test_the_texts_of_begin_and_end_token(tokenizer_config, expected, tmp_path):
    if tokenizer_config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert read_special_tokens(tmp_path) == expected


@pytest.mark.parametrize(
    ("tokenizer_config", "post_processor", "expected"),
    [
        (None, None, False),
        ({"add_bos_token": True}, None, True),
        ({}, None, False),
        ({"add_bos_token": 1}, None, False),
        ({"bos_token": "<s>"}, "template", True),
        ({"add_bos_token": False}, "template", False),
        (None, "template of another token", False),
        (None, "sequence", True),
        (None, {"processors": 7, "single": ["x"]}, False),
        (None, {"single": [{"SpecialToken": {"id": []}}], "special_tokens": []}, False),
        (None, [1], False),
    ],
)
def test_whether_a_prompt_begins_with_the_begin_token(tokenizer_config, post_processor, expected, tmp_path):
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    other = {**template, "special_tokens": {"<s>": {"ids": [9]}}}
    known = {
        "template": template,
        "template of another token": other,
        "sequence": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]},
    }
    if tokenizer_config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if post_processor is not None:
        post_processor = known[post_processor] if isinstance(post_processor, str) else post_processor
        (tmp_path / "tokenizer.json").write_text(json.dumps({"post_processor": post_processor}))
    assert begins_with_bos(tmp_path, read_config(TINY / "llama_gqa")) is expected


@pytest.mark.parametrize(
    ("jinja", "template", "expected"),
    [
        (None, None, None),
        (None, "b", "b"),
        ("{{ a }}", "b", "{{ a }}"),
        (None, [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (None, [{"name": "tool_use", "template": "t"}, 7], None),
        (None, {"default": "d"}, None),
    ],
)
def test_the_chat_template_of_a_folder(jinja, template, expected, tmp_path):
    assert read_chat_template(tmp_path) is None
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert read_chat_template(tmp_path) == expected


def test_the_current_folder_has_a_name_of_its_own(tmp_path, monkeypatch):
    folder = copy("llama_gqa", tmp_path / "here")
    monkeypatch.chdir(folder)
    assert load_weights(".")[0].name == "here"
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"^here: config.json: does not exist$"):
        load_weights(".")


def test_links_are_followed_everywhere(tmp_path, check_golden):
    (tmp_path / "link").symlink_to(TINY / "llama_gqa", target_is_directory=True)
    check_golden(*load_weights(tmp_path / "link"), "llama_gqa")


# ---- what must not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [row["name"] for row in ROWS if expects_error(row)])
def test_broken_folder_is_one_clear_line(name, make, one_line):
    with pytest.raises(TinyllmError) as error:
        load_weights(make(name))
    assert "model" in one_line(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("extra_layer", "'model.layers.2.input_layernorm.weight' has no place in a Llama model (9 such)"),
        ("int_weight", "'model.norm.weight' is torch.int64; expected floating point"),
        ("untied_but_no_lm_head", "'lm_head.weight' is missing; expected [vocab_size hidden_size] = [256, 64]"),
        ("config_not_json", "config.json: is no JSON: Expecting property name"),
        ("no_weights", "has no model.safetensors and no model.safetensors.index.json; expected the weights of a model"),
        ("only_pickle", "'pytorch_model.bin' is a pickle, which may run code and is never opened: fetch the model as"),
        ("shard_absolute", "expected a .safetensors file of this folder"),
        ("index_tensor_not_in_shard", "is not in 'model-00005-of-00005.safetensors', where it should be"),
        ("index_omits_tensor", "'model.norm.weight' of 'model-00004-of-00005.safetensors' is not listed for that file"),
        ("index_weight_map_list", "weight_map is []; expected an object: tensor name -> file name"),
        *((name, words) for name, (_, words) in MORE_WRONG.items()),
    ],
)
def test_message_names_the_fault(name, words, make, one_line):
    with pytest.raises(TinyllmError) as error:
        load_weights(make(name))
    assert words in one_line(error.value)


def test_a_folder_needs_a_tokenizer_to_speak(one_line):
    with pytest.raises(TokenizerError) as error:
        load_model(TINY / "llama_gqa")
    assert one_line(error.value) == "llama_gqa: the folder has no tokenizer.json; fetch it, too"


def test_other_wrong_paths(tmp_path):
    with pytest.raises(ModelFileError, match=r"is the weights alone; give the folder that also holds config.json"):
        load_weights(TINY / "llama_gqa" / "model.safetensors")
    for name in ("config.json", "config_v4.json"):
        with pytest.raises(ModelFileError, match=r"json: is a part of a model; give its folder, '.*llama_gqa'$"):
            load_weights(TINY / "llama_gqa" / name)
    with pytest.raises(
        ModelFileError, match=r"^smollm2: does not exist; give the path of a GGUF file or a Hugging Face"
    ):
        load_weights("smollm2")
    with pytest.raises(ModelFileError, match=r"config.json: does not exist"):
        load_weights(tmp_path)
    with pytest.raises(ConfigError, match="dtype 'float16' is not supported; expected one of float32, bfloat16"):
        load_weights(tmp_path, "float16")
    with pytest.raises(ConfigError, match=r"dtype \[\] is not supported; expected one of float32, bfloat16"):
        load_weights(tmp_path, [])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="model is a int; expected the path of a GGUF file or a Hugging Face folder"):
        load_weights(7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="model is an empty path; expected the path of a GGUF file or a Hugging Face"):
        load_weights("")


def test_an_unreadable_folder_is_one_line(make, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    folder = make("no_weights")
    monkeypatch.setattr(Path, "iterdir", refuse)  # root may read everything, so a mode of 000 would prove nothing
    with pytest.raises(ModelFileError, match="model: cannot be read: Permission denied"):
        load_weights(folder)


def test_json_may_have_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
def test_hostile_folders_and_files_under_a_time_and_a_memory_limit(tmp_path):
    """One process reads all of them with 20 s of CPU time and 256 MiB more address space than it starts with."""
    expected = {**{row["name"]: expects_error(row) for row in ROWS}, **dict.fromkeys(MORE_WRONG, True)}
    for name in expected:
        (tmp_path / name).mkdir()
        (MAKERS.get(name) or MORE_WRONG[name][0])(tmp_path / name / "model")
    files = sorted((DATA / "bad_safetensors").glob("*.safetensors"))
    program = """
import resource, sys, warnings
import torch
from tinyllm.errors import TinyllmError
from tinyllm.weights.load import load_weights
from tinyllm.weights.safetensors import read_safetensors
warnings.simplefilter("ignore")
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
resource.setrlimit(resource.RLIMIT_CPU, (used + 20, used + 20))
for path in sys.argv[1:]:
    try:
        (read_safetensors if path.endswith(".safetensors") else load_weights)(path)
    except TinyllmError as error:
        print("refused")
    else:
        print("loaded")
"""
    paths = [*(str(tmp_path / name / "model") for name in expected), *map(str, files)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program, *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-500:]
    outcomes = done.stdout.split()
    refused = [*expected.values(), *(not path.name.startswith("ok_") for path in files)]
    assert outcomes == ["refused" if is_refused else "loaded" for is_refused in refused]
    places = [tmp_path, DATA / "bad_safetensors", Path.cwd()]
    assert [path for place in places for path in place.glob("**/PWNED*" if place == tmp_path else "PWNED*")] == []


def test_the_pickle_of_these_tests_would_have_worked(tmp_path):
    """What must never happen above does happen when the pickle is opened: the test can fail."""
    only_pickle(tmp_path / "model")
    pickle.loads((tmp_path / "model" / "pytorch_model.bin").read_bytes())
    (tmp_path / "model" / "PWNED2").unlink()  # fails where it is not there; it must not look like a find later


def test_loaded_weights_make_a_decoder():
    decoder = build_decoder(*load_weights(TINY / "llama_sharded"))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == 134592
