"""A wrong shape handed to a public layer is one line that names the axis, or how many axes there are."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tinyllm import CacheConfig, ModelConfig, SamplingParams, ShapeError
from tinyllm.batch import build_batch, build_sampling_batch, map_slots
from tinyllm.config import RopeScaling
from tinyllm.kv_cache import KVCache, gather_kv, write_kv
from tinyllm.layers.attention import reference, sdpa
from tinyllm.layers.attention.gqa import GroupedQueryAttention, merge_heads, split_heads
from tinyllm.layers.attention.per_request import attend_batch, attend_request
from tinyllm.layers.decoder import DecoderLayer
from tinyllm.layers.embedding import Embedding
from tinyllm.layers.linear import Linear
from tinyllm.layers.lm_head import gather_rows, lm_head
from tinyllm.layers.mlp import MLP, silu_and_mul
from tinyllm.layers.norm import RMSNorm, add_residual, rms_norm
from tinyllm.layers.rope import RotaryEmbedding, apply_rope, rope_divisors
from tinyllm.model import Decoder
from tinyllm.sampler.sample import sample

CONFIG = ModelConfig(
    hidden_size=12,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=32,
    max_positions=64,
)
BATCH = build_batch([[1, 2, 3], [4]], [0, 5], [[1], [2, 3]], block_size=4)  # num_tokens 4
SAMPLING = build_sampling_batch([SamplingParams()] * 2, [1, 2], [3, 6], 32)
POOL = CacheConfig(block_size=4, num_blocks=5)
ATTEND_BATCH = partial(attend_batch, attend=reference.attend)
LAYER, ATTENTION = DecoderLayer(CONFIG, ATTEND_BATCH), GroupedQueryAttention(CONFIG, ATTEND_BATCH)

ones = torch.ones
ids = partial(torch.ones, dtype=torch.int64)
X, COS = ones(4, 12), ones(4, 1, 3)
Q, K = ones(4, 4, 6), ones(4, 2, 6)
KV = ones(2, 5, 4, 2, 6)

CASES = {
    "Embedding, two axes": (lambda: Embedding(32, 12)(ids(4, 1)), "2 axes, not 1"),
    "Embedding, float ids": (lambda: Embedding(32, 12)(ones(4)), "float32 is not Int"),
    "Linear, width": (lambda: Linear(12, 5)(ones(4, 13)), "in_size"),
    "Linear, rank": (lambda: Linear(12, 5)(ones(12)), "1 axes, not 2"),
    "rms_norm, weight": (lambda: rms_norm(X, ones(13), 1e-5), "hidden_size"),
    "RMSNorm, width": (lambda: RMSNorm(12, 1e-5)(ones(4, 13), None), "hidden_size"),
    "RMSNorm, residual": (lambda: RMSNorm(12, 1e-5)(X, ones(5, 12)), "num_tokens"),
    "add_residual, width": (lambda: add_residual(X, ones(4, 1)), "hidden_size"),
    "add_residual, rows": (lambda: add_residual(X, ones(1, 12)), "num_tokens"),
    "rope_divisors, rank": (lambda: rope_divisors(ones(3, 1), None), "2 axes, not 1"),
    "rope_divisors, factors": (lambda: rope_divisors(ones(3), RopeScaling("factors", factors=(1.0, 2.0))), "half_dim"),
    "RotaryEmbedding, rank": (lambda: RotaryEmbedding(CONFIG)(ids(2, 2)), "2 axes, not 1"),
    "RotaryEmbedding, float": (lambda: RotaryEmbedding(CONFIG)(ones(4)), "float32 is not Int"),
    "apply_rope, rows": (lambda: apply_rope(Q, COS, ones(3, 1, 3)), "num_tokens"),
    "apply_rope, pairs": (lambda: apply_rope(Q, COS, ones(4, 1, 2)), "half_dim"),
    "apply_rope, one angle for all": (
        lambda: apply_rope(Q, ones(4, 1, 1), ones(4, 1, 1)),
        "half_dim is 1, expected head_dim/2 = 3",
    ),
    "apply_rope, heads": (lambda: apply_rope(Q, ones(4, 4, 3), COS), "dimension 1 is 4"),
    "silu_and_mul, rank": (lambda: silu_and_mul(ones(4, 2, 6)), "3 axes, not 2"),
    "silu_and_mul, odd": (lambda: silu_and_mul(ones(4, 3)), "gate_up_size"),
    "MLP, width": (lambda: MLP(CONFIG)(ones(4, 13)), "in_size"),
    "MLP, rank": (lambda: MLP(CONFIG)(ones(1, 4, 12)), "3 axes, not 2"),
    "split_heads, rank": (lambda: split_heads(ones(4, 8, 6), 4, 2, 6), "3 axes, not 2"),
    "split_heads, width": (
        lambda: split_heads(ones(4, 50), 4, 2, 6),
        "qkv_size is 50, expected",
    ),
    "merge_heads, rank": (lambda: merge_heads(ones(4, 24)), "2 axes, not 3"),
    "attention, width": (lambda: ATTENTION(ones(4, 13), COS, COS, KV, BATCH), "in_size"),
    "attention, rows": (lambda: ATTENTION(X, ones(5, 1, 3), COS, KV, BATCH), "num_tokens"),
    "attention, head_dim": (lambda: ATTENTION(X, COS, COS, ones(2, 5, 4, 2, 8), BATCH), "head_dim"),
    "attention, kv heads": (lambda: ATTENTION(X, COS, COS, ones(2, 5, 4, 4, 6), BATCH), "num_kv_heads"),
    "reference.attend, value": (lambda: reference.attend(Q, K, ones(5, 2, 6)), "seq_len"),
    "reference.attend, kv heads": (lambda: reference.attend(Q, K, ones(4, 1, 6)), "num_kv_heads"),
    "reference.attend, head_dim": (lambda: reference.attend(Q, ones(4, 2, 8), K), "head_dim"),
    "sdpa.attend, value": (lambda: sdpa.attend(Q, K, ones(5, 2, 6)), "seq_len"),
    "sdpa.attend, kv heads": (lambda: sdpa.attend(Q, K, ones(4, 1, 6)), "num_kv_heads"),
    "sdpa.attend, head_dim": (lambda: sdpa.attend(Q, ones(4, 2, 8), K), "head_dim"),
    "attend_request, head_dim": (lambda: attend_request(ones(4, 4, 8), KV, ids(1), 4, reference.attend), "head_dim"),
    "attend_request, table": (lambda: attend_request(Q, KV, ids(1, 1), 4, reference.attend), "2 axes, not 1"),
    "attend_batch, head_dim": (lambda: ATTEND_BATCH(ones(4, 4, 8), KV, BATCH), "head_dim"),
    "attend_batch, kv rank": (lambda: ATTEND_BATCH(Q, KV[0], BATCH), "4 axes, not 5"),
    "attend_batch, kv pair": (lambda: ATTEND_BATCH(Q, ones(3, 5, 4, 2, 6), BATCH), "dimension 2 is 3"),
    "gather_kv, table": (lambda: gather_kv(KV, ids(1, 1), 4), "2 axes, not 1"),
    "gather_kv, too few blocks": (
        lambda: gather_kv(KV, ids(1), 9),
        "num_req_blocks is 1, expected",
    ),
    "gather_kv, float table": (lambda: gather_kv(KV, ones(1), 4), "float32 is not Int"),
    "write_kv, slots": (lambda: write_kv(KV, K, K, ids(3)), "num_tokens"),
    "write_kv, value": (lambda: write_kv(KV, K, ones(4, 1, 6), ids(4)), "num_kv_heads"),
    "DecoderLayer, width": (lambda: LAYER(ones(4, 13), None, COS, COS, KV, BATCH), "hidden_size"),
    "DecoderLayer, residual": (lambda: LAYER(X, ones(4, 13), COS, COS, KV, BATCH), "hidden_size"),
    "DecoderLayer, angles": (lambda: LAYER(X, None, COS, ones(4, 1, 4), KV, BATCH), "half_dim"),
    "gather_rows, rank": (lambda: gather_rows(X, ids(2, 1)), "2 axes, not 1"),
    "lm_head, width": (lambda: lm_head(X, ones(32, 13)), "hidden_size"),
    "Decoder, cache": (lambda: Decoder(CONFIG)(BATCH, KVCache(replace(CONFIG, num_kv_heads=4), POOL)), "num_kv_heads"),
    "FlatBatch, positions": (lambda: replace(BATCH, positions=ids(3)), "num_tokens"),
    "FlatBatch, table": (lambda: replace(BATCH, block_table=ids(3, 2)), "num_reqs"),
    "FlatBatch, seq_lens": (lambda: replace(BATCH, seq_lens=ids(3)), "num_reqs"),
    "FlatBatch, cu_seqlens_q": (lambda: replace(BATCH, cu_seqlens_q=ids(2)), "num_reqs"),
    "FlatBatch, query_lens_cpu": (lambda: replace(BATCH, query_lens_cpu=(2, 1)), "sums to 3, expected num_tokens=4"),
    "FlatBatch, seq_lens_cpu": (lambda: replace(BATCH, seq_lens_cpu=(3,)), "has 1 numbers, expected num_reqs=2"),
    "FlatBatch, float": (lambda: replace(BATCH, token_ids=ones(4)), "float32 is not Int"),
    "SamplingBatch, seeds": (lambda: replace(SAMPLING, seeds=ids(3)), "num_logits"),
    "SamplingBatch, top_p": (lambda: replace(SAMPLING, top_p=ones(2, 1)), "2 axes, not 1"),
    "map_slots, rows": (lambda: map_slots(ids(2, 3), ids(4), ids(5), 4), "num_tokens"),
    "map_slots, table": (lambda: map_slots(ids(6), ids(4), ids(4), 4), "1 axes, not 2"),
    "sample, rank": (lambda: sample(ones(32), SAMPLING), "1 axes, not 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_the_axis(case):
    call, fault = CASES[case]
    with pytest.raises(ShapeError) as caught:
        call()
    message = str(caught.value)
    assert fault in message, message
    assert "\n" not in message


def test_the_right_shapes_are_taken():
    """The same calls with nothing wrong: what the cases above change is what they are refused for."""
    with torch.inference_mode():
        assert ATTENTION(X, COS, COS, KV.clone(), BATCH).shape == (4, 12)
        assert LAYER(X, None, COS, COS, KV.clone(), BATCH)[1].shape == (4, 12)
        assert LAYER(X, X, COS, COS, KV.clone(), BATCH)[0].shape == (4, 12)
    assert reference.attend(Q, K, K).shape == sdpa.attend(Q, K, K).shape == (4, 4, 6)
    assert ATTEND_BATCH(Q, KV, BATCH).shape == (4, 4, 6)
    assert apply_rope(Q, COS, COS).shape == Q.shape
    assert merge_heads(split_heads(ones(4, 48), 4, 2, 6)[0]).shape == (4, 24)
    assert Decoder(CONFIG)(BATCH, KVCache(CONFIG, POOL)).shape == (2, 32)
    assert MLP(CONFIG)(X).shape == (4, 12)
    write_kv(KV.clone(), K, K, ids(4))
