"""The record of one engine step: what the terminal prints and ``--json`` writes (schema.json).

Built from the recorder's calls and the small dataclasses that the engine returns; every symbolic dimension in it has
passed the ledger.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import STAGES, Stage
from tinyllm.trace.dims import Words
from tinyllm.trace.ledger import Ledger
from tinyllm.trace.recorder import PACKAGE, Call, Value

SCHEMA_ID = "tinyllm.trace/1"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a row; words are those of the model's own words, never a helper's ``in_size``."""

    name: str
    words: Words
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    storage: str
    is_contiguous: bool
    view_of: str | None = None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The words' short symbols: ``T``, ``nq*d``, ``R+1``."""
        return tuple(to_symbol(word) for word in self.words)


@dataclass(frozen=True)
class Operation:
    """One row: a stage in one call."""

    path: str
    label: str
    function: str
    stage: Stage
    layer: int | None
    request: str | None
    tensors: Mapping[str, TensorRecord]  # every named value of the call, arguments first
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    locals: tuple[str, ...]
    sizes: Mapping[str, int]
    flops: int | None
    dense_flops: int | None
    bytes_read: int
    bytes_written: int
    source: str  # "layers/norm.py:13"
    summary: str

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.flops is not None and self.num_bytes else None

    def shape_key(self) -> tuple:
        """What must be equal for two rows to be the same but for their layer."""
        return (self.function, self.label, self.request, tuple(self.tensors.values()), self.flops, self.bytes_read)


