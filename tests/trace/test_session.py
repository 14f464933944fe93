"""Tracing step by step leaves the engine as it found it, however it ends."""

import pytest

from tinyllm import RequestError, SamplingParams
from tinyllm.trace.session import trace_steps

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
