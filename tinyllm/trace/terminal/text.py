"""Texts that fit: numbers, lists and names within a row's columns."""

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, set_cell_size

from tinyllm.trace.record import TensorRecord

WIDTH = 100
NAME, SYMBOLIC, NUMERIC = 15, 30, 32  # with the kind letter 79 columns; FLOP, BYTE and F/B take the last 21
TEXT = WIDTH - 2 - NAME - SYMBOLIC  # what a plain-Python row has for its text


def cost_row(
    letter: str, name: str, symbolic: str, numeric: str, flops: int | None, num_bytes: int, is_unknown: bool
) -> str:
    """A row with FLOPs, bytes and FLOPs per byte."""
    count = "?" if flops is None else (">" if is_unknown else "") + show_number(flops)
    intensity = f"{flops / num_bytes:.1f}" if flops is not None and num_bytes else ""
    left = f"{letter} {cut_to(name, NAME - 1):{NAME}}{symbolic:{SYMBOLIC}}{numeric}"
    return f"{cut_to(left, WIDTH - 21):{WIDTH - 21}}{count:>7}{show_number(num_bytes):>7}{intensity:>7}".rstrip()


def host_row(name: str, what: str, text: str) -> str:
    """A row of plain Python: a name, what there is or happens, and how."""
    left = f"P {name:{NAME}}{cut_to(what, SYMBOLIC - 1):{SYMBOLIC}}"
    return left + cut_to(text, WIDTH - len(left))


def show_number(value: float) -> str:
    """Three digits and a letter, decimal: 14400000 -> 14.4M."""
    letters = iter("kMGT")
    letter = ""
    while value >= 999.5 and letter != "T":
        value, letter = value / 1000, next(letters)
    decimals = 0 if not letter or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}{letter}"


def first_that_fits(forms: Iterable[str], width: int) -> str:
    """The first of several ways to say it that fits; the last one is cut."""
    text = ""
    for text in forms:
        if len(text) <= width:
            return text
    return cut_to(text, width)


def as_many_as_fit(texts: Sequence[str], width: int) -> str:
    """The first text, and of the others as many as the width allows."""
    line = texts[0]
    for text in texts[1:]:
        if cell_len(line) + 2 + cell_len(text) > width:
            break
        line += "  " + text
    return line


def cut_to(text: str, width: int) -> str:
    """The text within so many columns of a terminal, where some characters take two."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 3)).rstrip() + "..."


def show_list(values: Sequence[int]) -> str:
    """All numbers, or both ends of a long list."""
    texts = list(map(str, values))
    if len(texts) > 8:
        texts = [*texts[:5], "...", *texts[-2:]]
    return f"[{','.join(texts)}]"


def show_span(start: int, end: int) -> str:
    """``5``, or ``5..7`` for 5 up to but not including 8."""
    return str(start) if end - start == 1 else f"{start}..{end - 1}"


def show_runs(slots: Sequence[int]) -> str:
    """Slots as runs of neighbours: 4..8, 12..15."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1][1] = slot + 1
        else:
            runs.append([slot, slot + 1])
    texts = [show_span(start, end) for start, end in runs]
    return ",".join(texts if len(texts) <= 4 else [*texts[:3], "...", texts[-1]])


def show_symbols(tensor: TensorRecord) -> str:
    """Its dimensions as symbols."""
    return f"[{','.join(tensor.symbols)}]"


def show_numbers(tensor: TensorRecord) -> str:
    """Its sizes."""
    return f"[{','.join(map(str, tensor.shape))}]"


def quote(text: str) -> str:
    """In quotes, on one line."""
    return "'" + make_printable(text) + "'"


def show_pieces(pieces: Sequence[str]) -> str:
    """Token texts with the borders between them."""
    return "|".join(make_printable(piece) for piece in pieces)


def make_printable(text: str) -> str:
    """Text on one line: control characters as escapes, so that no token moves the cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def plural(count: int, noun: str) -> str:
    """The noun as the count wants it."""
    return noun if count == 1 else noun + "s"


def flow_words(prefix: str, words: Sequence[str]) -> Iterator[str]:
    """Lines of words, as many as fit, the first behind the prefix."""
    line = prefix
    for word in words:
        if len(line) + len(word) + 2 > WIDTH and line.strip():
            yield line.rstrip()
            line = " " * len(prefix)
        line += word + "  "
    yield line.rstrip()
