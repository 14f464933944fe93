"""A source file of the model with the shapes that a run gave it: ``--annotate FILE``.

Under each line that makes a tensor stands what it was, prefill and decode side by side. The source stays as it is: a
line that begins with ``#|`` is the tracer's, and without these the file is back.
"""

import ast
import contextlib
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tinyllm.errors import ConfigError, brief
from tinyllm.llm import LLM, Prompt
from tinyllm.request import SamplingParams
from tinyllm.scheduler import Schedule, ScheduledRequest
from tinyllm.shapes import WORDS
from tinyllm.trace.decisions import request_label
from tinyllm.trace.dims import FunctionSpec, Words, field_words, function_specs
from tinyllm.trace.explain import tensor_files
from tinyllm.trace.ledger import Ledger
from tinyllm.trace.record import to_symbol
from tinyllm.trace.recorder import PACKAGE, Call, Recorder, Value

MARK = "#|"
NO_TENSOR, NOT_RUN = "no tensor", "not run here"


@dataclass(frozen=True)
class Run:
    """One recorded step: its calls, the lines that each of them reached, and what it was."""

    label: str  # "prefill" or "decode"
    title: str
    model: str
    calls: tuple[Call, ...]
    lines: Mapping[int, frozenset[int]]  # by the id() of the call
    requests: tuple[str, ...]  # labels, in the order of the batch


