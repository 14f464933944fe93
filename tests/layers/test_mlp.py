"""The SwiGLU block against torch's own pieces."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear, silu
from transformers.activations import ACT2FN

from tinyllm.config import HIDDEN_ACTS, ModelConfig
from tinyllm.layers.mlp import GATES, MLP, silu_and_mul


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 99))
def test_silu_and_mul_equals_torch(num_tokens, intermediate_size, seed):
    gate, up = torch.randn(2, num_tokens, intermediate_size, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(silu_and_mul(torch.cat([gate, up], dim=-1)), silu(gate) * up)


@pytest.mark.parametrize("hidden_act", HIDDEN_ACTS)
def test_every_activation_equals_transformers(hidden_act):
    gate, up = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0))
    expected = ACT2FN[hidden_act](gate) * up
    torch.testing.assert_close(GATES[hidden_act](torch.cat([gate, up], dim=-1)), expected)


def test_gate_and_up_are_the_two_halves_of_one_product():
    config = ModelConfig(
        hidden_size=6,
        intermediate_size=10,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=8,
        max_positions=8,
    )
    gate, up, down = torch.randn(10, 6), torch.randn(10, 6), torch.randn(6, 10)
    mlp = MLP(config).requires_grad_(False)
    mlp.gate_up_proj.weight.copy_(torch.cat([gate, up]))
    mlp.down_proj.weight.copy_(down)
    x = torch.randn(5, 6)
    torch.testing.assert_close(mlp(x), linear(silu(linear(x, gate)) * linear(x, up), down))
    torch.testing.assert_close(mlp(x[2:3]), mlp(x)[2:3]), "no token sees another one"
