"""Sums: of a step, of the run, and prefill beside decode."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tinyllm.trace.record import Operation, StepRecord
from tinyllm.trace.terminal.options import TWO_HALVES, Options
from tinyllm.trace.terminal.rows import Costs, cost_row, sum_costs
from tinyllm.trace.terminal.text import first_that_fits, plural, show_number

KV, WEIGHTS, ACTIVATIONS = "KV", "weights", "activations"


def total_row(step: StepRecord, options: Options) -> str:
    """One line for the step: tokens in and out, what bounds it or how much the ledger compared, costs."""
    tokens = _tokens(step.dims["num_tokens"], _count_chosen(step))
    costs = sum_costs([step])
    notes = list(_bound_notes(costs, options)) or _ledger_notes(step.num_compared)
    return cost_row(options, "=", f"step {step.index} total", tokens, notes, costs)


def step_line(step: StepRecord, options: Options) -> str:
    """A step that is not asked for, in one line."""
    num_reqs = len(step.requests)
    texts = _tokens(step.dims["num_tokens"], _count_chosen(step))
    who = f"{num_reqs} {plural(num_reqs, 'request')}"
    return cost_row(
        options, "=", f"step {step.index}", [f"{step.phase}, {text}" for text in texts], who, sum_costs([step])
    )


def _count_chosen(step: StepRecord) -> int:
    return sum(request.chosen is not None for request in step.requests)


def _tokens(num_in: int, num_out: int) -> tuple[str, ...]:
    tokens_in = f"{num_in} {plural(num_in, 'token')} in"
    return (
        f"{tokens_in}, {num_out} {plural(num_out, 'token')} out",
        f"{tokens_in}, {num_out} out",
        f"{num_in} in, {num_out} out",
    )


def _ledger_notes(num_compared: int) -> list[str]:
    return [f"ledger: {num_compared} sizes agree", f"{num_compared} sizes agree"]


def _bound_notes(costs: Costs, options: Options) -> Iterator[str]:
    """``memory-bound (5.0 < ridge 8.2)``; nothing without a ridge."""
    bound = costs.bound(options.ridge)
    if bound and costs.intensity is not None:
        sides = f"{costs.intensity:.1f} {'<' if bound == 'memory' else '>'}"
        yield f"{bound}-bound ({sides} ridge {options.ridge:.1f})"
        yield f"{bound}-bound ({sides} {options.ridge:.1f})"
        yield f"{bound} ({sides} {options.ridge:.1f})"


# --- the run --------------------------------------------------------------------------------------------------------------


@dataclass
class PhaseTotals:
    """The steps of one phase together."""

    num_steps: int = 0
    num_tokens: int = 0
    costs: list[Costs] = field(default_factory=list)
    bytes_by_storage: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> Costs:
        """Of all its steps."""
        return add_costs(self.costs)


@dataclass
class RunTotals:
    """What a run cost so far. It keeps no step, so a long run stays small."""

    phases: dict[str, PhaseTotals] = field(default_factory=dict)
    num_out: int = 0
    num_compared: int = 0

    def add(self, step: StepRecord) -> None:
        """Count one more step."""
        phase = self.phases.setdefault(step.phase, PhaseTotals())
        phase.num_steps += 1
        phase.num_tokens += step.dims["num_tokens"]
        phase.costs.append(sum_costs([step]))
        for operation in step.operations:
            phase.bytes_by_storage.update(bytes_by_storage(operation))
        self.num_out += _count_chosen(step)
        self.num_compared += step.num_compared


def total_up(steps: Iterable[StepRecord]) -> RunTotals:
    """The totals of steps that are all there."""
    totals = RunTotals()
    for step in steps:
        totals.add(step)
    return totals


def add_costs(costs: Sequence[Costs]) -> Costs:
    """Their sum."""
    times = [each.time_us for each in costs if each.time_us is not None]
    return Costs(
        sum(each.flops or 0 for each in costs),
        sum(each.num_bytes for each in costs),
        any(each.is_lower_bound for each in costs),
        sum(times) if times else None,
    )


def bytes_by_storage(operation: Operation) -> dict[str, int]:
    """The row's bytes by what is moved: parameters, the pool's keys and values, everything else.

    A gather reads rows of a table and not all of it; any other row reads its weights whole.
    """
    inputs = [operation.tensors[name] for name in operation.inputs]
    sizes = {storage: sum(t.num_bytes for t in inputs if t.storage == storage) for storage in ("weight", "index")}
    rows_read = max(0, operation.bytes_read - sizes["index"])
    pool = {"cache write": operation.bytes_written, "gather": rows_read}.get(operation.stage.kind, 0)
    kv = pool if any(tensor.storage == "kv_pool" for tensor in inputs) else 0
    weights = rows_read if sizes["weight"] and operation.stage.kind == "gather" else sizes["weight"]
    weights = min(weights, operation.bytes_read)
    return {WEIGHTS: weights, KV: kv, ACTIVATIONS: operation.num_bytes - weights - kv}


def render_totals(totals: RunTotals, options: Options) -> Iterator[str]:
    """The last rows: the whole run, and where it had both, prefill beside decode."""
    if not totals.phases:
        return
    phases = totals.phases.values()
    num_steps, num_in = sum(phase.num_steps for phase in phases), sum(phase.num_tokens for phase in phases)
    costs = add_costs([phase.total for phase in phases])
    steps = f"{num_steps} {plural(num_steps, 'step')}"
    what = [f"{steps}: {text}" for text in _tokens(num_in, totals.num_out)]
    yield cost_row(options, "=", "run total", what, _ledger_notes(totals.num_compared), costs)
    if "prefill" in totals.phases and "decode" in totals.phases:
        yield from _comparison(totals, options)


# --- prefill beside decode ------------------------------------------------------------------------------------------------

Column = tuple[str, int, str, int]  # title and width, and both where the line is narrow; 0 leaves it out

COLUMNS: tuple[Column, ...] = (
    ("", 8, "", 8), ("steps", 6, "", 0), ("tokens", 8, "tokens", 7), ("FLOP", 7, "FLOP", 7), ("BYTE", 7, "BYTE", 7),
    ("F/B", 6, "F/B", 6), ("BYTE/token", 12, "B/tok", 7), (WEIGHTS, 9, "wgt", 5), (KV, 5, "KV", 5),
    (ACTIVATIONS, 12, "act", 5),
)  # fmt: skip


def _comparison(totals: RunTotals, options: Options) -> Iterator[str]:
    yield ""
    is_narrow = options.width < TWO_HALVES
    yield _line([short if is_narrow else title for title, _, short, _ in COLUMNS], is_narrow)
    for name, phase in totals.phases.items():
        yield _line(_cells(name, phase), is_narrow)
    prefill, decode = totals.phases["prefill"], totals.phases["decode"]
    each, before = (phase.total.num_bytes / phase.num_tokens for phase in (decode, prefill))
    text = f"! a token of decode moves {each / before:.1f}x the bytes of one of prefill"
    why = ": the weights are read for fewer tokens" if each > before else ""
    yield first_that_fits([text + why, text, f"! decode: {each / before:.1f}x the bytes a token"], options.width)


def _cells(name: str, phase: PhaseTotals) -> list[str]:
    costs, num_bytes = phase.total, phase.total.num_bytes
    shares = [_share(phase.bytes_by_storage[storage], num_bytes) for storage in (WEIGHTS, KV, ACTIVATIONS)]
    return [
        name, str(phase.num_steps), str(phase.num_tokens), show_number(costs.flops or 0), show_number(num_bytes),
        f"{costs.intensity or 0:.1f}", show_number(num_bytes / phase.num_tokens), *shares,
    ]  # fmt: skip


def _share(part: int, whole: int) -> str:
    percent = 100 * part / max(1, whole)
    return "<1%" if 0 < percent < 0.5 else f"{percent:.0f}%"


def _line(cells: Sequence[str], is_narrow: bool) -> str:
    """The cells in their columns, the first one from the left."""
    widths = [narrow if is_narrow else width for _, width, _, narrow in COLUMNS]
    first, *others = zip(cells, widths, strict=True)
    return f"{first[0]:{first[1]}}" + "".join(f"{cell:>{width}}" for cell, width in others if width)
