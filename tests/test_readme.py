"""What the README shows is what the program prints."""

import re
from pathlib import Path

import pytest
import torch

from tinyllm import ShapeError
from tinyllm.layers.attention.reference import attend

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def test_the_trace_is_an_excerpt_of_the_tested_snapshot():
    excerpt = blocks("text")[0]
    assert len(excerpt.splitlines()) > 30
    assert excerpt in (ROOT / "tests" / "data" / "trace_snapshot.txt").read_text()


def test_the_shape_error_is_the_one_that_is_raised():
    call, message = blocks("text")[1].splitlines()
    with pytest.raises(ShapeError) as error:
        eval(call.removeprefix(">>> "), {"torch": torch, "attend": attend})
    assert message == f"ShapeError: {error.value}"


def test_every_file_it_names_exists():
    names = set(re.findall(r"`((?:tinyllm|walkthrough|notebooks)/[\w./]*)`", README))
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_it_begins_with_the_two_commands_and_says_what_it_is_not():
    first = README.split("##")[0]
    assert first.index("make trace") < first.index("make test") < first.index("This is not [")
