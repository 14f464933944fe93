"""What is said of one operator of torch: its name, the sizes of what it gave, and whether that is a view."""

import pytest
import torch
from torch import Tensor

from tinyllm.trace.kernels import KernelWatch


def kernels_of(function, *arguments: Tensor) -> list[str]:
    """The operators of a call, as they are told."""
    seen: list[str] = []
    with KernelWatch(seen.append):
        function(*arguments)
    return seen


X = torch.ones(2, 6)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x + 1, ["aten.add -> [2,6]"]),
        (lambda x: x.t(), ["aten.t -> [6,2] view"]),
        (lambda x: x[:, :3], ["aten.slice -> [2,3] view"]),
        (lambda x: x.split(3, dim=1), ["aten.split -> [2,3] [2,3] view"]),
        (lambda x: x.clone().add_(1), ["aten.clone -> [2,6]", "aten.add_ -> [2,6]"]),
        (lambda x: x.clone().view(12).zero_(), ["aten.clone -> [2,6]", "aten.view -> [12] view", "aten.zero_ -> [12]"]),
        (lambda x: torch.add(x, 1, out=torch.empty(2, 6)), ["aten.empty -> [2,6]", "aten.add -> [2,6]"]),
        (lambda x: x.topk(2), ["aten.topk -> [2,2] [2,2]"]),
        (lambda x: x.sum(), ["aten.sum -> []"]),
    ],
)
def test_a_view_is_marked_and_a_change_in_place_is_none(function, said):
    """What is changed in place shares its memory with the argument, as a view does, but it is the argument."""
    assert kernels_of(function, X) == said


def test_what_torch_composes_is_told_as_its_parts():
    assert kernels_of(torch.nn.functional.linear, X, torch.ones(3, 6)) == [
        "aten.t -> [6,3] view",
        "aten.mm -> [2,3]",
    ]


def test_nothing_is_told_while_it_is_paused():
    seen: list[str] = []
    with KernelWatch(seen.append) as watch:
        watch.is_paused = True
        y = X + 1
        watch.is_paused = False
        y = y * 2
    assert seen == ["aten.mul -> [2,6]"] and y.sum() == 48
