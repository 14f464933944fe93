"""The comparison with transformers: it agrees where we do, and names the stage where a wrong weight sits."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tinyllm import LLM, ConfigError, RequestError
from tinyllm.config import ModelConfig, RopeScaling
from tinyllm.model import Decoder
from tinyllm.trace.terminal import WIDTH
from tinyllm.trace.verify import TOLERANCE, Verification, build_twin, compare, to_hf, verify
from tinyllm.weights.load import build_decoder, load_weights
from tinyllm.weights.names import expected_parameters, parameters_from_hf, shape_of

DATA = Path(__file__).parent.parent / "data"
MODELS = sorted([*(DATA / "tiny").glob("llama*"), *(DATA / "gguf").glob("llama_*.gguf")])
PROMPTS = [[5, 6, 7, 8, 9], [40], list(range(60, 100))]
SMALL = ModelConfig(32, 40, 3, 4, 2, 8, 50, 64)

Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("the comparison asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def random_weights(config: ModelConfig) -> Weights:
    generator = torch.Generator().manual_seed(3)
    shapes = {parameter.name: shape_of(parameter.words, config) for parameter in expected_parameters(config)}
    return {
        name: torch.rand(shape, generator=generator) + 0.5 if "norm" in name else
        torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
    }  # fmt: skip


def compare_small(config: ModelConfig = SMALL, ours: ModelConfig | None = None, **changed: float) -> Verification:
    """transformers with random weights against us with the same, but for one number of each changed one."""
    weights = random_weights(config)
    theirs = build_twin(config, weights)
    copies = {name: weight.clone() for name, weight in weights.items()}
    for name, value in changed.items():
        copies[name].view(-1)[7] = value
    return compare(build_decoder(ours or config, copies), theirs, PROMPTS[:2], block_size=4)


# --- where both are right -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_every_tiny_model_agrees(path):
    config, weights = load_weights(path)
    for attention in ("reference", "sdpa"):
        result = compare(build_decoder(config, weights, attention), build_twin(config, weights), PROMPTS, block_size=4)
        assert result.first_departure is None, list(result.lines())
        assert max(stage.relative for stage in result.stages) < TOLERANCE / 20
        assert [stage.stage for stage in result.stages] == [
            "embed_tokens", *(f"layer {i}" for i in range(config.num_layers)), "norm", "logits"
        ]  # fmt: skip
        assert [label for label, ours, theirs in result.next_tokens if ours == theirs] == ["A", "B", "C"]


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"num_kv_heads": 1},
        {"num_kv_heads": 4},
        {"head_dim": 6},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 0.1},
        {"rope_theta": 100.0},
        {"rope_scaling": RopeScaling("linear", 4)},
        {"rope_scaling": RopeScaling("llama3", 8, 1, 4, 16)},
        {"rope_scaling": RopeScaling("factors", factors=(1.0, 2.0, 3.0, 4.0))},
    ],
    ids=str,
)
def test_every_setting_agrees(changes):
    config = replace(SMALL, **changes)
    result = compare_small(config)
    assert result.first_departure is None, list(result.lines())
    differs = next(iter(changes)) in ("hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling")
    if differs:  # the same weights under the plain config are another model
        first = compare_small(config, ours=SMALL).first_departure
        assert first is not None and first.stage == "layer 0"


def test_the_default_model_agrees(smollm2_sdpa):
    llm = LLM(smollm2_sdpa)
    result = verify(llm, ["The capital of France is", "Water boils at 100 degrees"])
    lines = list(result.lines())
    assert lines[0].startswith("prefill in float32 of 2 prompts, 13 tokens; ours against transformers ")
    assert len(result.stages) == 33 and max(map(len, lines)) <= WIDTH
    assert result.next_tokens[0] == ("A", 7042, 7042)
    assert lines[-2:] == [
        "  next token    the likeliest is the same after 2 of 2 prompts",
        "no stage departs: no difference is above 0.001 of its row's rms",
    ]


# --- where one is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("layers.0.input_layernorm.weight", "layer 0"),
        ("layers.0.self_attn.qkv_proj.weight", "layer 0"),
        ("layers.1.self_attn.o_proj.weight", "layer 1"),
        ("layers.1.post_attention_layernorm.weight", "layer 1"),
        ("layers.2.mlp.gate_up_proj.weight", "layer 2"),
        ("layers.2.mlp.down_proj.weight", "layer 2"),
        ("norm.weight", "norm"),
        ("lm_head.weight", "logits"),
    ],
)
def test_one_wrong_number_names_its_stage(name, stage):
    result = compare_small(**{name: 2.0})
    first = result.first_departure
    assert first is not None and first.stage == stage
    text = list(result.lines())
    marked = [line for line in text if line.startswith("!")]
    assert marked[0].startswith(f"! {stage} ") and len(marked) >= 1
    assert text[-1].startswith(f"{stage} is the first stage that departs: ")
    assert max(map(len, text)) <= WIDTH


def test_a_wrong_embedding_is_named_with_its_place():
    weights = random_weights(SMALL)
    theirs = build_twin(SMALL, weights)
    ours = build_decoder(SMALL, {**weights, "embed_tokens.weight": weights["embed_tokens.weight"].clone()})
    ours.embed_tokens.weight[40, 3] += 1
    first = compare(ours, theirs, PROMPTS[:2]).first_departure
    assert first is not None
    assert (first.stage, first.where, round(first.largest, 5)) == ("embed_tokens", "B position 0, value 3", 1.0)


def test_nan_departs():
    first = compare_small(**{"layers.1.mlp.down_proj.weight": float("nan")}).first_departure
    assert first is not None and first.stage == "layer 1" and first.relative != first.relative


def test_another_next_token_is_shown():
    result = replace(compare_small(), next_tokens=(("A", 3, 3), ("B", 4, 5), ("C", 6, 7)))
    (line,) = [line for line in result.lines() if line.startswith("  next token")]
    assert line == "  next token    the likeliest is the same after 1 of 3 prompts; B: 4 here, 5 there"


# --- nothing is copied, nothing is left behind ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [True, False])
def test_their_weights_are_views_of_ours(is_tied):
    config = replace(SMALL, tie_word_embeddings=is_tied)
    weights = random_weights(config)
    storages = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    theirs = build_twin(config, weights)
    assert {weight.untyped_storage().data_ptr() for weight in theirs.parameters()} == storages
    assert not any(tensor.is_meta for tensor in [*theirs.parameters(), *theirs.buffers()])


def test_the_names_are_those_that_a_checkpoint_has():
    weights = random_weights(SMALL)
    back = parameters_from_hf(to_hf(SMALL, weights), SMALL)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


def test_the_model_stays_as_it_was(tiny_llm, tiny_model):
    llm = tiny_llm(tiny_model("llama_gqa", "reference", torch.bfloat16))
    decoder: Decoder = llm.loaded.decoder
    assert verify(llm, "Hello").first_departure is None
    assert all(weight.dtype == torch.bfloat16 for weight in decoder.parameters())
    assert not any(module._forward_hooks for module in decoder.modules())
    assert not llm.engine.has_unfinished_requests


# --- what cannot be compared ----------------------------------------------------------------------------------------------


def test_without_transformers_it_says_what_to_install(tiny_llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"needs transformers, which is not installed; run: pip install transformers$"
    ):
        verify(tiny_llm(), "Hello")


def test_a_model_that_transformers_does_not_take_is_refused_in_one_line():
    config = replace(SMALL, hidden_size=30)
    with pytest.raises(ConfigError, match=r"does not take this model: .*hidden size \(30\) is not a multiple") as info:
        build_twin(config, random_weights(config))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("prompts", ["", [[1] * 200], [[]], []])
def test_prompts_that_cannot_run_are_refused(prompts, tiny_llm):
    with pytest.raises(RequestError) as info:
        verify(tiny_llm(), prompts)
    assert "\n" not in str(info.value)
