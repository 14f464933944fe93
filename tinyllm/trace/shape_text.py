"""The one grammar of shapes and formulas: a name, symbols = numbers for a tensor, ``{x}@{weight.T}`` for a row's template."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace.record import Operation, TensorRecord, to_symbol
from tinyllm.trace.text import show_count

KV_WORDS = ("num_layers", "2", "num_blocks", "block_size", "num_kv_heads", "head_dim")  # the axes of the pool

# --- shapes ---------------------------------------------------------------------------------------------------------------


def in_symbols(words: Iterable[str]) -> str:
    """Dimension words as a shape, each by its symbol."""
    return f"[{','.join(map(to_symbol, words))}]"


def in_numbers(shape: Iterable[Any]) -> str:
    """Sizes as a shape."""
    return f"[{','.join(map(str, shape))}]"


def show_shape(words: Iterable[str], shape: Iterable[int | None]) -> str:
    """What each axis is, and its size."""
    return f"{in_symbols(words)}={in_numbers(shape)}"


def show_tensor(tensor: TensorRecord) -> str:
    """Its name with its shape, in symbols and in numbers."""
    return f"{tensor.name} {show_shape(tensor.words, tensor.shape)}"


# --- templates ------------------------------------------------------------------------------------------------------------


def all_words(operation: Operation) -> dict[str, tuple[str, ...]]:
    """Each tensor's words by its name, for `fill_template`."""
    return {name: tensor.words for name, tensor in operation.tensors.items()}


def all_shapes(operation: Operation) -> dict[str, tuple[int, ...]]:
    """Each tensor's sizes by its name."""
    return {name: tensor.shape for name, tensor in operation.tensors.items()}


def fill_template(
    template: str,
    axes: Mapping[str, Sequence[Any]],
    show: Callable[[Sequence[Any]], str],
    unknown: Callable[[str], str] = lambda name: "?",
) -> str:
    """The template with each tensor's axes where it names the tensor; ``.T`` turns them as a product uses a weight."""

    def insert(match: re.Match[str]) -> str:
        found = axes.get(match[1])
        if found is None:
            return unknown(match[1])
        return show(found[::-1] if match[2] else found)

    return re.sub(r"\{([\w\[\]]+)(\.T)?\}", insert, template)


def with_slots(operation: Operation, template: str) -> str:
    """The template of a row that writes into slots, with how many it writes: ``-> 13 slots of {layer_kv}``."""
    stage = operation.stage
    if not stage.updated_at:
        return template
    slots = show_count(operation.tensors[stage.updated_at].shape[0], "slot")
    return template.replace(f"{{{stage.updates}}}", f"{slots} of {{{stage.updates}}}")


# --- formulas and statements ----------------------------------------------------------------------------------------------


def fill_numbers(formula: str, sizes: Mapping[str, int]) -> str:
    """The formula with each word's size in its place.

    >>> fill_numbers("2*num_tokens*e", {"num_tokens": 13})
    '2*13*e'
    """

    def insert(match: re.Match[str]) -> str:
        value = evaluate(match[0], sizes)
        return match[0] if value is None else str(value)

    return re.sub(r"[a-zA-Z_]\w*", insert, formula)


def with_symbols(text: str) -> str:
    """A formula or a line of source with each dimension word as its symbol."""
    return re.sub(r"[a-zA-Z_]\w*", lambda match: to_symbol(match[0]) if match[0] in WORDS else match[0], text)


def strip_annotation(statement: str, name: str) -> str:
    """What is assigned: ``= x + y`` of ``z: Float[Tensor, "..."] = x + y``; another statement stays as it is."""
    text = re.sub(rf"^(?:\w+, )*{re.escape(name)}(?:, \w+)*(?:: .*?\])? = ", "= ", statement)
    return re.sub(r"\s*([(\[])\s+|,?\s+([)\]])", lambda match: match[1] or match[2], text)
