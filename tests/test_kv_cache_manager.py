"""Which blocks requests get and share: vLLM V1's rules, driven without a scheduler and compared with a naive model.

`kv_08` and the like number the cases of this part; pools count the null block, so a pool of 11 has 10 usable blocks.
"""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm import CacheConfig, ModelConfig, RequestError, SamplingParams, SchedulerConfig
from tinyllm.block_pool import NULL_BLOCK_ID, ROOT_HASH, hash_block
from tinyllm.kv_cache import KVCache
from tinyllm.kv_cache_manager import KVCacheManager
from tinyllm.request import Request
from tinyllm.scheduler import Scheduler

COMMON = list(range(48))
NO_READING = SamplingParams(skip_reading_prefix_cache=True)


def make_manager(block_size: int, num_blocks: int, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(CacheConfig(block_size, num_blocks, enable_prefix_caching))


def make_request(token_ids, params=None, **fields) -> Request:
    return Request("r", list(token_ids), params or SamplingParams(), **fields)


def admit(manager: KVCacheManager, request: Request, count: int | None = None) -> tuple[list[int], list[int] | None]:
    """Start a request as the scheduler does, with `count` new tokens or all; (hit blocks, new blocks)."""
    hit_ids = manager.find_cached_blocks(request)
    num_hit = len(hit_ids) * manager.block_size
    count = request.num_tokens - num_hit if count is None else count
    new_ids = manager.allocate_slots(request, count, hit_ids)
    if new_ids is not None:
        request.num_computed_tokens = num_hit + count
    return hit_ids, new_ids


def grow(manager: KVCacheManager, request: Request, token_ids) -> list[int] | None:
    """Append tokens to a request and compute them."""
    request.token_ids += token_ids
    count = request.num_tokens - request.num_computed_tokens
    new_ids = manager.allocate_slots(request, count)
    if new_ids is not None:
        request.num_computed_tokens += count
    return new_ids


def free_ids(manager: KVCacheManager) -> list[int]:
    return list(manager.pool.free_queue)


def refs(manager: KVCacheManager, *block_ids: int) -> list[int]:
    return [manager.pool.ref_counts[block_id] for block_id in block_ids]


def cached_ids(manager: KVCacheManager) -> list[int]:
    return [block_id for block_id, block_hash in enumerate(manager.pool.hashes) if block_hash is not None]


def hits(manager: KVCacheManager, token_ids, **fields) -> list[int]:
    """What a request with these tokens would find; it takes nothing."""
    return manager.find_cached_blocks(make_request(token_ids, **fields))


def snapshot(manager: KVCacheManager, *requests: Request) -> str:
    """Everything that pool and requests hold, in order."""
    return repr((vars(manager.pool) | {"free_queue": free_ids(manager)}, requests))


# --- hashes of a request -----------------------------------------------------------------------------------------------


def test_kv_05_a_hash_covers_the_salt_once_and_comes_with_the_token_that_fills_its_block():
    manager, tokens = make_manager(16, 11), list(range(100, 164))
    request = make_request(tokens[:59], cache_salt="salt1")
    manager.find_cached_blocks(request)
    expected = [hash_block(ROOT_HASH, tokens[:16], (("cache_salt", "salt1"),))]
    for start in (16, 32, 48):
        expected.append(hash_block(expected[-1], tokens[start : start + 16], None))
    assert request.block_hashes == expected[:3]
    request.token_ids += tokens[59:]
    manager.find_cached_blocks(request)
    assert request.block_hashes == expected, "the 4th covers 11 old and 5 new tokens"


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7])
def test_peer_01_the_last_full_block_is_hashed_with_its_own_tokens_at_every_length(block_size):
    """Also where the length is a multiple of the block size, and "the tokens behind the last full block" are none."""
    request, expected = make_request([50]), []
    manager = make_manager(block_size, 3)
    for length in range(1, 25):
        if length > 1:
            request.token_ids.append(50 + length)
        if length % block_size == 0:
            parent = expected[-1] if expected else ROOT_HASH
            expected.append(hash_block(parent, request.token_ids[length - block_size : length]))
        manager.find_cached_blocks(request)
        assert request.block_hashes == expected


# --- sharing -----------------------------------------------------------------------------------------------------------