class LineRecorder(Recorder):
    """A recorder that also knows which lines each call reached."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, set[int]] = {}

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        handler = super()._on_call(frame, event, _)
        if handler is None:
            return None
        frame.f_trace_lines = True
        lines = self.lines.setdefault(id(self._stack[-1]), set())

        def on_event(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            else:
                handler(frame, event, argument)
            return on_event

        return on_event


def record_calls(llm: LLM, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> tuple[Run, ...]:
    """Run prompts until there was a prefill and a decode step, and keep the calls of the first of each.

    Raises RequestError before anything runs, and LedgerError where an annotation is false.
    """
    requests = llm.make_requests(prompts, params or SamplingParams(max_tokens=2, ignore_eos=True))
    labels = {request.request_id: request_label(i) for i, request in enumerate(requests)}
    dims = {**llm.loaded.config.dims(), **llm.engine.cache_config.dims()}
    runs: dict[str, Run] = {}
    index = 0
    with contextlib.closing(llm.run(requests)) as steps:
        while len(runs) < 2:
            recorder = LineRecorder()
            with recorder:
                output = next(steps, None)
            if output is None:
                break
            label = _phase(output.schedule)
            if label and label not in runs:
                Ledger(dims).check(recorder.calls)
                names = tuple(labels.get(e.request.request_id, "?") for e in output.schedule.scheduled)
                lines = {key: frozenset(reached) for key, reached in recorder.lines.items()}
                title = f"step {index}: {_shares(names, output.schedule)}"
                runs[label] = Run(label, title, llm.loaded.path.name, tuple(recorder.calls), lines, names)
            index += 1
    return tuple(runs.values())


def _phase(schedule: Schedule) -> str:
    """What all requests of the step do; "" where some do the one and some the other."""
    phases = {"decode" if _is_decode(entry) else "prefill" for entry in schedule.scheduled}
    return phases.pop() if len(phases) == 1 else ""


def _is_decode(entry: ScheduledRequest) -> bool:
    return entry.query_len == 1 and entry.num_computed_tokens >= entry.request.num_prompt_tokens


def _shares(names: Sequence[str], schedule: Schedule) -> str:
    entries = zip(names, schedule.scheduled, strict=True)
    return ", ".join(f"{name} computes {entry.query_len} of {entry.seq_len} tokens" for name, entry in entries)


# --- which file, which call -------------------------------------------------------------------------------------------


def annotatable() -> list[str]:
    """The files that can be annotated, as paths from the folder above the package."""
    return [file.relative_to(PACKAGE.parent).as_posix() for file in tensor_files()]


def find_source(path: str | Path) -> Path:
    """The tensor module that a path names, from here, from the package or from above it; ConfigError for any other."""
    for root in (Path.cwd(), PACKAGE.parent, PACKAGE):
        file = (root / path).resolve()
        if file in tensor_files():
            return file
    files = ", ".join(annotatable())
    raise ConfigError(
        f"{brief(str(path))} makes no tensors in a step, so no run can annotate it; expected one of {files}"
    )


@dataclass(frozen=True)
class _Shown:
    """The call of a function that stands for all its calls in a run; None where the run has none."""

    run: Run
    call: Call | None
    num_calls: int
    num_others: int  # calls with other shapes

    def reached(self, lines: range) -> bool:
        """Whether the call came to any of these lines."""
        return self.call is not None and not self.run.lines[id(self.call)].isdisjoint(lines)

    def where(self) -> str:
        """Which call is shown, and what became of the others."""
        if self.call is None:
            return NOT_RUN
        request = _request_of(self.call, self.run)
        place = ", ".join(part for part in (_module_of(self.call), request and f"for {request}") if part)
        if self.num_calls == 1:
            return f"{place}: the only call" if place else "the only call"
        others = f"{self.num_others} had other shapes" if self.num_others else "all had these shapes"
        return f"{f'{place}: one' if place else 'the first'} of {self.num_calls} calls, {others}"


def _show(run: Run, spec: FunctionSpec, layer: int) -> _Shown:
    """The first call in the layer, where there is one, or the first of all."""
    every = (call for root in run.calls for call in root.walk())
    calls = [call for call in every if (call.spec.file, call.spec.first_line) == (spec.file, spec.first_line)]
    if not calls:
        return _Shown(run, None, 0, 0)
    prefix = f"layers.{layer}"
    shown = next((call for call in calls if f"{call.path}.".startswith(f"{prefix}.")), calls[0])
    return _Shown(run, shown, len(calls), sum(_border(call) != _border(shown) for call in calls))


def _module_of(call: Call | None) -> str:
    """The module around a call, as the model names it; "" where there is none."""
    while call is not None and not call.name.endswith(".forward"):
        call = call.parent
    return "" if call is None else call.path or "the model"


def _border(call: Call) -> list[tuple]:
    """The shapes of arguments and results."""
    return [(value.name, value.sizes) for value in call.values if value.role in ("argument", "result")]


def _request_of(call: Call | None, run: Run) -> str:
    """The request that a call serves alone; "" where it serves all."""
    while call is not None:
        if call.name == "attend_request":
            return run.requests[call.index]
        call = call.parent
    return ""


# --- the notes of a file ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Note:
    """One line of the tracer: a name with its dimensions and its shape in each run, or a sentence."""

    line: int  # it stands below this line of the source
    indent: int
    name: str
    words: Words | None = None
    shapes: tuple[str, ...] = ()
    sentence: str = ""


@dataclass
class _Notes:
    """Collects the notes of one function or class, so that they stand in columns."""

    shown: Sequence[_Shown]
    spec: FunctionSpec
    notes: list[_Note] = field(default_factory=list)

    def say(self, line: int, indent: int, name: str, sentence: str) -> None:
        """Add a sentence."""
        self.notes.append(_Note(line, indent, name, sentence=sentence))

    def add(self, line: int, indent: int, name: str, words: Words | None, values: Sequence[Value | int | None]) -> None:
        """Add a name with its value in each run."""
        found = next((value.words for value in values if isinstance(value, Value) and value.words), words)
        shapes = tuple(
            "-" if shown.call is None else _shape(value) for shown, value in zip(self.shown, values, strict=True)
        )
        self.notes.append(_Note(line, indent, name, found, shapes))

    def add_signature(self, node: ast.FunctionDef) -> None:
        """Which call is shown, its arguments and its results, below the function's first lines."""
        line, indent = max(node.lineno, node.body[0].lineno - 1), node.col_offset + 4
        wheres = dict.fromkeys(shown.where() for shown in self.shown)
        for shown in self.shown if len(wheres) > 1 else self.shown[:1]:
            label = f"{shown.run.label}: " if len(wheres) > 1 else ""
            self.say(line, indent, "call", label + shown.where())
        for name, words in self.spec.arguments.items():
            self._add_found(line, indent, name, words, "argument")
        for name in dict.fromkeys(v.name for s in self.shown if s.call for v in s.call.values if v.role == "result"):
            self.add(line, indent, name, None, [s.call.value(name) if s.call else None for s in self.shown])

    def add_body(self, body: Sequence[ast.stmt]) -> None:
        """The tensors that the statements make, and where no shown call came by."""
        for statement in body:
            lines = _own_lines(statement)
            if not _makes_code(statement):
                continue
            missing = [shown.run.label for shown in self.shown if shown.call and not shown.reached(lines)]
            if missing:
                is_all = len(missing) == sum(shown.call is not None for shown in self.shown)
                where = "" if is_all else f" in {' and '.join(missing)}"
                self.say(statement.lineno - 1, statement.col_offset, "", NOT_RUN + where)
                if is_all:
                    return
            for name, index in _names_made(statement):
                self._add_made(name, index, lines, statement.col_offset)
            for inner in _blocks(statement):
                self.add_body(inner)

    def _add_made(self, name: str, index: int, lines: range, indent: int) -> None:
        made = [_made_in(shown.call, name, index, lines) if shown.call else None for shown in self.shown]
        if any(value is not None for value in made) or name in self.spec.locals:
            words = self.spec.locals.get(name) or ((name,) if name in WORDS else None)
            self.add(lines[-1], indent, name, words, made)

    def _add_found(self, line: int, indent: int, name: str, words: Words | None, role: str) -> None:
        values = [_found(shown.call, name, role) if shown.call else None for shown in self.shown]
        if words or any(value is not None for value in values):
            self.add(line, indent, name, words or ((name,) if name in WORDS else None), values)

    def texts(self) -> Iterator[tuple[int, str]]:
        """(line of the source, text to stand below it), names and shapes in columns."""
        rows = [note for note in self.notes if not note.sentence]
        symbols = {id(note): _symbols(note) for note in rows}
        name_width = max((len(note.name) for note in self.notes), default=0)
        symbol_width = max((len(text) for text in symbols.values()), default=0)
        widths = [max((len(note.shapes[i]) for note in rows), default=0) for i in range(len(self.shown))]
        for note in self.notes:
            if note.sentence:
                text = f"{note.name:{name_width}}  {note.sentence}" if note.name else note.sentence
            else:
                columns = zip(self.shown, note.shapes, widths, strict=True)
                shapes = "  ".join(f"{shown.run.label} {shape:{width}}" for shown, shape, width in columns)
                text = f"{note.name:{name_width}}  {symbols[id(note)]:{symbol_width}}  {shapes}"
            yield note.line, f"{'':{note.indent}}{MARK} {text}".rstrip()


