"""What each stage costs: FLOPs and bytes as formulas over its dimension words.

A multiply-add counts 2 FLOPs. Bytes are the operands moved once: every input read, every output written. Attention
counts its two products over the causal pairs only; masks, softmax exponentials and index arithmetic count nothing.
Elementwise stages count one FLOP for each arithmetic step and value. None means unknown and prints as ``?``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tinyllm.shapes import evaluate

Kind = Literal["matmul", "elementwise", "reduce", "gather", "cache write", "view", "host"]
KIND_LETTERS: dict[Kind, str] = {
    "matmul": "M", "elementwise": "E", "reduce": "R", "gather": "G", "cache write": "W", "view": "V", "host": "P",
}  # fmt: skip
Counted = Literal["exact", "causal-exact", "estimate"]

PAIRS = "(query_len*seq_len-query_len*(query_len-1)/2)"  # the keys that the causal mask leaves, over all queries


@dataclass(frozen=True)
class Stage:
    """One kind of row. template says how the row reads: ``{x}`` is a value of the call, ``{weight.T}`` its transpose.

    read and write count values of the activations' size; index_reads those of 8 bytes, float32_* those of 4.
    """

    kind: Kind
    template: str
    flops: str | None = "0"
    read: str = "0"
    write: str = "0"
    index_read: str = "0"
    float32_read: str = "0"
    float32_write: str = "0"
    index_write: str = "0"
    dense_flops: str | None = None  # what an unmasked computation would cost
    counted: Counted = "exact"

    def count_flops(self, sizes: Mapping[str, int]) -> int | None:
        """FLOPs of one call whose words have these sizes; None where unknown."""
        return None if self.flops is None else _count(self.flops, sizes)

    def count_bytes(self, sizes: Mapping[str, int], element_size: int) -> tuple[int, int]:
        """(bytes read, bytes written) where activations take element_size bytes a value."""
        read = (
            element_size * _count(self.read, sizes)
            + 8 * _count(self.index_read, sizes)
            + 4 * _count(self.float32_read, sizes)
        )
        write = (
            element_size * _count(self.write, sizes)
            + 8 * _count(self.index_write, sizes)
            + 4 * _count(self.float32_write, sizes)
        )
        return read, write

    def bytes_formula(self) -> str:
        """The byte count as text; e is the size of one activation value."""

        def side(plain: str, index: str, float32: str) -> str:
            terms = [
                f"{factor}*({text})" for factor, text in (("e", plain), ("8", index), ("4", float32)) if text != "0"
            ]
            return "+".join(terms) or "0"

        reads = side(self.read, self.index_read, self.float32_read)
        return f"read {reads}, write {side(self.write, self.index_write, self.float32_write)}"


def _count(formula: str, sizes: Mapping[str, int]) -> int:
    count = evaluate(formula, sizes)
    if count is None:
        raise KeyError(f"cost formula {formula} has a word without a size; known: {', '.join(sizes)}")
    return count


STAGES: dict[str, Stage] = {
    "Embedding.forward": Stage(
        "gather", "{token_ids} of {weight} -> {result}",
        read="num_tokens*hidden_size", index_read="num_tokens", write="num_tokens*hidden_size"),
    "RotaryEmbedding.forward": Stage(
        "elementwise", "{positions} -> 2x{result[0]}",
        "3*num_tokens*half_dim", index_read="num_tokens", float32_read="half_dim", float32_write="2*num_tokens*half_dim"),
    "add_residual": Stage(
        "elementwise", "{x}+{residual} -> {result}",
        "num_tokens*hidden_size", read="2*num_tokens*hidden_size", write="num_tokens*hidden_size"),
    "rms_norm": Stage(
        "reduce", "{x} -> {result}",
        "4*num_tokens*hidden_size", read="num_tokens*hidden_size+hidden_size", write="num_tokens*hidden_size"),
    "Linear.forward": Stage(
        "matmul", "{x}@{weight.T} -> {result}",
        "2*num_tokens*in_size*out_size", read="num_tokens*in_size+in_size*out_size", write="num_tokens*out_size"),
    "split_heads": Stage("view", "{qkv} -> {result[0]} 2x{result[1]}"),
    "apply_rope": Stage(
        "elementwise", "{x} -> {result}",
        "3*num_tokens*heads*head_dim",
        read="num_tokens*heads*head_dim", float32_read="2*num_tokens*half_dim", write="num_tokens*heads*head_dim"),
    "write_kv": Stage(
        "cache write", "2x{k} -> {layer_kv}",
        read="2*num_tokens*kv_size", index_read="num_tokens", write="2*num_tokens*kv_size"),
    "gather_kv": Stage(
        "gather", "{layer_kv} -> 2x{result[0]}",
        read="2*num_req_blocks*block_size*kv_size", index_read="num_req_blocks", write="2*num_req_blocks*block_size*kv_size"),
    "attend": Stage(
        "matmul", "{q}.{k} -> {result}",
        f"4*num_heads*head_dim*{PAIRS}", read="query_len*q_size+2*seq_len*kv_size", write="query_len*q_size",
        dense_flops="4*num_heads*head_dim*query_len*seq_len", counted="causal-exact"),
    "merge_heads": Stage("view", "{x} -> {result}"),
    "silu_and_mul": Stage(
        "elementwise", "{gate_up} -> {result}",
        "5*num_tokens*intermediate_size", read="num_tokens*gate_up_size", write="num_tokens*intermediate_size"),
    "gather_rows": Stage(
        "gather", "{hidden} -> {result}",
        read="num_logits*hidden_size", index_read="num_logits", write="num_logits*hidden_size"),
    "lm_head": Stage(
        "matmul", "{rows}@{weight.T} -> {result}",
        "2*num_logits*hidden_size*vocab_size",
        read="num_logits*hidden_size+hidden_size*vocab_size", write="num_logits*vocab_size"),
    "apply_temperature": Stage(
        "elementwise", "{logits} -> {result}",
        "num_logits*vocab_size", float32_read="num_logits*vocab_size+num_logits", float32_write="num_logits*vocab_size"),
    "apply_min_p": Stage(
        "elementwise", "{logits} -> {result}",
        "2*num_logits*vocab_size", float32_read="num_logits*vocab_size+num_logits", float32_write="num_logits*vocab_size"),
    "apply_top_k_top_p": Stage(
        "reduce", "{logits} -> {result}",
        None, float32_read="num_logits*vocab_size", float32_write="num_logits*vocab_size"),
    "gumbel_noise": Stage(
        "elementwise", "{seeds},{positions} -> {result}",
        None, index_read="2*num_logits", float32_write="num_logits*vocab_size"),
    "sample": Stage(
        "reduce", "{logits} -> {result[0]}",
        "num_logits*vocab_size", float32_read="num_logits*vocab_size", index_write="num_logits"),
}  # fmt: skip
"""Functions that get a row of their own, by qualified name."""

COMPOSITES = frozenset({
    "Decoder.forward", "DecoderLayer.forward", "GroupedQueryAttention.forward", "RMSNorm.forward", "MLP.forward",
    "attend_batch", "attend_request", "process", "draw_scores",
})  # fmt: skip
"""Functions whose cost is that of the stages inside them."""

PARTS = frozenset({
    "build_batch", "map_slots", "build_sampling_batch", "_ints", "_floats", "KVCache.layer", "Decoder._head_weight", "causal_mask",
    "RotaryEmbedding.inv_freq", "rope_divisors", "mix", "_shift_right", "uniform_noise",
})  # fmt: skip
"""Functions that belong to a stage around them, or lay out the step on the host."""
