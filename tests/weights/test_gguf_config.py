"""GGUF metadata to ModelConfig: the twins agree, and every wrong key is one clear line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tinyllm.config import RopeScaling, config_from_hf
from tinyllm.errors import ConfigError
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.gguf_config import config_from_gguf

DATA = Path(__file__).parents[1] / "data"
TWINS = [
    ("llama_f32", "llama_gqa"),
    ("llama_head_dim", "llama_head_dim"),
    ("llama_tied_no_output", "llama_tied"),
    ("llama_rope_freqs", "llama3_rope"),
]


def edited(changes, name="llama_f32", without=()):
    """The file with some metadata changed, or left out."""
    file = read_gguf(DATA / "gguf" / f"{name}.gguf")
    kept = {key: value for key, value in file.metadata.items() if key not in without}
    return replace(file, metadata=kept | changes)


@pytest.mark.parametrize(("gguf_name", "hf_name"), TWINS)
def test_twins_agree(gguf_name, hf_name):
    ours = config_from_gguf(read_gguf(DATA / "gguf" / f"{gguf_name}.gguf"))
    twin = config_from_hf(json.loads((DATA / "tiny" / hf_name / "config.json").read_text()))
    assert ours.rms_norm_eps == pytest.approx(twin.rms_norm_eps, rel=1e-7)  # a GGUF stores it as float32
    same = {"name": "", "rms_norm_eps": 1e-5, "rope_scaling": None}
    assert replace(ours, **same) == replace(twin, **same)


def test_rope_scaling_forms():
    linear = config_from_gguf(read_gguf(DATA / "gguf" / "llama_linear.gguf"))
    assert linear.rope_scaling == RopeScaling("linear", 4.0)
    file = read_gguf(DATA / "gguf" / "llama_rope_freqs.gguf")
    scaling = config_from_gguf(file).rope_scaling
    assert scaling == RopeScaling("factors", factors=tuple(file.read("rope_freqs.weight").tolist()))
    assert scaling.factors[0] == 1.0  # the fastest pair is left alone by the llama3 rule, the slowest divided by 8
    assert scaling.factors[-1] == 8.0
    assert config_from_gguf(edited({})).rope_scaling is None
    assert (
        config_from_gguf(edited({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0})).rope_scaling
        is None
    )
    assert config_from_gguf(edited({"llama.rope.scaling.factor": 2.0})).rope_scaling == RopeScaling("linear", 2.0)
    assert config_from_gguf(edited({"llama.rope.scale_linear": 2.0})).rope_scaling == RopeScaling("linear", 2.0)


def test_keys_that_change_nothing():
    neutral = {
        "llama.attention.causal": True,
        "llama.attention.scale": 0.25,
        "llama.attention.clamp_kqv": 0.0,
        "llama.attention.sliding_window": 0,
        "llama.final_logit_softcapping": 0.0,
        "llama.logit_scale": 1.0,
        "llama.residual_scale": 0.0,
    }
    assert config_from_gguf(edited(neutral)) == config_from_gguf(edited({}))


def test_absent_keys():
    without = ("llama.attention.head_count_kv", "llama.rope.freq_base", "llama.vocab_size",
               "llama.rope.dimension_count", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")  # fmt: skip
    config = config_from_gguf(edited({}, without=without))
    assert (config.num_kv_heads, config.rope_theta, config.vocab_size, config.head_dim) == (4, 10000.0, 256, 16)
    assert (config.bos_token_id, config.eos_token_ids, config.name) == (None, (), "llama_f32")


def test_end_of_turn_also_ends_the_text():
    assert config_from_gguf(edited({"tokenizer.ggml.eot_token_id": 9})).eos_token_ids == (2, 9)
    assert config_from_gguf(edited({"tokenizer.ggml.eot_token_id": 2})).eos_token_ids == (2,)


def test_a_name_that_is_no_utf8_can_be_printed():
    assert config_from_gguf(edited({"general.name": "a\udcff"})).name == "a\ufffd"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2' is not supported; expected 'llama'"),
        ({"general.architecture": 7}, "general.architecture is 7; expected a string"),
        ({"llama.expert_count": 4}, "mixture of experts is not supported"),
        ({"llama.embedding_length": "64"}, "llama.embedding_length is '64'; expected a whole number"),
        ({"llama.embedding_length": 64.0}, "expected a whole number"),
        ({"llama.embedding_length": True}, "expected a whole number"),
        ({"llama.embedding_length": 65}, "65"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count is [4, 4]; expected a whole number"),
        ({"llama.attention.head_count": 0}, "positive whole numbers"),
        ({"llama.attention.head_count_kv": 3}, "num_heads 4 cannot share num_kv_heads 3"),
        ({"llama.attention.head_count_kv": 0}, "num_kv_heads is 0"),
        ({"llama.block_count": 2**32}, "num_layers is 4294967296"),
        ({"llama.block_count": -1}, "num_layers is -1"),
        ({"llama.attention.key_length": 32}, "llama.rope.dimension_count is 16; expected head_dim = 32"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8; expected head_dim = 16"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; expected head_dim = 16"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False, which is not supported; expected true"),
        ({"llama.attention.causal": 1}, "llama.attention.causal is 1, which is not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5, which is not supported; expected 0 or 1, or no key"),
        ({"llama.logit_scale": "1"}, "llama.logit_scale is '1'; expected a number"),
        ({"llama.embedding_scale": 12.0}, "llama.embedding_scale is 12.0, which is not supported"),
        ({"llama.residual_scale": float("nan")}, "llama.residual_scale is nan, which is not supported"),
        ({"llama.attention.clamp_kqv": 0.5}, "llama.attention.clamp_kqv is 0.5, which is not supported; expected 0,"),
        ({"llama.attention.max_alibi_bias": 8.0}, "llama.attention.max_alibi_bias is 8.0, which is not supported"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0, which is not supported"),
        ({"llama.attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0, which is not supported"),
        ({"llama.attention.scale": 0.01}, "llama.attention.scale is 0.01; expected 1 / sqrt(head_dim = 16), or no key"),
        ({"llama.rope.freq_base": "x" * 1000}, "llama.rope.freq_base is 'xxx"),
        ({"llama.rope.freq_base": float("nan")}, "rope_theta"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_norm_eps"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "rope scaling holds 0.0"),
        ({"tokenizer.ggml.bos_token_id": 2**31}, "special token id 2147483648 is outside the vocabulary of 256"),
        ({"tokenizer.ggml.eos_token_id": -1}, "special token id -1"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id is '2'; expected a whole number"),
    ],
)
def test_wrong_value(changes, words):
    with pytest.raises(ConfigError) as error:
        config_from_gguf(edited(changes))
    assert words in str(error.value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "key",
    ["general.architecture", "llama.block_count", "llama.context_length", "llama.embedding_length",
     "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon"],
)  # fmt: skip
def test_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"the file has no {key}"):
        config_from_gguf(edited({}, without=(key,)))


def test_rope_freqs_that_do_not_fit():
    both = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    with pytest.raises(ConfigError, match=r"both rope_freqs.weight and a linear rope scaling"):
        config_from_gguf(edited(both, name="llama_rope_freqs"))
    wider = {"llama.rope.dimension_count": 32, "llama.attention.key_length": 32}
    with pytest.raises(ConfigError, match="rope_freqs has 8 factors; expected half_dim = 16"):
        config_from_gguf(edited(wider, name="llama_rope_freqs"))
    file = edited({})
    tensors = file.tensors | {"rope_freqs.weight": file.tensors["output.weight"]}
    with pytest.raises(ConfigError, match=r"rope_freqs.weight is \[256, 64\]; expected \[half_dim\]"):
        config_from_gguf(replace(file, tensors=tensors))
