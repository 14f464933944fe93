"""The pool of KV blocks alone: the free queue, the hash chain, and who may be found, shared and evicted."""

import hashlib
from collections import Counter

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tinyllm.block_pool import NULL_BLOCK_ID, ROOT_HASH, BlockPool, FreeBlockQueue, hash_block

NO_SALT = None
SALT = (("cache_salt", "salt1"),)


def snapshot(pool: BlockPool) -> str:
    """Everything that the pool knows, in the order in which it knows it."""
    return repr(vars(pool) | {"free_queue": list(pool.free_queue)})


def check_map(pool: BlockPool) -> None:
    """The map from hashes names every block that has a hash under just that hash, and no other."""
    hashes = [block_hash for block_hash in pool.hashes if block_hash is not None]
    assert pool.num_cached_blocks == len(hashes), "no stale entry, none is missing"
    for block_hash in hashes:
        found = pool.find(block_hash)
        assert found is not None and pool.hashes[found] == block_hash
    assert pool.hashes[NULL_BLOCK_ID] is None


# --- the free queue ----------------------------------------------------------------------------------------------------


def test_kv_01_a_block_leaves_from_anywhere_and_comes_back_at_the_tail():
    queue = FreeBlockQueue(range(5))
    assert (queue.popleft(), len(queue)) == (0, 4)
    queue.remove(2)
    assert len(queue) == 3
    queue.append([0])
    assert len(queue) == 4
    assert [queue.popleft() for _ in range(4)] == [1, 3, 4, 0]
    with pytest.raises(ValueError, match="no block is free"):
        queue.popleft()


def test_kv_02_both_ends_keep_the_given_order():
    queue = FreeBlockQueue([3, 4])
    queue.append([5, 6])
    queue.prepend([1, 2])
    assert list(queue) == [1, 2, 3, 4, 5, 6]


def test_a_block_that_is_not_in_the_queue_cannot_leave_it():
    queue = FreeBlockQueue([1, 2])
    with pytest.raises(KeyError):
        queue.remove(3)
    assert list(queue) == [1, 2]
    assert 1 in queue and 3 not in queue


@given(st.integers(0, 9), st.data())
def test_the_queue_does_what_a_plain_list_does(length, data):
    queue, model = FreeBlockQueue(range(length)), list(range(length))
    outside: list[int] = [10, 11]
    for _ in range(data.draw(st.integers(0, 15))):
        action = data.draw(st.sampled_from(["popleft", "remove", "append", "prepend"]))
        if action in ("append", "prepend"):
            count = data.draw(st.integers(0, len(outside)))
            some, outside = outside[:count], outside[count:]
            getattr(queue, action)(some)
            model = model + some if action == "append" else some + model
        elif model:
            block_id = model[0] if action == "popleft" else data.draw(st.sampled_from(model))
            if action == "popleft":
                assert queue.popleft() == block_id
            else:
                queue.remove(block_id)
            model.remove(block_id)
            outside.append(block_id)
        assert (list(queue), len(queue)) == (model, len(model))
        assert all((block_id in queue) == (block_id in model) for block_id in range(12))


# --- hashes ------------------------------------------------------------------------------------------------------------


def chain(token_ids, block_size, extra_keys=NO_SALT) -> list[bytes]:
    """The hashes of all full blocks."""
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else ROOT_HASH
        hashes.append(hash_block(parent, token_ids[start : start + block_size], None if hashes else extra_keys))
    return hashes


def test_a_hash_is_the_same_in_every_process():
    """It has no random root: two runs, or two machines, could share what they cached."""
    assert hashlib.sha256(b"tinyllm: no block before this one").digest() == ROOT_HASH
    canonical = f'["{ROOT_HASH.hex()}", [1, 2], [["cache_salt", "salt1"]]]'
    assert hash_block(ROOT_HASH, [1, 2], SALT) == hashlib.sha256(canonical.encode()).digest()
    assert len(ROOT_HASH) == len(hash_block(ROOT_HASH, [])) == 32


def test_a_hash_needs_no_certain_kind_of_sequence():
    assert hash_block(ROOT_HASH, [1, 2]) == hash_block(ROOT_HASH, (1, 2)) == hash_block(ROOT_HASH, range(1, 3))


