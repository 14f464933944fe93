"""A named tensor inside the functions: what makes it, what each of its axes is, its shapes in a step."""

import ast
import re
from collections.abc import Iterator, Sequence

from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace.costs import STAGES
from tinyllm.trace.dims import Words
from tinyllm.trace.explain.dimensions import meaning_of_axis
from tinyllm.trace.explain.notes.functions import LOCALS
from tinyllm.trace.explain.notes.note import Note
from tinyllm.trace.explain.sizes import request_dims, sizes_of
from tinyllm.trace.explain.sources import Place, show_place, spec_of, syntax_tree
from tinyllm.trace.explain.texts import MANY, Meaning, few_lines, first_few, others_names
from tinyllm.trace.record import StepRecord, to_symbol
from tinyllm.trace.shape_text import in_numbers, in_symbols, show_shape, with_symbols


def explain_tensor(name: str, words: Words, places: Sequence[Place], step: StepRecord | None) -> Meaning:
    """A name that has these dimensions at these places."""
    shown = places[0]
    note = LOCALS.get((shown.spec.qualname, name), Note())
    roles = dict.fromkeys("argument" if place.is_argument else "local" for place in places)
    role = next(iter(roles)) if len(roles) == 1 else "tensor"
    where = shown.spec.qualname if len(places) == 1 else f"{len(places)} functions"
    return Meaning(f"{name} {in_symbols(words)}: {_article(role)} of {where}", (
        ("is", note.what or _origin(shown)),
        ("why", "\n".join([*([note.why] if note.why else []), *axis_lines(words, step)])),
        ("here", "\n".join(_shapes_here(name, words, places, step)) if step else ""),
        ("care", note.care),
        ("names", others_names(note.vllm, note.huggingface) if note.vllm or note.huggingface else ""),
        ("code", "\n".join(few_lines([f"{show_place(p.spec.file, p.line)} in {p.spec.qualname}" for p in places]))),
    ))  # fmt: skip


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _origin(place: Place) -> str:
    """What a name stands for: the statement that makes a local, or the contract of the function that takes it."""
    if place.is_argument:
        return f"what {place.spec.qualname} is given: {place.spec.summary or 'see its source'}"
    for node in ast.walk(syntax_tree(place.spec.file)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno == place.line and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return f"{', '.join(map(ast.unparse, targets))} = {_with_symbols(ast.unparse(node.value))}"
    return place.spec.source_of(place.line)


def _with_symbols(code: str) -> str:
    """Words of einops patterns as symbols: the patterns are long enough."""
    return re.sub(r"'[^']*->[^']*'", lambda pattern: with_symbols(pattern[0]), code)


def axis_lines(words: Words, step: StepRecord | None) -> Iterator[str]:
    """One line an axis: symbol, size in this step where there is one, word and meaning."""
    for word in dict.fromkeys(words):
        sizes = sizes_of(word, step) if step else []
        size = f" = {first_few(sizes)}" if sizes and not word.isdigit() else ""
        yield f"{to_symbol(word)}{size}: {'' if word.isdigit() else word + ', '}{meaning_of_axis(word)}"


def _shapes_here(name: str, words: Words, places: Sequence[Place], step: StepRecord) -> Iterator[str]:
    """The shapes that the tensor had in the step's rows; where it stands in no row, those that its words give."""
    specs = [place.spec for place in places]
    rows = [operation for operation in step.operations if spec_of(operation) in specs and name in operation.tensors]
    if rows:
        shapes = [f"{operation.title} {in_numbers(operation.tensors[name].shape)}" for operation in rows]
        yield from few_lines(list(dict.fromkeys(shapes)))
    elif any(spec.qualname in STAGES for spec in specs):
        yield "this step did not make it"
    else:
        yield from evaluated_shapes(words, step)


def evaluated_shapes(words: Words, step: StepRecord) -> Iterator[str]:
    """The shape by the step's sizes, for a tensor that has no row of its own in the record."""
    by_request = any(word in WORDS and WORDS[word].scope == "request" for word in words)
    for request in step.requests[:MANY] if by_request else [None]:
        sizes = {**step.dims, **(request_dims(request) if request else {})}
        shape = [evaluate(word, sizes) for word in words]
        if None not in shape:
            whose = f" for {request.label}" if request else ""
            yield f"{show_shape(words, shape)}{whose}, by the sizes of this step"
