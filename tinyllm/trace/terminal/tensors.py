"""The tensor rows: one a stage, equal layers folded, what is as before in one line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.fold import MOST_APART, LayerRun, fold_layers
from tinyllm.trace.record import REQUEST_WORDS, Operation, StepRecord
from tinyllm.trace.shape_text import all_shapes, all_words, fill_template, in_numbers, in_symbols, with_slots
from tinyllm.trace.terminal.details import formula_row, grouped_rows, named_rows
from tinyllm.trace.terminal.options import NAME, Options
from tinyllm.trace.terminal.rows import cost_row, costs_of, note_row, sum_costs
from tinyllm.trace.text import elide, first_that_fits, show_decimal, show_list, show_number

STEP_WORDS = frozenset(word.name for word in WORDS.values() if word.scope == "step")


def section_rows(step: StepRecord, known: Mapping[tuple, Operation], options: Options) -> Iterator[str]:
    """The rows before, in and behind the layers: a layer that is not asked for in one line with those like it.

    known are the rows of the step before.
    """
    for run in fold_layers(step, apart=options.layers):
        if run.layers and run.layers[0] not in options.layers:
            yield _folded_row(run, step, options)
        else:
            yield from _shown_rows(run, step, known, options)


def _shown_rows(run: LayerRun, step: StepRecord, known: Mapping[tuple, Operation], options: Options) -> Iterator[str]:
    if run.layers:
        names = [f"layer {run.layers[0]} of {step.dims['num_layers']}", f"layer {run.layers[0]}"]
        name = first_that_fits(names, NAME - 1)
        yield cost_row(options, "=", name, _layer_notes(run, step), "", sum_costs(run.operations))
    yield from _rows(run.operations, step, known, options)


def _layer_notes(run: LayerRun, step: StepRecord) -> Iterator[str]:
    """How many rows it has, and why layer 0 has one less than the others."""
    rows = f"{len(run.operations)} rows"
    if run.layers == (0,) and len(step.layer(1)) == len(run.operations) + 1:
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
    folded = {operation.key for operation in unchanged}
    others = [operation for operation in _others(operations, step, options) if operation.key not in folded]
    folded |= {operation.key for operation in others}
    first_attend = next((operation for operation in operations if operation.function == "attend"), None)
    for operation in operations:
        if unchanged and operation is unchanged[0]:
            yield _unchanged_row(unchanged, options)
        if others and operation is others[0]:
            yield _others_row(others, options)
        if operation.key in folded:
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


def _others(operations: Sequence[Operation], step: StepRecord, options: Options) -> list[Operation]:
    """The rows of all requests but two, where there are many: the two are of both phases, if there are both."""
    if not options.is_brief or len(step.requests) <= MOST_APART:
        return []
    firsts = {request.is_decode: request.label for request in reversed(step.requests)}
    shown = firsts.values() if len(firsts) == 2 else [request.label for request in step.requests[:2]]
    return [operation for operation in operations if operation.request is not None and operation.request not in shown]


def _others_row(others: Sequence[Operation], options: Options) -> str:
    labels = list(dict.fromkeys(operation.request or "" for operation in others))
    names = ", ".join(dict.fromkeys(operation.label for operation in others))
    forms = [f"{names} of {', '.join(labels)}", f"{names} of {len(labels)} requests more"]
    return cost_row(options, " ", f"{options.branch}{len(others)} others", forms, "", sum_costs(others))


def _only_rows_differ(operation: Operation, known: Mapping[tuple, Operation]) -> bool:
    """Whether the step before had this row, equal but for the sizes of the step words."""
    twin = known.get(operation.key)
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


def rows_by_key(step: StepRecord) -> dict[tuple, Operation]:
    """The step's rows by where they stand, for the comparison with the next step."""
    return {operation.key: operation for operation in step.operations}


def _folded_row(run: LayerRun, step: StepRecord, options: Options) -> str:
    """One line for layers whose rows are equal: how many, what one of them costs, and all."""
    count, rows = len(run.layers), f"{len(run.operations)} rows"
    name = f"layers {run.layers[0]}..{run.layers[-1]}" if count > 1 else f"layer {run.layers[0]}"
    notes = [f"the same {count} times, {rows}", f"{count} times {rows}"] if count > 1 else [f"folded, {rows}"]
    flops = show_number(run.flops)
    each = [f"a layer: {flops}FLOP {show_number(run.num_bytes)}B", f"each {flops}FLOP"]
    operations = [operation for operation in step.operations if operation.layer in run.layers]
    return cost_row(options, " ", f"  {name}", notes, each, sum_costs(operations))


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
    stage, tree = operation.stage, options.branch if operation.layer is not None else ""
    symbolic = (stage.symbolic or stage.template).replace("->", options.arrow)
    symbols = partial(fill_template, axes=all_words(operation), show=in_symbols)
    numbers = partial(fill_template, axes=all_shapes(operation), show=in_numbers)
    return cost_row(
        options,
        KIND_LETTERS[stage.kind],
        name or tree + operation.title,
        map(symbols, _forms(symbolic, options.arrow)),
        map(numbers, _numeric_forms(operation, options.arrow)),
        costs_of(operation),
        operation.source,
        first_clause(operation.summary),
    )


def first_clause(summary: str) -> str:
    """The summary up to its first colon, semicolon or bracket."""
    clause = re.split(r"[:;.] |[:;.]$| \(", summary)[0]
    return clause if len(clause) > 10 else summary


def _numeric_forms(operation: Operation, arrow: str) -> Iterator[str]:
    """The template to be filled with numbers, then shorter ones.

    Of attention it says what goes in, and the pairs of a query and a key that the mask leaves of all; of a row that
    writes into the pool, how many slots.
    """
    template = operation.stage.template.replace(" -> ", arrow)
    if operation.pairs is None:
        yield with_slots(operation, template)
        yield from _forms(template, arrow)
        return
    kept, dense = operation.pairs
    both = template.partition(arrow)[0]
    yield f"{both} pairs {kept}/{dense}"
    yield f"{both} pairs {kept}/{dense}"  # again: it is whole, so a pipe takes no shorter one
    yield f"{both.partition('.')[0]} pairs {kept}/{dense}"
    yield f"pairs {kept}/{dense}"
    yield f"{kept}/{dense}"


def _forms(template: str, arrow: str) -> Iterator[str]:
    """The template, then shorter ones: without the weight or the keys, then the result alone."""
    yield template
    close = template.replace(f" {arrow} ", arrow)
    yield close
    yield re.sub(r"@\{weight\.T\}| of \{weight\}|\.\{k\}", "", close)
    result = close.rpartition(arrow)[2]
    yield arrow + result
    yield result
    first, gap, _ = result.partition(" ")
    yield first + (" ..." if gap else "")
