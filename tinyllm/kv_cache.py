"""The paged KV cache: one pool for all layers, written by slot, read through a block table."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyllm.config import CacheConfig, ModelConfig
from tinyllm.errors import ConfigError


class KVCache:
    """Keys and values of every layer, in blocks of `block_size` token slots; index 0 of the second axis is K, 1 is V.

    The axis order is the classic one that the FlashAttention interface takes layer by layer. A block has the same id in
    every layer, which is why a block table needs no layer axis.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: CacheConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (config.num_layers, 2, cache.num_blocks, cache.block_size, config.num_kv_heads, config.head_dim)
        try:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError:
            num_bytes = math.prod(shape) * dtype.itemsize
            raise ConfigError(
                f"a KV pool of {cache.num_blocks} blocks of {cache.block_size} tokens takes {num_bytes / 1e9:.1f} GB, "
                "which this machine does not give; lower num_blocks or block_size"
            ) from None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool: 2 * num_layers * num_slots * kv_size * bytes per value."""
        return self.kv.numel() * self.kv.element_size()

    def layer(self, index: int) -> Float[Tensor, "2 num_blocks block_size num_kv_heads head_dim"]:
        """One layer's keys and values: a view, nothing is copied."""
        return self.kv[index]


def write_kv(
    layer_kv: Float[Tensor, "2 num_blocks block_size num_kv_heads head_dim"],
    k: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    v: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    slot_mapping: Int[Tensor, " num_tokens"],
) -> None:
    """Put each token's key and value into its slot (vLLM: ``reshape_and_cache_flash``)."""
    k_slots: Float[Tensor, "num_slots num_kv_heads head_dim"] = layer_kv[0].flatten(0, 1)
    v_slots: Float[Tensor, "num_slots num_kv_heads head_dim"] = layer_kv[1].flatten(0, 1)
    k_slots.index_copy_(0, slot_mapping, k)
    v_slots.index_copy_(0, slot_mapping, v)


def gather_kv(
    layer_kv: Float[Tensor, "2 num_blocks block_size num_kv_heads head_dim"],
    block_ids: Int[Tensor, " num_req_blocks"],
    seq_len: int,
) -> tuple[Float[Tensor, "seq_len num_kv_heads head_dim"], Float[Tensor, "seq_len num_kv_heads head_dim"]]:
    """Read one request's keys and values, in order of position, through its row of the block table."""
    blocks: Float[Tensor, "2 num_req_blocks block_size num_kv_heads head_dim"] = layer_kv[:, block_ids]
    kv: Float[Tensor, "2 seq_len num_kv_heads head_dim"] = blocks.flatten(1, 2)[:, :seq_len]
    return kv[0], kv[1]
