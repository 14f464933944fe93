"""The plain-Python rows: the user's texts stay on their lines, and a step says what becomes of its tokens."""

import re
from dataclasses import replace

import pytest

from tinyllm.layers.mlp import MLP
from tinyllm.trace import trace
from tinyllm.trace.record import PLACEHOLDER
from tinyllm.trace.terminal import (
    WIDTH,
    render_completions,
    render_prompts,
)
from tinyllm.trace.text import show_number


def test_a_chunk_says_that_its_token_is_thrown_away(traced, render):
    _, steps = traced
    first = "\n".join(render(steps)[0])
    assert "A new +4 " in first and "4 of the 5 tokens left" in first and "thrown away" in first
    assert "0 tokens out" in first


def test_kv_bytes_are_per_token_of_this_step_and_of_all_blocks(traced, render):
    llm, steps = traced
    each = llm.engine.kv_cache.num_bytes // llm.engine.cache_config.num_slots
    assert not any(line.startswith("P kv bytes") for line in render(steps)[0])
    (row,) = [line for line in render(steps, full=True)[0] if line.startswith("P kv bytes")]
    numbers = [
        each,
        4 * each,
        2 * each * steps[0].schedule.num_used_blocks,
        2 * each * (steps[0].schedule.num_blocks - 1),
    ]
    assert re.findall(r"([\d.]+[kMG]?)B\b", row) == [show_number(number) for number in numbers]


def test_a_dry_run_says_that_it_has_no_tokens(traced, render):
    """Told by its placeholders, wherever they stand; a real id of 0 is a token."""
    _, steps = traced
    step = steps[-1]
    assert "dry run" not in "\n".join(render([step])[0])
    dry = replace(step, requests=tuple(replace(r, token_ids=(PLACEHOLDER,) * r.query_len) for r in step.requests))
    lines = render([dry])[0]
    assert [line.split(maxsplit=4)[-1] for line in lines if line.startswith("P sampled ")] == [
        "no values, so no token: a dry run" for _ in step.requests
    ]
    assert [line for line in lines if line.startswith("P token_ids ") and line.endswith(" no values: a dry run")]


def test_a_step_that_failed_shows_what_came_before_it(traced, render):
    _, steps = traced
    failed = replace(steps[0], failure="layers.1.mlp (mlp.py:20): RuntimeError: no\nmemory",
                     operations=steps[0].operations[:5])  # fmt: skip
    text = "\n".join(render([failed])[0])
    assert "! the step ended here: layers.1.mlp (mlp.py:20): RuntimeError: no\\nmemory" in text
    assert "token_ids" in text and "sampled" not in text


def test_a_step_whose_first_layer_raised_is_shown_to_there(tiny_llm, monkeypatch, render):
    def fail(self, x):
        raise RuntimeError("no memory")

    llm = tiny_llm()
    monkeypatch.setattr(MLP, "forward", fail)
    with trace() as t, pytest.raises(RuntimeError):
        llm.generate([1, 2, 3])
    assert t.steps[0].batch.keys() == t.steps[0].batch_values.keys() >= {"token_ids", "slot_mapping"}
    (lines,) = render(t.steps)
    assert (
        sum(line.startswith("P token_ids ") for line in lines) == 1 and sum("| o_proj" in line for line in lines) == 1
    )
    assert any(line.strip().startswith("! the step ended here: layers.0 (") for line in lines)
    assert not any("gate_up_proj" in line for line in lines)


def test_tokens_cannot_move_the_cursor_and_wide_ones_are_measured():
    text = "\x1b[2J\n\t日本語" * 20
    (line,) = render_prompts([("A", text, [["\x1b[2J", "\n", "\t日本語" * 20]])])
    assert line.isprintable() and "\\x1b[2J" in line
    assert sum(2 if ord(char) > 0x2E80 else 1 for char in line) <= WIDTH


def test_an_answer_stays_on_its_line_within_the_width():
    lines = list(render_completions([("A", "length", "word " * 100), ("B", "stop", "\x9b31m\u202eab")]))
    assert [len(line) for line in lines] == [WIDTH, len("B stop: '\\x9b31m\\u202eab'")]
    assert all(line.isprintable() for line in lines)
