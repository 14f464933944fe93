"""From source text to dimension words: what every function of a tensor module says about its shapes.

Python evaluates the annotations of a signature but not those of locals, so both are read here from the syntax tree.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Words = tuple[str, ...]  # ("num_tokens", "hidden_size"); also "num_reqs+1" and literals such as "2"


@dataclass(frozen=True)
class FunctionSpec:
    """What one function's source says: words per argument and annotated local, and where each name is last assigned."""

    qualname: str
    file: Path
    first_line: int
    summary: str  # the docstring's first sentence
    arguments: Mapping[str, Words | None]  # of a list the words of each item
    locals: Mapping[str, Words]
    results: tuple[Words | None, ...]  # one entry, or one per item of a tuple
    assigned_lines: Mapping[str, int]
    call_lines: Mapping[str, range]  # of the names that are assigned a call's results and nothing else
    rebound_arguments: frozenset[str]
    source_lines: tuple[str, ...] = field(repr=False, default=())

    def source_of(self, line: int) -> str:
        """The stripped text of a source line."""
        return self.source_lines[line - 1].strip()


@functools.cache
def function_specs(file: Path) -> dict[tuple[str, int], FunctionSpec]:
    """Every function of a source file, by (qualified name, first line): what a code object also knows of itself."""
    text = file.read_text(encoding="utf-8")
    lines = tuple(text.splitlines())
    return {
        (qualname, first_line): _read_function(qualname, first_line, node, file, lines)
        for qualname, first_line, node in _functions(ast.parse(text))
    }


@functools.cache
def field_words(file: Path, class_name: str) -> dict[str, Words]:
    """The words of a dataclass's tensor fields."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return _annotated_names(node)
    return {}


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield prefix + node.name, first_line, node
            yield from _functions(node, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _read_function(
    qualname: str, first_line: int, node: ast.FunctionDef, file: Path, lines: tuple[str, ...]
) -> FunctionSpec:
    arguments = {
        a.arg: words_of(a.annotation) for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    }
    assigned = _assigned_lines(node)
    return FunctionSpec(
        qualname=qualname,
        file=file,
        first_line=first_line,
        summary=" ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()),
        arguments=arguments,
        locals=_annotated_names(node),
        results=_result_words(node.returns),
        assigned_lines=assigned,
        call_lines=_call_lines(node),
        rebound_arguments=frozenset(arguments.keys() & assigned.keys()),
        source_lines=lines,
    )


def words_of(annotation: ast.expr | None) -> Words | None:
    """The words of ``Float[Tensor, "..."]``, with or without ``| None``; None where there are none.

    Those of ``list[...]``, ``Sequence[...]`` and ``tuple[..., ...]`` are the words of each item. ``_query_len`` is query_len
    where jaxtyping should not bind it, as the items differ in it.

    >>> words_of(ast.parse('Float[Tensor, " num_tokens"] | None', mode="eval").body)
    ('num_tokens',)
    >>> words_of(ast.parse('list[Float[Tensor, "_query_len head_dim"]]', mode="eval").body)
    ('query_len', 'head_dim')
    """
    match annotation:
        case ast.BinOp(left=left, right=right):
            return words_of(left) or words_of(right)
        case ast.Subscript(value=ast.Name(id="list" | "Sequence"), slice=item):
            return words_of(item)
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[item, ast.Constant(value=last)])):
            return words_of(item) if last is ... else None
        case ast.Subscript(slice=ast.Tuple(elts=[*_, ast.Constant(value=str(text))])):
            return tuple(word.removeprefix("_") for word in text.split())
    return None


def _result_words(annotation: ast.expr | None) -> tuple[Words | None, ...]:
    match annotation:
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)) if words_of(annotation) is None:
            return tuple(words_of(item) for item in items)
    return (words_of(annotation),)


def _annotated_names(body: ast.AST) -> dict[str, Words]:
    """name -> words of the annotated assignments and declarations directly in a function or class."""
    return {
        node.target.id: words
        for node in _own_nodes(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and (words := words_of(node.annotation))
    }


def _assigned_lines(function: ast.FunctionDef) -> dict[str, int]:
    """name -> the line of its last assignment, deletion included."""
    lines: dict[str, int] = {}
    for node in _own_nodes(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            lines[node.id] = max(lines.get(node.id, 0), node.lineno)
    return lines


def _call_lines(function: ast.FunctionDef) -> dict[str, range]:
    """name -> the lines of the last ``name = f(...)`` or ``name, other = f(...)``."""
    lines: dict[str, range] = {}
    for node in _own_nodes(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
            lines.update(dict.fromkeys(names, range(node.lineno, (node.end_lineno or node.lineno) + 1)))
    return lines


def _own_nodes(body: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, but none of a nested function, lambda or comprehension: those have frames of their own."""
    for node in ast.iter_child_nodes(body):
        if not isinstance(
            node, ast.FunctionDef | ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp
        ):
            yield node
            yield from _own_nodes(node)
