"""Tracing step by step leaves the engine as it found it, however it ends."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tinyllm import RequestError, SamplingParams, engine
from tinyllm.model import Decoder
from tinyllm.trace import recorder, session, trace
from tinyllm.trace.session import trace_steps, warm_up

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


def is_clean(llm) -> bool:
    return not llm.engine.has_unfinished_requests and llm.engine.scheduler.pool.num_used_blocks == 0


def test_whoever_stops_listening_gives_the_requests_up(tiny_llm):
    llm = tiny_llm()
    steps = trace_steps(llm, llm.make_requests([[1, 2, 3]], FIVE))
    next(steps)
    assert not is_clean(llm)
    steps.close()
    assert is_clean(llm)
    assert len(list(trace_steps(llm, llm.make_requests([[1, 2, 3]], FIVE)))) == 5


def test_a_request_that_can_never_run_is_refused_before_another_is_queued(tiny_llm):
    llm = tiny_llm(max_model_len=16)
    with pytest.raises(RequestError, match="the prompt has 30 tokens"):
        list(trace_steps(llm, llm.make_requests([[1], [2] * 30], FIVE)))
    assert is_clean(llm)


def test_traced_and_untraced_answers_are_the_same(tiny_llm):
    llm = tiny_llm()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6)
    (request,) = llm.make_requests([[7, 8]], params)
    list(trace_steps(llm, [request]))
    assert llm.completion(request) == llm.generate([7, 8], params)[0]


# --- times --------------------------------------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, min_tokens=2, seed=4, max_tokens=4)


def without_times(step):
    """All that a step's record says but for what a clock said."""
    operations = tuple(replace(operation, time_us=None) for operation in step.operations)
    return replace(step, operations=operations, traced_ms=0.0, reading_ms=0.0)


@pytest.mark.parametrize("drive", ["trace_steps", "trace"])
def test_each_step_says_what_of_its_time_was_the_tracer_s_reading(tiny_llm, monkeypatch, drive):
    """On a clock that stands still but for 2 ms to read each step's one build_batch, and 3 ms to sample."""
    clock = SimpleNamespace(ns=0)
    still = SimpleNamespace(perf_counter_ns=lambda: clock.ns, perf_counter=lambda: clock.ns / 1e9)

    def slowly(self, call, *rest):
        clock.ns += 2_000_000 if call.name == "build_batch" else 0
        read(self, call, *rest)

    def sample(*arguments):
        clock.ns += 3_000_000
        return true_sample(*arguments)

    read, true_sample = recorder.Recorder._read_locals, engine.sample
    monkeypatch.setattr(recorder.Recorder, "_read_locals", slowly)
    monkeypatch.setattr(engine, "sample", sample)
    monkeypatch.setattr(recorder, "time", still)
    monkeypatch.setattr(session, "time", still)
    llm = tiny_llm()
    if drive == "trace":
        with trace() as t:
            llm.generate([1, 2, 3], FIVE)
        steps = t.steps
    else:
        steps = list(trace_steps(llm, llm.make_requests([[1, 2, 3]], FIVE)))
    assert [step.reading_ms for step in steps] == pytest.approx([2.0] * 5)
    assert [step.traced_ms for step in steps] == pytest.approx([5.0] * 5)


@pytest.mark.parametrize("params", [FIVE, SAMPLED])
def test_asking_for_times_changes_no_step_no_token_and_no_block(tiny_llm, params):
    def steps_of(times):
        llm = tiny_llm(block_size=2, num_blocks=12, max_model_len=16, max_num_batched_tokens=4)
        requests = llm.make_requests([[1, 2, 3, 4, 5], [6, 7]], params)
        steps = [without_times(step) for step in trace_steps(llm, requests, times=times)]
        return steps, [request.output_token_ids for request in requests]

    assert steps_of(True) == steps_of(False)


def test_model_and_sampler_run_once_before_the_first_timed_step(tiny_llm, monkeypatch):
    ran: list[tuple] = []
    forward, sample = Decoder.forward, session.sample
    monkeypatch.setattr(Decoder, "forward", lambda *a: (ran.append(("model", a[1].query_lens_cpu)), forward(*a))[1])
    monkeypatch.setattr(session, "sample", lambda *a: (ran.append(("sample", len(a[0]))), sample(*a))[1])
    for times, first in ((False, []), (True, [("model", (4, 1)), ("sample", 2)])):
        llm = tiny_llm()
        steps = trace_steps(llm, llm.make_requests([[1, 2, 3]], FIVE), times=times)
        ran.clear()
        assert next(steps).index == 0
        assert ran == [*first, ("model", (3,))]
        assert len(list(steps)) == 4 and ran[len(first) :] == [("model", (3,)), *[("model", (1,))] * 4]
    assert list(trace_steps(tiny_llm(), [], times=True)) == []


def test_the_warm_up_leaves_the_engine_as_it_was(tiny_llm):
    llm = tiny_llm(block_size=2)
    llm.generate([[1, 2, 3, 4, 5]], FIVE)
    kv, cached = llm.engine.kv_cache.kv.clone(), llm.engine.scheduler.pool.num_cached_blocks
    requests = llm.make_requests([[7, 8, 9], [3]], [SAMPLED, FIVE])
    before = [(request.status, request.num_computed_tokens, list(request.token_ids)) for request in requests]
    warm_up(llm.engine, requests)
    assert kv.equal(llm.engine.kv_cache.kv) and llm.engine.scheduler.pool.num_cached_blocks == cached
    assert [(r.status, r.num_computed_tokens, list(r.token_ids)) for r in requests] == before and is_clean(llm)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_warm_up_runs_every_stage_of_a_run_in_any_blocks(tiny_llm, monkeypatch, block_size):
    seen: list[recorder.Recorder] = []
    make = recorder.Recorder
    monkeypatch.setattr(session, "Recorder", lambda *a, **k: seen.append(make(*a, **k)) or seen[-1])
    llm = tiny_llm(block_size=block_size)
    steps = list(trace_steps(llm, llm.make_requests([[1, 2, 3], [4]], SAMPLED), times=True))
    warmed = {call.name for call in seen[0].walk()}
    assert warmed >= {operation.function for step in steps for operation in step.operations}


def test_a_request_that_can_never_run_is_refused_before_the_warm_up(tiny_llm, monkeypatch):
    monkeypatch.setattr(session, "warm_up", lambda *arguments: pytest.fail("something ran"))
    llm = tiny_llm(max_model_len=16)
    with pytest.raises(RequestError, match="the prompt has 30 tokens"):
        list(trace_steps(llm, llm.make_requests([[2] * 30], FIVE), times=True))
