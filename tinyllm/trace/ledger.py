"""The ledger: over a whole step every dimension word has one size, in every argument, local, result and field.

The shape checks see one call at a time and no local; the ledger sees them all. A config word is compared with the
config, a step word with its first size in the step, any other word with its first size in the call; a word that has a
formula is compared with that as well. Each item of a list of requests' tensors has the request's words for itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm.errors import TinyllmError
from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace.calls import Call, Value
from tinyllm.trace.dims import Words
from tinyllm.trace.reading import PACKAGE
from tinyllm.trace.record import REQUEST_WORDS
from tinyllm.trace.shape_text import in_numbers

LOCAL_WORDS = REQUEST_WORDS | {word.name for word in WORDS.values() if word.scope == "call"}


class LedgerError(TinyllmError):
    """Two sizes for one dimension word: an annotation is false or a tensor is wrong, and who wrote it can mend it.

    One line names the function with file and line, the tensor in words and in numbers, the word with both sizes, and
    what the call's words were before it. It never holds a value.
    """


@dataclass
class _Scope:
    """The words that have one size each in some part of a step, and where they got it."""

    sizes: dict[str, int] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


class Ledger:
    """The sizes of one step. `dims` holds those of the checkpoint and the KV pool.

    `check` raises LedgerError at the first contradiction; afterwards `sizes` knows the step's words and
    `sizes_of(call)` the words of one call.
    """

    def __init__(self, dims: Mapping[str, int]):
        self.sizes: dict[str, int] = dict(dims)
        self._step = _Scope(self.sizes, dict.fromkeys(dims, "the config"))
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
        words = tuple([(value.words, value.sizes, value.item) for value in call.values])
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
        own = _Scope()
        for name, size in call.ints.items():
            self._compare(call, name, name, size, own if name in LOCAL_WORDS else self._step)
        items = [self._check_value(call, value, own) for value in call.values if value.words is not None]
        for scope in [own, *filter(None, items)]:
            self._check_formulas(call, scope.sizes)
        return own.sizes

    def _check_value(self, call: Call, value: Value, own: _Scope) -> _Scope | None:
        """Compare one value's words; those of a list's item that its request alone has are returned, not the call's."""
        words, item = value.words or (), None if value.item is None else _Scope()
        if len(words) != len(value.sizes):
            fault = f"the tensor has {len(value.sizes)} axes, but the annotation {len(words)}"
            raise LedgerError(_contradiction(call, value.name, fault))
        for axis, (word, size) in enumerate(zip(words, value.sizes, strict=True)):
            scope = item if item and word in REQUEST_WORDS else own if word in LOCAL_WORDS else self._step
            self._compare(call, value.name, word, size, scope, axis)
        return item

    def _compare(self, call: Call, name: str, word: str, size: int, scope: _Scope, axis: int = 0) -> None:
        self.num_compared += 1
        expected = scope.sizes[word] if word in scope.sizes else evaluate(word, scope.sizes)
        if expected is None and word.isidentifier():
            scope.sizes[word], scope.origins[word] = size, f"{call.name}'s {name}"
        elif expected != size:
            origin = scope.origins.get(word)
            fault = (
                f"{word} is {size}, but {expected} in {origin}"
                if origin
                else f"its axis {word} has size {size}, expected {expected}"
            )
            raise LedgerError(_contradiction(call, name, fault, axis))

    def _check_formulas(self, call: Call, local_sizes: dict[str, int]) -> None:
        known = {**self.sizes, **local_sizes}
        for word, size in local_sizes.items():
            formula = WORDS[word].formula
            expected = evaluate(formula, known) if formula else None
            if expected is not None and expected != size:
                fault = f"{word} is {size}, but {expected} by its formula {formula}"
                raise LedgerError(_contradiction(call, _first_with(call, word, size), fault))


# --- what is said of a contradiction ----------------------------------------------------------------------------------


def _contradiction(call: Call, name: str, fault: str, axis: int = 0) -> str:
    """The line for a value's fault, found at an axis."""
    value = call.value(name)
    line = value.line if value else call.spec.first_line
    shown = f"{name} {_in_words(value.words or ())}={in_numbers(value.sizes)}" if value else f"{name}={call.ints[name]}"
    bound = ", ".join(f"{word}={size}" for word, size in _bound_before(call, name, axis).items()) or "nothing"
    return (
        f"{call.name} ({_path_of(call)}:{line}): {shown}: {fault}. Bound before: {bound}. "
        "Correct the annotation, or the code that makes the tensor"
    )


def _in_words(words: Words) -> str:
    return f"[{','.join(words)}]"


def _path_of(call: Call) -> str:
    file = call.spec.file
    return file.relative_to(PACKAGE.parent).as_posix() if file.is_relative_to(PACKAGE) else file.name


def _bound_before(call: Call, name: str, axis: int) -> dict[str, int]:
    """The sizes that the call's words had before an axis of a value, in the order in which they are compared.

    Of a list's items only the one itself tells a request's words.
    """
    bound: dict[str, int] = {}
    for word, size in call.ints.items():
        if word == name:
            return bound
        bound[word] = size
    for value in call.values:
        is_it = value.name == name
        pairs = list(zip(value.words or (), value.sizes, strict=False))
        for word, size in pairs[:axis] if is_it else pairs:
            if word.isidentifier() and (is_it or value.item is None or word not in REQUEST_WORDS):
                bound.setdefault(word, size)
        if is_it:
            break
    return bound


def _first_with(call: Call, word: str, size: int) -> str:
    """The name of the first value in which the word has the size; of a plain number the word itself."""
    pairs = ((value, zip(value.words or (), value.sizes, strict=False)) for value in call.values)
    return next((value.name for value, axes in pairs if (word, size) in axes), word)
