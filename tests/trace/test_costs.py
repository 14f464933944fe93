"""Costs: nothing is left out, linears equal torch's own counter, attention its pairs counted one by one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllm.batch import build_batch
from tinyllm.config import CacheConfig, ModelConfig
from tinyllm.kv_cache import KVCache
from tinyllm.layers.linear import Linear
from tinyllm.model import Decoder
from tinyllm.trace import Ledger, Recorder
from tinyllm.trace.costs import COMPOSITES, KIND_LETTERS, PARTS, STAGES
from tinyllm.trace.record import collect_operations

SMOLLM2 = ModelConfig(
    hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152,
    max_positions=8192, rope_theta=100000.0, tie_word_embeddings=True,
)  # fmt: skip


def test_every_function_that_runs_is_a_stage_a_composite_or_a_part(traced):
    """A new layer that nobody priced fails here instead of costing nothing."""
    llm, _ = traced
    for request in llm.make_requests([[1, 2, 3]]):
        llm.engine.add_request(request)
    with Recorder() as recorder:
        llm.engine.step()
    ran = {call.name for call in recorder.walk()}
    assert ran <= STAGES.keys() | COMPOSITES | PARTS, ran
    assert not (STAGES.keys() & COMPOSITES) and not (STAGES.keys() & PARTS) and not (COMPOSITES & PARTS)


def trace_on_meta(config: ModelConfig, prompt_len: int):
    """The operations of one prefill of SmolLM2's sizes, and torch's FLOP counter over the same run; no weights."""
    with torch.device("meta"):
        decoder = Decoder(config, "reference")
    cache = CacheConfig(16, 1 + -(-prompt_len // 16))
    kv_cache = KVCache(config, cache, device="meta")
    with Recorder() as recorder, FlopCounterMode(display=False) as counter:
        batch = build_batch([list(range(prompt_len))], [0], [list(range(1, cache.num_blocks))], 16, "meta")
        decoder(batch, kv_cache)
    ledger = Ledger({**config.dims(), **cache.dims()})
    ledger.check(recorder.calls)
    return collect_operations(recorder.calls, ledger, ["A"]), counter


def test_linears_equal_torch_s_counter():
    operations, counter = trace_on_meta(SMOLLM2, 8)
    ours = sum(o.flops or 0 for o in operations if o.function in ("Linear.forward", "lm_head"))
    theirs = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert ours == theirs == 2 * 8 * 30 * 3_538_944 + 2 * 576 * 49152
    attend = [o for o in operations if o.function == "attend"]
    # The counter sees the dense products of the reference body; ours leaves the masked half out.
    assert sum(o.dense_flops or 0 for o in attend) == counter.get_flop_counts()["Global"][torch.ops.aten.bmm]


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 1), (1, 9), (5, 5), (3, 10), (8, 8)])
def test_attention_counts_its_causal_pairs(query_len, seq_len):
    pairs = sum(1 for query in range(query_len) for key in range(seq_len) if key <= seq_len - query_len + query)
    sizes = {"query_len": query_len, "seq_len": seq_len, "num_heads": 9, "head_dim": 64, "q_size": 576, "kv_size": 192}
    stage = STAGES["attend"]
    assert stage.count_flops(sizes) == 4 * 9 * 64 * pairs
    assert stage.count_bytes(sizes, 4) == (4 * (query_len * 576 + 2 * seq_len * 192), 4 * query_len * 576)


def test_bytes_are_the_operands_moved_once(traced):
    """For plain stages the formula equals the bytes of the recorded arguments and results."""
    _, steps = traced
    plain = {"Linear.forward", "add_residual", "silu_and_mul", "lm_head", "rms_norm", "attend", "apply_rope"}
    for operation in (o for step in steps for o in step.operations if o.function in plain):
        assert operation.bytes_read == sum(operation.tensors[name].num_bytes for name in operation.inputs), (
            operation.path
        )
        assert operation.bytes_written == sum(operation.tensors[name].num_bytes for name in operation.outputs)


def test_bfloat16_halves_the_bytes_of_a_linear():
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        linear = Linear(4, 6).to(dtype)
        with Recorder() as recorder:
            linear(torch.zeros(3, 4, dtype=dtype))
        ledger = Ledger({})
        ledger.check(recorder.calls)
        sizes[dtype] = collect_operations(recorder.calls, ledger, [])[0].num_bytes
    assert sizes == {torch.float32: 4 * (12 + 24 + 18), torch.bfloat16: 2 * (12 + 24 + 18)}


def test_an_unknown_cost_is_none_and_never_zero():
    sizes = {"num_logits": 1, "vocab_size": 10}
    assert STAGES["apply_top_k_top_p"].count_flops(sizes) is None
    with pytest.raises(KeyError, match="has a word without a size"):
        STAGES["rms_norm"].count_flops(sizes)


def test_every_kind_has_a_letter_of_its_own():
    assert len(set(KIND_LETTERS.values())) == len(KIND_LETTERS)
    assert {stage.kind for stage in STAGES.values()} <= KIND_LETTERS.keys()
