"""Rows from calls: shared where they are equal, with times and operators where asked for."""

from types import SimpleNamespace

import pytest
import torch

from tinyllm import SamplingParams
from tinyllm.layers import norm
from tinyllm.layers.attention.per_request import lay_flat
from tinyllm.sampler import noise
from tinyllm.sampler import sample as sampler
from tinyllm.trace import Call, Ledger, Recorder, trace
from tinyllm.trace.collect import Memo, collect_operations
from tinyllm.trace.costs import STAGES
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
    memo, num_steps = Memo(), 0
    while llm.engine.has_unfinished_requests:
        num_steps += 1
        with Recorder() as recorder:
            llm.engine.step()
        ledger = Ledger({**llm.loaded.config.dims(), **llm.engine.cache_config.dims()})
        ledger.check(recorder.calls)
        shared = collect_operations(recorder.calls, ledger, ["A"], memo)
        assert len(shared) > 30 and shared == collect_operations(recorder.calls, ledger, ["A"])
    assert num_steps == 4


def test_the_memo_holds_one_step(tiny_llm):
    llm = tiny_llm()
    reader = StepReader(llm.engine, None)
    (request,) = llm.make_requests([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.engine.add_request(request)
    num_steps = 0
    while llm.engine.has_unfinished_requests:
        num_steps += 1
        with Recorder() as recorder:
            output = llm.engine.step()
        step = reader.read(recorder.calls, output.schedule, output, 0.0)
        held = [row for rows in reader._memo.rows.values() for row in rows.values()]
        assert len(held) > 30 and {id(row) for row in held} == {id(row) for row in step.operations}
    assert num_steps == 9


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
    steps, untimed = steps_of(tiny_llm(), SAMPLED, times=True), steps_of(tiny_llm())
    assert (len(steps), len(untimed)) == (2, 4)
    for step in steps:
        assert len(step.operations) > 30
        times = [row.time_us for row in step.operations]
        assert all(time_us is not None and time_us > 0 for time_us in times)
        assert sum(time_us or 0 for time_us in times) < 1000 * step.traced_ms
    assert all(row.time_us is None for step in untimed for row in step.operations)
    with trace(times=True) as t:
        tiny_llm().generate([1], FOUR)
    assert len(t.steps) == 4
    assert all(row.time_us for step in t.steps for row in step.operations)


@pytest.fixture
def timed(tiny_llm, monkeypatch):
    """(calls, rows) of a sampled step on a clock that stands still, but for what reading costs and what is spent.

    5000 ns are spent in sample and in no stage inside it, 300 ns in gumbel_noise, and 20 ns before each rms_norm, in a
    module that is no stage; each read of a call's locals costs 1,000,000 ns.
    """
    clock = SimpleNamespace(ns=0)
    still = SimpleNamespace(perf_counter_ns=lambda: clock.ns, perf_counter=lambda: clock.ns / 1e9)
    monkeypatch.setattr("tinyllm.trace.recorder.time", still)

    def spend_before(owner, name: str, ns: int) -> None:
        function = getattr(owner, name)

        def spending(*arguments):
            clock.ns += ns
            return function(*arguments)

        monkeypatch.setattr(owner, name, spending)

    spend_before(sampler, "add_noise", 5000)
    spend_before(noise, "uniform_noise", 300)
    spend_before(norm, "rms_norm", 20)
    spend_before(Recorder, "_read_locals", 1_000_000)
    llm = tiny_llm()
    llm.engine.add_request(llm.make_requests([[1, 2, 3]], SAMPLED)[0])
    with Recorder() as recorder:
        llm.engine.step()
    ledger = Ledger({**llm.loaded.config.dims(), **llm.engine.cache_config.dims()})
    ledger.check(recorder.calls)
    return recorder.calls, collect_operations(recorder.calls, ledger, ["A"], has_times=True)


def test_a_row_s_time_is_that_of_its_call_without_the_stages_inside_it(timed):
    _, rows = timed
    times = {row.label: row.time_us for row in rows if row.time_us}
    assert times == {"sample": 5.0, "gumbel_noise": 0.3}
    assert len(rows) > 30 and all(row.time_us is not None for row in rows)


def test_all_rows_together_took_what_the_outermost_stages_took(timed):
    calls, rows = timed
    outermost: list[Call] = []

    def visit(call: Call) -> None:
        if call.name in STAGES:
            outermost.append(call)
        else:
            for child in call.children:
                visit(child)

    for call in calls:
        visit(call)
    inside = [row for row in rows if row.label in ("add_noise", "top_k_top_p", "gumbel_noise")]
    assert len(inside) == 3 and len(outermost) < len(rows), "some stages are inside others"
    assert sum(row.time_us or 0 for row in rows) == sum(call.elapsed_ns for call in outermost) / 1000 == 5.3


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


def test_without_being_asked_no_operator_is_watched(tiny_llm):
    kernels = [row.kernels for step in steps_of(tiny_llm()) for row in step.operations]
    assert len(kernels) > 160 and set(kernels) == {()}


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
