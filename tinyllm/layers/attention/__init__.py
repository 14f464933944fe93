"""Attention has two seams, and every body at a seam has the same signature and gives the same numbers.

`attend(q, k, v)` is the attention of one request; `attend_batch(q, layer_kv, batch)` that of the flat batch.
"""

from collections.abc import Callable

from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
AttendBatch = Callable[..., Tensor]  # (q, layer_kv, batch) -> one row per token
