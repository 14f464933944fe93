"""What a traced block is made of: calls of tensor functions, and the values that their names then held."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tinyllm.trace.dims import FunctionSpec, Words
from tinyllm.trace.record import Stats

Role = Literal["argument", "local", "result", "field"]
Storage = Literal["activation", "weight", "kv_pool", "index"]


@dataclass(slots=True)  # frozen would take three times as long to make, and a step has thousands
class Value:
    """One named tensor at one moment; never changed. words is None where the source says nothing about it."""

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
    stats: Stats | None = None  # where asked for
    item: int | None = None  # its place in the list that the name stands for: the name is then "pieces[0]"


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
    error: str | None = None  # what it raised, or let through
    started_ns: int = 0
    ended_ns: int = 0
    reading_ns: int = 0  # what the recorder took in between for the calls inside
    is_measured: bool = False  # whether its values have stats, as asked for
    residual_rms: float | None = None  # of the stream behind a decoder layer, where asked for
    kernels: list[tuple[int, str]] | None = None  # (number in the whole block, operator), where asked for

    @property
    def elapsed_ns(self) -> int:
        """Wall time from its first line to its end, what it called included, less what the recorder took for those.

        Python's own cost of calling the recorder, for each frame, torch's and einops' too, cannot be told apart and is
        in it: some microseconds a call.
        """
        return self.ended_ns - self.started_ns - self.reading_ns

    @property
    def names(self) -> tuple[str, ...]:
        """What it can be asked for by: its qualified name, its class or function, its row's label, the modules it is in.

        A label that also names a result, such as ``rope q``, counts by its first word.
        """
        owner, _, function = self.name.rpartition(".")
        name = owner if function == "forward" else function
        return self.name, name, name.removeprefix("apply_"), *self.path.split(".")

    @property
    def has_failed(self) -> bool:
        """Whether it ended by an exception: its values are those of that moment."""
        return self.error is not None

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
