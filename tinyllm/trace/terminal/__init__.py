"""The trace as text: fixed-width rows of at most 100 columns, ASCII but for the user's own tokens.

A row reads: kind letter, name, symbolic in -> out, numeric in -> out, FLOPs, bytes, FLOPs per byte. Nothing is ever
wrapped; a text too long for its column is said more briefly, and what the JSON record holds stays whole.
"""

from collections.abc import Iterator, Mapping, Sequence

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.record import StepRecord, to_symbol
from tinyllm.trace.terminal.blocks import block_rows, schedule_rows
from tinyllm.trace.terminal.host import appended_row, batch_rows, render_completions, render_prompts, sampling_rows
from tinyllm.trace.terminal.tensors import Options, cut_into_sections, render_section, rows_by_place
from tinyllm.trace.terminal.text import NAME, WIDTH, cost_row, cut_to, flow_words, make_printable, plural

__all__ = [
    "WIDTH",
    "Options",
    "render_completions",
    "render_header",
    "render_prompts",
    "render_step",
]


def render_header(titles: Sequence[str], dims: Mapping[str, int]) -> Iterator[str]:
    """The first lines: the model and its pool, the legend of dimensions, columns and kinds."""
    for title in titles:
        yield cut_to(make_printable(title), WIDTH)
    legend = [f"{to_symbol(word)}={size} {word}" for word, size in dims.items() if to_symbol(word).isidentifier()]
    yield from flow_words("dims   ", legend)
    step_words = [f"{word.symbol} {word.name}" for word in WORDS.values() if word.scope in ("step", "request")]
    yield from flow_words("steps  ", step_words)
    yield "cols   FLOP: multiply-add = 2   BYTE: each operand moved once   F/B: FLOPs per byte"
    kinds = "  ".join(f"{letter} {kind}" for kind, letter in KIND_LETTERS.items())
    yield f"kind   {kinds.replace('host', 'plain Python')}"


def render_step(step: StepRecord, previous: StepRecord | None, options: Options) -> Iterator[str]:
    """All lines of one step; after another step only the rows that differ from it, unless options.full."""
    before = None if options.full else previous
    yield _step_title(step)
    yield from schedule_rows(step)
    yield from batch_rows(step)
    yield from block_rows(step, before)
    yield f"{'':{WIDTH - 21}}{'FLOP':>7}{'BYTE':>7}{'F/B':>7}"
    known = rows_by_place(before) if before else {}
    for section in cut_into_sections(step):
        yield from render_section(section, step, known, options)
    yield from sampling_rows(step)
    yield from appended_row(step)
    total = f"step {step.index} total", _tokens_in_out(step), _compared(step)
    yield cost_row("=", *total, step.flops, step.num_bytes, step.has_unknown_flops)
    if previous is not None:
        yield f"{'':{NAME + 2}}! {_ratio(step, previous)}"


def _step_title(step: StepRecord) -> str:
    num_reqs, num_tokens = len(step.requests), step.dims["num_tokens"]
    counts = f"R={num_reqs} {plural(num_reqs, 'request')}  T={num_tokens} {plural(num_tokens, 'token')}"
    return f"== STEP {step.index}  {step.phase.upper()}  {counts} ".ljust(WIDTH, "=")


def _tokens_in_out(step: StepRecord) -> str:
    out = sum(request.chosen is not None for request in step.requests)
    num_tokens = step.dims["num_tokens"]
    return f"{num_tokens} {plural(num_tokens, 'token')} in, {out} {plural(out, 'token')} out"


def _compared(step: StepRecord) -> str:
    return f"ledger: {step.num_compared} sizes agree"


def _ratio(step: StepRecord, previous: StepRecord) -> str:
    if not (step.flops and step.num_bytes and previous.flops and previous.num_bytes):
        return "no comparison with the step before"
    flops, num_bytes = step.flops / previous.flops, step.num_bytes / previous.num_bytes
    return f"{flops:.2f}x the FLOPs of step {previous.index}, {num_bytes:.2f}x its bytes"
