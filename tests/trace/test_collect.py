"""Rows from calls: shared where they are equal, with times and operators where asked for."""

import time

import pytest
import torch

from tinyllm import SamplingParams
from tinyllm.layers.attention.per_request import lay_flat
from tinyllm.layers.mlp import silu_and_mul
from tinyllm.sampler import sample as sampler
from tinyllm.trace import Ledger, Recorder, trace
from tinyllm.trace.collect import Memo, collect_operations
from tinyllm.trace.session import StepReader, trace_steps
from tinyllm.trace.terminal import Options, render_step

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=2, temperature=0.8, top_k=9, top_p=0.9, seed=1, ignore_eos=True)


def steps_of(llm, params=FOUR, **asked):
    return list(trace_steps(llm, llm.make_requests([[1, 2, 3], [4, 5]], params), **asked))


def test_rows_that_were_made_before_are_shared(tiny_llm):
    with trace() as t:
        tiny_llm(block_size=16).generate([[1, 2, 3], [4, 5]], FOUR)
    second, third = t.steps[2], t.steps[3]
    again = [mine for mine, theirs in zip(third.operations, second.operations, strict=True) if mine is theirs]
    assert {"qkv_proj", "rms_norm", "rope q", "silu_and_mul", "lm_head"} <= {row.label for row in again}
    assert not {"attend"} & {row.label for row in again}, "one more key"


def test_sharing_changes_no_row(tiny_llm):
    llm = tiny_llm()
    (request,) = llm.make_requests([[1, 2, 3]], FOUR)
    llm.engine.add_request(request)
    memo = Memo()
    while llm.engine.has_unfinished_requests:
        with Recorder() as recorder:
            llm.engine.step()
        ledger = Ledger({**llm.loaded.config.dims(), **llm.engine.cache_config.dims()})
        ledger.check(recorder.calls)
        assert collect_operations(recorder.calls, ledger, ["A"], memo) == collect_operations(
            recorder.calls, ledger, ["A"]
        )


