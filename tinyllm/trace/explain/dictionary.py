"""Every word that can be explained, with what makes its explanations."""

import functools
from collections.abc import Callable, Iterable

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.dims import FunctionSpec
from tinyllm.trace.explain.dimensions import AXES, explain_axis, explain_dimension
from tinyllm.trace.explain.fields import explain_field
from tinyllm.trace.explain.kinds import explain_kind
from tinyllm.trace.explain.notes.terms import SPELLINGS, TERMS
from tinyllm.trace.explain.sources import batch_fields, modules, named_tensors, tensor_functions
from tinyllm.trace.explain.stages import explain_function, explain_module
from tinyllm.trace.explain.tensors import explain_tensor
from tinyllm.trace.explain.terms import explain_term
from tinyllm.trace.explain.texts import Meaning
from tinyllm.trace.record import StepRecord, to_symbol

Explain = Callable[[StepRecord | None], Meaning]


@functools.cache
def meanings_by_word() -> dict[str, list[Explain]]:
    """Every word with its meanings: dimensions first, then kinds, batch tensors, stages, named tensors, columns."""
    found: dict[str, list[Explain]] = {}

    def add(keys: Iterable[str], make: Explain) -> None:
        for key in dict.fromkeys(keys):
            found.setdefault(key, []).append(make)

    for word in WORDS.values():
        add((word.name, word.symbol), functools.partial(explain_dimension, word))
    for axis in AXES:
        add((axis, to_symbol(axis)), functools.partial(explain_axis, axis))
    for kind, letter in KIND_LETTERS.items():
        add((kind, letter), functools.partial(explain_kind, kind))
    for class_name, name in batch_fields():
        add((name,), functools.partial(explain_field, class_name, name))
    for spec in tensor_functions():
        add(_names_of(spec), functools.partial(explain_function, spec))
    for module in modules():
        add((module.name,), functools.partial(explain_module, module))
    for name, groups in named_tensors().items():
        for words, places in groups.items():
            add((name,), functools.partial(explain_tensor, name, words, places))
    for form, name in [*zip(TERMS, TERMS, strict=True), *SPELLINGS.items()]:
        add((form,), functools.partial(explain_term, name, TERMS[name]))
    return found


def _names_of(spec: FunctionSpec) -> list[str]:
    """What a reader may call a function: its own name, its row's name in the trace, its class's."""
    owner, _, name = spec.qualname.rpartition(".")
    return [spec.qualname, owner if name == "forward" else name, name.removeprefix("apply_")][: 2 if owner else 3]
