"""The frame reader: sees every call of the tensor modules as it returns, and what its names then held.

Nothing is added to a layer for it. While a trace is on, Python hands each new frame to `Recorder`, which ignores all but
those of the tensor modules; off, it costs nothing. Only metadata is kept, never a tensor. Rows come from this thread
alone; generators have none.
"""

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module, Parameter

from tinyllm.errors import TinyllmError
from tinyllm.shapes import WORDS, checking
from tinyllm.trace.dims import FunctionSpec, Words, field_words, function_specs

PACKAGE = Path(__file__).resolve().parent.parent
TENSOR_MODULES = ("batch.py", "kv_cache.py", "layers", "model.py", "sampler")

Role = Literal["argument", "local", "result", "field"]
Storage = Literal["activation", "weight", "kv_pool", "index"]


@dataclass(frozen=True, slots=True)
class Value:
    """One named tensor at one moment. words is None where the source says nothing about it."""

    name: str
    role: Role
    words: Words | None
    sizes: tuple[int, ...]
    dtype: str
    num_bytes: int
    storage: Storage
    is_contiguous: bool
    line: int
    identity: int  # id() of the tensor: comparable only while its frame runs
    storage_identity: int
    storage_offset: int


@dataclass(slots=True)
class Call:
    """One call of a function of a tensor module."""

    spec: FunctionSpec
    path: str  # where it stands in the model: "layers.0.self_attn.apply_rope"
    line: int  # the caller's line
    index: int  # how many calls of the same function the same caller made before
    parent: "Call | None"
    values: list[Value] = field(default_factory=list)
    ints: dict[str, int] = field(default_factory=dict)  # plain numbers whose name is a dimension word
    children: list["Call"] = field(default_factory=list)
    has_failed: bool = False

    @property
    def name(self) -> str:
        """The function's qualified name."""
        return self.spec.qualname

    def walk(self) -> Iterator["Call"]:
        """This call and all below it, in order of time."""
        yield self
        for child in self.children:
            yield from child.walk()

    def value(self, name: str) -> Value | None:
        """The value of that name, if it was recorded."""
        return next((value for value in self.values if value.name == name), None)

    def rows(self) -> list["Value | Call"]:
        """Values and calls in reading order: arguments, then each local behind the last call on or above its line."""
        rows: list[Value | Call] = [value for value in self.values if value.role in ("argument", "field")]
        pending = sorted((value for value in self.values if value.role == "local"), key=lambda value: value.line)
        for child in self.children:
            while pending and pending[0].line < child.line:
                rows.append(pending.pop(0))
            rows.append(child)
        return [*rows, *pending, *(value for value in self.values if value.role == "result")]


class TraceError(TinyllmError):
    """This interpreter does not hand frames over as the recorder needs them."""


class Recorder:
    """Collects the calls made inside a ``with`` block; `calls` are those without a recorded caller.

    Shape checks are off inside the block (both at once cost double, and the ledger checks more). A debugger's or
    coverage tool's own trace function is displaced and comes back when the block ends.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._stack: list[Call] = []
        self._specs: dict[CodeType, FunctionSpec | None] = {}
        self._module_paths: dict[int, str] = {}
        self._seen_dataclasses: dict[int, object] = {}  # holds them, so that no id is given twice

    def __enter__(self) -> "Recorder":
        self_test()
        self._checks_off = checking(False)
        self._checks_off.__enter__()
        self._displaced = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        sys.settrace(self._displaced)
        self._checks_off.__exit__(None, None, None)
        self._seen_dataclasses.clear()

    def walk(self) -> Iterator[Call]:
        """Every call in order of time."""
        return itertools.chain.from_iterable(call.walk() for call in self.calls)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in self._specs:
            self._specs[code] = _find_spec(code)
        spec = self._specs[code]
        if spec is None or event != "call":
            return None
        frame.f_trace_lines = False
        parent = self._stack[-1] if self._stack else None
        siblings = parent.children if parent else self.calls
        index = sum(sibling.spec is spec for sibling in siblings)
        call = Call(spec, self._path(frame, spec, parent), _caller_line(frame, parent), index, parent)
        for name in spec.rebound_arguments:  # by the time of return the name means something else
            self._read(call, name, frame.f_locals.get(name), "argument", spec.arguments[name])
        siblings.append(call)
        self._stack.append(call)
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, result: Any) -> Any:
        if event == "exception":
            self._stack[-1].has_failed = True
        elif event == "return":
            call = self._stack.pop()
            self._read_locals(call, frame.f_locals)
            self._read_result(call, result)
        return self._on_event

    def _read_locals(self, call: Call, values: dict[str, Any]) -> None:
        spec = call.spec
        for name, value in values.items():
            if name == "self" or name in spec.rebound_arguments:
                continue
            if name in spec.arguments:
                self._read(call, name, value, "argument", spec.arguments[name])
            else:
                words = spec.locals.get(name) or _inherited_words(call, spec.call_lines.get(name), value)
                self._read(call, name, value, "local", words)

    def _read_result(self, call: Call, result: Any) -> None:
        words = call.spec.results
        if isinstance(result, tuple) and len(result) == len(words):
            for i, item in enumerate(result):
                self._read(call, f"result[{i}]", item, "result", words[i])
        else:
            self._read(call, "result", result, "result", words[0])

    def _read(self, call: Call, name: str, value: Any, role: Role, words: Words | None) -> None:
        if isinstance(value, Tensor):
            call.values.append(
                _describe(name, value, role, words, call.spec.assigned_lines.get(name, call.spec.first_line))
            )
        elif isinstance(value, int) and not isinstance(value, bool) and name in WORDS:
            call.ints[name] = value
        elif dataclasses.is_dataclass(value) and id(value) not in self._seen_dataclasses:
            self._seen_dataclasses[id(value)] = value
            self._read_fields(call, value)

    def _read_fields(self, call: Call, value: Any) -> None:
        """A dataclass's tensors are rows of the first call that shows it: once a step, not once a layer."""
        for field_name, words in field_words(Path(inspect.getfile(type(value))), type(value).__name__).items():
            self._read(call, field_name, getattr(value, field_name), "field", words)

    def _path(self, frame: FrameType, spec: FunctionSpec, parent: Call | None) -> str:
        owner = frame.f_locals.get("self") if "self" in spec.arguments else None
        if isinstance(owner, Module):
            if id(owner) not in self._module_paths:
                self._module_paths.update({id(module): name for name, module in owner.named_modules()})
            return self._module_paths[id(owner)]
        prefix = f"{parent.path}." if parent and parent.path else ""
        return prefix + spec.qualname


