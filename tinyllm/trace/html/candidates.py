"""The candidates of a sampled token as bars."""

from collections.abc import Iterator, Sequence

from tinyllm.trace.html.markup import Html, group, label, outlines, picture, rect, small_figure
from tinyllm.trace.html.words import colour_class, shorten, show_share, show_token
from tinyllm.trace.record import Candidate, RequestRecord, StepRecord

BAR_LEFT, BAR_WIDTH, BAR_HEIGHT = 104, 146, 24


def candidates_figure(request: RequestRecord, step: StepRecord) -> Html:
    """The tokens that might have come next, by probability; the one that was taken is marked."""
    chosen = request.chosen
    shown = list(request.candidates)
    if chosen is not None and all(candidate.token_id != chosen.token_id for candidate in shown):
        shown.append(chosen)
    rest = max(0.0, 1.0 - sum(candidate.probability for candidate in shown))
    texts = [f"“{candidate.text}” {show_share(candidate.probability)}" for candidate in shown]
    taken = f" Taken: “{chosen.text}”." if chosen else ""
    svg = picture(
        BAR_LEFT + BAR_WIDTH + 56, (len(shown) + 1) * BAR_HEIGHT + 6,
        f"Candidates for request {request.label} in step {step.index}",
        f"{'; '.join(texts)}; all others {show_share(rest)}.{taken}",
        *_bars(request, shown, rest),
    )  # fmt: skip
    return small_figure(svg, fate(request))


def fate(request: RequestRecord) -> str:
    """How the row's token was found, and what became of it."""
    name = f"Request {request.label}"
    if not request.samples:
        return f"{name}: its prompt goes on in a later step, so this row's token is thrown away."
    if request.is_dry:
        return f"{name}: no values, so no token: a dry run."
    if request.chosen is None:
        return f"{name}: no token, as its logits are NaN or all -inf."
    chosen = request.chosen
    token = (
        f"{name}, {request.method}: “{show_token(chosen.text)}” (id {chosen.token_id}) at position {request.seq_len}"
    )
    if request.is_finished:
        return f"{token}; the request ends ({request.finish_reason}), so its key and value are never computed."
    block_id = request.next_block_id
    return f"{token}; " + ("a new block is needed." if block_id is None else f"block {block_id} has room.")


def _bars(request: RequestRecord, shown: Sequence[Candidate], rest: float) -> Iterator[Html]:
    """A line for each candidate, and a last one for all other tokens: name, bar, probability."""
    heights = [4.0 + i * BAR_HEIGHT for i in range(len(shown) + 1)]
    widths = [max(1.0, BAR_WIDTH * share) for share in (*(candidate.probability for candidate in shown), rest)]
    shares = map(show_share, (*(candidate.probability for candidate in shown), rest))
    names = [_name(y, candidate, request.chosen) for y, candidate in zip(heights, shown, strict=False)]
    yield group(*names, label(BAR_LEFT - 10, heights[-1] + 14, "all others", "quiet"), text_anchor="end")
    bars = (
        rect(
            BAR_LEFT,
            y,
            width,
            BAR_HEIGHT - 6,
            "cell" if _is_same(candidate, request.chosen) else None,
        )
        for y, width, candidate in zip(heights, widths, shown, strict=False)
    )
    yield group(*bars, class_=f"bar {colour_class(request.label)}")
    yield outlines(rect(BAR_LEFT, heights[-1], widths[-1], BAR_HEIGHT - 6, "others"))
    texts = (label(BAR_LEFT + width + 7, y + 14, text) for y, width, text in zip(heights, widths, shares, strict=True))
    yield group(*texts, class_="small")


def _name(y: float, candidate: Candidate, chosen: Candidate | None) -> Html:
    text = shorten(show_token(candidate.text), 11)
    is_chosen = _is_same(candidate, chosen)
    return label(BAR_LEFT - 10, y + 14, f"▶ {text}" if is_chosen else text, "strong" if is_chosen else None)


def _is_same(candidate: Candidate, chosen: Candidate | None) -> bool:
    return chosen is not None and candidate.token_id == chosen.token_id
