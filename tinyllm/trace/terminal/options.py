"""What to print, and the columns that a width gives."""

from dataclasses import dataclass
from functools import cached_property

from tinyllm.trace.text import ENDLESS, WIDTH

MIN_WIDTH, MAX_WIDTH = 60, 200
TWO_HALVES = 80  # from here on a row has symbols and numbers; below, symbols alone
NAME = 15
SYMBOLIC = 30, 36  # at the usual width, and at most
NUMERIC = 32, 50
BOTH = 43  # the least that both take
SOURCE = 37  # "layers/attention/per_request.py:35", with its gap
WHY = 36  # the least that says anything


@dataclass(frozen=True)
class Layout:
    """How many columns each part of a row has; 0: it has no such part."""

    symbolic: int
    numeric: int
    costs: tuple[tuple[str, int], ...]  # titles and widths
    source: int  # file and line of the stage
    why: int  # its first sentence
    what: int  # of a plain-Python row: what there is
    text: int  # and how it is


@dataclass(frozen=True)
class Options:
    """What to print. layers lists the decoder layers shown row by row."""

    layers: tuple[int, ...] = (0,)
    full: bool = False  # every row, every named tensor with its source line, every formula
    step: int | None = None  # this step alone, the others in one line each
    op: str | None = None  # this stage alone, with all that is known of it
    has_values: bool = False  # with op: what the tensors hold
    has_time: bool = False
    ridge: float | None = None  # FLOPs per byte at which this machine computes as long as it moves
    bandwidth: float | None = None  # bytes per second that it moves
    width: int = WIDTH
    is_unicode: bool = False
    is_whole: bool = False  # lists and texts at the end of a line are never shortened, as in a pipe

    @cached_property
    def layout(self) -> Layout:
        """The columns."""
        costs = _cost_columns(self)
        left = self.width - 2 - NAME
        room = left - sum(width for _, width in costs)
        if self.width < TWO_HALVES or room < BOTH:
            what = max(17, left * 3 // 8)
            return Layout(room, 0, costs, 0, 0, what, self.end - 2 - NAME - what)
        source = SOURCE if room - SOURCE >= SYMBOLIC[0] + NUMERIC[0] else 0
        room -= source
        symbolic = min(SYMBOLIC[1], max(23, room * SYMBOLIC[0] // (SYMBOLIC[0] + NUMERIC[0])))
        why = room - symbolic - NUMERIC[1]
        why = why if source and why >= WHY else 0
        return Layout(symbolic, room - symbolic - why, costs, source, why, symbolic, self.end - 2 - NAME - symbolic)

    @property
    def end(self) -> int:
        """The column where a line is cut."""
        return ENDLESS if self.is_whole else self.width

    @property
    def list_width(self) -> int | None:
        """What `show_list` and `show_runs` may take; None leaves it to them."""
        return ENDLESS if self.is_whole else None

    @property
    def is_brief(self) -> bool:
        """Whether rows may be left out or joined that follow from the others."""
        return not self.full and self.step is None

    @property
    def arrow(self) -> str:
        """What stands between what goes in and what comes out."""
        return "\N{RIGHTWARDS ARROW}" if self.is_unicode else "->"

    @property
    def branch(self) -> str:
        """What stands before a row of a layer."""
        return "\N{BOX DRAWINGS LIGHT VERTICAL} " if self.is_unicode else "| "

    @property
    def leaf(self) -> str:
        """What stands before a named tensor."""
        return "\N{BOX DRAWINGS LIGHT VERTICAL AND RIGHT} " if self.is_unicode else "|. "

    def bar(self, title: str, ending: str = "") -> str:
        """A title over the whole width, and what stands at its right end."""
        line = "\N{BOX DRAWINGS DOUBLE HORIZONTAL}" if self.is_unicode else "="
        ending = f" {ending} {line * 2}" if ending else ""
        return f"{line * 2} {title} ".ljust(self.width - len(ending), line)[: self.width - len(ending)] + ending


def _cost_columns(options: Options) -> tuple[tuple[str, int], ...]:
    """FLOP, BYTE, F/B; with --time what it took and what it must take; with --op and a ridge the letter of the bound."""
    each = 7 if options.width >= WIDTH else 6
    is_narrow = options.width < TWO_HALVES
    columns = [("FLOP", each), ("BYTE", each)]
    if not (is_narrow and options.has_time):
        columns.append(("F/B", each))
    if options.op and options.ridge is not None:
        columns.append(("", 2))
    if options.has_time:
        columns.append(("us", 7))
        if options.bandwidth is not None and not is_narrow:
            columns.append(("bound", 7))
    return tuple(columns)
