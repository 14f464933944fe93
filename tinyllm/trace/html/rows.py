"""The tables of stages: one table for each run of equal layers, one row a stage, and under each row the reasons."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.html.markup import Html, code, disclosure, element, exact, join, table
from tinyllm.trace.html.words import bound_by, show_dims, show_shape, with_numbers, with_unit
from tinyllm.trace.record import Operation, StepRecord, TensorRecord
from tinyllm.trace.terminal.text import plural, show_number

HEADS = ("kind", "stage", "dimensions: symbols, then this step's numbers", "FLOP", "bytes", "FLOP/B")


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers whose rows are equal, or the rows outside all layers (then layers is empty)."""

    layers: tuple[int, ...]
    operations: tuple[Operation, ...]  # of one of them

    @property
    def count(self) -> int:
        """How many times the rows ran."""
        return max(1, len(self.layers))

    @property
    def flops(self) -> int:
        """Of one layer."""
        return sum(operation.flops or 0 for operation in self.operations)

    @property
    def num_bytes(self) -> int:
        """Of one layer."""
        return sum(operation.num_bytes for operation in self.operations)


def fold_layers(step: StepRecord) -> list[LayerRun]:
    """The step's rows in order, neighbouring equal layers once."""
    sections: list[list[Operation]] = []
    for operation in step.operations:
        if sections and sections[-1][0].layer == operation.layer:
            sections[-1].append(operation)
        else:
            sections.append([operation])
    runs: list[LayerRun] = []
    for section in sections:
        layer = section[0].layer
        if runs and runs[-1].layers and layer is not None and _keys(runs[-1].operations) == _keys(section):
            runs[-1] = LayerRun((*runs[-1].layers, layer), runs[-1].operations)
        else:
            runs.append(LayerRun(() if layer is None else (layer,), tuple(section)))
    return runs


def _keys(operations: Sequence[Operation]) -> list[tuple]:
    return [operation.shape_key() for operation in operations]


def layer_tables(step: StepRecord, previous: StepRecord | None, ridge: float | None) -> Iterator[Html]:
    """All rows of the step; layer 0 is open, the layers equal to each other are one closed table."""
    before = {_place(operation): operation for operation in previous.operations} if previous else {}
    runs = fold_layers(step)
    for i, run in enumerate(runs):
        name = _title(run, is_first=i == 0)
        rows = _table(f"step {step.index}, {name}", run, before, ridge)
        is_open = run.layers in ((), (0,)) or len(runs) == 1
        costs = _costs(run)
        summary = join([element("strong", name), element("span", costs, class_="costs")], " ")
        yield disclosure(summary, rows, is_open=is_open, class_="layers", data_layers=run.count,
                         data_rows=len(run.operations))  # fmt: skip


def _title(run: LayerRun, is_first: bool) -> str:
    if not run.layers:
        return "before the layers" if is_first else "after the layers"
    first, last = run.layers[0], run.layers[-1]
    return f"layer {first}" if first == last else f"layers {first} to {last}, all alike"


def _costs(run: LayerRun) -> str:
    rows = f"{len(run.operations)} {plural(len(run.operations), 'row')}"
    each = f"{with_unit(run.flops, 'FLOP')}, {with_unit(run.num_bytes, 'B')}"
    if run.count == 1:
        return f"{rows}: {each}"
    together = f"{with_unit(run.count * run.flops, 'FLOP')}, {with_unit(run.count * run.num_bytes, 'B')}"
    return f"{rows} each, {run.count} times: a layer {each}; together {together}"


def _place(operation: Operation) -> tuple:
    return operation.path, operation.label, operation.request


def _table(name: str, run: LayerRun, before: Mapping[tuple, Operation], ridge: float | None) -> Html:
    heads = (*HEADS, "waits for") if ridge else HEADS
    return table(name, heads, (_row(op, before.get(_place(op)), ridge) for op in run.operations), class_="rows")


def _row(operation: Operation, twin: Operation | None, ridge: float | None) -> Html:
    letter = KIND_LETTERS[operation.stage.kind]
    flops, num_bytes, intensity = operation.flops, operation.num_bytes, operation.intensity
    name = operation.label + (f" {operation.request}" if operation.request else "")
    cells = [
        element("td", element("abbr", letter, title=operation.stage.kind, class_=f"kind k{letter}")),
        element("th", name, scope="row"),
        element("td", _dimensions(operation, twin), class_="dims"),
        element("td", "?" if flops is None else exact(flops, show_number(flops)), class_="n"),
        element("td", exact(num_bytes, show_number(num_bytes)), class_="n"),
        element("td", "" if intensity is None else f"{intensity:.1f}", class_="n"),
    ]
    if ridge:
        cells.append(element("td", bound_by(flops, num_bytes, ridge)))
    return element("tr", *cells)


def _dimensions(operation: Operation, twin: Operation | None) -> Html:
    """The row's shapes; opened, its meaning, its formulas, where it stands and its named values."""
    summary = join([code(show_dims(operation, True)), " ", code(show_dims(operation, False)), _pairs(operation)])
    was = None
    if twin is not None and (numbers := show_dims(twin, False)) != show_dims(operation, False):
        was = element("li", "in the step before: ", code(numbers))
    items = [*_formulas(operation), was, element("li", "source: ", code(f"tinyllm/{operation.source}"))]
    return disclosure(summary, element("p", operation.summary), element("ul", *items), *_named(operation))


def _pairs(operation: Operation) -> Html | None:
    if operation.dense_flops is None or not operation.flops:
        return None
    query_len, seq_len = operation.sizes["query_len"], operation.sizes["seq_len"]
    pairs = query_len * seq_len - query_len * (query_len - 1) // 2
    return element("small", f" {pairs}/{query_len * seq_len} pairs")


def _formulas(operation: Operation) -> Iterator[Html]:
    stage, sizes = operation.stage, operation.sizes
    if stage.flops is None:
        yield element("li", "FLOP: not known as a formula")
    elif operation.flops:
        yield _formula("FLOP", stage.flops, sizes, operation.flops)
    if operation.dense_flops is not None and operation.dense_flops != operation.flops:
        yield element("li", f"without the causal mask it would be {operation.dense_flops:,} FLOP")
    if operation.bytes_read:
        yield _formula("bytes read", stage.read, sizes, operation.bytes_read)
    if operation.bytes_written:
        yield _formula("bytes written", stage.write, sizes, operation.bytes_written)
    if not operation.num_bytes:
        yield element("li", "a view: no byte moves")


def _formula(name: str, formula: str, sizes: Mapping[str, int], value: int) -> Html:
    return element("li", f"{name}: ", code(formula), " = ", code(with_numbers(formula, sizes)), f" = {value:,}")


def _named(operation: Operation) -> Iterator[Html]:
    """The values with names inside the function, in attention its six steps."""
    if operation.locals:
        items = (_value(operation.tensors[name]) for name in operation.locals)
        yield element("p", "Inside, by name:")
        yield element("ol", *items)


def _value(tensor: TensorRecord) -> Html:
    view = f" view of {tensor.view_of}" if tensor.view_of else ""
    return element("li", code(f"{tensor.name} {show_shape(tensor, True)} = {show_shape(tensor, False)}"), view or None)
