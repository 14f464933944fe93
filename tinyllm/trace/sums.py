"""What several steps did and cost together."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tinyllm.trace.record import StepRecord


@dataclass
class Sums:
    """What several steps did and cost together. It keeps no step, so a long run stays small."""

    num_steps: int = 0
    num_tokens: int = 0  # computed
    num_chosen: int = 0  # sampled and kept
    flops: int = 0
    has_unknown_flops: bool = False  # then `flops` is a lower bound
    num_bytes: int = 0
    num_compared: int = 0
    traced_ms: float = 0.0
    reading_ms: float = 0.0  # of these
    time_us: float | None = None  # of all rows, where it was measured
    bytes_by_storage: Counter[str] = field(default_factory=Counter)

    def add(self, step: StepRecord) -> None:
        """Count one more step."""
        self.num_steps += 1
        self.num_tokens += step.dims["num_tokens"]
        self.num_chosen += step.num_chosen
        self.flops += step.flops
        self.has_unknown_flops |= step.has_unknown_flops
        self.num_bytes += step.num_bytes
        self.num_compared += step.num_compared
        self.traced_ms += step.traced_ms
        self.reading_ms += step.reading_ms
        for operation in step.operations:
            self.bytes_by_storage.update(operation.bytes_by_storage)
            if operation.time_us is not None:
                self.time_us = (self.time_us or 0.0) + operation.time_us

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.num_bytes else None


@dataclass
class RunSums:
    """The sums of a run so far, and of each phase's steps in it."""

    total: Sums = field(default_factory=Sums)
    phases: dict[str, Sums] = field(default_factory=dict)  # in the order in which they came

    def add(self, step: StepRecord) -> None:
        """Count one more step."""
        self.total.add(step)
        self.phases.setdefault(step.phase, Sums()).add(step)


def sum_up(steps: Iterable[StepRecord]) -> RunSums:
    """The sums of steps that are all there."""
    sums = RunSums()
    for step in steps:
        sums.add(step)
    return sums
