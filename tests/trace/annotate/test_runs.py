"""The run that is recorded: a prefill and a decode where there are both, and nothing left behind."""

import sys

import pytest

from tinyllm import RequestError, SamplingParams
from tinyllm.trace.annotate import annotate, record_calls

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42]]


def test_one_step_is_enough(tiny_llm):
    runs = record_calls(tiny_llm("llama_gqa", max_model_len=32), [1, 2, 3], SamplingParams(max_tokens=1))
    assert [run.label for run in runs] == ["prefill"]
    assert any("scores" in line and "decode" not in line for line in annotate("layers/attention/reference.py", runs))


def test_recording_leaves_everything_as_it_was(tiny_llm):
    llm = tiny_llm("llama_gqa", max_model_len=32)
    before = sys.gettrace()
    record_calls(llm, PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))
    assert sys.gettrace() is before
    assert not llm.engine.has_unfinished_requests and llm.engine.scheduler.pool.num_used_blocks == 0
    with pytest.raises(RequestError):
        record_calls(llm, [list(range(40))])


def test_a_single_token_is_no_plural(tiny_llm):
    runs = record_calls(tiny_llm("llama_gqa", max_model_len=32), [[5]], SamplingParams(max_tokens=1))
    assert runs[0].title == "step 0: A computes 1 of 1 token"
