"""The picture of the packed batch: all requests' tokens in one row, and the borders between them."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from tinyllm.trace.html.markup import Html, figure, group, label, line, outlines, picture, rect
from tinyllm.trace.html.words import Tokens, colour_class, shorten, show_token
from tinyllm.trace.record import RequestRecord, StepRecord
from tinyllm.trace.text import show_count, show_list

MAX_CELLS = 36  # more tokens are drawn as one bar a request
CELL, LEFT, TOP = 60, 116, 30
FULL_WIDTH, NARROWEST = 800, 48  # of the bars


def batch_figure(step: StepRecord, tokens: Tokens) -> Html:
    """The flat batch as a strip: one cell a token, `cu_seqlens_q` above, position and slot below."""
    num_tokens, ends = step.dims["num_tokens"], step.batch_values["cu_seqlens_q"]
    is_detailed = num_tokens <= MAX_CELLS
    edges = _edges(ends, is_detailed)
    spans = "; ".join(
        f"{request.label} has rows {start} to {end - 1}"
        for request, (start, end) in zip(step.requests, pairwise(ends), strict=True)
    )
    svg = picture(
        edges[-1] + 24, 176 if is_detailed else 92, f"Packed batch of step {step.index}",
        f"{num_tokens} tokens in one row without padding. Borders cu_seqlens_q {show_list(ends)}. {spans}.",
        _row_names(is_detailed), *(_cells(step, tokens) if is_detailed else _bars(step, edges)), *_borders(ends, edges),
    )  # fmt: skip
    scale = "" if is_detailed else f" Bars are in scale, but none is narrower than {NARROWEST} of {FULL_WIDTH}."
    return figure(svg, f"packed batch of step {step.index}", _caption(step) + scale)


def _edges(ends: Sequence[int], is_detailed: bool) -> list[float]:
    """Where the borders stand, in pixels."""
    counts = [end - start for start, end in pairwise(ends)]
    widths = [CELL * count if is_detailed else max(NARROWEST, FULL_WIDTH * count / ends[-1]) for count in counts]
    return list(accumulate(widths, initial=float(LEFT)))


def _caption(step: StepRecord) -> str:
    num_reqs, num_tokens, values = len(step.requests), step.dims["num_tokens"], step.batch_values
    counts = f"{show_count(num_reqs, 'request')}, {show_count(num_tokens, 'row')}, no padding."
    borders = (
        f"cu_seqlens_q = {show_list(values['cu_seqlens_q'])} holds the borders: one more than there are requests, as each "
        "end is the next one's begin."
    )
    heads = f"Only the rows under ▲ go on to the LM head: {show_list(values['logits_indices'])}."
    is_cut = any(not request.samples for request in step.requests)
    thrown_away = " Under (▲) the prompt goes on in a later step: that row's token is thrown away." if is_cut else ""
    return f"{counts} {borders} {heads}{thrown_away}"


def _row_names(is_detailed: bool) -> Html:
    names = (
        ["cu_seqlens_q", "token, id", "position", "slot", "LM head"]
        if is_detailed
        else ["cu_seqlens_q", "request", "LM head"]
    )
    heights = [16, 60, 106, 128, 158] if is_detailed else [16, 52, 84]
    labels = (label(LEFT - 18, y, name, "name") for name, y in zip(names, heights, strict=True))
    return group(*labels, text_anchor="end")


def _borders(ends: Sequence[int], edges: Sequence[float]) -> Iterator[Html]:
    """A tick at each border, with its number."""
    yield outlines(*(line(x, 21, x, TOP + 58, "border") for x in edges))
    numbers = (label(x, 16, str(end), "number strong") for end, x in zip(ends, edges, strict=True))
    yield group(*numbers, text_anchor="middle")


def _cells(step: StepRecord, tokens: Tokens) -> Iterator[Html]:
    ends = step.batch_values["cu_seqlens_q"]
    for request, (start, end) in zip(step.requests, pairwise(ends), strict=True):
        rects = (rect(LEFT + CELL * row, TOP, CELL, 52, "cell") for row in range(start, end))
        texts = (text for row in range(start, end) for text in _cell_texts(step, request, row, tokens))
        name = label(LEFT + CELL * (start + end) / 2, 16, request.label, "strong")
        marks = (_mark(LEFT + CELL * (row + 0.5), 158, request.samples) for row in _head_rows(step, start, end))
        yield group(
            outlines(*rects), *texts, name, *marks, class_=colour_class(request.label), text_anchor="middle",
            data_request=request.label,
        )  # fmt: skip


def _cell_texts(step: StepRecord, request: RequestRecord, row: int, tokens: Tokens) -> Iterator[Html]:
    """A row's token and id, and below the cell its position and slot."""
    x, values = LEFT + CELL * (row + 0.5), step.batch_values
    position = values["positions"][row]
    text = tokens.get((request.label, position))
    if text:
        yield label(x, TOP + 20, shorten(show_token(text), 7), "token")
    yield label(x, TOP + 38, "?" if request.is_dry else str(values["token_ids"][row]), "on small")
    yield label(x, 106, str(position))
    yield label(x, 128, str(values["slot_mapping"][row]))


def _bars(step: StepRecord, edges: Sequence[float]) -> Iterator[Html]:
    """One bar a request, for a batch of many tokens."""
    spans = zip(step.requests, pairwise(edges), pairwise(step.batch_values["cu_seqlens_q"]), strict=True)
    for request, (left, right), (start, end) in spans:
        marks = (_mark(right - 12, 84, request.samples) for _ in _head_rows(step, start, end))
        yield group(
            outlines(rect(left, TOP, right - left, 36, "cell")),
            label((left + right) / 2, TOP + 24, request.label, "on"),
            *marks, class_=colour_class(request.label), text_anchor="middle",
            data_request=request.label, data_rows=f"{start}..{end - 1}",
        )  # fmt: skip


def _head_rows(step: StepRecord, start: int, end: int) -> list[int]:
    return [row for row in step.batch_values["logits_indices"] if start <= row < end]


def _mark(x: float, y: float, is_kept: bool) -> Html:
    """A row that goes to the LM head; in brackets where its token is thrown away, as the prompt goes on."""
    return label(x, y, "▲" if is_kept else "(▲)")
