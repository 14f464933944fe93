"""Turns are taken fairly; nobody's speed is asserted."""

import pytest

from tinyllm.bench.measure import Timing, render, take_turns


def test_every_variant_runs_once_a_round_and_the_first_round_does_not_count():
    calls: list[str] = []
    timings = take_turns({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=4)
    assert [timing.name for timing in timings] == ["a", "b", "c"]
    assert all(len(timing.seconds) == 4 for timing in timings)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(rounds) == 5 and all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert {turn[0] for turn in rounds} == {"a", "b", "c"}, "each goes first in turn"


def test_the_table_tells_medians_and_ratios():
    timings = [Timing("plain", (0.010, 0.020, 0.100)), Timing("checked", (0.030, 0.020, 0.500))]
    title, _, plain, checked = render("a step", timings)
    assert title == "a step  (3 rounds)"
    assert plain.split() == ["plain", "20.0", "ms", "10.0", "ms", "1.00"]
    assert checked.split() == ["checked", "30.0", "ms", "20.0", "ms", "1.50"]
    assert timings[0].median == pytest.approx(0.02)
