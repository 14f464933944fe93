"""Texts that fit: numbers, lists and names within a row's columns."""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, set_cell_size

from tinyllm.shapes import WORDS
from tinyllm.trace.record import TensorRecord, to_symbol

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


def show_list(values: Sequence[int], width: int | None = None) -> str:
    """All numbers, or both ends of a long list: as many as fit, or five and two where no width is given."""
    texts = list(map(str, values))
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


# --- tensors and formulas -------------------------------------------------------------------------------------------------


def show_symbols(tensor: TensorRecord) -> str:
    """Its dimensions as symbols."""
    return f"[{','.join(tensor.symbols)}]"


def show_numbers(tensor: TensorRecord) -> str:
    """Its sizes."""
    return f"[{','.join(map(str, tensor.shape))}]"


def with_symbols(text: str) -> str:
    """A formula or a line of source with each dimension word as its symbol."""
    return re.sub(r"[a-zA-Z_]\w*", lambda match: to_symbol(match[0]) if match[0] in WORDS else match[0], text)


def strip_annotation(statement: str, name: str) -> str:
    """What is assigned: ``= x + y`` of ``z: Float[Tensor, "..."] = x + y``; another statement stays as it is."""
    text = re.sub(rf"^(?:\w+, )*{re.escape(name)}(?:, \w+)*(?:: .*?\])? = ", "= ", statement)
    return re.sub(r"\s*([(\[])\s+|,?\s+([)\]])", lambda match: match[1] or match[2], text)


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
