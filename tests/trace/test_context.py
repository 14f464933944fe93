"""``with trace() as t:``: what it sees, what it survives, and what it says about it."""

import gc
import json
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path

import jsonschema
import pytest
import torch

import tinyllm.trace
from tinyllm import LLM, RequestError, SamplingParams, ShapeError
from tinyllm.errors import ConfigError
from tinyllm.layers.attention import reference
from tinyllm.layers.mlp import MLP
from tinyllm.request import Request
from tinyllm.shapes import evaluate
from tinyllm.trace import LedgerError, Trace, TraceError, session, trace
from tinyllm.trace.session import trace_steps

SCHEMA = json.loads((Path(tinyllm.trace.__file__).parent / "schema.json").read_text("utf-8"))
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


def traced(llm: LLM, prompts, params=FIVE) -> Trace:
    with trace() as t:
        llm.generate(prompts, params)
    return t


def test_a_block_records_what_the_command_would(tiny_llm):
    prompts = [[1, 2, 3], [4, 5]]
    t = traced(tiny_llm(), prompts)
    llm = tiny_llm()
    steps = list(trace_steps(llm, llm.make_requests(prompts, FIVE)))
    assert len(t.steps) == 5
    for mine, theirs in zip(t.steps, steps, strict=True):
        assert (mine.index, mine.phase, mine.dims, mine.operations) == (
            theirs.index,
            theirs.phase,
            theirs.dims,
            theirs.operations,
        )
        assert (mine.batch_values, mine.schedule) == (theirs.batch_values, theirs.schedule)
    assert t.calls == []


def test_tracing_changes_no_answer(tiny_llm):
    params = SamplingParams(temperature=1, seed=4, max_tokens=8)
    with trace():
        answers = tiny_llm().generate(["abc", "de"], params)
    assert answers == tiny_llm().generate(["abc", "de"], params)


def test_streams_and_bare_engine_steps_are_seen_too(tiny_llm):
    llm = tiny_llm()
    with trace() as t:
        list(llm.stream("abc", FIVE))
        llm.engine.add_request(Request("mine", [1, 2], SamplingParams(max_tokens=2)))
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
    assert [step.phase for step in t.steps] == ["prefill", *["decode"] * 4, "prefill", "decode"]
    assert [step.requests[0].label for step in t.steps] == [*"AAAAA", *"BB"]
    assert [answer.token_ids for answer in t.run.answers] == [
        tiny_llm().generate("abc", FIVE)[0].token_ids,
        tiny_llm().generate([1, 2], SamplingParams(max_tokens=2))[0].token_ids,
    ]


def test_a_function_called_outside_a_step_is_a_call(tiny_llm):
    llm, q = tiny_llm(), torch.zeros(2, 1, 4)
    with trace() as t:
        reference.attend(q, q, q)
        llm.generate([1], FIVE)
        reference.attend(q, q, q)
    assert [call.name for call in t.calls] == ["attend", "attend"]
    assert len(t.steps) == 5


def test_nested_blocks_each_get_the_steps(tiny_llm):
    llm = tiny_llm()
    with trace() as outer:
        llm.generate([1, 2], FIVE)
        with trace() as inner:
            llm.generate([3], FIVE)
            reference.attend(*[torch.zeros(1, 1, 2)] * 3)
        llm.generate([4], FIVE)
    assert (len(outer.steps), len(inner.steps)) == (15, 5)
    assert len(outer.calls) == len(inner.calls) == 1
    assert [step.index for step in outer.steps] == list(range(15))
    assert [step.index for step in inner.steps] == list(range(5))
    assert outer.steps[5].requests[0].label == "B" and inner.steps[0].requests[0].label == "A"
    assert outer.steps[6].operations == inner.steps[1].operations or outer.steps[6].requests[0].label == "B"


def test_an_error_in_a_layer_keeps_the_rows_before_it(tiny_llm, monkeypatch):
    llm = tiny_llm()
    forward = MLP.forward
    seen = []

    def fail_in_the_second_layer(self, x):
        seen.append(x)
        return forward(self, x if len(seen) < 2 else x[:, :3])

    monkeypatch.setattr(MLP, "forward", fail_in_the_second_layer)
    with trace() as t, pytest.raises(ShapeError):
        llm.generate([1, 2, 3], FIVE)
    (step,) = t.steps
    assert step.failure.startswith("layers.1.mlp")
    assert "ShapeError: Linear: in_size" in step.failure
    assert [operation.layer for operation in step.operations if operation.function == "attend"] == [0, 1]
    assert step.operations[-1].layer == 1
    assert step.requests[0].chosen is None
    assert step.dims["num_tokens"] == 3
    assert sys.gettrace() is None or "tinyllm" not in repr(sys.gettrace())
    monkeypatch.undo()
    assert traced(llm, [1, 2, 3]).steps[0].failure == ""


