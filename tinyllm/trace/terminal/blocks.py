"""The scheduler's rows: who gets how many tokens and why not more, and what happens to the blocks."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tinyllm.trace.record import BlockSpan, PreemptedRecord, PrefixHit, RequestRecord, StepRecord
from tinyllm.trace.terminal.options import NAME, Options
from tinyllm.trace.terminal.rows import host_row
from tinyllm.trace.text import first_that_fits, plural, show_count, show_list, show_runs, show_span


def schedule_rows(step: StepRecord, options: Options) -> Iterator[str]:
    """One row a step, and one for each thing that is not a matter of course."""
    schedule = step.schedule
    if schedule.finished or schedule.freed_block_ids:
        yield _freed_row(step, options)
    for preempted in schedule.preempted:
        yield _preempted_row(preempted, options)
    yield _schedule_row(step, options)
    for request in step.requests:
        if request.hit:
            yield _hit_row(request, request.hit, options)
        if request.cut_by:
            yield _chunk_row(request, options)
    if schedule.waiting:
        yield _waiting_row(step, options)
    if schedule.evicted_block_ids:
        count, ids = len(schedule.evicted_block_ids), show_list(schedule.evicted_block_ids, options.list_width)
        forms = [f"{ids} given to new tokens, no longer found", f"{ids} given to new tokens", f"{ids} given away", ids]
        yield host_row(options, "evicted", [f"{count} cached {plural(count, 'block')}", f"{count} cached"], forms)


def block_rows(step: StepRecord, previous: StepRecord | None, options: Options) -> Iterator[str]:
    """The block map, unless it says the same as in the step before."""
    row = _map_row(step.schedule.block_map, options)
    if previous is None or row != _map_row(previous.schedule.block_map, options):
        yield row


def _waiting_row(step: StepRecord, options: Options) -> str:
    first, *others = step.schedule.waiting
    behind = f" ({len(others)} more behind it)" if others else ""
    forms = [f"{step.schedule.held_back}{behind}", step.schedule.held_back]
    return f"P {f'held back {first}':{NAME}}" + first_that_fits(forms, options.end - 2 - NAME)


def _what_it_computes(request: RequestRecord) -> str:
    """``new +5``, ``+1``: whether it has just started or goes on with a prompt, and how many tokens it computes."""
    goes_on = "" if request.is_decode else "prefill "
    started_as = goes_on if request.started_as == "running" else request.started_as + " "
    return f"{started_as}+{request.query_len}"


def _schedule_row(step: StepRecord, options: Options) -> str:
    schedule = step.schedule
    shares = ", ".join(f"{request.label} {_what_it_computes(request)}" for request in step.requests)
    counts = Counter(request.started_as for request in step.requests)
    short = ", ".join(f"{count} {started_as}" for started_as, count in counts.items())
    budget = f"{step.dims['num_tokens']}/{schedule.token_budget}"
    used = f"{schedule.num_used_blocks}/{schedule.num_blocks - 1}"
    forms = [
        f"token budget {budget}, blocks used {used}",
        f"budget {budget}, blocks {used}",
        f"{budget}, blocks {used}",
    ]
    return host_row(options, "schedule", [shares, short], forms)


def _chunk_row(request: RequestRecord, options: Options) -> str:
    left, why = request.num_left - request.query_len, f"cut by the {request.cut_by}"
    what = [f"{request.query_len} of the {request.num_left} tokens left", f"{request.query_len} of {request.num_left}"]
    forms = [f"{why}; {left} left for later", f"{why}; {left} left", why]
    return host_row(options, f"chunk {request.label}", what, forms)


def _freed_row(step: StepRecord, options: Options) -> str:
    names, block_ids = step.schedule.finished, step.schedule.freed_block_ids
    who = ", ".join(names), f"{len(names)} requests", f"{len(names)}"
    what = [f"{name} ended in step {step.index - 1}" for name in who] + [f"{name} ended" for name in who]
    ids = show_list(block_ids, options.list_width)
    texts = [f"blocks {ids} came back", f"blocks {ids}"]
    text = texts if block_ids else ["it held no block of its own", "no block of its own"]
    return host_row(options, "freed", what if names else "", text)


def _preempted_row(preempted: PreemptedRecord, options: Options) -> str:
    is_itself = preempted.label == preempted.for_label
    why = ["no block is left for it"] if is_itself else [f"for {preempted.for_label}, which needs blocks"]
    kept = len(preempted.block_ids) - len(preempted.freed_block_ids)
    freed = f"blocks {show_list(preempted.freed_block_ids, options.list_width)} freed" + (
        f", {kept} shared" if kept else ""
    )
    forms = [
        f"{freed}; {preempted.num_tokens} tokens start over",
        f"{freed}; {preempted.num_tokens} tokens again",
        freed,
    ]
    return host_row(options, f"preempt {preempted.label}", [*why, f"for {preempted.for_label}"], forms)


def _hit_row(request: RequestRecord, hit: PrefixHit, options: Options) -> str:
    count = len(hit.block_ids)
    blocks = plural(count, "block")
    authors = " and ".join(_author(author, request.label, blocks) for author in hit.computed_by)
    counts = f"{count} {blocks}, {show_count(hit.num_tokens, 'token')}"
    ids = show_list(hit.block_ids, options.list_width)
    forms = [f"{ids} {authors}: read, not computed", f"{ids} {authors}", f"{ids}: not computed", ids]
    return host_row(options, f"prefix hit {request.label}", [counts, f"{count} {blocks}"], forms)


def _author(author: str | None, reader: str, blocks: str) -> str:
    if author is None:
        return "cached before this trace"
    return "its own from before" if author == reader else f"{author}'s {blocks}"


# --- the block map -----------------------------------------------------------------------------------------------------


def _map_row(spans: Sequence[BlockSpan], options: Options) -> str:
    sizes = Counter()
    for span in spans:
        sizes[span.state] += span.num_blocks
    total = sum(sizes.values())
    sums = f"{sizes['null']} null+{sizes['held']} held+{sizes['free']} free={total}"
    free_of_all = [f"{sizes['free']} of {total} free", f"{sizes['free']}/{total} free", f"[NB]=[{total}]"]
    what = [sums.replace("+", " + ").replace("=", " = "), sums, *free_of_all]
    free = _free_blocks(spans, options)
    holders = {label for span in spans for label in span.holders}
    ways = [_held_spans(spans), _held_counts(spans), [f"held by {len(holders)} requests"]]
    forms = ["  ".join(held) + free for held in ways]
    return host_row(options, "block map", what, [*forms, f"{sizes['held']} held{free}", f"{sizes['held']} held"])


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


def _free_blocks(spans: Sequence[BlockSpan], options: Options) -> str:
    """``| free 5..9 (cached 7)``: those in brackets still hold tokens that can be found."""
    free = [span for span in spans if span.state == "free"]
    cached = [span for span in free if span.is_cached]
    if not free:
        return ""
    which = "all cached" if len(cached) == len(free) else f"cached {_show_spans(cached, options)}"
    return f" | free {_show_spans(free, options)}" + (f" ({which})" if cached else "")


def _show_spans(spans: Sequence[BlockSpan], options: Options) -> str:
    block_ids = [block_id for span in spans for block_id in range(span.first, span.last + 1)]
    return show_runs(block_ids, options.list_width)
