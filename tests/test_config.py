"""Settings: both spellings of a Hugging Face config, every derived size, and hostile values that must give ConfigError."""

import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyllm.config import CacheConfig, ModelConfig, RopeScaling, SchedulerConfig, config_from_hf, default_head_dim
from tinyllm.errors import ConfigError
from tinyllm.layers.rope import RotaryEmbedding

TINY = Path(__file__).parent / "data" / "tiny"
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
)
NO_SIZE = [0, -1, 2**31, 10**400, 2.0, "64", True, None, [64], float("nan")]

model = config_from_hf(SMALL)

# Anything that json.load can return, keys of a real config included.
hf_keys = st.sampled_from(
    [*SMALL, *LLAMA3, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "type",
     "rope_scaling", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "hidden_act", "mlp_bias",
     "attention_bias", "partial_rotary_factor", "architectures", "sliding_window", "use_sliding_window",
     "quantization_config"]
)  # fmt: skip
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["llama", "silu", "llama3", "linear", "default", "yarn"]),
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hf_keys | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def refused(message: str):
    """ConfigError whose one line contains `message`."""
    return pytest.raises(ConfigError, match=rf"^[^\n]*{message}[^\n]*$")


# ---- config.json -------------------------------------------------------------------------------------------------------


def test_what_a_minimal_config_means() -> None:
    """The defaults are LlamaConfig's of transformers."""
    assert model == ModelConfig(64, 112, 2, 4, 4, 16, 256, max_positions=2048, rms_norm_eps=1e-6, rope_theta=10000.0)


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in TINY.glob("*/config_v4.json")), ids=lambda folder: folder.name
)
def test_both_spellings_of_the_tiny_checkpoints_mean_the_same(folder: Path) -> None:
    new, old = (json.loads((folder / name).read_text()) for name in ("config.json", "config_v4.json"))
    config = config_from_hf(new)
    assert config == config_from_hf(old)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (
        64,
        new["num_hidden_layers"],
        new["vocab_size"],
    )
    assert config.head_dim == new["head_dim"] and config.num_kv_heads == new["num_key_value_heads"]
    assert config.tie_word_embeddings is new["tie_word_embeddings"]
    assert (config.rope_scaling is not None) == (folder.name in ("llama3_rope", "llama_linear"))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rope_in_both_spellings(type_key: str) -> None:
    scaling = {type_key: "llama3", **{key: value for key, value in LLAMA3.items() if key != "rope_type"}}
    expected = replace(model, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
    assert config_from_hf({**SMALL, "rope_theta": 500000.0, "rope_scaling": scaling}) == expected
    assert config_from_hf({**SMALL, "rope_parameters": {"rope_theta": 500000.0, **scaling}}) == expected
    linear = config_from_hf({**SMALL, "rope_scaling": {type_key: "linear", "factor": 4}})
    assert linear.rope_scaling == RopeScaling("linear", 4.0)
    assert config_from_hf({**SMALL, "rope_scaling": {type_key: "default"}}) == model


def test_two_spellings_that_agree_are_one() -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    assert config_from_hf({**SMALL, **both}).rope_scaling == RopeScaling("linear", 4.0)
    theta = {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500000}}
    assert config_from_hf({**SMALL, **theta}).rope_theta == 5e5


def test_a_sliding_window_that_is_switched_off_changes_nothing() -> None:
    assert config_from_hf({**SMALL, "sliding_window": 4096, "use_sliding_window": False}) == model


