"""What the statements of a function say by themselves: their lines, their blocks, the names that they make."""

import ast
from collections.abc import Iterator

from tinyllm.trace.dims import FunctionSpec, Words


def own_lines(statement: ast.stmt) -> range:
    """A statement's lines, but of a compound one only those before its first block."""
    blocks = inner_blocks(statement)
    end = blocks[0][0].lineno - 1 if blocks else statement.end_lineno or statement.lineno
    return range(statement.lineno, max(statement.lineno, end) + 1)


def inner_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks inside a compound statement; a function or class of its own has none here."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return []
    found = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(statement, "handlers", [])]
    return [block for block in found if block]


def makes_code(statement: ast.stmt) -> bool:
    """Whether the interpreter stops at it: not at a docstring, a bare declaration, or another function's lines."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None
    return not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Pass | ast.Global)


def names_made(statement: ast.stmt) -> Iterator[tuple[str, int]]:
    """(name, its place in the tuple) of the names that a statement assigns; a loop's own are many things in turn."""
    match statement:
        case ast.Assign(targets=targets):
            pass
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            targets = [target]
        case _:
            return
    for target in targets:
        items = target.elts if isinstance(target, ast.Tuple) else [target]
        for index, item in enumerate(items):
            if isinstance(item, ast.Name) and item.id != "_":
                yield item.id, index


def is_list(statement: ast.stmt) -> bool:
    """Whether it makes a list by calling a function for each item."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.ListComp) and isinstance(value.elt, ast.Call)


def returned_names(node: ast.FunctionDef, spec: FunctionSpec) -> dict[str, Words]:
    """name -> words of the locals that a function returns as they are: ``return q, k, v``."""
    found: dict[str, Words] = {}
    for statement in (inner for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value):
        items = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
        if len(items) == len(spec.results):
            pairs = zip(items, spec.results, strict=True)
            found |= {item.id: words for item, words in pairs if isinstance(item, ast.Name) and words}
    return found
