"""The tensor rows: one a stage, equal layers folded, what is as before in one line."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.record import Operation, StepRecord, TensorRecord
from tinyllm.trace.terminal.text import (
    NAME,
    NUMERIC,
    SYMBOLIC,
    WIDTH,
    cost_row,
    cut_to,
    first_that_fits,
    show_number,
    show_numbers,
    show_symbols,
)

STEP_WORDS = frozenset(word.name for word in WORDS.values() if word.scope == "step")


@dataclass(frozen=True)
class Options:
    """What to print. layers lists the decoder layers shown row by row; full shows every row and every named tensor."""

    layers: tuple[int, ...] = (0,)
    full: bool = False


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
        yield from _rows(section.operations, known, options)
        return
    if layer not in options.layers:
        folded = [i for i in range(num_layers) if i not in options.layers]
        if layer == folded[0]:
            yield from _folded_layers(step, folded)
        return
    yield f"layer {layer} of {num_layers}"
    yield from _rows(section.operations, known, options)
    flops, num_bytes = sum_costs(section.operations)
    yield cost_row("=", f"layer {layer}", f"{len(section.operations)} rows", "", flops, num_bytes, False)


def _rows(operations: Sequence[Operation], known: Mapping[tuple, Operation], options: Options) -> Iterator[str]:
    """The rows that differ from the step before in more than the number of rows; the rest in one line."""
    unchanged = [operation for operation in operations if _only_rows_differ(operation, known)]
    as_before = _unchanged_row(unchanged) if unchanged else ""
    first_attend = next((operation for operation in operations if operation.function == "attend"), None)
    for operation in operations:
        if operation in unchanged:
            if operation is unchanged[0]:
                yield as_before
            continue
        yield _operation_row(operation)
        if operation.function == "gather_rows":
            yield from _gather_note(operations)
        if options.full or (operation is first_attend and not known):
            yield from _named_rows(operation)


def _unchanged_row(unchanged: Sequence[Operation]) -> str:
    flops, num_bytes = sum_costs(unchanged)
    names = ", ".join(dict.fromkeys(operation.label for operation in unchanged))
    tree = "| " if unchanged[0].layer is not None else ""
    count = f"{tree}{len(unchanged)} as before"
    return cost_row(" ", count, cut_to(names, SYMBOLIC + NUMERIC), "", flops, num_bytes, False)


def _only_rows_differ(operation: Operation, known: Mapping[tuple, Operation]) -> bool:
    """Whether the step before had this row, equal but for the sizes of the step words."""
    twin = known.get(_place(operation))
    if twin is None or operation.stage.kind == "cache write" or operation.function == "sample":
        return False  # new slots, new tokens: never "as before"
    names = (*operation.inputs, *operation.outputs)
    if names != (*twin.inputs, *twin.outputs):
        return False
    return all(_fixed_sizes(operation.tensors[name]) == _fixed_sizes(twin.tensors[name]) for name in names)


def _fixed_sizes(tensor: TensorRecord) -> list[tuple[str, int]]:
    return [(word, size) for word, size in zip(tensor.words, tensor.shape, strict=True) if word not in STEP_WORDS]


def rows_by_place(step: StepRecord) -> dict[tuple, Operation]:
    """The step's rows by where they stand, for the comparison with the next step."""
    return {_place(operation): operation for operation in step.operations}


def _place(operation: Operation) -> tuple:
    return operation.path, operation.label, operation.request


def _folded_layers(step: StepRecord, folded: Sequence[int]) -> Iterator[str]:
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
        flops, num_bytes = sum_costs(operations)
        names = f"layers {run[0]}..{run[-1]}" if len(run) > 1 else f"layer {run[0]}"
        each, each_bytes = sum_costs(step.layer(run[0]))
        per_layer = f"a layer: {show_number(each)}FLOP {show_number(each_bytes)}B"
        count = f"{len(step.layer(run[0]))} rows"
        note = f"the same {len(run)} times, {count}" if len(run) > 1 else f"folded, {count}"
        yield cost_row(" ", f"  {names}", note, per_layer, flops, num_bytes, False)
    if 0 not in folded and folded[0] == 1:
        yield f"{'':{NAME + 2}}(one add_residual more than layer 0, which has no residual yet; --layers all)"


