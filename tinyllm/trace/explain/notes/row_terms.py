"""Terms of the trace itself: steps and how their rows are folded, and what stands below one row."""

from tinyllm.trace.explain.notes.note import Term

ROW_TERMS: dict[str, Term] = {
    # --- steps and rows ---
    "dims": Term(
        "the sizes that hold for the whole run, with their symbols",
        "the checkpoint's, then the KV pool's",
        "trace/terminal/__init__.py",
        "def render_header",
    ),
    "cols": Term(
        "what the columns at the end of a row hold",
        "costs follow from sizes alone: FLOP, BYTE and F/B are words that can be explained, too",
        "trace/terminal/__init__.py",
        "def render_header",
    ),
    "kind": Term(
        "what sort of work a row does: its first letter",
        "the letters stand for the kinds that the header names",
        "trace/costs.py",
        "KIND_LETTERS",
    ),
    "layer": Term(
        "a decoder layer: norm, attention, norm, MLP",
        "each adds its part to the residual stream",
        "layers/decoder.py",
        "class DecoderLayer",
    ),
    "step": Term(
        "one round of the engine: schedule, batch, model, sample, update",
        "every request in it gets one token, or a chunk of its prompt computed",
        "engine.py",
        "def step",
    ),
    "request": Term(
        "one prompt with its answer; A, B, ... in the order of the prompts",
        "requests share each step's rows and weights, but never see each other",
        "trace/decisions.py",
        "def request_label",
    ),
    "prefill": Term(
        "a step, or a request's part of it, that computes a prompt",
        "many rows share each weight that is read",
        "trace/record.py",
        "def phase",
    ),
    "decode": Term(
        "a step, or a request's part of it, that computes the token sampled last",
        "one row a request: the weights are read for few tokens",
        "trace/record.py",
        "def phase",
    ),
    "mixed": Term(
        "a step in which some requests prefill and others decode",
        "the flat batch needs no distinction",
        "trace/record.py",
        "def phase",
    ),
    "same": Term(
        "layers whose rows have the sizes of the layer above, printed once",
        "all layers have equal shapes; --layers all prints each",
        "trace/fold.py",
        "def fold_layers",
    ),
    "others": Term(
        "the rows of all requests but two, where a step has more than three, in one line with their sums",
        "they differ from the two that are shown in their lengths alone; --full or --step prints them all",
        "trace/terminal/tensors.py",
        "def _others",
    ),
    "as before": Term(
        "rows that differ from the step before only in the step's own sizes, such as T, in one line",
        "the weights are the same, only the number of rows differs; --full or --step prints them all",
        "trace/terminal/tensors.py",
        "def _only_rows_differ",
    ),
    "total": Term(
        "the sum over all rows of a step or of the run",
        "a layer that is folded counts as often as it ran",
        "trace/terminal/totals.py",
        "def total_row",
    ),
    "residual rms": Term(
        "the size of the residual stream behind each layer: the root of its mean square",
        "every layer adds to it; a few values of the first token make it large in the middle layers",
        "trace/values.py",
        "def stream_rms",
    ),
    "ledger": Term(
        "the comparison of all sizes in a step",
        "each word must have one size everywhere, or the run stops",
        "trace/ledger.py",
        "class Ledger",
    ),
    # --- one row in detail ---
    "argument": Term(
        "a tensor that the stage was given",
        "its caller made it: in a row above, or in the batch",
        "trace/terminal/details.py",
        "def tensor_rows",
    ),
    "local": Term(
        "a named tensor inside the stage",
        "the source line that made it stands behind it",
        "trace/terminal/details.py",
        "def tensor_rows",
        "a fused kernel would not store it: only the readable body names its steps",
    ),
    "result": Term(
        "what the stage hands back",
        "it is the argument of a row below",
        "trace/terminal/details.py",
        "def tensor_rows",
        "result[0] and result[1] are the items of a tuple",
    ),
    "weight": Term(
        "of a tensor's line, its role: a parameter of the checkpoint",
        "it is the same in every step; all other tensors are made anew",
        "trace/terminal/details.py",
        "def tensor_rows",
    ),
    "view of": Term(
        "a tensor that reads another one's storage under other axes",
        "nothing was copied; said of a function's own arguments alone, as storage is reused between functions",
        "trace/collect.py",
        "def _views_of",
    ),
    "not contiguous": Term(
        "a tensor whose values do not lie in memory in the order of its axes",
        "it is a view with the axes in another order; a copy in order would cost bytes",
        "trace/terminal/details.py",
        "def tensor_rows",
    ),
    "formula": Term(
        "the row's FLOPs and bytes over the symbols",
        "each number of the row follows from it",
        "trace/terminal/details.py",
        "def formula_row",
    ),
    "rms": Term(
        "with --values: the root of the mean square of a tensor's values",
        "their usual size, whatever their sign",
        "trace/values.py",
        "def measure",
    ),
    "largest": Term(
        "with --values: a tensor's largest values in size, and where they stand",
        "a few large ones often explain a strange mean",
        "trace/values.py",
        "def measure",
    ),
    "torch": Term(
        "with --ops: the kernels of torch that the row ran, and what they gave",
        "one einsum is several kernels; views among them move nothing",
        "trace/kernels.py",
        "class KernelWatch",
    ),
}
