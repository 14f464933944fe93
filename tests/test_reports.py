"""Public reports about shape checking elsewhere, reworded as cases; REPORTS says which test shows each."""

import importlib
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

from tinyllm.shapes import ShapeError, evaluate

REPORTS = {
    "case-113": [
        "test_reports.py::test_case_113_the_fields_of_a_dataclass_are_checked_against_each_other",
        "test_shapes.py::test_a_field_of_a_dataclass",
    ],
    "case-114": [
        "test_reports.py::test_case_114_an_expression_is_checked_where_the_hook_is",
        "test_reports.py::test_case_114_without_the_hook_nothing_is_checked",
        "test_checking.py::test_checks_are_on_by_default_for_every_function_of_the_list_and_no_other",
        "test_checking.py::test_0_wraps_nothing",
    ],
}
MODULE = """
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass
class Pair:
    line: Float[Tensor, " a"]
    square: Float[Tensor, "a a"]


@dataclass(frozen=True)
class FrozenPair:
    line: Float[Tensor, " a"]
    square: Float[Tensor, "a a"]


def every_other(x: Float[Tensor, "batch d"], step: int = 2) -> Float[Tensor, "batch d//2"]:
    return x[:, ::step]
"""


@pytest.fixture
def import_module(tmp_path, monkeypatch):
    """import_module(has_hook): MODULE, with the import hook that tinyllm installs over its own modules or without."""
    (tmp_path / "module_of_a_report.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def import_module(has_hook: bool):
        sys.modules.pop("module_of_a_report", None)
        if not has_hook:
            return importlib.import_module("module_of_a_report")
        with jaxtyping.install_import_hook("module_of_a_report", "tinyllm.shapes.typechecker"):
            return importlib.import_module("module_of_a_report")

    yield import_module
    sys.modules.pop("module_of_a_report", None)


def test_every_report_of_this_part_has_its_test():
    assert list(REPORTS) == ["case-113", "case-114"]
    for place in (place for places in REPORTS.values() for place in places):
        path, _, name = place.partition("::")
        assert f"\ndef {name}(" in (Path(__file__).parent / path).read_text("utf-8"), place


@pytest.mark.parametrize("name", ["Pair", "FrozenPair"])
def test_case_113_the_fields_of_a_dataclass_are_checked_against_each_other(name, import_module):
    pair = getattr(import_module(has_hook=True), name)
    assert pair(torch.zeros(4), torch.zeros(4, 4)).square.shape == (4, 4)
    for square, axis in (((3, 3), 3), ((4, 3), 3)):
        with pytest.raises(ShapeError) as error:
            pair(line=torch.zeros(4), square=torch.zeros(square))
        assert str(error.value) == (
            f"module_of_a_report.{name}.__init__: square is {square} float32, expected [a a]: "
            f"the size of dimension a is {axis} which does not equal the existing value of 4. Bound before: a=4"
        )


def test_case_114_an_expression_is_checked_where_the_hook_is(import_module):
    """The sign for whole division stands in the annotation, so it must stand in the message as well."""
    module = import_module(has_hook=True)
    assert module.every_other(torch.zeros(2, 6)).shape == (2, 3)
    for step, width in ((1, 6), (3, 2)):
        with pytest.raises(ShapeError) as error:
            module.every_other(torch.zeros(2, 6), step)
        assert str(error.value) == (
            f"module_of_a_report.every_other: the result is (2, {width}) float32, expected [batch d//2]: the size of "
            f"dimension d//2 is {width} which does not equal the existing value of 3. Bound before: batch=2, d=6"
        )


def test_case_114_without_the_hook_nothing_is_checked(import_module):
    """Annotations alone do nothing, which is why the other tests must show that a wrong shape is caught."""
    module = import_module(has_hook=False)
    assert module.every_other(torch.zeros(2, 6), 1).shape == (2, 6)
    assert module.Pair(torch.zeros(4), torch.zeros(3, 3)).square.shape == (3, 3)


@pytest.mark.parametrize("sign", ["/", "//"])
def test_both_signs_of_division_are_whole_division(sign):
    assert evaluate(f"d{sign}2", {"d": 7}) == 3
    assert evaluate(f"(d+1) {sign} 2{sign}2", {"d": 7}) == 2
