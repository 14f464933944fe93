"""File tensors to parameters: GGUF files equal their Hugging Face twins, and a tensor that does not fit is named."""

import json
import time
import warnings
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from tinyllm.config import config_from_hf
from tinyllm.errors import ModelFileError, TinyllmError
from tinyllm.shapes import WORDS, evaluate
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.gguf_config import config_from_gguf
from tinyllm.weights.names import (
    PARAMETERS,
    expected_parameters,
    parameters_from_gguf,
    parameters_from_hf,
    shape_of,
    unpermute,
)

DATA = Path(__file__).parents[1] / "data"
TWINS = [
    ("llama_f32", "llama_gqa"),
    ("llama_head_dim", "llama_head_dim"),
    ("llama_tied_no_output", "llama_tied"),
    ("llama_rope_freqs", "llama3_rope"),
]


def gguf_model(name):
    file = read_gguf(DATA / "gguf" / f"{name}.gguf")
    return file, config_from_gguf(file)


def hf_model(name):
    folder = DATA / "tiny" / name
    return load_file(folder / "model.safetensors"), config_from_hf(json.loads((folder / "config.json").read_text()))


def equal(ours, expected):
    return list(ours) == list(expected) and all(torch.equal(ours[name], expected[name]) for name in ours)


def test_the_table_uses_the_words_of_the_glossary():
    words = {word for p in PARAMETERS for part in (p, *p.sources) for word in part.words.split()}
    assert words <= set(WORDS)
    assert {source.heads for p in PARAMETERS for source in p.sources} == {"", "num_heads", "num_kv_heads"}


def test_the_rows_of_the_sources_make_up_the_parameter():
    _, config = gguf_model("llama_head_dim")
    for parameter in expected_parameters(config):
        shape = shape_of(parameter.words, config)
        source_shapes = [shape_of(source.words, config) for source in parameter.sources]
        assert sum(source_shape[0] for source_shape in source_shapes) == shape[0]
        assert {source_shape[1:] for source_shape in source_shapes} == {shape[1:]}
    for word in ("q_size", "qkv_size", "gate_up_size"):
        assert config.dims()[word] == evaluate(WORDS[word].formula, config.dims())


@pytest.mark.parametrize(("gguf_name", "hf_name"), TWINS)
def test_gguf_equals_its_hf_twin(gguf_name, hf_name):
    ours = parameters_from_gguf(*gguf_model(gguf_name))
    assert equal(ours, parameters_from_hf(*hf_model(hf_name)))
    assert ("lm_head.weight" in ours) == (gguf_name != "llama_tied_no_output")


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mqa", "llama_tied"])
def test_fused_rows_are_q_k_v_and_gate_up(name):
    tensors, config = hf_model(name)
    parameters = parameters_from_hf(tensors, config)
    for i in range(config.num_layers):
        q, k, v = (tensors[f"model.layers.{i}.self_attn.{part}_proj.weight"] for part in "qkv")
        assert torch.equal(parameters[f"layers.{i}.self_attn.qkv_proj.weight"], torch.cat([q, k, v]))
        gate, up = (tensors[f"model.layers.{i}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        assert torch.equal(parameters[f"layers.{i}.mlp.gate_up_proj.weight"], torch.cat([gate, up]))
    assert torch.equal(parameters["norm.weight"], tensors["model.norm.weight"])
    assert {name: tuple(weight.shape) for name, weight in parameters.items()} == {
        parameter.name: shape_of(parameter.words, config) for parameter in expected_parameters(config)
    }


@pytest.mark.parametrize("name", ["llama_q8_0", "llama_q4_0", "llama_q4_1", "llama_f16", "llama_bf16"])
def test_types_agree_with_the_gguf_package(name):
    file, config = gguf_model(name)
    theirs = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(file.path).tensors
    }
    parameters = parameters_from_gguf(file, config)
    d, half, q_size = config.head_dim, config.half_dim, config.q_size
    for i in range(config.num_layers):
        qkv = parameters[f"layers.{i}.self_attn.qkv_proj.weight"]
        for head in range(config.num_heads):
            for j in range(half):  # pair j of a head: rows j and j + half_dim here, neighbours in the file
                rows = qkv[[head * d + j, head * d + j + half]]
                assert torch.equal(rows, theirs[f"blk.{i}.attn_q.weight"][head * d + 2 * j :][:2])
        k = unpermute(theirs[f"blk.{i}.attn_k.weight"], config.num_kv_heads)
        assert torch.equal(qkv[q_size:], torch.cat([k, theirs[f"blk.{i}.attn_v.weight"]]))
        assert torch.equal(parameters[f"layers.{i}.mlp.down_proj.weight"], theirs[f"blk.{i}.ffn_down.weight"])
    assert torch.equal(parameters["lm_head.weight"], theirs["output.weight"])
    assert torch.equal(parameters["embed_tokens.weight"], theirs["token_embd.weight"])


def test_unpermute_undoes_what_the_converter_does():
    weight = torch.arange(3 * 8 * 2).view(24, 2)
    pairs_together = weight.view(3, 2, 4, 2).transpose(1, 2).reshape(24, 2)
    assert torch.equal(unpermute(pairs_together, heads=3), weight)


@pytest.mark.parametrize("name", ["llama_q4_1", "llama_f32"])
def test_bfloat16_is_float32_rounded(name):
    exact = parameters_from_gguf(*gguf_model(name))
    rounded = parameters_from_gguf(*gguf_model(name), torch.bfloat16)
    assert equal(rounded, {name: weight.bfloat16() for name, weight in exact.items()})
    tensors, config = hf_model("llama_gqa")
    half = parameters_from_hf({name: tensor.half() for name, tensor in tensors.items()}, config)
    assert all(weight.dtype == torch.float32 for weight in half.values())


def test_each_parameter_owns_exactly_its_memory():
    tensors, config = hf_model("llama_gqa")
    for parameters in (parameters_from_gguf(*gguf_model("llama_f32")), parameters_from_hf(tensors, config)):
        for weight in parameters.values():
            assert weight.untyped_storage().nbytes() == weight.nbytes
            assert weight.is_contiguous()
        pointers = {weight.data_ptr() for weight in parameters.values()}
        assert len(pointers) == len(parameters)
        assert not pointers & {tensor.data_ptr() for tensor in tensors.values()}


def test_names_without_the_leading_model_also_load():
    tensors, config = hf_model("llama_gqa")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert equal(parameters_from_hf(bare, config), parameters_from_hf(tensors, config))
    with pytest.raises(ModelFileError, match="occurs twice"):
        parameters_from_hf(tensors | bare, config)


def test_rotary_buffers_are_ignored():
    tensors, config = hf_model("llama_gqa")
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.inv_freq": torch.ones(8),
    }
    assert equal(parameters_from_hf(tensors | buffers, config), parameters_from_hf(tensors, config))


