"""Turns and medians: the shared machine's noise meets every variant alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant's rounds."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the middle round."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Seconds of the fastest round."""
        return min(self.seconds)


def take_turns(variants: Mapping[str, Callable[[], object]], rounds: int) -> list[Timing]:
    """Run each variant once a round, in an order that rotates, after one round that does not count.

    >>> [timing.name for timing in take_turns({"a": int, "b": int}, rounds=2)]
    ['a', 'b']
    """
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            begin = time.perf_counter()
            variants[name]()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return [Timing(name, tuple(seconds[name])) for name in names]


def render(title: str, timings: list[Timing]) -> list[str]:
    """A table: median, best, and the median as a multiple of the first row's."""
    base = timings[0].median
    lines = [f"{title}  ({len(timings[0].seconds)} rounds)", f"  {'':34}{'median':>10}{'best':>10}{'ratio':>8}"]
    for timing in timings:
        ratio = timing.median / base
        lines.append(f"  {timing.name:34}{1000 * timing.median:>7.1f} ms{1000 * timing.best:>7.1f} ms{ratio:>8.2f}")
    return lines
