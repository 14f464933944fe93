"""What the README shows is what the program prints."""

import re
from pathlib import Path

import pytest
import torch

import tinyllm
from tinyllm import LLM, ShapeError
from tinyllm.batch import build_batch
from tinyllm.layers.attention.reference import attend, causal_mask

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def test_the_traces_are_excerpts_of_the_tested_snapshot():
    snapshot = (ROOT / "tests" / "data" / "trace_snapshot.txt").read_text()
    excerpt, *rows, _ = blocks("text")
    assert len(excerpt.splitlines()) > 30 and excerpt in snapshot
    assert len(rows) > 3
    for line in "".join(rows).splitlines():
        assert f"\n{line}\n" in snapshot


def test_the_reasons_state_numbers_of_that_run():
    """The numbers in the prose of "Why is this number there?" are those of the two prompts of the snapshot."""
    batch = build_batch([[1] * 5, [1] * 8], [0, 0], [[1, 2], [3, 4]], block_size=4)
    assert len(batch.token_ids) == 13 and len(batch.cu_seqlens_q) == len(batch.seq_lens) + 1
    assert batch.slot_mapping[0] == 4 and batch.query_lens_cpu == (5, 8) == batch.seq_lens_cpu
    assert (~causal_mask(8, 8, torch.device("cpu"))).sum() == 36 and 8 * 8 == 64


def test_the_shape_error_is_the_one_that_is_raised():
    call, message = blocks("text")[-1].splitlines()
    with pytest.raises(ShapeError) as error:
        eval(call.removeprefix(">>> "), {"torch": torch, "attend": attend})
    assert message == f"ShapeError: {error.value}"


def test_its_python_runs(smollm2_sdpa, monkeypatch, capsys):
    monkeypatch.setattr(tinyllm, "LLM", lambda: LLM(smollm2_sdpa))
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, names)
    out = capsys.readouterr().out
    assert out.startswith(" Paris")
    before, _, traced = out.partition("SmolLM2")
    assert before.count("length") == 4, "two answers of the first script, two of the second"
    assert "A length: ' Paris.'" in traced
    assert "== STEP 1  DECODE" in out


def test_every_file_it_names_exists():
    names = set(re.findall(r"`((?:tinyllm|walkthrough|notebooks)/[\w./]*)`", README))
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_it_begins_with_the_two_commands_and_says_what_it_is_not():
    first = README.split("##")[0]
    assert first.index("make trace") < first.index("make test") < first.index("This is not [")
