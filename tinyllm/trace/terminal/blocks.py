"""The scheduler's rows: who gets how many tokens and why not more, and what happens to the blocks."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tinyllm.trace.record import BlockSpan, PreemptedRecord, PrefixHit, RequestRecord, StepRecord
from tinyllm.trace.terminal.text import (
    NAME,
    SYMBOLIC,
    TEXT,
    WIDTH,
    cut_to,
    first_that_fits,
    host_row,
    plural,
    show_list,
    show_runs,
    show_span,
)


def schedule_rows(step: StepRecord) -> Iterator[str]:
    """One row a step, and one for each thing that is not a matter of course."""
    schedule = step.schedule
    if schedule.finished or schedule.freed_block_ids:
        yield _freed_row(step)
    for preempted in schedule.preempted:
        yield _preempted_row(preempted)
    yield _schedule_row(step)
    for request in step.requests:
        if request.hit:
            yield _hit_row(request, request.hit)
        if request.cut_by:
            yield _chunk_row(request)
    if schedule.waiting:
        first, *others = schedule.waiting
        behind = f" ({len(others)} more behind it)" if others else ""
        yield cut_to(f"P {f'held back {first}':{NAME}}{schedule.held_back}{behind}", WIDTH)
    if schedule.evicted_block_ids:
        count, ids = len(schedule.evicted_block_ids), show_list(schedule.evicted_block_ids)
        yield host_row(
            "evicted", f"{count} cached {plural(count, 'block')}", f"{ids} given to new tokens, no longer found"
        )


def block_rows(step: StepRecord, previous: StepRecord | None) -> Iterator[str]:
    """The block map, unless it says the same as in the step before."""
    row = _map_row(step.schedule.block_map)
    if previous is None or row != _map_row(previous.schedule.block_map):
        yield row


def _share(request: RequestRecord) -> str:
    """``new +5``, ``+1``: whether it has just started, and how many tokens it computes."""
    started_as = "" if request.started_as == "running" else request.started_as + " "
    return f"{started_as}+{request.query_len}"


def _schedule_row(step: StepRecord) -> str:
    schedule = step.schedule
    shares = ", ".join(f"{request.label} {_share(request)}" for request in step.requests)
    counts = Counter(request.started_as for request in step.requests)
    short = ", ".join(f"{count} {started_as}" for started_as, count in counts.items())
    budget = f"token budget {step.dims['num_tokens']}/{schedule.token_budget}"
    used = f"blocks used {schedule.num_used_blocks}/{schedule.num_blocks - 1}"
    return host_row("schedule", first_that_fits([shares, short], SYMBOLIC - 1), f"{budget}, {used}")


def _chunk_row(request: RequestRecord) -> str:
    later = f"cut by the {request.cut_by}; {request.num_left - request.query_len} left for later"
    return host_row(f"chunk {request.label}", f"{request.query_len} of the {request.num_left} tokens left", later)


def _freed_row(step: StepRecord) -> str:
    names, block_ids = step.schedule.finished, step.schedule.freed_block_ids
    forms = (f"{who} ended in step {step.index - 1}" for who in (", ".join(names), f"{len(names)} requests"))
    text = f"blocks {show_list(block_ids)} came back" if block_ids else "it held no block of its own"
    return host_row("freed", first_that_fits(forms, SYMBOLIC - 1) if names else "", text)


def _preempted_row(preempted: PreemptedRecord) -> str:
    is_itself = preempted.label == preempted.for_label
    why = "no block is left for it" if is_itself else f"for {preempted.for_label}, which needs blocks"
    kept = len(preempted.block_ids) - len(preempted.freed_block_ids)
    shared = f", {kept} shared" if kept else ""
    text = f"blocks {show_list(preempted.freed_block_ids)} freed{shared}; {preempted.num_tokens} tokens start over"
    return host_row(f"preempt {preempted.label}", why, text)


def _hit_row(request: RequestRecord, hit: PrefixHit) -> str:
    count = len(hit.block_ids)
    blocks = plural(count, "block")
    authors = " and ".join(_author(author, request.label, blocks) for author in hit.computed_by)
    counts = f"{count} {blocks}, {hit.num_tokens} {plural(hit.num_tokens, 'token')}"
    text = f"{show_list(hit.block_ids)} {authors}"
    return host_row(f"prefix hit {request.label}", counts, first_that_fits([f"{text}: read, not computed", text], TEXT))


def _author(author: str | None, reader: str, blocks: str) -> str:
    if author is None:
        return "cached before this trace"
    return "its own from before" if author == reader else f"{author}'s {blocks}"


# --- the block map -----------------------------------------------------------------------------------------------------


def _map_row(spans: Sequence[BlockSpan]) -> str:
    sizes = Counter()
    for span in spans:
        sizes[span.state] += span.num_blocks
    total = sum(sizes.values())
    sums = f"{sizes['null']} null+{sizes['held']} held+{sizes['free']} free={total}"
    what = first_that_fits([sums.replace("+", " + ").replace("=", " = "), sums, f"[NB]=[{total}]"], SYMBOLIC - 1)
    free = _free_blocks(spans)
    holders = {label for span in spans for label in span.holders}
    forms = [
        "  ".join(held) + free
        for held in (_held_spans(spans), _held_counts(spans), [f"held by {len(holders)} requests"])
    ]
    return host_row("block map", what, first_that_fits(forms, TEXT))


def _held_spans(spans: Sequence[BlockSpan]) -> Iterator[str]:
    """Ranges with their holders: ``0 null  1..2 A+B  3 A``."""
    runs: list[tuple[int, int, str]] = []
    for span in spans:
        name = "null" if span.state == "null" else "+".join(span.holders)
        if runs and runs[-1][1] == span.first and runs[-1][2] == name:
            runs[-1] = runs[-1][0], span.last + 1, name
        else:
            runs.append((span.first, span.last + 1, name))
    return (f"{show_span(first, end)} {name}" for first, end, name in runs if name)


def _held_counts(spans: Sequence[BlockSpan]) -> Iterator[str]:
    """How many blocks each request holds alone, and how many are shared: ``A 12  B 7  shared 3``."""
    counts: Counter[str] = Counter()
    for span in spans:
        if span.state == "held":
            name = "shared" if len(span.holders) > 1 else "".join(span.holders)
            counts[name] += span.num_blocks
    return (f"{name} {count}" for name, count in counts.items())


def _free_blocks(spans: Sequence[BlockSpan]) -> str:
    """``| free 5..9 (cached 7)``: those in brackets still hold tokens that can be found."""
    free = [span for span in spans if span.state == "free"]
    cached = [span for span in free if span.is_cached]
    if not free:
        return ""
    which = "all cached" if len(cached) == len(free) else f"cached {_show_spans(cached)}"
    return f" | free {_show_spans(free)}" + (f" ({which})" if cached else "")


def _show_spans(spans: Sequence[BlockSpan]) -> str:
    return show_runs([block_id for span in spans for block_id in range(span.first, span.last + 1)])