def test_kv_08_09_10_11_a_common_beginning_is_shared_and_outlives_its_holders():
    manager = make_manager(16, 11)
    r0, r1, r2 = (make_request(COMMON + [900 + 10 * i] * length) for i, length in enumerate((7, 5, 6)))
    assert admit(manager, r0) == ([], [1, 2, 3, 4])
    assert (cached_ids(manager), refs(manager, 1, 2, 3, 4)) == ([1, 2, 3], [1, 1, 1, 1])
    assert admit(manager, r1) == ([1, 2, 3], [5])
    assert r1.num_computed_tokens == 48 + 5
    assert (refs(manager, 1, 2, 3, 4, 5), manager.pool.num_free_blocks) == ([2, 2, 2, 1, 1], 5)
    manager.free(r0)
    manager.free(r1)
    assert (r0.block_ids, r1.block_ids) == ([], [])
    assert free_ids(manager) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert admit(manager, r2) == ([1, 2, 3], [5])


def test_kv_13_14_15_16_what_is_free_can_be_found_until_its_space_is_needed():
    manager = make_manager(4, 9)
    a = make_request(range(10))
    assert admit(manager, a) == ([], [1, 2, 3])
    assert free_ids(manager) == [4, 5, 6, 7, 8]
    b = make_request([*range(8), 77, 77, 77])
    assert admit(manager, b) == ([1, 2], [4])
    assert refs(manager, 1, 2, 4) == [2, 2, 1]
    manager.free(a)
    assert free_ids(manager) == [3, 5, 6, 7, 8]
    manager.free(b)
    assert free_ids(manager) == [4, 3, 5, 6, 7, 8, 2, 1]
    c = make_request(range(100, 128))
    assert admit(manager, c) == ([], [4, 3, 5, 6, 7, 8, 2])
    assert free_ids(manager) == [1]
    assert hits(manager, range(10)) == [1], "block 2's hash was evicted: 4 tokens are left of a"


@pytest.mark.parametrize(("tokens", "num_hit"), [(range(16), 12), (range(17), 16), (range(5), 4), (range(4), 0)])
def test_kv_17_the_last_token_is_always_computed(tokens, num_hit):
    manager = make_manager(4, 9)
    first = make_request(range(16))
    admit(manager, first)
    manager.free(first)
    assert len(hits(manager, tokens)) * 4 == num_hit


def test_kv_17_a_prompt_cached_whole_gets_a_last_block_of_its_own():
    manager = make_manager(4, 9)
    admit(manager, make_request(range(16)))
    again = make_request(range(16))
    assert admit(manager, again) == ([1, 2, 3], [5])
    assert cached_ids(manager) == [1, 2, 3, 4, 5], "block 5 now equals block 4"
    assert hits(manager, range(17)) == [1, 2, 3, 4]


def test_kv_19_20_of_two_requests_the_one_freed_first_is_evicted_first_its_end_before_its_beginning():
    manager = make_manager(16, 11)
    r0, r1 = make_request(range(87)), make_request(range(87, 135))
    assert admit(manager, r0) == ([], [1, 2, 3, 4, 5, 6])
    assert admit(manager, r1) == ([], [7, 8, 9])
    manager.free(r0)
    assert free_ids(manager) == [6, 10, 5, 4, 3, 2, 1]
    manager.free(r1)
    assert free_ids(manager) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    r2 = make_request(range(35))
    assert admit(manager, r2) == ([1, 2], [6])
    assert manager.pool.num_free_blocks == 7


def test_kv_22_a_block_that_was_hit_is_not_handed_out_as_a_new_one():
    manager = make_manager(16, 3)
    r0, r1 = make_request(range(16)), make_request(range(16, 32))
    assert (admit(manager, r0), admit(manager, r1)) == (([], [1]), ([], [2]))
    manager.free(r0)
    manager.free(r1)
    assert free_ids(manager) == [1, 2], "block 1 stands first"
    r2 = make_request(range(32))
    assert admit(manager, r2) == ([1], [2])
    assert r2.block_ids == [1, 2]