def _shape(value: Value | int | None) -> str:
    if value is None:
        return NO_TENSOR
    return str(value) if isinstance(value, int) else f"[{','.join(map(str, value.sizes))}]"


def _symbols(note: _Note) -> str:
    """In brackets as a shape; a plain number's word without brackets; nothing where the source does not say."""
    if note.words is None:
        return ""
    text = ",".join(map(to_symbol, note.words))
    return f"[{text}]" if any(shape[:1] == "[" or shape == NO_TENSOR for shape in note.shapes) else text


def _found(call: Call, name: str, role: str) -> Value | int | None:
    """What a name of that role was in a call: a tensor, or a number whose name is a word."""
    value = next((value for value in call.values if value.name == name and value.role == role), None)
    return call.ints.get(name) if value is None else value


def _made_in(call: Call, name: str, index: int, lines: range) -> Value | int | None:
    """What a statement made of a name. Where a later one made it anew, the result of the call in these lines tells."""
    if call.spec.assigned_lines.get(name) in lines:
        return _found(call, name, "local")
    results = [
        value for child in call.children if child.line in lines for value in child.values if value.role == "result"
    ]
    return next((value for value in results if value.name in ("result", f"result[{index}]")), None)


def _own_lines(statement: ast.stmt) -> range:
    """A statement's lines, but of a compound one only those before its first block."""
    blocks = _blocks(statement)
    end = blocks[0][0].lineno - 1 if blocks else statement.end_lineno or statement.lineno
    return range(statement.lineno, max(statement.lineno, end) + 1)


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks inside a compound statement; a function or class of its own has none here."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return []
    found = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(statement, "handlers", [])]
    return [block for block in found if block]


def _makes_code(statement: ast.stmt) -> bool:
    """Whether the interpreter stops at it: not at a docstring, a bare declaration, or another function's lines."""
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.AnnAssign):
        return statement.value is not None
    return not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Pass | ast.Global)


def _names_made(statement: ast.stmt) -> Iterator[tuple[str, int]]:
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


