"""The attention block: heads are cut out of the fused projection in place, and keys are written before they are read."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from tinyllm.batch import build_batch
from tinyllm.config import ModelConfig
from tinyllm.kv_cache import gather_kv
from tinyllm.layers.attention.backends import BACKENDS, FAST_BACKENDS, find_backend
from tinyllm.layers.attention.gqa import GroupedQueryAttention, merge_heads, split_heads
from tinyllm.layers.attention.reference import attend
from tinyllm.layers.rope import RotaryEmbedding, apply_rope

CONFIG = ModelConfig(
    hidden_size=12,
    intermediate_size=20,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=32,
    max_positions=64,
)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))
def test_heads_lie_in_the_row_as_queries_keys_values(num_tokens, group_size, num_kv_heads, head_dim):
    num_heads = num_kv_heads * group_size
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.arange(num_tokens * width, dtype=torch.float32).reshape(num_tokens, width)
    q, k, v = split_heads(qkv, num_heads, num_kv_heads, head_dim)
    assert (q.shape[1], k.shape[1], v.shape[1]) == (num_heads, num_kv_heads, num_kv_heads)
    for part, start in ((q, 0), (k, num_heads), (v, num_heads + num_kv_heads)):
        for head in range(part.shape[1]):
            columns = slice((start + head) * head_dim, (start + head + 1) * head_dim)
            assert torch.equal(part[:, head], qkv[:, columns])
        assert part.data_ptr() == qkv[:, start * head_dim :].data_ptr(), "a view, not a copy"
    assert torch.equal(merge_heads(q), qkv[:, : num_heads * head_dim])


def test_project_turn_write_attend_project():
    torch.manual_seed(0)
    attention = GroupedQueryAttention(CONFIG, find_backend("reference")).requires_grad_(False)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    x, batch, layer_kv = torch.randn(5, 12), build_batch([[0] * 5], [0], [[3, 1]], 4), torch.zeros(2, 5, 4, 2, 4)
    cos, sin = RotaryEmbedding(CONFIG)(batch.positions)
    out = attention(x, cos, sin, layer_kv, batch)
    q, k, v = linear(x, attention.qkv_proj.weight).split([24, 8, 8], dim=-1)
    q, k = (apply_rope(part.reshape(5, -1, 4), cos, sin) for part in (q, k))
    expected = linear(attend(q, k, v.reshape(5, 2, 4)).reshape(5, 24), attention.o_proj.weight)
    torch.testing.assert_close(out, expected)
    written_k, written_v = gather_kv(layer_kv, torch.tensor([3, 1]), 5)
    torch.testing.assert_close(written_k, k)
    torch.testing.assert_close(written_v, v.reshape(5, 2, 4))


def test_fast_backends_are_backends():
    assert FAST_BACKENDS.issubset(BACKENDS)
    assert "reference" not in FAST_BACKENDS, "the body to read runs checked"
