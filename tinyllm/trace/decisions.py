"""What the scheduler decided and what it did to the blocks, in the words of the record: labels instead of request ids."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tinyllm.block_pool import NULL_BLOCK_ID
from tinyllm.request import RequestStatus
from tinyllm.scheduler import Schedule, ScheduledRequest, Scheduler
from tinyllm.trace.scheduled import BlockSpan, PreemptedRecord, PrefixHit, ScheduleRecord, is_decode

STARTED_AS = {RequestStatus.WAITING: "new", RequestStatus.PREEMPTED: "resumed", RequestStatus.RUNNING: "running"}

BlockState = tuple[str, tuple[str, ...], bool]  # null, held or free; its holders; whether it can be found


def request_label(index: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    label = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        label = chr(ord("A") + letter) + label
    return label


@dataclass
class History:
    """What the steps so far tell about the next one: the requests' labels, who computed each block, which were held."""

    labels: dict[str, str] = field(default_factory=dict)  # by request id
    computed_by: dict[int, str] = field(default_factory=dict)  # label by block id
    held_ids: set[int] = field(default_factory=set)  # in the step before

    def label(self, request_id: str) -> str:
        """The request's label; one that nobody announced gets the next free one."""
        return self.labels.setdefault(request_id, request_label(len(self.labels)))

    def name(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """The labels of several."""
        return tuple(self.label(request_id) for request_id in request_ids)

    def read_hits(self, schedule: Schedule, block_size: int) -> dict[str, PrefixHit]:
        """Each label's prefix hit; remembers who computes the blocks that this step allocates."""
        hits = {}
        for entry in schedule.scheduled:  # in the order in which they got their blocks
            label = self.label(entry.request.request_id)
            if entry.hit_block_ids:
                authors = dict.fromkeys(self.computed_by.get(block_id) for block_id in entry.hit_block_ids)
                num_tokens = len(entry.hit_block_ids) * block_size
                hits[label] = PrefixHit(entry.hit_block_ids, num_tokens, tuple(authors))
            self.computed_by |= dict.fromkeys(entry.new_block_ids, label)
        return hits


def read_schedule(schedule: Schedule, scheduler: Scheduler, history: History) -> ScheduleRecord:
    """The schedule as a record; to be read before the next one is made."""
    preempted, freed_ids = _read_preempted(schedule, scheduler, history)
    holders = _find_holders(schedule, history)
    record = ScheduleRecord(
        token_budget=schedule.token_budget,
        waiting=history.name(request.request_id for request in scheduler.waiting),
        held_back=schedule.held_back,
        preempted=preempted,
        finished=history.name(request_id for request_id in schedule.finished_ids if request_id in history.labels),
        freed_block_ids=tuple(block_id for block_id in freed_ids if block_id in history.held_ids),
        evicted_block_ids=schedule.evicted_block_ids,
        block_map=_map_blocks(schedule, scheduler, holders),
        num_used_blocks=schedule.num_used_blocks,
        num_cached_blocks=schedule.num_cached_blocks,
        num_blocks=schedule.num_blocks,
    )
    history.held_ids = set(holders)
    return record


def count_left(entry: ScheduledRequest) -> int:
    """The tokens that the request still had to compute when the step was made."""
    # One that samples got all of them, and its list has grown since.
    return entry.query_len if entry.samples else entry.request.num_tokens - entry.num_computed_tokens


def computes_last_token(entry: ScheduledRequest) -> bool:
    """Whether the request decodes in this step, by the one definition: `is_decode`."""
    started_as, request = STARTED_AS[entry.started_as], entry.request
    return is_decode(started_as, entry.num_computed_tokens, request.num_prompt_tokens, count_left(entry))


def _read_preempted(
    schedule: Schedule, scheduler: Scheduler, history: History
) -> tuple[tuple[PreemptedRecord, ...], tuple[int, ...]]:
    """Who was preempted for whom, and the freed blocks that were none of theirs. A shared block is freed by its last holder."""
    num_tokens = {request.request_id: request.num_tokens for request in scheduler.waiting}
    freed_ids = dict.fromkeys(schedule.freed_block_ids)
    records: list[PreemptedRecord] = []
    for preemption in reversed(schedule.preempted):
        own_ids = tuple(block_id for block_id in preemption.block_ids if block_id in freed_ids)
        for block_id in own_ids:
            del freed_ids[block_id]
        records.append(PreemptedRecord(
            history.label(preemption.request_id), history.label(preemption.for_request_id), preemption.block_ids,
            own_ids, num_tokens.get(preemption.request_id, 0),
        ))  # fmt: skip
    return tuple(reversed(records)), tuple(freed_ids)


def _find_holders(schedule: Schedule, history: History) -> Mapping[int, Sequence[str]]:
    """Labels by block id while the step computes; what ends with it gives its blocks back only after that."""
    holders: dict[int, list[str]] = {}
    for entry in schedule.scheduled:
        for block_id in entry.block_ids:
            holders.setdefault(block_id, []).append(history.label(entry.request.request_id))
    return holders


def _map_blocks(
    schedule: Schedule, scheduler: Scheduler, holders: Mapping[int, Sequence[str]]
) -> tuple[BlockSpan, ...]:
    """Every block of the pool in exactly one span."""
    is_cached = [block_hash is not None for block_hash in scheduler.pool.hashes]  # a step's end changes no hash

    def state_of(block_id: int) -> BlockState:
        if block_id == NULL_BLOCK_ID:
            return "null", (), False
        names = tuple(holders.get(block_id, ()))
        return "held" if names else "free", names, is_cached[block_id]

    return tuple(_fold(range(schedule.num_blocks), state_of))


def _fold(block_ids: Iterable[int], state_of: Callable[[int], BlockState]) -> Iterator[BlockSpan]:
    for (name, holders, is_cached), span in groupby(block_ids, state_of):
        ids = list(span)
        yield BlockSpan(ids[0], ids[-1], name, holders, is_cached)
