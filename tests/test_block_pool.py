"""The free queue of the KV blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.block_pool import NULL_BLOCK_ID, BlockPool


def test_a_new_pool_keeps_the_null_block_back():
    pool = BlockPool(num_blocks=9)
    assert (pool.num_free_blocks, pool.num_used_blocks) == (8, 0)
    assert pool.allocate(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (pool.num_free_blocks, pool.num_used_blocks) == (0, 8)


def test_freed_blocks_are_reused_first_tail_first():
    pool = BlockPool(num_blocks=11)  # vLLM's order for blocks without a hash
    first, second = pool.allocate(4), pool.allocate(3)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(10) == [7, 6, 5, 4, 3, 2, 1, 8, 9, 10]


def test_more_than_there_is_cannot_be_allocated():
    pool = BlockPool(num_blocks=3)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    assert pool.allocate(2) == [1, 2], "a refused allocation takes nothing"


@given(st.integers(1, 12), st.data())
def test_every_block_has_at_most_one_holder(num_blocks, data):
    pool = BlockPool(num_blocks)
    holders: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 20))):
        if holders and data.draw(st.booleans()):
            pool.free(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        else:
            holders.append(pool.allocate(data.draw(st.integers(0, pool.num_free_blocks))))
        held = [block_id for holder in holders for block_id in holder]
        assert len(set(held)) == len(held) == pool.num_used_blocks
        assert NULL_BLOCK_ID not in held
        assert len(held) + pool.num_free_blocks == num_blocks - 1


def test_a_pool_takes_memory_for_what_was_used_not_for_what_it_could_hold():
    pool = BlockPool(2**60)
    assert pool.allocate(2) == [1, 2]
    assert pool.num_free_blocks == 2**60 - 3
