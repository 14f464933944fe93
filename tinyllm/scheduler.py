"""Which tokens of which requests the next step computes. Plain Python; the rules are vLLM V1's.

One principle: every step gives each request ``num_tokens - num_computed_tokens`` tokens, clipped by the token budget.
A whole prefill, a chunk of one, a decode step and the recomputation after a preemption are all that same subtraction.

The life of a token: the step that computes the last of a request's tokens samples the next one, which is appended at
once (``num_tokens`` grows). Its key and value come with the step that computes it; from the moment that step is
scheduled, the token counts as computed. A block is needed exactly when ceil(num_tokens / block_size) exceeds the blocks
held, so the sampled token gets its block in the step that computes it, not in the one that samples it.

>>> from tinyllm.request import SamplingParams
>>> scheduler = Scheduler(SchedulerConfig(8, 8, 1), CacheConfig(block_size=2, num_blocks=5))
>>> request = Request("r", [5, 6, 7], SamplingParams(max_tokens=3))
>>> scheduler.add_request(request)
>>> for token_id in (11, 12, 13):
...     schedule = scheduler.schedule()
...     print("computes", *schedule.scheduled[0].token_ids, "in blocks", request.block_ids, end=": ")
...     _ = scheduler.update(schedule, [[token_id]])
...     print(f"num_tokens={request.num_tokens} num_computed_tokens={request.num_computed_tokens}")
computes 5 6 7 in blocks [1, 2]: num_tokens=4 num_computed_tokens=3
computes 11 in blocks [1, 2]: num_tokens=5 num_computed_tokens=4
computes 12 in blocks [1, 2, 3]: num_tokens=6 num_computed_tokens=5

The last token's key and value are never computed: nobody asks for them.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tinyllm.block_pool import BlockPool
from tinyllm.config import CacheConfig, SchedulerConfig
from tinyllm.errors import ConfigError, RequestError
from tinyllm.kv_cache_manager import KVCacheManager
from tinyllm.request import Request, RequestStatus

BUDGET, THRESHOLD = "token budget", "long-prefill threshold"  # what may cut a request's share of a step


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step, frozen at schedule time."""

    request: Request
    token_ids: tuple[int, ...]  # the tokens to compute now
    num_computed_tokens: int  # the tokens before them: in the cache, or written by another request of this step
    block_ids: tuple[int, ...]  # its row of the block table
    new_block_ids: tuple[int, ...]  # those of them that this step allocated
    samples: bool  # False for a prefill chunk that is not the last: its sampled token is thrown away
    hit_block_ids: tuple[int, ...] = ()  # those of them that this step found in the prefix cache
    started_as: RequestStatus = RequestStatus.RUNNING  # WAITING where it is new, PREEMPTED where it comes back
    cut_by: str = ""  # what kept it from getting all its tokens

    @property
    def query_len(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens in total once the step has run."""
        return self.num_computed_tokens + self.query_len


@dataclass(frozen=True)
class Preemption:
    """A running request that lost its blocks because another one needed some (or it could not get its own)."""

    request_id: str
    for_request_id: str
    block_ids: tuple[int, ...]  # what it held


@dataclass(frozen=True)
class Schedule:
    """What one step computes, and the state of queue and pool after deciding it."""

    scheduled: tuple[ScheduledRequest, ...]
    token_budget: int
    preempted: tuple[Preemption, ...]
    finished_ids: tuple[str, ...]  # requests that ended since the schedule before
    held_back: str  # why the first waiting request did not start; empty where none waits
    freed_block_ids: tuple[int, ...]  # that came back to the pool since the schedule before
    evicted_block_ids: tuple[int, ...]  # that this step took although they could still have been found
    num_waiting: int
    num_used_blocks: int
    num_cached_blocks: int  # that can be found by their tokens, held or free
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch."""
        return sum(entry.query_len for entry in self.scheduled)

    @property
    def preempted_ids(self) -> tuple[str, ...]:
        """Who lost its blocks, in that order."""
        return tuple(preemption.request_id for preemption in self.preempted)


@dataclass
class PrefixCacheStats:
    """What requests asked of the prefix cache, counted when they start."""

    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class WaitingQueue:
    """Requests that wait: in order of arrival, or under the policy "priority" by urgency."""

    def __init__(self, policy: str):
        self._is_sorted = policy == "priority"
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def append(self, request: Request) -> None:
        """Queue a new request."""
        self._insert(request) if self._is_sorted else self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted one: at the front, where order of arrival counts."""
        self._insert(request) if self._is_sorted else self._requests.appendleft(request)

    def _insert(self, request: Request) -> None:
        insort(self._requests, request, key=lambda item: item.urgency)

    def popleft(self) -> Request:
        """Take the first."""
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        """Take this one, wherever it stands."""
        self._requests.remove(request)


@dataclass
class _Step:
    """A schedule in the making."""

    budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    held_back: str = ""


class Scheduler:
    """Keeps the waiting and the running requests and hands out tokens and blocks step by step."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig):
        if cache.max_cached_tokens < config.max_model_len:
            needed = cache.count_blocks(config.max_model_len) + 1
            raise ConfigError(
                f"the KV pool of {cache.num_blocks - 1} usable blocks of {cache.block_size} holds {cache.max_cached_tokens} "
                f"tokens and can never fit one request of max_model_len {config.max_model_len}; raise num_blocks to {needed} "
                f"or lower max_model_len to {cache.max_cached_tokens}"
            )
        self.config = config
        self.block_size = cache.block_size
        self.manager = KVCacheManager(cache)
        self.waiting = WaitingQueue(config.policy)
        self.running: list[Request] = []
        self.prefix_cache_stats = PrefixCacheStats()
        self._requests: dict[str, Request] = {}  # waiting or running
        self._finished_ids: list[str] = []
        self._announced_ids: tuple[str, ...] = ()  # by the step under way

    @property
    def pool(self) -> BlockPool:
        """The blocks."""
        return self.manager.pool

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step would do anything."""
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    def check_request(self, request: Request) -> None:
        """RequestError where a request could never run."""
        limit = self.config.max_model_len
        if request.num_prompt_tokens >= limit:
            raise RequestError(
                f"request {request.request_id}: the prompt has {request.num_prompt_tokens} tokens; expected at most "
                f"{limit - 1}, as max_model_len is {limit} and one token must be sampled"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request; RequestError where it could never run, was queued before, or another one has its id."""
        if request.status is not RequestStatus.WAITING or self._requests.get(request.request_id) is request:
            raise RequestError(f"request {request.request_id} was queued before; make a new Request to run it again")
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id} is taken by one that still runs; choose another")
        self.check_request(request)
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def find_request(self, request_id: str) -> Request:
        """The waiting or running request of this id; RequestError where there is none."""
        if request_id not in self._requests:
            raise RequestError(f"no request {request_id} waits or runs; it was never added, or it has ended")
        return self._requests[request_id]

    # --- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Decide the next step: running requests first, then waiting ones unless something had to be preempted."""
        step = _Step(self.config.max_num_batched_tokens)
        self._schedule_running(step)
        self._schedule_waiting(step)
        self._announced_ids, self._finished_ids = tuple(self._finished_ids), []
        freed_ids, evicted_ids = self.pool.take_events()
        return Schedule(
            scheduled=tuple(step.scheduled),
            token_budget=self.config.max_num_batched_tokens,
            preempted=tuple(step.preempted),
            finished_ids=self._announced_ids,
            held_back=step.held_back,
            freed_block_ids=freed_ids,
            evicted_block_ids=evicted_ids,
            num_waiting=len(self.waiting),
            num_used_blocks=self.pool.num_used_blocks,
            num_cached_blocks=self.pool.num_cached_blocks,
            num_blocks=self.pool.num_blocks,
        )

    def _schedule_running(self, step: _Step) -> None:
        for request in list(self.running):
            if step.budget == 0:
                return
            if request.status is RequestStatus.PREEMPTED:  # by one before it, a moment ago
                continue
            num_left = request.num_tokens - request.num_computed_tokens
            query_len, cut_by = self._limit_query_len(num_left, step.budget)
            if query_len == 0:  # all of it is under way in a step whose tokens have not come back yet
                continue
            new_ids = self._allocate_or_preempt(request, query_len, step)
            if new_ids is not None:
                self._add_share(step, request, query_len, new_ids, cut_by=cut_by)

    def _schedule_waiting(self, step: _Step) -> None:
        if step.preempted:  # so somebody waits
            step.held_back = "blocks are short: a running request was preempted in this step"
            return
        while self.waiting:
            step.held_back = self._why_nobody_starts(step)
            if step.held_back:
                return
            request = self.waiting[0]
            hit_ids = self.manager.find_cached_blocks(request)
            num_cached_tokens = len(hit_ids) * self.block_size
            query_len, cut_by = self._limit_query_len(request.num_tokens - num_cached_tokens, step.budget)
            step.held_back = self._why_not_start(request, hit_ids, num_cached_tokens + query_len, cut_by)
            if step.held_back:
                return
            new_ids = self.manager.allocate_slots(request, query_len, hit_ids)
            assert new_ids is not None, "its blocks were counted a moment ago"
            self._start(self.waiting.popleft(), num_cached_tokens)
            self._add_share(step, request, query_len, new_ids, hit_ids, cut_by)

    def _limit_query_len(self, num_left: int, budget: int) -> tuple[int, str]:
        """(how many of a request's left tokens it gets, what cut them)."""
        threshold = self.config.long_prefill_token_threshold
        is_alone = len(self.running) + len(self.waiting) == 1
        wanted = threshold if 0 < threshold < num_left and not is_alone else num_left
        if wanted > budget:
            return budget, BUDGET
        return wanted, THRESHOLD if wanted < num_left else ""

    def _why_nobody_starts(self, step: _Step) -> str:
        """Why this step starts no request, whichever waits first; empty where it may."""
        if step.budget == 0:
            return "the token budget is spent"
        if len(self.running) == self.config.max_num_seqs:
            return f"max_num_seqs {self.config.max_num_seqs} run already"
        return ""

    def _why_not_start(self, request: Request, hit_ids: Sequence[int], seq_len: int, cut_by: str) -> str:
        """Why the first waiting request, and with it all behind it, stays where it is; empty where it may start."""
        if cut_by == BUDGET and not self.config.enable_chunked_prefill:
            return "its prompt exceeds what is left of the token budget, and chunked prefill is off"
        needed_len = request.num_tokens if self.config.reserve_full_sequence else seq_len
        num_missing, num_free = self.manager.num_missing_blocks(request, needed_len, hit_ids), self.pool.num_free_blocks
        return f"blocks are short: it needs {num_missing}, free are {num_free}" if num_missing > num_free else ""

    def _start(self, request: Request, num_cached_tokens: int) -> None:
        """Count what the prefix cache gave, and put the request among the running ones."""
        request.num_computed_tokens = num_cached_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
        if self.manager.reads_cache(request):
            self.prefix_cache_stats.num_requests += 1
            self.prefix_cache_stats.num_queried_tokens += request.num_tokens
            self.prefix_cache_stats.num_hit_tokens += num_cached_tokens
        self.running.append(request)

    def _add_share(
        self,
        step: _Step,
        request: Request,
        query_len: int,
        new_ids: Sequence[int],
        hit_ids: Sequence[int] = (),
        cut_by: str = "",
    ) -> None:
        """Put the request's share into the step, and count it as computed, so that the next step goes on behind it."""
        start = request.num_computed_tokens
        end = start + query_len
        step.scheduled.append(ScheduledRequest(
            request, tuple(request.token_ids[start:end]), start, tuple(request.block_ids), tuple(new_ids),
            samples=end == request.num_tokens, hit_block_ids=tuple(hit_ids), started_as=request.status, cut_by=cut_by,
        ))  # fmt: skip
        step.budget -= query_len
        request.num_computed_tokens = end
        request.status = RequestStatus.RUNNING

    # --- preemption ----------------------------------------------------------------------------------------------------

    def _allocate_or_preempt(self, request: Request, query_len: int, step: _Step) -> list[int] | None:
        """The request's new blocks, if need be taken from others; None where it was itself the one to go."""
        while (new_ids := self.manager.allocate_slots(request, query_len)) is None:
            victim = self._choose_victim()
            step.preempted.append(Preemption(victim.request_id, request.request_id, tuple(victim.block_ids)))
            self._unschedule(victim, step)
            self._preempt(victim)
            if victim is request:
                return None
        return new_ids

    def _choose_victim(self) -> Request:
        """The latest that was admitted; under the policy "priority" the least urgent."""
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: request.urgency)
        return self.running[-1]

    def _unschedule(self, request: Request, step: _Step) -> None:
        """Take back the share that a victim was given in this very step: its tokens go back into the budget."""
        for entry in step.scheduled:
            if entry.request is request:
                step.scheduled.remove(entry)
                step.budget += entry.query_len
                self.manager.forget_blocks(entry.block_ids, entry.num_computed_tokens)  # they will not be computed
                return

    def _preempt(self, request: Request) -> None:
        """Free all blocks and start over later; sampled tokens are kept and recomputed like a prompt."""
        self.running.remove(request)
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.put_back(request)

    def recover(self) -> None:
        """Start over after a step that failed or was interrupted, wherever that was: no key or value counts any more.

        Every request that has not ended waits again, in order of arrival, and keeps its tokens. What was announced as
        ended with the failed step is announced again.
        """
        self.manager.reset()
        self._finished_ids = [*self._announced_ids, *self._finished_ids]
        self._announced_ids = ()
        self.running.clear()
        self.waiting = WaitingQueue(self.config.policy)
        for request in list(self._requests.values()):
            request.block_ids, request.num_computed_tokens = [], 0
            ended = self.check_stop(request) if request.num_output_tokens else None  # by a token that it just got
            if ended or request.status.is_finished:
                self._finish(request, ended or request.status)
                continue
            if request.status is not RequestStatus.WAITING:
                request.status = RequestStatus.PREEMPTED
            self.waiting.append(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False where some are held, unless their requests are to start over."""
        if reset_running_requests:
            for request in reversed(self.running.copy()):
                self._preempt(request)
        return self.pool.reset()

    # --- after the step ------------------------------------------------------------------------------------------------

    def update(self, schedule: Schedule, sampled_token_ids: Sequence[Sequence[int] | None]) -> list[Request]:
        """Append each request's sampled tokens (None: its logits were unusable); return the requests that ended."""
        finished = []
        for entry, token_ids in zip(schedule.scheduled, sampled_token_ids, strict=True):
            request = entry.request
            if not entry.samples or request.status.is_finished:  # a chunk of a prefill; or aborted meanwhile
                continue
            status = RequestStatus.FAILED if token_ids is None else self._append(request, token_ids)
            if status is not None:
                self._finish(request, status)
                finished.append(request)
        self._announced_ids = ()
        return finished

    def _append(self, request: Request, token_ids: Sequence[int]) -> RequestStatus | None:
        """Append tokens one by one until one of them ends the request; how it ended, or None."""
        for token_id in token_ids:
            request.token_ids.append(token_id)
            status = self.check_stop(request)
            if status is not None:
                return status
        return None

    def check_stop(self, request: Request) -> RequestStatus | None:
        """How the last token ends the request: end tokens and stop ids first, then the lengths (vLLM 0.33's order).

        min_tokens is not looked at: until then the sampler draws none of the tokens that would end it.
        """
        params, token_id = request.params, request.token_ids[-1]
        max_tokens = self.config.max_model_len if params.max_tokens is None else params.max_tokens
        if token_id in request.stop_ids:
            request.stop_token_id = token_id
            return RequestStatus.STOPPED
        if request.num_tokens >= self.config.max_model_len or request.num_output_tokens >= max_tokens:
            return RequestStatus.LENGTH_CAPPED
        return None

    def abort(self, request: Request | str, status: RequestStatus = RequestStatus.ABORTED) -> bool:
        """End a request, by itself or by its id, wherever it stands; whether there was anything to end.

        One that has ended, or an id that nobody has, stays as it is. The status is ABORTED where the caller gave it up,
        STOPPED where its text holds a stop string.
        """
        found = self._requests.get(request) if isinstance(request, str) else request
        if not isinstance(found, Request) or found.status.is_finished:
            return False
        self._finish(found, status)
        return True

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
                break
        if self._requests.get(request.request_id) is request:  # not one that was never added
            self._finished_ids.append(request.request_id)
            del self._requests[request.request_id]
        self.manager.free(request)
