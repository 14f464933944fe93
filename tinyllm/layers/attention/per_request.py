"""Attention of the flat batch, one request after the other: gather its keys and values, then attend."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyllm.batch import FlatBatch
from tinyllm.kv_cache import gather_kv
from tinyllm.layers.attention import Attend


def attend_batch(
    q: Float[Tensor, "num_tokens num_heads head_dim"],
    layer_kv: Float[Tensor, "2 num_blocks block_size num_kv_heads head_dim"],
    batch: FlatBatch,
    attend: Attend,
) -> Float[Tensor, "num_tokens num_heads head_dim"]:
    """Cut q at the borders that cu_seqlens_q states, attend each piece, and lay the results flat again."""
    outputs = [
        attend_request(request_q, layer_kv, batch.block_table[i], batch.seq_lens_cpu[i], attend)
        for i, request_q in enumerate(q.split(batch.query_lens_cpu))
    ]
    return lay_flat(outputs)


def lay_flat(
    pieces: Sequence[Float[Tensor, "_query_len num_heads head_dim"]],
) -> Float[Tensor, "num_tokens num_heads head_dim"]:
    """The requests' rows behind each other, in batch order."""
    return torch.cat([*pieces])


def attend_request(
    q: Float[Tensor, "query_len num_heads head_dim"],
    layer_kv: Float[Tensor, "2 num_blocks block_size num_kv_heads head_dim"],
    block_table_row: Int[Tensor, " max_blocks"],
    seq_len: int,
    attend: Attend,
) -> Float[Tensor, "query_len num_heads head_dim"]:
    """One request's queries against its own keys: the block table is all that tells it from its neighbours."""
    block_size = layer_kv.shape[2]
    block_ids: Int[Tensor, " num_req_blocks"] = block_table_row[: -(-seq_len // block_size)]
    k, v = gather_kv(layer_kv, block_ids, seq_len)
    return attend(q, k, v)
