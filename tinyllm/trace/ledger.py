"""The ledger: over a whole step every dimension word has one size, in every argument, local, result and field.

The shape checks see one call at a time and no local; the ledger sees them all. A config word is compared with the
config, a step word with its first size in the step, any other word with its first size in the call; a word that has a
formula is compared with that as well.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace.recorder import Call

LOCAL_WORDS = frozenset(word.name for word in WORDS.values() if word.scope in ("request", "call"))


class LedgerError(AssertionError):
    """Two sizes for one dimension word: an annotation is false or a tensor is wrong. Names both."""


class Ledger:
    """The sizes of one step. `dims` holds those of the checkpoint and the KV pool.

    `check` raises LedgerError at the first contradiction; afterwards `sizes` knows the step's words and
    `sizes_of(call)` the words of one call.
    """

    def __init__(self, dims: Mapping[str, int]):
        self.sizes: dict[str, int] = dict(dims)
        self._origins: dict[str, str] = dict.fromkeys(dims, "the config")
        self._call_sizes: dict[int, dict[str, int]] = {}
        self._checked: dict[Any, tuple[dict[str, int], int]] = {}  # equal calls: their words, and how many
        self.num_compared = 0

    def check(self, calls: Iterable[Call]) -> None:
        """Compare every word of every value in the calls and all that they called."""
        for root in calls:
            for call in root.walk():
                if not call.has_failed:  # a wrong shape that raised has been named by its error
                    self._check_or_find(call)

    def sizes_of(self, call: Call) -> dict[str, int]:
        """Every word known inside a checked call, with its size."""
        return {**self.sizes, **self._call_sizes[id(call)]}

    def _check_or_find(self, call: Call) -> None:
        """A call whose every word has the size that it had in a checked one, with no size new since, is true like that."""
        words = tuple([(value.words, value.sizes) for value in call.values])
        key = len(self.sizes), words, tuple(call.ints.items())
        if key in self._checked:
            self._call_sizes[id(call)], num_compared = self._checked[key]
            self.num_compared += num_compared
            return
        before = self.num_compared
        sizes = self._call_sizes[id(call)] = self._check_call(call)
        if key[0] == len(self.sizes):
            self._checked[key] = sizes, self.num_compared - before

    def _check_call(self, call: Call) -> dict[str, int]:
        local_sizes: dict[str, int] = {}
        local_origins: dict[str, str] = {}
        claims = [(name, name, size) for name, size in call.ints.items()]
        for value in call.values:
            if value.words is None:
                continue
            if len(value.words) != len(value.sizes):
                raise LedgerError(
                    f"{_place(call, value.name)} {list(value.words)} has {len(value.sizes)} axes: {value.sizes}"
                )
            claims += [(value.name, word, size) for word, size in zip(value.words, value.sizes, strict=True)]
        for name, word, size in claims:
            sizes, origins = (local_sizes, local_origins) if word in LOCAL_WORDS else (self.sizes, self._origins)
            self._compare(call, name, word, size, sizes, origins)
        self._check_formulas(call, local_sizes)
        return local_sizes

    def _compare(
        self, call: Call, name: str, word: str, size: int, sizes: dict[str, int], origins: dict[str, str]
    ) -> None:
        self.num_compared += 1
        expected = sizes[word] if word in sizes else evaluate(word, sizes)
        if expected is None and word.isidentifier():
            sizes[word], origins[word] = size, f"{call.name} {name}"
        elif expected != size:
            origin = origins.get(word, "its formula")
            raise LedgerError(f"{_place(call, name)}: {word} is {size}, but {expected} in {origin}")

    def _check_formulas(self, call: Call, local_sizes: dict[str, int]) -> None:
        known = {**self.sizes, **local_sizes}
        for word, size in local_sizes.items():
            formula = WORDS[word].formula
            expected = evaluate(formula, known) if formula else None
            if expected is not None and expected != size:
                raise LedgerError(f"{_place(call, word)}: {word} is {size}, but {expected} by its formula {formula}")


def _place(call: Call, name: str) -> str:
    value = call.value(name)
    line = value.line if value else call.spec.first_line
    return f"{call.name} ({call.spec.file.name}:{line}), {name}"
