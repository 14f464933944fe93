"""One traced run of a tiny model, for the files of this folder."""

import pytest

from tinyllm import SamplingParams
from tinyllm.trace.session import trace_steps

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42]]


@pytest.fixture(scope="module", params=["reference", "sdpa"])
def traced(request, tiny_llm):
    """(llm, steps) of a mixed run: two prompts, a budget that cuts the first one, block size 2."""
    llm = tiny_llm("llama_gqa", request.param, block_size=2, max_model_len=32, max_num_batched_tokens=4, max_num_seqs=4)
    requests = llm.make_requests(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    return llm, list(trace_steps(llm, requests))
