"""The tables of stages: one table for each run of equal layers, one row a stage, and in each row the reasons."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tinyllm.trace.costs import KIND_LETTERS, bound_by
from tinyllm.trace.fold import LayerRun, fold_layers, fold_requests
from tinyllm.trace.html.markup import Html, code, disclosure, element, exact, join, table
from tinyllm.trace.html.reasons import pairs, reasons, total_flops
from tinyllm.trace.html.words import show_dims, with_unit
from tinyllm.trace.record import Operation, StepRecord
from tinyllm.trace.text import show_count, show_number

HEADS = ("kind", "stage", "dimensions: symbols, then this step's numbers", "FLOP", "bytes", "FLOP/B")
AS_ABOVE = "A row that does not open has the reasons of a row above: the same name, the same sizes."


@dataclass(frozen=True)
class Row:
    """One line of a table: an operation, or that of many requests."""

    operations: tuple[Operation, ...]
    twins: tuple[Operation, ...]  # of the step before

    @cached_property
    def reasons(self) -> Html:
        """What it says when it is opened."""
        return reasons(self.operations, self.twins)

    @property
    def name(self) -> str:
        """As the terminal has it, or with the first and the last of many requests."""
        first, last = self.operations[0], self.operations[-1]
        if len(self.operations) > 1:
            return f"{first.label} {first.request}…{last.request}"
        return first.title


def layer_tables(step: StepRecord, previous: StepRecord | None, ridge: float | None) -> Iterator[Html]:
    """All rows of the step; layer 0 is open, the layers equal to each other are one closed table."""
    before = {operation.key: operation for operation in previous.operations} if previous else {}
    runs = fold_layers(step)
    known: set[Html] = set()
    for i, run in enumerate(runs):
        name = _title(run, is_first=i == 0)
        rows = [_row(operations, before) for operations in fold_requests(run.operations)]
        summary = join([element("strong", name), element("span", _costs(run, len(rows)), class_="costs")], " ")
        yield disclosure(
            summary, *_notes(rows, known), _table(f"step {step.index}, {name}", rows, known, ridge),
            is_open=run.layers in ((), (0,)) or len(runs) == 1, class_="layers",
            data_layers=run.count, data_rows=len(run.operations),
        )  # fmt: skip
        known |= {row.reasons for row in rows}


def _row(operations: tuple[Operation, ...], before: Mapping[tuple, Operation]) -> Row:
    return Row(operations, tuple(before[op.key] for op in operations if op.key in before))


def _title(run: LayerRun, is_first: bool) -> str:
    if not run.layers:
        return "before the layers" if is_first else "after the layers"
    first, last = run.layers[0], run.layers[-1]
    return f"layer {first}" if first == last else f"layers {first} to {last}, all alike"


def _costs(run: LayerRun, num_lines: int) -> str:
    num_rows = len(run.operations)
    rows = show_count(num_rows, "row") + (f" on {num_lines} lines" if num_lines < num_rows else "")
    each = f"{with_unit(run.flops, 'FLOP')}, {with_unit(run.num_bytes, 'B')}"
    if run.count == 1:
        return f"{rows}: {each}"
    together = f"{with_unit(run.count * run.flops, 'FLOP')}, {with_unit(run.count * run.num_bytes, 'B')}"
    return f"{rows} each, {run.count} times: a layer {each}; together {together}"


def _notes(rows: Sequence[Row], known: set[Html]) -> Iterator[Html]:
    folded = [row.operations[0].label for row in rows if len(row.operations) > 1]
    if folded:
        order = f"For each request in turn: {', then '.join(folded)}."
        yield element("p", element("small", f"{order} A line stands for all; open it for each request's share."))
    if any(row.reasons in known for row in rows):
        yield element("p", element("small", AS_ABOVE))


def _table(name: str, rows: Sequence[Row], known: set[Html], ridge: float | None) -> Html:
    heads = (*HEADS, "waits for") if ridge else HEADS
    return table(name, heads, (_line(row, row.reasons in known, ridge) for row in rows), class_="rows")


def _line(row: Row, is_known: bool, ridge: float | None) -> Html:
    kind, count = row.operations[0].stage.kind, len(row.operations)
    flops, num_bytes = total_flops(row.operations), sum(op.num_bytes for op in row.operations)
    intensity = "" if flops is None or not num_bytes else f"{flops / num_bytes:.1f}"
    cells = [
        element("td", element("abbr", KIND_LETTERS[kind], title=kind, class_=f"kind k{KIND_LETTERS[kind]}")),
        element("th", row.name, scope="row"),
        element("td", _dimensions(row, is_known), class_="dims"),
        element("td", "?" if flops is None else exact(flops, show_number(flops))),
        element("td", exact(num_bytes, show_number(num_bytes))),
        element("td", intensity),
    ]
    if ridge:
        is_unknown = flops is None and num_bytes
        cells.append(element("td", "?" if is_unknown else bound_by(flops, num_bytes, ridge)))
    return element("tr", *cells, data_requests=count if count > 1 else None)


def _dimensions(row: Row, is_known: bool) -> Html:
    """The row's shapes; opened, its reasons, where no row above has given them."""
    kept = pairs(row.operations)
    shapes = join([
        code(show_dims(row.operations, True)), " ", code(show_dims(row.operations, False)),
        element("small", f" {kept} pairs") if kept else None,
    ])  # fmt: skip
    return element("div", shapes) if is_known else disclosure(shapes, row.reasons)
