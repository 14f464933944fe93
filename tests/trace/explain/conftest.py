"""A run of two requests, and an explanation's parts by label."""

import pytest

from tinyllm import SamplingParams
from tinyllm.trace.explain import explain
from tinyllm.trace.record import StepRecord
from tinyllm.trace.session import trace_steps


@pytest.fixture(scope="module")
def pair(tiny_llm) -> list[StepRecord]:
    """A prefill of five and three tokens and its decodes, in blocks of four."""
    llm = tiny_llm("llama_gqa", block_size=4, num_blocks=9, max_model_len=32)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return list(trace_steps(llm, llm.make_requests([[5, 6, 7, 8, 9], [40, 41, 42]], params)))


@pytest.fixture(scope="session")
def meanings():
    """meanings(word, step): the parts of each meaning by label, the title under ""; wrapped lines are joined."""

    def meanings(word: str, step: StepRecord | None = None) -> list[dict[str, list[str]]]:
        found: list[dict[str, list[str]]] = []
        label = ""
        for line in explain(word, step):
            if line.startswith("Not to be confused"):
                break
            if line and not line.startswith("  "):
                found.append({"": [line]})
            elif line.startswith("    ") and not line.startswith(" " * 10):
                raise AssertionError(f"an odd indentation: {line!r}")
            elif line.startswith(" " * 10):
                found[-1][label].append(line.strip())
            elif line:
                label, text = line[2:10].strip(), line[10:]
                found[-1][label] = [text]
        return found

    return meanings


@pytest.fixture(scope="session")
def one(meanings):
    """one(word, title, step): the only meaning whose title starts so."""

    def one(word: str, title: str, step: StepRecord | None = None) -> dict[str, list[str]]:
        fitting = [meaning for meaning in meanings(word, step) if meaning[""][0].startswith(title)]
        assert len(fitting) == 1, [meaning[""] for meaning in meanings(word, step)]
        return fitting[0]

    return one


@pytest.fixture(scope="session")
def has_parts():
    """has_parts(meaning, *labels): whether each part has a text."""

    def has_parts(meaning: dict[str, list[str]], *labels: str) -> bool:
        return all("".join(meaning.get(label, [])).strip() for label in labels)

    return has_parts