def test_kv_23_a_hit_that_nobody_holds_takes_a_free_block_and_none_changes_nothing():
    manager = make_manager(4, 7)
    x, y = make_request(range(8)), make_request(range(16))
    admit(manager, x)
    assert admit(manager, y) == ([1, 2], [3, 4])
    manager.free(y)
    assert free_ids(manager) == [5, 6, 4, 3]
    z = make_request(range(28))
    hit_ids = manager.find_cached_blocks(z)
    assert hit_ids == [1, 2, 3, 4]
    assert manager.num_missing_blocks(z, 28, hit_ids) == 3 + 2
    before = snapshot(manager, x, y, z)
    assert manager.allocate_slots(z, 12, hit_ids) is None
    assert snapshot(manager, x, y, z) == before
    assert (refs(manager, 1, 2, 3, 4), free_ids(manager)) == ([1, 1, 0, 0], [5, 6, 4, 3])
    assert manager.allocate_slots(z, 8, hit_ids) == [5, 6], "two new and two hit ones are just the four"


def test_kv_25_a_block_can_be_found_once_it_is_full():
    manager = make_manager(16, 11)
    request = make_request(range(55))
    assert admit(manager, request) == ([], [1, 2, 3, 4])
    assert (grow(manager, request, range(55, 59)), cached_ids(manager)) == ([], [1, 2, 3])
    assert (grow(manager, request, range(59, 78)), cached_ids(manager)) == ([5], [1, 2, 3, 4])
    assert hits(manager, range(78)) == [1, 2, 3, 4]


def test_kv_26_a_decode_step_takes_a_block_when_the_last_one_is_full_and_caches_what_it_fills():
    scheduler = Scheduler(SchedulerConfig(64, 64, 8), CacheConfig(block_size=4, num_blocks=17))
    request = make_request(range(7))
    scheduler.add_request(request)
    scheduler.update(scheduler.schedule(), [[100]])
    seen = []
    for token_id in range(101, 107):
        schedule = scheduler.schedule()
        seen.append((request.num_computed_tokens, len(request.block_ids), scheduler.pool.num_cached_blocks))
        scheduler.update(schedule, [[token_id]])
    assert seen == [(8, 2, 2), (9, 3, 2), (10, 3, 2), (11, 3, 2), (12, 3, 3), (13, 4, 3)]


def test_kv_28_who_does_not_read_the_cache_still_writes_it():
    manager = make_manager(16, 17)
    first, second, third = (make_request([*COMMON, 90, 91], params) for params in (NO_READING, None, NO_READING))
    assert admit(manager, first) == ([], [1, 2, 3, 4])
    assert cached_ids(manager) == [1, 2, 3]
    assert admit(manager, second) == ([1, 2, 3], [5])
    assert admit(manager, third) == ([], [6, 7, 8, 9])
    hashes = manager.pool.hashes
    assert hashes[6:9] == hashes[1:4] == third.block_hashes
    assert refs(manager, 6, 7, 8) == [1, 1, 1]
    assert (manager.reads_cache(second), manager.reads_cache(third)) == (True, False)


def test_kv_29_equal_blocks_stand_in_for_each_other():
    manager = make_manager(4, 9)
    first, second = (make_request(range(9), NO_READING) for _ in range(2))
    assert (admit(manager, first), admit(manager, second)) == (([], [1, 2, 3]), ([], [4, 5, 6]))
    hashes = manager.pool.hashes
    assert hashes[1] == hashes[4] != hashes[2] == hashes[5]
    manager.free(first)
    assert hits(manager, range(9)) == [1, 2], "the first that were cached"
    manager.pool.forget(1)
    assert hits(manager, range(9)) == [4, 2]
    manager.free(second)
    assert len(manager.pool.allocate(8)) == 8
    assert hits(manager, range(9)) == [] and manager.pool.num_cached_blocks == 0


def test_kv_31_caching_again_changes_nothing():
    manager = make_manager(4, 9)
    request = make_request(range(14))
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    assert cached_ids(manager) == [1, 2]
    manager.allocate_slots(request, 6)
    assert cached_ids(manager) == [1, 2, 3]
    before = snapshot(manager, request)
    for end in (8, 12, 14):
        manager.cache_full_blocks(request, 0, end)
    assert snapshot(manager, request) == before


