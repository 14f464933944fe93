"""The grammar of shapes and formulas, and that every view keeps to it."""

import re

from tinyllm.trace.explain import explain
from tinyllm.trace.html import render_page
from tinyllm.trace.record import RunRecord
from tinyllm.trace.shape_text import (
    fill_numbers,
    fill_template,
    in_numbers,
    show_shape,
    show_tensor,
    strip_annotation,
    with_symbols,
)
from tinyllm.trace.terminal import Options, render_step
from tinyllm.trace.text import show_decimal

DIMS = {"num_heads": 4, "num_kv_heads": 2, "group_size": 2}


def test_statements_and_formulas_in_symbols():
    assert strip_annotation('y: Float[Tensor, "num_tokens 1"] = f( x, dim=-1, )', "y") == "= f(x, dim=-1)"
    assert strip_annotation("q, k, v = heads.split([1, 2])", "k") == "= heads.split([1, 2])"
    assert strip_annotation("del x", "x") == "del x"
    assert with_symbols("2*num_tokens*q_size+e") == "2*T*nq*d+e"
    assert [show_decimal(v) for v in (0, 0.01234, -2.06, 42.3, 423.4, 1e9)] == [
        "0",
        "0.012",
        "-2.1",
        "42",
        "423",
        "1e+09",
    ]


def test_one_tensor_reads_alike_in_every_view(traced):
    """A name, what each axis is, an equals sign without blanks, and the sizes."""
    _, steps = traced
    step = next(step for step in steps if len(step.requests) == 2)
    operation = next(operation for operation in step.operations if operation.title == "attend B")
    num_shown = 0
    text = "\n".join(render_step(step, None, Options(op="attend", layers=(0,))))
    page = re.sub(
        r"<[^>]*>", "", render_page(RunRecord("tiny", "float32", "", (1, 2, 3, 4, 5, 6), 1, DIMS, (), (step,), ()))
    )
    for name, tensor in operation.tensors.items():
        shape = show_shape(tensor.words, tensor.shape)
        assert show_tensor(tensor) == f"{name} {shape}" and re.fullmatch(r"\[[^ ]*\]=\[[0-9,]*\]", shape)
        assert f" {shape} {tensor.dtype}" in text
        num_shown += name in operation.locals
        assert name not in operation.locals or show_tensor(tensor) in page
    assert num_shown > 0 or operation.source.startswith("layers/attention/sdpa")
    assert "[L,2,NB,bs,nk,d]=[1,2,3,4,5,6]" in page
    for name, tensor in step.batch.items():
        assert f"  here    {show_shape(tensor.words, tensor.shape)} = [" in "\n".join(explain(name, step))


def test_a_template_s_unknown_names_are_marked_or_named():
    shapes = {"x": (3, 4), "w": (5, 4), "pieces[0]": (1, 2)}
    assert fill_template("{x}@{w.T} -> {y} {pieces[0]}", shapes, in_numbers) == "[3,4]@[4,5] -> ? [1,2]"
    assert fill_template("R x {pieces[1]}", shapes, in_numbers, lambda name: name.upper()) == "R x PIECES[1]"
    assert fill_numbers("2*num_tokens*e+q_size", {"num_tokens": 7, "q_size": 3}) == "2*7*e+3"
