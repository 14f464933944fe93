"""What the sources say: the functions of the tensor modules, the batch's fields, the model's parts, the named tensors."""

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyllm.shapes import WORDS
from tinyllm.trace.dims import FunctionSpec, Words, field_words, function_specs
from tinyllm.trace.record import Operation
from tinyllm.trace.recorder import PACKAGE, TENSOR_MODULES

BATCH = PACKAGE / "batch.py"


# --- files and lines --------------------------------------------------------------------------------------------------


@functools.cache
def tensor_files() -> tuple[Path, ...]:
    """The sources of the tensor modules, in the order of a step's data flow."""
    roots = [PACKAGE / name for name in TENSOR_MODULES]
    return tuple(path for root in roots for path in ([root] if root.suffix else sorted(root.rglob("*.py"))))


@functools.cache
def source_lines(file: Path) -> tuple[str, ...]:
    """The lines of a source, without their ends."""
    return tuple(file.read_text(encoding="utf-8").splitlines())


@functools.cache
def syntax_tree(file: Path) -> ast.Module:
    """The source as Python reads it."""
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def line_of(file: Path, start: str) -> int:
    """The number of the first line that starts so, blanks aside; 1 where there is none."""
    return next((i for i, line in enumerate(source_lines(file), 1) if line.strip().startswith(start)), 1)


def show_path(file: Path) -> str:
    """A file of the package, from the folder above it."""
    return file.relative_to(PACKAGE.parent).as_posix()


def show_place(file: Path, line: int) -> str:
    """``tinyllm/batch.py:31``."""
    return f"{show_path(file)}:{line}"


# --- functions and fields ---------------------------------------------------------------------------------------------


@functools.cache
def tensor_functions() -> tuple[FunctionSpec, ...]:
    """Every public function of the tensor modules."""
    specs = [spec for file in tensor_files() for spec in function_specs(file).values()]
    return tuple(spec for spec in specs if not spec.qualname.rpartition(".")[2].startswith("_"))


def place_of(spec: FunctionSpec) -> str:
    """Where a function begins."""
    return show_place(spec.file, spec.first_line)


def spec_of(operation: Operation) -> FunctionSpec | None:
    """The function of a row, told by name and place: two bodies of one seam share a name."""
    return _specs_by_source().get((operation.function, operation.source))


@functools.cache
def _specs_by_source() -> dict[tuple[str, str], FunctionSpec]:
    return {
        (spec.qualname, f"{spec.file.relative_to(PACKAGE).as_posix()}:{spec.first_line}"): spec
        for spec in tensor_functions()
    }


@functools.cache
def batch_fields() -> tuple[tuple[str, str], ...]:
    """(class, field) of every tensor that a step's batch brings to the layers and to the sampler."""
    classes = [node.name for node in syntax_tree(BATCH).body if isinstance(node, ast.ClassDef)]
    return tuple((name, field) for name in classes for field in field_words(BATCH, name))


# --- the model's named parts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A named part of the model, such as ``qkv_proj``: its class, its owner, its own words for the class's sizes."""

    name: str
    class_name: str
    owner: str
    file: Path
    line: int
    words: Mapping[str, str]  # out_size -> qkv_size

    @property
    def is_called(self) -> bool:
        """Whether its owner calls it; of others the weight is read, or the items are called."""
        calls = [node.func for node in ast.walk(syntax_tree(self.file)) if isinstance(node, ast.Call)]
        return any(ast.unparse(called) == f"self.{self.name}" for called in calls)


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every ``self.name = Class(config.word, ...)`` of the tensor modules whose class has a forward function."""
    forwards = {spec.qualname.partition(".")[0] for spec in tensor_functions() if spec.qualname.endswith(".forward")}
    found = []
    for file in tensor_files():
        for owner in (node for node in syntax_tree(file).body if isinstance(node, ast.ClassDef)):
            for node in (node for node in ast.walk(owner) if isinstance(node, ast.Assign)):
                target, calls = node.targets[0], [n for n in ast.walk(node.value) if isinstance(n, ast.Call)]
                made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in forwards]
                if isinstance(target, ast.Attribute) and made:
                    class_name = ast.unparse(made[0].func)
                    words = _sizes_given(class_name, made[0].args)
                    found.append(Module(target.attr, class_name, owner.name, file, node.lineno, words))
    return tuple(found)


def _sizes_given(class_name: str, arguments: Sequence[ast.expr]) -> dict[str, str]:
    """``Linear(config.hidden_size, config.qkv_size)``: in_size is hidden_size, out_size is qkv_size."""
    spec = next(spec for file in tensor_files() for spec in function_specs(file).values()
                if spec.qualname == f"{class_name}.__init__")  # fmt: skip
    names = [name for name in spec.arguments if name != "self"]
    given = {name: node.attr for name, node in zip(names, arguments, strict=False) if isinstance(node, ast.Attribute)}
    return {name: word for name, word in given.items() if word in WORDS}


# --- arguments and locals ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a named tensor stands: a function, its argument or local, and the source line."""

    spec: FunctionSpec
    is_argument: bool
    line: int


@functools.cache
def named_tensors() -> dict[str, dict[Words, list[Place]]]:
    """name -> dimension words -> places, for every annotated argument and local of the tensor modules."""
    found: dict[str, dict[Words, list[Place]]] = {}
    for spec in tensor_functions():
        for name, words in [*spec.arguments.items(), *spec.locals.items()]:
            if words and words not in _words_of_fields(name):
                line = spec.assigned_lines.get(name, spec.first_line) if name in spec.locals else spec.first_line
                place = Place(spec, name in spec.arguments, line)
                found.setdefault(name, {}).setdefault(words, []).append(place)
    return found


def _words_of_fields(name: str) -> list[Words]:
    """The words of the batch's fields of that name: a local or argument that has the same is no other thing."""
    return [field_words(BATCH, class_name)[field] for class_name, field in batch_fields() if field == name]
