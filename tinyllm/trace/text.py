"""Texts that fit: numbers, lists and names within so many columns. Every view of a trace writes with these."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

WIDTH = 100  # columns of a line, where nobody asks for others
ENDLESS = 10**6  # columns of a line that nothing cuts

# --- one of several forms -------------------------------------------------------------------------------------------------


def first_that_fits(forms: str | Iterable[str], width: int) -> str:
    """The first of several ways to say it that fits; the last one is cut."""
    text = ""
    for text in [forms] if isinstance(forms, str) else forms:
        if cell_len(text) <= width:
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


def elide(texts: Sequence[str], width: int, separator: str) -> str:
    """All texts, or the last two and as many of the first ones as fit, with dots for those between."""
    whole = separator.join(texts)
    if len(whole) <= width or len(texts) < 4:
        return whole
    head, tail = [], ["...", *texts[-2:]]
    room = width - len(separator.join(tail))
    for text in texts[:-2]:
        room -= len(text) + len(separator)
        if room < 0:
            break
        head.append(text)
    return separator.join([*head, *tail])


def cut_to(text: str, width: int) -> str:
    """The text within so many columns of a terminal, where some characters take two."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 3)).rstrip() + "..."


def fold_words(prefix: str, words: Sequence[str], width: int, separator: str = "  ") -> Iterator[str]:
    """Lines of words, as many as fit, the first behind the prefix; a word that is too long is cut."""
    line, is_empty = prefix, True
    for word in words:
        if not is_empty and cell_len(line) + cell_len(word) > width:
            yield line.rstrip()
            line = " " * len(prefix)
        line += cut_to(word, width - len(prefix)) + separator
        is_empty = False
    yield line.rstrip()


# --- numbers and lists ----------------------------------------------------------------------------------------------------


def show_number(value: float) -> str:
    """Three digits and a letter, decimal: 14400000 -> 14.4M."""
    letters = iter("kMGT")
    letter = ""
    while value >= 999.5 and letter != "T":
        value, letter = value / 1000, next(letters)
    decimals = 0 if not letter or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}{letter}"


def show_decimal(value: float) -> str:
    """Two or three digits of a value that may be of any size: 0.012, 2.1, 423, 1.2e+06."""
    return f"{value:.0f}" if 99.5 <= abs(value) < 99999.5 else f"{value:.2g}"


def show_list(values: Sequence[Any], width: int | None = None) -> str:
    """All numbers, or both ends of a long list: as many as fit, or five and two where no width is given.

    >>> show_list(range(20)), show_list([[1, 2], [3, 0]])
    ('[0,1,2,3,4,...,18,19]', '[[1,2],[3,0]]')
    """
    texts = [show_list(value, width) if isinstance(value, list) else str(value) for value in values]
    if width is not None:
        return f"[{elide(texts, width - 2, ',')}]"
    if len(texts) > 8:
        texts = [*texts[:5], "...", *texts[-2:]]
    return f"[{','.join(texts)}]"


def show_span(start: int, end: int) -> str:
    """``5``, or ``5..7`` for 5 up to but not including 8."""
    return str(start) if end - start == 1 else f"{start}..{end - 1}"


def show_runs(slots: Sequence[int], width: int | None = None) -> str:
    """Slots as runs of neighbours: 4..8, 12..15; of more than four the first three and the last, but for a width."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1][1] = slot + 1
        else:
            runs.append([slot, slot + 1])
    texts = [show_span(start, end) for start, end in runs]
    if width is not None:
        return elide(texts, width, ",")
    return ",".join(texts if len(texts) <= 4 else [*texts[:3], "...", texts[-1]])


def plural(count: int, noun: str) -> str:
    """The noun as the count wants it."""
    return noun if count == 1 else noun + "s"


def show_count(count: int, noun: str) -> str:
    """``1 token``, ``5 tokens``."""
    return f"{count} {plural(count, noun)}"


# --- the user's text ------------------------------------------------------------------------------------------------------


def quote(text: str) -> str:
    """In quotes, on one line."""
    return "'" + make_printable(text) + "'"


def show_pieces(pieces: Sequence[str]) -> str:
    """Token texts with the borders between them."""
    return "|".join(make_printable(piece) for piece in pieces)


def make_printable(text: str) -> str:
    """Text on one line: control characters as escapes, so that no token moves the cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
