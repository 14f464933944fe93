"""The form of an explanation: a title with labelled parts, and how these show names and long lists."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinyllm.trace.text import WIDTH

LABEL = 8  # columns of a part's label
MANY = 6  # requests, rows or places that are listed one by one

Part = tuple[str, str]  # label, text; a newline in the text starts a new line


@dataclass(frozen=True)
class Meaning:
    """One meaning of a word: a title, and what there is to say under fixed labels."""

    title: str
    parts: tuple[Part, ...]

    def lines(self) -> Iterator[str]:
        """As text of at most 100 columns; a part without text is left out."""
        yield from textwrap.wrap(self.title, WIDTH, subsequent_indent="  ")
        for label, text in self.parts:
            for i, paragraph in enumerate(text.split("\n") if text else ()):
                head = f"  {'' if i else label:{LABEL}}"
                yield from textwrap.wrap(paragraph, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def others_names(vllm: str, huggingface: str) -> str:
    """What the two other projects call it."""
    return f"vLLM: {vllm or 'no word of its own'}; Hugging Face: {huggingface or 'no word of its own'}"


def join_and(texts: Sequence[str]) -> str:
    """``A``, ``A and B``, ``A, B and C``."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def first_few(texts: Sequence[str], limit: int = MANY) -> str:
    """The first of a list, and how many more there are."""
    more = [f"{len(texts) - limit} more"] if len(texts) > limit else []
    return ", ".join([*texts[:limit], *more])


def few_lines(texts: Sequence[str]) -> list[str]:
    """The same, one a line."""
    more = [f"and {len(texts) - MANY} more"] if len(texts) > MANY else []
    return [*texts[:MANY], *more]