def test_an_interrupt_keeps_what_was_seen(tiny_llm, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    llm = tiny_llm()
    monkeypatch.setattr("tinyllm.engine.sample", interrupt)
    t = Trace()
    with pytest.raises(KeyboardInterrupt), t:
        llm.generate([1, 2, 3], FIVE)
    assert t.steps[0].failure
    assert t.steps[0].operations[-1].function == "lm_head"


def test_a_false_annotation_ends_the_block_with_the_ledger_s_word(tiny_llm, monkeypatch):
    dims = session.Ledger
    monkeypatch.setattr(session, "Ledger", lambda sizes: dims({**sizes, "hidden_size": 7}))
    with pytest.raises(LedgerError, match="hidden_size is 64, but 7 in the config"), trace() as t:
        tiny_llm().generate([1], FIVE)
    assert t.steps == []


def test_another_thread_is_not_seen(tiny_llm):
    llm = tiny_llm()
    with trace() as t:
        thread = threading.Thread(target=llm.generate, args=([1, 2], FIVE))
        thread.start()
        thread.join()
    assert (t.steps, t.calls) == ([], [])
    with pytest.raises(RequestError, match="no engine step was made in this block by this thread"):
        _ = t.run


def test_two_threads_trace_side_by_side(tiny_llm):
    found = {}

    def run(prompt):
        found[prompt] = traced(tiny_llm(), [[prompt, 2]])

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {prompt: t.steps[0].requests[0].token_ids for prompt, t in found.items()} == {1: (1, 2), 5: (5, 2)}


@pytest.mark.parametrize("inside", [lambda frame, event, argument: None, None])
def test_a_debugger_that_starts_inside_stays_and_a_warning_says_what_is_missing(tiny_llm, inside):
    llm, before = tiny_llm(), sys.gettrace()
    try:
        with pytest.warns(UserWarning, match="was replaced or switched off inside it"), trace() as t:
            llm.generate([1], SamplingParams(max_tokens=2))
            sys.settrace(inside)
            llm.generate([2], SamplingParams(max_tokens=2))
        assert sys.gettrace() is inside and len(t.steps) == 2
    finally:
        sys.settrace(before)


def test_a_debugger_is_displaced_and_a_warning_says_so(tiny_llm):
    def debugger(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        with pytest.warns(UserWarning, match="a debugger or coverage tool watches this thread"), trace():
            pass
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)


def test_nested_blocks_do_not_warn_of_each_other():
    before = sys.gettrace()
    sys.settrace(None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with trace(), trace():
                pass
    finally:
        sys.settrace(before)


def test_the_table_holds_every_row_and_its_sums(tiny_llm):
    t = traced(tiny_llm(), [[1, 2, 3]])
    table = t.table()
    assert len(table) == sum(len(step.operations) for step in t.steps)
    assert sum(row["flops"] or 0 for row in table) == sum(step.flops for step in t.steps)
    assert sum(row["bytes_read"] + row["bytes_written"] for row in table) == sum(step.num_bytes for step in t.steps)
    qkv = next(row for row in table if row["op"] == "qkv_proj")
    assert (qkv["in_sym"], qkv["out_sym"], qkv["layer"]) == ("[T,H], [qkv,H]", "[T,qkv]", 0)


def test_find_gives_every_place_of_a_name(tiny_llm):
    t = traced(tiny_llm(), [[1, 2, 3], [4]])
    found = [row for row in t.find("scores") if row["op"] == "attend"]
    assert len(t.find("scores")) == len(found) + 5, "the sampler has scores, too"
    config = tiny_llm().loaded.config
    assert len(found) == 5 * 2 * config.num_layers
    assert {row["request"] for row in found} == {"A", "B"}
    for row in found:
        sizes = config.dims() | {"query_len": row["shape"][2], "seq_len": row["shape"][3]}
        assert tuple(evaluate(word, sizes) for word in row["words"]) == row["shape"]
    with pytest.raises(TraceError, match=r"^no tensor of this trace is named 'scors'; near it: .*scores"):
        t.find("scors")
    for nothing in ("no such name", 3, None):
        with pytest.raises(TraceError, match=r"expected a name such as "):
            t.find(nothing)
    assert trace().find("scors") == [], "where no step was made there is nothing to compare with"


def test_diff_names_the_rows_in_which_two_runs_differ(tiny_llm):
    once, again = traced(tiny_llm(), [[1, 2, 3]]), traced(tiny_llm(), [[7, 8, 9]])
    assert once.diff(again) == []
    longer = traced(tiny_llm(), [[1, 2, 3, 4]])
    rows = once.diff(longer)
    assert {row["step"] for row in rows} == set(range(5))
    scores = next(row for row in rows if row["op"] == "attend")
    assert scores["this"]["in_shape"].startswith("[3,") and scores["other"]["in_shape"].startswith("[4,")
    shorter = traced(tiny_llm(), [[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert {row["step"] for row in once.diff(shorter)} == {4}
    assert all(row["other"] is None for row in once.diff(shorter))


def test_its_json_follows_the_schema(tiny_llm, monkeypatch):
    header, *steps, footer = records = traced(tiny_llm(), [[1, 2, 3]]).to_json()
    assert (header["type"], footer["type"], footer["num_steps"]) == ("header", "footer", 5)
    for record in records:
        jsonschema.validate(json.loads(json.dumps(record, allow_nan=False)), SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**steps[0], "surplus": 1}, SCHEMA)


def test_values_times_and_kernels_are_in_the_json(tiny_llm):
    llm = tiny_llm()
    with trace(values="attend", times=True, kernels=True) as t:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    _, step, _ = t.to_json()
    jsonschema.validate(json.loads(json.dumps(step, allow_nan=False)), SCHEMA)
    attends = [operation for operation in step["ops"] if operation["op"] == "attend"]
    assert len(attends) == llm.loaded.config.num_layers
    for operation in attends:
        stats = {tensor["name"]: tensor["stats"] for tensor in operation["locals"]}
        assert 0 <= stats["weights"]["min"] <= stats["weights"]["max"] <= 1
        assert stats["masked"]["not_finite"] > 0
        assert operation["time_us"] > 0 and any("aten.bmm" in kernel for kernel in operation["kernels"])
    assert len(step["residual_rms"]) == llm.loaded.config.num_layers
    assert step["failure"] == ""


@pytest.mark.parametrize(
    ("values", "near"),
    [("atend", "attend"), (["attend", "qkv_prj"], "qkv_proj"), ("*_prj", "o_proj"), ("attend, rop", "rope")],
)
def test_values_that_no_row_has_are_refused_at_once(values, near):
    with pytest.raises(ConfigError, match=rf"^values names '.*', which no row has; near it: .*{near}"):
        trace(values=values)


@pytest.mark.parametrize(
    "values", ["attend", "*_proj", "rope", "rope q", "mlp", "Linear.forward", ["*"], "", lambda _: False]
)
def test_values_of_rows_modules_and_patterns_are_taken(values):
    trace(values=values)


def test_a_stream_that_goes_on_outside_does_not_change_what_the_block_saw(tiny_llm):
    llm = tiny_llm()
    pieces = llm.stream([1, 2, 3], FIVE)
    with trace() as t:
        next(pieces)
        assert t.run.answers[0].finish_reason == "running"
    text, made = str(t), len(t.steps)
    assert len(list(pieces)) > 0
    assert (str(t), len(t.steps)) == (text, made) and t.run.answers[0].finish_reason == "running"
    with t:
        llm.generate([[4, 5]], FIVE)
    assert [answer.finish_reason for answer in t.run.answers] == ["length", "length"], "a second block looks anew"


@pytest.mark.parametrize("other", [3, None, "a trace"])
def test_a_trace_differs_from_traces_alone(other):
    with pytest.raises(TraceError, match=r"^diff compares with .*; expected another trace"):
        trace().diff(other)


def test_long_generations_stay_small(tiny_llm):
    llm = tiny_llm(max_model_len=128)
    sizes = []
    for max_tokens in (20, 120):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        traced(llm, [[max_tokens]], params)  # warm
        llm.engine.reset_prefix_cache()
        gc.collect()
        tracemalloc.start()
        t = traced(llm, [[max_tokens]], params)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(t.steps) == max_tokens
    per_step = (sizes[1] - sizes[0]) / 100
    assert per_step < 60_000, "about 25 kB for two layers; its tensors alone would be more"


def test_off_no_frame_is_visited(tiny_llm):
    llm = tiny_llm()
    before = sys.gettrace()
    sys.settrace(None)
    try:
        with trace() as t:
            llm.generate([1], FIVE)
        assert sys.gettrace() is None
        llm.generate([2], FIVE)
        assert len(t.steps) == 5
    finally:
        sys.settrace(before)


def test_a_block_can_ask_for_more(tiny_llm):
    llm = tiny_llm(max_model_len=32)
    with trace(values="attend", times=True, kernels=True) as t:
        llm.generate([[1, 2, 3], [4, 5]], FIVE)
    prompts = llm.make_requests([[1, 2, 3], [4, 5]], FIVE)
    steps = list(trace_steps(tiny_llm(max_model_len=32), prompts, values="attend", times=True, kernels=True))
    assert len(t.steps) == 5
    for mine, theirs in zip(t.steps, steps, strict=True):
        assert len(mine.operations) > 30 and mine.operations == theirs.operations
        assert mine.residual_rms == theirs.residual_rms and len(mine.residual_rms) == llm.loaded.config.num_layers
        for row, other in zip(mine.operations, theirs.operations, strict=True):
            assert row.time_us and other.time_us
            stats = [{name: tensor.stats for name, tensor in one.tensors.items()} for one in (row, other)]
            assert stats[0] == stats[1] and any(stats[0].values()) == (row.function == "attend")
    assert all(row["time_us"] > 0 for row in t.table())


def test_a_model_that_gives_no_numbers_still_gives_json(tiny_llm):
    llm = tiny_llm()
    hook = llm.engine.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: output * float("nan"))
    with trace(values="attend") as t:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    hook.remove()
    for record in t.to_json():
        jsonschema.validate(json.loads(json.dumps(record, allow_nan=False)), SCHEMA)
    assert t.to_json()[1]["residual_rms"] == ["nan"] * llm.loaded.config.num_layers
