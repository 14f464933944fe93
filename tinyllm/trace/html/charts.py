"""Charts: the stages of a step under the roofline, and the candidates of a sampled token as bars."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.html.markup import Html, figure, group, label, line, picture, rect
from tinyllm.trace.html.markup import element as _element
from tinyllm.trace.html.words import colour_class, shorten, show_share, show_token
from tinyllm.trace.record import Candidate, RequestRecord, StepRecord
from tinyllm.trace.terminal.text import show_number

LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 62, 30, 400, 264
NAMES = LEFT + PLOT_WIDTH + 34  # where the dots' names stand
BAR_LEFT, BAR_WIDTH, BAR_HEIGHT = 104, 146, 24


@dataclass(frozen=True)
class Cost:
    """All rows of one name in a step: over its layers and requests."""

    name: str
    letter: str
    flops: int
    num_bytes: int
    is_known: bool

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


def sum_stages(step: StepRecord) -> list[Cost]:
    """One cost a stage, in the order of their first rows."""
    names = dict.fromkeys(operation.label for operation in step.operations)
    costs = []
    for name in names:
        rows = [operation for operation in step.operations if operation.label == name]
        costs.append(Cost(
            name, KIND_LETTERS[rows[0].stage.kind], sum(row.flops or 0 for row in rows),
            sum(row.num_bytes for row in rows), all(row.flops is not None for row in rows),
        ))  # fmt: skip
    return costs


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis over whole decades."""

    low: int
    high: int
    start: float
    end: float

    def place(self, value: float) -> float:
        """Where a value stands, in pixels."""
        return self.start + (log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = floor(log10(min(values))), ceil(log10(max(values)) + 0.05)
    return Axis(low, max(high, low + 1), start, end)


def roofline_figure(step: StepRecord, ridge: float | None) -> Html | None:
    """Each stage at its FLOPs per byte and its FLOPs; with the machine's ridge, under the roof of the slowest stage."""
    costs = [cost for cost in sum_stages(step) if cost.flops and cost.num_bytes]
    if not costs:
        return None
    across = _axis([cost.intensity for cost in costs] + ([ridge] if ridge else []), LEFT, LEFT + PLOT_WIDTH)
    slowest = max(max(cost.num_bytes, cost.flops / ridge) for cost in costs) if ridge else 0.0
    tops = [slowest * ridge] if ridge else []
    up = _axis([cost.flops for cost in costs] + tops, TOP + PLOT_HEIGHT, TOP)
    dots = sorted(costs, key=lambda cost: -cost.flops)
    parts = [*_grid(across, up), *(_roof(across, up, ridge, slowest) if ridge else ()), *_dots(dots, across, up)]
    listed = "; ".join(f"{c.name} {show_number(c.flops)} FLOP at {c.intensity:.2f} FLOP a byte" for c in dots)
    height = max(TOP + PLOT_HEIGHT + 46, TOP + 16 * len(dots) + 20)
    svg = picture(NAMES + 190, height, f"Stages of step {step.index} by FLOPs and FLOPs per byte", listed + ".", *parts)
    return figure(svg, f"roofline of step {step.index}", _caption(step, ridge))


def _caption(step: StepRecord, ridge: float | None) -> str:
    idle = [cost.name for cost in sum_stages(step) if not cost.flops and cost.num_bytes and cost.is_known]
    moved = f" Not drawn, as they only move bytes: {', '.join(idle)}." if idle else ""
    scale = "A dot is a stage, all its layers and requests together; both axes are logarithmic."
    if ridge is None:
        roof = (
            " There is no roof in this picture, as no machine was given: a machine's ridge is the FLOPs that it can do "
            "while one byte comes from memory. A stage to the left of it waits for memory, one to the right for arithmetic."
        )
    else:
        roof = (
            f" This machine can do {ridge:.3g} FLOPs while one byte comes from memory: the ridge. Left of it a stage waits "
            "for memory, right of it for arithmetic. A stage on the roof takes longest; one decade below it, a tenth of that."
        )
    return scale + roof + moved


def _grid(across: Axis, up: Axis) -> Iterator[Html]:
    bottom = TOP + PLOT_HEIGHT
    yield rect(LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, "frame")
    for power in range(across.low, across.high + 1):
        x = across.place(10.0**power)
        yield line(x, TOP, x, bottom, "grid")
        yield label(x, bottom + 18, f"{10.0**power:g}", "small below", "middle")
    every = 1 if up.high - up.low <= 6 else 2
    for power in range(up.low, up.high + 1, every):
        y = up.place(10.0**power)
        yield line(LEFT, y, LEFT + PLOT_WIDTH, y, "grid")
        yield label(LEFT - 8, y + 4, _power(power), "small below", "end")
    yield label(LEFT + PLOT_WIDTH / 2, bottom + 38, "FLOPs per byte", "name", "middle")
    yield label(8, 14, "FLOPs", "name")
    yield label(NAMES, 14, "stage, FLOPs, FLOPs per byte", "small name")


def _power(power: int) -> str:
    return show_number(10.0**power).replace(".00", "").replace(".0", "")


def _roof(across: Axis, up: Axis, ridge: float, slowest: float) -> list[Html]:
    """The line of equal time through the slowest stage: memory's slope, then arithmetic's flat."""
    left, right = 10.0**across.low, 10.0**across.high
    low = max(left, 10.0**up.low / slowest)
    x, y = across.place(ridge), up.place(slowest * ridge)
    return [
        line(across.place(low), up.place(slowest * low), x, y, "roof"),
        line(x, y, across.place(right), y, "roof"),
        line(x, y, x, TOP + PLOT_HEIGHT, "ridge"),
        label(x - 6, TOP + PLOT_HEIGHT - 8, "← waits for memory", "small below", "end"),
        label(x + 6, TOP + PLOT_HEIGHT - 8, "arithmetic →", "small below"),
    ]


def _dots(costs: Sequence[Cost], across: Axis, up: Axis) -> Iterator[Html]:
    """Each dot with its kind's letter, its name at the right and a line between them; the names keep their distance."""
    name_y = 0.0
    for i, cost in enumerate(costs):
        x, y = across.place(cost.intensity), up.place(cost.flops)
        spare = TOP + PLOT_HEIGHT - 16 * (len(costs) - 1 - i)
        name_y = max(name_y + 16, min(y, spare))
        text = f"{cost.name}  {show_number(cost.flops)}  {cost.intensity:.2f}"
        yield group(
            line(x, y, NAMES - 22, name_y, "leader"), line(NAMES - 22, name_y, NAMES - 6, name_y, "leader"),
            _element("circle", cx=x, cy=y, r=7, class_=f"dot k{cost.letter}"),
            label(x, y + 4, cost.letter, "on small strong", "middle"),
            label(NAMES, name_y + 4, text, "small below"),
            data_stage=cost.name, data_flops=cost.flops, data_bytes=cost.num_bytes,
        )  # fmt: skip


# ---- candidates --------------------------------------------------------------------------------------------------------


def candidates_figure(request: RequestRecord, step: StepRecord) -> Html:
    """The tokens that might have come next, by probability; the one that was taken is marked."""
    chosen = request.chosen
    shown = list(request.candidates)
    if chosen is not None and all(candidate.token_id != chosen.token_id for candidate in shown):
        shown.append(chosen)
    rest = max(0.0, 1.0 - sum(candidate.probability for candidate in shown))
    bars = [_bar(i, candidate, chosen) for i, candidate in enumerate(shown)]
    texts = [f"'{candidate.text}' {show_share(candidate.probability)}" for candidate in shown]
    taken = f" Taken: '{chosen.text}'." if chosen else ""
    svg = picture(
        BAR_LEFT + BAR_WIDTH + 56, (len(shown) + 1) * BAR_HEIGHT + 6,
        f"Candidates for request {request.label} in step {step.index}",
        f"{'; '.join(texts)}; all others {show_share(rest)}.{taken}",
        group(*bars, class_=colour_class(request.label)), _rest(len(shown), rest),
    )  # fmt: skip
    caption = f"Request {request.label}, {request.method}: " + (
        f"“{show_token(chosen.text)}” (id {chosen.token_id}) is the token at position {request.seq_len}."
        if chosen
        else "no token."
    )
    return figure(svg, f"candidates of request {request.label} in step {step.index}", caption)


def _bar(index: int, candidate: Candidate, chosen: Candidate | None) -> Html:
    y = 4 + index * BAR_HEIGHT
    is_chosen = chosen is not None and chosen.token_id == candidate.token_id
    text = shorten(show_token(candidate.text), 11)
    width = max(1.0, BAR_WIDTH * candidate.probability)
    return group(
        label(BAR_LEFT - 10, y + 14, f"▶ {text}" if is_chosen else text, "strong below" if is_chosen else "below", "end"),
        rect(BAR_LEFT, y, width, BAR_HEIGHT - 6, "cell" if is_chosen else "bar"),
        label(BAR_LEFT + width + 7, y + 14, show_share(candidate.probability), "small below"),
        data_token=candidate.token_id, data_chosen="" if is_chosen else None,
    )  # fmt: skip


def _rest(index: int, rest: float) -> Html:
    y = 4 + index * BAR_HEIGHT
    width = max(1.0, BAR_WIDTH * rest)
    return group(
        label(BAR_LEFT - 10, y + 14, "all others", "quiet", "end"), rect(BAR_LEFT, y, width, BAR_HEIGHT - 6, "bar others"),
        label(BAR_LEFT + width + 7, y + 14, show_share(rest), "small below"),
    )  # fmt: skip
