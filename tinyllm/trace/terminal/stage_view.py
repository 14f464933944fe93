"""--op: one stage in every step, with all that is known of it."""

import difflib
import re
from collections.abc import Iterable, Iterator

from tinyllm.errors import ConfigError, brief
from tinyllm.trace.costs import STAGES
from tinyllm.trace.record import Operation, StepRecord
from tinyllm.trace.terminal.details import detail_rows, tensor_rows
from tinyllm.trace.terminal.options import NAME, Options
from tinyllm.trace.terminal.rows import cost_heads, note_row
from tinyllm.trace.terminal.tensors import operation_row
from tinyllm.trace.text import cut_to
from tinyllm.trace.values import Wanted, name_matcher

MODULE_LABELS = (
    "embed_tokens", "rotary", "qkv_proj", "rope q", "rope k", "o_proj", "gate_up_proj", "down_proj", "lm_head"
)  # fmt: skip
"""The labels of rows that do not follow from a function's own name."""

MODULES = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "norm"
"""Modules by the names that the checkpoint's parameters have: all rows below one."""


def stage_names() -> list[str]:
    """Every name that --op takes: labels of rows, modules and functions."""
    functions = (name.removesuffix(".forward") for name in STAGES)
    labels = (name.removeprefix("apply_") for name in STAGES if not name.endswith(".forward"))
    return list(dict.fromkeys([*MODULE_LABELS, *labels, *MODULES, *functions]))


def near_stages(name: str) -> list[str]:
    """No names where `name` is one of `stage_names`; else those that are written like it, or all."""
    names = stage_names()
    stem = re.sub(r" [A-Z]+$|\.forward$", "", name)  # "attend A" is one request's row
    if any(stem.casefold() == known.casefold() for known in names):
        return []
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    return near or [known for known in names if name.casefold() in known.casefold()] or names


def check_wanted(wanted: Wanted | None) -> None:
    """Refuse names and patterns of values that no row can have. Raises ConfigError, with the names near it."""
    if wanted is None or callable(wanted):
        return
    if not isinstance(wanted, Iterable) or not all(isinstance(name, str) for name in wanted):
        raise ConfigError(f"values is {brief(wanted)}; expected names of rows, such as 'attend' or ['*_proj', 'mlp']")
    for name in wanted.split(",") if isinstance(wanted, str) else wanted:
        matches = name_matcher([name])
        known = [word for stage in stage_names() for word in (stage, stage.split()[0], f"{stage}.forward")]
        if name.strip() and matches and not matches(known):
            raise ConfigError(
                f"values names {brief(name)}, which no row has; near it: {', '.join(near_stages(name)[:9])}"
            )


def is_stage(operation: Operation, name: str) -> bool:
    """Whether a row goes by this name: its label, with or without its tensor or request, its function or its module."""
    function = operation.function.removesuffix(".forward")
    titles = (
        operation.label,
        operation.label.split()[0],
        operation.title,
        function,
        function.removeprefix("apply_"),
        *operation.path.split("."),
    )
    return name.removesuffix(".forward").casefold() in (title.casefold() for title in titles)


def stage_rows(step: StepRecord, options: Options) -> Iterator[str]:
    """The rows of that name in the layers that are asked for and outside of them, each with its details.

    A row that is equal to one before it but for its layer says so, and tells only its values.
    """
    assert options.op is not None
    found = [
        operation
        for operation in step.operations
        if is_stage(operation, options.op) and (operation.layer is None or operation.layer in options.layers)
    ]
    if not found:
        yield note_row(options, f"no row {options.op} in this step and these layers")
        return
    yield cost_heads(options)
    seen: dict[tuple, Operation] = {}
    for operation in found:
        yield operation_row(operation, options, _name(operation))
        twin = seen.setdefault(_key(operation), operation)
        if twin is operation:
            yield from detail_rows(operation, options)
        else:
            is_elsewhere = twin.layer is not None and twin.layer != operation.layer
            yield note_row(options, f"all as in layer {twin.layer}" if is_elsewhere else f"all as in {twin.path}")
            if options.has_values:
                yield from tensor_rows(operation, options)


def _name(operation: Operation) -> str:
    """The layer first, as rows of several layers stand together; then as much of the title as fits."""
    title = operation.title
    return title if operation.layer is None else cut_to(f"{operation.layer} {title}", NAME - 1)


def _key(operation: Operation) -> tuple:
    tensors = ((t.name, t.words, t.shape, t.dtype, t.storage) for t in operation.tensors.values())
    return operation.function, operation.label, operation.request, operation.flops, tuple(tensors)
