"""The tensor rows: one a stage, equal layers folded, what is as before in one line."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.record import REQUEST_WORDS, Operation, StepRecord, TensorRecord
from tinyllm.trace.terminal.details import formula_row, grouped_rows, named_rows
from tinyllm.trace.terminal.options import NAME, Options
from tinyllm.trace.terminal.rows import cost_row, costs_of, note_row, sum_costs
from tinyllm.trace.terminal.text import (
    elide,
    first_that_fits,
    show_decimal,
    show_list,
    show_number,
    show_numbers,
    show_symbols,
)

STEP_WORDS = frozenset(word.name for word in WORDS.values() if word.scope == "step")

MOST_REQUESTS = 3  # whose rows are all shown; of more, those of two


@dataclass(frozen=True)
class Section:
    """Rows that stand together: those before, in one layer, or after the layers."""

    layer: int | None
    operations: tuple[Operation, ...]


def cut_into_sections(step: StepRecord) -> list[Section]:
    """Cut the step into runs of one layer; the sampler's rows come with the candidates."""
    sections: list[Section] = []
    for operation in step.operations:
        if sections and sections[-1].layer == operation.layer:
            sections[-1] = Section(operation.layer, (*sections[-1].operations, operation))
        else:
            sections.append(Section(operation.layer, (operation,)))
    return sections


def render_section(
    section: Section, step: StepRecord, known: Mapping[tuple, Operation], options: Options
) -> Iterator[str]:
    """The rows of a section: whole, or where its layer is not asked for as one line with its neighbours."""
    num_layers = step.dims["num_layers"]
    layer = section.layer
    if layer is None:
        yield from _rows(section.operations, step, known, options)
        return
    if layer not in options.layers:
        ran = {operation.layer for operation in step.operations}  # a failed step does not come to all of them
        folded = [i for i in range(num_layers) if i in ran and i not in options.layers]
        if layer == folded[0]:
            yield from _folded_layers(step, folded, options)
        return
    costs = sum_costs(section.operations)
    name = first_that_fits([f"layer {layer} of {num_layers}", f"layer {layer}"], NAME - 1)
    yield cost_row(options, "=", name, _layer_notes(section, step), "", costs)
    yield from _rows(section.operations, step, known, options)


def _layer_notes(section: Section, step: StepRecord) -> Iterator[str]:
    """How many rows it has, and why layer 0 has one less than the others."""
    rows = f"{len(section.operations)} rows"
    if section.layer == 0 and len(step.layer(1)) == len(section.operations) + 1:
        yield f"{rows}; no residual to add yet: one less than the others"
        yield f"{rows}; no residual to add yet"
    yield rows


def residual_row(step: StepRecord, options: Options) -> Iterator[str]:
    """How the residual stream grows from layer to layer, where somebody measured it."""
    values = step.residual_rms
    if values:
        is_each = len(values) == step.dims["num_layers"]
        what = f"layers 0..{len(values) - 1}" if is_each else f"{len(values)} places"
        left = f"  {'residual rms':{NAME}}{what:{options.layout.what}}"
        yield left + elide([show_decimal(value) for value in values], options.end - len(left), " ")


# --- the rows of a section ------------------------------------------------------------------------------------------------


def _rows(
    operations: Sequence[Operation], step: StepRecord, known: Mapping[tuple, Operation], options: Options
) -> Iterator[str]:
    """The rows that differ from the step before in more than the number of rows; the rest in one line.

    Of many requests two are shown, and the rows of the others in one line.
    """
    unchanged = [operation for operation in operations if _only_rows_differ(operation, known)]
    alike = [operation for operation in _alike(operations, step, options) if operation not in unchanged]
    folded = {id(operation) for operation in (*unchanged, *alike)}
    first_attend = next((operation for operation in operations if operation.function == "attend"), None)
    for operation in operations:
        if unchanged and operation is unchanged[0]:
            yield _unchanged_row(unchanged, options)
        if alike and operation is alike[0]:
            yield _alike_row(alike, options)
        if id(operation) in folded:
            continue
        yield operation_row(operation, options)
        if operation.function == "gather_rows":
            yield from _gather_note(operations, step, options)
        if options.full:
            yield from formula_row(operation, options)
            yield from named_rows(operation, options)
        elif operation is first_attend and not known:
            yield from grouped_rows(operation, options)