def _fold_key(step: StepRecord, layer: int) -> list[tuple]:
    return [operation.shape_key() for operation in step.layer(layer)]


def _operation_row(operation: Operation) -> str:
    stage = operation.stage
    tree = "| " if operation.layer is not None else ""
    name = operation.label + (f" {operation.request}" if operation.request else "")
    symbolic = first_that_fits(_forms(stage.template, operation, show_symbols), SYMBOLIC - 1)
    numeric = first_that_fits(_forms(stage.template.replace(" -> ", "->"), operation, show_numbers), NUMERIC - 1)
    if operation.dense_flops is not None and operation.flops:
        pairs = f" pairs {_causal_pairs(operation)}/{operation.sizes['query_len'] * operation.sizes['seq_len']}"
        short = _fill(stage.template.split(" -> ")[0], operation, show_numbers)
        numeric = cut_to(short + pairs, NUMERIC - 1)
    letter = KIND_LETTERS[stage.kind]
    return cost_row(
        letter, tree + name, symbolic, numeric, operation.flops, operation.num_bytes, operation.flops is None
    )


def _gather_note(operations: Sequence[Operation]) -> Iterator[str]:
    """What the LM head would have cost on every row."""
    head = next((operation for operation in operations if operation.function == "lm_head"), None)
    if head and head.flops and head.sizes["num_tokens"] > head.sizes["num_logits"]:
        dense = head.flops // head.sizes["num_logits"] * head.sizes["num_tokens"]
        yield f"{'':{NAME + 2}}! saves {show_number(dense - head.flops)}FLOP: the LM head on all T rows would cost {show_number(dense)}"


def _causal_pairs(operation: Operation) -> int:
    query_len, seq_len = operation.sizes["query_len"], operation.sizes["seq_len"]
    return query_len * seq_len - query_len * (query_len - 1) // 2


def _named_rows(operation: Operation) -> Iterator[str]:
    """The locals of a stage, each with its own words: in attention these are the six steps."""
    for name in operation.locals:
        tensor = operation.tensors[name]
        view = f"  view of {tensor.view_of}" if tensor.view_of else ""
        left = f"  {cut_to('|. ' + name, NAME - 1):{NAME}}"
        yield cut_to(f"{left}{show_symbols(tensor):{SYMBOLIC}}{show_numbers(tensor)}{view}", WIDTH)


Show = Callable[[TensorRecord], str]


def _forms(template: str, operation: Operation, show: Show) -> Iterator[str]:
    """The template filled, then shorter versions: without the weight, then the result alone."""
    yield _fill(template, operation, show)
    yield _fill(template.replace(" -> ", "->"), operation, show)
    without_weight = re.sub(r"@\{weight\.T\}| of \{weight\}", "", template)
    yield _fill(without_weight, operation, show)
    yield _fill("->" + template.rpartition("->")[2], operation, show)


def _fill(template: str, operation: Operation, show: Show) -> str:
    """Put each named tensor's dimensions where the template names it; ``.T`` turns them as the product uses them."""

    def insert(match: re.Match[str]) -> str:
        name, transposed = match[1], match[2]
        tensor = operation.tensors.get(name)
        if tensor is None:
            return "?"
        return show(_transposed(tensor) if transposed else tensor)

    return re.sub(r"\{([\w\[\]]+)(\.T)?\}", insert, template)


def _transposed(tensor: TensorRecord) -> TensorRecord:
    return TensorRecord(tensor.name, tensor.words[::-1], tensor.shape[::-1], tensor.dtype, 0, tensor.storage, False)


def sum_costs(operations: Sequence[Operation]) -> tuple[int, int]:
    """FLOPs and bytes of several rows."""
    return sum(operation.flops or 0 for operation in operations), sum(operation.num_bytes for operation in operations)
