"""What the record says, in words: tokens, decisions, changes, shapes."""

import re
from collections.abc import Iterator, Mapping, Sequence

from tinyllm.trace.record import (
    Operation,
    PreemptedRecord,
    PrefixHit,
    RequestRecord,
    RunRecord,
    StepRecord,
)
from tinyllm.trace.shape_text import all_words, fill_template, in_numbers, in_symbols, with_slots
from tinyllm.trace.text import make_printable, plural, show_count, show_number, show_runs

SPACE = "␣"
NUM_COLOURS = 7

Tokens = Mapping[tuple[str, int], str]  # text by label and position


def read_tokens(run: RunRecord) -> dict[tuple[str, int], str]:
    """The text of every token that the run knows: of the prompts, and of what was sampled."""
    tokens: dict[tuple[str, int], str] = {}
    for prompt in run.prompts:
        pieces = [piece for word in prompt.words for piece in word]
        tokens |= {(prompt.label, position): piece for position, piece in enumerate(pieces)}
    for step in run.steps:
        for request in step.requests:
            if request.chosen is not None:
                tokens[request.label, request.seq_len] = request.chosen.text
    return tokens


def show_token(text: str) -> str:
    """A token on one line, its spaces visible."""
    return make_printable(text).replace(" ", SPACE)


def shorten(text: str, length: int) -> str:
    """At most so many characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def colour_class(label: str) -> str:
    """A request's colour, by its letter; after seven requests the colours come again, the letters do not."""
    index = 0
    for char in label:
        index = index * 26 + ord(char) - ord("A") + 1
    return f"r{(index - 1) % NUM_COLOURS}"


def with_unit(value: float, unit: str) -> str:
    """A number and its unit.

    >>> with_unit(14_400_000, "FLOP")
    '14.4 MFLOP'
    """
    text = show_number(value)
    number = text.rstrip("kMGT")
    return f"{number} {text[len(number) :]}{unit}"


def show_share(value: float) -> str:
    """A probability as a percentage."""
    return f"{100 * value:.1f} %"


# ---- decisions of the scheduler ----------------------------------------------------------------------------------------


def schedule_sentences(step: StepRecord) -> Iterator[str]:
    """What the scheduler did in this step and why, a sentence each."""
    schedule = step.schedule
    if schedule.finished:
        back = f"; {_blocks(schedule.freed_block_ids)} came back" if schedule.freed_block_ids else ""
        yield f"{', '.join(schedule.finished)} ended with the step before{back}."
    for preempted in schedule.preempted:
        yield _preempted(preempted)
    yield from _parts(step.requests)
    if schedule.waiting:
        who = f"{schedule.waiting[0]}: " if len(schedule.waiting) > 1 else ""
        yield f"{', '.join(schedule.waiting)} must wait ({who}{schedule.held_back})."
    if schedule.evicted_block_ids:
        yield f"{_blocks(schedule.evicted_block_ids).capitalize()} held cached tokens that are forgotten now: new tokens need the room."
    num_tokens = step.dims["num_tokens"]
    yield (
        f"Together {num_tokens} of the {schedule.token_budget} tokens that one step may compute; "
        f"{schedule.num_used_blocks} of {schedule.num_blocks - 1} blocks are in use."
    )


def _parts(requests: Sequence[RequestRecord]) -> Iterator[str]:
    """What each request computes; of more than two that decode, in one sentence."""
    decodes = [request for request in requests if request.is_decode]
    is_folded = len(decodes) > 2
    if is_folded:
        places = ", ".join(f"{request.label} at {request.num_computed_tokens}" for request in decodes)
        yield f"{len(decodes)} requests compute the token that each sampled last: {places}."
    for request in requests:
        if not (is_folded and request.is_decode):
            yield _part(request)
        if request.hit:
            yield _hit(request, request.hit)


def _part(request: RequestRecord) -> str:
    count = show_count(request.query_len, "token")
    if request.cut_by:
        some = f"{request.query_len} of the {request.num_left} tokens that are left"
        later = request.num_left - request.query_len
        what = f"computes {some}, cut by the {request.cut_by}; {later} for later"
    elif request.is_decode:
        what = f"computes the token that it sampled last, at position {request.num_computed_tokens}"
    else:
        places = show_runs(range(request.num_computed_tokens, request.seq_len))
        what = f"computes {count}, {plural(request.query_len, 'position')} {places}"
    starts = {"new": "starts and ", "resumed": "comes back after its preemption and "}
    return f"{request.label} {starts.get(request.started_as, '')}{what}."


def _hit(request: RequestRecord, hit: PrefixHit) -> str:
    authors = " and ".join(
        "itself, earlier" if by == request.label else by or "an earlier run" for by in hit.computed_by
    )
    count = show_count(hit.num_tokens, "token")
    return f"{request.label} found {_blocks(hit.block_ids)} in the cache, computed by {authors}: {count} are read, not computed again."


def _preempted(preempted: PreemptedRecord) -> str:
    is_itself = preempted.label == preempted.for_label
    why = "as no block is left for it" if is_itself else f"as {preempted.for_label} needs blocks"
    freed = f" {_blocks(preempted.freed_block_ids).capitalize()} came back." if preempted.freed_block_ids else ""
    return f"{preempted.label} is preempted, {why}.{freed} Its {preempted.num_tokens} tokens will be computed again."


def _blocks(block_ids: tuple[int, ...]) -> str:
    return f"{plural(len(block_ids), 'block')} {show_runs(sorted(block_ids))}"


# ---- shapes ------------------------------------------------------------------------------------------------------------


def show_dims(operations: Sequence[Operation], is_symbolic: bool) -> str:
    """A row's template with each tensor's dimensions in its place, as symbols or as sizes.

    The operations are one, or those of several requests: where their sizes differ, the least and the greatest stand.
    """
    first = operations[0]
    if is_symbolic:
        filled = fill_template(first.stage.symbolic or first.stage.template, all_words(first), in_symbols)
    else:
        filled = fill_template(with_slots(first, first.stage.template), _ranges(operations), in_numbers)
    return re.sub(r"(\d)x\[", r"\1×[", filled).replace("->", "→").replace(" x ", " × ").replace("@", " @ ")


def _ranges(operations: Sequence[Operation]) -> dict[str, list[str]]:
    """The sizes of everything that goes in or comes out, by name."""
    first = operations[0]
    shapes = {name: [op.tensors[name].shape for op in operations] for name in (*first.inputs, *first.outputs)}
    return {name: list(map(show_range, zip(*each, strict=True))) for name, each in shapes.items()}


def show_range(sizes: Sequence[int]) -> str:
    """One size, or the least and the greatest.

    >>> show_range([5, 3, 8]), show_range([4, 4])
    ('3–8', '4')
    """
    least, greatest = min(sizes), max(sizes)
    return str(least) if least == greatest else f"{least}–{greatest}"
