"""The columns that a width gives: every row is there, within it, in ASCII, and no dimension is cut."""

import re

import pytest

from tinyllm.trace.sums import sum_up
from tinyllm.trace.terminal import (
    Options,
    render_header,
    render_next,
    render_totals,
)

WIDTHS = [60, 79, 80, 99, 100, 120, 138, 140, 160, 200]
VIEWS = [{}, {"full": True}, {"layers": (1,)}, {"layers": (0, 1)}, {"layers": (0, 1), "full": True}, {"step": 1},
         {"op": "attend"}, {"op": "rms_norm", "layers": (0, 1), "ridge": 8.2}, {"ridge": 1.0}]  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS)
def test_lines_are_ascii_and_fit(traced, view, width, render):
    llm, steps = traced
    options = Options(**view, width=width)
    lines = [line for step in render(steps, **view, width=width) for line in step]
    lines += render_header(["title"], {**llm.loaded.config.dims(), **llm.engine.cache_config.dims()}, options)
    lines += [*render_totals(sum_up(steps), options), *render_next(["--full", "--op attend"] * 9, options)]
    assert len(lines) > len(steps) * (1 if "step" in view else 5)
    for line in lines:
        assert len(line) <= width and line.isascii() and line == line.rstrip(), line


@pytest.mark.parametrize("width", WIDTHS)
def test_a_width_loses_no_row_and_cuts_no_dimension(traced, width, render):
    """Narrower rows say less, but the same rows are there, with the same FLOPs and bytes; no shape ends in dots."""
    _, steps = traced
    for lines, usual in zip(render(steps, width=width), render(steps), strict=True):
        kinds, usual_kinds = (
            [line[:17].split()[:3] for line in text if line[0] in "PMERGWV=" and line[:11] != "P positions"]
            for text in (lines, usual)
        )  # the positions stand with the ids where there is room for both
        assert kinds[1:] == usual_kinds[1:] and len(kinds) > 10
        assert not [line for line in lines if re.search(r"\[[^\]]*\.\.\.", line) and line[0] in "MERGWV"]
        if 80 <= width <= 100:
            ends = [line.split()[-3:] for line in lines if line[0] in "MERGW"]
            assert ends == [line.split()[-3:] for line in usual if line[0] in "MERGW"]


def test_below_80_columns_a_row_has_symbols_alone_and_from_139_its_source(traced, render):
    _, steps = traced
    rows = {
        width: next(line for line in render(steps, width=width)[0] if "| qkv_proj" in line)
        for width in (79, 80, 139, 200)
    }
    assert "[T,H]@[H,qkv]" in rows[79] and "[4,64]" not in rows[79]
    assert "[T,H]@[H,qkv]" in rows[80] and "[4,64]" in rows[80]
    assert re.search(r"  layers/linear\.py:\d+$", rows[139])
    assert re.search(r"  layers/linear\.py:\d+ +Multiply each row by the weight$", rows[200])
