"""Terms of costs: the columns of numbers, what a time is compared with, what bytes are counted under."""

from tinyllm.trace.explain.notes.note import Term

COST_TERMS: dict[str, Term] = {
    "FLOP": Term(
        "arithmetic steps of a row",
        "a multiply-add counts 2; unknown is ?, never 0",
        "trace/costs.py",
        "STAGES",
        "FLOPs are work, not speed: FLOP/s would be a machine's",
    ),
    "BYTE": Term(
        "what a row reads and writes",
        "each operand moved once, in the type that it has; a real kernel may move more, or less where a cache helps",
        "trace/costs.py",
        "STAGES",
    ),
    "F/B": Term(
        "FLOPs per byte, the arithmetic intensity",
        "a machine does so many FLOPs in the time that it moves a byte; rows below that number, the ridge, wait "
        "for memory",
        "trace/record.py",
        "def intensity",
    ),
    "pairs": Term(
        "pairs of a query and a key that attention needs, of those that a full matrix has",
        "the causal mask hides the keys behind each query; only a decode, with one query, needs all of them",
        "trace/costs.py",
        "PAIRS",
    ),
    "e": Term(
        "bytes of one value: 4 in float32, 2 in bfloat16",
        "BYTE formulas count values; e turns them into bytes",
        "trace/collect.py",
        "def _element_size",
        "indices such as token ids take 8 bytes each, whatever e is",
    ),
    "float32": Term(
        "the dtype: how each value is stored, in float32 with 4 bytes, in bfloat16 with 2",
        "weights and the KV cache are loaded as --dtype says; norms, angles and scores are computed in float32 in any case",
        "weights/load.py",
        "DTYPES",
    ),
    "us": Term(
        "microseconds that a row took",
        "measured inside the tracer, its own reading taken off",
        "trace/recorder.py",
        "class Recorder",
    ),
    "bound": Term(
        "the microseconds that a row's bytes take from memory, or its FLOPs, alone: the larger of the two",
        "the machine's two peaks, measured once; a row can be faster where its operands are still in a cache",
        "trace/costs.py",
        "def bound_us",
    ),
    "ridge": Term(
        "FLOPs that this machine does while it moves a byte, measured once",
        "a row with fewer FLOPs per byte waits for memory, one with more for arithmetic",
        "trace/calibrate.py",
        "class Roofline",
    ),
    "memory-bound": Term(
        "a row or step with fewer FLOPs per byte than the ridge; its row ends in m",
        "more arithmetic on the same bytes would cost no time: a larger batch is nearly free",
        "trace/costs.py",
        "def bound_by",
    ),
    "compute-bound": Term(
        "a row or step with more FLOPs per byte than the ridge; its row ends in c",
        "each weight that is read serves many tokens: arithmetic takes longer than reading",
        "trace/costs.py",
        "def bound_by",
    ),
    "BYTE/token": Term(
        "bytes that a phase moves for each token it computes",
        "the weights are read once a step, however many tokens share them: a decode has few",
        "trace/terminal/totals.py",
        "def render_totals",
    ),
    "activations": Term(
        "bytes that are neither weights nor keys and values",
        "what one stage hands to the next; they grow with the tokens of the step",
        "trace/record.py",
        "def bytes_by_storage",
    ),
    "causal-exact": Term(
        "counted over the pairs that the causal mask leaves",
        "a full matrix of scores would count pairs that nobody needs",
        "trace/costs.py",
        "PAIRS",
    ),
}
