"""Attention of one request in six named steps: the body to read."""

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor


def causal_mask(query_len: int, seq_len: int, device: torch.device) -> Bool[Tensor, "query_len seq_len"]:
    """Which keys each query must not see: those behind its own position.

    The last query stands at the last key, so the mask leans against the right edge.

    >>> causal_mask(2, 4, torch.device("cpu")).int()
    tensor([[0, 0, 0, 1],
            [0, 0, 0, 0]], dtype=torch.int32)
    """
    assert query_len <= seq_len, f"{query_len} queries stand at the end of only {seq_len} keys"
    is_allowed: Bool[Tensor, "query_len seq_len"]
    is_allowed = torch.ones(query_len, seq_len, dtype=torch.bool, device=device).tril(diagonal=seq_len - query_len)
    return ~is_allowed


def attend(
    q: Float[Tensor, "query_len num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
) -> Float[Tensor, "query_len num_heads head_dim"]:
    """Every query reads the keys up to its own position: softmax(q k^T / sqrt(head_dim)) v, head by head.

    Query head h reads key/value head h // group_size; nothing is copied for it (arXiv 1706.03762, 2305.13245).

    >>> one_key = torch.ones(1, 1, 2)
    >>> attend(torch.zeros(1, 2, 2), one_key, 3 * one_key)   # two query heads share one key: both read its value
    tensor([[[3., 3.],
             [3., 3.]]])
    """
    query_len, _, head_dim = q.shape
    seq_len, num_kv_heads, _ = k.shape
    grouped_q: Float[Tensor, "query_len num_kv_heads group_size head_dim"] = rearrange(
        q,
        "query_len (num_kv_heads group_size) head_dim -> query_len num_kv_heads group_size head_dim",
        num_kv_heads=num_kv_heads,
    )
    scores: Float[Tensor, "num_kv_heads group_size query_len seq_len"] = einsum(
        grouped_q,
        k,
        "query_len num_kv_heads group_size head_dim, seq_len num_kv_heads head_dim -> num_kv_heads group_size query_len seq_len",
    )
    scaled: Float[Tensor, "num_kv_heads group_size query_len seq_len"] = scores.float() * head_dim**-0.5
    is_hidden: Bool[Tensor, "query_len seq_len"] = causal_mask(query_len, seq_len, q.device)
    masked: Float[Tensor, "num_kv_heads group_size query_len seq_len"] = scaled.masked_fill(is_hidden, float("-inf"))
    weights: Float[Tensor, "num_kv_heads group_size query_len seq_len"] = masked.softmax(dim=-1).to(v.dtype)
    out: Float[Tensor, "query_len num_kv_heads group_size head_dim"] = einsum(
        weights,
        v,
        "num_kv_heads group_size query_len seq_len, seq_len num_kv_heads head_dim -> query_len num_kv_heads group_size head_dim",
    )
    return rearrange(out, "query_len num_kv_heads group_size head_dim -> query_len (num_kv_heads group_size) head_dim")