def test_the_memo_holds_one_step(tiny_llm):
    llm = tiny_llm()
    reader = StepReader(llm.engine, None)
    (request,) = llm.make_requests([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.engine.add_request(request)
    while llm.engine.has_unfinished_requests:
        with Recorder() as recorder:
            output = llm.engine.step()
        step = reader.read(recorder.calls, output.schedule, output, 0.0)
        held = [row for rows in reader._memo.rows.values() for row in rows.values()]
        assert {id(row) for row in held} == {id(row) for row in step.operations}


def test_a_row_of_another_batch_size_is_another_row(tiny_llm):
    """The same call words, but other sizes of the step: nothing may be taken from the memo."""
    llm = tiny_llm()
    with trace() as t:
        for prompts in ([[1, 2]], [[3], [4]], [[5, 6]]):
            llm.generate(prompts, SamplingParams(max_tokens=1))
    assert [step.dims["num_reqs"] for step in t.steps] == [1, 2, 1]
    for step in t.steps:
        assert all(row.sizes["num_reqs"] == step.dims["num_reqs"] for row in step.operations)


# --- times --------------------------------------------------------------------------------------------------------------


def test_times_are_there_where_asked_for_and_add_up_to_less_than_the_step(tiny_llm):
    for step in steps_of(tiny_llm(), SAMPLED, times=True):
        times = [row.time_us for row in step.operations]
        assert all(time_us is not None and time_us > 0 for time_us in times)
        assert sum(time_us or 0 for time_us in times) < 1000 * step.traced_ms
    assert all(row.time_us is None for step in steps_of(tiny_llm()) for row in step.operations)
    with trace(times=True) as t:
        tiny_llm().generate([1], FOUR)
    assert all(row.time_us for step in t.steps for row in step.operations)


def test_a_stage_s_time_leaves_out_the_stages_inside_it(tiny_llm, monkeypatch):
    def sleep(*arguments):
        time.sleep(0.05)
        return add(*arguments)

    add = sampler.add_noise
    monkeypatch.setattr(sampler, "add_noise", sleep)
    (step, _) = steps_of(tiny_llm(), SAMPLED, times=True)
    times = {row.label: row.time_us or 0 for row in step.operations}
    assert times["sample"] > 40_000, "the nap is in no stage of its own, but inside sample"
    assert times["add_noise"] < 40_000 and times["top_k_top_p"] < 40_000


def test_what_the_recorder_takes_for_the_calls_inside_is_not_the_stage_s(tiny_llm, monkeypatch):
    read = Recorder._read_locals

    def slowly(self, call, *rest):
        time.sleep(0.02 if call.name == "causal_mask" else 0)
        read(self, call, *rest)

    monkeypatch.setattr(Recorder, "_read_locals", slowly)
    with Recorder() as recorder:
        llm = tiny_llm()
        llm.engine.add_request(llm.make_requests([[1, 2]], FOUR)[0])
        llm.engine.step()
    attend = next(call for call in recorder.walk() if call.name == "attend")
    assert attend.reading_ns > 20e6 > attend.elapsed_ns > 0


# --- operators ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_each_row_lists_its_operators_in_order(tiny_llm, attention):
    (step, _) = steps_of(tiny_llm("llama_gqa", attention), SAMPLED, kernels=True)
    rows = {row.label: row.kernels for row in step.operations if row.layer in (0, None)}
    assert all(kernels for label, kernels in rows.items() if label not in ("split_heads", "merge_heads"))
    assert [kernel.split()[0].removeprefix("aten.") for kernel in rows["rms_norm"]] == [
        "pow", "mean", "add", "rsqrt", "mul", "mul"]  # fmt: skip
    assert rows["silu_and_mul"][-1] == f"aten.mul -> [5,{step.dims['intermediate_size']}]"
    attend = " ".join(rows["attend"])
    if attention == "reference":
        assert attend.count("aten.bmm") == 2 and "aten.tril" in attend, "its mask is a helper of its own"
        assert attend.index("aten.bmm") < attend.index("aten.tril") < attend.index("softmax")
    else:
        assert "scaled_dot_product" in attend
    assert not any("aten.tril" in kernel for label, kernels in rows.items() if label != "attend" for kernel in kernels)


def test_a_stage_lists_none_of_the_stages_inside_it(tiny_llm):
    (step, _) = steps_of(tiny_llm(), SAMPLED, kernels=True)
    rows = {row.label: " ".join(row.kernels) for row in step.operations}
    assert "aten.sort" in rows["top_k_top_p"] and "aten.sort" not in rows["sample"]
    assert "aten.argmax" in rows["sample"] and "aten.log" in rows["gumbel_noise"]


def test_views_are_marked():
    with Recorder(kernels=True) as recorder:
        silu_and_mul(torch.ones(2, 6))
    kernels = [kernel for _, kernel in recorder.calls[0].kernels or ()]
    assert any(kernel.endswith(" view") for kernel in kernels) and not kernels[-1].endswith(" view")


def test_without_being_asked_no_operator_is_watched(tiny_llm):
    assert all(row.kernels == () for step in steps_of(tiny_llm()) for row in step.operations)


def test_the_reader_s_own_arithmetic_is_nobody_s(tiny_llm):
    def kernels(**asked):
        return [
            row.kernels
            for step in steps_of(tiny_llm(max_model_len=32, num_blocks=9), **asked)
            for row in step.operations
        ]

    assert kernels(kernels=True) == kernels(kernels=True, values="*", residual=True)
    with trace(kernels=True, values="*") as t:
        tiny_llm(max_model_len=32, num_blocks=9).generate([[1, 2, 3], [4, 5]], FOUR)
    assert [row.kernels for step in t.steps for row in step.operations] == kernels(kernels=True)


# --- lists --------------------------------------------------------------------------------------------------------------


def laid_flat(*query_lens: int):
    """The row of a call of lay_flat with pieces of these lengths."""
    with Recorder() as recorder:
        lay_flat([torch.zeros(query_len, 9, 64) for query_len in query_lens])
    ledger = Ledger({"num_heads": 9, "head_dim": 64, "q_size": 576})
    ledger.check(recorder.calls)
    (row,) = collect_operations(recorder.calls, ledger, [])
    return row


@pytest.mark.parametrize(
    ("query_lens", "template"),
    [
        ((5,), "{pieces[0]} -> {result}"),
        ((5, 8), "{pieces[0]}+{pieces[1]} -> {result}"),
        ((1, 1), "2x{pieces[0]} -> {result}"),
        ((5, 1, 1, 1), "{pieces[0]}+3x{pieces[1]} -> {result}"),
        ((1, 1, 5, 8, 1, 1, 1), "2x{pieces[0]}+..+3x{pieces[4]} -> {result}"),
        ((1,) * 128, "128x{pieces[0]} -> {result}"),
        (tuple(range(1, 65)), "{pieces[0]}+..+{pieces[63]} -> {result}"),
    ],
)
def test_a_row_spells_a_list_s_shapes_out_as_far_as_it_stays_short(query_lens, template):
    row = laid_flat(*query_lens)
    assert row.stage.template == template
    assert row.inputs == tuple(f"pieces[{i}]" for i in range(len(query_lens))) and row.outputs == ("result",)
    assert [row.tensors[name].shape[0] for name in row.inputs] == list(query_lens)
    assert row.bytes_read == row.bytes_written == 4 * 576 * sum(query_lens)


def test_where_the_pieces_cannot_be_read_the_row_is_its_result():
    with Recorder() as recorder:
        lay_flat(iter([torch.zeros(3, 9, 64)]))  # type: ignore[arg-type]
    ledger = Ledger({"num_heads": 9, "head_dim": 64, "q_size": 576})
    ledger.check(recorder.calls)
    (row,) = collect_operations(recorder.calls, ledger, [])
    assert (row.stage.template, row.stage.symbolic, row.inputs) == ("{result}", "", ())


def test_a_row_as_a_reader_sees_it(tiny_llm):
    lines = [line for line in render_step(steps_of(tiny_llm())[0], None, Options()) if "lay_flat" in line]
    assert len(lines) == 1 and "[3,4,16]+[2,4,16]->[5,4,16]" in lines[0] and "?" not in lines[0]


def test_in_symbols_a_list_is_one_item_for_each_request(tiny_llm):
    rows = [(s, o) for s in steps_of(tiny_llm()) for o in s.operations if o.stage.symbolic]
    assert {row.stage.symbolic for _, row in rows} == {"R x {pieces[0]} -> {result}"}
    assert all(len(row.inputs) == step.dims["num_reqs"] == 2 for step, row in rows)
    assert {row.tensors["pieces[0]"].symbols for _, row in rows} == {("s", "nq", "d")}
