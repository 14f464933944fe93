"""Which tokens of which requests the next step computes. Plain Python; the rules are vLLM V1's.

One principle: every step gives each request ``num_tokens - num_computed_tokens`` tokens, clipped by the token budget.
A whole prefill, a chunk of one, a decode step and the recomputation after a preemption are all that same subtraction.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tinyllm.block_pool import BlockPool
from tinyllm.config import CacheConfig, SchedulerConfig
from tinyllm.errors import ConfigError, RequestError
from tinyllm.request import Request, RequestStatus


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step, frozen at schedule time."""

    request: Request
    token_ids: tuple[int, ...]  # the tokens to compute now
    num_computed_tokens: int  # the tokens before them, whose keys and values are in the cache
    block_ids: tuple[int, ...]  # its row of the block table
    new_block_ids: tuple[int, ...]  # those of them that this step allocated
    samples: bool  # False for a prefill chunk that is not the last: its sampled token is thrown away

    @property
    def query_len(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens in total once the step has run."""
        return self.num_computed_tokens + self.query_len


@dataclass(frozen=True)
class Schedule:
    """What one step computes, and the state of queue and pool after deciding it."""

    scheduled: tuple[ScheduledRequest, ...]
    token_budget: int
    preempted_ids: tuple[str, ...]
    num_waiting: int
    num_used_blocks: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch."""
        return sum(entry.query_len for entry in self.scheduled)


class Scheduler:
    """Keeps the waiting and the running requests and hands out tokens and blocks step by step."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig):
        if cache.max_cached_tokens < config.max_model_len:
            needed = -(-config.max_model_len // cache.block_size) + 1
            raise ConfigError(
                f"the KV pool of {cache.num_blocks - 1} usable blocks of {cache.block_size} holds {cache.max_cached_tokens} "
                f"tokens and can never fit one request of max_model_len {config.max_model_len}; raise num_blocks to {needed} "
                f"or lower max_model_len to {cache.max_cached_tokens}"
            )
        self.config = config
        self.block_size = cache.block_size
        self.pool = BlockPool(cache.num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step would do anything."""
        return bool(self.waiting or self.running)

    def check_request(self, request: Request) -> None:
        """RequestError where a request could never run."""
        limit = self.config.max_model_len
        if request.num_prompt_tokens >= limit:
            raise RequestError(
                f"request {request.request_id}: the prompt has {request.num_prompt_tokens} tokens; expected at most "
                f"{limit - 1}, as max_model_len is {limit} and one token must be sampled"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request; RequestError where it could never run, or was queued before."""
        if request.status is not RequestStatus.WAITING or request in self.waiting:
            raise RequestError(f"request {request.request_id} was queued before; make a new Request to run it again")
        self.check_request(request)
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Decide the next step: running requests first, then waiting ones unless something had to be preempted."""
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted: list[str] = []
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_new_tokens == 0:  # all of it is under way in a step whose tokens have not come back yet
                position += 1
                continue
            if not self._make_room(request, num_new_tokens, preempted):
                break  # the request itself was the victim, and it was the last one
            scheduled.append(self._take(request, num_new_tokens))
            budget -= num_new_tokens
            position += 1
        while self.waiting and budget > 0 and not preempted and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if self._num_new_blocks(request, request.num_tokens) > self.pool.num_free_blocks:
                break  # the whole sequence must fit, and waiting requests never push out running ones
            self.running.append(self.waiting.popleft())
            request.status = RequestStatus.RUNNING
            scheduled.append(self._take(request, min(request.num_tokens, budget)))
            budget -= scheduled[-1].query_len
        return Schedule(tuple(scheduled), self.config.max_num_batched_tokens, tuple(preempted), len(self.waiting),
                        self.pool.num_used_blocks, self.pool.num_blocks)  # fmt: skip

    def _num_new_blocks(self, request: Request, seq_len: int) -> int:
        """Blocks that the request lacks to hold `seq_len` tokens: ceil(seq_len / block_size) - blocks held."""
        return max(0, -(-seq_len // self.block_size) - len(request.block_ids))

    def _make_room(self, request: Request, num_new_tokens: int, preempted: list[str]) -> bool:
        """Preempt the latest admitted requests until `request` can get its blocks; False when it was the victim."""
        while self._num_new_blocks(request, request.num_computed_tokens + num_new_tokens) > self.pool.num_free_blocks:
            victim = self.running.pop()
            self._preempt(victim)
            preempted.append(victim.request_id)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Free all blocks and start over later; sampled tokens are kept and recomputed like a prompt."""
        self._free_blocks(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _take(self, request: Request, num_new_tokens: int) -> ScheduledRequest:
        """Allocate the blocks and count the tokens as computed, so that the next step goes on behind them."""
        start = request.num_computed_tokens
        end = start + num_new_tokens
        new_block_ids = self.pool.allocate(self._num_new_blocks(request, end))
        request.block_ids += new_block_ids
        request.num_computed_tokens = end
        return ScheduledRequest(request, tuple(request.token_ids[start:end]), start, tuple(request.block_ids),
                                tuple(new_block_ids), samples=end == request.num_tokens)  # fmt: skip

    def abort(self, request: Request, status: RequestStatus = RequestStatus.ABORTED) -> None:
        """End a request, wherever it stands, even if it was never added; one that has ended stays as it is.

        The status is ABORTED where the caller gave it up, STOPPED where its text holds a stop string.
        """
        if request.status.is_finished:
            return
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._free_blocks(request)
        request.status = status

    def _free_blocks(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []

    def undo(self, schedule: Schedule) -> None:
        """Take back what `schedule` counted as computed, where the step failed; the blocks stay with their requests."""
        for entry in schedule.scheduled:
            if not entry.request.status.is_finished:
                entry.request.num_computed_tokens = entry.num_computed_tokens

    def update(self, schedule: Schedule, sampled_token_ids: Sequence[int | None]) -> list[Request]:
        """Append each request's sampled token (None: its logits were unusable); return the requests that ended."""
        finished = []
        for entry, token_id in zip(schedule.scheduled, sampled_token_ids, strict=True):
            request = entry.request
            if not entry.samples or request.status.is_finished:  # a chunk of a prefill; or aborted meanwhile
                continue
            if token_id is None:
                request.status = RequestStatus.FAILED
            else:
                request.token_ids.append(token_id)
                self._check_stop(request, token_id)
            if request.status.is_finished:
                self._free_blocks(request)
                self.running.remove(request)
                finished.append(request)
        return finished

    def _check_stop(self, request: Request, token_id: int) -> None:
        """End tokens and stop ids first, then the lengths (vLLM 0.33's order)."""
        params = request.params
        max_tokens = self.config.max_model_len if params.max_tokens is None else params.max_tokens
        is_eos = token_id in request.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            request.status, request.stop_token_id = RequestStatus.STOPPED, token_id
        elif request.num_tokens >= self.config.max_model_len or len(request.output_token_ids) >= max_tokens:
            request.status = RequestStatus.LENGTH_CAPPED
