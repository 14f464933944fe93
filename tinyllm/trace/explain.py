"""What a word of the trace means, and why a size is what it is: ``--explain WORD``.

Words, formulas, shapes and places are read from the glossary and from the sources; numbers come from the step that is
explained. Only reasons and pitfalls are written down here, and no shape among them.
"""

import ast
import difflib
import functools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyllm.errors import ConfigError, brief
from tinyllm.shapes import WORDS, Word, evaluate
from tinyllm.trace.costs import KIND_LETTERS, PAIRS, STAGES, Kind, Stage
from tinyllm.trace.dims import FunctionSpec, Words, field_words, function_specs
from tinyllm.trace.notes import CARE, COLUMNS, FIELDS, FUNCTIONS, KINDS, LOCALS, MODULES, Note
from tinyllm.trace.record import Operation, RequestRecord, StepRecord, TensorRecord, to_symbol
from tinyllm.trace.recorder import PACKAGE, TENSOR_MODULES

WIDTH = 100
LABEL = 8  # columns of a part's label
MANY = 6  # requests, rows or places that are listed one by one

Part = tuple[str, str]  # label, text; a newline in the text starts a new line


@dataclass(frozen=True)
class Meaning:
    """One meaning of a word: a title, and what there is to say under fixed labels."""

    title: str
    parts: tuple[Part, ...]

    def lines(self) -> Iterator[str]:
        """As text of at most 100 columns; a part without text is left out."""
        yield from textwrap.wrap(self.title, WIDTH, subsequent_indent="  ")
        for label, text in self.parts:
            for i, paragraph in enumerate(text.split("\n") if text else ()):
                head = f"  {'' if i else label:{LABEL}}"
                yield from textwrap.wrap(paragraph, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


Explain = Callable[[StepRecord | None], Meaning]


def explain(word: str, step: StepRecord | None = None) -> list[str]:
    """Every meaning of a word, a symbol, a tensor, a stage or a kind; with a step, the sizes that it had there and why.

    Raises ConfigError for an unknown word, with those that are spelt like it.
    """
    keys = _find(word)
    lines: list[str] = []
    for meaning in (make(step) for key in keys for make in _dictionary()[key]):
        lines += ["", *meaning.lines()]
    others = [key for key in _dictionary() if key.lower() == keys[0].lower() and key not in keys]
    if others:
        lines += ["", f"Not to be confused with {' or '.join(others)}, which --explain also knows."]
    return lines[1:]


def explainable() -> list[str]:
    """Everything that `explain` knows, sorted."""
    return sorted(_dictionary(), key=lambda word: (word.lower(), word))


def _find(word: str) -> list[str]:
    """The word as the dictionary spells it: as it stands, without its request or path, or in another case."""
    text = word.strip().strip("[]")
    for form in (text, text.rpartition(".")[2], (text.split() or [""])[0]):
        if form in _dictionary():
            return [form]
        alike = [key for key in _dictionary() if key.lower() == form.lower()]
        if alike:
            return alike
    near = difflib.get_close_matches(text.lower(), [key for key in _dictionary() if len(key) > 1], n=4, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "expected what the trace prints, such as T, attend or M"
    raise ConfigError(f"{brief(word)} is no word of the trace; {hint}")


@functools.cache
def _dictionary() -> dict[str, list[Explain]]:
    """Every word with its meanings: dimensions first, then kinds, batch tensors, stages, named tensors, columns."""
    found: dict[str, list[Explain]] = {}

    def add(keys: Iterable[str], make: Explain) -> None:
        for key in dict.fromkeys(keys):
            found.setdefault(key, []).append(make)

    for word in WORDS.values():
        add((word.name, word.symbol), functools.partial(_explain_dimension, word))
    for axis in AXES:
        add((axis, to_symbol(axis)), functools.partial(_explain_axis, axis))
    for kind, letter in KIND_LETTERS.items():
        add((kind, letter), functools.partial(_explain_kind, kind))
    for class_name, name in batch_fields():
        add((name,), functools.partial(_explain_field, class_name, name))
    for spec in tensor_functions():
        add(_names_of(spec), functools.partial(_explain_function, spec))
    for module in _modules():
        add((module.name,), functools.partial(_explain_module, module))
    for name, groups in _tensors().items():
        for words, places in groups.items():
            add((name,), functools.partial(_explain_tensor, name, words, places))
    for column in COLUMNS:
        add((column,), functools.partial(_explain_column, column))
    return found


# --- what the sources say ---------------------------------------------------------------------------------------------


@functools.cache
def tensor_files() -> tuple[Path, ...]:
    """The sources of the tensor modules, in the order of a step's data flow."""
    roots = [PACKAGE / name for name in TENSOR_MODULES]
    return tuple(path for root in roots for path in ([root] if root.suffix else sorted(root.rglob("*.py"))))


@functools.cache
def tensor_functions() -> tuple[FunctionSpec, ...]:
    """Every public function of the tensor modules."""
    specs = [spec for file in tensor_files() for spec in function_specs(file).values()]
    return tuple(spec for spec in specs if not spec.qualname.rpartition(".")[2].startswith("_"))


@functools.cache
def batch_fields() -> tuple[tuple[str, str], ...]:
    """(class, field) of every tensor that a step's batch brings to the layers and to the sampler."""
    file = PACKAGE / "batch.py"
    classes = [node.name for node in _tree(file).body if isinstance(node, ast.ClassDef)]
    return tuple((name, field) for name in classes for field in field_words(file, name))


@dataclass(frozen=True)
class _Module:
    """A named part of the model, such as ``qkv_proj``: its class, its owner, its own words for the class's sizes."""

    name: str
    class_name: str
    owner: str
    file: Path
    line: int
    words: Mapping[str, str]  # out_size -> qkv_size


@functools.cache
def _modules() -> tuple[_Module, ...]:
    """Every ``self.name = Class(config.word, ...)`` of the tensor modules whose class has a forward function."""
    forwards = {spec.qualname.partition(".")[0] for spec in tensor_functions() if spec.qualname.endswith(".forward")}
    found = []
    for file in tensor_files():
        for owner in (node for node in _tree(file).body if isinstance(node, ast.ClassDef)):
            for node in (node for node in ast.walk(owner) if isinstance(node, ast.Assign)):
                target, calls = node.targets[0], [n for n in ast.walk(node.value) if isinstance(n, ast.Call)]
                made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in forwards]
                if isinstance(target, ast.Attribute) and made:
                    class_name = ast.unparse(made[0].func)
                    words = _sizes_given(class_name, made[0].args)
                    found.append(_Module(target.attr, class_name, owner.name, file, node.lineno, words))
    return tuple(found)


def _sizes_given(class_name: str, arguments: Sequence[ast.expr]) -> dict[str, str]:
    """``Linear(config.hidden_size, config.qkv_size)``: in_size is hidden_size, out_size is qkv_size."""
    spec = next(spec for file in tensor_files() for spec in function_specs(file).values()
                if spec.qualname == f"{class_name}.__init__")  # fmt: skip
    names = [name for name in spec.arguments if name != "self"]
    given = {name: node.attr for name, node in zip(names, arguments, strict=False) if isinstance(node, ast.Attribute)}
    return {name: word for name, word in given.items() if word in WORDS}


@dataclass(frozen=True)
class _Place:
    """Where a named tensor stands: a function, its argument or local, and the source line."""

    spec: FunctionSpec
    is_argument: bool
    line: int


@functools.cache
def _tensors() -> dict[str, dict[Words, list[_Place]]]:
    """name -> dimension words -> places, for every annotated argument and local of the tensor modules."""
    found: dict[str, dict[Words, list[_Place]]] = {}
    for spec in tensor_functions():
        for name, words in [*spec.arguments.items(), *spec.locals.items()]:
            if words and words not in _words_of_fields(name):
                line = spec.assigned_lines.get(name, spec.first_line) if name in spec.locals else spec.first_line
                place = _Place(spec, name in spec.arguments, line)
                found.setdefault(name, {}).setdefault(words, []).append(place)
    return found


def _words_of_fields(name: str) -> list[Words]:
    """The words of the batch's fields of that name: a local or argument that has the same is no other thing."""
    return [
        field_words(PACKAGE / "batch.py", class_name)[field] for class_name, field in batch_fields() if field == name
    ]


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def _line_of(file: Path, start: str) -> int:
    """The number of the first line that starts so, blanks aside."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.strip().startswith(start))


def _code(file: Path, line: int) -> str:
    return f"{file.relative_to(PACKAGE.parent).as_posix()}:{line}"


def _names_of(spec: FunctionSpec) -> list[str]:
    """What a reader may call a function: its own name, its row's name in the trace, its class's."""
    owner, _, name = spec.qualname.rpartition(".")
    return [spec.qualname, owner if name == "forward" else name, name.removeprefix("apply_")][: 2 if owner else 3]


# --- dimensions -------------------------------------------------------------------------------------------------------

SCOPES = {
    "config": "a dimension of the checkpoint",
    "cache": "a dimension of the KV pool",
    "step": "a dimension of one step",
    "request": "a dimension of one request in one step",
    "call": "a dimension of one call, of a function that serves several tensors",
}


def _explain_dimension(word: Word, step: StepRecord | None) -> Meaning:
    return Meaning(f"{word.symbol}: {word.name}, {SCOPES[word.scope]}", (
        ("is", word.meaning),
        ("why", word.why + _formula(word)),
        ("here", "\n".join(_sizes_here(word, step)) if step else ""),
        ("care", CARE.get(word.name, "")),
        ("names", _names(word.vllm, word.huggingface)),
        ("axis of", _carriers(word.name)),
        ("code", _code(PACKAGE / "shapes.py", _line_of(PACKAGE / "shapes.py", f'Word("{word.name}"'))),
    ))  # fmt: skip


def _formula(word: Word) -> str:
    return f"; {word.name} = {_spaced(word.formula)}" if word.formula else ""


def _spaced(formula: str) -> str:
    return re.sub(r"([+/-])", r" \1 ", formula)


def _carriers(word: str) -> str:
    """The named tensors that have this dimension, each once."""
    fields = [
        field for class_name, field in batch_fields() if word in field_words(PACKAGE / "batch.py", class_name)[field]
    ]
    names = [name for name, groups in _tensors().items() if any(word in words for words in groups)]
    return _some(list(dict.fromkeys([*fields, *names])), 12) or "no named tensor; but of formulas, or of the KV pool"


def _sizes_here(word: Word, step: StepRecord) -> Iterator[str]:
    """The size in this step, and how it comes about."""
    symbol, size = word.symbol, step.dims.get(word.name)
    if word.scope == "request":
        yield from _request_sizes(word, step)
    elif word.scope == "call":
        yield from _call_sizes(word, step)
    elif size is None:
        yield f"{symbol} has no size in this step"
    elif word.formula:
        yield from _formula_sizes(word.name, step.dims)
    else:
        yield f"{symbol} = {size}" + _reason(word.name, step)


def _reason(name: str, step: StepRecord) -> str:
    """Why a word without formula has its size, in the numbers of the step's requests."""
    requests, labels = step.requests, _some([request.label for request in step.requests])
    if name == "num_tokens":
        sums = " = " + " + ".join(str(request.query_len) for request in requests)
        return (sums if len(requests) > 1 else "") + ": " + _each(requests, lambda r: r.query_len, "token", "computes")
    if name == "max_blocks":
        return ": " + _each(requests, lambda r: len(r.block_ids), "block", "holds")
    if name == "num_blocks":
        spans = step.schedule.block_map
        counts = {state: sum(s.num_blocks for s in spans if s.state == state) for state in BLOCK_STATES}
        return " = " + " + ".join(f"{count} {state}" for state, count in counts.items())
    texts = {"num_reqs": f": {labels}", "num_logits": f": the last row of {labels}", "num_banned": ""}
    is_trained = WORDS[name].scope == "config"
    return texts.get(name, f", as the {'checkpoint says' if is_trained else 'engine was started'}")


BLOCK_STATES = ("null", "held", "free")


def _each(requests: Sequence[RequestRecord], count: Callable[[RequestRecord], int], noun: str, verb: str) -> str:
    """``A computes 5 tokens, B 8``."""
    first, *others = [(request.label, count(request)) for request in requests]
    nouns = noun if first[1] == 1 else noun + "s"
    return _some([f"{first[0]} {verb} {first[1]} {nouns}", *(f"{label} {number}" for label, number in others)])


def _request_sizes(word: Word, step: StepRecord) -> Iterator[str]:
    for request in step.requests[:MANY]:
        sizes = {**step.dims, **_request_dims(request)}
        new, old = request.query_len, request.num_computed_tokens
        if word.formula:
            blocks = _some(list(map(str, request.block_ids)))
            why = f"{_spaced(_with_numbers(word.formula, sizes))}, rounded down; its blocks are {blocks}"
        elif word.name == "seq_len":
            why = f"{old} computed before + {new} in this step"
        else:
            cut = f", cut by the {request.cut_by}" if request.cut_by else ""
            why = f"{new} of {request.num_left} left to compute{cut}, behind {old} computed before"
        yield f"{word.symbol} = {sizes[word.name]} for {request.label}: {why}"
    if len(step.requests) > MANY:
        yield f"and so on for {len(step.requests) - MANY} more"


def _request_dims(request: RequestRecord) -> dict[str, int]:
    num_blocks = -(-request.seq_len // request.block_size)
    return {"query_len": request.query_len, "seq_len": request.seq_len, "num_req_blocks": num_blocks}


def _call_sizes(word: Word, step: StepRecord) -> Iterator[str]:
    """One line for each row whose function uses the word: its size, and the caller's word for it."""
    found: dict[str, None] = {}
    for operation in step.operations:
        spec = _spec_of(operation)
        named = {**(spec.arguments if spec else {}), **(spec.locals if spec else {})}
        for name, words in named.items():
            tensor = operation.tensors.get(name)
            if tensor and words and word.name in words:
                axis = words.index(word.name)
                theirs = "" if tensor.words[axis] == word.name else f", the caller's {tensor.words[axis]}"
                found[f"{word.symbol} = {tensor.shape[axis]} in {operation.label}{theirs}"] = None
    yield from found or ["no row of this step uses it"]


def _formula_sizes(name: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """``qkv_size = q_size+2*kv_size = 576+2*192 = 960``, then the same for the words in it."""
    formula = WORDS[name].formula
    chain = [f"{name} = {_spaced(formula)}", _spaced(_with_numbers(formula, sizes)), str(sizes[name])]
    yield f"{to_symbol(name)} = {sizes[name]}: {' = '.join(chain)}"
    for inner in dict.fromkeys(re.findall(r"[a-z_]+", formula)):
        if WORDS[inner].formula:
            inner_chain = [f"{inner} = {_spaced(WORDS[inner].formula)}"]
            yield "with " + " = ".join(
                [*inner_chain, _spaced(_with_numbers(WORDS[inner].formula, sizes)), str(sizes[inner])]
            )


def _with_numbers(formula: str, sizes: Mapping[str, int]) -> str:
    return re.sub(r"[a-z_]+", lambda match: str(sizes.get(match[0], match[0])), formula)


AXES = {
    "1": ("an axis that was kept so that the tensor fits beside a wider one",
          "what is the same for a whole row or for all heads is stored once, and spread over the other axis"),
    "2": ("keys and values, side by side", "index 0 is K, index 1 is V; one tensor is handed on, not two"),
    "num_reqs+1": ("the borders between the requests, both ends included",
                   "as many pieces need one border more: each request's end is the next one's begin, and the first "
                   "begins at 0"),
}  # fmt: skip
"""Axes of annotations that are no words: what such an axis is, and why."""


def _explain_axis(axis: str, step: StepRecord | None) -> Meaning:
    what, why = AXES[axis]
    size = evaluate(axis, step.dims) if step else None
    here = (
        f"{to_symbol(axis)} = {size}" + ("" if axis.isdigit() else f": {_with_numbers(axis, step.dims)}")
        if step
        else ""
    )
    return Meaning(f"{to_symbol(axis)}: {'an axis of that size' if axis.isdigit() else axis}", (
        ("is", what), ("why", why), ("here", "" if axis.isdigit() else here), ("axis of", _carriers(axis)),
        ("code", _code(*_first_use(axis))),
    ))  # fmt: skip


def _first_use(axis: str) -> tuple[Path, int]:
    """Where an annotation first has this axis."""
    for file in tensor_files():
        for i, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if any(axis in string.split() for string in re.findall(r'Tensor, "([^"]*)"', line)):
                return file, i
    raise KeyError(axis)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _explain_field(class_name: str, name: str, step: StepRecord | None) -> Meaning:
    file, note = PACKAGE / "batch.py", FIELDS[class_name, name]
    words = field_words(file, class_name)[name]
    tensor = step.batch.get(name) if step and class_name == "FlatBatch" else None
    start = _line_of(file, f"class {class_name}")
    source = file.read_text(encoding="utf-8").splitlines()[start:]
    line = start + next(i for i, text in enumerate(source, 1) if text.strip().startswith(f"{name}:"))
    return Meaning(f"{name} {_symbols(words)}: a tensor of {class_name}, made once a step", (
        ("is", note.what),
        ("why", "\n".join([note.why, *_axes(words, step)])),
        ("here", "\n".join([*_values_here(name, tensor, step), *_evaluated(words, step, tensor is None)])),
        ("care", note.care),
        ("names", _names(note.vllm, note.huggingface)),
        ("code", "\n".join([_code(file, line), *_readers(name, words)])),
    ))  # fmt: skip


def _readers(name: str, words: Words) -> list[str]:
    """The functions that take the field as an argument of the same name."""
    specs = [spec for spec in tensor_functions() if spec.arguments.get(name) == words]
    return _listed([f"{_code(spec.file, spec.first_line)} in {spec.qualname}" for spec in specs])


def _values_here(name: str, tensor: TensorRecord | None, step: StepRecord | None) -> Iterator[str]:
    """The tensor's shape and values in the step, and what they add up to where that is asked for."""
    if step is None or tensor is None:
        return
    values = step.batch_values.get(name)
    shown = f" = {_show_values(values)}" if values is not None else ""
    yield f"{_symbols(tensor.words)} = {_numbers(tensor.shape)}{shown}"
    if name == "seq_lens":
        total = " + ".join(str(request.seq_len) for request in step.requests[:MANY])
        more = " + ..." if len(step.requests) > MANY else ""
        keys, rows = sum(request.seq_len for request in step.requests), step.dims["num_tokens"]
        yield f"{total}{more} = {keys} keys are read by T = {rows} rows"
    if name == "cu_seqlens_q":
        ends = [0]
        for request in step.requests:
            ends.append(ends[-1] + request.query_len)
        rows = [f"{r.label} has rows {a}..{b - 1}" for r, a, b in zip(step.requests, ends[:-1], ends[1:], strict=True)]
        yield _some(rows)
        yield f"R+1 = {len(ends)}: {len(step.requests)} + 1"


def _show_values(values: Sequence) -> str:
    """Numbers, or rows of numbers, with the middle of a long list left out."""
    texts = [_show_values(value) if isinstance(value, list) else str(value) for value in values]
    return f"[{','.join(texts if len(texts) <= 8 else [*texts[:5], '...', *texts[-2:]])}]"


def _explain_tensor(name: str, words: Words, places: Sequence[_Place], step: StepRecord | None) -> Meaning:
    shown = places[0]
    note = LOCALS.get((shown.spec.qualname, name), Note())
    role = "argument" if shown.is_argument else "local"
    where = shown.spec.qualname if len(places) == 1 else f"{len(places)} functions"
    return Meaning(f"{name} {_symbols(words)}: {_article(role)} of {where}", (
        ("is", note.what or _origin(name, shown)),
        ("why", "\n".join([*([note.why] if note.why else []), *_axes(words, step)])),
        ("here", "\n".join(_shapes_here(name, words, places, step)) if step else ""),
        ("care", note.care),
        ("names", _names(note.vllm, note.huggingface) if note.vllm or note.huggingface else ""),
        ("code", "\n".join(_listed([f"{_code(p.spec.file, p.line)} in {p.spec.qualname}" for p in places]))),
    ))  # fmt: skip


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _origin(name: str, place: _Place) -> str:
    """What a name stands for: the statement that makes a local, or the contract of the function that takes it."""
    if place.is_argument:
        return f"what {place.spec.qualname} is given: {place.spec.summary or 'see its source'}"
    for node in ast.walk(_tree(place.spec.file)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno == place.line and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return f"{', '.join(map(ast.unparse, targets))} = {ast.unparse(node.value)}"
    return place.spec.source_of(place.line)


def _axes(words: Words, step: StepRecord | None) -> Iterator[str]:
    """One line an axis: symbol, size in this step where there is one, word and meaning."""
    for word in dict.fromkeys(words):
        meaning = WORDS[word].meaning if word in WORDS else AXES[word][0]
        sizes = _sizes_of(word, step) if step else []
        size = f" = {_some(sizes)}" if sizes and not word.isdigit() else ""
        yield f"{to_symbol(word)}{size}: {'' if word.isdigit() else word + ', '}{meaning}"


def _sizes_of(word: str, step: StepRecord) -> list[str]:
    """A word's size in the step; a request's word has one for each request."""
    if word in WORDS and WORDS[word].scope == "request":
        return [f"{_request_dims(request)[word]} ({request.label})" for request in step.requests]
    size = evaluate(word, step.dims)
    return [] if size is None else [str(size)]


def _shapes_here(name: str, words: Words, places: Sequence[_Place], step: StepRecord) -> Iterator[str]:
    """The shapes that the tensor had in the step's rows; where it stands in no row, those that its words give."""
    specs = [place.spec for place in places]
    rows = [operation for operation in step.operations if _spec_of(operation) in specs and name in operation.tensors]
    if rows:
        shapes = [f"{_row(operation)} {_numbers(operation.tensors[name].shape)}" for operation in rows]
        yield from _listed(list(dict.fromkeys(shapes)))
    elif any(spec.qualname in STAGES for spec in specs):
        yield "this step did not make it"
    else:
        yield from _evaluated(words, step, True)


def _evaluated(words: Words, step: StepRecord | None, is_wanted: bool) -> Iterator[str]:
    """The shape by the step's sizes, for a tensor that has no row of its own in the record."""
    if step is None or not is_wanted:
        return
    by_request = any(word in WORDS and WORDS[word].scope == "request" for word in words)
    for request in step.requests[:MANY] if by_request else [None]:
        sizes = {**step.dims, **(_request_dims(request) if request else {})}
        shape = [evaluate(word, sizes) for word in words]
        if None not in shape:
            whose = f" for {request.label}" if request else ""
            yield f"{_symbols(words)} = {_numbers(shape)}{whose}, by the sizes of this step"


def _row(operation: Operation) -> str:
    return operation.label + (f" {operation.request}" if operation.request else "")


# --- stages -----------------------------------------------------------------------------------------------------------


def _explain_function(spec: FunctionSpec, step: StepRecord | None) -> Meaning:
    note, stage = FUNCTIONS.get(spec.qualname, Note()), STAGES.get(spec.qualname)
    rows = [operation for operation in step.operations if _spec_of(operation) is spec] if step else []
    main = _main_body(spec, step)
    if spec is not main:
        here = "this run used the other body" if step else ""
        same = f"shapes, costs and pitfalls are those of {main.qualname} at {_code(main.file, main.first_line)}"
        parts = (("is", spec.summary), ("why", same), ("here", here), ("code", _code(spec.file, spec.first_line)))
        return Meaning(f"{spec.qualname}: another body of the same stage", parts)
    kind = f"a stage, kind {KIND_LETTERS[stage.kind]} ({stage.kind})" if stage else "a function around or inside stages"
    return Meaning(f"{spec.qualname}: {kind}", (
        ("is", spec.summary or "a helper without a contract of its own"),
        ("why", note.why),
        ("shapes", _fill(stage.template, _words_in(spec, {})) if stage else _signature(spec)),
        ("here", _rows_here(rows) if step and stage else ""),
        ("costs", "\n".join(_costs(stage, rows)) if stage else ""),
        ("care", note.care),
        ("names", _names(note.vllm, note.huggingface) if stage or note.vllm or note.huggingface else ""),
        ("code", _code(spec.file, spec.first_line)),
    ))  # fmt: skip


def _main_body(spec: FunctionSpec, step: StepRecord | None) -> FunctionSpec:
    """Of several bodies at one seam the one that ran, or the first."""
    bodies = [body for body in tensor_functions() if body.qualname == spec.qualname]
    ran = {id(_spec_of(operation)) for operation in step.operations} if step else set()
    return next((body for body in bodies if id(body) in ran), bodies[0])


def _signature(spec: FunctionSpec) -> str:
    """Arguments and results of a function that has no row, as symbols."""
    given = [
        f"{name} {_symbols(words)}" if words else name
        for name, words in spec.arguments.items()
        if words or name in WORDS
    ]
    made = [_symbols(words) for words in spec.results if words]
    return f"{', '.join(given)} -> {', '.join(made) or 'no tensor'}" if given or made else "none in its signature"


def _explain_module(module: _Module, step: StepRecord | None) -> Meaning:
    spec = next(spec for spec in tensor_functions() if spec.qualname == f"{module.class_name}.forward")
    note, stage = MODULES.get(module.name, Note()), STAGES.get(spec.qualname)
    words = _words_in(spec, module.words)
    rows = [operation for operation in step.operations if operation.label == module.name] if step else []
    rows = [operation for operation in rows if _spec_of(operation) is spec]
    if f"self.{module.name}(" not in module.file.read_text(encoding="utf-8"):
        stage = None  # it is never called: its weight is read, or its items are called
    return Meaning(f"{module.name}: the {module.class_name} of {module.owner}", (
        ("is", spec.summary),
        ("why", note.why),
        ("shapes", _fill(stage.template, words) if stage else "" if "weight" in words else _signature(spec)),
        ("here", _rows_here(rows) if step and stage else ""),
        ("weight", _weight(words["weight"], rows) if "weight" in words else ""),
        ("costs", "\n".join(_costs(stage, rows)) if stage else ""),
        ("care", note.care or FUNCTIONS.get(spec.qualname, Note()).care),
        ("names", _names(note.vllm, note.huggingface)),
        ("code", f"{_code(module.file, module.line)}, and {module.class_name} at {_code(spec.file, spec.first_line)}"),
    ))  # fmt: skip


def _weight(words: Words, rows: Sequence[Operation]) -> str:
    """How the weight is stored; with a row of the step, its sizes too."""
    sizes = f" = {_numbers(rows[0].tensors['weight'].shape)}" if rows else ""
    return f"stored as {_symbols(words)}{sizes}, one row for each output"


def _words_in(spec: FunctionSpec, own_words: Mapping[str, str]) -> dict[str, Words]:
    """name -> words of everything that a template may name, the class's words replaced by the module's own."""
    named = {name: words for name, words in [*spec.arguments.items(), *spec.locals.items()] if words}
    results = {
        "result" if len(spec.results) == 1 else f"result[{i}]": words for i, words in enumerate(spec.results) if words
    }
    return {name: tuple(own_words.get(word, word) for word in words) for name, words in {**named, **results}.items()}


def _fill(template: str, words: Mapping[str, Words]) -> str:
    """The template with each tensor's symbols; ``.T`` turns a weight as the product uses it."""
    return re.sub(r"\{([\w\[\]]+?)(\.T)?\}", lambda m: _symbols(words[m[1]][::-1] if m[2] else words[m[1]]), template)


def _rows_here(rows: Sequence[Operation]) -> str:
    """The step's rows with their numbers; equal ones once, with their count."""
    if not rows:
        return "no row of this step"
    counts: dict[str, int] = {}
    for operation in rows:
        shapes = {name: tensor.shape for name, tensor in operation.tensors.items()}
        filled = re.sub(
            r"\{([\w\[\]]+?)(\.T)?\}",
            lambda m, s=shapes: _numbers(s[m[1]][::-1] if m[2] else s[m[1]]),
            operation.stage.template,
        )
        text = f"{_row(operation)} {filled}"
        counts[text] = counts.get(text, 0) + 1
    return "\n".join(_listed([text + (f", {count} times" if count > 1 else "") for text, count in counts.items()]))


def _costs(stage: Stage, rows: Sequence[Operation]) -> Iterator[str]:
    """The formulas, and what they give for the first row."""
    shown = rows[0] if rows else None
    flops = "? (it depends on the values)" if stage.flops is None else stage.flops.replace(PAIRS, "pairs")
    number = f" = {shown.flops:,} for {_row(shown)}" if shown and shown.flops else ""
    yield f"FLOP {flops}{number}"
    if PAIRS in (stage.flops or ""):
        yield f"where pairs = {PAIRS[1:-1]}: the keys that the causal mask leaves, over all queries"
    if stage.read == stage.write == "0":
        yield "BYTE 0: nothing moves, the same storage is read in another way"
        return
    number = f" = {shown.bytes_read:,} and {shown.bytes_written:,}" if shown else ""
    unit = ", where e is the size of one value" if "e*" in stage.read else ""
    yield f"BYTE read {stage.read}, write {stage.write}{number}{unit}"


def _spec_of(operation: Operation) -> FunctionSpec | None:
    """The function of a row, told by name and place: two bodies of one seam share a name."""
    return _specs_by_source().get((operation.function, operation.source))


@functools.cache
def _specs_by_source() -> dict[tuple[str, str], FunctionSpec]:
    return {
        (spec.qualname, f"{spec.file.relative_to(PACKAGE).as_posix()}:{spec.first_line}"): spec
        for spec in tensor_functions()
    }


# --- kinds and columns ------------------------------------------------------------------------------------------------


def _explain_kind(kind: Kind, step: StepRecord | None) -> Meaning:
    what, why = KINDS[kind]
    rows = [operation for operation in step.operations if operation.stage.kind == kind] if step else []
    flops, num_bytes = sum(row.flops or 0 for row in rows), sum(row.num_bytes for row in rows)
    here = (
        f"{len(rows)} rows: {flops:,} FLOP, {num_bytes:,} BYTE"
        if rows
        else "no row of this step has numbers of its own"
    )
    stages = [name for name, stage in STAGES.items() if stage.kind == kind]
    return Meaning(f"{KIND_LETTERS[kind]}: a kind of row, {kind}", (
        ("is", what),
        ("why", why),
        ("here", here if step else ""),
        ("rows", ", ".join(stages) or "tokenizer, scheduler, batch, blocks, sampled tokens: they have no FLOPs"),
        ("code", _code(PACKAGE / "trace" / "costs.py", _line_of(PACKAGE / "trace" / "costs.py", "KIND_LETTERS"))),
    ))  # fmt: skip


def _explain_column(column: str, step: StepRecord | None) -> Meaning:
    what, why = COLUMNS[column]
    here = ""
    if step and column in ("FLOP", "BYTE", "F/B"):
        numbers = {
            "FLOP": f"{step.flops:,}",
            "BYTE": f"{step.num_bytes:,}",
            "F/B": f"{step.flops / step.num_bytes:.1f}",
        }
        here = f"{numbers[column]} in the whole step"
    elif step and column == "pairs":
        pairs = [f"{r.label} {_count_pairs(r)} of {r.query_len * r.seq_len}" for r in step.requests]
        here = _some(pairs)
    is_cost = column in ("FLOP", "BYTE", "F/B", "pairs")
    place = (
        (PACKAGE / "trace" / "costs.py", "STAGES")
        if is_cost
        else (PACKAGE / "trace" / "terminal" / "__init__.py", "def render_step")
    )
    return Meaning(f"{column}: a number of the trace's rows" if is_cost else f"{column}: a word of the trace", (
        ("is", what), ("why", why), ("here", here), ("code", _code(place[0], _line_of(*place))),
    ))  # fmt: skip


def _count_pairs(request: RequestRecord) -> int:
    return evaluate(PAIRS, _request_dims(request)) or 0


# --- texts ------------------------------------------------------------------------------------------------------------


def _symbols(words: Words) -> str:
    return f"[{','.join(map(to_symbol, words))}]"


def _numbers(shape: Iterable[int | None]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _names(vllm: str, huggingface: str) -> str:
    return f"vLLM: {vllm or 'no word of its own'}; Hugging Face: {huggingface or 'no word of its own'}"


def _some(texts: Sequence[str], limit: int = MANY) -> str:
    """The first of a list, and how many more there are."""
    more = [f"{len(texts) - limit} more"] if len(texts) > limit else []
    return ", ".join([*texts[:limit], *more])


def _listed(texts: Sequence[str]) -> list[str]:
    """The same, one a line."""
    more = [f"and {len(texts) - MANY} more"] if len(texts) > MANY else []
    return [*texts[:MANY], *more]
