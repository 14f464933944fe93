"""The text: at most 100 columns, ASCII, nothing lost between the rows and the totals."""

import re
from pathlib import Path

import pytest

from tinyllm.trace.terminal import (
    WIDTH,
    Options,
    render_completions,
    render_header,
    render_prompts,
    render_step,
)
from tinyllm.trace.terminal.text import cut_to, show_list, show_number, show_runs

README = Path(__file__).parents[2] / "README.md"


def render(steps, **options) -> list[list[str]]:
    pairs = zip(steps, [None, *steps[:-1]], strict=True)
    return [list(render_step(step, previous, Options(**options))) for step, previous in pairs]


@pytest.mark.parametrize(
    "options", [{}, {"full": True}, {"layers": (1,)}, {"layers": (0, 1)}, {"layers": (0, 1), "full": True}]
)
def test_lines_are_ascii_and_fit(traced, options):
    llm, steps = traced
    lines = [line for step in render(steps, **options) for line in step]
    lines += render_header(["title"], {**llm.loaded.config.dims(), **llm.engine.cache_config.dims()})
    for line in lines:
        assert len(line) <= WIDTH and line.isascii() and line == line.rstrip(), line


def test_a_prefill_shows_one_layer_in_full_and_folds_the_others(traced):
    _, steps = traced
    lines = render(steps)[0]
    text = "\n".join(lines)
    assert "layer 0 of 2" in text and "layer 1" in text and "layer 1 of 2" not in text
    for row in ("qkv_proj", "rope q", "rope k", "write_kv", "gather_kv A", "attend A", "o_proj", "gate_up_proj",
                "silu_and_mul", "down_proj", "gather_rows", "lm_head", "sample", "cu_seqlens_q", "block_table"):  # fmt: skip
        assert sum(row in line for line in lines) >= 1, row
    assert re.search(r"^M \| qkv_proj +\[T,H\]@\[H,qkv\] -> \[T,qkv\] +\[4,64\]@\[64,128\]->\[4,128\] ", text, re.M)


def test_the_six_steps_of_attention_are_named(traced):
    llm, steps = traced
    text = "\n".join(render(steps)[0])
    names = ["grouped_q", "scores", "scaled", "masked", "weights", "out"]
    if llm.loaded.attention == "reference":
        assert [name for name in re.findall(r"\|\. (\w+)", text) if name in names] == names


def test_a_decode_step_shows_what_differs_and_counts_the_rest(traced):
    _, steps = traced
    decode = render(steps)[3]
    assert len(decode) < len(render(steps, full=True)[3]) / 2
    text = "\n".join(decode)
    assert "attend A" in text and "attend B" in text and "as before" in text
    assert not re.search(r"^M \| qkv_proj", text, re.M)
    assert re.search(r"! 1\.\d\dx the FLOPs of step 2, 1\.\d\dx its bytes", text)


def test_full_shows_every_row_of_every_step(traced):
    _, steps = traced
    for step, lines in zip(steps, render(steps, full=True, layers=(0, 1)), strict=True):
        rows = [line for line in lines if re.match(r"[MERGWV] ", line)]
        assert len(rows) == len(step.operations)
        assert "as before" not in "\n".join(lines)


def test_nothing_is_lost_between_the_rows_and_the_total(traced):
    """The FLOPs printed row by row and by fold add up to the step's total, to the three digits shown."""
    _, steps = traced
    for step, lines in zip(steps, render(steps), strict=True):
        counts = [
            line[79:86].strip() for line in lines if re.match(r"[MERGWV] |  (\| )?\d+ as before|    layers? ", line)
        ]
        assert sum(map(parse_si, counts)) == pytest.approx(step.flops, rel=0.01)


def parse_si(text: str) -> float:
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1)
    return float(text.rstrip("kMGT")) * scale


def test_a_chunk_says_that_its_token_is_thrown_away(traced):
    _, steps = traced
    first = "\n".join(render(steps)[0])
    assert "A new +4 " in first and "4 of the 5 tokens left" in first and "thrown away" in first
    assert "0 tokens out" in first


def test_tokens_cannot_move_the_cursor_and_wide_ones_are_measured():
    text = "\x1b[2J\n\t日本語" * 20
    (line,) = render_prompts([("A", text, [["\x1b[2J", "\n", "\t日本語" * 20]])])
    assert line.isprintable() and "\\x1b[2J" in line
    assert sum(2 if ord(char) > 0x2E80 else 1 for char in line) <= WIDTH


def test_an_answer_stays_on_its_line_within_the_width():
    lines = list(render_completions([("A", "length", "word " * 100), ("B", "stop", "\x9b31m\u202eab")]))
    assert [len(line) for line in lines] == [WIDTH, len("B stop: '\\x9b31m\\u202eab'")]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (14_400_000, "14.4M"),
        (999_499, "999k"),
        (999_500, "1.00M"),
        (5e15, "5000T"),
    ],
)
def test_numbers_keep_three_digits(value, text):
    assert show_number(value) == text


def test_lists_andshow_runs():
    assert show_list([1, 2]) == "[1,2]"
    assert show_list(range(20)) == "[0,1,2,3,4,...,18,19]"
    assert show_runs([4, 5, 6, 12, 20, 21]) == "4..6,12,20..21"
    assert cut_to("abcdefgh", 6) == "abc..."
