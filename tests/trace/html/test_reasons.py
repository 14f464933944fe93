"""What a row says when it is opened."""

import re
from dataclasses import replace

from tinyllm.trace.html import render_fragment, render_page
from tinyllm.trace.shape_text import show_tensor


def test_a_row_says_why(run, page):
    [step, *_] = page.find("details", "step")
    row = next(row for row in step.find("tr") if row.find("th") and row.find("th")[0].text == "qkv_proj")
    operation = next(op for op in run.steps[0].operations if op.label == "qkv_proj")
    sizes = operation.sizes
    for part in (
        f"[T,H] @ [H,qkv] → [T,qkv] [{sizes['num_tokens']},64] @ [64,128] → [{sizes['num_tokens']},128]",
        operation.summary,
        f"FLOP: 2*num_tokens*in_size*out_size = 2·{sizes['num_tokens']}·64·128 = {operation.flops:,}",
        f"tinyllm/{operation.source}",
    ):
        assert part in row.text
    attend = next(row for row in step.find("tr") if row.find("th") and row.find("th")[0].text == "attend A")
    named = [item.text.split(" ")[0] for item in attend.find("ol")[0].find("code")]
    assert named == ["grouped_q", "scores", "scaled", "is_hidden", "masked", "weights", "out"]


def test_backticks_in_a_meaning_become_code(default_run):
    text = render_page(replace(default_run, steps=default_run.steps[:1]))
    assert (
        "Row <code>token_ids[i]</code> of the table" in text and "(vLLM: <code>reshape_and_cache_flash</code>)" in text
    )


def test_the_pairs_of_attention_are_counted_one_by_one(run, page):
    num_seen = 0
    for step, part in zip(run.steps, page.find("details", "step"), strict=True):
        lines = {node.find("th")[0].text: node for node in part.find("tr") if node.find("th")}
        for request in step.requests:
            kept = sum(request.num_computed_tokens + row + 1 for row in range(request.query_len))
            line = lines[f"attend {request.label}"]
            assert [small.text for small in line.find("small")] == [
                f" {kept}/{request.query_len * request.seq_len} pairs"
            ]
            num_seen += kept < request.query_len * request.seq_len
        assert not lines["qkv_proj"].find("small")
    assert num_seen > 0, "else no mask hides anything"


def test_the_pairs_of_many_requests_are_summed(crowd, parse):
    step = crowd.steps[0]
    table = parse(render_fragment(crowd)).find("details", "layers")[1]
    (line,) = [line for line in table.find("tr") if line.find("th") and line.find("th")[0].text.startswith("attend ")]
    each = [(sum(range(r.num_computed_tokens + 1, r.seq_len + 1)), r.query_len * r.seq_len) for r in step.requests]
    kept, dense = (sum(counts) for counts in zip(*each, strict=True))
    assert [small.text for small in line.find("small")] == [f" {kept}/{dense} pairs"]
    heads, *rows = ([cell.text for cell in row.elements] for row in line.find("table", "shares")[0].find("tr"))
    assert [row[heads.index("pairs")] for row in rows] == [f"{some}/{every}" for some, every in each]


def test_a_named_value_reads_as_everywhere(run, page):
    attend = next(node for node in page.find("tr") if node.find("th") and node.find("th")[0].text == "attend A")
    operation = next(operation for operation in run.steps[0].operations if operation.title == "attend A")
    shown = [item.find("code")[0].text for item in attend.find("ol")[0].find("li")]
    assert shown == [show_tensor(operation.tensors[name]) for name in operation.locals]
    assert len(shown) > 4 and re.fullmatch(r"grouped_q \[s,nk,g,d\]=\[\d+,2,2,16\]", shown[0])
