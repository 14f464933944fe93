"""Attention has two seams, and every body at a seam has the same signature and gives the same numbers.

`attend(q, k, v)` is the attention of one request; `attend_batch(q, layer_kv, batch)` that of the flat batch.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from tinyllm.batch import FlatBatch


@runtime_checkable
class Attend(Protocol):
    """The seam of one request: causal attention of its queries to its own keys and values."""

    def __call__(
        self,
        q: Float[Tensor, "query_len num_heads head_dim"],
        k: Float[Tensor, "seq_len num_kv_heads head_dim"],
        v: Float[Tensor, "seq_len num_kv_heads head_dim"],
        /,
    ) -> Float[Tensor, "query_len num_heads head_dim"]:
        """One row of heads per query."""
        ...


@runtime_checkable
class AttendBatch(Protocol):
    """The seam of the flat batch: each token's queries against the cache of its own request."""

    def __call__(
        self,
        q: Float[Tensor, "num_tokens num_heads head_dim"],
        layer_kv: Float[Tensor, "2 num_blocks block_size num_kv_heads head_dim"],
        batch: FlatBatch,
        /,
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        """One row of heads per token."""
        ...
