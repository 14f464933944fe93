"""How a tensor function's frame is read: which code objects are one's, and what is noted of each of its names."""

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tinyllm.trace.calls import Call, Role, Storage, Value
from tinyllm.trace.dims import FunctionSpec, Words, function_specs

PACKAGE = Path(__file__).resolve().parent.parent
TENSOR_MODULES = ("batch.py", "kv_cache.py", "layers", "model.py", "sampler")

Plan = tuple[Role, Words | None, int, range | None]
"""How a name is read: role, words, line, lines of the call that it is from."""


class Reader:
    """A function's spec, with a plan for each of its names."""

    def __init__(self, spec: FunctionSpec, code: CodeType):
        self.spec = spec
        self.code = code  # kept, so that its id stays its own
        self.is_method = "self" in spec.arguments and not spec.qualname.endswith(".__init__")  # that has no parts yet
        self.is_decoder_layer = spec.qualname == "DecoderLayer.forward"
        self.plans: dict[str, Plan | None] = {}

    def plan(self, name: str) -> Plan | None:
        """How to read the name when the function returns; None where it is not to be read then."""
        spec = self.spec
        if name == "self" or name in spec.rebound_arguments:
            self.plans[name] = None
        elif name in spec.arguments:
            self.plans[name] = self.plan_argument(name)
        else:
            line = spec.assigned_lines.get(name, spec.first_line)
            self.plans[name] = "local", spec.locals.get(name), line, spec.call_lines.get(name)
        return self.plans[name]

    def plan_argument(self, name: str) -> Plan:
        """How to read an argument, whenever that is."""
        return "argument", self.spec.arguments[name], self.spec.assigned_lines.get(name, self.spec.first_line), None


class Sources:
    """The tensor modules of a package, and which code objects are none of theirs."""

    def __init__(self, package: Path):
        self.package = package
        # By id, and kept alive. Not by themselves: code objects of equal text are equal, whichever file they are of.
        self.foreign: dict[int, CodeType] = {}

    def find_reader(self, code: CodeType) -> Reader | None:
        """The reader of a tensor module's function; all other code but the engine's step is foreign from then on."""
        spec = self._find_spec(code)
        if spec is not None:
            return Reader(spec, code)
        if not self.is_engine_step(code):
            self.foreign[id(code)] = code
        return None

    def is_engine_step(self, code: CodeType) -> bool:
        """Whether it is the method around all tensor functions of a step."""
        return code.co_qualname == "Engine.step" and Path(code.co_filename) == self.package / "engine.py"

    def _find_spec(self, code: CodeType) -> FunctionSpec | None:
        file = Path(code.co_filename)
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE) or not file.is_relative_to(self.package):
            return None
        if file.relative_to(self.package).parts[0] not in TENSOR_MODULES:
            return None
        return function_specs(file).get((code.co_qualname, code.co_firstlineno))


OURS = Sources(PACKAGE)
"""What every recorder watches; shared, so that each code object is looked up once in a process."""


def inherited_words(call: Call, lines: range | None, value: Any) -> Words | None:
    """``a, b = f(x, g(y))`` cannot carry annotations: the names take the words of f's results, told by identity.

    f is the last call on those lines; g's result may be dead by now, and its identity another tensor's.
    """
    calls = [child for child in call.children if child.line in lines] if lines else []
    for result in calls[-1].values if calls else ():
        if result.role == "result" and result.identity == id(value):
            return result.words
    return None


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the values, and in the tuples, lists and dataclasses among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))
        elif dataclasses.is_dataclass(value):
            items = [getattr(value, item.name) for item in dataclasses.fields(value)]
            yield from (item for item in items if isinstance(item, Tensor))


@functools.cache
def _dtype_facts(dtype: torch.dtype) -> tuple[str, int, Storage]:
    return str(dtype).removeprefix("torch."), dtype.itemsize, "activation" if dtype.is_floating_point else "index"


def describe(name: str, tensor: Tensor, role: Role, words: Words | None, line: int) -> Value:
    """All that is kept of a tensor."""
    dtype, itemsize, storage = _dtype_facts(tensor.dtype)
    if words and ("num_blocks" in words or "num_slots" in words):
        storage = "kv_pool"
    elif type(tensor) is not Tensor and isinstance(tensor, Parameter):
        storage = "weight"
    return Value(
        name,
        role,
        words,
        tuple(tensor.shape),
        dtype,
        tensor.numel() * itemsize,
        storage,
        tensor.is_contiguous(),
        line,
        id(tensor),
        tensor.untyped_storage()._cdata,
        int(tensor.storage_offset()),
    )


def describe_items(name: str, items: Sequence[Any], role: Role, words: Words | None, line: int) -> Iterator[Value]:
    """The tensors of a list, each under the list's name and its place in it."""
    for i, item in enumerate(items):
        if isinstance(item, Tensor):
            value = describe(f"{name}[{i}]", item, role, words, line)
            value.item = i
            yield value