def _unchanged_row(unchanged: Sequence[Operation], options: Options) -> str:
    names = ", ".join(dict.fromkeys(operation.label for operation in unchanged))
    tree = options.branch if unchanged[0].layer is not None else ""
    return cost_row(options, " ", f"{tree}{len(unchanged)} as before", names, "", sum_costs(unchanged))


def _alike(operations: Sequence[Operation], step: StepRecord, options: Options) -> list[Operation]:
    """The rows of all requests but two, where there are more than three: the two are of both phases, if there are both."""
    if not options.is_brief or len(step.requests) <= MOST_REQUESTS:
        return []
    firsts = {request.is_decode: request.label for request in reversed(step.requests)}
    shown = firsts.values() if len(firsts) == 2 else [request.label for request in step.requests[:2]]
    return [operation for operation in operations if operation.request is not None and operation.request not in shown]


def _alike_row(alike: Sequence[Operation], options: Options) -> str:
    labels = list(dict.fromkeys(operation.request or "" for operation in alike))
    names = ", ".join(dict.fromkeys(operation.label for operation in alike))
    count = f"{len(labels)} other requests"
    forms = [f"{names} of {', '.join(labels)}", f"{names} of {count}"]
    return cost_row(options, " ", f"{options.branch}{len(alike)} alike", forms, "", sum_costs(alike))


def _only_rows_differ(operation: Operation, known: Mapping[tuple, Operation]) -> bool:
    """Whether the step before had this row, equal but for the sizes of the step words."""
    twin = known.get(_place(operation))
    if twin is None or operation.stage.kind == "cache write":
        return False  # new slots: never "as before"
    return _fixed_sizes(operation) == _fixed_sizes(twin)


def _fixed_sizes(operation: Operation) -> dict[str, list[tuple[str, int]]]:
    """What goes in and comes out, without the sizes that every step has anew; a list is its first item."""
    found: dict[str, list[tuple[str, int]]] = {}
    for name in (*operation.inputs, *operation.outputs):
        tensor = operation.tensors[name]
        varying = STEP_WORDS if tensor.item is None else STEP_WORDS | REQUEST_WORDS
        sizes = [(word, n) for word, n in zip(tensor.words, tensor.shape, strict=True) if word not in varying]
        found.setdefault(name.partition("[")[0], sizes)
    return found


def rows_by_place(step: StepRecord) -> dict[tuple, Operation]:
    """The step's rows by where they stand, for the comparison with the next step."""
    return {_place(operation): operation for operation in step.operations}


def _place(operation: Operation) -> tuple:
    return operation.path, operation.label, operation.request


def _folded_layers(step: StepRecord, folded: Sequence[int], options: Options) -> Iterator[str]:
    """One line for each run of layers whose rows are equal."""
    runs: list[list[int]] = []
    for layer in folded:
        is_next = runs and runs[-1][-1] == layer - 1
        if is_next and _fold_key(step, layer) == _fold_key(step, runs[-1][0]):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    for run in runs:
        operations = [operation for layer in run for operation in step.layer(layer)]
        names = f"layers {run[0]}..{run[-1]}" if len(run) > 1 else f"layer {run[0]}"
        each = sum_costs(step.layer(run[0]))
        per_layer = f"a layer: {show_number(each.flops or 0)}FLOP {show_number(each.num_bytes)}B"
        count = f"{len(step.layer(run[0]))} rows"
        notes = (
            [f"the same {len(run)} times, {count}", f"{len(run)} times {count}"]
            if len(run) > 1
            else [f"folded, {count}"]
        )
        yield cost_row(options, " ", f"  {names}", notes, [per_layer, f"each {show_number(each.flops or 0)}FLOP"],
                       sum_costs(operations))  # fmt: skip


def _fold_key(step: StepRecord, layer: int) -> list[tuple]:
    return [operation.shape_key() for operation in step.layer(layer)]


