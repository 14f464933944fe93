"""``with trace() as t:`` records every engine step that this thread makes in the block, and can say what it saw."""

import difflib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any

from tinyllm.engine import Engine
from tinyllm.errors import RequestError, brief
from tinyllm.llm import LLM
from tinyllm.request import Request
from tinyllm.trace.calls import Call
from tinyllm.trace.html import render_fragment
from tinyllm.trace.ledger import LedgerError
from tinyllm.trace.record import AnswerRecord, Operation, PromptRecord, RunRecord, StepRecord, TensorRecord
from tinyllm.trace.recorder import Recorder, TraceError
from tinyllm.trace.session import StepReader, answer_record, prompt_record, start_run, token_text
from tinyllm.trace.shape_text import in_numbers, in_symbols
from tinyllm.trace.terminal import check_wanted, render_run
from tinyllm.trace.text import show_count
from tinyllm.trace.to_json import run_to_json
from tinyllm.trace.values import Wanted

_local = threading.local()  # .active: the traces whose blocks this thread is in, the outermost first


@dataclass
class _Source:
    """An engine that made steps in the block, and the LLM around it, where there is one."""

    engine: Engine
    llm: LLM | None
    reader: StepReader
    requests: dict[str, Request] = field(default_factory=dict)  # by label
    steps: list[StepRecord] = field(default_factory=list)
    answers: tuple[AnswerRecord, ...] | None = None  # as they were when the block ended; a stream may go on outside

    def read_answers(self) -> tuple[AnswerRecord, ...]:
        """What each request has given so far."""
        return tuple(answer_record(self.llm, label, request) for label, request in self.requests.items())


class Trace:
    """What a block did to every dimension: a record of each engine step, and of tensor functions called outside one.

    Shape checks are off inside the block, as the ledger checks more: it compares every dimension word of a step, and
    LedgerError says at the block's end where two sizes disagree. Only this thread is watched. Nested blocks each get
    the steps. Values are not kept, only sizes, so that long generations stay small. A step that fails keeps the rows
    that came before, and its `failure` says where it ended.

    values, residual, times and kernels ask for more, as in `trace_steps`; of nested blocks the innermost decides. A
    process's first step is slow for reasons of its own: before times, `session.warm_up(llm.engine, requests)` helps.

    In a notebook it shows itself; `print` gives the same as text.
    """

    def __init__(
        self,
        values: Wanted | None = None,
        residual: bool | None = None,
        times: bool = False,
        kernels: bool = False,
    ) -> None:
        check_wanted(values)
        self.steps: list[StepRecord] = []
        self.calls: list[Call] = []  # of tensor functions that no engine step made
        self._sources: list[_Source] = []
        self._has_times = times
        self._wanted: dict[str, Any] = {
            "values": values,
            "residual": values is not None if residual is None else residual,
            "kernels": kernels,
        }
        self._error: LedgerError | None = None
        self._recorder: Recorder | None = None

    def __enter__(self) -> "Trace":
        if self in _active():
            raise TraceError("this trace's block is under way; expected another trace() for a block within it")
        self._recorder = Recorder(self._on_step, **self._wanted)
        self._recorder.__enter__()
        _active().append(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._recorder is not None
        self._recorder.__exit__(kind, error, traceback)
        for trace in _active():
            trace.calls += self._recorder.calls
        _active().remove(self)
        for source in self._sources:
            source.answers = source.read_answers()
        if error is None and self._error is not None:
            raise self._error

    # --- recording -----------------------------------------------------------------------------------------------------

    def _on_step(self, frame: FrameType, output: Any, calls: list[Call], traced_ms: float, reading_ms: float) -> None:
        """Called by the recorder where an engine step ends; a raise in here would end the tracing."""
        schedule = frame.f_locals.get("schedule")
        if schedule is None or not any(call.name == "build_batch" and not call.has_failed for call in calls):
            return  # it failed before there was anything to see
        caller = frame.f_back.f_locals.get("self") if frame.f_back else None
        for trace in _active():
            try:
                trace._read(frame.f_locals["self"], caller, calls, schedule, output, traced_ms, reading_ms)
            except LedgerError as error:
                trace._error = trace._error or error

    def _read(self, engine: Engine, caller: Any, calls: list[Call], *rest: Any) -> None:
        source = self._find_source(engine, caller if isinstance(caller, LLM) else None)
        step = source.reader.read(calls, *rest)
        for request_record, entry in zip(step.requests, rest[0].scheduled, strict=True):
            source.requests[request_record.label] = entry.request
        source.steps.append(step)
        self.steps.append(step)

    def _find_source(self, engine: Engine, llm: LLM | None) -> _Source:
        for source in self._sources:
            if source.engine is engine:
                return source
        reader = StepReader(engine, llm.tokenizer if llm else None, has_times=self._has_times)
        self._sources.append(_Source(engine, llm, reader))
        return self._sources[-1]

    # --- looking at it -------------------------------------------------------------------------------------------------

    @property
    def run(self) -> RunRecord:
        """All steps of the first engine that made any. Raises RequestError where none did."""
        if not self._sources:
            raise RequestError(
                "no engine step was made in this block by this thread; expected a call such as llm.generate(...)"
            )
        source = self._sources[0]
        llm, requests = source.llm, source.requests.items()
        run = start_run(source.engine, llm, (_prompt(llm, label, request) for label, request in requests))
        answers = source.read_answers() if self in _active() or source.answers is None else source.answers
        return replace(run, steps=tuple(source.steps), answers=answers)

    def table(self) -> list[dict[str, Any]]:
        """One record for each row of each step, ready for ``pandas.DataFrame``; engines count from 0, as steps do."""
        return [
            {"engine": engine, **_row(step, operation)}
            for engine, source in enumerate(self._sources)
            for step in source.steps
            for operation in step.operations
        ]

    def find(self, name: str) -> list[dict[str, Any]]:
        """Where tensors of this name were, with their words and sizes: ``t.find("scores")``.

        Raises TraceError where there are steps, but no such tensor in any of them.
        """
        self._check_tensor(name)
        return [
            {"step": step.index, "path": operation.path, "op": operation.label, "request": operation.request,
             **_describe(operation.tensors[name])}
            for step in self.steps
            for operation in step.operations
            if name in operation.tensors
        ]  # fmt: skip

    def _check_tensor(self, name: str) -> None:
        names = {known for step in self.steps for operation in step.operations for known in operation.tensors}
        if names and name not in names:
            near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) if isinstance(name, str) else []
            what = f"near it: {', '.join(near)}" if near else f"expected a name such as {', '.join(sorted(names)[:5])}"
            raise TraceError(f"no tensor of this trace is named {brief(name)}; {what}")

    def diff(self, other: "Trace") -> list[dict[str, Any]]:
        """The rows in which two runs differ: in shape, FLOPs or bytes, or as only one of them has it (None)."""
        if not isinstance(other, Trace):
            raise TraceError(
                f"diff compares with {brief(other)}; expected another trace, as of `with trace() as other:`"
            )
        mine, theirs = ({_key(row): row for row in trace.table()} for trace in (self, other))
        differing = (key for key in {**mine, **theirs} if _compared(mine.get(key)) != _compared(theirs.get(key)))
        return [
            {"engine": key[0], "step": key[1], "path": key[2], "op": key[3], "request": key[4],
             "this": _compared(mine.get(key)), "other": _compared(theirs.get(key))}
            for key in differing
        ]  # fmt: skip

    def __repr__(self) -> str:
        steps = show_count(len(self.steps), "step")
        tokens = show_count(sum(step.num_chosen for step in self.steps), "token")
        return f"<Trace: {steps}, {tokens} sampled, {show_count(len(self.calls), 'call')} outside steps>"

    def __str__(self) -> str:
        """The trace as text, as the command prints it."""
        return "\n".join(self._lines(self.run)) if self._sources else repr(self)

    def _lines(self, run: RunRecord) -> Iterator[str]:
        others = sum(len(source.steps) for source in self._sources[1:])
        yield from render_run(run)
        if others:
            yield f"! another engine made {others} more steps in this block: see .steps and .table()"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """What a notebook shows: the page's steps as HTML, else the text; the records for programs."""
        forms: dict[str, Callable[[], Any]] = {"text/plain": lambda: repr(self)}
        if self._sources:
            run = self.run
            forms = {
                "text/plain": lambda: "\n".join(self._lines(run)),
                "text/html": lambda: render_fragment(run),
                "application/json": lambda: run_to_json(run),
            }
        wanted = set(forms if include is None else include) - set(exclude or ())
        return {kind: form() for kind, form in forms.items() if kind in wanted}

    def to_json(self) -> list[dict[str, Any]]:
        """The run as the records of ``--json``: a header, the steps, a footer."""
        return run_to_json(self.run)


