"""The decoder: one flat batch in, logits for each request's last row out."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyllm.batch import FlatBatch
from tinyllm.config import ModelConfig
from tinyllm.kv_cache import KVCache
from tinyllm.layers.attention.backends import find_backend
from tinyllm.layers.decoder import DecoderLayer
from tinyllm.layers.embedding import Embedding
from tinyllm.layers.linear import Linear
from tinyllm.layers.lm_head import gather_rows, lm_head
from tinyllm.layers.norm import RMSNorm
from tinyllm.layers.rope import RotaryEmbedding


class Decoder(nn.Module):
    """A Llama-architecture decoder. Parameters have Hugging Face's names (without ``model.``), fused ones vLLM's.

    A new Decoder's weights are uninitialised; weights/ fills them, and nothing here ever invents any.
    """

    def __init__(self, config: ModelConfig, attention: str = "reference"):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config)
        attend_batch = find_backend(attention)
        self.layers = nn.ModuleList(DecoderLayer(config, attend_batch) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv_cache: KVCache) -> Float[Tensor, "num_logits vocab_size"]:
        """Run all layers over the flat batch, write its keys and values, and score the next token of each request."""
        x: Float[Tensor, "num_tokens hidden_size"] = self.embed_tokens(batch.token_ids)
        cos, sin = self.rotary(batch.positions)
        residual = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, cos, sin, kv_cache.layer(index), batch)
        hidden, _ = self.norm(x, residual)
        rows: Float[Tensor, "num_logits hidden_size"] = gather_rows(hidden, batch.logits_indices)
        weight: Float[Tensor, "vocab_size hidden_size"] = self._head_weight()
        logits: Float[Tensor, "num_logits vocab_size"] = lm_head(rows, weight)
        return logits

    def _head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
