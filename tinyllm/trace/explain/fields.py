"""A tensor of the batch: its axes, its values in a step and how the step's requests make them, who reads it."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from tinyllm.trace.dims import Words, field_words
from tinyllm.trace.explain.notes.fields import FIELDS
from tinyllm.trace.explain.sizes import for_each, request_dims, rows_by_request
from tinyllm.trace.explain.sources import BATCH, line_of, place_of, show_place, source_lines, tensor_functions
from tinyllm.trace.explain.tensors import axis_lines, evaluated_shapes
from tinyllm.trace.explain.texts import (
    MANY,
    Meaning,
    few_lines,
    first_few,
    others_names,
)
from tinyllm.trace.record import StepRecord, TensorRecord
from tinyllm.trace.shape_text import in_symbols, show_shape
from tinyllm.trace.text import ENDLESS, plural, show_count, show_list, show_runs, show_span


def explain_field(class_name: str, name: str, step: StepRecord | None) -> Meaning:
    """A field of one of the batch's classes."""
    note, words = FIELDS[class_name, name], field_words(BATCH, class_name)[name]
    tensor = step.batch.get(name) if step and class_name == "FlatBatch" else None
    here = [*_values_here(name, tensor, step), *(evaluated_shapes(words, step) if step and tensor is None else ())]
    return Meaning(f"{name} {in_symbols(words)}: a tensor of {class_name}, made once a step", (
        ("is", note.what),
        ("why", "\n".join([note.why, *axis_lines(words, step)])),
        ("here", "\n".join(here)),
        ("care", note.care),
        ("names", others_names(note.vllm, note.huggingface)),
        ("code", "\n".join([show_place(BATCH, _line_of_field(class_name, name)), *_readers(name, words)])),
    ))  # fmt: skip


def _line_of_field(class_name: str, name: str) -> int:
    start = line_of(BATCH, f"class {class_name}")
    lines = source_lines(BATCH)[start:]
    return start + next(i for i, line in enumerate(lines, 1) if line.strip().startswith(f"{name}:"))


def _readers(name: str, words: Words) -> list[str]:
    """The functions that take the field as an argument of the same name."""
    specs = [spec for spec in tensor_functions() if spec.arguments.get(name) == words]
    return few_lines([f"{place_of(spec)} in {spec.qualname}" for spec in specs])


def _values_here(name: str, tensor: TensorRecord | None, step: StepRecord | None) -> Iterator[str]:
    """The tensor's shape and values in the step, and how they come about."""
    if step is None or tensor is None:
        return
    yield f"{show_shape(tensor.words, tensor.shape)} = {show_list(step.batch_values[name])}"
    if name in FIELDS_HERE:
        yield from FIELDS_HERE[name](step)


# --- how the values come about ----------------------------------------------------------------------------------------


def _borders_here(step: StepRecord) -> Iterator[str]:
    """Each request's rows, and their borders as sums."""
    spans = rows_by_request(step)
    yield first_few([f"{r.label} has {plural(r.query_len, 'row')} {show_span(start, end)}" for r, start, end in spans])
    sums = [f"{start} + {r.query_len} = {end}" for r, start, end in spans]
    yield f"0 where the first begins, then each one's end: {first_few(sums)}"
    count = len(step.requests)
    yield f"R+1 = {count + 1}: {count} + 1, an end for each request and the first begin"


def _keys_here(step: StepRecord) -> Iterator[str]:
    """Each request's length as a sum, and what is read in the step."""
    yield first_few([f"{r.label} {r.num_computed_tokens} before + {r.query_len} now" for r in step.requests])
    total = " + ".join(str(request.seq_len) for request in step.requests[:MANY])
    more = " + ..." if len(step.requests) > MANY else ""
    keys, rows = sum(request.seq_len for request in step.requests), step.dims["num_tokens"]
    yield f"{total}{more} = {keys} keys are read by T = {rows} rows"


def _slots_here(step: StepRecord) -> Iterator[str]:
    """Each request's slots as recorded, and its last one, or the first that is wrong, as a calculation."""
    recorded = step.batch_values["slot_mapping"]
    for request, start, end in rows_by_request(step)[:MANY]:
        size, first, slots = request.block_size, request.num_computed_tokens, recorded[start:end]
        due = [request.block_ids[p // size] * size + p % size for p in range(first, request.seq_len)]
        wrong = [i for i, (slot, expected) in enumerate(zip(slots, due, strict=True)) if slot != expected]
        row = wrong[0] if wrong else len(due) - 1
        block, place = divmod(due[row], size)
        which = f"position {first + row}" if wrong or len(due) == 1 else f"its last, position {first + row},"
        text = f"{which} is place {place} of block {block}, {block} * {size} + {place} = {due[row]}"
        error = f", but slot_mapping says {slots[row]}: it is wrong" if wrong else ""
        yield f"{request.label} writes {_runs(slots)}: {text}{error}"


def _table_here(step: StepRecord) -> Iterator[str]:
    """How many blocks each request needs, and what fills its line up."""
    width = step.dims["max_blocks"]
    for request in step.requests[:MANY]:
        count = request_dims(request)["num_req_blocks"]
        padding = f", and {width - count} x padding" if count < width else ""
        tokens = "token needs" if request.seq_len == 1 else "tokens need"
        blocks = f"{show_count(count, 'block')} of {request.block_size} slots"
        yield f"{request.label}: {request.seq_len} {tokens} {blocks}{padding}"


def _lasts_here(step: StepRecord) -> Iterator[str]:
    lasts = [f"{r.label}'s rows end before {end}, so its last is {end - 1}" for r, _, end in rows_by_request(step)]
    yield first_few(lasts)


def _runs(slots: Sequence[int]) -> str:
    """Slots, neighbours as spans: ``4..7, 12``."""
    return first_few(show_runs(slots, ENDLESS).split(","))


FIELDS_HERE: dict[str, Callable[[StepRecord], Iterable[str]]] = {
    "token_ids": lambda step: [for_each(step.requests, lambda r: r.query_len, "token", "computes")],
    "positions": lambda step: [
        first_few([f"{r.label} stands at {show_span(r.num_computed_tokens, r.seq_len)}" for r in step.requests])
    ],
    "cu_seqlens_q": _borders_here,
    "seq_lens": _keys_here,
    "slot_mapping": _slots_here,
    "block_table": _table_here,
    "logits_indices": _lasts_here,
}
"""What a step's requests say of the values of the batch's tensors."""
