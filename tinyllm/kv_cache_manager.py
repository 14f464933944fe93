"""Which blocks a request holds, gets and shares. Plain Python; the rules are vLLM V1's ``KVCacheManager``.

A request needs a block exactly when ceil(tokens / block_size) exceeds the blocks that it holds. A block is shared only
when it is full, so nobody ever writes into a shared one, and a block that is not full has one holder.
"""

from collections.abc import Sequence

from tinyllm.block_pool import ROOT_HASH, BlockPool, hash_block
from tinyllm.config import CacheConfig
from tinyllm.request import Request


class KVCacheManager:
    """The block pool as requests see it.

    >>> from tinyllm.request import SamplingParams
    >>> manager = KVCacheManager(CacheConfig(block_size=4, num_blocks=9))
    >>> a, b = (Request(name, [1, 2, 3, 4, 5, 6, 7, 8, last], SamplingParams()) for name, last in (("a", 9), ("b", 10)))
    >>> manager.find_cached_blocks(a), manager.allocate_slots(a, query_len=9)
    ([], [1, 2, 3])
    >>> hits = manager.find_cached_blocks(b)        # the same first 8 tokens
    >>> hits, manager.allocate_slots(b, query_len=1, hit_ids=hits), b.block_ids
    ([1, 2], [4], [1, 2, 4])
    """

    def __init__(self, cache: CacheConfig):
        self.block_size = cache.block_size
        self._count_blocks = cache.count_blocks
        self.enable_prefix_caching = cache.enable_prefix_caching
        self.pool = BlockPool(cache.num_blocks)

    def reset(self) -> None:
        """A new pool, in which every block is free and none can be found, whatever became of the old one."""
        self.pool = BlockPool(self.pool.num_blocks)

    def find_cached_blocks(self, request: Request) -> list[int]:
        """The longest chain of cached blocks that the request's tokens begin with; nothing is taken.

        At least one token is left to compute, as its logits are needed: of a text that ends with a block and is cached
        whole, that last block is computed again, into a block of its own.
        """
        if not self.reads_cache(request):
            return []
        self._extend_hashes(request)
        hit_ids: list[int] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            hit_ids.append(block_id)
        return hit_ids

    def reads_cache(self, request: Request) -> bool:
        """Whether the request looks for cached blocks at all; if it does not, others still find its own."""
        return self.enable_prefix_caching and not request.params.skip_reading_prefix_cache

    def num_missing_blocks(self, request: Request, seq_len: int, hit_ids: Sequence[int] = ()) -> int:
        """Free blocks that it takes to hold `seq_len` tokens: new ones, and cached ones that nobody holds now."""
        num_idle = sum(self.pool.ref_counts[block_id] == 0 for block_id in hit_ids)
        return self._num_new_blocks(request, seq_len, hit_ids) + num_idle

    def _num_new_blocks(self, request: Request, seq_len: int, hit_ids: Sequence[int]) -> int:
        return max(0, self._count_blocks(seq_len) - len(hit_ids) - len(request.block_ids))

    def allocate_slots(self, request: Request, query_len: int, hit_ids: Sequence[int] = ()) -> list[int] | None:
        """Give the request the blocks for its next tokens, shared ones first; the new ones, or None where too few are free.

        None changes nothing. Blocks that these tokens fill can be found from now on, before their keys and values are
        there: in each layer all of a step's writes go before its reads, so a request of the same step may share them.
        """
        start = request.num_computed_tokens + len(hit_ids) * self.block_size
        seq_len = start + query_len
        if self.num_missing_blocks(request, seq_len, hit_ids) > self.pool.num_free_blocks:
            return None
        self.pool.touch(hit_ids)
        new_ids = self.pool.allocate(self._num_new_blocks(request, seq_len, hit_ids))
        request.block_ids += [*hit_ids, *new_ids]
        self.cache_full_blocks(request, start, seq_len)
        return new_ids

    def cache_full_blocks(self, request: Request, start: int, end: int) -> None:
        """Let those blocks be found that tokens `start` to `end` fill."""
        if not self.enable_prefix_caching:
            return
        self._extend_hashes(request)
        for index in range(start // self.block_size, min(end, request.num_tokens) // self.block_size):
            self.pool.cache(request.block_ids[index], request.block_hashes[index])

    def _extend_hashes(self, request: Request) -> None:
        """Hash the blocks that the request's tokens have filled since the last time."""
        for index in range(len(request.block_hashes), request.num_tokens // self.block_size):
            parent = request.block_hashes[-1] if index else ROOT_HASH
            salt = (("cache_salt", request.cache_salt),) if index == 0 and request.cache_salt is not None else None
            token_ids = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
            request.block_hashes.append(hash_block(parent, token_ids, salt))

    def forget_blocks(self, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Of one request's blocks, let those be found no more that hold any token behind the computed ones."""
        for block_id in block_ids[num_computed_tokens // self.block_size :]:
            self.pool.forget(block_id)

    def free(self, request: Request) -> None:
        """Take all blocks from a request."""
        self.pool.free(request.block_ids)
        request.block_ids = []
