"""A kind of row, such as matmul: what is counted, which rows are of it, and its part of a step's costs."""

import ast
import functools
from collections.abc import Iterator

from tinyllm.trace.costs import KIND_LETTERS, STAGES, Kind
from tinyllm.trace.explain.sources import line_of, modules, show_place, syntax_tree, tensor_files
from tinyllm.trace.explain.texts import Meaning
from tinyllm.trace.record import StepRecord
from tinyllm.trace.recorder import PACKAGE

COSTS = PACKAGE / "trace" / "costs.py"

KINDS: dict[Kind, tuple[str, str]] = {
    "matmul": (
        "matrix products: linear layers, attention's two products, the LM head",
        "a multiply-add counts 2 FLOPs; attention counts only the pairs that the causal mask leaves",
    ),
    "elementwise": (
        "every value on its own, or with one other",
        "one FLOP for each arithmetic step and value; they move far more bytes than they compute",
    ),
    "reduce": (
        "many values become one: a mean, a maximum, a rank",
        "a row's values are reduced among themselves: rows never mix",
    ),
    "gather": (
        "rows are picked or copied by index",
        "no arithmetic, so no FLOPs; the bytes are what is read and written",
    ),
    "cache write": (
        "new keys and values go into the KV pool",
        "no arithmetic; its result is the pool itself, whose shape never changes",
    ),
    "view": ("the same storage is read under other axes", "nothing moves: no FLOPs, no bytes"),
    "host": ("plain Python, before or behind the model", "no tensor is computed, so there is nothing to count"),
}
HOST_ROWS = (
    "bpe, schedule and what it did to requests and blocks, the batch's tensors, block map, kv bytes, sampled, append"
)


def explain_kind(kind: Kind, step: StepRecord | None) -> Meaning:
    """A kind of row, by its word or its letter."""
    what, why = KINDS[kind]
    names = dict.fromkeys(name for stage in STAGES if STAGES[stage].kind == kind for name in _row_names(stage))
    return Meaning(f"{KIND_LETTERS[kind]}: a kind of row, {kind}", (
        ("is", what),
        ("why", why),
        ("here", _share_of_kind(kind, step) if step else ""),
        ("rows", ", ".join(names) or HOST_ROWS),
        ("code", show_place(COSTS, line_of(COSTS, "KIND_LETTERS"))),
    ))  # fmt: skip


def _share_of_kind(kind: Kind, step: StepRecord) -> str:
    """How many rows of the step are of the kind, and their part of its costs."""
    rows = [operation for operation in step.operations if operation.stage.kind == kind]
    if not rows:
        return "no row of this step has numbers of its own"
    flops, num_bytes = sum(row.flops or 0 for row in rows), sum(row.num_bytes for row in rows)
    costs = f"{flops:,} FLOP{_percent(flops, step.flops)}, {num_bytes:,} BYTE{_percent(num_bytes, step.num_bytes)}"
    return f"{len(rows)} of {len(step.operations)} rows in all layers: {costs}"


def _percent(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.1f} % of the step's)" if part and whole else ""


@functools.cache
def _row_names(stage: str) -> tuple[str, ...]:
    """What the trace calls a stage's rows: a module's attribute, or a function and what it makes where that differs."""
    if stage.endswith(".forward"):
        class_name = stage.removesuffix(".forward")
        return tuple(module.name for module in modules() if module.class_name == class_name and module.is_called)
    name = stage.removeprefix("apply_")
    for node in (n for file in tensor_files() for n in ast.walk(syntax_tree(file)) if isinstance(n, ast.FunctionDef)):
        made = [target for target, value in _assigned(node) if value.startswith(f"{stage}(")]
        if len(made) > 1:
            return tuple(f"{name} {target}" for target in made)
    return (name,)


def _assigned(node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """(name, what it is set to) of a function's plain statements, those of a tuple one by one."""
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                yield from zip(map(ast.unparse, target.elts), map(ast.unparse, statement.value.elts), strict=True)
            else:
                yield ast.unparse(target), ast.unparse(statement.value)
