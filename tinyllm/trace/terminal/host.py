"""The plain-Python rows before and behind the model: texts, the flat batch, the sampled tokens."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from tinyllm.trace.record import RequestRecord, StepRecord
from tinyllm.trace.terminal.text import (
    NAME,
    SYMBOLIC,
    TEXT,
    WIDTH,
    as_many_as_fit,
    cut_to,
    first_that_fits,
    host_row,
    plural,
    quote,
    show_list,
    show_numbers,
    show_pieces,
    show_runs,
    show_span,
    show_symbols,
)


def render_prompts(prompts: Iterable[tuple[str, str, Sequence[Sequence[str]]]]) -> Iterator[str]:
    """One row a prompt (label, text, its words' token pieces): bytes -> words -> ids."""
    for label, text, words in prompts:
        pieces = [piece for word in words for piece in word]
        num_bytes, num_words = len(text.encode()), len(words)
        counts = f"{num_words} {plural(num_words, 'word')} -> [{len(pieces)}]"
        forms = (f"{num_bytes} {plural(num_bytes, 'byte')} -> {counts}", f"{num_bytes}B -> {counts}", counts)
        yield host_row(f"bpe {label}", first_that_fits(forms, SYMBOLIC - 1), show_pieces(pieces))


def render_completions(completions: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """One line a request: (label, finish reason, text)."""
    for label, finish_reason, text in completions:
        yield cut_to(f"{label} {finish_reason}: {quote(text)}", WIDTH)


def batch_rows(step: StepRecord) -> Iterator[str]:
    """The tensors of the flat batch with their values."""
    requests = step.requests
    lens = ["+".join(f"[{r.query_len}]" for r in requests), f"{len(requests)} requests"]
    spans = "  ".join(f"{r.label} {show_span(r.num_computed_tokens, r.seq_len)}" for r in requests)
    yield _tensor_row(step, "token_ids", show_list(step.batch_values["token_ids"]), [f"{form} -> " for form in lens])
    yield _tensor_row(step, "positions", spans)
    yield _tensor_row(step, "cu_seqlens_q", show_list(step.batch_values["cu_seqlens_q"]) + "  rows of each request")
    yield _tensor_row(step, "seq_lens", show_list(step.batch_values["seq_lens"]) + "  keys each request may read")
    yield _tensor_row(step, "block_table", _block_table(step))
    slots = "  ".join(
        f"{r.label} {show_runs(slots)}" for r, slots in zip(requests, _slots_by_request(step), strict=True)
    )
    yield _tensor_row(step, "slot_mapping", slots + "  block*bs+pos%bs")
    yield _tensor_row(
        step, "logits_indices", show_list(step.batch_values["logits_indices"]) + "  each request's last row"
    )


def _block_table(step: StepRecord) -> str:
    """Each request's row, what of it is new, and how full its last block is."""
    rows = zip(step.requests, step.batch_values["block_table"], strict=True)
    table = "  ".join(f"{r.label} {show_list(row)}{_new_blocks(r)}" for r, row in rows)
    fills = ", ".join(f"{r.num_in_last_block}/{r.block_size}" for r in step.requests)
    return first_that_fits([f"{table}  last block: {fills}", f"{table}  last: {fills}", table], TEXT)


def _new_blocks(request: RequestRecord) -> str:
    is_new = request.new_block_ids and request.num_computed_tokens
    return f" new {show_list(request.new_block_ids)}" if is_new else ""


def _slots_by_request(step: StepRecord) -> list[list[int]]:
    ends, slots = step.batch_values["cu_seqlens_q"], step.batch_values["slot_mapping"]
    return [slots[start:end] for start, end in pairwise(ends)]


def _tensor_row(step: StepRecord, name: str, text: str, prefixes: Sequence[str] = ()) -> str:
    tensor = step.batch[name]
    forms = [f"{prefix}{show_symbols(tensor)}={show_numbers(tensor)}" for prefix in (*prefixes, "")]
    return host_row(name, first_that_fits(forms, SYMBOLIC - 1), text)


def sampling_rows(step: StepRecord) -> Iterator[str]:
    """One row a request: the token it got, and what else might have come."""
    for request in step.requests:
        if not request.samples:
            yield host_row(
                f"sampled {request.label}", "a chunk of a prefill", "its token is thrown away: the prompt goes on"
            )
        elif request.chosen is None:
            yield host_row(f"sampled {request.label}", request.method, "no token: the logits are NaN or all -inf")
        else:
            others = [c for c in request.candidates if c.token_id != request.chosen.token_id]
            ending = f"  ({request.finish_reason})" if request.finish_reason else ""
            tokens = [f"{quote(c.text)} {_probability(c.probability)}" for c in [request.chosen, *others]]
            shown = as_many_as_fit(tokens, WIDTH - NAME - SYMBOLIC - 2 - len(ending))
            yield host_row(f"sampled {request.label}", request.method, shown + ending)


def _probability(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def appended_row(step: StepRecord) -> Iterator[str]:
    """The life of the tokens just sampled: appended now, keys and values with the step that computes them."""
    grown = [request for request in step.requests if request.chosen]
    if not grown:
        return
    places = ", ".join(f"{request.label} at {request.seq_len}" for request in grown)
    what = first_that_fits([places, f"{len(grown)} tokens"], SYMBOLIC - 1)
    yield host_row("append", what, first_that_fits(_fates(grown), TEXT))


def _fates(grown: Sequence[RequestRecord]) -> Iterator[str]:
    """What the appended tokens' keys and values will need; then shorter."""
    going_on = [request for request in grown if not request.is_finished]
    if not going_on:
        yield "the last one: no step computes its KV" if len(grown) == 1 else "the last ones: no step computes their KV"
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


def _fate(request: RequestRecord) -> str:
    block_id = request.next_block_id
    return "needs a new block" if block_id is None else f"has room in block {block_id}"
