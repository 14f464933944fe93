"""One decoder layer: attention, then the MLP, each behind its norm."""

from jaxtyping import Float
from torch import Tensor, nn

from tinyllm.batch import FlatBatch
from tinyllm.config import ModelConfig
from tinyllm.layers.attention import AttendBatch
from tinyllm.layers.attention.gqa import GroupedQueryAttention
from tinyllm.layers.mlp import MLP
from tinyllm.layers.norm import RMSNorm


class DecoderLayer(nn.Module):
    """A pre-norm block. Its output is not yet added to the residual: the next norm does that."""

    def __init__(self, config: ModelConfig, attend_batch: AttendBatch):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GroupedQueryAttention(config, attend_batch)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Float[Tensor, "num_tokens hidden_size"],
        residual: Float[Tensor, "num_tokens hidden_size"] | None,
        cos: Float[Tensor, "num_tokens 1 half_dim"],
        sin: Float[Tensor, "num_tokens 1 half_dim"],
        layer_kv: Float[Tensor, "2 num_blocks block_size num_kv_heads head_dim"],
        batch: FlatBatch,
    ) -> tuple[Float[Tensor, "num_tokens hidden_size"], Float[Tensor, "num_tokens hidden_size"]]:
        """Return (output, residual); their sum is the stream."""
        attn_in, attn_residual = self.input_layernorm(x, residual)
        attn_out: Float[Tensor, "num_tokens hidden_size"] = self.self_attn(attn_in, cos, sin, layer_kv, batch)
        mlp_in, mlp_residual = self.post_attention_layernorm(attn_out, attn_residual)
        mlp_out: Float[Tensor, "num_tokens hidden_size"] = self.mlp(mlp_in)
        return mlp_out, mlp_residual
