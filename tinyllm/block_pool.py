"""The physical KV blocks and who holds them. Plain Python: a block is only its id; the bytes live in kv_cache.py."""

from collections import deque
from collections.abc import Sequence

NULL_BLOCK_ID = 0  # pads the short rows of a block table; never handed out, never written


class BlockPool:
    """A queue of free block ids; block 0, the null block, is not in it (vLLM: ``BlockPool``).

    >>> pool = BlockPool(num_blocks=5)
    >>> pool.allocate(3), pool.num_free_blocks
    ([1, 2, 3], 1)
    >>> pool.free([1, 2, 3])   # the tail of a request comes back first, and is reused first
    >>> pool.allocate(2)
    [3, 2]
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._freed_ids: deque[int] = deque()  # the head of the queue
        self._next_id = NULL_BLOCK_ID + 1  # behind them come the ids that were never used, in order

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._freed_ids) + self.num_blocks - self._next_id

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold; the null block counts for neither side."""
        return self.num_blocks - 1 - self.num_free_blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the queue; the caller has checked that so many are free."""
        assert 0 <= count <= self.num_free_blocks, (count, self.num_free_blocks)
        return [self._pop() for _ in range(count)]

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one request's blocks, in the order of its table."""
        # Tail first, as a group at the head: what was written last is reused first (vLLM 0.33, blocks without a hash).
        self._freed_ids.extendleft(block_ids)

    def _pop(self) -> int:
        if self._freed_ids:
            return self._freed_ids.popleft()
        self._next_id += 1
        return self._next_id - 1
