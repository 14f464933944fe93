"""One step of the run: decisions, pictures, tables, tokens."""

from collections.abc import Iterator
from itertools import pairwise

from tinyllm.trace.html.batch import batch_figure
from tinyllm.trace.html.blocks import blocks_figure
from tinyllm.trace.html.boxes import tensors_figure
from tinyllm.trace.html.candidates import candidates_figure, fate
from tinyllm.trace.html.markup import Html, code, disclosure, element, join, table
from tinyllm.trace.html.roofline import roofline_figure
from tinyllm.trace.html.rows import layer_tables
from tinyllm.trace.html.words import Tokens, schedule_sentences, with_unit
from tinyllm.trace.record import StepRecord
from tinyllm.trace.shape_text import show_shape
from tinyllm.trace.text import show_count, show_list, show_runs

BATCH_NOTES = {
    "token_ids": "the rows of the flat batch",
    "positions": "each row's place in its own request",
    "cu_seqlens_q": "the borders between the requests",
    "seq_lens": "the keys that each request may read",
    "block_table": "where each request reads; short rows end in 0, the null block",
    "slot_mapping": "where each row's key and value go: block * bs + position % bs",
    "logits_indices": "the rows that go on to the LM head",
}


def render_step(
    step: StepRecord, previous: StepRecord | None, tokens: Tokens, ridge: float | None, is_open: bool
) -> Html:
    """A whole step as one part that opens."""
    title = element("h3", step_title(step))
    costs = element("span", f"{with_unit(step.flops, 'FLOP')}, {with_unit(step.num_bytes, 'B')}", class_="costs")
    return disclosure(
        join([title, costs], " "),
        element("h4", "What the scheduler decided"),
        element("ul", *(element("li", sentence) for sentence in schedule_sentences(step))),
        *_batch(step, tokens),
        element("h4", "The block pool"),
        blocks_figure(step, previous),
        element("h4", "The stages"),
        *layer_tables(step, previous, ridge),
        *_cost_pictures(step, ridge),
        element("h4", "The sampled tokens"),
        *_sampled(step),
        element("h4", "Totals of the step"),
        element("p", _totals(step, previous)),
        is_open=is_open,
        class_="step",
        data_step=step.index,
    )


def _batch(step: StepRecord, tokens: Tokens) -> Iterator[Html]:
    yield element("h4", "The packed batch")
    yield batch_figure(step, tokens)
    yield disclosure("The batch's tensors with their values", _batch_table(step))


def step_title(step: StepRecord) -> str:
    """As the terminal has it: number, phase, requests, tokens."""
    num_reqs, num_tokens = len(step.requests), step.dims["num_tokens"]
    counts = f"R={show_count(num_reqs, 'request')}, T={show_count(num_tokens, 'token')}"
    return f"Step {step.index}, {step.phase}: {counts}"


def _batch_table(step: StepRecord) -> Html:
    rows = (
        element(
            "tr", element("th", name, scope="row"), element("td", code(show_shape(tensor.words, tensor.shape))),
            element("td", code(_values(step, name))), element("td", BATCH_NOTES.get(name, ""), class_="say"),
        )
        for name, tensor in step.batch.items()
    )  # fmt: skip
    return table(f"step {step.index}, flat batch", ("tensor", "shape", "values", "meaning"), rows)


def _values(step: StepRecord, name: str) -> str:
    values = step.batch_values[name]
    if name == "block_table":
        return " ".join(f"{r.label} {show_list(row)}" for r, row in zip(step.requests, values, strict=True))
    if name in ("positions", "slot_mapping"):
        spans = pairwise(step.batch_values["cu_seqlens_q"])
        return " ".join(f"{r.label} {show_runs(values[i:j])}" for r, (i, j) in zip(step.requests, spans, strict=True))
    return show_list(values)


def _cost_pictures(step: StepRecord, ridge: float | None) -> Iterator[Html]:
    tensors, roofline = tensors_figure(step), roofline_figure(step, ridge)
    if tensors is not None:
        yield disclosure("Picture: the tensors in scale", tensors, is_open=step.index == 0)
    if roofline is not None:
        yield disclosure("Picture: FLOPs per byte of each stage", roofline, is_open=step.index == 0)


def _sampled(step: StepRecord) -> Iterator[Html]:
    if step.failure:
        yield element("p", f"None: the step ended with {step.failure}", class_="failure")
        return
    drawn = [request for request in step.requests if request.samples and request.candidates]
    if drawn:
        yield element("div", *(candidates_figure(request, step) for request in drawn), class_="side-by-side")
    if any(request.chosen and not request.is_finished for request in step.requests):
        yield element("p", "The key and value of a token appended now come with the step that computes it.")
    others = [element("li", fate(request)) for request in step.requests if request not in drawn]
    if others:
        yield element("ul", *others)


def _totals(step: StepRecord, previous: StepRecord | None) -> str:
    num_tokens, least = step.dims["num_tokens"], "at least " if step.has_unknown_flops else ""
    texts = [
        f"{show_count(num_tokens, 'token')} in, {step.num_chosen} out: {least}{step.flops:,} FLOP and {step.num_bytes:,} bytes",
        f"{step.flops / step.num_bytes:.2f} FLOPs per byte" if step.num_bytes else "",
        f"a ledger compared {step.num_compared} sizes, and all agree",
    ]
    if previous is not None and previous.flops and previous.num_bytes:
        times = (
            f"{step.flops / previous.flops:.2f} times the FLOPs",
            f"{step.num_bytes / previous.num_bytes:.2f} times the bytes",
        )
        texts.append(f"compared with step {previous.index}: {times[0]}, {times[1]}")
    return "; ".join(filter(None, texts)) + "."