def _active() -> list[Trace]:
    if not hasattr(_local, "active"):
        _local.active = []
    return _local.active


def _prompt(llm: LLM | None, label: str, request: Request) -> PromptRecord:
    """The prompt in words where its text gives just these tokens, or else token by token."""
    tokenizer = llm.tokenizer if llm else None
    for parse_special in (False, True):
        if llm is None or request.prompt is None:
            break
        record = prompt_record(llm, label, request.prompt, parse_special)
        if sum(map(len, record.words)) == request.num_prompt_tokens:
            return record
    words = tuple((token_text(tokenizer, token_id),) for token_id in request.prompt_token_ids)
    return PromptRecord(label, request.prompt or "", words)


def _row(step: StepRecord, operation: Operation) -> dict[str, Any]:
    def show(names: Sequence[str], numeric: bool) -> str:
        tensors = [operation.tensors[name] for name in names]
        return ", ".join(in_numbers(t.shape) if numeric else in_symbols(t.words) for t in tensors)

    return {
        "step": step.index,
        "phase": step.phase,
        "path": operation.path,
        "op": operation.label,
        "kind": operation.stage.kind,
        "layer": operation.layer,
        "request": operation.request,
        "in_sym": show(operation.inputs, False),
        "out_sym": show(operation.outputs, False),
        "in_shape": show(operation.inputs, True),
        "out_shape": show(operation.outputs, True),
        "flops": operation.flops,
        "bytes_read": operation.bytes_read,
        "bytes_written": operation.bytes_written,
        "intensity": operation.intensity,
        "time_us": operation.time_us,
        "source": operation.source,
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["engine"], row["step"], row["path"], row["op"], row["request"]


def _compared(row: dict[str, Any] | None) -> dict[str, Any] | None:
    names = ("in_shape", "out_shape", "flops", "bytes_read", "bytes_written")
    return None if row is None else {name: row[name] for name in names}


def _describe(tensor: TensorRecord) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "sym": tensor.symbols,
        "words": tensor.words,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "num_bytes": tensor.num_bytes,
        "view_of": tensor.view_of,
    }
