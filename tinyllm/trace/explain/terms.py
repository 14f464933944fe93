"""A word that stands between the shapes: a column, a role, a remark, an event of the engine; and what a step adds."""

from collections.abc import Callable

from tinyllm.shapes import evaluate
from tinyllm.trace.costs import PAIRS
from tinyllm.trace.explain.notes.note import Term
from tinyllm.trace.explain.sizes import request_dims, sum_of_blocks
from tinyllm.trace.explain.sources import line_of, show_place
from tinyllm.trace.explain.texts import MANY, Meaning, first_few
from tinyllm.trace.record import RequestRecord, StepRecord
from tinyllm.trace.recorder import PACKAGE
from tinyllm.trace.text import show_count


def explain_term(name: str, term: Term, step: StepRecord | None) -> Meaning:
    """A word that the trace prints, with what it comes to in a step where that says more."""
    file = PACKAGE / term.file
    is_cost = name in ("FLOP", "BYTE", "F/B", "pairs")
    return Meaning(f"{name}: {'a number of the rows' if is_cost else 'a word'} of the trace", (
        ("is", term.what),
        ("why", term.why),
        ("here", "\n".join(TERMS_HERE[name](step)) if step and name in TERMS_HERE else ""),
        ("care", term.care),
        ("code", show_place(file, line_of(file, term.start))),
    ))  # fmt: skip


def _phase_here(step: StepRecord) -> list[str]:
    """What the step is, and what each request does in it."""
    parts = [f"{request.label} {_doing(request)}" for request in step.requests]
    return [f"step {step.index} is {'mixed' if step.phase == 'mixed' else f'a {step.phase}'}: {first_few(parts)}"]


def _doing(request: RequestRecord) -> str:
    count = request.query_len
    return "decodes" if request.is_decode else f"prefills {show_count(count, 'token')}"


def _chunks_here(step: StepRecord) -> list[str]:
    cut = [f"{r.label} computes {r.query_len} of {r.num_left} left" for r in step.requests if r.cut_by]
    return [first_few(cut) or "no prompt is cut in this step"]


def _hits_here(step: StepRecord) -> list[str]:
    found = [f"{r.label} found {r.hit.num_tokens} tokens" for r in step.requests if r.hit]
    return [first_few(found) or "no request found any in this step"]


def _blocks_here(step: StepRecord) -> list[str]:
    return [f"{sum_of_blocks(step)} = {step.dims['num_blocks']} blocks"]


def _budget_here(step: StepRecord) -> list[str]:
    used, budget = step.dims["num_tokens"], step.schedule.token_budget
    cut = [f"; {request.label} was cut by it" for request in step.requests if request.cut_by]
    return [f"{used} of {budget} tokens are used{''.join(cut[:MANY])}"]


def _kv_bytes_here(step: StepRecord) -> list[str]:
    """The bytes of one token as a product."""
    layers, kv_size = step.dims["num_layers"], step.dims["kv_size"]
    each = step.kv_bytes_per_token
    value = each // (2 * layers * kv_size)
    return [f"2 * num_layers * kv_size * {value} bytes = 2*{layers}*{kv_size}*{value} = {each:,} bytes a token"]


def _pairs_here(step: StepRecord) -> list[str]:
    return [first_few([f"{r.label} {_count_pairs(r)} of {r.query_len * r.seq_len}" for r in step.requests])]


def _count_pairs(request: RequestRecord) -> int:
    return evaluate(PAIRS, request_dims(request)) or 0


TERMS_HERE: dict[str, Callable[[StepRecord], list[str]]] = {
    "FLOP": lambda step: [f"{step.flops:,} in the whole step"],
    "BYTE": lambda step: [f"{step.num_bytes:,} in the whole step"],
    "F/B": lambda step: [f"{step.flops:,} / {step.num_bytes:,} = {step.flops / step.num_bytes:.1f} in the whole step"],
    "pairs": _pairs_here,
    "prefill": _phase_here,
    "decode": _phase_here,
    "mixed": _phase_here,
    "chunk": _chunks_here,
    "prefix hit": _hits_here,
    "block map": _blocks_here,
    "token budget": _budget_here,
    "kv bytes": _kv_bytes_here,
    "ledger": lambda step: [f"{step.num_compared:,} sizes agree in this step"],
    "append": lambda step: [first_few([f"{r.label} at {r.seq_len}" for r in step.requests if r.chosen])],
    "request": lambda step: [first_few([f"{r.label} has {r.seq_len} tokens so far" for r in step.requests])],
}
"""What a step adds to a term."""
