"""The plain-Python rows before and behind the model: texts, the flat batch, the sampled tokens."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from tinyllm.trace.record import RequestRecord, StepRecord
from tinyllm.trace.shape_text import show_shape
from tinyllm.trace.terminal.options import NAME, Options
from tinyllm.trace.terminal.rows import Forms, host_row, note_row
from tinyllm.trace.text import (
    ENDLESS,
    as_many_as_fit,
    cut_to,
    elide,
    first_that_fits,
    make_printable,
    quote,
    show_count,
    show_list,
    show_number,
    show_pieces,
    show_runs,
    show_span,
)


def render_prompts(
    prompts: Iterable[tuple[str, str, Sequence[Sequence[str]]]], options: Options | None = None
) -> Iterator[str]:
    """One row a prompt (label, text, its words' token pieces): bytes -> words -> ids."""
    options = options or Options()
    for label, text, words in prompts:
        pieces = [piece for word in words for piece in word]
        num_bytes, num_words = len(text.encode()), len(words)
        counts = f"{show_count(num_words, 'word')} -> [{len(pieces)}]"
        forms = (f"{show_count(num_bytes, 'byte')} -> {counts}", f"{num_bytes}B -> {counts}", counts)
        yield host_row(options, f"bpe {label}", (*forms, f"[{len(pieces)}]"), show_pieces(pieces))


def render_completions(completions: Iterable[tuple[str, str, str]], options: Options | None = None) -> Iterator[str]:
    """One line a request: (label, finish reason, text)."""
    for label, finish_reason, text in completions:
        yield cut_to(f"{label} {finish_reason}: {quote(text)}", (options or Options()).end)


# --- the flat batch -------------------------------------------------------------------------------------------------------


def batch_rows(step: StepRecord, options: Options) -> Iterator[str]:
    """The tensors of the flat batch with their values."""
    requests, width = step.requests, options.layout.text
    yield from _token_rows(step, options)
    borders = step.batch_values["cu_seqlens_q"]
    owners = "rows " + "  ".join(f"{r.label} {a}:{b}" for r, a, b in zip(requests, borders, borders[1:], strict=False))
    yield _tensor_row(step, options, "cu_seqlens_q", _listed(step, options, "cu_seqlens_q", owners, "rows of each"))
    lens = "  ".join(f"{r.label} {r.query_len} new of {r.seq_len}" for r in requests)
    yield _tensor_row(step, options, "seq_lens", _listed(step, options, "seq_lens", lens, "keys each may read"))
    yield _tensor_row(step, options, "block_table", _block_table(step, options))
    slots = [
        f"{r.label} {show_runs(slots, options.list_width)}"
        for r, slots in zip(requests, _slots_by_request(step), strict=True)
    ]
    rule = "block*bs+pos%bs"
    yield _tensor_row(step, options, "slot_mapping", ["  ".join([*slots, rule]), elide(slots, width, "  ")])
    if not options.is_brief:  # gather_rows names them
        text = _listed(step, options, "logits_indices", "each request's last row", "last rows")
        yield _tensor_row(step, options, "logits_indices", text)


def _token_rows(step: StepRecord, options: Options) -> Iterator[str]:
    """Ids and positions: in one row where there is room for both."""
    requests, width = step.requests, options.layout.text
    lens = ["+".join(f"[{r.query_len}]" for r in requests), f"{len(requests)} requests"]
    spans = [f"{r.label} {show_span(r.num_computed_tokens, r.seq_len)}" for r in requests]
    whole = show_list(step.batch_values["token_ids"], ENDLESS)
    joined = f"{whole}  positions {'  '.join(spans)}"
    room = options.width - 2 - NAME - options.layout.what
    is_dry = any(request.is_dry for request in requests)
    is_joined = options.is_brief and not is_dry and len(joined) <= room
    ids = "no values: a dry run" if is_dry else show_list(step.batch_values["token_ids"], width)
    text = joined if is_joined else ids
    yield _tensor_row(step, options, "token_ids", text, [f"{form} -> " for form in lens])
    if not is_joined:
        yield _tensor_row(step, options, "positions", elide(spans, width, "  "))


def _listed(step: StepRecord, options: Options, name: str, *meanings: str) -> Iterator[str]:
    """The values of a tensor, with the longest of its meanings that fits."""
    values = step.batch_values[name]
    for meaning in meanings:
        yield f"{show_list(values, options.list_width)}  {meaning}"
    yield show_list(values, options.layout.text)


def kv_row(step: StepRecord, options: Options) -> str:
    """What the keys and values of one token take, of this step's, and of all blocks that are held."""
    each, block_bytes = step.kv_bytes_per_token, step.kv_bytes_per_token * step.dims["block_size"]
    written = show_number(each * step.dims["num_tokens"])
    held = show_number(block_bytes * step.schedule.num_used_blocks)
    pool = show_number(block_bytes * (step.schedule.num_blocks - 1))
    what = f"{show_number(each)}B a token"
    forms = [f"this step writes {written}B; blocks held {held}B of {pool}B", f"writes {written}B; held {held}B/{pool}B"]
    return host_row(options, "kv bytes", what, [*forms, f"held {held}B/{pool}B"])


def _block_table(step: StepRecord, options: Options) -> Iterator[str]:
    """Each request's row, what of it is new, and how full its last block is."""
    rows = [
        f"{r.label} {show_list(row, options.list_width)}"
        for r, row in zip(step.requests, step.batch_values["block_table"], strict=True)
    ]
    table = "  ".join(row + _new_blocks(r) for r, row in zip(step.requests, rows, strict=True))
    fills = ", ".join(f"{r.num_in_last_block}/{r.block_size}" for r in step.requests)
    yield f"{table}  last block: {fills}"
    yield f"{table}  last: {fills}"
    yield table
    yield elide([f"{r.label} {show_runs(r.block_ids)}" for r in step.requests], options.layout.text, "  ")


def _new_blocks(request: RequestRecord) -> str:
    is_new = request.new_block_ids and request.num_computed_tokens
    return f" new {show_list(request.new_block_ids)}" if is_new else ""


def _slots_by_request(step: StepRecord) -> list[list[int]]:
    ends, slots = step.batch_values["cu_seqlens_q"], step.batch_values["slot_mapping"]
    return [slots[start:end] for start, end in pairwise(ends)]


def _tensor_row(step: StepRecord, options: Options, name: str, text: Forms, prefixes: Sequence[str] = ()) -> str:
    tensor = step.batch[name]
    shape = show_shape(tensor.words, tensor.shape)
    return host_row(options, name, [f"{prefix}{shape}" for prefix in (*prefixes, "")], text)


# --- the sampled tokens ---------------------------------------------------------------------------------------------------


def sampling_rows(step: StepRecord, options: Options) -> Iterator[str]:
    """One row a request: the token it got, and what else might have come. Then what becomes of these tokens."""
    if step.failure:
        yield note_row(options, f"! the step ended here: {make_printable(step.failure)}")
        return
    for request in step.requests:
        yield host_row(options, f"sampled {request.label}", _method(request), _sampled(request, options.layout.text))
    grown = [request for request in step.requests if request.chosen]
    if grown and not options.is_brief:  # the next step tells who needed a block
        places = ", ".join(f"{request.label} at {request.seq_len}" for request in grown)
        yield host_row(options, "append", [places, f"{len(grown)} tokens"], _fates(grown))


def _method(request: RequestRecord) -> str:
    return request.method if request.samples else "a chunk of a prefill"


def _sampled(request: RequestRecord, width: int) -> Forms:
    if not request.samples:
        return "its token is thrown away: the prompt goes on", "thrown away: the prompt goes on", "thrown away"
    if request.is_dry:
        return "no values, so no token: a dry run"
    if request.chosen is None:
        return "no token: the logits are NaN or all -inf", "no token: logits not finite"
    others = [c for c in request.candidates if c.token_id != request.chosen.token_id]
    ending = f"  ({request.finish_reason})" if request.finish_reason else ""
    if request.method != "greedy":
        ending = "  at T=1, uncut" + ending
    tokens = [f"{quote(c.text)} {_probability(c.probability)}" for c in [request.chosen, *others]]
    return first_that_fits(as_many_as_fit(tokens, width - len(ending)), width - len(ending)) + ending


def _probability(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def _fates(grown: Sequence[RequestRecord]) -> Iterator[str]:
    """What the appended tokens' keys and values will need; then shorter."""
    going_on = [request for request in grown if not request.is_finished]
    if not going_on:
        yield "the last one: no step computes its KV" if len(grown) == 1 else "the last ones: no step computes their KV"
        yield "the last: their KV is never computed"
        yield "the last: no KV is needed"
        return
    ended = "".join(f"; {request.label} ended" for request in grown if request.is_finished)
    each = "no KV yet: " + ", ".join(f"{request.label} {_fate(request)}" for request in going_on)
    yield each + ended
    yield each
    roomy = [request.label for request in going_on if request.next_block_id is not None]
    full = [request.label for request in going_on if request.next_block_id is None]
    verbs = (
        "has room" if len(roomy) == 1 else "have room",
        "needs a new block" if len(full) == 1 else "need a new block",
    )
    groups = [(names, verb) for names, verb in zip((roomy, full), verbs, strict=True) if names]
    yield "no KV yet: " + "; ".join(f"{', '.join(names)} {verb}" for names, verb in groups)
    yield "no KV yet: " + "; ".join(f"{len(names)} {verb}" for names, verb in groups)
    yield f"new blocks for {len(full)} of {len(going_on)}" if full else "all have room"


def _fate(request: RequestRecord) -> str:
    block_id = request.next_block_id
    return "needs a new block" if block_id is None else f"has room in block {block_id}"
