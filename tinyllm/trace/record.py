"""The record of one engine step: what the terminal prints and ``--json`` writes.

collect.py builds its rows from the recorder's calls; every symbolic dimension in it has passed the ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import Stage
from tinyllm.trace.dims import Words


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

    @property
    def place(self) -> str:
        """Where the row stands in its layer, or in the step where it belongs to no layer."""
        return self.path if self.layer is None else self.path.split(".", 2)[2]

    def shape_key(self) -> tuple:
        """What must be equal for two rows to be the same but for their layer."""
        return (self.place, self.label, self.request, tuple(self.tensors.values()), self.flops, self.bytes_read)


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
    traced_ms: float  # wall time of the step, the recorder's own included
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


def sizes_by_symbol(dims: Mapping[str, int]) -> dict[str, int]:
    """Sizes under their symbols; a symbol that is an expression over others, such as ``nq*d``, needs no entry."""
    return {to_symbol(word): size for word, size in dims.items() if to_symbol(word).isidentifier()}
