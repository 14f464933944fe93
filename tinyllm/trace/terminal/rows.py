"""The two kinds of rows: one with costs, one of plain Python."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from tinyllm.trace.costs import bound_by, bound_us
from tinyllm.trace.record import Operation, StepRecord
from tinyllm.trace.terminal.options import NAME, Options
from tinyllm.trace.text import cut_to, first_that_fits, show_number

Forms = str | Iterable[str]  # one way to say it, or several, the longest first


@dataclass(frozen=True)
class Costs:
    """What one row or several cost."""

    flops: int | None
    num_bytes: int
    is_lower_bound: bool = False  # the FLOPs of some row are unknown
    time_us: float | None = None  # as measured

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.flops is not None and self.num_bytes else None

    def bound_by(self, ridge: float | None) -> str:
        """``memory`` or ``compute``; "" where that is unknown, as with FLOPs that are only known to be more."""
        bound = bound_by(self.flops, self.num_bytes, ridge)
        return "" if self.is_lower_bound and bound == "memory" else bound


def sum_costs(rows: Iterable[Operation | StepRecord]) -> Costs:
    """The costs of several rows, or of several steps."""
    flops = num_bytes = 0
    is_lower_bound = False
    times: list[float] = []
    for row in rows:
        flops += row.flops or 0
        num_bytes += row.num_bytes
        is_lower_bound |= row.has_unknown_flops if isinstance(row, StepRecord) else row.flops is None
        operations = row.operations if isinstance(row, StepRecord) else [row]
        times += [operation.time_us for operation in operations if operation.time_us is not None]
    return Costs(flops, num_bytes, is_lower_bound, sum(times) if times else None)


def costs_of(operation: Operation) -> Costs:
    """The costs of one row."""
    return Costs(operation.flops, operation.num_bytes, operation.flops is None, operation.time_us)


def cost_heads(options: Options) -> str:
    """The titles of the cost columns."""
    heads = "".join(f"{title:>{width}}" for title, width in options.layout.costs)
    left = options.layout.symbolic + options.layout.numeric + NAME + 2
    line = " " * left + heads
    return (line + "  source" if options.layout.source else line).rstrip()


def cost_row(
    options: Options,
    letter: str,
    name: str,
    symbolic: Forms,
    numeric: Forms,
    costs: Costs,
    source: str = "",
    why: str = "",
) -> str:
    """A row with FLOPs, bytes and FLOPs per byte. An empty half leaves its columns to the other one."""
    layout = options.layout
    if options.is_whole:
        numbers = _whole(numeric, layout.numeric - 1)
        symbols = _whole(symbolic, layout.symbolic - 1 if numbers else layout.symbolic + layout.numeric - 1)
        middle = f"{symbols:{layout.symbolic - 1}} {numbers} " if numbers else f"{symbols} "
    elif not numeric or not layout.numeric:
        middle = first_that_fits(symbolic, layout.symbolic + layout.numeric - 1)
    else:
        middle = f"{first_that_fits(symbolic, layout.symbolic - 1):{layout.symbolic}}"
        middle += first_that_fits(numeric, layout.numeric - 1)
    left = (
        f"{letter} {cut_to(name, NAME - 1):{NAME}}{middle:{layout.symbolic + layout.numeric}}{_cells(options, costs)}"
    )
    if layout.source and source:
        left += f"  {source:{layout.source - 2}} "
    if layout.why and why:
        left += cut_to(why, layout.why - 1)
    return left.rstrip()


def _whole(forms: Forms, width: int) -> str:
    """The first form, or the second where only that fits: these two leave nothing out. Too long they stay whole."""
    first, *rest = [forms] if isinstance(forms, str) else islice(forms, 2)
    return first if len(first) <= width or not rest else rest[0]


def _cells(options: Options, costs: Costs) -> str:
    intensity, least_us = costs.intensity, bound_us(costs.flops, costs.num_bytes, options.ridge, options.bandwidth)
    count = "?" if costs.flops is None else (">" if costs.is_lower_bound else "") + show_number(costs.flops)
    texts = {
        "FLOP": count,
        "BYTE": show_number(costs.num_bytes),
        "F/B": "" if intensity is None else f"{intensity:.1f}" if intensity < 999.5 else show_number(intensity),
        "": costs.bound_by(options.ridge)[:1],
        "us": "" if costs.time_us is None else show_number(costs.time_us),
        "bound": "" if least_us is None else f"{least_us:.1f}" if least_us < 9.95 else show_number(least_us),
    }
    return "".join(f"{texts[title]:>{width}}" for title, width in options.layout.costs)


def host_row(options: Options, name: str, what: Forms, text: Forms, letter: str = "P") -> str:
    """A row of plain Python: a name, what there is or happens, and how."""
    layout = options.layout
    left = f"{letter} {name:{NAME}}{first_that_fits(what, layout.what - 1).replace('->', options.arrow):{layout.what}}"
    return (left + first_that_fits(text, layout.text)).rstrip()


def note_row(options: Options, text: Forms) -> str:
    """A remark under a row."""
    return " " * (NAME + 2) + first_that_fits(text, options.end - NAME - 2)