def test_no_two_ways_of_writing_tokens_meet_in_one_hash():
    """Neighbouring digits, an empty block, an empty salt and the place of a key all count."""
    texts = [([1, 23], None), ([12, 3], None), ([123], None), ([], None), ([1], None), ([1, 1], None), ([-1], None)]
    keys = [(("cache_salt", ""),), (("cache_salt", "a"),), (("a", "cache_salt"),), (("cache_salt", "1"),), ()]
    hashes = [hash_block(ROOT_HASH, tokens, extra) for tokens, extra in texts]
    hashes += [hash_block(ROOT_HASH, [1], extra) for extra in keys]
    hashes += [hash_block(hashes[0], [1], None), hash_block(hashes[1], [1], None)]
    assert len(set(hashes)) == len(hashes)


def test_kv_07_another_first_token_changes_every_hash():
    one, other = chain([1, *range(50, 65)], 4), chain([2, *range(50, 65)], 4)
    assert len(one) == len(other) == 4
    assert not set(one) & set(other), "though blocks 1 to 3 hold the same tokens"


token_lists = st.lists(st.integers(0, 3), max_size=12)  # so few tokens that beginnings often agree


@given(token_lists, token_lists, st.integers(1, 4), st.sampled_from([NO_SALT, SALT]))
def test_two_blocks_have_one_hash_exactly_where_all_up_to_their_ends_is_equal(one, other, block_size, extra_keys):
    hashes, other_hashes = chain(one, block_size, extra_keys), chain(other, block_size, extra_keys)
    assert len(hashes) == len(one) // block_size, "only full blocks have one"
    for i, block_hash in enumerate(hashes):
        for j, other_hash in enumerate(other_hashes):
            is_equal = one[: (i + 1) * block_size] == other[: (j + 1) * block_size]
            assert (block_hash == other_hash) == is_equal


@given(token_lists, st.text(max_size=3), st.text(max_size=3), st.integers(1, 4))
def test_two_salts_never_share_a_block(tokens, salt, other_salt, block_size):
    hashes, other_hashes = (chain(tokens, block_size, (("cache_salt", text),)) for text in (salt, other_salt))
    assert not set(hashes) & set(chain(tokens, block_size)), "nor does any with none"
    assert (hashes == other_hashes) == (salt == other_salt or not hashes)
    assert salt == other_salt or not set(hashes) & set(other_hashes)


@given(token_lists, token_lists, st.integers(1, 4))
def test_later_tokens_change_no_earlier_hash(tokens, more, block_size):
    hashes = chain(tokens, block_size)
    assert chain(tokens + more, block_size)[: len(hashes)] == hashes


# --- holders -----------------------------------------------------------------------------------------------------------


