"""What is alike is shown once: neighbouring equal layers, and the rows of more requests than are shown apart."""

import re
from dataclasses import replace

import pytest

from tinyllm import SamplingParams
from tinyllm.trace.fold import MOST_APART, fold_layers, fold_requests
from tinyllm.trace.html import render_page
from tinyllm.trace.record import RunRecord, StepRecord
from tinyllm.trace.session import start_run, trace_steps
from tinyllm.trace.terminal import Options, render_step


def stack(step: StepRecord, layers: list[int]) -> StepRecord:
    """A step whose layers are so many copies of its layer 1, but the first one."""
    before, behind = [
        [op for op in step.layer(None) if (op.path < "layers") == is_before] for is_before in (True, False)
    ]
    middle = [
        replace(op, layer=i, path=op.path.replace("layers.1", f"layers.{i}")) for i in layers for op in step.layer(1)
    ]
    return replace(step, operations=(*before, *step.layer(0), *middle, *behind))


def test_neighbouring_equal_layers_are_one_run_and_those_asked_for_stand_alone(traced):
    step = stack(traced[1][0], [1, 2, 3, 4])
    layers = {apart: [run.layers for run in fold_layers(step, apart)] for apart in ((), (3,), (0, 4), (1, 2, 3))}
    assert layers == {
        (): [(), (0,), (1, 2, 3, 4), ()],  # layer 0 has no residual to add yet
        (3,): [(), (0,), (1, 2), (3,), (4,), ()],
        (0, 4): [(), (0,), (1, 2, 3), (4,), ()],
        (1, 2, 3): [(), (0,), (1,), (2,), (3,), (4,), ()],
    }
    for run in fold_layers(step):
        assert run.flops * run.count == sum(op.flops or 0 for op in step.operations if (op.layer in run.layers) or (
            not run.layers and op in run.operations))  # fmt: skip


def test_a_layer_that_differs_begins_a_new_run(traced):
    step = stack(traced[1][0], [1, 2, 3, 4])
    operations = tuple(replace(op, bytes_read=1) if op.layer == 3 else op for op in step.operations)
    assert [run.layers for run in fold_layers(replace(step, operations=operations))] == [
        (),
        (0,),
        (1, 2),
        (3,),
        (4,),
        (),
    ]


def test_the_rows_of_three_requests_stay_apart_and_those_of_four_are_one(traced):
    step = next(step for step in traced[1] if len(step.requests) == 2)
    of_two = [op for op in step.layer(0) if op.request]
    others = {label: [replace(op, request=label) for op in of_two if op.request == "B"] for label in "CD"}
    assert MOST_APART == 3 and len(of_two) == 4
    assert all(len(row) == 1 for row in fold_requests([*step.layer(0), *others["C"]]))
    rows = fold_requests([*of_two, *others["C"], *others["D"]])
    assert [[op.request for op in row] for row in rows] == [["A", "B", "C", "D"]] * 2
    assert [{op.label for op in row} for row in rows] == [{"gather_kv"}, {"attend"}]


@pytest.mark.parametrize(("num_requests", "is_folded"), [(2, False), (3, False), (4, True), (5, True)])
def test_text_and_page_fold_from_the_same_number_of_requests_on(tiny_llm, num_requests, is_folded):
    llm = tiny_llm()
    requests = llm.make_requests([[i, i + 1] for i in range(num_requests)], SamplingParams(max_tokens=1))
    (step,) = trace_steps(llm, requests)
    run: RunRecord = replace(start_run(llm.engine, llm, ()), steps=(step,))
    text, page = "\n".join(render_step(step, None, Options())), render_page(run)
    assert (re.search(r"\d others ", text) is not None) == is_folded
    assert (f'data-requests="{num_requests}"' in page) == is_folded == ("data-requests=" in page)
