"""The tables: every row of the record, with its costs, and what it waits for."""

from collections import Counter
from dataclasses import replace

import pytest

from tinyllm.trace.fold import fold_layers
from tinyllm.trace.html import render_fragment, render_page
from tinyllm.trace.text import show_number


def test_every_step_and_row_is_there(run, page, rows_of):
    parts = page.find("details", "step")
    assert [part.data("step") for part in parts] == [str(step.index) for step in run.steps]
    for step, part in zip(run.steps, parts, strict=True):
        tables = part.find("details", "layers")
        rows = [int(table.data("layers")) * len(rows_of(table)) for table in tables]
        assert sum(rows) == len(step.operations)
        shown = [row.find("th")[0].text for table in tables for row in rows_of(table)]
        folded = [op for layers in fold_layers(step) for op in layers.operations]
        assert shown == [op.label + (f" {op.request}" if op.request else "") for op in folded]
        assert step.phase in part.find("h3")[0].text


def test_the_rows_add_up_to_the_step(run, page):
    for step, part in zip(run.steps, page.find("details", "step"), strict=True):
        flops = num_bytes = 0
        for table in part.find("details", "layers"):
            values = [[int(n.attributes["value"] or 0) for n in row.find("data")] for row in table.find("tr")]
            count = int(table.data("layers"))
            flops += count * sum(row[0] for row in values if len(row) == 2)
            num_bytes += count * sum(row[-1] for row in values if row)
        assert (flops, num_bytes) == (step.flops, step.num_bytes)
    totals = page.find("section")[4].find("tbody")[0].find("tr")
    shown = [[int(data.attributes["value"] or 0) for data in row.find("data")] for row in totals]
    assert shown == [[step.flops, step.num_bytes] for step in run.steps]


def test_rows_of_many_requests_are_one_line_with_each_share(crowd, parse, rows_of):
    step = crowd.steps[0]
    table = parse(render_fragment(crowd)).find("details", "layers")[1]
    folded = [line for line in rows_of(table) if "data-requests" in line.attributes]
    first, last = step.requests[0].label, step.requests[-1].label
    assert [line.find("th")[0].text for line in folded] == [
        f"{name} {first}…{last}" for name in ("gather_kv", "attend")
    ]
    for line, name in zip(folded, ("gather_kv", "attend"), strict=True):
        calls = [op for op in step.layer(0) if op.label == name]
        flops, num_bytes = (int(data.attributes["value"] or -1) for data in line.find("data"))
        assert (flops, num_bytes) == (sum(op.flops or 0 for op in calls), sum(op.num_bytes for op in calls))
        [shares] = line.find("table", "shares")
        heads = [head.text for head in shares.find("thead")[0].find("th")]
        assert heads[0] == "request" and "S" in heads and heads[-1] == "bytes"
        cells = [[cell.text for cell in share.elements] for share in rows_of(shares)]
        assert [row[0] for row in cells] == [request.label for request in step.requests]
        assert [row[heads.index("S")] for row in cells] == [str(request.seq_len) for request in step.requests]
        assert [row[-1] for row in cells] == [show_number(op.num_bytes) for op in calls]
    low, high = (pick(request.query_len for request in step.requests) for pick in (min, max))
    assert f"[s,nq,d].[S,nk,d] → [s,nq,d] [{low}–{high},9,64]." in folded[1].text


def test_a_folded_row_shows_what_was_in_the_step_before(crowd, parse, rows_of):
    table = parse(render_fragment(crowd)).find("details", "step")[1].find("details", "layers")[1]
    [attend] = [line for line in rows_of(table) if line.find("th")[0].text.startswith("attend")]
    low, high = (pick(request.query_len for request in crowd.steps[0].requests) for pick in (min, max))
    assert f"in the step before: [{low}–{high},9,64]." in attend.text


def test_reasons_that_stand_above_are_not_said_again(default_run, parse, rows_of):
    tables = parse(render_page(default_run, 12.0)).find("details", "step")[0].find("details", "layers")
    first, others = ({line.find("th")[0].text: line for line in rows_of(table)} for table in tables[1:3])
    assert len(first) > 15 and len(others) > 15 and all(line.find("details") for line in first.values())
    assert {name for name, line in others.items() if line.find("details")} == set()
    for name, line in others.items():
        shown = line.find("td", "dims")[0].text
        assert first[name].find("summary")[0].text == shown
    assert "A row that does not open" in tables[2].text and "A row that does not open" not in tables[1].text


def test_a_row_that_differs_from_the_step_before_says_from_what(default_run, parse):
    step = parse(render_page(default_run)).find("details", "step")[1]
    row = next(row for row in step.find("tr") if row.find("th") and row.find("th")[0].text == "qkv_proj")
    assert "in the step before: [13,576] @ [576,960] → [13,960]" in row.text


def test_what_a_row_waits_for_depends_on_the_ridge(run, parse):
    first = replace(run, steps=run.steps[:1])

    def waits(ridge: float | None) -> Counter[str]:
        tables = parse(render_page(first, ridge)).find("details", "layers")
        rows = [row for table in tables for row in table.find("tbody")[0].find("tr")]
        return Counter(row.find("td")[-1].text for row in rows)

    assert waits(1e9).keys() == {"memory", ""} and waits(1e-9)["compute"] > 20
    assert not {"memory", "compute"} & waits(None).keys()
    with pytest.raises(ValueError, match="ridge is 0"):
        render_page(run, 0)
