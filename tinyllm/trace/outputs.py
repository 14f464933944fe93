"""Where a traced run is written to while it goes on: lines for people, records for programs."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from tinyllm.trace.arguments import suggestions
from tinyllm.trace.html import render_page
from tinyllm.trace.record import RunRecord, StepRecord
from tinyllm.trace.sums import RunSums
from tinyllm.trace.terminal import (
    MAX_WIDTH,
    MIN_WIDTH,
    WIDTH,
    Options,
    render_answers,
    render_next,
    render_start,
    render_step,
    render_totals,
)
from tinyllm.trace.to_json import footer_to_json, header_to_json, step_to_json

STYLES = {"=": "bold", "\N{BOX DRAWINGS DOUBLE HORIZONTAL}": "bold",
          "M": "cyan", "W": "yellow", "G": "green", "P": "bright_blue"}  # fmt: skip


class Output(Protocol):
    """Something that a run is written to. Of the steps it keeps what it needs: records and text the sums, a page all."""

    def start(self, run: RunRecord) -> None:
        """Before the first step: the run has none yet, and no answers."""

    def step(self, step: StepRecord) -> None:
        """After each step."""

    def end(self, run: RunRecord) -> None:
        """After the last one: the run has its answers, but not the steps."""


def write_run(run: RunRecord, outputs: Iterable[Output]) -> None:
    """A run that is over, to each output in turn."""
    for output in outputs:
        output.start(run)
        for step in run.steps:
            output.step(step)
        output.end(run)


@dataclass
class JsonOutput:
    """One record a line."""

    file: TextIO
    _sums: RunSums = field(default_factory=RunSums)

    def start(self, run: RunRecord) -> None:
        """Write the header."""
        self._write(header_to_json(run))

    def step(self, step: StepRecord) -> None:
        """Write the step."""
        self._write(step_to_json(step))
        self._sums.add(step)

    def end(self, run: RunRecord) -> None:
        """Write the footer."""
        self._write(footer_to_json(run, self._sums))

    def _write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record, ensure_ascii=False) + "\n")


@dataclass
class HtmlOutput:
    """One page, opened and written when all is known. Until then it keeps every step, so a long run takes memory."""

    open_file: Callable[[], TextIO]
    ridge: float | None
    _steps: list[StepRecord] = field(default_factory=list)

    def start(self, run: RunRecord) -> None:
        """Nothing yet."""

    def step(self, step: StepRecord) -> None:
        """Keep the step."""
        self._steps.append(step)

    def end(self, run: RunRecord) -> None:
        """Write the page."""
        self.open_file().write(render_page(replace(run, steps=tuple(self._steps)), self.ridge))


def terminal_width() -> int | None:
    """The window's columns, as far as rows can be laid out for them; None where there is no window."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):  # a pipe, a file, a stream of a test or a notebook
        return None
    return min(MAX_WIDTH, max(MIN_WIDTH, columns)) if columns else WIDTH


@dataclass
class TextOutput:
    """The trace as lines, coloured by kind at a terminal; never wrapped, never cut to the window, never markup."""

    args: argparse.Namespace
    options: Options
    console: Console
    _sums: RunSums = field(default_factory=RunSums)
    _previous: StepRecord | None = None

    def start(self, run: RunRecord) -> None:
        """Print the header and the prompts."""
        self._print_rows(render_start(run, self.options))

    def step(self, step: StepRecord) -> None:
        """Print the step."""
        if self.options.step in (None, step.index):
            self._print_rows([""])
        self._print_rows(render_step(step, self._previous, self.options))
        self._sums.add(step)
        self._previous = step

    def end(self, run: RunRecord) -> None:
        """Print the sums, the answers and what to try next."""
        self._print_rows(render_totals(self._sums, self.options))
        if run.answers:
            self._print_plain(["", *render_answers(run, self.options)])
        self._print_plain(
            render_next(suggestions(self.args, run.dims["num_layers"], self._sums.total.num_steps), self.options)
        )

    def _print_rows(self, lines: Iterable[str]) -> None:
        self._print(Text(line, STYLES.get(line[:1], "")) for line in lines)

    def _print_plain(self, lines: Iterable[str]) -> None:
        """Lines that begin with no kind letter, whatever their first letter is."""
        self._print(map(Text, lines))

    def _print(self, lines: Iterable[Text]) -> None:
        for line in lines:
            self.console.print(line, soft_wrap=True, crop=False, overflow="ignore")
