"""The physical KV blocks: who holds them, which are free, and which full ones can be found again by their tokens.

Plain Python: a block is only its id; the bytes live in kv_cache.py. A full block has a hash that covers its tokens and
all tokens before them, so equal hashes mean equal keys and values, and a request that starts with the same tokens can
share the block. A block that nobody holds any more keeps its hash, and can be found, until somebody needs the space.

Source: vLLM 0.33, ``BlockPool``, ``FreeKVCacheBlockQueue``, ``hash_block_tokens``.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

NULL_BLOCK_ID = 0  # pads the short rows of a block table; never handed out, never written
ROOT_HASH = hashlib.sha256(b"tinyllm: no block before this one").digest()  # the parent of every first block

ExtraKeys = tuple[tuple[str, str], ...]  # what must be equal besides the tokens, such as (("cache_salt", "me"),)


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys | None = None) -> bytes:
    """The hash of a full block: of its parent's hash, its own tokens, and whatever else must be equal.

    As the parent's hash covers its own parent, one hash stands for the whole text up to the block's end.

    >>> first = hash_block(ROOT_HASH, [5, 6])
    >>> hash_block(first, [7, 8]) == hash_block(hash_block(ROOT_HASH, [9, 6]), [7, 8])   # another beginning
    False
    """
    return hashlib.sha256(json.dumps([parent.hex(), list(map(int, token_ids)), extra_keys]).encode()).digest()


class FreeBlockQueue:
    """Block ids in the order in which they will be reused; any of them can leave from the middle in constant time.

    >>> queue = FreeBlockQueue([3, 4])
    >>> queue.append([5, 6]); queue.prepend([1, 2]); queue.remove(4)
    >>> queue.popleft(), list(queue)
    (1, [2, 3, 5, 6])
    """

    def __init__(self, block_ids: Iterable[int] = ()):
        self._ids: OrderedDict[int, None] = OrderedDict.fromkeys(block_ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._ids

    def popleft(self) -> int:
        """Take the head; ValueError where there is none."""
        if not self._ids:
            raise ValueError("no block is free")
        return self._ids.popitem(last=False)[0]

    def remove(self, block_id: int) -> None:
        """Take this block, wherever it stands; KeyError where it is not in the queue."""
        del self._ids[block_id]

    def append(self, block_ids: Iterable[int]) -> None:
        """Put blocks behind the tail, in the order given."""
        self._ids.update(dict.fromkeys(block_ids))

    def prepend(self, block_ids: Sequence[int]) -> None:
        """Put blocks before the head, in the order given."""
        for block_id in reversed(block_ids):
            self._ids[block_id] = None
            self._ids.move_to_end(block_id, last=False)


class BlockPool:
    """All blocks with their holders counted; block 0, the null block, belongs to nobody.

    >>> pool = BlockPool(num_blocks=6)
    >>> a = pool.allocate(3)
    >>> pool.cache(a[0], hash_block(ROOT_HASH, [5, 6]))
    >>> pool.free(a)              # last block first; what has no hash goes to the head, what has one to the tail
    >>> list(pool.free_queue)
    [3, 2, 4, 5, 1]
    >>> found = pool.find(hash_block(ROOT_HASH, [5, 6]))
    >>> pool.touch([found])       # shared again, out of the middle of the queue
    >>> found, list(pool.free_queue)
    (1, [3, 2, 4, 5])
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free_queue = FreeBlockQueue(range(NULL_BLOCK_ID + 1, num_blocks))
        self.ref_counts = [0] * num_blocks  # holders of each block
        self.hashes: list[bytes | None] = [None] * num_blocks  # of full blocks that can be found
        self._ids_by_hash: dict[bytes, dict[int, None]] = {}  # two equal blocks may exist; the first one is found
        self._num_cached_blocks = 0
        self._freed_ids: list[int] = []
        self._evicted_ids: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self.free_queue)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold, a shared one once; the null block counts for neither side."""
        return self.num_blocks - 1 - self.num_free_blocks

    @property
    def usage(self) -> float:
        """The used share of the usable blocks, 0 to 1."""
        return self.num_used_blocks / (self.num_blocks - 1)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their tokens, whether somebody holds them or not."""
        return self._num_cached_blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the queue; one that could still be found is forgotten (evicted).

        ValueError where fewer are free, and then none is taken.
        """
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks are asked for and {self.num_free_blocks} are free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        block_id = self.free_queue.popleft()
        if self.hashes[block_id] is not None:
            self.forget(block_id)
            self._evicted_ids.append(block_id)
        self.ref_counts[block_id] = 1
        return block_id

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more holder for each of these blocks; a free one leaves the queue."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                self.free_queue.remove(block_id)
            self.ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One holder less for each block of a request, given in the order of its table.

        The last block comes first, so that of blocks freed together the longest prefix is lost first. Blocks without a
        hash are reused at once, as nothing is lost by it; those with one wait at the tail, where the least recently
        used is next.
        """
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
        freed = [block_id for block_id in reversed(block_ids) if self.ref_counts[block_id] == 0]
        self.free_queue.prepend([block_id for block_id in freed if self.hashes[block_id] is None])
        self.free_queue.append([block_id for block_id in freed if self.hashes[block_id] is not None])
        self._freed_ids += freed

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Let a full block be found by its hash; a second time changes nothing."""
        if self.hashes[block_id] == block_hash:
            return
        self.forget(block_id)
        self._num_cached_blocks += 1
        self.hashes[block_id] = block_hash
        self._ids_by_hash.setdefault(block_hash, {})[block_id] = None

    def forget(self, block_id: int) -> None:
        """Let a block be found no more; an equal one stays."""
        block_hash = self.hashes[block_id]
        if block_hash is None:
            return
        self._num_cached_blocks -= 1
        self.hashes[block_id] = None
        del self._ids_by_hash[block_hash][block_id]
        if not self._ids_by_hash[block_hash]:
            del self._ids_by_hash[block_hash]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this hash, the first cached of equal ones; None where there is none."""
        return next(iter(self._ids_by_hash.get(block_hash, ())), None)

    def reset(self) -> bool:
        """Forget every hash; False, and nothing is done, while somebody holds a block."""
        if self.num_used_blocks:
            return False
        for block_ids in list(self._ids_by_hash.values()):
            for block_id in list(block_ids):
                self.forget(block_id)
        return True

    def take_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(blocks that came back to the queue, blocks whose hash was lost to a new holder), each since the last call."""
        events = tuple(self._freed_ids), tuple(self._evicted_ids)
        self._freed_ids, self._evicted_ids = [], []
        return events