def _gather_note(operations: Sequence[Operation], step: StepRecord, options: Options) -> Iterator[str]:
    """What the LM head would have cost on every row."""
    head = next((operation for operation in operations if operation.function == "lm_head"), None)
    if head and head.flops and head.sizes["num_tokens"] > head.sizes["num_logits"]:
        dense = head.flops // head.sizes["num_logits"] * head.sizes["num_tokens"]
        saved = f"saves {show_number(dense - head.flops)}FLOP"
        why = f"{saved} of {show_number(dense)}, the LM head's on all T rows"
        indices = step.batch_values["logits_indices"]
        rows = f"rows {show_list(indices, options.list_width)} alone" if len(indices) > 1 else f"row {indices[0]} alone"
        yield note_row(options, [f"! {rows}: {why}", f"! {why}", f"! {saved}"])


# --- one row --------------------------------------------------------------------------------------------------------------


def operation_row(operation: Operation, options: Options, name: str = "") -> str:
    """Kind letter, name, what goes in and comes out in symbols and in numbers, costs."""
    stage = operation.stage
    template, symbolic = (
        text.replace(" -> ", f" {options.arrow} ") for text in (stage.template, stage.symbolic or stage.template)
    )
    tree = options.branch if operation.layer is not None else ""
    if operation.dense_flops is not None and operation.flops:
        numeric = _pair_forms(template, operation)
    else:
        numeric = _forms(template.replace(f" {options.arrow} ", options.arrow), operation, show_numbers, options)
    return cost_row(
        options,
        KIND_LETTERS[stage.kind],
        name or tree + title_of(operation),
        _forms(symbolic, operation, show_symbols, options),
        numeric,
        costs_of(operation),
        operation.source,
        first_clause(operation.summary),
    )


def title_of(operation: Operation) -> str:
    """The label, and the request where the row is one request's."""
    return operation.label + (f" {operation.request}" if operation.request else "")


def first_clause(summary: str) -> str:
    """The summary up to its first colon, semicolon or bracket."""
    clause = re.split(r"[:;.] |[:;.]$| \(", summary)[0]
    return clause if len(clause) > 10 else summary


def _pair_forms(template: str, operation: Operation) -> Iterator[str]:
    """What goes into attention, and the pairs of a query and a key that the mask leaves of all."""
    query_len, seq_len = operation.sizes["query_len"], operation.sizes["seq_len"]
    pairs = f"{query_len * seq_len - query_len * (query_len - 1) // 2}/{query_len * seq_len}"
    both = template.partition(" ")[0]
    both, first = (_fill(text, operation, show_numbers) for text in (both, both.partition(".")[0]))
    yield f"{both} pairs {pairs}"
    yield f"{first} pairs {pairs}"
    yield f"pairs {pairs}"
    yield pairs


Show = Callable[[TensorRecord], str]


def _forms(template: str, operation: Operation, show: Show, options: Options) -> Iterator[str]:
    """The template filled, then shorter versions: without the weight or the keys, then the result alone."""
    arrow = options.arrow
    yield _fill(template, operation, show)
    close = template.replace(f" {arrow} ", arrow)
    yield _fill(close, operation, show)
    yield _fill(re.sub(r"@\{weight\.T\}| of \{weight\}|\.\{k\}", "", close), operation, show)
    yield _fill(arrow + close.rpartition(arrow)[2], operation, show)
    yield _fill(close.rpartition(arrow)[2], operation, show)
    first, gap, _ = close.rpartition(arrow)[2].partition(" ")
    yield _fill(first, operation, show) + (" ..." if gap else "")


def _fill(template: str, operation: Operation, show: Show) -> str:
    """Put each named tensor's dimensions where the template names it; ``.T`` turns them as the product uses them."""

    def insert(match: re.Match[str]) -> str:
        name, transposed = match[1], match[2]
        tensor = operation.tensors.get(name)
        if tensor is None:
            return "?"
        return show(replace(tensor, words=tensor.words[::-1], shape=tensor.shape[::-1]) if transposed else tensor)

    return re.sub(r"\{([\w\[\]]+)(\.T)?\}", insert, template)
