"""Recorded runs of a tiny model, and their calls."""

import pytest

from tinyllm import SamplingParams
from tinyllm.trace.annotate import Run, find_source, record_calls

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42]]


@pytest.fixture(scope="module", params=["reference", "sdpa"])
def runs(request, tiny_llm) -> tuple[Run, ...]:
    """A prefill and a decode; with the second body, of a sampled request, so that the sampler's own files run, too."""
    llm = tiny_llm("llama_gqa", request.param, block_size=4, max_model_len=32)
    random = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, max_tokens=2,
                            min_tokens=2, stop_token_ids=(7,))  # fmt: skip
    return record_calls(llm, PROMPTS, random if request.param == "sdpa" else None)


@pytest.fixture(scope="module")
def plain(tiny_llm) -> tuple[Run, ...]:
    return record_calls(tiny_llm("llama_gqa", block_size=4, max_model_len=32), PROMPTS)


@pytest.fixture(scope="session")
def calls_of():
    """calls_of(run, path): the run's calls of a file's functions, by qualified name and first line."""

    def calls_of(run: Run, path: str) -> dict[tuple[str, int], list]:
        found: dict[tuple[str, int], list] = {}
        for root in run.calls:
            for call in root.walk():
                if call.spec.file == find_source(path):
                    found.setdefault((call.spec.qualname, call.spec.first_line), []).append(call)
        return found

    return calls_of
