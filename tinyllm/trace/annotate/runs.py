"""The run that is annotated: a prefill and a decode step, each with its calls and the lines that these reached."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tinyllm.llm import LLM, Prompt
from tinyllm.request import SamplingParams
from tinyllm.scheduler import Schedule
from tinyllm.trace.calls import Call
from tinyllm.trace.decisions import computes_last_token, request_label
from tinyllm.trace.ledger import Ledger
from tinyllm.trace.recorder import Recorder
from tinyllm.trace.text import plural


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
    phases = {"decode" if computes_last_token(entry) else "prefill" for entry in schedule.scheduled}
    return phases.pop() if len(phases) == 1 else ""


def _shares(names: Sequence[str], schedule: Schedule) -> str:
    entries = zip(names, schedule.scheduled, strict=True)
    texts = ((name, entry.query_len, entry.seq_len, plural(entry.seq_len, "token")) for name, entry in entries)
    return ", ".join(f"{name} computes {new} of {total} {tokens}" for name, new, total, tokens in texts)
