"""The record of one engine step: what the terminal prints and ``--json`` writes.

collect.py builds its rows from the recorder's calls; every symbolic dimension in it has passed the ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace.costs import PAIRS, Stage
from tinyllm.trace.dims import Words
from tinyllm.trace.scheduled import (
    PLACEHOLDER,
    BlockSpan,
    Candidate,
    PreemptedRecord,
    PrefixHit,
    RequestRecord,
    ScheduleRecord,
)

__all__ = [
    "ACTIVATIONS", "KV", "PLACEHOLDER", "REQUEST_WORDS", "WEIGHTS", "AnswerRecord", "BlockSpan", "Candidate", "Operation",
    "PreemptedRecord", "PrefixHit", "PromptRecord", "RequestRecord", "RunRecord", "ScheduleRecord", "Stats", "StepRecord",
    "TensorRecord", "sizes_by_symbol", "to_symbol",
]  # fmt: skip

KV, WEIGHTS, ACTIVATIONS = "KV", "weights", "activations"  # what bytes are moved of
REQUEST_WORDS = frozenset(name for name, word in WORDS.items() if word.scope == "request")


@dataclass(frozen=True)
class Stats:
    """What a tensor held, over all of its values; None where no value is finite."""

    minimum: float | None  # these four are those of the finite values
    maximum: float | None
    mean: float | None
    rms: float | None
    num_not_finite: int  # such as a mask's -inf
    largest: tuple[tuple[tuple[int, ...], float], ...]  # (index, value), the largest first
    row: tuple[float, ...]  # the begin of the last row of the first head, or other leading index


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
    line: int = 0  # of its last assignment; an argument's is that of the function
    source: str = ""  # the statement that made a local, on one line
    stats: Stats | None = field(default=None, compare=False)  # where asked for; equal layers stay equal with it
    item: int | None = None  # its place in a list of requests' tensors: query_len and the like are then its own

    @property
    def symbols(self) -> tuple[str, ...]:
        """The words' short symbols: ``T``, ``nq*d``, ``R+1``."""
        return tuple(to_symbol(word) for word in self.words)

    @property
    def own_symbols(self) -> tuple[str, ...]:
        """The same, but of a list's item its request's sizes with its place, as another item's may differ: ``s0``."""
        return tuple(
            f"{symbol}{self.item}" if word in REQUEST_WORDS and self.item is not None else symbol
            for word, symbol in zip(self.words, self.symbols, strict=True)
        )


@dataclass(frozen=True)
class Operation:
    """One row: a stage in one call."""

    path: str
    label: str
    function: str
    stage: Stage  # its template names no list, but the items
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
    time_us: float | None = field(default=None, compare=False)  # measured, where asked for
    kernels: tuple[str, ...] = ()  # torch's operators below it, with the sizes they gave, where asked for

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.flops is not None and self.num_bytes else None

    @property
    def bytes_by_storage(self) -> dict[str, int]:
        """Its bytes by what is moved: parameters, the pool's keys and values, everything else.

        A gather reads rows of a table and not all of it; any other row reads its weights whole.
        """
        inputs = [self.tensors[name] for name in self.inputs]
        sizes = {storage: sum(t.num_bytes for t in inputs if t.storage == storage) for storage in ("weight", "index")}
        rows_read = max(0, self.bytes_read - sizes["index"])
        pool = {"cache write": self.bytes_written, "gather": rows_read}.get(self.stage.kind, 0)
        kv = pool if any(tensor.storage == "kv_pool" for tensor in inputs) else 0
        weights = rows_read if sizes["weight"] and self.stage.kind == "gather" else sizes["weight"]
        weights = min(weights, self.bytes_read)
        return {WEIGHTS: weights, KV: kv, ACTIVATIONS: self.num_bytes - weights - kv}

    @property
    def title(self) -> str:
        """The label, and the request where the row is one request's: ``attend A``."""
        return f"{self.label} {self.request}" if self.request else self.label

    @property
    def key(self) -> tuple[str, str, str | None]:
        """What tells it from the other rows of its step, and is the same in the next one."""
        return self.path, self.label, self.request

    @property
    def pairs(self) -> tuple[int, int] | None:
        """Of one request's attention: the pairs of a query and a key that the causal mask leaves, and all of them."""
        kept, dense = evaluate(PAIRS, self.sizes), evaluate("query_len*seq_len", self.sizes)
        return None if self.dense_flops is None or kept is None or dense is None else (kept, dense)

    @property
    def has_values(self) -> bool:
        """Whether it was asked what its tensors held."""
        return any(tensor.stats for tensor in self.tensors.values())

    @property
    def place(self) -> str:
        """Where the row stands in its layer, or in the step where it belongs to no layer."""
        return self.path if self.layer is None else self.path.split(".", 2)[2]

    def shape_key(self) -> tuple:
        """What must be equal for two rows to be the same but for their layer."""
        return (self.place, self.label, self.request, tuple(self.tensors.values()), self.flops, self.bytes_read)


