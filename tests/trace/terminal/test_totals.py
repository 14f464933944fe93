"""Sums: the run's are those of its steps, and a machine's ridge says what the time goes into."""

import re

from tinyllm.trace.sums import sum_up
from tinyllm.trace.terminal import (
    Options,
    render_totals,
)
from tinyllm.trace.text import show_number


def test_the_run_s_totals_are_the_sums_of_its_steps(traced):
    _, steps = traced
    totals = sum_up(steps)
    lines = list(render_totals(totals, Options()))
    flops, num_bytes = sum(step.flops for step in steps), sum(step.num_bytes for step in steps)
    tokens = sum(step.dims["num_tokens"] for step in steps)
    assert lines[0].startswith(f"= run total      {len(steps)} steps: {tokens} tokens in, 6 out ")
    assert lines[0].split()[-3:] == [show_number(flops), show_number(num_bytes), f"{flops / num_bytes:.1f}"]
    assert f"ledger: {sum(step.num_compared for step in steps)} sizes agree" in lines[0]
    rows = [line.split() for line in lines[3:-1]]
    assert [row[0] for row in rows] == list(dict.fromkeys(step.phase for step in steps)) == ["prefill", "decode"]
    assert sum(int(row[1]) for row in rows) == len(steps) and sum(int(row[2]) for row in rows) == tokens
    assert all(98 <= sum(int(share.strip("<%")) for share in row[-3:]) <= 102 for row in rows)
    assert lines[-1].startswith("! a token of decode moves ")


def test_a_run_of_one_phase_is_compared_with_nothing(traced):
    _, steps = traced
    assert len(list(render_totals(sum_up(steps[:1]), Options()))) == 1
    assert list(render_totals(sum_up([]), Options())) == []


def test_the_bytes_of_a_row_are_told_by_what_is_moved(traced):
    _, steps = traced
    shares = {operation.label: operation.bytes_by_storage for operation in steps[0].operations}
    for operation in (operation for step in steps for operation in step.operations):
        assert sum(operation.bytes_by_storage.values()) == operation.num_bytes
        assert min(operation.bytes_by_storage.values()) >= 0
    assert shares["qkv_proj"]["weights"] == 4 * 64 * 128, "the whole matrix"
    assert shares["embed_tokens"]["weights"] == 4 * 4 * 64, "four rows of the table"
    assert shares["write_kv"]["KV"] == 2 * 4 * 4 * 32 and shares["write_kv"]["weights"] == 0
    assert shares["gather_kv"]["KV"] > 0 == shares["attend"]["KV"], "attention reads the gathered copies"


def test_a_ridge_says_what_the_time_goes_into(traced, render):
    _, steps = traced
    (low,), (high,) = (
        [line for line in render(steps, ridge=ridge)[0] if "step 0 total" in line] for ridge in (9.5, 0.1)
    )
    assert re.search(r" memory-bound \(1\.\d < ridge 9\.5\) ", low)
    assert re.search(r" compute-bound \(1\.\d > ridge 0\.1\) ", high)
