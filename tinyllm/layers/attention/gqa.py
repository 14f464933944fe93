"""Grouped-query attention: project, turn, write, attend, project."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tinyllm.batch import FlatBatch
from tinyllm.config import ModelConfig
from tinyllm.kv_cache import write_kv
from tinyllm.layers.attention import AttendBatch
from tinyllm.layers.linear import Linear
from tinyllm.layers.rope import apply_rope


def split_heads(
    qkv: Float[Tensor, "num_tokens qkv_size"], num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[
    Float[Tensor, "num_tokens num_heads head_dim"],
    Float[Tensor, "num_tokens num_kv_heads head_dim"],
    Float[Tensor, "num_tokens num_kv_heads head_dim"],
]:
    """Read each row of the fused projection as query heads, then key heads, then value heads: a view."""
    heads: Float[Tensor, "num_tokens heads head_dim"]
    heads = rearrange(qkv, "num_tokens (heads head_dim) -> num_tokens heads head_dim", head_dim=head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def merge_heads(x: Float[Tensor, "num_tokens num_heads head_dim"]) -> Float[Tensor, "num_tokens q_size"]:
    """Lay each row's heads side by side again: a view."""
    return rearrange(x, "num_tokens num_heads head_dim -> num_tokens (num_heads head_dim)")


class GroupedQueryAttention(nn.Module):
    """num_heads query heads share num_kv_heads key/value heads in groups: MHA where the two are equal, MQA at 1."""

    def __init__(self, config: ModelConfig, attend_batch: AttendBatch):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = Linear(config.hidden_size, config.qkv_size)
        self.o_proj = Linear(config.q_size, config.hidden_size)
        self.attend_batch = attend_batch

    def forward(
        self,
        x: Float[Tensor, "num_tokens hidden_size"],
        cos: Float[Tensor, "num_tokens 1 half_dim"],
        sin: Float[Tensor, "num_tokens 1 half_dim"],
        layer_kv: Float[Tensor, "2 num_blocks block_size num_kv_heads head_dim"],
        batch: FlatBatch,
    ) -> Float[Tensor, "num_tokens hidden_size"]:
        """Every token attends to the tokens of its own request, up to itself.

        All keys and values of the step are written before any is read, so a prefill finds its own tokens in the cache.
        """
        qkv: Float[Tensor, "num_tokens qkv_size"] = self.qkv_proj(x)
        q_straight, k_straight, v = split_heads(qkv, self.num_heads, self.num_kv_heads, self.head_dim)
        q: Float[Tensor, "num_tokens num_heads head_dim"] = apply_rope(q_straight, cos, sin)
        k: Float[Tensor, "num_tokens num_kv_heads head_dim"] = apply_rope(k_straight, cos, sin)
        write_kv(layer_kv, k, v, batch.slot_mapping)
        attended: Float[Tensor, "num_tokens num_heads head_dim"] = self.attend_batch(q, layer_kv, batch)
        merged: Float[Tensor, "num_tokens q_size"] = merge_heads(attended)
        out: Float[Tensor, "num_tokens hidden_size"] = self.o_proj(merged)
        return out
