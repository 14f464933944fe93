"""Sums: of a step, of the run, and prefill beside decode."""

from collections.abc import Iterator, Sequence

from tinyllm.trace.record import ACTIVATIONS, KV, WEIGHTS, StepRecord
from tinyllm.trace.sums import RunSums, Sums
from tinyllm.trace.terminal.options import TWO_HALVES, Options
from tinyllm.trace.terminal.rows import Costs, cost_row, sum_costs
from tinyllm.trace.text import first_that_fits, show_count, show_number


def total_row(step: StepRecord, options: Options) -> str:
    """One line for the step: tokens in and out, what bounds it or how much the ledger compared, costs."""
    tokens = _tokens(step.dims["num_tokens"], step.num_chosen)
    costs = sum_costs([step])
    notes = list(_bound_notes(costs, options)) or _ledger_notes(step.num_compared)
    return cost_row(options, "=", f"step {step.index} total", tokens, notes, costs)


def step_line(step: StepRecord, options: Options) -> str:
    """A step that is not asked for, in one line."""
    num_reqs = len(step.requests)
    texts = _tokens(step.dims["num_tokens"], step.num_chosen)
    who = show_count(num_reqs, "request")
    return cost_row(
        options, "=", f"step {step.index}", [f"{step.phase}, {text}" for text in texts], who, sum_costs([step])
    )


def _tokens(num_in: int, num_out: int) -> tuple[str, ...]:
    tokens_in = f"{show_count(num_in, 'token')} in"
    return (
        f"{tokens_in}, {show_count(num_out, 'token')} out",
        f"{tokens_in}, {num_out} out",
        f"{num_in} in, {num_out} out",
    )


def _ledger_notes(num_compared: int) -> list[str]:
    return [f"ledger: {num_compared} sizes agree", f"{num_compared} sizes agree"]


def _bound_notes(costs: Costs, options: Options) -> Iterator[str]:
    """``memory-bound (5.0 < ridge 8.2)``; nothing without a ridge."""
    bound = costs.bound_by(options.ridge)
    if bound and costs.intensity is not None:
        sides = f"{costs.intensity:.1f} {'<' if bound == 'memory' else '>'}"
        yield f"{bound}-bound ({sides} ridge {options.ridge:.1f})"
        yield f"{bound}-bound ({sides} {options.ridge:.1f})"
        yield f"{bound} ({sides} {options.ridge:.1f})"


# --- the run --------------------------------------------------------------------------------------------------------------


def render_totals(sums: RunSums, options: Options) -> Iterator[str]:
    """The last rows: the whole run, and where it had both, prefill beside decode."""
    total = sums.total
    if not total.num_steps:
        return
    steps = show_count(total.num_steps, "step")
    what = [f"{steps}: {text}" for text in _tokens(total.num_tokens, total.num_chosen)]
    yield cost_row(options, "=", "run total", what, _ledger_notes(total.num_compared), _costs(total))
    if "prefill" in sums.phases and "decode" in sums.phases:
        yield from _comparison(sums, options)


def _costs(sums: Sums) -> Costs:
    return Costs(sums.flops, sums.num_bytes, sums.has_unknown_flops, sums.time_us)


# --- prefill beside decode ------------------------------------------------------------------------------------------------

Column = tuple[str, int, str, int]  # title and width, and both where the line is narrow; 0 leaves it out

COLUMNS: tuple[Column, ...] = (
    ("", 8, "", 8), ("steps", 6, "", 0), ("tokens", 8, "tokens", 7), ("FLOP", 7, "FLOP", 7), ("BYTE", 7, "BYTE", 7),
    ("F/B", 6, "F/B", 6), ("BYTE/token", 12, "B/tok", 7), (WEIGHTS, 9, "wgt", 5), (KV, 5, "KV", 5),
    (ACTIVATIONS, 12, "act", 5),
)  # fmt: skip


def _comparison(sums: RunSums, options: Options) -> Iterator[str]:
    yield ""
    is_narrow = options.width < TWO_HALVES
    yield _line([short if is_narrow else title for title, _, short, _ in COLUMNS], is_narrow)
    for name, phase in sums.phases.items():
        yield _line(_cells(name, phase), is_narrow)
    prefill, decode = sums.phases["prefill"], sums.phases["decode"]
    if decode.num_tokens * prefill.num_steps >= prefill.num_tokens * decode.num_steps:
        return  # a step of prefill had no more tokens than one of decode: nothing to tell apart
    each, before = (phase.num_bytes / phase.num_tokens for phase in (decode, prefill))
    text = f"! a token of decode moves {each / before:.1f}x the bytes of one of prefill"
    why = f"{text}: the weights are read for fewer tokens"
    yield first_that_fits([why, text, f"! decode: {each / before:.1f}x the bytes a token"], options.width)


def _cells(name: str, phase: Sums) -> list[str]:
    num_bytes = phase.num_bytes
    shares = [_percent(phase.bytes_by_storage[storage], num_bytes) for storage in (WEIGHTS, KV, ACTIVATIONS)]
    return [
        name, str(phase.num_steps), str(phase.num_tokens),
        (">" if phase.has_unknown_flops else "") + show_number(phase.flops), show_number(num_bytes),
        f"{phase.intensity or 0:.1f}", show_number(num_bytes / phase.num_tokens), *shares,
    ]  # fmt: skip


def _percent(part: int, whole: int) -> str:
    percent = 100 * part / max(1, whole)
    return "<1%" if 0 < percent < 0.5 else f"{percent:.0f}%"


def _line(cells: Sequence[str], is_narrow: bool) -> str:
    """The cells in their columns, the first one from the left."""
    widths = [narrow if is_narrow else width for _, width, _, narrow in COLUMNS]
    first, *others = zip(cells, widths, strict=True)
    return f"{first[0]:{first[1]}}" + "".join(f"{cell:>{width}}" for cell, width in others if width)
