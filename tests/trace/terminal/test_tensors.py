"""The tensor rows: one layer in full, equal ones folded, what is as before in one line, and nothing lost."""

import re
from dataclasses import replace

import pytest

from tinyllm import SamplingParams
from tinyllm.trace.session import trace_steps
from tinyllm.trace.text import show_number

WIDTHS = [60, 79, 80, 99, 100, 120, 138, 140, 160, 200]


def test_a_prefill_shows_one_layer_in_full_and_folds_the_others(traced, render):
    _, steps = traced
    lines = render(steps)[0]
    text = "\n".join(lines)
    assert "\n= layer 0 of 2 " in text and "layer 1" in text and "layer 1 of 2" not in text
    for row in ("qkv_proj", "rope q", "rope k", "write_kv", "gather_kv A", "attend A", "o_proj", "gate_up_proj",
                "silu_and_mul", "down_proj", "gather_rows", "lm_head", "sample", "cu_seqlens_q", "block_table"):  # fmt: skip
        assert sum(row in line for line in lines) >= 1, row
    assert re.search(r"^M \| qkv_proj +\[T,H\]@\[H,qkv\] -> \[T,qkv\] +\[4,64\]@\[64,128\]->\[4,128\] ", text, re.M)


def test_the_six_steps_of_attention_are_named(traced, render):
    llm, steps = traced
    names = ["grouped_q", "scores", "scaled", "masked", "weights", "out"]
    text = "\n".join(render(steps, full=True)[0]).partition("R sample")[0]
    is_reference = llm.loaded.attention == "reference"
    assert ("|. masked " in text) == is_reference, "the other body is one kernel"
    if is_reference:
        assert [name for name in re.findall(r"\|\. (\w+)", text) if name in names] == names
        lines = render(steps)[0]
        inside = lines[next(i for i, line in enumerate(lines) if "|. inside" in line) :][:3]
        assert [line[17:].split(maxsplit=2) for line in inside] == [
            ["[s,nk,g,d]", "[4,2,2,16]", "grouped_q, out"],
            ["[nk,g,s,S]", "[2,2,4,4]", "scores, scaled, masked, weights"],
            ["[s,S]", "[4,4]", "is_hidden"],
        ]


def test_a_decode_step_shows_what_differs_and_counts_the_rest(traced, render):
    _, steps = traced
    decode = render(steps)[3]
    assert len(decode) < len(render(steps, full=True)[3]) / 2
    text = "\n".join(decode)
    assert "attend A" in text and "attend B" in text and "as before" in text
    assert not re.search(r"^M \| qkv_proj", text, re.M)


def test_of_many_requests_two_are_shown_and_the_others_summed(tiny_llm, render):
    """The two are of both phases where a step has both; nothing is folded in a step that is asked for."""
    llm = tiny_llm(max_num_batched_tokens=8)
    requests = llm.make_requests(
        [[1, 2], [3], [4], [5], [6, 7, 8, 9, 10, 11]], SamplingParams(max_tokens=3, ignore_eos=True)
    )
    steps = list(trace_steps(llm, requests))
    assert [step.phase for step in steps[:3]] == ["prefill", "mixed", "decode"]
    shown = {0: "AB", 1: "AE", 2: "AB"}
    for index, labels in shown.items():
        lines = render(steps)[index]
        assert re.findall(r"attend ([A-E]) ", "\n".join(lines)) == list(labels)
        (row,) = [line for line in lines if re.search(r"\d others ", line)]
        others = [request.label for request in steps[index].requests if request.label not in labels]
        assert f"{2 * len(others)} others " in row and f"gather_kv, attend of {', '.join(others)} " in row
        rows = [row for row in steps[index].layer(0) if row.request in others]
        assert row.split()[-3:-1] == [
            show_number(sum(r.flops for r in rows)),
            show_number(sum(r.num_bytes for r in rows)),
        ]
        whole = render(steps, step=index)[index]
        assert not re.search(r"\d others ", "\n".join(whole)) and sum("| attend" in line for line in whole) == len(
            labels
        ) + len(others)


def test_full_shows_every_row_of_every_step(traced, render):
    _, steps = traced
    for step, lines in zip(steps, render(steps, full=True, layers=(0, 1)), strict=True):
        rows = [line for line in lines if re.match(r"[MERGWV] ", line)]
        assert len(rows) == len(step.operations)
        assert "as before" not in "\n".join(lines)


def test_nothing_is_lost_between_the_rows_and_the_total(traced, render):
    """The FLOPs printed row by row and by fold add up to the step's total, to the three digits shown."""
    _, steps = traced
    for step, lines in zip(steps, render(steps), strict=True):
        counts = [
            line[79:86].strip()
            for line in lines
            if re.match(r"[MERGWV] |  (\| )?\d+ (as before|others)|    layers? ", line)
        ]
        assert sum(map(parse_si, counts)) == pytest.approx(step.flops, rel=0.01)


def parse_si(text: str) -> float:
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1)
    return float(text.rstrip("kMGT")) * scale


def test_the_residual_stream_is_one_line_whatever_the_width(traced, monkeypatch, render):
    _, steps = traced
    assert not any("residual rms" in line for line in render(steps)[0])
    grown = [replace(step, residual_rms=tuple(2.0 + 13 * i for i in range(30))) for step in steps]
    for width in WIDTHS:
        (row,) = [line for line in render(grown, width=width)[0] if "residual rms" in line]
        numbers = row.split("places")[1].split()
        assert len(row) <= width and numbers[0] == "2" and numbers[-1] == "379"
        assert ("..." not in numbers) == (len(numbers) == 30) == (width == 200)


def test_write_kv_says_how_many_slots_it_fills_where_that_fits(traced, render):
    _, steps = traced
    num_blocks = steps[0].dims["num_blocks"]
    for step in steps:
        count = step.dims["num_tokens"]
        rows = {
            width: next(line for line in render([step], width=width)[0] if "| write_kv" in line)
            for width in (60, 80, 200)
        }
        slots = f"{count} slot{'s' if count > 1 else ''} of [2,{num_blocks},2,2,16]"
        assert f"2x[{count},2,16]->{slots} " in rows[200]
        assert "slot" not in rows[60] and "slot" not in rows[80]
        assert f"[2,{num_blocks},2,2,16]" in rows[80]
