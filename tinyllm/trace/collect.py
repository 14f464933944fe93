"""From the recorder's calls to the rows of a step: stages with their costs, told in the model's own words."""

import math
from collections.abc import Iterable, Mapping, Sequence

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import STAGES, count
from tinyllm.trace.ledger import Ledger
from tinyllm.trace.record import Operation, TensorRecord
from tinyllm.trace.recorder import PACKAGE, Call, Value


def collect_operations(calls: Iterable[Call], ledger: Ledger, request_labels: Sequence[str]) -> tuple[Operation, ...]:
    """Every stage of a step in order of time. The ledger must have checked the calls."""
    operations: list[Operation] = []

    def visit(call: Call, aliases: Mapping[str, str], request: str | None) -> None:
        if call.name == "attend_request":
            request = request_labels[call.index]
        for child in call.children:
            visit(child, _unify(child, call, aliases), request)
        if call.name in STAGES:
            operations.append(_operation(call, aliases, ledger, request))

    for root in calls:
        visit(root, {}, None)
    return tuple(operations)


def _unify(child: Call, parent: Call, parent_aliases: Mapping[str, str]) -> dict[str, str]:
    """What the caller calls the child's per-call words: ``out_size`` is ``qkv_size`` where the result is named qkv.

    A tensor of the child is the caller's where both are the same object: an argument is one of the caller's names
    assigned before the call, a result one assigned by it.
    """
    aliases: dict[str, str] = {}
    for value in child.values:
        if value.role not in ("argument", "result") or value.words is None:
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


def _operation(call: Call, aliases: Mapping[str, str], ledger: Ledger, request: str | None) -> Operation:
    stage, sizes = STAGES[call.name], ledger.sizes_of(call)
    tensors = {value.name: _tensor(value, call, aliases) for value in call.values if value.words is not None}
    sizes["e"] = _element_size(call)
    return Operation(
        path=call.path,
        label=_label(call),
        function=call.name,
        stage=stage,
        layer=_layer_of(call.path),
        request=request,
        tensors=tensors,
        inputs=tuple(value.name for value in call.values if _is_input(value) and value.name in tensors),
        outputs=tuple(value.name for value in call.values if value.role == "result" and value.name in tensors),
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


def _tensor(value: Value, call: Call, aliases: Mapping[str, str]) -> TensorRecord:
    words = tuple(aliases.get(word, word) for word in value.words or ())
    return TensorRecord(
        value.name,
        words,
        value.sizes,
        value.dtype,
        value.num_bytes,
        value.storage,
        value.is_contiguous,
        _view_of(value, call),
    )


def _view_of(value: Value, call: Call) -> str | None:
    """The argument of the same frame whose storage it shares. Across frames addresses are reused: never said."""
    if value.role == "argument":
        return None
    owners = [v for v in call.values if v.role == "argument" and v.storage_identity == value.storage_identity]
    owners.sort(key=lambda owner: owner.storage_offset != value.storage_offset)  # k and v may share one storage
    return owners[0].name if owners else None


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


def _layer_of(path: str) -> int | None:
    parts = path.split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() else None


def _element_size(call: Call) -> int:
    """Bytes of one activation value: that of the first floating-point argument, or else of the weight."""
    inputs = [value for value in call.values if _is_input(value) and value.storage != "index"]
    return inputs[0].num_bytes // max(1, math.prod(inputs[0].sizes)) if inputs else 4
