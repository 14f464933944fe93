"""The two forms of a note, and the pitfalls that belong to several things."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """What may be said of a tensor or a stage; an empty name means that the other project has none."""

    what: str = ""
    why: str = ""
    care: str = ""  # what readers trip over
    vllm: str = ""
    huggingface: str = ""


@dataclass(frozen=True)
class Term:
    """A word that the trace prints, but that is no dimension, tensor, stage or kind."""

    what: str
    why: str
    file: str  # inside the package
    start: str  # of the line that it comes from
    care: str = ""


POOL = (
    "the pool is room for all requests, not one text: none of its axes is a sequence length. What one request "
    "reads is the result of gather_kv, as long as its seq_len"
)
STORED = (
    "the weight is stored with one row per output, as checkpoints have it, and the product reads it transposed "
    "(x W^T): the stored columns are the inputs, and the trace's row shows the matrix as it is used"
)
SUM = (
    "query_len counts what this step computes, seq_len what its queries may read: they are equal only in a prefill "
    "in one piece. The seq_lens of a step do not add up to its rows; the query_lens do"
)
