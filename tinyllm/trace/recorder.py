"""The frame reader: sees every call of the tensor modules as it returns, and what its names then held.

Nothing is added to a layer for it. While a trace is on, Python hands each new frame to `Recorder`, which ignores all but
those of the tensor modules; off, it costs nothing. Only metadata is kept, never a tensor. Rows come from this thread
alone; generators have none.
"""

import contextlib
import dataclasses
import inspect
import itertools
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tinyllm.errors import TinyllmError
from tinyllm.shapes import WORDS, checking
from tinyllm.trace.calls import Call, Value
from tinyllm.trace.dims import field_words
from tinyllm.trace.kernels import KernelWatch
from tinyllm.trace.reading import (
    OURS,
    PACKAGE,
    TENSOR_MODULES,
    Plan,
    Reader,
    Sources,
    describe,
    describe_items,
    inherited_words,
    tensors_of,
)
from tinyllm.trace.values import Wanted, measure, name_matcher, stream_rms

__all__ = ["DISPLACED", "PACKAGE", "TENSOR_MODULES", "Call", "Recorder", "TraceError", "Value", "self_test"]

REPLACED = (
    "this block's trace function was replaced or switched off inside it, by a debugger perhaps: what came after that is "
    "not in the trace; what watches this thread now goes on"
)
DISPLACED = (
    "a debugger or coverage tool watches this thread; it sees nothing inside the trace block, and goes on after it"
)


class TraceError(TinyllmError):
    """This interpreter does not hand frames over as the recorder needs them."""


