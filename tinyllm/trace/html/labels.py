"""Where labels go in a picture, so that none lies on another one, on a dot or on a line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, dist

LINE_HEIGHT = 14.0
CHARACTER = 6.6  # pixels; a wide one of the fonts that a system may have, at 11 pixels
GAPS = (9.0, 22.0, 40.0, 64.0, 96.0, 140.0)  # between a dot and its label
SHIFTS = range(0, 241, 4)  # of the label up and down

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether they share a point inside."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_within(self, other: "Box") -> bool:
        """Whether no part of it is outside the other one."""
        return (
            self.left >= other.left
            and self.top >= other.top
            and self.right <= other.right
            and self.bottom <= other.bottom
        )


@dataclass(frozen=True)
class Placed:
    """A label's place; leader is where a line from the dot should end, if the label is not right beside it."""

    box: Box
    is_left: bool
    leader: Point | None

    @property
    def text_x(self) -> float:
        """Where the text starts, or where it ends if it stands left of its dot."""
        return self.box.right if self.is_left else self.box.left


def place_labels(
    dots: Sequence[Point], texts: Sequence[Sequence[str]], radius: float, lines: Sequence[Box], room: Box
) -> Iterator[Placed]:
    """For each dot the nearest free place of its lines of text, in order; the last try where none is free.

    A label lies on no other, on no dot and on none of the lines; a leader may cross a line, but no label and no dot.

    >>> room = Box(0, 0, 400, 100)
    >>> [first, second] = place_labels([(50, 50), (50, 64)], [["one"], ["two"]], 6, [], room)
    >>> second.is_left, first.box.meets(second.box)
    (False, False)
    """
    circles = [Box(x - radius - 1, y - radius - 1, x + radius + 1, y + radius + 1) for x, y in dots]
    labels: list[Box] = []
    for i, (dot, text) in enumerate(zip(dots, texts, strict=True)):
        others = [*circles[:i], *circles[i + 1 :], *labels]
        placed = None
        for placed in _tries(dot, CHARACTER * max(map(len, text)), LINE_HEIGHT * len(text)):
            is_free = not any(map(placed.box.meets, [*others, circles[i], *lines]))
            if is_free and placed.box.is_within(room) and _is_clear(dot, placed, others):
                break
        assert placed is not None
        labels.append(placed.box)
        yield placed


def along(start: Point, end: Point) -> list[Box]:
    """Small boxes that cover a line."""
    count = max(1, ceil(dist(start, end) / 6))
    places = [[a + (b - a) * i / count for a, b in zip(start, end, strict=True)] for i in range(count + 1)]
    return [Box(x - 3, y - 3, x + 3, y + 3) for x, y in places]


def _tries(dot: Point, width: float, height: float) -> Iterator[Placed]:
    """Places on both sides of the dot, the nearest first."""
    shifts = [
        (gap, sign * shift, is_left) for gap in GAPS for shift in SHIFTS for sign in (1, -1) for is_left in (0, 1)
    ]
    for gap, shift, is_left in sorted(shifts, key=lambda place: place[0] + abs(place[1]) + 4 * place[2]):
        near = dot[0] - gap if is_left else dot[0] + gap
        left, top = near - width if is_left else near, dot[1] + shift - height / 2
        box = Box(left, top, left + width, top + height)
        is_beside = gap == GAPS[0] and box.top <= dot[1] <= box.bottom
        leader = None if is_beside else (near - 2 * (1 - 2 * is_left), dot[1] + shift)
        yield Placed(box, bool(is_left), leader)


def _is_clear(dot: Point, placed: Placed, others: Sequence[Box]) -> bool:
    """Whether the line to the label crosses none of the others."""
    if placed.leader is None:
        return True
    points = [Box(box.left + 2, box.top + 2, box.right - 2, box.bottom - 2) for box in along(dot, placed.leader)]
    return not any(point.meets(other) for point in points for other in others)
