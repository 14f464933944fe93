"""From a schedule's lists to the tensors of one step. The only place where Python lists become tensors.

All requests lie flat behind each other, without padding: `cu_seqlens_q` says where each begins, `block_table` and
`seq_lens` where its keys and values are, `slot_mapping` where the new ones go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyllm.block_pool import NULL_BLOCK_ID
from tinyllm.request import SamplingParams
from tinyllm.shapes import ShapeError


@dataclass(frozen=True)
class FlatBatch:
    """The tensors of one step. Constructing it checks the sizes of every field against the others.

    token_ids and positions name the rows; slot_mapping says where each row's key and value are written; the rows of
    request i are cu_seqlens_q[i] to cu_seqlens_q[i+1]; block_table[i] and seq_lens[i] say what its queries may read;
    logits_indices are the rows that the LM head sees. The `_cpu` tuples are the same numbers as Python ints, so that no
    layer has to ask the device (vLLM: ``_prepare_inputs``; cu_seqlens_q is its query_start_loc).
    """

    token_ids: Int[Tensor, " num_tokens"]
    positions: Int[Tensor, " num_tokens"]
    slot_mapping: Int[Tensor, " num_tokens"]
    block_table: Int[Tensor, "num_reqs max_blocks"]
    cu_seqlens_q: Int[Tensor, " num_reqs+1"]
    seq_lens: Int[Tensor, " num_reqs"]
    logits_indices: Int[Tensor, " num_logits"]
    query_lens_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]

    def __post_init__(self) -> None:
        num_reqs, num_tokens = len(self.seq_lens), len(self.token_ids)
        for name in ("query_lens_cpu", "seq_lens_cpu"):
            if len(getattr(self, name)) != num_reqs:
                raise ShapeError(
                    f"FlatBatch: {name} has {len(getattr(self, name))} numbers, expected num_reqs={num_reqs}"
                )
        if sum(self.query_lens_cpu) != num_tokens:
            raise ShapeError(
                f"FlatBatch: query_lens_cpu sums to {sum(self.query_lens_cpu)}, expected num_tokens={num_tokens}"
            )


def build_batch(
    token_ids: Sequence[Sequence[int]],
    num_computed_tokens: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> FlatBatch:
    """Lay the requests of one step flat: request i computes `token_ids[i]` behind its `num_computed_tokens[i]` tokens.

    >>> batch = build_batch([[7, 8, 9], [5]], [0, 6], [[1], [3, 2]], block_size=4)
    >>> batch.cu_seqlens_q.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()
    ([0, 3, 4], [0, 1, 2, 6], [4, 5, 6, 10])
    """
    query_lens = tuple(len(ids) for ids in token_ids)
    seq_lens = tuple(start + length for start, length in zip(num_computed_tokens, query_lens, strict=True))
    for row, seq_len in zip(block_ids, seq_lens, strict=True):
        assert len(row) * block_size >= seq_len, f"blocks {row} of {block_size} cannot hold {seq_len} tokens"
    ends = list(accumulate(query_lens))
    max_blocks = max(len(row) for row in block_ids)
    padded = [[*row, *[NULL_BLOCK_ID] * (max_blocks - len(row))] for row in block_ids]
    spans = [range(start, end) for start, end in zip(num_computed_tokens, seq_lens, strict=True)]
    positions: Int[Tensor, " num_tokens"] = _ints([position for span in spans for position in span], device)
    request_indices: Int[Tensor, " num_tokens"] = _ints([i for i, n in enumerate(query_lens) for _ in range(n)], device)
    block_table: Int[Tensor, "num_reqs max_blocks"] = _ints(padded, device)
    return FlatBatch(
        token_ids=_ints([token_id for ids in token_ids for token_id in ids], device),
        positions=positions,
        slot_mapping=map_slots(block_table, request_indices, positions, block_size),
        block_table=block_table,
        cu_seqlens_q=_ints([0, *ends], device),
        seq_lens=_ints(list(seq_lens), device),
        logits_indices=_ints([end - 1 for end in ends], device),
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
    )


def map_slots(
    block_table: Int[Tensor, "num_reqs max_blocks"],
    request_indices: Int[Tensor, " num_tokens"],
    positions: Int[Tensor, " num_tokens"],
    block_size: int,
) -> Int[Tensor, " num_tokens"]:
    """The slot of each token: its block's id times block_size, plus its place in the block.

    >>> map_slots(torch.tensor([[5, 2, 9]]), torch.tensor([0, 0]), torch.tensor([6, 8]), block_size=4).tolist()
    [10, 36]
    """
    block_ids: Int[Tensor, " num_tokens"] = block_table[request_indices, positions // block_size]
    return block_ids * block_size + positions % block_size


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of the gathered rows, one entry a row; the truncations hold their off values where unused.

    positions are those of the tokens to be sampled: with the seed and the token id they key the noise. Row
    banned_rows[i] may not draw token banned_ids[i].
    """

    temperature: Float[Tensor, " num_logits"]
    top_k: Int[Tensor, " num_logits"]
    top_p: Float[Tensor, " num_logits"]
    min_p: Float[Tensor, " num_logits"]
    seeds: Int[Tensor, " num_logits"]
    positions: Int[Tensor, " num_logits"]
    banned_rows: Int[Tensor, " num_banned"]
    banned_ids: Int[Tensor, " num_banned"]
    is_all_greedy: bool
    is_banning: bool  # whether any row may not draw some token
    is_truncated: bool  # whether any row uses top_k or top_p: only they need a sort


def build_sampling_batch(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device | str = "cpu",
    banned_ids: Sequence[Sequence[int]] = (),
) -> SamplingBatch:
    """Collect the rows' parameters; a greedy row ignores min_p, top_k and top_p, and top_k off means vocab_size.

    banned_ids lists for each row the token ids that it may not draw; empty where no row has any.
    """
    banned = [(row, token_id) for row, ids in enumerate(banned_ids) for token_id in ids if token_id < vocab_size]
    top_k = [p.top_k if 0 < p.top_k < vocab_size and not p.is_greedy else vocab_size for p in params]
    top_p = [1.0 if p.is_greedy else p.top_p for p in params]
    return SamplingBatch(
        temperature=_floats([p.temperature for p in params], device),
        top_k=_ints(top_k, device),
        top_p=_floats(top_p, device),
        min_p=_floats([0.0 if p.is_greedy else p.min_p for p in params], device),
        seeds=_ints(seeds, device),
        positions=_ints(positions, device),
        banned_rows=_ints([row for row, _ in banned], device),
        banned_ids=_ints([token_id for _, token_id in banned], device),
        is_all_greedy=all(p.is_greedy for p in params),
        is_banning=bool(banned),
        is_truncated=any(k < vocab_size for k in top_k) or any(p < 1 for p in top_p),
    )


def _ints(values: Sequence, device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _floats(values: Sequence, device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