def test_tied_embeddings_win_over_an_lm_head():
    tensors, config = hf_model("llama_tied")
    embedding = tensors["model.embed_tokens.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parameters = parameters_from_hf(tensors | {"lm_head.weight": embedding.clone()}, config)
    assert "lm_head.weight" not in parameters
    with pytest.warns(
        UserWarning, match=r"^model: lm_head.weight differs from the embedding, but the config ties them"
    ) as caught:
        parameters = parameters_from_hf(tensors | {"lm_head.weight": embedding + 1}, config)
    assert len(caught) == 1
    assert "lm_head.weight" not in parameters
    file, config = gguf_model("llama_f32")
    with pytest.warns(UserWarning, match=r"output.weight differs"):
        assert "lm_head.weight" not in parameters_from_gguf(file, replace(config, tie_word_embeddings=True))


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({K_PROJ: None}, f"{K_PROJ!r} is missing; expected [kv_size hidden_size] = [32, 64]"),
        ({K_PROJ: torch.zeros(31, 64)}, "is [31, 64]; expected [kv_size hidden_size] = [32, 64]"),
        ({K_PROJ: torch.zeros(64, 32)}, "is [64, 32]; expected"),
        ({K_PROJ: torch.zeros(32 * 64)}, "is [2048]; expected"),
        ({K_PROJ: torch.zeros(32, 64, dtype=torch.int8)}, "is torch.int8; expected floating point"),
        (
            {"model.layers.1.self_attn.k_proj.bias": torch.zeros(32)},
            "k_proj.bias' has no place in a Llama model (1 such)",
        ),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(112, 64)}, "layers.2.mlp.up_proj.weight' has no place"),
        ({"lm_head.weight": None}, "'lm_head.weight' is missing; expected [vocab_size hidden_size] = [256, 64]"),
        ({"model.norm.weight": torch.zeros(65)}, "'model.norm.weight' is [65]; expected [hidden_size] = [64]"),
    ],
)
def test_tensor_that_does_not_fit_is_named(changes, words):
    tensors, config = hf_model("llama_gqa")
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    with pytest.raises(ModelFileError) as error:
        parameters_from_hf(tensors, config)
    assert words in str(error.value)


def test_a_lying_layer_count_fails_at_once():
    start = time.perf_counter()
    tensors, hf_config = hf_model("llama_gqa")
    file, config = gguf_model("llama_f32")
    with pytest.raises(ModelFileError, match="2147483647 layers need 19327352823 tensors but the file has 21"):
        parameters_from_gguf(file, replace(config, num_layers=2**31 - 1))
    with pytest.raises(ModelFileError, match="but the file has 21"):
        parameters_from_hf(tensors, replace(hf_config, num_layers=2**31 - 1))
    assert time.perf_counter() - start < 5


def patched(key: str, value: int) -> bytes:
    """llama_f32.gguf with the 32-bit value of one metadata key replaced, in place."""
    data = bytearray((DATA / "gguf" / "llama_f32.gguf").read_bytes())
    position = data.index(key.encode()) + len(key) + 4  # behind the key comes the value's type
    data[position : position + 4] = value.to_bytes(4, "little")
    return bytes(data)


BROKEN_MODELS = {
    "model_head_count_0": (lambda: patched("llama.attention.head_count", 0), "num_heads 0"),
    "model_kv_3": (lambda: patched("llama.attention.head_count_kv", 3), "num_kv_heads 3"),
    "model_block_count_9": (lambda: patched("llama.block_count", 9), "9 layers need 81 tensors but the file has 21"),
    "model_block_count_2e32": (lambda: patched("llama.block_count", 2**32 - 1), "num_layers is 4294967295"),
    "model_embedding_65": (lambda: patched("llama.embedding_length", 65), "hidden_size 65"),
    "model_bos_out_of_range": (lambda: patched("tokenizer.ggml.bos_token_id", 2**31), "token id 2147483648 is outside"),
    "model_missing_tensor": (
        lambda: (DATA / "gguf" / "llama_f32.gguf").read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"),
        "'blk.1.ffn_up.weight' is missing; expected [intermediate_size hidden_size] = [112, 64]",
    ),
}


def test_every_broken_model_of_the_manifest_is_here():
    rows = [json.loads(line) for line in (DATA / "bad_gguf" / "manifest.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows if row["kind"] == "gguf_model"} == set(BROKEN_MODELS)


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_broken_model_is_one_clear_line(name, tmp_path):
    make, words = BROKEN_MODELS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(make())
    with pytest.raises(TinyllmError) as error:
        file = read_gguf(path)
        parameters_from_gguf(file, config_from_gguf(file))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