def _find_spec(code: CodeType) -> FunctionSpec | None:
    """The spec of a tensor module's function; None for every other code object, which is then never looked at again."""
    file = Path(code.co_filename)
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE) or not file.is_relative_to(PACKAGE):
        return None
    if file.relative_to(PACKAGE).parts[0] not in TENSOR_MODULES:
        return None
    return function_specs(file).get((code.co_qualname, code.co_firstlineno))


def _caller_line(frame: FrameType, parent: Call | None) -> int:
    """The line of the recorded caller that led here; torch's and jaxtyping's frames lie between."""
    caller = frame.f_back
    while parent and caller and not _is_frame_of(caller, parent.spec):
        caller = caller.f_back
    return caller.f_lineno if caller and parent else 0


def _is_frame_of(frame: FrameType, spec: FunctionSpec) -> bool:
    code = frame.f_code
    return (
        code.co_qualname == spec.qualname
        and code.co_firstlineno == spec.first_line
        and code.co_filename == str(spec.file)
    )


def _inherited_words(call: Call, lines: range | None, value: Any) -> Words | None:
    """``a, b = f(x, g(y))`` cannot carry annotations: the names take the words of f's results, told by identity.

    f is the last call on those lines; g's result may be dead by now, and its identity another tensor's.
    """
    calls = [child for child in call.children if child.line in lines] if lines else []
    for result in calls[-1].values if calls else ():
        if result.role == "result" and result.identity == id(value):
            return result.words
    return None


def _describe(name: str, tensor: Tensor, role: Role, words: Words | None, line: int) -> Value:
    if words and ("num_blocks" in words or "num_slots" in words):
        storage: Storage = "kv_pool"
    elif isinstance(tensor, Parameter):
        storage = "weight"
    else:
        storage = "activation" if tensor.is_floating_point() else "index"
    return Value(
        name=name,
        role=role,
        words=words,
        sizes=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_bytes=tensor.numel() * tensor.element_size(),
        storage=storage,
        is_contiguous=tensor.is_contiguous(),
        line=line,
        identity=id(tensor),
        storage_identity=tensor.untyped_storage()._cdata,
        storage_offset=int(tensor.storage_offset()),
    )


def self_test() -> None:
    """Refuse, with one line, an interpreter whose frames cannot be read at their return."""
    seen: list[tuple[dict[str, Any], Any]] = []

    def on_event(frame: FrameType, event: str, result: Any) -> Any:
        if event == "return" and frame.f_code is _probe.__code__:
            seen.append((dict(frame.f_locals), result))
        return on_event

    displaced = sys.gettrace()
    sys.settrace(on_event)
    try:
        _probe(2)
    finally:
        sys.settrace(displaced)
    if seen != [({"argument": 2, "local": 3}, 5)]:
        raise TraceError(
            f"Python {sys.version.split()[0]} does not show a frame's names at its return; use CPython 3.11 or newer"
        )


def _probe(argument: int) -> int:
    local = argument + 1
    return argument + local
