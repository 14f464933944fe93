"""One traced run of a tiny model, for the files of this folder."""

import pytest

from tinyllm import SamplingParams
from tinyllm.console import run
from tinyllm.trace import command
from tinyllm.trace.calibrate import Roofline
from tinyllm.trace.session import trace_steps

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42]]


@pytest.fixture(scope="module", params=["reference", "sdpa"])
def traced(request, tiny_llm):
    """(llm, steps) of a mixed run: two prompts, a budget that cuts the first one, block size 2."""
    llm = tiny_llm("llama_gqa", request.param, block_size=2, max_model_len=32, max_num_batched_tokens=4, max_num_seqs=4)
    requests = llm.make_requests(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    return llm, list(trace_steps(llm, requests))


@pytest.fixture
def run_trace(monkeypatch, capsys, smollm2, smollm2_sdpa):
    """run_trace(*argv) -> (exit code, stdout, stderr), with the session's model instead of a fresh load.

    The machine has a ridge of 8, whatever it is.
    """

    def load(path, dtype, attention):
        return {"reference": smollm2, "sdpa": smollm2_sdpa}[attention]

    def run_trace(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(command, "load_model", load)
        monkeypatch.setattr(command, "measured_roofline", lambda dtype: Roofline(80e9, 10e9))
        code = run(command.main, argv)
        return code, *capsys.readouterr()

    return run_trace
