"""What one step does for each request, and what the scheduler decided about them and the blocks."""

from dataclasses import dataclass

PLACEHOLDER = -1  # the token id of a dry run, which no vocabulary has


def is_decode(started_as: str, num_computed_tokens: int, num_prompt_tokens: int, num_left: int) -> bool:
    """Whether a request computes the token that it sampled last, and nothing else: see `RequestRecord.is_decode`."""
    return started_as == "running" and num_computed_tokens >= num_prompt_tokens and num_left == 1


@dataclass(frozen=True)
class Candidate:
    """One token that might have come next, with its probability under softmax(logits)."""

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True)
class PrefixHit:
    """Full blocks that a request found in the cache when it started, instead of computing their tokens."""

    block_ids: tuple[int, ...]
    num_tokens: int
    computed_by: tuple[str | None, ...]  # labels, perhaps its own from before a preemption; None: before the trace


@dataclass(frozen=True)
class RequestRecord:
    """One request's part of a step.

    The life of a token: it is sampled and appended at once, at position `seq_len`; its key and value come with the step
    that computes it. If that is to be, its block is `next_block_id`, or a new one where the last block is full.
    """

    label: str
    token_ids: tuple[int, ...]  # computed in this step
    num_prompt_tokens: int
    num_computed_tokens: int
    num_left: int  # tokens that were to be computed, of which this step computes query_len
    block_size: int
    block_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]
    started_as: str  # "new", "resumed" after a preemption, or "running" already
    cut_by: str  # what kept it from getting all tokens that are left; "" where it got them
    hit: PrefixHit | None
    samples: bool
    state: str  # after the step: "running" or "finished"
    finish_reason: str | None
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    method: str  # "greedy", or the parameters of the draw

    @property
    def query_len(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens in total after it."""
        return self.num_computed_tokens + self.query_len

    @property
    def is_dry(self) -> bool:
        """Whether its tokens have no ids, as in a dry run."""
        return PLACEHOLDER in self.token_ids

    @property
    def is_decode(self) -> bool:
        """Whether it computes the token that it sampled last, and nothing else.

        One that comes back after a preemption computes old tokens, as in a prefill.
        """
        return is_decode(self.started_as, self.num_computed_tokens, self.num_prompt_tokens, self.num_left)

    @property
    def num_in_last_block(self) -> int:
        """Slots of the last block that hold a token after the step."""
        return (self.seq_len - 1) % self.block_size + 1

    @property
    def next_block_id(self) -> int | None:
        """The block with room for one more token; None where the next token needs a new block."""
        return self.block_ids[-1] if self.num_in_last_block < self.block_size else None

    @property
    def is_finished(self) -> bool:
        """Whether it ended with this step: the key and value of a token appended now are never computed."""
        return self.state == "finished"


@dataclass(frozen=True)
class PreemptedRecord:
    """A request that lost its blocks in this step; its tokens stay, and all of them are to be computed again."""

    label: str
    for_label: str  # who needed a block; itself, where it was the last in line
    block_ids: tuple[int, ...]  # what it held
    freed_block_ids: tuple[int, ...]  # those of them that nobody else held
    num_tokens: int


@dataclass(frozen=True)
class BlockSpan:
    """Neighbouring blocks of the pool in one state: "null", "held" by the same requests, or "free"."""

    first: int
    last: int
    state: str
    holders: tuple[str, ...]
    is_cached: bool  # full, and can be found by its tokens

    @property
    def num_blocks(self) -> int:
        """Blocks from first to last."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class ScheduleRecord:
    """What the scheduler decided for a step, and what it did to the blocks."""

    token_budget: int
    waiting: tuple[str, ...]  # labels, in the order of the queue
    held_back: str  # why the first of them did not start; "" where none waits
    preempted: tuple[PreemptedRecord, ...]
    finished: tuple[str, ...]  # labels of requests that ended since the step before
    freed_block_ids: tuple[int, ...]  # that came back since the step before, but for those of preempted requests
    evicted_block_ids: tuple[int, ...]  # cached ones that this step gave away for other tokens
    block_map: tuple[BlockSpan, ...]  # the whole pool while the step computes, by block id
    num_used_blocks: int
    num_cached_blocks: int  # that can be found by their tokens, held or free
    num_blocks: int