def _notes_of(file: Path, runs: Sequence[Run], layer: int) -> list[_Notes]:
    """The notes of each function and each dataclass of a file."""
    specs = {first_line: spec for (_, first_line), spec in function_specs(file).items()}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: list[_Notes] = []
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        spec = specs[min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])]
        notes = _Notes([_show(run, spec, layer) for run in runs], spec)
        if any(shown.call for shown in notes.shown):
            notes.add_signature(node)
            notes.add_body(node.body)
        else:
            notes.say(max(node.lineno, node.body[0].lineno - 1), node.col_offset + 4, "", NOT_RUN)
        fields = _Notes(notes.shown, spec)
        for owner in (owner for owner in tree.body if isinstance(owner, ast.ClassDef)):
            if isinstance(node.returns, ast.Name) and node.returns.id == owner.name:
                _add_fields(fields, owner, file)
        found += [notes, fields]
    return found


def _add_fields(notes: _Notes, owner: ast.ClassDef, file: Path) -> None:
    """The tensors of a dataclass, below its fields: those of the call that made it."""
    words = field_words(file, owner.name)
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in words:
            name = node.target.id
            values = [_found(shown.call, name, "field") if shown.call else None for shown in notes.shown]
            notes.add(node.end_lineno or node.lineno, node.col_offset, name, words[name], values)


# --- as text and as HTML ----------------------------------------------------------------------------------------------


def annotate(path: str | Path, runs: Sequence[Run], layer: int = 1) -> list[str]:
    """The file's lines with the tracer's between them. Of a function that ran several times the first call in `layer`
    is shown, or the first of all: layer 0 has no residual yet, so layer 1 shows more.

    Raises ConfigError for a file that is no tensor module.
    """
    file = find_source(path)
    notes = _notes_of(file, runs, layer)
    below = _by_line(notes)
    lines = [f"{MARK} {text}".rstrip() for text in _head(file, runs, notes)]
    for number, line in enumerate(_source_lines(file), 1):
        lines += [line, *below.get(number, [])]
    return lines


def without_notes(lines: Sequence[str]) -> list[str]:
    """The source alone."""
    return [line for line in lines if not line.lstrip().startswith(MARK)]


def _source_lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def _by_line(notes: Sequence[_Notes]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line, text in (item for group in notes for item in group.texts()):
        found.setdefault(line, []).append(text)
    return found


def _head(file: Path, runs: Sequence[Run], notes: Sequence[_Notes]) -> Iterator[str]:
    """What the page is, what the runs were, and the symbols that it uses."""
    models = ", ".join(dict.fromkeys(run.model for run in runs)) or "no model"
    yield f"{file.relative_to(PACKAGE.parent).as_posix()}, and what each line made in a run of {models}."
    yield f"Lines that begin with {MARK} are the tracer's: a name, its dimensions, its shape in each step."
    for run in runs:
        yield f"{run.label:8} {run.title}"
    used = {word for group in notes for note in group.notes for word in note.words or ()}
    known = [WORDS[name] for name in WORDS if name in {word.partition("+")[0] for word in used}]
    width = max((len(word.name) for word in known), default=0)
    for word in known:
        yield f"  {word.symbol:6} {word.name:{width}}  {word.meaning}"


STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --number: #6b6b6b; --made: #00527a; --band: #eaf3f8; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181a; --text: #e6e6e6; --number: #9a9a9a; --made: #8fd0f5; --band: #1d2a33; }
}
body { background: var(--back); color: var(--text); margin: 1rem; font: 15px/1.5 system-ui, sans-serif; }
pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto; tab-size: 4; }
pre a { color: var(--number); text-decoration: none; user-select: none; }
pre a:target { outline: 2px solid var(--made); }
pre b { color: var(--made); background: var(--band); font-weight: 600; }
"""


def annotate_html(path: str | Path, runs: Sequence[Run], layer: int = 1) -> str:
    """The same as one page that needs nothing else: no script, no font, no other file. ``#L12`` leads to line 12."""
    file = find_source(path)
    name = html.escape(file.relative_to(PACKAGE.parent).as_posix())
    notes = _notes_of(file, runs, layer)
    below, lines = _by_line(notes), _source_lines(file)
    width = len(str(len(lines)))
    rows: list[str] = []
    for number, line in enumerate(lines, 1):
        rows.append(
            f'<a id="L{number}" href="#L{number}">{number:{width}}</a>  {html.escape(line, quote=False)}'.rstrip()
        )
        rows += [f"{'':{width}}  <b>{html.escape(text, quote=False)}</b>" for text in below.get(number, [])]
    head = html.escape("\n".join(_head(file, runs, notes)), quote=False)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} with the shapes of a run</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
        f"<pre>{head}</pre>\n<pre>" + "\n".join(rows) + "</pre>\n</body>\n</html>\n"
    )
