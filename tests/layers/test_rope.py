"""Rotary embedding against transformers' Llama, and the law that makes it useful."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tinyllm.config import ModelConfig, RopeScaling, config_from_hf
from tinyllm.layers.rope import RotaryEmbedding, apply_rope, rope_divisors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def hf_config(head_dim: int, theta: float, rope: dict) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta, **rope},
    )


ropes = st.sampled_from([{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])


@given(st.integers(1, 40), st.sampled_from([100.0, 10000.0, 500000.0]), ropes, st.integers(0, 99))
def test_turning_queries_and_keys_equals_transformers(half_dim, theta, rope, seed):
    theirs = hf_config(2 * half_dim, theta, rope)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(6, 2, 2 * half_dim, generator=generator), torch.randn(6, 1, 2 * half_dim, generator=generator)
    positions = torch.randint(0, 4096, (6,), generator=generator)
    their_rotary = LlamaRotaryEmbedding(theirs)
    their_cos, their_sin = their_rotary(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], their_cos, their_sin
    )
    rotary = RotaryEmbedding(config_from_hf(theirs.to_dict()))
    torch.testing.assert_close(rotary.inv_freq(q.device), their_rotary.inv_freq, rtol=1e-6, atol=0)
    cos, sin = rotary(positions)
    torch.testing.assert_close(apply_rope(q, cos, sin), expected_q[0].transpose(0, 1), atol=2e-3, rtol=0)
    torch.testing.assert_close(apply_rope(k, cos, sin), expected_k[0].transpose(0, 1), atol=2e-3, rtol=0)


def config(head_dim: int = 8, scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(
        hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=head_dim, vocab_size=8,
        max_positions=64, rope_scaling=scaling,
    )  # fmt: skip


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 99))
def test_only_the_distance_between_two_positions_counts(first, second, shift, seed):
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(seed))
    rotary = RotaryEmbedding(config())

    def score(q_position: int, k_position: int) -> torch.Tensor:
        q_turned = apply_rope(q, *rotary(torch.tensor([q_position])))
        return (q_turned * apply_rope(k, *rotary(torch.tensor([k_position])))).sum()

    torch.testing.assert_close(score(first, second), score(first + shift, second + shift), atol=1e-3, rtol=0)


def test_position_zero_turns_nothing():
    x = torch.randn(3, 2, 8)
    assert torch.equal(apply_rope(x, *RotaryEmbedding(config())(torch.zeros(3, dtype=torch.int64))), x)


def test_turning_keeps_the_length_of_every_head():
    x = torch.randn(5, 2, 8)
    turned = apply_rope(x, *RotaryEmbedding(config())(torch.tensor([0, 1, 7, 300, 9000])))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(turned[1:], x[1:])


def test_bfloat16_is_turned_in_float32():
    x = torch.randn(4, 2, 8).to(torch.bfloat16)
    cos, sin = RotaryEmbedding(config())(torch.tensor([0, 3, 60, 1000]))
    turned = apply_rope(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rope(x.float(), cos, sin).to(torch.bfloat16))


def test_divisors():
    inv_freq = torch.tensor([1.0, 0.1, 0.001])
    assert rope_divisors(inv_freq, None).tolist() == [1, 1, 1]
    assert rope_divisors(inv_freq, RopeScaling("linear", factor=4)).tolist() == [4, 4, 4]
    assert rope_divisors(inv_freq, RopeScaling("factors", factors=(1, 2, 5))).tolist() == [1, 2, 5]


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    # 64 trained positions: waves up to 64 / 4 stay, from 64 / 1 on they are divided by 8, between them is a blend.
    wavelengths = torch.tensor([2.0, 15.9, 32.0, 64.1, 1000.0])
    divisors = rope_divisors(2 * torch.pi / wavelengths, RopeScaling("llama3", 8, 1, 4, 64))
    assert divisors[[0, 1, 3, 4]].tolist() == pytest.approx([1, 1, 8, 8])
    keep = (64 / 32 - 1) / (4 - 1)
    assert divisors[2].item() == pytest.approx(1 / (keep + (1 - keep) / 8))
