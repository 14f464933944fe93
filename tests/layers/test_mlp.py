"""The SwiGLU block against torch's own pieces."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear, silu

from tinyllm.config import ModelConfig
from tinyllm.layers.mlp import MLP, silu_and_mul


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 99))
def test_silu_and_mul_equals_torch(num_tokens, intermediate_size, seed):
    gate, up = torch.randn(2, num_tokens, intermediate_size, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(silu_and_mul(torch.cat([gate, up], dim=-1)), silu(gate) * up)


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
