"""What the record says, in words: tokens, decisions, changes, formulas."""

import re
from collections.abc import Iterator, Mapping, Sequence

from tinyllm.trace.record import (
    Operation,
    PreemptedRecord,
    PrefixHit,
    RequestRecord,
    RunRecord,
    StepRecord,
    TensorRecord,
)
from tinyllm.trace.terminal.text import make_printable, plural, show_number, show_runs

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


def count_tokens(step: StepRecord) -> int:
    """The rows of the batch, also where the step failed before a tensor told."""
    return sum(request.query_len for request in step.requests)


def is_dry(request: RequestRecord) -> bool:
    """Whether its tokens have no ids: a dry run."""
    return any(token_id < 0 for token_id in request.token_ids[:1])


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
    yield from _shares(step.requests)
    if schedule.waiting:
        who = f"{schedule.waiting[0]}: " if len(schedule.waiting) > 1 else ""
        yield f"{', '.join(schedule.waiting)} must wait ({who}{schedule.held_back})."
    if schedule.evicted_block_ids:
        yield f"{_blocks(schedule.evicted_block_ids).capitalize()} held cached tokens that are forgotten now: new tokens need the room."
    num_tokens = count_tokens(step)
    yield (
        f"Together {num_tokens} of the {schedule.token_budget} tokens that one step may compute; "
        f"{schedule.num_used_blocks} of {schedule.num_blocks - 1} blocks are in use."
    )


def _shares(requests: Sequence[RequestRecord]) -> Iterator[str]:
    """What each request computes; of more than two that decode, in one sentence."""
    decodes = [request for request in requests if request.is_decode]
    is_folded = len(decodes) > 2
    if is_folded:
        places = ", ".join(f"{request.label} at {request.num_computed_tokens}" for request in decodes)
        yield f"{len(decodes)} requests compute the token that each sampled last: {places}."
    for request in requests:
        if not (is_folded and request.is_decode):
            yield _share(request)
        if request.hit:
            yield _hit(request, request.hit)


def _share(request: RequestRecord) -> str:
    count = f"{request.query_len} {plural(request.query_len, 'token')}"
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
    count = f"{hit.num_tokens} {plural(hit.num_tokens, 'token')}"
    return f"{request.label} found {_blocks(hit.block_ids)} in the cache, computed by {authors}: {count} are read, not computed again."


def _preempted(preempted: PreemptedRecord) -> str:
    is_itself = preempted.label == preempted.for_label
    why = "as no block is left for it" if is_itself else f"as {preempted.for_label} needs blocks"
    freed = f" {_blocks(preempted.freed_block_ids).capitalize()} came back." if preempted.freed_block_ids else ""
    return f"{preempted.label} is preempted, {why}.{freed} Its {preempted.num_tokens} tokens will be computed again."


def _blocks(block_ids: tuple[int, ...]) -> str:
    return f"{plural(len(block_ids), 'block')} {show_runs(sorted(block_ids))}"


# ---- shapes and formulas -----------------------------------------------------------------------------------------------


def show_dims(operations: Sequence[Operation], is_symbolic: bool) -> str:
    """A row's template with each tensor's dimensions in its place; ``.T`` turns them as the product uses them.

    The operations are one, or those of several requests: where their sizes differ, the least and the greatest stand.
    """
    stage = operations[0].stage
    template = (is_symbolic and stage.symbolic) or stage.template

    def insert(match: re.Match[str]) -> str:
        if match[1] not in operations[0].tensors:
            return "?"
        return show_shapes([op.tensors[match[1]] for op in operations], is_symbolic, is_turned=bool(match[2]))

    filled = re.sub(r"\{([\w\[\]]+)(\.T)?\}", insert, template)
    return re.sub(r"(\d)x\[", r"\1×[", filled).replace("->", "→").replace(" x ", " × ").replace("@", " @ ")


def show_shapes(tensors: Sequence[TensorRecord], is_symbolic: bool, is_turned: bool = False) -> str:
    """Dimensions in brackets, as symbols or as sizes; turned as a product uses a stored weight."""
    shapes = zip(*(tensor.shape for tensor in tensors), strict=True)
    texts = tensors[0].symbols if is_symbolic else tuple(map(show_range, shapes))
    return f"[{','.join(texts[::-1] if is_turned else texts)}]"


def show_shape(tensor: TensorRecord, is_symbolic: bool, is_turned: bool = False) -> str:
    """One tensor's dimensions, as `show_shapes` has them."""
    return show_shapes([tensor], is_symbolic, is_turned)


def show_range(sizes: Sequence[int]) -> str:
    """One size, or the least and the greatest.

    >>> show_range([5, 3, 8]), show_range([4, 4])
    ('3–8', '4')
    """
    least, greatest = min(sizes), max(sizes)
    return str(least) if least == greatest else f"{least}–{greatest}"


def with_numbers(formula: str, sizes: Mapping[str, int]) -> str:
    """The formula with the size of each word.

    >>> with_numbers("2*num_tokens*e", {"num_tokens": 13, "e": 4})
    '2·13·4'
    """
    numbers = re.sub(r"[a-zA-Z_]\w*", lambda match: str(sizes.get(match[0], match[0])), formula)
    return numbers.replace("*", "·")


def bound_by(flops: int | None, num_bytes: int, ridge: float) -> str:
    """What the time goes into on a machine with this many FLOPs per byte: "memory", "compute", or nothing at all."""
    if not num_bytes or flops is None:
        return "" if num_bytes == 0 else "?"
    return "memory" if flops / num_bytes < ridge else "compute"