def test_kv_04_a_new_pool_keeps_the_null_block_back():
    pool = BlockPool(num_blocks=9)
    assert (pool.num_free_blocks, pool.num_used_blocks, pool.usage) == (8, 0, 0.0)
    assert list(pool.free_queue) == [1, 2, 3, 4, 5, 6, 7, 8] and NULL_BLOCK_ID not in pool.free_queue
    assert pool.allocate(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (pool.num_free_blocks, pool.num_used_blocks, pool.usage) == (0, 8, 1.0)


def test_usage_counts_a_shared_block_once():
    pool = BlockPool(num_blocks=5)
    held = pool.allocate(2)
    pool.touch(held)
    assert (pool.num_used_blocks, pool.usage) == (2, 0.5)
    pool.free(held)
    assert (pool.num_used_blocks, pool.usage) == (2, 0.5), "the other holder keeps them"
    pool.free(held)
    assert (pool.num_used_blocks, pool.usage) == (0, 0.0)


def test_freed_blocks_are_reused_first_tail_first():
    pool = BlockPool(num_blocks=11)  # vLLM's order for blocks without a hash
    first, second = pool.allocate(4), pool.allocate(3)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(10) == [7, 6, 5, 4, 3, 2, 1, 8, 9, 10]


def test_more_than_there_is_cannot_be_allocated():
    pool = BlockPool(num_blocks=3)
    pool.cache(*pool.allocate(1), hash_block(ROOT_HASH, [1]))
    pool.free([1])
    before = snapshot(pool)
    with pytest.raises(ValueError, match="3 blocks are asked for and 2 are free"):
        pool.allocate(3)
    assert snapshot(pool) == before, "a refused allocation takes nothing and evicts nothing"
    assert pool.allocate(2) == [2, 1]


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


# --- what can be found -------------------------------------------------------------------------------------------------


def cached_pool(num_blocks: int, *names: bytes) -> BlockPool:
    """A pool whose first blocks have these hashes; they are held."""
    pool = BlockPool(num_blocks)
    for block_id, name in zip(pool.allocate(len(names)), names, strict=True):
        pool.cache(block_id, name)
    return pool


def test_a_cached_block_is_found_whether_it_is_held_or_free():
    pool = cached_pool(4, b"a")
    assert (pool.find(b"a"), pool.find(b"b"), pool.num_cached_blocks) == (1, None, 1)
    pool.free([1])
    assert (pool.find(b"a"), pool.num_cached_blocks, pool.num_free_blocks) == (1, 1, 3)


def test_a_block_taken_by_another_is_found_no_more():
    pool = cached_pool(3, b"a", b"b")
    pool.free([1])
    assert pool.allocate(1) == [1]
    assert (pool.find(b"a"), pool.find(b"b"), pool.hashes[1]) == (None, 2, None)
    check_map(pool)


def test_caching_a_block_again_changes_nothing():
    pool = cached_pool(4, b"a", b"a")
    before = snapshot(pool)
    pool.cache(1, b"a")
    pool.cache(2, b"a")
    assert snapshot(pool) == before and pool.num_cached_blocks == 2


def test_of_equal_blocks_the_first_is_found_then_the_other():
    pool = cached_pool(4, b"a", b"a")
    assert pool.find(b"a") == 1
    pool.forget(1)
    assert (pool.find(b"a"), pool.num_cached_blocks) == (2, 1)
    pool.forget(1)
    assert pool.find(b"a") == 2, "forgetting a block without a hash does nothing"
    pool.cache(1, b"a")
    assert pool.find(b"a") == 2, "the first that was cached and is left"
    pool.forget(2)
    pool.forget(1)
    assert pool.find(b"a") is None
    check_map(pool)


def test_a_forgotten_hash_leaves_nothing_behind():
    """Or a pool that has seen many texts would fill the memory with the names of what it lost."""
    pool = BlockPool(num_blocks=4)
    pool.allocate(2)
    before = snapshot(pool)
    for name in (b"a", b"b"):
        pool.cache(1, name)
        pool.cache(2, name)
        pool.forget(1)
        pool.forget(2)
    assert snapshot(pool) == before


def test_the_least_recently_used_block_is_evicted_first():
    pool = cached_pool(5, b"a", b"b", b"c", b"d")
    for block_id in (2, 1, 4, 3):
        pool.free([block_id])
    pool.touch([2])
    pool.free([2])  # used again: now the latest
    assert list(pool.free_queue) == [1, 4, 3, 2]
    lost = []
    for _ in range(4):
        before = {name for name in (b"a", b"b", b"c", b"d") if pool.find(name)}
        pool.allocate(1)
        lost += before - {name for name in before if pool.find(name)}
    assert lost == [b"a", b"d", b"c", b"b"]


def test_of_blocks_freed_together_the_end_of_the_text_is_lost_first():
    pool = cached_pool(5, b"a", b"ab", b"abc", b"abcd")
    pool.free([1, 2, 3, 4])
    assert pool.allocate(2) == [4, 3]
    assert [pool.find(name) for name in (b"a", b"ab", b"abc", b"abcd")] == [1, 2, None, None]


def test_blocks_without_a_hash_go_before_those_with_one_in_their_order():
    pool = BlockPool(num_blocks=8)
    pool.allocate(6)
    for block_id in (2, 4):
        pool.cache(block_id, bytes([block_id]))
    pool.free([1, 2, 3, 4, 5])
    assert list(pool.free_queue) == [5, 3, 1, 7, 4, 2]


def test_a_shared_block_comes_free_with_its_last_holder():
    pool = cached_pool(4, b"a")
    pool.touch([1])
    pool.free([1])
    assert (pool.ref_counts[1], list(pool.free_queue)) == (1, [2, 3])
    pool.free([1])
    assert (pool.ref_counts[1], list(pool.free_queue)) == (0, [2, 3, 1])


def test_a_reset_forgets_every_hash_once_nobody_holds_a_block():
    pool = cached_pool(5, b"a", b"b", b"a")
    pool.free([1, 2])
    before = snapshot(pool)
    assert pool.reset() is False
    assert snapshot(pool) == before
    pool.free([3])
    assert pool.reset() is True
    assert (pool.num_cached_blocks, pool.find(b"a"), pool.num_free_blocks) == (0, None, 4)
    assert pool.hashes == [None] * 5
    check_map(pool)


def test_the_pool_tells_what_came_back_and_what_was_lost():
    pool = cached_pool(4, b"a", b"b")
    pool.touch([1])
    pool.free([1, 2])
    assert pool.take_events() == ((2,), ())
    pool.free([1])
    pool.allocate(2)
    assert pool.take_events() == ((1,), (2,)), "block 3 had no hash to lose"
    assert pool.take_events() == ((), ())


class NaivePool:
    """The same pool as plain lists that are searched from end to end."""

    def __init__(self, num_blocks: int):
        self.free_ids = list(range(1, num_blocks))
        self.cached: list[tuple[bytes, int]] = []  # in the order of caching

    def hash_of(self, block_id: int) -> bytes | None:
        return next((name for name, i in self.cached if i == block_id), None)

    def find(self, name: bytes) -> int | None:
        return next((i for other, i in self.cached if other == name), None)

    def forget(self, block_id: int) -> None:
        self.cached = [(name, i) for name, i in self.cached if i != block_id]

    def allocate(self, count: int) -> list[int]:
        taken, self.free_ids = self.free_ids[:count], self.free_ids[count:]
        for block_id in taken:
            self.forget(block_id)
        return taken

    def free(self, block_ids: list[int], still_held: set[int]) -> None:
        gone = [i for i in reversed(block_ids) if i not in still_held]
        named = [i for i in gone if self.hash_of(i)]
        self.free_ids = [i for i in gone if i not in named] + self.free_ids + named


@given(st.integers(2, 9), st.data())
def test_any_series_of_operations_does_what_plain_lists_do(num_blocks, data):
    pool, model = BlockPool(num_blocks), NaivePool(num_blocks)
    tables: list[list[int]] = []
    names = [b"x", b"y", b"z"]
    actions = ["allocate", "cache", "free", "share"] * 2 + ["forget", "reset", "too many"]
    for action in data.draw(st.lists(st.sampled_from(actions), min_size=5, max_size=30)):
        used = sorted({block_id for table in tables for block_id in table})
        if action == "allocate":
            count = data.draw(st.integers(0, pool.num_free_blocks))
            tables.append(pool.allocate(count))
            assert tables[-1] == model.allocate(count)
        elif action == "share" and model.cached:
            table = sorted(data.draw(st.sets(st.sampled_from([i for _, i in model.cached]))))
            pool.touch(table)
            model.free_ids = [i for i in model.free_ids if i not in table]
            tables.append(table)
        elif action == "free" and tables:
            table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            pool.free(table)
            model.free(table, {i for other in tables for i in other})
        elif action == "cache":
            for block_id in [i for i in used if pool.hashes[i] is None]:
                name = data.draw(st.sampled_from([*names, None]))
                if name is not None:
                    pool.cache(block_id, name)
                    model.cached.append((name, block_id))
        elif action == "forget" and model.cached:
            block_id = data.draw(st.sampled_from([i for _, i in model.cached]))
            pool.forget(block_id)
            model.forget(block_id)
        elif action == "reset":
            assert pool.reset() == (not used)
            model.cached = model.cached if used else []
        elif action == "too many":
            before = snapshot(pool)
            with pytest.raises(ValueError):
                pool.allocate(pool.num_free_blocks + 1)
            assert snapshot(pool) == before
        event(action)
        counts = Counter(i for table in tables for i in table)
        assert list(pool.free_queue) == model.free_ids
        assert pool.ref_counts == [counts[i] for i in range(num_blocks)]
        assert pool.hashes == [model.hash_of(i) for i in range(num_blocks)]
        assert [pool.find(name) for name in names] == [model.find(name) for name in names]
        assert pool.num_used_blocks == len(counts) == num_blocks - 1 - pool.num_free_blocks
        check_map(pool)