class Recorder:
    """Collects the calls made inside a ``with`` block; `calls` are those without a recorded caller.

    Shape checks are off inside the block (both at once cost double, and the ledger checks more). A debugger's or
    coverage tool's own trace function is displaced, which a warning says, and comes back when the block ends.

    on_step is told of each ``Engine.step`` that ends: its frame, its result (None where it failed), the calls that it
    made, which `calls` then lacks, how many milliseconds it took, and how many of these the recorder read in.

    Three things are recorded on request only. values names functions or rows (see `name_matcher`) whose tensors get
    `stats`; residual gives decoder layers their `residual_rms`; kernels gives each call torch's operators that ran in
    it and in no recorded call inside it, and `stray_kernels` those that ran outside all calls.

    sources are the files whose functions it sees: this package's, unless told otherwise.
    """

    def __init__(
        self,
        on_step: Callable[[FrameType, Any, list[Call], float, float], None] | None = None,
        *,
        values: Wanted | None = None,
        residual: bool = False,
        kernels: bool = False,
        sources: Sources = OURS,
    ) -> None:
        self.calls: list[Call] = []
        self.stray_kernels: list[str] = []
        self._on_step = on_step
        self._is_wanted = name_matcher(values)
        self._has_residual = residual
        self._kernel_watch = KernelWatch(self._on_kernel) if kernels else None
        self._kernel_numbers = itertools.count()
        self._step_start = 0, 0.0, 0.0  # calls and reading_ms before the step under way, and when it began
        self._stack: list[Call] = []
        self._frames: list[FrameType] = []  # of the calls on the stack
        self._reading_ns = 0  # what reading took so far
        self._readers: dict[int, Reader] = {}
        self._sources = sources
        self._module_paths: dict[int, tuple[weakref.ref[Module], str]] = {}
        self._seen_dataclasses: dict[int, weakref.ref[Any]] = {}  # of the step under way

    def __enter__(self) -> "Recorder":
        self_test()
        self._exits = contextlib.ExitStack()
        self._exits.enter_context(checking(False))
        if self._kernel_watch:
            self._exits.enter_context(self._kernel_watch)
        self._displaced = sys.gettrace()
        if self._displaced and not isinstance(getattr(self._displaced, "__self__", None), Recorder):
            warnings.warn(DISPLACED, stacklevel=3)
        sys.settrace(self._on_call)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if sys.gettrace() == self._on_call:
            sys.settrace(self._displaced)
        else:
            warnings.warn(REPLACED, stacklevel=3)
        self._exits.close()
        self._seen_dataclasses.clear()

    def walk(self) -> Iterator[Call]:
        """Every call in order of time."""
        return itertools.chain.from_iterable(call.walk() for call in self.calls)

    @property
    def reading_ms(self) -> float:
        """The time that it took so far to find and read frames.

        Python's own cost of handing it each frame, torch's and einops' too, comes on top and cannot be told apart.
        """
        return self._reading_ns / 1e6

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if id(code) in self._sources.foreign or event != "call":
            return None
        began_ns = time.perf_counter_ns()
        reader = self._readers.get(id(code)) or self._find_reader(code)
        if reader is None:
            self._reading_ns += time.perf_counter_ns() - began_ns
            return self._watch_step(frame)
        return self._begin(frame, reader, began_ns)

    def _find_reader(self, code: CodeType) -> Reader | None:
        reader = self._sources.find_reader(code)
        if reader is not None:
            self._readers[id(code)] = reader
        return reader

    def _begin(self, frame: FrameType, reader: Reader, began_ns: int) -> Any:
        frame.f_trace_lines = False
        spec, parent = reader.spec, self._stack[-1] if self._stack else None
        siblings = parent.children if parent else self.calls
        index = sum([sibling.spec is spec for sibling in siblings])
        call = Call(spec, self._path(frame, reader, parent), self._caller_line(frame), index, parent)
        for name in spec.rebound_arguments:  # by the time of return the name means something else
            self._read(call, name, frame.f_locals.get(name), reader.plan_argument(name))
        if self._kernel_watch:
            call.kernels = []
        siblings.append(call)
        self._stack.append(call)
        self._frames.append(frame)
        call.started_ns = time.perf_counter_ns()
        self._reading_ns += call.started_ns - began_ns
        call.reading_ns = self._reading_ns  # the difference to the end's is what the calls inside took
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, result: Any) -> Any:
        if event == "exception":
            kind, error, _ = result
            self._stack[-1].error = f"{kind.__name__}: {error}"
        elif event == "return":
            ended_ns = time.perf_counter_ns()
            self._frames.pop()
            call = self._stack.pop()
            call.ended_ns, call.reading_ns = ended_ns, self._reading_ns - call.reading_ns
            reader = self._readers[id(frame.f_code)]
            values = frame.f_locals
            self._read_locals(call, reader, values)
            self._read_result(call, result)
            if self._is_wanted and self._is_wanted(call.names):
                self._measure(call, [*values.values(), result])
            if reader.is_decoder_layer and self._has_residual:
                with self._kernels_paused():
                    call.residual_rms = stream_rms(result)
            self._reading_ns += time.perf_counter_ns() - ended_ns
        return self._on_event

    def _on_kernel(self, kernel: str) -> None:
        kernels = self._stack[-1].kernels if self._stack else None
        if kernels is None:
            self.stray_kernels.append(kernel)
        else:
            kernels.append((next(self._kernel_numbers), kernel))

    def _watch_step(self, frame: FrameType) -> Any:
        """The engine's own step is no tensor function, but where one ends, on_step is told."""
        if self._on_step is None or not self._sources.is_engine_step(frame.f_code):
            return None
        frame.f_trace_lines = False
        self._step_start = len(self.calls), time.perf_counter(), self.reading_ms
        return self._on_engine_event

    def _on_engine_event(self, frame: FrameType, event: str, result: Any) -> Any:
        if event == "return" and self._on_step is not None:
            num_before, started, read_before = self._step_start
            self._seen_dataclasses.clear()
            calls, self.calls = self.calls[num_before:], self.calls[:num_before]
            traced_ms = 1000 * (time.perf_counter() - started)
            with self._kernels_paused():
                self._on_step(frame, result, calls, traced_ms, self.reading_ms - read_before)
        return self._on_engine_event

    def _read_locals(self, call: Call, reader: Reader, values: dict[str, Any]) -> None:
        plans, append = reader.plans, call.values.append
        for name, value in values.items():
            plan = plans[name] if name in plans else reader.plan(name)
            if plan is None:
                continue
            if isinstance(value, Tensor):
                role, words, line, call_lines = plan
                if words is None and call_lines is not None:
                    words = inherited_words(call, call_lines, value)
                append(describe(name, value, role, words, line))
            elif value is not None:
                self._read_other(call, name, value, plan)

    def _read_result(self, call: Call, result: Any) -> None:
        words, line = call.spec.results, call.spec.first_line
        if isinstance(result, tuple) and len(result) == len(words):
            for i, item in enumerate(result):
                self._read(call, f"result[{i}]", item, ("result", words[i], line, None))
        else:
            self._read(call, "result", result, ("result", words[0], line, None))

    def _read(self, call: Call, name: str, value: Any, plan: Plan) -> None:
        if isinstance(value, Tensor):
            call.values.append(describe(name, value, *plan[:3]))
        elif value is not None:
            self._read_other(call, name, value, plan)

    def _read_other(self, call: Call, name: str, value: Any, plan: Plan) -> None:
        if isinstance(value, int):
            if name in WORDS and not isinstance(value, bool):
                call.ints[name] = value
        elif plan[1] is not None and isinstance(value, list | tuple):
            call.values += describe_items(name, value, *plan[:3])
        elif dataclasses.is_dataclass(value) and not self._has_seen(value):
            self._read_fields(call, value)

    def _has_seen(self, value: Any) -> bool:
        """Whether this very object was shown before. It holds tensors, so only a weak reference to it is kept."""
        known = self._seen_dataclasses.get(id(value))
        if known is not None and known() is value:  # a dead object's id may be another's by now
            return True
        self._seen_dataclasses[id(value)] = weakref.ref(value)
        return False

    def _read_fields(self, call: Call, value: Any) -> None:
        """A dataclass's tensors are rows of the first call that shows it: once a step, not once a layer."""
        line = call.spec.first_line
        for field_name, words in field_words(Path(inspect.getfile(type(value))), type(value).__name__).items():
            self._read(call, field_name, getattr(value, field_name), ("field", words, line, None))

    def _measure(self, call: Call, held: list[Any]) -> None:
        """Stats of what the call holds; its tensors are measured one by one, and let go."""
        with torch.inference_mode(), self._kernels_paused():
            recorded = {value.identity for value in call.values}
            tensors = {id(tensor): tensor for tensor in tensors_of(held) if id(tensor) in recorded}
            stats = {identity: measure(tensor) for identity, tensor in tensors.items()}
        call.is_measured = True
        for value in call.values:
            if value.name not in call.spec.rebound_arguments:  # those may be gone, and their identity another's
                value.stats = stats.get(value.identity)

    @contextlib.contextmanager
    def _kernels_paused(self) -> Iterator[None]:
        if self._kernel_watch is None:
            yield
            return
        self._kernel_watch.is_paused = True
        try:
            yield
        finally:
            self._kernel_watch.is_paused = False

    def _path(self, frame: FrameType, reader: Reader, parent: Call | None) -> str:
        owner = frame.f_locals.get("self") if reader.is_method else None
        if isinstance(owner, Module):
            known = self._module_paths.get(id(owner))
            if known is None or known[0]() is not owner:  # a dead module's id may be another's by now
                modules = owner.named_modules()
                self._module_paths.update({id(module): (weakref.ref(module), name) for name, module in modules})
            return self._module_paths[id(owner)][1]
        prefix = f"{parent.path}." if parent and parent.path else ""
        return prefix + reader.spec.qualname

    def _caller_line(self, frame: FrameType) -> int:
        """The line of the recorded caller that led here; torch's and jaxtyping's frames lie between."""
        if not self._frames:
            return 0
        caller, parent = frame.f_back, self._frames[-1]
        while caller is not None and caller is not parent:
            caller = caller.f_back
        return caller.f_lineno if caller else 0


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
