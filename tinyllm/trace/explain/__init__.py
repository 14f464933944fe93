"""What a word of the trace means, and why a size is what it is: ``--explain WORD``.

Words, formulas, shapes and places are read from the glossary and from the sources; numbers come from the step that is
explained. Only reasons and pitfalls are written down here, and no shape among them.
"""

import difflib
import re
import textwrap
from collections.abc import Iterator

from tinyllm.errors import ConfigError, brief
from tinyllm.trace.explain.aliases import alias_names, aliases
from tinyllm.trace.explain.dictionary import meanings_by_word
from tinyllm.trace.explain.sources import tensor_files
from tinyllm.trace.explain.texts import MANY
from tinyllm.trace.record import StepRecord
from tinyllm.trace.text import WIDTH

__all__ = ["explain", "explainable", "tensor_files"]


def explain(word: str, step: StepRecord | None = None) -> list[str]:
    """Every meaning of a word, a symbol, a tensor, a stage or a kind; with a step, the sizes that it had there and why.

    A name that vLLM, Hugging Face or others use leads to ours, and the first line says so.
    Raises ConfigError for an unknown word, with those that are spelt like it.
    """
    dictionary = meanings_by_word()
    alias, keys = _find(word)
    lines = ["", *textwrap.wrap(alias, WIDTH)] if alias else []
    for meaning in (make(step) for key in keys for make in dictionary[key]):
        lines += ["", *meaning.lines()]
    others = [key for key in dictionary if key.lower() == keys[0].lower() and key not in keys]
    if others:
        lines += ["", f"Not to be confused with {' or '.join(others)}, which --explain also knows."]
    return lines[1:]


def explainable() -> list[str]:
    """Everything that `explain` knows by its own name, sorted."""
    return sorted(meanings_by_word(), key=lambda word: (word.lower(), word))


def _find(word: str) -> tuple[str, list[str]]:
    """What to say of another project's name, and the dictionary's words: as asked for, or in another case."""
    text = " ".join(word.split()).strip("[]")
    for form in _forms(text):
        if form in meanings_by_word():
            return "", [form]
        alike = [key for key in meanings_by_word() if key.lower() == form.lower()]
        if alike:
            return "", alike
    for form in _forms(text):
        if form.lower() in aliases():
            return aliases()[form.lower()]
    near = _near(text)
    hint = f"did you mean {' or '.join(near)}?" if near else "expected what the trace prints, such as T, attend or M"
    raise ConfigError(f"{brief(word)} is no word of the trace; {hint}")


def _forms(text: str) -> Iterator[str]:
    """A word as it may stand in the dictionary: whole, without its path, its request or the numbers around it."""
    yield text
    yield text.rpartition(".")[2]
    words = [part for part in text.split() if not part.isdigit()]
    for end in range(len(words), 0, -1):
        yield " ".join(words[:end])


def _near(text: str) -> list[str]:
    """The known words inside a formula or a shape; or those that are spelt like the text."""
    parts = re.findall(r"[A-Za-z_]\w*(?:/2)?", text)
    inside = [part for part in dict.fromkeys(parts) if part in meanings_by_word()]
    if inside:
        return inside[:MANY]
    known = {name.lower(): name for name in (*alias_names(), *meanings_by_word()) if len(name) > 1}
    cutoff = 0.75 if len(text) < 4 else 0.65
    return [known[key] for key in difflib.get_close_matches(text.lower(), known, n=4, cutoff=cutoff)]
