"""The stages of a step under the roofline: a dot at its FLOPs per byte and its FLOPs, a label that hides no other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, dist, floor, log10

from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.html.labels import LINE_HEIGHT, Box, Placed, Point, along, place_labels
from tinyllm.trace.html.markup import Html, element, figure, group, label, line, outlines, picture, rect
from tinyllm.trace.record import StepRecord
from tinyllm.trace.text import show_number

LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 62, 30, 600, 400
WIDTH, BOTTOM = LEFT + PLOT_WIDTH + 160, TOP + PLOT_HEIGHT
RADIUS, NEAREST = 6, 13.0  # dots that would be nearer to each other become one


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


@dataclass(frozen=True)
class Dot:
    """One circle: a stage, or several whose circles would lie on each other; it stands where the first one is."""

    place: Point
    costs: tuple[Cost, ...]


def roofline_figure(step: StepRecord, ridge: float | None) -> Html | None:
    """Each stage at its FLOPs per byte and its FLOPs; with the machine's ridge, under the roof of the slowest stage."""
    costs = [cost for cost in sum_stages(step) if cost.flops and cost.num_bytes]
    if not costs:
        return None
    across = _axis([cost.intensity for cost in costs] + ([ridge] if ridge else []), LEFT, LEFT + PLOT_WIDTH)
    slowest = max(max(cost.num_bytes, cost.flops / ridge) for cost in costs) if ridge else 0.0
    tops = [slowest * ridge] if ridge else []
    up = _axis([cost.flops for cost in costs] + tops, BOTTOM, TOP)
    costs.sort(key=lambda cost: -cost.flops)
    roof = _roof_points(across, up, ridge, slowest) if ridge else []
    parts = [*_grid(across, up), *(_roof(roof) if roof else ()), *_dots(_merge(costs, across, up), roof)]
    listed = "; ".join(f"{c.name} {show_number(c.flops)} FLOP at {c.intensity:.2f} FLOP a byte" for c in costs)
    svg = picture(WIDTH, BOTTOM + 46, f"Stages of step {step.index} by FLOPs and FLOPs per byte", listed + ".", *parts)
    return figure(svg, f"roofline of step {step.index}", _caption(step, ridge))


def _caption(step: StepRecord, ridge: float | None) -> str:
    idle = [cost.name for cost in sum_stages(step) if not cost.flops and cost.num_bytes and cost.is_known]
    moved = f" Not drawn, as they only move bytes: {', '.join(idle)}." if idle else ""
    scale = (
        "A dot is a stage, all its layers and requests together, with its FLOPs and FLOPs per byte beside it; stages "
        "that would hide each other share a dot. Both axes are logarithmic."
    )
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


# ---- axes and roof -----------------------------------------------------------------------------------------------------


def _grid(across: Axis, up: Axis) -> Iterator[Html]:
    powers = range(up.low, up.high + 1, 1 if up.high - up.low <= 6 else 2)
    columns = {across.place(10.0**power): f"{10.0**power:g}" for power in range(across.low, across.high + 1)}
    rows = {up.place(10.0**power): _power(power) for power in powers}
    yield outlines(
        rect(LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, "frame"), *(line(x, TOP, x, BOTTOM, "grid") for x in columns),
        *(line(LEFT, y, LEFT + PLOT_WIDTH, y, "grid") for y in rows),
    )  # fmt: skip
    yield group(
        *(label(x, BOTTOM + 18, text, "small") for x, text in columns.items()),
        label(LEFT + PLOT_WIDTH / 2, BOTTOM + 38, "FLOPs per byte", "name"), text_anchor="middle",
    )  # fmt: skip
    yield group(*(label(LEFT - 8, y + 4, text, "small") for y, text in rows.items()), text_anchor="end")
    yield label(8, 14, "FLOPs", "name")


def _power(power: int) -> str:
    return show_number(10.0**power).replace(".00", "").replace(".0", "")


def _roof_points(across: Axis, up: Axis, ridge: float, slowest: float) -> list[Point]:
    """The line of equal time through the slowest stage: its lower end, its ridge and its right end."""
    low = max(10.0**across.low, 10.0**up.low / slowest)
    y = up.place(slowest * ridge)
    return [(across.place(low), up.place(slowest * low)), (across.place(ridge), y), (LEFT + PLOT_WIDTH, y)]


def _roof(points: Sequence[Point]) -> Iterator[Html]:
    """Memory's slope, then arithmetic's flat, and above the plot what each side of the ridge waits for."""
    start, (x, y), end = points
    yield outlines(line(*start, x, y, "roof"), line(x, y, *end, "roof"), line(x, TOP, x, BOTTOM, "ridge"))
    if x > LEFT + 120:
        yield label(x - 6, TOP - 8, "← waits for memory", "small", "end")
    yield label(x + 6, TOP - 8, "waits for arithmetic →", "small")


# ---- dots and labels ---------------------------------------------------------------------------------------------------


def _merge(costs: Sequence[Cost], across: Axis, up: Axis) -> list[Dot]:
    """Costs at their places; one that would lie on an earlier one joins it."""
    groups: dict[Point, list[Cost]] = {}
    for cost in costs:
        place = across.place(cost.intensity), up.place(cost.flops)
        near = next((other for other in groups if dist(other, place) < NEAREST), place)
        groups.setdefault(near, []).append(cost)
    return [Dot(place, tuple(members)) for place, members in groups.items()]


def _dots(dots: Sequence[Dot], roof: Sequence[Point]) -> Iterator[Html]:
    """The dots with their kind's letter and, beside each, a line of text for each of its stages."""
    lines: list[Box] = []
    if roof:
        start, ridge, end = roof
        lines = [*along(start, ridge), *along(ridge, end)]
    room = Box(LEFT + 3, TOP + 2, WIDTH, BOTTOM - 2)
    texts = [[_text(cost) for cost in dot.costs] for dot in dots]
    places = place_labels([dot.place for dot in dots], texts, RADIUS, lines, room)
    yield from map(_dot, dots, places)


def _text(cost: Cost) -> str:
    return f"{cost.name} {show_number(cost.flops)}, {cost.intensity:.2f}"


def _dot(dot: Dot, placed: Placed) -> Html:
    (x, y), letter = dot.place, dot.costs[0].letter
    top = placed.box.top + LINE_HEIGHT - 3
    texts = [
        element("text", _text(cost), x=placed.text_x, y=top + i * LINE_HEIGHT, class_="small", data_stage=cost.name,
                data_flops=cost.flops, data_bytes=cost.num_bytes)
        for i, cost in enumerate(dot.costs)
    ]  # fmt: skip
    leader = outlines(line(x, y, *placed.leader, "leader")) if placed.leader else None
    circle = element("circle", cx=x, cy=y, r=RADIUS, class_=f"dot k{letter}")
    lines = group(*texts, text_anchor="end" if placed.is_left else None)
    return group(leader, outlines(circle), label(x, y + 3.5, letter, "letter", "middle"), lines, class_="stage")
