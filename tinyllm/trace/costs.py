"""What each stage costs: FLOPs and bytes as formulas over its dimension words.

A multiply-add counts 2 FLOPs. Bytes are each operand moved once: every input read, every output written, in the type
that it has; `e` is the size of one activation value. The keys and values of a request are gathered in whole blocks.
Attention counts its two products over the causal pairs only: mask, scaling and softmax count nothing, and neither does
index arithmetic. Elementwise stages count one FLOP for each arithmetic step and value, a comparison included. None
means unknown and prints as ``?``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tinyllm.shapes import evaluate

Kind = Literal["matmul", "elementwise", "reduce", "gather", "cache write", "view", "host"]
KIND_LETTERS: dict[Kind, str] = {
    "matmul": "M", "elementwise": "E", "reduce": "R", "gather": "G", "cache write": "W", "view": "V", "host": "P",
}  # fmt: skip
Counted = Literal["exact", "causal-exact"]

PAIRS = "(query_len*seq_len-query_len*(query_len-1)/2)"  # the keys that the causal mask leaves, over all queries


@dataclass(frozen=True)
class Stage:
    """One kind of row. template says how the row reads: ``{x}`` is a value of the call, ``{weight.T}`` its transpose.

    flops, read and write are formulas over the call's words and `e`; read and write count bytes. A row whose template
    names a list has its items in there instead (`Operation.stage`); symbolic is then how it reads in symbols.
    """

    kind: Kind
    template: str
    flops: str | None = "0"
    read: str = "0"
    write: str = "0"
    dense_flops: str | None = None  # what an unmasked computation would cost
    counted: Counted = "exact"
    symbolic: str = ""
    updates: str = ""  # the argument that it writes into: it comes out as well, changed in place
    updated_at: str = ""  # the argument that says in which slots; all others stay as they were


def count(formula: str, sizes: Mapping[str, int]) -> int:
    """The value of a cost formula; KeyError where one of its words has no size."""
    value = evaluate(formula, sizes)
    if value is None:
        raise KeyError(f"cost formula {formula} has a word without a size; known: {', '.join(sizes)}")
    return value


def bound_by(flops: int | None, num_bytes: int, ridge: float | None) -> Literal["memory", "compute", ""]:
    """What the time goes into on a machine with this many FLOPs per byte; "" where nothing moves or one is unknown.

    >>> bound_by(100, 50, ridge=8.0), bound_by(1000, 50, ridge=8.0), bound_by(None, 50, ridge=8.0)
    ('memory', 'compute', '')
    """
    if ridge is None or flops is None or not num_bytes:
        return ""
    return "memory" if flops / num_bytes < ridge else "compute"


def bound_us(flops: int | None, num_bytes: int, ridge: float | None, bandwidth: float | None) -> float | None:
    """The microseconds of its bytes, or of its FLOPs, alone, where `bandwidth` bytes per second are moved; None: unknown.

    What still lies in a cache is not moved, and may take less.

    >>> bound_us(100, 50, ridge=8.0, bandwidth=1e6), bound_us(1000, 50, ridge=8.0, bandwidth=1e6)
    (50.0, 125.0)
    """
    if bandwidth is None or ridge is None or flops is None:
        return None
    return 1e6 * max(num_bytes, flops / ridge) / bandwidth


STAGES: dict[str, Stage] = {
    "Embedding.forward": Stage(
        "gather", "{token_ids} of {weight} -> {result}",
        read="e*num_tokens*hidden_size+8*num_tokens", write="e*num_tokens*hidden_size"),
    "RotaryEmbedding.forward": Stage(
        "elementwise", "{positions} -> 2x{result[0]}",
        "3*num_tokens*half_dim", read="8*num_tokens+4*half_dim", write="4*2*num_tokens*half_dim"),
    "add_residual": Stage(
        "elementwise", "{x}+{residual} -> {result}",
        "num_tokens*hidden_size", read="e*2*num_tokens*hidden_size", write="e*num_tokens*hidden_size"),
    "rms_norm": Stage(
        "reduce", "{x} -> {result}",
        "4*num_tokens*hidden_size", read="e*(num_tokens*hidden_size+hidden_size)", write="e*num_tokens*hidden_size"),
    "Linear.forward": Stage(
        "matmul", "{x}@{weight.T} -> {result}",
        "2*num_tokens*in_size*out_size", read="e*(num_tokens*in_size+in_size*out_size)", write="e*num_tokens*out_size"),
    "split_heads": Stage("view", "{qkv} -> {result[0]} 2x{result[1]}"),
    "apply_rope": Stage(
        "elementwise", "{x} -> {result}",
        "3*num_tokens*heads*head_dim",
        read="e*num_tokens*heads*head_dim+4*2*num_tokens*half_dim", write="e*num_tokens*heads*head_dim"),
    "write_kv": Stage(
        "cache write", "2x{k} -> {layer_kv}", read="e*2*num_tokens*kv_size+8*num_tokens", write="e*2*num_tokens*kv_size",
        updates="layer_kv", updated_at="slot_mapping"),
    "gather_kv": Stage(
        "gather", "{layer_kv} -> 2x{result[0]}",
        read="e*2*num_req_blocks*block_size*kv_size+8*num_req_blocks", write="e*2*num_req_blocks*block_size*kv_size"),
    "attend": Stage(
        "matmul", "{q}.{k} -> {result}",
        f"4*num_heads*head_dim*{PAIRS}", read="e*(query_len*q_size+2*seq_len*kv_size)", write="e*query_len*q_size",
        dense_flops="4*num_heads*head_dim*query_len*seq_len", counted="causal-exact"),
    "lay_flat": Stage(
        "gather", "{pieces} -> {result}", read="e*num_tokens*q_size", write="e*num_tokens*q_size",
        symbolic="R x {pieces[0]} -> {result}"),
    "merge_heads": Stage("view", "{x} -> {result}"),
    "silu_and_mul": Stage(
        "elementwise", "{gate_up} -> {result}",
        "5*num_tokens*intermediate_size", read="e*num_tokens*gate_up_size", write="e*num_tokens*intermediate_size"),
    "gelu_and_mul": Stage(
        "elementwise", "{gate_up} -> {result}",
        "6*num_tokens*intermediate_size", read="e*num_tokens*gate_up_size", write="e*num_tokens*intermediate_size"),
    "gelu_tanh_and_mul": Stage(
        "elementwise", "{gate_up} -> {result}",
        "10*num_tokens*intermediate_size", read="e*num_tokens*gate_up_size", write="e*num_tokens*intermediate_size"),
    "gather_rows": Stage(
        "gather", "{hidden} -> {result}", read="e*num_logits*hidden_size+8*num_logits", write="e*num_logits*hidden_size"),
    "lm_head": Stage(
        "matmul", "{rows}@{weight.T} -> {result}",
        "2*num_logits*hidden_size*vocab_size",
        read="e*(num_logits*hidden_size+hidden_size*vocab_size)", write="e*num_logits*vocab_size"),
    "ban_ids": Stage(
        "gather", "{logits} -> {result}", read="4*num_logits*vocab_size+16*num_banned", write="4*num_logits*vocab_size"),
    "apply_temperature": Stage(
        "elementwise", "{logits} -> {result}",
        "num_logits*vocab_size", read="4*(num_logits*vocab_size+num_logits)", write="4*num_logits*vocab_size"),
    "apply_min_p": Stage(
        "elementwise", "{logits} -> {result}",
        "2*num_logits*vocab_size", read="4*(num_logits*vocab_size+num_logits)", write="4*num_logits*vocab_size"),
    "apply_top_k_top_p": Stage(
        "reduce", "{logits} -> {result}",
        None, read="4*(num_logits*vocab_size+num_logits)+8*num_logits", write="4*num_logits*vocab_size"),
    "gumbel_noise": Stage(
        "elementwise", "{seeds},{positions} -> {result}", None, read="8*2*num_logits", write="4*num_logits*vocab_size"),
    "add_noise": Stage(
        "elementwise", "{logits}+{noise} -> {result}",
        "num_logits*vocab_size", read="4*(2*num_logits*vocab_size+num_logits)", write="4*num_logits*vocab_size"),
    "sample": Stage(
        "reduce", "{logits} -> {result[0]}",
        "num_logits*vocab_size", read="e*num_logits*vocab_size", write="8*num_logits+num_logits"),
}  # fmt: skip
"""Functions that get a row of their own, by qualified name."""

COMPOSITES = frozenset({
    "Decoder.forward", "DecoderLayer.forward", "GroupedQueryAttention.forward", "RMSNorm.forward", "MLP.forward",
    "attend_batch", "attend_request", "process", "draw_scores",
})  # fmt: skip
"""Functions whose cost is that of the stages inside them."""

PARTS = frozenset({
    "build_batch", "FlatBatch.__post_init__", "map_slots", "build_sampling_batch", "_ints", "_floats", "KVCache.layer",
    "Decoder._head_weight", "causal_mask", "RotaryEmbedding.inv_freq", "rope_divisors", "mix", "_shift_right", "uniform_noise",
})  # fmt: skip
"""Functions that belong to a stage around them, or lay out the step on the host."""
