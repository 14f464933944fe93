"""From lists to the tensors of one step."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm import SamplingParams, ShapeError
from tinyllm.batch import FlatBatch, build_batch, build_sampling_batch, map_slots


def test_decode_prefill_and_decode_lie_flat_behind_each_other():
    batch = build_batch([[70], [1, 2, 3, 4], [90]], [6, 0, 11], [[1, 2], [3], [4, 5, 6]], block_size=4)
    assert batch.token_ids.tolist() == [70, 1, 2, 3, 4, 90]
    assert batch.positions.tolist() == [6, 0, 1, 2, 3, 11]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5, 6]
    assert batch.seq_lens.tolist() == [7, 4, 12]
    assert batch.logits_indices.tolist() == [0, 4, 5]
    assert batch.block_table.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]], "short rows end in the null block"
    assert (batch.query_lens_cpu, batch.seq_lens_cpu) == ((1, 4, 1), (7, 4, 12))


def test_two_prompts_of_unequal_length_need_no_padding():
    batch = build_batch([[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]], [0, 0], [[1], [2, 3]], block_size=4)
    assert batch.token_ids.tolist() == list(range(1, 11))
    assert batch.logits_indices.tolist() == [2, 9]


def test_slots_follow_the_block_table():
    table = torch.tensor([[5, 2, 9], [1, 7, 0]])
    requests, positions = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([6, 7, 8, 0, 1, 4])
    assert map_slots(table, requests, positions, block_size=4).tolist() == [10, 11, 36, 4, 5, 28]


@pytest.mark.parametrize(
    ("block_ids", "num_computed", "block_size", "slot"),
    [
        ([10, 11], 7, 4, 47),  # the 8th token fills the second block
        ([10, 11], 3, 4, 43),
        ([1, 2, 3, 4], 3, 1, 4),  # a block a token
        ([3, 1, 2], 15, 8, 15),
    ],
)
def test_a_decode_step_writes_behind_the_last_token(block_ids, num_computed, block_size, slot):
    batch = build_batch([[9]], [num_computed], [block_ids], block_size)
    assert batch.slot_mapping.tolist() == [slot]
    assert batch.positions.tolist() == [num_computed]


@st.composite
def steps(draw):
    """(block_size, per request: computed tokens, new tokens, a row of the block table)."""
    block_size = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=5))
    counts = [-(-(computed + new) // block_size) for computed, new in lengths]
    ids = draw(st.permutations(range(1, sum(counts) + 3)))
    return block_size, [
        (computed, new, [ids.pop() for _ in range(n)]) for (computed, new), n in zip(lengths, counts, strict=True)
    ]


@given(steps())
def test_the_tensors_say_what_the_lists_said(step):
    block_size, requests = step
    tokens = [[100 * i + t for t in range(new)] for i, (_, new, _) in enumerate(requests)]
    batch = build_batch(tokens, [c for c, _, _ in requests], [row for _, _, row in requests], block_size)
    ends = batch.cu_seqlens_q.tolist()
    assert batch.logits_indices.tolist() == [end - 1 for end in ends[1:]]
    live_slots = []
    for i, (computed, new, row) in enumerate(requests):
        rows = slice(ends[i], ends[i + 1])
        assert batch.token_ids[rows].tolist() == tokens[i]
        assert batch.positions[rows].tolist() == list(range(computed, computed + new))
        assert batch.block_table[i].tolist()[: len(row)] == row
        assert not any(batch.block_table[i].tolist()[len(row) :])
        slots = [row[p // block_size] * block_size + p % block_size for p in range(computed + new)]
        assert batch.slot_mapping[rows].tolist() == slots[computed:]
        live_slots += slots
    assert len(set(live_slots)) == len(live_slots), "slot_mapping is injective over live tokens"
    assert min(live_slots) >= block_size, "no token lies in the null block"
    assert batch.seq_lens.tolist() == list(batch.seq_lens_cpu) == [computed + new for computed, new, _ in requests]


def test_one_field_of_another_length_is_refused():
    batch = build_batch([[1, 2, 3], [5]], [0, 6], [[1], [3, 2]], block_size=4)
    for field in fields(FlatBatch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor) and field.name != "logits_indices":  # its length is its own
            with pytest.raises(ShapeError, match=r"num_tokens|num_reqs"):
                replace(batch, **{field.name: torch.cat([value, value])})


def test_greedy_rows_ignore_the_truncations():
    greedy = SamplingParams(top_k=5, top_p=0.5, min_p=0.5)
    batch = build_sampling_batch([greedy, greedy], [1, 2], [4, 5], vocab_size=100)
    assert (batch.top_k.tolist(), batch.top_p.tolist(), batch.min_p.tolist()) == ([100, 100], [1.0, 1.0], [0.0, 0.0])
    assert batch.is_all_greedy
    assert not batch.is_truncated


def test_rows_keep_their_own_parameters():
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=7, min_p=0.25),
        SamplingParams(temperature=1.5, top_k=-1, top_p=0.75),
        SamplingParams(temperature=1, top_k=1000),
    ]
    batch = build_sampling_batch(params, [-(2**63), 2**63 - 1, 5, 6], [1, 2, 3, 4], vocab_size=100)
    assert batch.temperature.tolist() == [0.0, 0.5, 1.5, 1.0]
    assert batch.top_k.tolist() == [100, 7, 100, 100], "off, or more than there are, is the whole vocabulary"
    assert batch.top_p.tolist() == [1.0, 1.0, 0.75, 1.0]
    assert batch.min_p.tolist() == [0.0, 0.25, 0.0, 0.0]
    assert batch.seeds.tolist() == [-(2**63), 2**63 - 1, 5, 6]
    assert batch.positions.tolist() == [1, 2, 3, 4]
    assert not batch.is_all_greedy
    assert batch.is_truncated


@pytest.mark.parametrize(
    ("params", "is_truncated"),
    [({}, False), ({"min_p": 0.5}, False), ({"top_k": 3}, True), ({"top_p": 0.9}, True), ({"top_k": 100}, False)],
)
def test_only_top_k_and_top_p_need_the_sort(params, is_truncated):
    batch = build_sampling_batch([SamplingParams(temperature=1, **params)], [1], [0], vocab_size=100)
    assert batch.is_truncated is is_truncated
