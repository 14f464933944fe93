"""The trace as text: one line a row, laid out for a width from 60 to 200 columns, ASCII but for the user's own tokens.

A row reads: kind letter, name, symbolic in -> out, numeric in -> out, FLOPs, bytes, FLOPs per byte. Nothing is ever
wrapped; a text too long for its column is said more briefly, and what the JSON record holds stays whole.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.record import RunRecord, StepRecord, to_symbol
from tinyllm.trace.shape_text import KV_WORDS, show_shape
from tinyllm.trace.sums import sum_up
from tinyllm.trace.terminal.blocks import block_rows, schedule_rows
from tinyllm.trace.terminal.host import batch_rows, kv_row, render_completions, render_prompts, sampling_rows
from tinyllm.trace.terminal.options import MAX_WIDTH, MIN_WIDTH, Options
from tinyllm.trace.terminal.rows import cost_heads
from tinyllm.trace.terminal.stage_view import check_wanted, near_stages, stage_names, stage_rows
from tinyllm.trace.terminal.tensors import residual_row, rows_by_key, section_rows
from tinyllm.trace.terminal.totals import render_totals, step_line, total_row
from tinyllm.trace.text import (
    WIDTH,
    cut_to,
    first_that_fits,
    fold_words,
    make_printable,
    show_count,
    show_number,
)

__all__ = [
    "MAX_WIDTH",
    "MIN_WIDTH",
    "WIDTH",
    "Options",
    "check_wanted",
    "near_stages",
    "render_answers",
    "render_completions",
    "render_header",
    "render_next",
    "render_prompts",
    "render_run",
    "render_start",
    "render_step",
    "render_totals",
    "stage_names",
]


def render_run(run: RunRecord, options: Options | None = None) -> Iterator[str]:
    """The whole trace of a run that is over."""
    options = options or Options()
    yield from render_start(run, options)
    for step, previous in zip(run.steps, [None, *run.steps], strict=False):
        yield ""
        yield from render_step(step, previous, options)
    yield from render_totals(sum_up(run.steps), options)
    if run.answers:
        yield ""
        yield from render_answers(run, options)


def render_start(run: RunRecord, options: Options) -> Iterator[str]:
    """The header and the prompts of a run, of which no step need be there yet."""
    caching = "" if run.prefix_caching else "; no prefix caching"
    pool = f"pool   KV cache {show_shape(KV_WORDS, run.kv_shape)} {run.kv_bytes / 1e6:.1f}MB"
    num_slots = run.kv_shape[2] * run.kv_shape[3]
    each = f", {show_number(run.kv_bytes / num_slots)}B a token"
    attention = f"  {run.attention} attention" if run.attention else ""
    titles = [f"{run.model}  {run.dtype}{attention}"]
    titles.append(
        first_that_fits(
            [f"{pool}{each}; block 0 is null{caching}", f"{pool}{each}{caching}", f"{pool}{caching}", pool], options.end
        )
    )
    yield from render_header(titles, run.dims, options)
    yield from render_prompts(((prompt.label, prompt.text, prompt.words) for prompt in run.prompts), options)


def render_answers(run: RunRecord, options: Options) -> Iterator[str]:
    """What each request gave."""
    answers = ((answer.label, answer.finish_reason, answer.text) for answer in run.answers)
    return render_completions(answers, options)


def render_header(titles: Sequence[str], dims: Mapping[str, int], options: Options | None = None) -> Iterator[str]:
    """The first lines: the model and its pool, the legend of dimensions, columns and kinds."""
    options = options or Options()
    for title in titles:
        yield cut_to(make_printable(title), options.end)
    legend = [f"{to_symbol(word)}={size} {word}" for word, size in dims.items() if to_symbol(word).isidentifier()]
    yield from fold_words("dims   ", legend, options.width)
    step_words = [f"{word.symbol} {word.name}" for word in WORDS.values() if word.scope in ("step", "request")]
    yield from fold_words("steps  ", step_words, options.width)
    columns = ["FLOP: multiply-add = 2", "BYTE: each operand moved once", "F/B: FLOPs per byte"]
    if options.full or options.op:
        columns += ["e: bytes of a value", "Hin, Hout: widths of a product"]
    if options.has_time:
        columns += ["us: measured", "bound: its bytes from memory, or its FLOPs, alone"]
    if options.ridge is not None:
        columns.append(f"ridge {options.ridge:.1f} here (measured)")
    yield from fold_words("cols   ", columns, options.width)
    kinds = [f"{letter} {kind}".replace("host", "plain Python") for kind, letter in KIND_LETTERS.items()]
    yield from fold_words("kind   ", kinds, options.width)


def render_step(step: StepRecord, previous: StepRecord | None, options: Options) -> Iterator[str]:
    """All lines of one step, or what options.step and options.op leave of it.

    After another step only the rows that differ from it, unless all are asked for.
    """
    if options.step not in (None, step.index):
        yield step_line(step, options)
        return
    yield _step_title(step, options)
    if options.op:
        yield from stage_rows(step, options)
        if step.failure:
            yield from sampling_rows(step, options)
        return
    before = None if options.full or options.step is not None else previous
    yield from schedule_rows(step, options)
    yield from batch_rows(step, options)
    yield from block_rows(step, before, options)
    if not options.is_brief:
        yield kv_row(step, options)
    yield cost_heads(options)
    known = rows_by_key(before) if before else {}
    yield from section_rows(step, known, options)
    yield from residual_row(step, options)
    yield from sampling_rows(step, options)
    yield total_row(step, options)


def render_next(suggestions: Iterable[str], options: Options) -> Iterator[str]:
    """The last line: what to try next, as much of it as fits."""
    line = "next   "
    for suggestion in suggestions:
        if len(line) + len(suggestion) > options.width:
            break
        line += suggestion + "  "
    yield line.rstrip()


def _step_title(step: StepRecord, options: Options) -> str:
    num_reqs, num_tokens = len(step.requests), step.dims["num_tokens"]
    counts = f"R={show_count(num_reqs, 'request')}  T={show_count(num_tokens, 'token')}"
    title = f"STEP {step.index}  {step.phase.upper()}  {counts}"
    took = f"{step.traced_ms:.0f} ms"
    tracing = f"{took}, {step.reading_ms:.0f} of them tracing"
    room = options.width - len(title) - 8
    return options.bar(title, first_that_fits([tracing, f"{took}, traced", took], room) if options.has_time else "")