@dataclass(frozen=True)
class Candidate:
    """One token that might have come next, with its probability under softmax(logits)."""

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True)
class RequestRecord:
    """One request's part of a step."""

    label: str
    token_ids: tuple[int, ...]  # computed in this step
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]
    samples: bool
    state: str  # after the step: "running" or "finished"
    finish_reason: str | None
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    method: str  # "greedy", or the parameters of the draw

    @property
    def query_len(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens in total after it."""
        return self.num_computed_tokens + self.query_len

    @property
    def is_decode(self) -> bool:
        """Whether the whole prompt was computed before: only sampled tokens are left to compute."""
        return self.num_computed_tokens >= self.num_prompt_tokens


@dataclass(frozen=True)
class StepRecord:
    """One engine step."""

    index: int
    requests: tuple[RequestRecord, ...]
    token_budget: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    preempted: tuple[str, ...]
    batch: Mapping[str, TensorRecord]
    batch_values: Mapping[str, Any]
    dims: Mapping[str, int]  # by word: the checkpoint's, the pool's and the step's
    operations: tuple[Operation, ...]
    num_compared: int  # words that the ledger compared
    wall_ms: float
    kv_bytes_per_token: int

    @property
    def phase(self) -> str:
        """prefill, decode or mixed: named after what the requests of this step do, not a state of the engine."""
        phases = {"decode" if request.is_decode else "prefill" for request in self.requests}
        return "mixed" if len(phases) == 2 else phases.pop()

    @property
    def flops(self) -> int:
        """The sum over all rows whose FLOPs are known."""
        return sum(operation.flops or 0 for operation in self.operations)

    @property
    def num_bytes(self) -> int:
        """The sum over all rows."""
        return sum(operation.num_bytes for operation in self.operations)

    @property
    def has_unknown_flops(self) -> bool:
        """Whether any row's FLOPs are unknown, so that `flops` is a lower bound."""
        return any(operation.flops is None for operation in self.operations)

    def layer(self, index: int | None) -> list[Operation]:
        """The rows of one layer, or those outside all layers."""
        return [operation for operation in self.operations if operation.layer == index]


def to_symbol(word: str) -> str:
    """The symbol of a word, a literal or ``num_reqs+1``."""
    base, plus, rest = word.partition("+")
    return (WORDS[base].symbol if base in WORDS else base) + plus + rest


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
    read, written = stage.count_bytes(sizes, _element_size(call))
    dense = stage.dense_flops
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
        flops=stage.count_flops(sizes),
        dense_flops=Stage("host", "", dense).count_flops(sizes) if dense else None,
        bytes_read=read,
        bytes_written=written,
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


def step_to_json(step: StepRecord) -> dict[str, Any]:
    """One step as the plain values of schema.json."""
    first_seen: dict[tuple, str] = {}
    symbols = {to_symbol(word): size for word, size in step.dims.items()}
    return {
        "schema": SCHEMA_ID,
        "type": "step",
        "step": step.index,
        "phase": step.phase,
        "dims": {symbol: size for symbol, size in symbols.items() if symbol.isidentifier()},
        "requests": [_request_to_json(request) for request in step.requests],
        "scheduler": _scheduler_to_json(step),
        "batch": dict(step.batch_values),
        "kv": _kv_to_json(step),
        "ops": [_operation_to_json(i, operation, first_seen) for i, operation in enumerate(step.operations)],
        "sampling": [_sampling_to_json(i, request) for i, request in enumerate(step.requests)],
        "totals": _totals_to_json(step),
    }


def _request_to_json(request: RequestRecord) -> dict[str, Any]:
    return {
        "id": request.label,
        "state": request.state,
        "num_computed": request.num_computed_tokens,
        "num_new": request.query_len,
        "kv_len": request.seq_len,
    }


def _scheduler_to_json(step: StepRecord) -> dict[str, Any]:
    return {
        "token_budget": step.token_budget,
        "tokens_used": step.dims["num_tokens"],
        "running": [request.label for request in step.requests],
        "num_waiting": step.num_waiting,
        "preempted": list(step.preempted),
    }


def _kv_to_json(step: StepRecord) -> dict[str, Any]:
    return {
        "block_size": step.dims["block_size"],
        "blocks_used": step.num_used_blocks,
        "blocks_total": step.num_blocks - 1,
        "allocated": {request.label: list(request.new_block_ids) for request in step.requests if request.new_block_ids},
        "bytes_per_token": step.kv_bytes_per_token,
    }


def _totals_to_json(step: StepRecord) -> dict[str, Any]:
    return {
        "flops": step.flops,
        "flops_is_lower_bound": step.has_unknown_flops,
        "bytes": step.num_bytes,
        "intensity": round(step.flops / step.num_bytes, 4) if step.num_bytes else None,
        "wall_ms": round(step.wall_ms, 3),
        "words_compared": step.num_compared,
    }


def _operation_to_json(seq: int, operation: Operation, first_seen: dict[tuple, str]) -> dict[str, Any]:
    """A row; one equal to a row of an earlier layer leaves its tensors out and names that row in same_as."""
    same_as = first_seen.setdefault(operation.shape_key(), operation.path)
    is_first = same_as == operation.path
    stage = operation.stage
    return {
        "seq": seq,
        "path": operation.path,
        "op": operation.label,
        "kind": stage.kind,
        "layer": operation.layer,
        "request": operation.request,
        "in": [_tensor_to_json(operation.tensors[name]) for name in operation.inputs] if is_first else [],
        "out": [_tensor_to_json(operation.tensors[name]) for name in operation.outputs] if is_first else [],
        "expr": operation.summary,
        "flops": {
            "value": operation.flops,
            "formula": stage.flops or "?",
            "counted": stage.counted,
            **({} if operation.dense_flops is None else {"dense": operation.dense_flops}),
        },
        "bytes": {"read": operation.bytes_read, "write": operation.bytes_written, "formula": stage.bytes_formula()},
        "intensity": None if operation.intensity is None else round(operation.intensity, 4),
        "src": f"tinyllm/{operation.source}",
        "same_as": None if is_first else same_as,
    }


def _tensor_to_json(tensor: TensorRecord) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "sym": list(tensor.symbols),
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "nbytes": tensor.num_bytes,
        "storage": tensor.storage,
        "contiguous": tensor.is_contiguous,
        "view_of": tensor.view_of,
    }


def _sampling_to_json(row: int, request: RequestRecord) -> dict[str, Any]:
    return {
        "request": request.label,
        "logits_row": row,
        "method": request.method,
        "candidates": [[c.token_id, c.text, round(c.probability, 6)] for c in request.candidates],
        "chosen": request.chosen.token_id if request.chosen else None,
        "text": request.chosen.text if request.chosen else None,
        "kept": request.samples,
        "finish_reason": request.finish_reason,
    }
