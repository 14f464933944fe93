"""Costs: nothing is left out, linears equal torch's own counter, attention its pairs counted one by one."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllm import SamplingParams
from tinyllm.batch import build_batch
from tinyllm.config import HIDDEN_ACTS, CacheConfig, ModelConfig
from tinyllm.kv_cache import KVCache
from tinyllm.layers.linear import Linear
from tinyllm.model import Decoder
from tinyllm.trace import Ledger, Recorder
from tinyllm.trace.collect import collect_operations
from tinyllm.trace.costs import COMPOSITES, KIND_LETTERS, PARTS, STAGES, bound_by, bound_us, count
from tinyllm.weights.load import build_decoder

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
    assert count(stage.flops or "", sizes) == 4 * 9 * 64 * pairs
    assert count(stage.read, sizes | {"e": 4}) == 4 * (query_len * 576 + 2 * seq_len * 192)
    assert count(stage.write, sizes | {"e": 2}) == 2 * query_len * 576


# Stages that touch less, or other things, than their arguments: rows of a table, slots of the pool, whole blocks,
# the config's frequencies.
SPECIAL = {"Embedding.forward", "write_kv", "gather_kv", "RotaryEmbedding.forward", "gather_rows"}
PLAIN = STAGES.keys() - SPECIAL - {name for name, stage in STAGES.items() if stage.kind == "view"}


def random_step(tiny_llm, dtype: torch.dtype, tiny_model, hidden_act: str = "silu"):
    """The operations of a step of one greedy and one random request, so that every stage of the sampler runs."""
    decoder = tiny_model("llama_gqa", "reference", dtype)
    llm = tiny_llm(build_decoder(replace(decoder.config, hidden_act=hidden_act), decoder.state_dict()))
    params = [SamplingParams(), SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=1,
                                               min_tokens=1, stop_token_ids=(5, 6, 7))]  # fmt: skip
    for request in llm.make_requests([[1, 2, 3], [4, 5]], params):
        llm.engine.add_request(request)
    with Recorder() as recorder:
        llm.engine.step()
    ledger = Ledger({**llm.loaded.config.dims(), **llm.engine.cache_config.dims()})
    ledger.check(recorder.calls)
    return collect_operations(recorder.calls, ledger, ["A", "B"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_the_operands_moved_once(tiny_llm, tiny_model, dtype):
    """For plain stages the formula equals the bytes of the recorded arguments and results, each in its own type."""
    steps = [random_step(tiny_llm, dtype, tiny_model, hidden_act) for hidden_act in HIDDEN_ACTS]
    operations = [operation for step in steps for operation in step if operation.function in PLAIN]
    assert {o.function for o in operations} == PLAIN
    for operation in operations:
        assert operation.bytes_read == sum(operation.tensors[name].num_bytes for name in operation.inputs), (
            operation.path
        )
        assert operation.bytes_written == sum(operation.tensors[name].num_bytes for name in operation.outputs)


def test_what_the_special_stages_move():
    sizes = {"num_tokens": 3, "hidden_size": 8, "num_logits": 2, "kv_size": 6, "num_req_blocks": 2, "block_size": 4, "e": 4,
             "half_dim": 5}  # fmt: skip
    moved = {name: (count(STAGES[name].read, sizes), count(STAGES[name].write, sizes)) for name in SPECIAL}
    assert moved == {
        "Embedding.forward": (4 * 3 * 8 + 8 * 3, 4 * 3 * 8),  # the rows that are looked up, and the ids
        "write_kv": (4 * 2 * 3 * 6 + 8 * 3, 4 * 2 * 3 * 6),
        "gather_kv": (4 * 2 * 2 * 4 * 6 + 8 * 2, 4 * 2 * 2 * 4 * 6),  # whole blocks
        "RotaryEmbedding.forward": (8 * 3 + 4 * 5, 4 * 2 * 3 * 5),
        "gather_rows": (4 * 2 * 8 + 8 * 2, 4 * 2 * 8),
    }


def test_the_sampler_s_flops(tiny_llm, tiny_model):
    flops = {o.function: o.flops for o in random_step(tiny_llm, torch.float32, tiny_model)}
    scores = 2 * 256
    assert [flops[f"apply_{name}"] for name in ("temperature", "min_p", "top_k_top_p")] == [scores, 2 * scores, None]
    assert [flops[name] for name in ("gumbel_noise", "add_noise", "sample")] == [None, scores, scores]


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
    assert STAGES["apply_top_k_top_p"].flops is None
    with pytest.raises(KeyError, match="has a word without a size"):
        count(STAGES["rms_norm"].flops or "", {"num_logits": 1, "vocab_size": 10})


def test_every_kind_has_a_letter_of_its_own():
    assert len(set(KIND_LETTERS.values())) == len(KIND_LETTERS)
    assert {stage.kind for stage in STAGES.values()} <= KIND_LETTERS.keys()


def test_every_row_has_inputs_and_outputs(tiny_llm, tiny_model):
    for row in random_step(tiny_llm, torch.float32, tiny_model):
        assert row.inputs and row.outputs, row.path


def test_a_cache_write_s_output_is_the_pool_that_it_changes(tiny_llm, tiny_model):
    rows = [row for row in random_step(tiny_llm, torch.float32, tiny_model) if row.function == "write_kv"]
    assert [(row.inputs, row.outputs) for row in rows] == [(("layer_kv", "k", "v", "slot_mapping"), ("layer_kv",))] * 2
    assert {row.tensors[name].storage for row in rows for name in row.outputs} == {"kv_pool"}
    stages = {name: stage for name, stage in STAGES.items() if stage.updates or stage.updated_at}
    assert stages.keys() == {"write_kv"} and rows[0].tensors[stages["write_kv"].updated_at].words == ("num_tokens",)


def test_a_row_waits_for_memory_below_the_ridge_and_for_arithmetic_above(traced):
    """A machine of 80 GFLOP and 10 GB a second."""
    _, steps = traced
    seen = set()
    for operation in (row for step in steps for row in step.operations):
        costs = operation.flops, operation.num_bytes
        side, least = bound_by(*costs, 8.0), bound_us(*costs, 8.0, 10e9)
        if operation.flops is None:
            assert (side, least) == ("", None)
        elif operation.num_bytes == 0:
            assert (side, least) == ("", 0)
        else:
            memory_us, compute_us = operation.num_bytes / 10e3, operation.flops / 80e3
            assert side == ("memory" if memory_us > compute_us else "compute")
            assert least == pytest.approx(max(memory_us, compute_us))
        seen.add(side)
    assert seen == {"", "memory"}
    assert bound_by(81, 10, 8.0) == "compute" and bound_us(81e4, 10, 8.0, 1e6) == 81e4 / 8
    assert bound_by(81, 10, None) == "" and bound_us(81, 10, None, 1e6) is bound_us(81, 10, 8.0, None) is None