@dataclass(frozen=True)
class StepRecord:
    """One engine step."""

    index: int
    requests: tuple[RequestRecord, ...]
    schedule: ScheduleRecord
    batch: Mapping[str, TensorRecord]
    batch_values: Mapping[str, Any]
    dims: Mapping[str, int]  # by word: the checkpoint's, the pool's and the step's
    operations: tuple[Operation, ...]
    num_compared: int  # words that the ledger compared
    traced_ms: float  # wall time of the step, the recorder's own included
    kv_bytes_per_token: int
    failure: str = ""  # where and with what error the step ended, where it did; the rows are those before it
    residual_rms: tuple[float, ...] = ()  # of the residual stream behind each layer, where asked for
    reading_ms: float = 0.0  # of traced_ms what the recorder took for itself: `Recorder.reading_ms`

    @property
    def phase(self) -> str:
        """prefill, decode or mixed: named after what the requests of this step do, not a state of the engine."""
        phases = {"decode" if request.is_decode else "prefill" for request in self.requests}
        return "mixed" if len(phases) == 2 else phases.pop()

    @property
    def num_chosen(self) -> int:
        """Tokens that were sampled and kept."""
        return sum(request.chosen is not None for request in self.requests)

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


@dataclass(frozen=True)
class PromptRecord:
    """One prompt: the texts of its tokens, word by word (a lone begin token is a word)."""

    label: str
    text: str
    words: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class AnswerRecord:
    """What one request gave."""

    label: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int


@dataclass(frozen=True)
class RunRecord:
    """All steps of one run, with what they have in common."""

    model: str  # the file's or folder's name
    dtype: str
    attention: str
    kv_shape: tuple[
        int, ...
    ]  # of the pool, over the words num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim
    kv_bytes: int
    dims: Mapping[str, int]  # the checkpoint's and the pool's
    prompts: tuple[PromptRecord, ...]
    steps: tuple[StepRecord, ...]
    answers: tuple[AnswerRecord, ...]
    config_name: str = ""  # what the model calls itself
    prefix_caching: bool = True
    argv: tuple[str, ...] = ()  # the command's arguments; a library run has none
    ridge: float | None = None  # FLOPs per byte at which this machine computes as long as it moves, where measured


def to_symbol(word: str) -> str:
    """The symbol of a word, a literal or ``num_reqs+1``."""
    base, plus, rest = word.partition("+")
    return (WORDS[base].symbol if base in WORDS else base) + plus + rest


def sizes_by_symbol(dims: Mapping[str, int]) -> dict[str, int]:
    """Sizes under their symbols; a symbol that is an expression over others, such as ``nq*d``, needs no entry."""
    return {to_symbol(word): size for word, size in dims.items() if to_symbol(word).isidentifier()}
