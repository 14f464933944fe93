"""Attention of one request by torch's fused kernel: the same numbers as reference.py without the big score matrix."""

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinyllm.layers.attention.reference import causal_mask


def attend(
    q: Float[Tensor, "query_len num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
) -> Float[Tensor, "query_len num_heads head_dim"]:
    """The contract of reference.attend in one call; the expanded key and value are views with a stride of 0."""
    query_len, num_heads, _ = q.shape
    seq_len, num_kv_heads, _ = k.shape
    group_size = num_heads // num_kv_heads
    grouped_q: Float[Tensor, "num_kv_heads group_size query_len head_dim"]
    grouped_q = q.unflatten(1, (num_kv_heads, group_size)).permute(1, 2, 0, 3)
    shared_k: Float[Tensor, "num_kv_heads group_size seq_len head_dim"]
    shared_k = k.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)
    shared_v: Float[Tensor, "num_kv_heads group_size seq_len head_dim"]
    shared_v = v.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)
    is_whole_prefill = query_len == seq_len
    # One query row at the last key sees every key; a later chunk needs the mask that leans against the right edge.
    mask: Bool[Tensor, "query_len seq_len"] | None
    mask = None if is_whole_prefill or query_len == 1 else ~causal_mask(query_len, seq_len, q.device)
    out: Float[Tensor, "num_kv_heads group_size query_len head_dim"]
    out = scaled_dot_product_attention(grouped_q, shared_k, shared_v, attn_mask=mask, is_causal=is_whole_prefill)
    return out.permute(2, 0, 1, 3).flatten(1, 2)
