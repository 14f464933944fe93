"""Attention of the flat batch: every request reads its own blocks and nothing else."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.batch import build_batch
from tinyllm.kv_cache import write_kv
from tinyllm.layers.attention import reference, sdpa
from tinyllm.layers.attention.per_request import attend_batch, attend_request

BODIES = {"reference": reference.attend, "sdpa": sdpa.attend}


@st.composite
def batches(draw):
    """(block_size, per request: (computed tokens, new tokens, block ids)): mixed prefill, chunks and decode steps."""
    block_size = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4))
    counts = [-(-sum(pair) // block_size) for pair in lengths]
    ids = draw(st.permutations(range(1, 1 + sum(counts))))
    return block_size, [(*pair, [ids.pop() for _ in range(n)]) for pair, n in zip(lengths, counts, strict=True)]


@pytest.mark.parametrize("body", BODIES)
@given(batches(), st.integers(0, 99))
def test_every_request_is_attended_as_if_alone(body, step, seed):
    block_size, requests = step
    generator = torch.Generator().manual_seed(seed)
    num_blocks = 1 + sum(len(ids) for _, _, ids in requests)
    layer_kv = torch.full((2, num_blocks, block_size, 2, 4), 50.0)  # what nobody wrote must not be read
    keys_values = [torch.randn(2, computed + new, 2, 4, generator=generator) for computed, new, _ in requests]
    for (computed, new, ids), (k, v) in zip(requests, keys_values, strict=True):
        slots = [ids[p // block_size] * block_size + p % block_size for p in range(computed + new)]
        write_kv(layer_kv, k, v, torch.tensor(slots))
    batch = build_batch(
        [[0] * new for _, new, _ in requests], [c for c, _, _ in requests], [ids for *_, ids in requests], block_size
    )
    q = torch.randn(len(batch.token_ids), 6, 4, generator=generator)
    out = attend_batch(q, layer_kv, batch, BODIES[body])
    alone = [
        reference.attend(request_q, k, v)
        for request_q, (k, v) in zip(q.split(batch.query_lens_cpu), keys_values, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_request_reads_only_the_blocks_that_its_length_fills():
    layer_kv = torch.randn(2, 6, 4, 2, 4)
    q = torch.randn(1, 2, 4)
    attend = partial(attend_request, q, layer_kv, seq_len=6, attend=reference.attend)
    short, padded, longer = torch.tensor([3, 5]), torch.tensor([3, 5, 0, 0]), torch.tensor([3, 5, 4])
    assert torch.equal(attend(block_table_row=short), attend(block_table_row=padded))
    assert torch.equal(attend(block_table_row=short), attend(block_table_row=longer))
    assert not torch.equal(attend(block_table_row=short), attend(block_table_row=torch.tensor([5, 3])))
