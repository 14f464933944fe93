"""One decoder layer against transformers' Llama layer; the residual is left for the next norm to add."""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tinyllm.batch import build_batch
from tinyllm.config import CacheConfig, config_from_hf
from tinyllm.kv_cache import KVCache
from tinyllm.layers.attention.backends import find_backend
from tinyllm.layers.decoder import DecoderLayer
from tinyllm.layers.rope import RotaryEmbedding


def test_output_plus_residual_equals_transformers():
    hf_config = LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    config = config_from_hf(hf_config.to_dict())
    theirs, rotary = LlamaDecoderLayer(hf_config, 0), LlamaRotaryEmbedding(hf_config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.3)
    weights = theirs.state_dict()
    ours = DecoderLayer(config, find_backend("reference")).requires_grad_(False)
    attn, mlp = "self_attn.", "mlp."
    qkv = torch.cat([weights.pop(f"{attn}{name}_proj.weight") for name in "qkv"])
    gate_up = torch.cat([weights.pop(f"{mlp}{name}_proj.weight") for name in ("gate", "up")])
    ours.load_state_dict({**weights, f"{attn}qkv_proj.weight": qkv, f"{mlp}gate_up_proj.weight": gate_up})

    x, residual, batch = torch.randn(5, 24), torch.randn(5, 24), build_batch([[0] * 5], [0], [[2, 1]], 4)
    cos, sin = RotaryEmbedding(config)(batch.positions)
    with torch.inference_mode():
        out, stream = ours(x, residual, cos, sin, KVCache(config, CacheConfig(4, 3)).layer(0), batch)
        mask = torch.full((1, 1, 5, 5), float("-inf")).triu(1)
        angles = rotary(x, batch.positions[None])
        expected = theirs((x + residual)[None], attention_mask=mask, position_embeddings=angles)
    torch.testing.assert_close(out + stream, expected.reshape(5, 24), atol=1e-4, rtol=1e-4)
