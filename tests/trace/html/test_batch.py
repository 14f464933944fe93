"""The picture of the packed batch has the numbers of the batch."""

from itertools import pairwise

import pytest

from tinyllm.trace.html import render_page


def test_the_borders_in_the_batch_are_cu_seqlens(run, page, picture):
    for step in run.steps:
        svg = picture(page, f"Packed batch of step {step.index}")
        ends = step.batch_values["cu_seqlens_q"]
        parts = svg.with_data("request")
        assert [part.data("request") for part in parts] == [request.label for request in step.requests]
        assert [len(part.find("rect", "cell")) for part in parts] == [end - start for start, end in pairwise(ends)]
        cells = svg.find("rect", "cell")
        borders = [line.number("x1") for line in svg.find("line", "border")]
        unit = cells[0].number("width")
        assert [round((x - borders[0]) / unit) for x in borders] == ends
        assert [round((cell.number("x") - borders[0]) / unit) for cell in cells] == list(range(ends[-1]))
        for y, name in ((106, "positions"), (128, "slot_mapping")):
            below = [text.text for text in svg.find("text") if text.number("y") == y]
            assert below[1:] == [str(value) for value in step.batch_values[name]]
        assert svg.text.count("▲") == len(step.batch_values["logits_indices"])


def test_a_large_batch_is_one_bar_a_request(tiny_llm, parse, picture, record_run):
    llm = tiny_llm("llama_gqa", "reference", block_size=2, max_num_seqs=4, num_blocks=99, max_model_len=99)
    run = record_run(llm, ["a" * 90, "b", "c"], 1)
    svg = picture(parse(render_page(run)), "Packed batch of step 0")
    bars = svg.with_data("request")
    assert [(bar.data("request"), bar.data("rows")) for bar in bars] == [
        ("A", "0..89"),
        ("B", "90..90"),
        ("C", "91..91"),
    ]
    widths = [bar.find("rect")[0].number("width") for bar in bars]
    assert widths[0] == pytest.approx(800 * 90 / 92, abs=0.1) and widths[1:] == [48, 48]
    assert [text.text for text in svg.find("text", "number")] == ["0", "90", "91", "92"]
