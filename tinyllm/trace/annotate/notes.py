"""The tracer's lines for one file: for each function a call, arguments, what each statement made, and results."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinyllm.shapes import WORDS
from tinyllm.trace.annotate.calls import NOT_RUN, Shown, found_in, made_in, made_in_turn, show
from tinyllm.trace.annotate.runs import Run
from tinyllm.trace.annotate.statements import inner_blocks, is_list, makes_code, names_made, own_lines, returned_names
from tinyllm.trace.calls import Value
from tinyllm.trace.dims import FunctionSpec, Words, field_words, function_specs
from tinyllm.trace.explain.sources import syntax_tree
from tinyllm.trace.shape_text import in_numbers, in_symbols

MARK = "#|"
NO_TENSOR, UNREACHED = "no tensor", "-"
MANY = 4  # shapes of a list that are written out

Made = Value | tuple[Value, ...] | int | str | None
"""What a name was: a tensor, a list of them, a number, a text to print instead, or nothing."""


@dataclass(frozen=True)
class Note:
    """One line of the tracer: a name with its dimensions and its shape in each run, or a sentence."""

    line: int  # it stands below this line of the source
    indent: int
    name: str
    words: Words | None = None
    shapes: tuple[str, ...] = ()
    sentence: str = ""


@dataclass
class Notes:
    """Collects the notes of one function or class, so that they stand in columns."""

    shown: Sequence[Shown]
    spec: FunctionSpec
    notes: list[Note] = field(default_factory=list)
    returned: Mapping[str, Words] = field(default_factory=dict)  # locals that are returned under the result's words

    def say(self, line: int, indent: int, name: str, sentence: str) -> None:
        """Add a sentence."""
        self.notes.append(Note(line, indent, name, sentence=sentence))

    def add(self, line: int, indent: int, name: str, words: Words | None, values: Sequence[Made]) -> None:
        """Add a name with its value in each run."""
        tensors = (item for value in values for item in (value if isinstance(value, tuple) else (value,)))
        found = next((tensor.words for tensor in tensors if isinstance(tensor, Value) and tensor.words), words)
        shapes = tuple(
            UNREACHED if shown.call is None else _shape(value) for shown, value in zip(self.shown, values, strict=True)
        )
        self.notes.append(Note(line, indent, name, found, shapes))

    def add_signature(self, node: ast.FunctionDef) -> None:
        """Which call is shown, and its arguments, below the function's first lines."""
        line, indent = max(node.lineno, node.body[0].lineno - 1), node.col_offset + 4
        wheres = dict.fromkeys(shown.where() for shown in self.shown)
        for shown in self.shown if len(wheres) > 1 else self.shown[:1]:
            label = f"{shown.run.label}: " if len(wheres) > 1 else ""
            self.say(line, indent, "call", label + shown.where())
        for name, words in self.spec.arguments.items():
            self._add_found(line, indent, name, words, "argument")

    def add_body(self, body: Sequence[ast.stmt]) -> None:
        """The tensors that the statements make, and where no shown call came by."""
        for statement in body:
            lines = own_lines(statement)
            if not makes_code(statement):
                continue
            missing = [shown.run.label for shown in self.shown if shown.call and not shown.reached(lines)]
            if missing:
                is_all = len(missing) == sum(shown.call is not None for shown in self.shown)
                where = "" if is_all else f" in {' and '.join(missing)}"
                self.say(statement.lineno - 1, statement.col_offset, "", NOT_RUN + where)
                if is_all:
                    return
            for name, index in names_made(statement):
                self._add_made(name, index, lines, statement)
            if isinstance(statement, ast.Return):
                self._add_results(lines, statement.col_offset)
            for inner in inner_blocks(statement):
                self.add_body(inner)

    def _add_made(self, name: str, index: int, lines: range, statement: ast.stmt) -> None:
        calls = [shown.call for shown in self.shown]
        made: list[Made] = [made_in(call, name, index, lines, statement) if call else None for call in calls]
        words = self.spec.locals.get(name) or ((name,) if name in WORDS else self.returned.get(name))
        if is_list(statement):
            made = [made_in_turn(call, lines) if call else None for call in calls]
        if any(value is not None for value in made) or name in self.spec.locals:
            self.add(lines[-1], statement.col_offset, name, words, made)

    def _add_results(self, lines: range, indent: int) -> None:
        """What a return statement hands back: tensors, or a dataclass with its fields."""
        role = "result" if any(v.role == "result" for s in self.shown if s.call for v in s.call.values) else "field"
        names = dict.fromkeys(v.name for s in self.shown if s.call for v in s.call.values if v.role == role)
        for name in names:
            values = [found_in(s.call, name, role) if s.call and s.reached(lines) else UNREACHED for s in self.shown]
            self.add(lines[-1], indent, name, None, values)

    def _add_found(self, line: int, indent: int, name: str, words: Words | None, role: str) -> None:
        values = [found_in(shown.call, name, role) if shown.call else None for shown in self.shown]
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


def _shape(value: Made) -> str:
    match value:
        case None:
            return NO_TENSOR
        case Value():
            return in_numbers(value.sizes)
        case tuple():
            more = ["..."] if len(value) > MANY else []
            return " ".join([*map(_shape, value[:MANY]), *more])
        case _:
            return str(value)


def _symbols(note: Note) -> str:
    """In brackets as a shape; a plain number's word without brackets; nothing where the source does not say."""
    if note.words is None:
        return ""
    text = in_symbols(note.words)
    return text if any(shape[:1] == "[" or shape == NO_TENSOR for shape in note.shapes) else text[1:-1]


def notes_of(file: Path, runs: Sequence[Run], layer: int) -> list[Notes]:
    """The notes of each function and each dataclass of a file."""
    specs = {first_line: spec for (_, first_line), spec in function_specs(file).items()}
    tree = syntax_tree(file)
    found: list[Notes] = []
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        spec = specs[min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])]
        notes = Notes([show(run, spec, layer) for run in runs], spec, returned=returned_names(node, spec))
        if any(shown.call for shown in notes.shown):
            notes.add_signature(node)
            notes.add_body(node.body)
        else:
            notes.say(max(node.lineno, node.body[0].lineno - 1), node.col_offset + 4, "", NOT_RUN)
        fields = Notes(notes.shown, spec)
        for owner in (owner for owner in tree.body if isinstance(owner, ast.ClassDef)):
            if isinstance(node.returns, ast.Name) and node.returns.id == owner.name:
                _add_fields(fields, owner, file)
        found += [notes, fields]
    return found


def _add_fields(notes: Notes, owner: ast.ClassDef, file: Path) -> None:
    """The tensors of a dataclass, below its fields: those of the call that made it."""
    words = field_words(file, owner.name)
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in words:
            name = node.target.id
            values = [found_in(shown.call, name, "field") if shown.call else None for shown in notes.shown]
            notes.add(node.end_lineno or node.lineno, node.col_offset, name, words[name], values)
