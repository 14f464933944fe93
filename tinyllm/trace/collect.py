"""From the recorder's calls to the rows of a step: stages with their costs, told in the model's own words."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from tinyllm.shapes import WORDS
from tinyllm.trace.calls import Call, Value
from tinyllm.trace.costs import STAGES, Stage, count
from tinyllm.trace.dims import FunctionSpec, Words
from tinyllm.trace.ledger import Ledger
from tinyllm.trace.reading import PACKAGE
from tinyllm.trace.record import Operation, TensorRecord

MAX_RUNS = 2  # of equal shapes in a list that a row spells out
Rows = dict[Any, dict[str, Operation]]  # by all that a row follows from, and then by its path


@dataclass
class Memo:
    """The rows of the step before: the next one takes those that are the same, so that long runs stay small."""

    sizes: Mapping[str, int] = field(default_factory=dict)  # of the step's words
    rows: Rows = field(default_factory=dict)


def collect_operations(
    calls: Iterable[Call],
    ledger: Ledger,
    request_labels: Sequence[str],
    memo: Memo | None = None,
    has_times: bool = False,
) -> tuple[Operation, ...]:
    """Every stage of a step in order of time. The ledger must have checked the calls.

    memo, kept from step to step, spares making what the step before had. has_times gives each row its measured time: that
    of its call without the stages inside it, which have rows of their own.
    """
    memo = memo or Memo()
    before, now = memo.rows if memo.sizes == ledger.sizes else {}, {}
    operations: list[Operation] = []

    def visit(call: Call, aliases: Mapping[str, str], request: str | None) -> int:
        """Collect the call; return the nanoseconds of the stages in it."""
        if call.name == "attend_request":
            request = request_labels[call.index]
        inner_ns = sum([visit(child, _unify(child, call, aliases), request) for child in call.children])
        if call.name not in STAGES or call.has_failed:
            return inner_ns
        operation = _find_operation(call, aliases, ledger, request, before, now)
        time_us = (call.elapsed_ns - inner_ns) / 1000 if has_times else None
        operations.append(_with_requested(operation, call, time_us))
        return call.elapsed_ns

    for root in calls:
        visit(root, {}, None)
    memo.sizes, memo.rows = dict(ledger.sizes), now
    return tuple(operations)


def _with_requested(operation: Operation, call: Call, time_us: float | None) -> Operation:
    """The row with what was recorded on request only."""
    if not call.is_measured and call.kernels is None and time_us is None:
        return operation
    tensors, kernels = operation.tensors, _kernels_of(call)
    if call.is_measured:
        stats = {value.name: value.stats for value in call.values}
        tensors = {name: replace(tensor, stats=stats.get(name)) for name, tensor in tensors.items()}
    return replace(operation, tensors=tensors, kernels=kernels, time_us=time_us)


def _kernels_of(call: Call) -> tuple[str, ...]:
    """The operators of the call and of its helpers, in order of time; a stage inside it lists its own."""
    found: list[tuple[int, str]] = []

    def visit(call: Call) -> None:
        found.extend(call.kernels or ())
        for child in call.children:
            if child.name not in STAGES:
                visit(child)

    visit(call)
    return tuple(kernel for _, kernel in sorted(found))


@functools.cache
def _has_call_words(words: Words) -> bool:
    return any(word in WORDS and WORDS[word].scope == "call" for word in words)


def _unify(child: Call, parent: Call, parent_aliases: Mapping[str, str]) -> dict[str, str]:
    """What the caller calls the child's per-call words: ``out_size`` is ``qkv_size`` where the result is named qkv.

    A tensor of the child is the caller's where both are the same object: an argument is one of the caller's names
    assigned before the call, a result one assigned by it.
    """
    aliases: dict[str, str] = {}
    for value in child.values:
        if value.words is None or not _has_call_words(value.words) or value.role not in ("argument", "result"):
            continue
        twin = next((theirs for theirs in parent.values if _is_same(value, theirs, child.line)), None)
        if twin is None or twin.words is None:
            continue
        for word, theirs in zip(value.words, twin.words, strict=True):
            if word in WORDS and WORDS[word].scope == "call":
                aliases[word] = parent_aliases.get(theirs, theirs)
    return aliases


def _is_same(value: Value, theirs: Value, call_line: int) -> bool:
    if theirs.identity != value.identity or theirs.sizes != value.sizes or theirs.words is None:
        return False
    if value.role == "argument":
        return theirs.role in ("argument", "field") or (theirs.role == "local" and theirs.line < call_line)
    return theirs.role in ("local", "result")


def _find_operation(
    call: Call, aliases: Mapping[str, str], ledger: Ledger, request: str | None, before: Rows, now: Rows
) -> Operation:
    """The call's row: that of an equal call in the step before, another layer's under a new path, or a new one."""
    facts = [(v.name, v.words, v.sizes, v.dtype, v.storage, v.is_contiguous) for v in call.values]
    views, label = tuple(_views_of(call)), _label(call)
    key = id(call.spec), label, request, tuple(facts), views, tuple(aliases.items()), tuple(call.ints.items())
    rows, old = now.setdefault(key, {}), before.get(key, {})
    if call.path not in rows:
        twin = old.get(call.path) or next(iter((rows or old).values()), None)
        if twin is None:
            twin = _operation(call, aliases, ledger, request, label, views)
        is_here = twin.path == call.path
        rows[call.path] = (
            twin if is_here else Operation(**{**vars(twin), "path": call.path, "layer": _layer_of(call.path)})
        )
    return rows[call.path]


def _operation(
    call: Call,
    aliases: Mapping[str, str],
    ledger: Ledger,
    request: str | None,
    label: str,
    views: Sequence[str | None],
) -> Operation:
    stage, sizes = _spell_lists(STAGES[call.name], call), ledger.sizes_of(call)
    pairs = [(value, view) for value, view in zip(call.values, views, strict=True) if value.words is not None]
    tensors = {value.name: _tensor(value, call, aliases, view) for value, view in pairs}
    sizes["e"] = _element_size(call)
    return Operation(
        path=call.path,
        label=label,
        function=call.name,
        stage=stage,
        layer=_layer_of(call.path),
        request=request,
        tensors=tensors,
        inputs=tuple(value.name for value in call.values if _is_input(value) and value.name in tensors),
        outputs=tuple(v.name for v in call.values if _is_output(v, stage) and v.name in tensors),
        locals=tuple(
            row.name
            for row in call.rows()
            if isinstance(row, Value) and row.role == "local" and row.words and not _is_input(row)
        ),
        sizes=sizes,
        flops=None if stage.flops is None else count(stage.flops, sizes),
        dense_flops=None if stage.dense_flops is None else count(stage.dense_flops, sizes),
        bytes_read=count(stage.read, sizes),
        bytes_written=count(stage.write, sizes),
        source=f"{call.spec.file.relative_to(PACKAGE).as_posix()}:{call.spec.first_line}",
        summary=call.spec.summary,
    )


def _is_input(value: Value) -> bool:
    """Arguments, and the weight that a module takes from itself."""
    return value.role == "argument" or (value.role == "local" and value.storage == "weight")


def _is_output(value: Value, stage: Stage) -> bool:
    """Results, and the argument that is changed in place."""
    return value.role == "result" or (value.role == "argument" and value.name == stage.updates)


def _spell_lists(stage: Stage, call: Call) -> Stage:
    """The stage with the items of a list where its template names the list: ``{pieces[0]}+3x{pieces[1]}``.

    Neighbours of one shape are counted; of more than two such runs the first and the last are named. Where the list was
    none that the recorder could read, the row is its result.
    """
    template = stage.template
    lists: dict[str, list[Value]] = {}
    for value in call.values:
        if value.item is not None:
            lists.setdefault(value.name.partition("[")[0], []).append(value)
    for name, items in lists.items():
        runs = [(run[0].name, len(run)) for _, group in groupby(items, _sizes) if (run := list(group))]
        texts = [f"{num}x{{{first}}}" if num > 1 else f"{{{first}}}" for first, num in runs]
        texts = texts if len(texts) <= MAX_RUNS else [texts[0], "..", texts[-1]]
        template = template.replace(f"{{{name}}}", "+".join(texts))
    if stage.symbolic and not lists:
        return replace(stage, template=template.rpartition(" -> ")[2], symbolic="")
    return replace(stage, template=template) if lists else stage


def _sizes(value: Value) -> tuple[int, ...]:
    return value.sizes


def _tensor(value: Value, call: Call, aliases: Mapping[str, str], view_of: str | None) -> TensorRecord:
    words = tuple(aliases.get(word, word) for word in value.words or ())
    return TensorRecord(
        value.name,
        words,
        value.sizes,
        value.dtype,
        value.num_bytes,
        value.storage,
        value.is_contiguous,
        view_of,
        value.line,
        _statement(call.spec, value.line) if value.role == "local" else "",
        item=value.item,
    )


def _statement(spec: FunctionSpec, line: int) -> str:
    """The statement that begins on a line, its lines joined: until its brackets are closed."""
    text = spec.source_of(line)
    while sum(map(text.count, "([{")) > sum(map(text.count, ")]}")) and line < len(spec.source_lines):
        line += 1
        text += " " + spec.source_of(line)
    return text


def _views_of(call: Call) -> Iterator[str | None]:
    """For each value the argument whose storage it shares. Across frames addresses are reused: never said."""
    arguments = [value for value in call.values if value.role == "argument"]
    storages = {value.storage_identity for value in arguments}
    for value in call.values:
        if value.role == "argument" or value.storage_identity not in storages:
            yield None
        else:
            owners = [owner for owner in arguments if owner.storage_identity == value.storage_identity]
            owners.sort(key=lambda owner: owner.storage_offset != value.storage_offset)  # k and v may share one storage
            yield owners[0].name


def _label(call: Call) -> str:
    """A module's own name, or the function's; a function that its caller calls several times also names its result."""
    if call.name.endswith(".forward"):
        return call.path.rpartition(".")[2]
    name = call.name.removeprefix("apply_")
    siblings = call.parent.children if call.parent else []
    result = call.value("result")
    if call.parent and result and sum(sibling.name == call.name for sibling in siblings) > 1:
        for theirs in call.parent.values:
            if theirs.role == "local" and theirs.identity == result.identity:
                return f"{name} {theirs.name}"
    return name


@functools.cache
def _layer_of(path: str) -> int | None:
    parts = path.split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() else None


def _element_size(call: Call) -> int:
    """Bytes of one activation value: that of the first floating-point argument, or else of the weight."""
    inputs = [value for value in call.values if _is_input(value) and value.storage != "index"]
    return inputs[0].num_bytes // max(1, math.prod(inputs[0].sizes)) if inputs else 4