def test_kv_32_a_block_of_llama_3_8b_takes_two_mebibytes_and_a_gibibyte_holds_512():
    llama = ModelConfig(
        hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=128256, max_positions=8192,
    )  # fmt: skip
    for num_blocks in (1, 512):
        pool = KVCache(llama, CacheConfig(16, 1 + num_blocks), torch.bfloat16, "meta")
        assert pool.layer(0).nbytes == 65_536 * (1 + num_blocks), "the null block has its bytes, too"
        assert pool.num_bytes == 2_097_152 * (1 + num_blocks)


# --- when a block is needed --------------------------------------------------------------------------------------------


def test_peer_02_a_full_pool_refuses_the_first_token_of_the_next_block_and_no_other():
    manager = make_manager(4, 2)
    request = make_request([7])
    assert admit(manager, request) == ([], [1])
    for token_id in (8, 9, 10):
        assert grow(manager, request, [token_id]) == [], "tokens 2 to 4 fit the block that it holds"
    assert (manager.pool.num_free_blocks, manager.num_missing_blocks(request, 5)) == (0, 1)
    before = snapshot(manager, request)
    assert manager.allocate_slots(request, 1) is None
    assert snapshot(manager, request) == before


def test_peer_04_of_blocks_of_one_token_every_token_takes_one():
    manager = make_manager(1, 9)
    request = make_request([1, 2, 3])
    assert admit(manager, request) == ([], [1, 2, 3])
    assert grow(manager, request, [4]) == [4]
    assert hits(manager, [1, 2, 3, 4, 5]) == [1, 2, 3, 4]
    assert hits(manager, [1, 2, 3, 4]) == [1, 2, 3]


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_request_holds_just_the_blocks_that_its_tokens_fill(block_size, counts):
    manager, request = make_manager(block_size, 60), make_request([5] * sum(counts))
    for count in counts:
        assert manager.num_missing_blocks(request, request.num_computed_tokens) == 0
        manager.allocate_slots(request, count)
        request.num_computed_tokens += count
        assert len(request.block_ids) == -(-request.num_computed_tokens // block_size)
        assert len(cached_ids(manager)) == request.num_computed_tokens // block_size


def test_only_real_tokens_fill_a_block():
    """Slots may be given ahead of the tokens that come into them; such blocks cannot be found yet."""
    manager, request = make_manager(4, 9), make_request(range(6))
    assert manager.allocate_slots(request, 9) == [1, 2, 3]
    assert (cached_ids(manager), len(request.block_hashes)) == ([1], 1)


# --- who shares with whom ----------------------------------------------------------------------------------------------


def test_case_069_a_block_that_is_not_full_is_never_shared():
    manager = make_manager(16, 9)
    a = list(range(20))
    b = [*a[:18], 99, a[19]]
    admit(manager, make_request(a))
    hit_ids, new_ids = admit(manager, make_request(b))
    assert (len(hit_ids) * 16, new_ids) == (16, [3])


@pytest.mark.parametrize("position", range(12))
def test_case_069_a_hash_covers_all_tokens_before_it(position):
    manager = make_manager(4, 9)
    admit(manager, make_request(range(13)))
    changed = list(range(13))
    changed[position] = 99
    assert hits(manager, changed) == [1, 2, 3][: position // 4]


@pytest.mark.parametrize(
    ("salt", "other", "is_shared"),
    [
        (None, None, True),
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        (None, "a", False),
        ("", None, False),
    ],
)
def test_requests_share_under_the_same_salt_only(salt, other, is_shared):
    manager = make_manager(4, 9)
    admit(manager, make_request(range(13), cache_salt=salt))
    assert hits(manager, range(13), cache_salt=other) == ([1, 2, 3] if is_shared else [])


def test_a_salt_that_is_no_text_is_refused():
    with pytest.raises(RequestError, match="cache_salt is 5; expected a text or None"):
        make_request([1], cache_salt=5)


def test_a_chain_is_found_up_to_its_first_gap():
    manager = make_manager(4, 9)
    request = make_request(range(17))
    admit(manager, request)
    manager.forget_blocks(request.block_ids, 5)
    assert hits(manager, range(17)) == [1], "of the block that holds token 5, nothing is certain"
    manager.cache_full_blocks(request, 8, 16)
    assert (cached_ids(manager), hits(manager, range(17))) == ([1, 3, 4], [1])


def test_a_lookup_takes_nothing():
    manager = make_manager(4, 9)
    first = make_request(range(9))
    admit(manager, first)
    manager.free(first)
    before = snapshot(manager)
    assert hits(manager, range(9)) == hits(manager, range(9)) == [1, 2]
    assert snapshot(manager) == before


def test_without_prefix_caching_nothing_is_found_and_freed_blocks_go_to_the_head():
    manager = make_manager(4, 9, enable_prefix_caching=False)
    first = make_request(range(12))
    assert admit(manager, first) == ([], [1, 2, 3])
    assert (hits(manager, range(13)), cached_ids(manager), first.block_hashes) == ([], [], [])
    manager.free(first)
    assert free_ids(manager) == [3, 2, 1, 4, 5, 6, 7, 8]


def test_peer_10_a_prompt_seen_before_still_computes_a_token():
    manager = make_manager(4, 9)
    for expected in (([], [1, 2]), ([1], [3])):
        request = make_request(range(8))
        assert admit(manager, request) == expected
    assert request.num_computed_tokens - 4 == 4, "4 were cached, 4 computed"


def test_peer_14_a_block_with_a_new_holder_has_no_stale_hash():
    manager = make_manager(4, 4)
    first = make_request([1, 2, 3, 4, 5])
    admit(manager, first)
    manager.free(first)
    (stale,) = first.block_hashes
    assert manager.pool.find(stale) == 1
    second = make_request(range(100, 109))
    assert admit(manager, second) == ([], [2, 3, 1])
    assert manager.pool.find(stale) is None and hits(manager, [1, 2, 3, 4, 5]) == []
    assert cached_ids(manager) == [2, 3] and manager.pool.num_cached_blocks == 2


def test_peer_19_who_hits_the_end_of_a_chain_holds_all_of_it():
    """Every block on the way, the last one too; eviction counts in blocks, and takes none of them."""
    manager = make_manager(4, 7)
    first = make_request(range(13))
    assert admit(manager, first) == ([], [1, 2, 3, 4])
    manager.free(first)
    second = make_request([*range(12), 99])
    assert admit(manager, second) == ([1, 2, 3], [4]), "the longest match, not its root"
    assert refs(manager, 1, 2, 3) == [1, 1, 1]
    assert free_ids(manager) == [5, 6]
    assert admit(manager, make_request(range(200, 209))) == ([], None), "9 tokens take 3 blocks"
    assert admit(manager, make_request(range(200, 205))) == ([], [5, 6]), "5 tokens take 2"
    assert hits(manager, range(13)) == [1, 2, 3]


def test_peer_19_a_cached_block_does_not_follow_its_callers_list():
    manager, prompt = make_manager(4, 9), list(range(9))
    request = Request("r", prompt, SamplingParams())
    admit(manager, request)
    hashes = list(request.block_hashes)
    prompt[:] = [99] * 9
    manager.free(request)
    request.block_ids.append(7)  # the list of a request that has ended
    assert (hits(manager, range(9)), hits(manager, [99] * 9)) == ([1, 2], [])
    assert manager.pool.hashes[1:3] == hashes


# --- against a naive model ---------------------------------------------------------------------------------------------


class NaiveManager:
    """The same rules without hashes, counters or maps: each cached block knows the whole text up to its end."""

    def __init__(self, block_size: int, num_blocks: int):
        self.block_size = block_size
        self.free_ids = list(range(1, num_blocks))
        self.texts: dict[int, tuple] = {}  # in the order of caching
        self.tables: dict[Request, list[int]] = {}

    def text(self, request: Request, index: int) -> tuple:
        return (request.cache_salt, *request.token_ids[: (index + 1) * self.block_size])

    def find(self, request: Request) -> list[int]:
        hit_ids: list[int] = []
        while not request.params.skip_reading_prefix_cache:
            equal = [i for i, text in self.texts.items() if text == self.text(request, len(hit_ids))]
            if not equal or (len(hit_ids) + 1) * self.block_size >= request.num_tokens:
                break
            hit_ids.append(equal[0])
        return hit_ids

    def allocate(self, request: Request, seq_len: int, hit_ids: list[int]) -> list[int] | None:
        table = self.tables.get(request, []) + hit_ids
        rest = [i for i in self.free_ids if i not in hit_ids]
        count = -(-seq_len // self.block_size) - len(table)
        if count > len(rest):
            return None
        new_ids, self.free_ids = rest[:count], rest[count:]
        for block_id in new_ids:
            self.texts.pop(block_id, None)
        self.tables[request] = table + new_ids
        for index in range(seq_len // self.block_size):
            self.texts.setdefault(self.tables[request][index], self.text(request, index))
        return new_ids

    def free(self, request: Request) -> None:
        table = self.tables.pop(request)
        gone = [i for i in reversed(table) if not any(i in other for other in self.tables.values())]
        self.free_ids = [
            *(i for i in gone if i not in self.texts),
            *self.free_ids,
            *(i for i in gone if i in self.texts),
        ]


def check_laws(manager: KVCacheManager, naive: NaiveManager) -> None:
    """Manager and model agree, and no block is in two states."""
    pool, tables = manager.pool, list(naive.tables.values())
    assert [request.block_ids for request in naive.tables] == tables
    assert free_ids(manager) == naive.free_ids
    assert [i for i in range(pool.num_blocks) if pool.hashes[i] is not None] == sorted(naive.texts)
    assert pool.ref_counts == [sum(i in table for table in tables) for i in range(pool.num_blocks)]
    held = {i for i in range(pool.num_blocks) if pool.ref_counts[i] > 0}
    assert len(held) + pool.num_free_blocks == pool.num_blocks - 1
    assert len(set(free_ids(manager))) == pool.num_free_blocks, "no block is in the queue twice"
    assert NULL_BLOCK_ID not in held | set(free_ids(manager))
    assert not held & set(free_ids(manager))
    assert all(pool.hashes[i] is not None for i in held if pool.ref_counts[i] >= 2), "what is shared is full and hashed"
    assert pool.num_cached_blocks == len(naive.texts), "the map has no stale entry"
    for block_id, text in naive.texts.items():
        found = pool.find(pool.hashes[block_id])
        assert found is not None and naive.texts[found] == text, "what has a hash can be found"


def walk(random: Random, num_operations: int, block_size: int, num_blocks: int) -> None:
    """Add, grow and free requests at random; after each operation every law holds."""
    manager, naive = make_manager(block_size, num_blocks), NaiveManager(block_size, num_blocks)
    for _ in range(num_operations):
        action, running = random.random(), list(naive.tables)
        if action < 0.4 or not running:
            request = make_request(
                [random.randrange(2) for _ in range(random.randint(1, 3 * block_size + 1))],
                NO_READING if random.random() < 0.1 else None,
                cache_salt=random.choice([None, None, "a"]),
            )
            hit_ids = manager.find_cached_blocks(request)
            assert hit_ids == naive.find(request)
            request.num_computed_tokens = len(hit_ids) * block_size
        elif action < 0.7:
            request, hit_ids = random.choice(running), []
            if request.num_computed_tokens == request.num_tokens:
                request.token_ids.append(random.randrange(2))
        else:
            request = random.choice(running)
            naive.free(request)
            manager.free(request)
            check_laws(manager, naive)
            continue
        start, num_left = request.num_computed_tokens, request.num_tokens - request.num_computed_tokens
        count = random.randint(1, num_left)
        request.num_computed_tokens -= len(hit_ids) * block_size  # the scheduler counts them when they are given
        before = snapshot(manager, *running, request)
        new_ids = manager.allocate_slots(request, count, hit_ids)
        assert new_ids == naive.allocate(request, start + count, hit_ids)
        if new_ids is None:
            assert snapshot(manager, *running, request) == before, "a refusal changes nothing"
        else:
            request.num_computed_tokens = start + count
        check_laws(manager, naive)
    assert manager.pool.reset() == (not naive.tables)


@pytest.mark.parametrize("seed", range(6))
def test_kv_34_200_random_operations_keep_every_law(seed):
    walk(Random(seed), 200, block_size=1 + seed % 4, num_blocks=12 + seed)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 25), st.integers(1, 4), st.integers(2, 14))
def test_any_operations_do_what_the_naive_model_does(random, num_operations, block_size, num_blocks):
    walk(random, num_operations, block_size, num_blocks)