def test_null_means_absent() -> None:
    optional = ("architectures", "sliding_window", "quantization_config",
                "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
                "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "hidden_act", "mlp_bias")  # fmt: skip
    assert config_from_hf({**SMALL, **dict.fromkeys(optional)}) == model


def test_head_dim_may_differ_from_hidden_size_over_heads() -> None:
    config = config_from_hf({**SMALL, "head_dim": 32, "num_key_value_heads": 2})
    assert (config.q_size, config.kv_size, config.qkv_size, config.group_size) == (128, 64, 256, 2)


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (2, (2,)), ([2, 3], (2, 3)), ([], ()), (0, (0,))])
def test_end_tokens_are_none_one_or_several(eos: Any, ids: tuple[int, ...]) -> None:
    assert config_from_hf({**SMALL, "eos_token_id": eos}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2' is not supported; expected 'llama'"),
        ({"model_type": None}, "config.json has no model_type; expected 'llama'"),
        (
            {"architectures": ["MistralForCausalLM"]},
            r"architectures \['MistralForCausalLM'\] is not supported; expected \['LlamaForCausalLM'\]",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM' is not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported; expected 1"),
        ({"sliding_window": 4096}, "sliding_window 4096 is not supported; expected null: full attention"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096 is not supported"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config .*'gptq'.* quantised checkpoints need",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters disagree: .*; expected one of them, or the same",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            r"rope_theta 10000\.0 and rope_parameters' 500000\.0 disagree; expected one",
        ),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; expected one of silu, gelu, gelu_pytorch_tanh"),
        ({"hidden_act": ["silu"]}, "is not supported; expected one of silu"),
        ({"attention_bias": True}, "attention_bias True is not supported; expected False"),
        ({"mlp_bias": True}, "mlp_bias True is not supported; expected False"),
        (
            {"vocab_size": None},
            "config.json has no vocab_size; expected hidden_size, intermediate_size, num_hidden_layers",
        ),
        ({"num_attention_heads": 0}, "num_heads 0 must be positive whole numbers"),
        ({"num_attention_heads": 6}, "hidden_size 64 is no multiple of num_heads 6, and head_dim is not given"),
        ({"num_attention_heads": 64}, "head_dim 1 is odd; rotary embedding turns pairs"),
        ({"num_key_value_heads": 3}, "num_heads 4 cannot share num_kv_heads 3 evenly"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0; expected a whole number from 1 to 2147483647"),
        ({"head_dim": 0}, "head_dim is 0; expected a whole number from 1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; expected a number above 0 and below 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected"),
        ({"rope_theta": -1.0}, r"rope_theta is -1\.0; expected a positive number"),
        ({"rope_theta": math.nan}, "rope_theta is nan; expected"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; expected true or false"),
        ({"eos_token_id": 256}, "special token id 256 is outside the vocabulary of 256"),
        ({"eos_token_id": [2, "3"]}, "special token id '3' is outside"),
        ({"bos_token_id": -1}, "special token id -1 is outside"),
        ({"rope_scaling": [1]}, "rope_scaling or rope_parameters is .*; expected an object"),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope scaling 'yarn' is not supported; expected default, linear or llama3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling holds 0; expected positive numbers"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope scaling holds '2'; expected"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            r"low_freq_factor 4\.0 must be below high_freq_factor 4\.0",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"partial_rotary_factor 0\.5 is not supported; expected 1",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict, message: str) -> None:
    with refused(message):
        config_from_hf({**SMALL, **change})


@settings(max_examples=300)
@given(changes=st.dictionaries(hf_keys, json_values, max_size=6))
@example({"rope_scaling": {"rope_type": []}})
@example({"rope_theta": 10**400})
@example({"rope_theta": 10**300})
@example({"rope_parameters": {**LLAMA3, "factor": 10**400}})
def test_a_hostile_config_gives_a_model_config_or_one_line(changes: dict) -> None:
    """Whatever the file holds: a usable config, down to the rotary table, or ConfigError."""
    try:
        config = config_from_hf({**SMALL, **changes})
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert config.qkv_size == (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        if config.head_dim < 10_000:
            assert RotaryEmbedding(config).inv_freq(torch.device("cpu")).shape == (config.half_dim,)


@settings(max_examples=100)
@given(value=json_values)
def test_any_json_document_gives_config_error(value: Any) -> None:
    with pytest.raises(ConfigError):
        config_from_hf(value)


# ---- ModelConfig -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", SIZES)
@pytest.mark.parametrize("value", NO_SIZE, ids=lambda value: f"{value!r:.12}")
def test_a_size_is_a_positive_whole_number(word: str, value: Any) -> None:
    with refused(f"{word} is .*; expected a whole number from 1 to 2147483647"):
        replace(model, **{word: value})


def test_configs_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        model.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]


@given(kv=st.integers(1, 8), group=st.integers(1, 8), half=st.integers(1, 64), width=st.integers(1, 100))
def test_derived_sizes(kv: int, group: int, half: int, width: int) -> None:
    config = replace(model, num_heads=kv * group, num_kv_heads=kv, head_dim=2 * half, intermediate_size=width)
    assert (config.group_size, config.half_dim) == (group, half)
    assert config.q_size == kv * group * 2 * half and config.kv_size == kv * 2 * half
    assert config.qkv_size == config.q_size + config.kv_size + config.kv_size
    assert config.gate_up_size == width + width
    assert all(config.dims()[word] == getattr(config, word) for word in config.dims())


def test_default_head_dim() -> None:
    assert default_head_dim(576, 9) == 64
    for hidden_size, num_heads in ((True, 1), (64, 0), (64, "4"), (64.0, 4), (None, 4), (10**400, 10)):
        with refused("must be positive whole numbers"):
            default_head_dim(hidden_size, num_heads)


# ---- rope scaling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [0, -1.0, math.inf, math.nan, "2", True, None, 10**400], ids=lambda value: f"{value!r:.12}"
)
@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor", "original_max_positions"])
def test_rope_scaling_holds_positive_numbers(name: str, value: Any) -> None:
    with refused("rope scaling holds .*; expected positive numbers"):
        RopeScaling("llama3", **{name: value})


def test_rope_factors_fit_their_rule_and_the_head() -> None:
    assert replace(model, rope_scaling=RopeScaling("factors", factors=(1.0,) * 8)).half_dim == 8
    with refused("rope_freqs has 7 factors; expected half_dim = 8"):
        replace(model, rope_scaling=RopeScaling("factors", factors=(1.0,) * 7))
    with refused("rope scaling holds nan"):
        RopeScaling("factors", factors=(1.0, math.nan))
    with refused("rope scaling factors has 0 factors"):
        RopeScaling("factors")
    with refused("rope scaling linear has 2 factors"):
        RopeScaling("linear", factors=(1.0, 2.0))
    with refused("rope scaling 'yarn' is not supported; expected linear, llama3, factors"):
        RopeScaling("yarn")  # pyright: ignore[reportArgumentType]


# ---- CacheConfig and SchedulerConfig -----------------------------------------------------------------------------------


def test_cache_sizes() -> None:
    assert (CacheConfig().num_slots, CacheConfig().max_cached_tokens) == (8208, 8192)
    assert CacheConfig(1, 2).dims() == {"block_size": 1, "num_blocks": 2, "num_slots": 2}


@pytest.mark.parametrize("value", [0, -16, 2**16 + 1, 16.0, "16", True, None])
def test_a_block_holds_1_to_65536_tokens(value: Any) -> None:
    with refused("block_size is .*; expected 1 to 65536 tokens"):
        CacheConfig(block_size=value)
    assert CacheConfig(block_size=1).block_size == 1 and CacheConfig(block_size=2**16).block_size == 2**16


@pytest.mark.parametrize("value", [1, 0, -1, 513.0, "513", True, None])
def test_a_pool_has_a_null_block_and_one_more(value: Any) -> None:
    with refused(r"num_blocks is .*; expected 2 \(block 0 is the null block\) to 2147483647"):
        CacheConfig(num_blocks=value)


@pytest.mark.parametrize("name", ["max_model_len", "max_num_batched_tokens", "max_num_seqs"])
@pytest.mark.parametrize("value", NO_SIZE, ids=lambda value: f"{value!r:.12}")
def test_a_limit_is_a_positive_whole_number(name: str, value: Any) -> None:
    with refused(f"{name} is .*; expected a whole number from 1"):
        SchedulerConfig(**{name: value})


def test_the_budget_covers_one_token_of_every_running_request() -> None:
    assert SchedulerConfig(8, 4, 4).max_num_seqs == 4
    with refused(
        "max_num_batched_tokens 3 is below max_num_seqs 4: every running request needs one token a step; raise the"
    ):
        SchedulerConfig(8, 3, 4)
