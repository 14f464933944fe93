"""The whole engine under random orders of everything that can happen to it, on a real model with random weights.

After each event every block must be in one state, every request in one place, and every key and value that somebody
may read must be the one that the text before it gives when it is computed alone.
"""

from collections import Counter
from contextlib import ExitStack
from functools import cache
from itertools import count
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tinyllm.engine
from tinyllm import CacheConfig, RequestError, SamplingParams, SchedulerConfig
from tinyllm.block_pool import ROOT_HASH, BlockPool, hash_block
from tinyllm.engine import Engine
from tinyllm.request import Request
from tinyllm.scheduler import ScheduledRequest
from tinyllm.shapes import checking

MAX_MODEL_LEN = 20
SOME_STOP_IDS = tuple(range(0, 256, 4))
STORY = [3, 4, 4, 3, 4, 3, 3, 3, 4, 3, 4, 4, 4, 4, 3, 3, 4, 3, 4, 4]  # what prompts begin with that go on from nothing


class Alone:
    """What a request gives in an ample engine of its own: whole prefill, one block, no prefix cache, plain attention."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.get = cache(self._get)

    def __call__(self, prompt, params: SamplingParams, max_model_len: int):
        """(outputs, finish reason, keys and values of all tokens but the last)."""
        most = max_model_len - len(prompt)
        num_outputs = most if params.max_tokens is None else min(params.max_tokens, most)
        return self.get(tuple(prompt), params.temperature, params.seed, num_outputs, params.stop_token_ids)

    def _get(self, prompt, temperature, seed, num_outputs, stop_token_ids):
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=num_outputs, stop_token_ids=stop_token_ids
        )
        limits = SchedulerConfig(2 * MAX_MODEL_LEN, 2 * MAX_MODEL_LEN, 1)
        engine = Engine(self.decoder, CacheConfig(2 * MAX_MODEL_LEN, 2, False), limits, check_shapes=False)
        request = Request("alone", prompt, params)
        engine.add_request(request)
        while engine.has_unfinished_requests:
            engine.step()
        return request.output_token_ids, request.finish_reason, engine.kv_cache.kv[:, :, 1, : request.num_tokens - 1]


@st.composite
def setups(draw) -> tuple[CacheConfig, SchedulerConfig, str]:
    """Engines that are small in every way."""
    block_size, max_model_len = draw(st.integers(1, 5)), draw(st.integers(4, MAX_MODEL_LEN))
    enable_chunked_prefill = draw(st.booleans())
    budget = draw(st.integers(1, 12) if enable_chunked_prefill else st.integers(max_model_len, 2 * max_model_len))
    smallest_pool = 1 + -(-max_model_len // block_size)
    limits = SchedulerConfig(
        max_model_len,
        budget,
        draw(st.integers(1, min(5, budget))),
        policy=draw(st.sampled_from(["fcfs", "priority", "priority"])),
        enable_chunked_prefill=enable_chunked_prefill,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3])),
        reserve_full_sequence=draw(st.booleans()),
    )
    cache_config = CacheConfig(
        block_size,
        smallest_pool + draw(st.sampled_from([0, 0, 1, 2, 3, 5, 8])),
        draw(st.sampled_from([True] * 3 + [False])),
    )
    return cache_config, limits, draw(st.sampled_from(["reference", "sdpa"]))


@st.composite
def arrivals(draw) -> tuple[int, int, list[int], dict]:
    """Which request's text a prompt goes on from (the last is 0), after how many tokens and with what; and the other fields."""
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 1)),
        max_tokens=draw(st.sampled_from([1, 2, 3, 5, 8, None])),
        stop_token_ids=draw(st.sampled_from([(), (), SOME_STOP_IDS])),
        skip_reading_prefix_cache=draw(st.sampled_from([False] * 7 + [True])),
    )
    salt = draw(st.sampled_from([None] * 7 + ["mine"]))
    suffix = draw(st.lists(st.integers(3, 4), max_size=4))
    num_shared = draw(st.sampled_from([MAX_MODEL_LEN, MAX_MODEL_LEN, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14]))
    fields = {"params": params, "priority": draw(st.integers(0, 2)), "cache_salt": salt}
    return draw(st.integers(0, 7)), num_shared, suffix, fields


class EngineMachine(RuleBasedStateMachine):
    """An engine, and beside it a record of which text each slot of its cache should hold."""

    def __init__(self, decoders: dict, alone: Alone, seen: Counter):
        super().__init__()
        self.decoders, self.alone, self.seen = decoders, alone, seen
        self.requests: list[Request] = []
        self.expected: dict[Request, tuple[list[int], str, torch.Tensor]] = {}
        self.clock = count()

    @initialize(setup=setups())
    def start(self, setup):
        self.cache_config, self.limits, body = setup
        self.engine = Engine(self.decoders[body], self.cache_config, self.limits, check_shapes=False)
        self.scheduler = self.engine.scheduler
        self.slots = self.engine.kv_cache.kv.flatten(2, 3)  # a view: [num_layers 2 num_slots num_kv_heads head_dim]
        self.expected_slots = torch.full_like(self.slots, torch.nan)
        self.texts: list[tuple | None] = [None] * self.cache_config.num_slots  # (salt, all tokens up to this slot's)
        plain_schedule = self.scheduler.schedule

        def schedule():
            self.last_schedule = plain_schedule()
            return self.last_schedule

        self.scheduler.schedule = schedule

    # --- what can happen -----------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(arrivals(), min_size=1, max_size=3))
    def add(self, arrivals):
        """New prompts, each going on from any length of an earlier request's text, sampled tokens included."""
        for relative, num_shared, suffix, fields in arrivals:
            earlier = self.requests[-1 - relative].token_ids if relative < len(self.requests) else STORY
            prompt = [*earlier[:num_shared], *suffix][: self.limits.max_model_len - 1]
            request = Request(str(len(self.requests)), prompt, arrival_time=next(self.clock), **fields)
            self.expected[request] = self.alone(prompt, request.params, self.limits.max_model_len)
            self.engine.add_request(request)
            self.requests.append(request)

    def is_busy(self) -> bool:
        return any(not request.status.is_finished for request in self.requests)

    @precondition(is_busy)
    @rule(steps=st.integers(1, 5))
    def step(self, steps):
        while steps > 0 and self.engine.has_unfinished_requests:
            self.one_step()
            self.check()
            steps -= 1

    @precondition(is_busy)
    @rule(index=st.integers(0, 5))
    def step_with_an_abort_inside(self, index):
        """Another thread gives a request up while the model runs."""
        request = self.requests[-1 - index % len(self.requests)]
        was_over, outputs = request.status.is_finished, list(request.output_token_ids)

        def give_up(*_) -> None:
            self.engine.abort(request.request_id)

        with ExitStack() as stack:
            stack.callback(self.engine.model.register_forward_pre_hook(give_up).remove)
            self.one_step()
        assert request.output_token_ids == outputs and (was_over or request.finish_reason == "abort")

    @precondition(is_busy)
    @rule(
        place=st.sampled_from(["build_batch", "model", "sample"]),
        error=st.sampled_from([RuntimeError, KeyboardInterrupt]),
        abort_index=st.sampled_from([None, None, 0, 1]),
    )
    def step_that_fails(self, place, error, abort_index):
        """Before, within or behind the model; what it wrote until then is garbage. A request may be given up as well."""

        def fail(*args):
            if abort_index is not None:
                self.engine.abort(self.requests[-1 - abort_index % len(self.requests)].request_id)
            raise error("in the middle of a step")

        def write_garbage_and_fail(_, inputs):
            self.slots[:, :, inputs[0].slot_mapping] = torch.nan
            fail()

        with ExitStack() as stack:
            if place == "model":
                stack.callback(self.engine.model.register_forward_pre_hook(write_garbage_and_fail).remove)
            else:
                stack.enter_context(mock.patch.object(tinyllm.engine, place, fail))
            stack.enter_context(pytest.raises(error))
            self.engine.step()
        for entry in self.last_schedule.scheduled:
            self.record(entry, is_valid=False)
            assert not entry.request.block_ids, "it starts over"
        self.seen["failed step"] += 1

    @precondition(is_busy)
    @rule(index=st.integers(0, 9))
    def abort(self, index):
        """Running, waiting or over."""
        request = self.requests[-1 - index % len(self.requests)]
        was_over, outputs = request.status.is_finished, list(request.output_token_ids)
        assert self.engine.abort(request.request_id) == (not was_over)
        assert not self.engine.abort(request.request_id)
        assert request.output_token_ids == outputs and not request.block_ids
        self.seen["abort"] += not was_over

    @rule(what=st.sampled_from(["refused", "refused", "unknown", "reset", "reset", "reset running"]))
    def something_rare(self, what):
        is_held, num_cached = self.pool.num_used_blocks > 0, self.pool.num_cached_blocks
        if what == "refused":
            unfinished = [request for request in self.requests if not request.status.is_finished]
            refused = [Request("long", STORY, SamplingParams()), *self.requests[-1:]]
            refused += [Request(request.request_id, [3], SamplingParams()) for request in unfinished[:1]]
            for request in refused:
                with pytest.raises(RequestError):
                    self.engine.add_request(request)
        elif what == "unknown":
            assert not self.engine.abort("nobody")
        elif what == "reset":
            assert self.engine.reset_prefix_cache() == (not is_held)
            assert self.pool.num_cached_blocks == (num_cached if is_held else 0)
        else:
            assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert not self.scheduler.running and self.pool.num_cached_blocks == 0

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        most = (1 + sum(len(text) for text, *_ in self.expected.values())) * MAX_MODEL_LEN
        while self.engine.has_unfinished_requests:
            self.one_step()
            self.check()
            most -= 1
            assert most > 0, "the requests push each other out for ever"
        for request, (outputs, reason, _) in self.expected.items():
            assert (request.finish_reason == reason and request.output_token_ids == outputs) or (
                request.finish_reason == "abort" and request.output_token_ids == outputs[: request.num_output_tokens]
            )
        assert self.pool.num_free_blocks == self.pool.num_blocks - 1
        assert self.engine.reset_prefix_cache() and self.pool.num_cached_blocks == 0

    @property
    def pool(self) -> BlockPool:
        """A failed step leaves another one."""
        return self.scheduler.pool

    # --- one step, and what the slots hold after it --------------------------------------------------------------------

    def one_step(self) -> None:
        running = list(self.scheduler.running)
        output = self.engine.step()
        schedule, scheduled = output.schedule, output.schedule.scheduled
        assert 0 < schedule.num_tokens <= self.limits.max_num_batched_tokens, "progress, within the budget"
        assert len(scheduled) <= self.limits.max_num_seqs
        assert len({entry.request.request_id for entry in scheduled}) == len(scheduled)
        written = [slot for entry in scheduled for slot in self.record(entry)]
        assert len(set(written)) == len(written), "two tokens are written into one slot"
        for entry in scheduled:
            assert len(entry.block_ids) == -(-entry.seq_len // self.cache_config.block_size)
            if entry.hit_block_ids:
                assert self.cache_config.enable_prefix_caching and not entry.request.params.skip_reading_prefix_cache
            self.check_slots(entry.request, entry.block_ids, entry.seq_len)
        victims = sorted(running, key=lambda r: r.urgency) if self.limits.policy == "priority" else running
        assert schedule.preempted_ids == tuple(r.request_id for r in victims[::-1][: len(schedule.preempted)])
        ids = [request.request_id for request in running]
        self.seen["preemption of one that had its share"] += sum(
            ids.index(preemption.request_id) < ids.index(preemption.for_request_id) for preemption in schedule.preempted
        )
        self.count(schedule)

    def slots_of(self, block_ids, end: int, start: int = 0) -> list[int]:
        block_size = self.cache_config.block_size
        return [block_ids[p // block_size] * block_size + p % block_size for p in range(start, end)]

    def record(self, entry: ScheduledRequest, is_valid: bool = True) -> list[int]:
        """Write down which text, keys and values the step put into which slots."""
        request, start, end = entry.request, entry.num_computed_tokens, entry.seq_len
        slots = self.slots_of(entry.block_ids, end, start)
        for position, slot in enumerate(slots, start):
            text = (request.cache_salt, tuple(request.token_ids[: position + 1]))
            self.texts[slot] = text if is_valid else None
        kv = self.expected[request][2][:, :, start:end] if is_valid else torch.nan
        self.expected_slots[:, :, slots] = kv
        return slots

    def count(self, schedule) -> None:
        """What the machine is for must have come about when all examples have run."""
        entries = schedule.scheduled
        new = {block_id for entry in entries for block_id in entry.new_block_ids}
        self.seen["step"] += 1
        self.seen["preemption"] += len(schedule.preempted)
        self.seen["eviction"] += len(schedule.evicted_block_ids)
        self.seen["hit"] += sum(bool(entry.hit_block_ids) for entry in entries)
        self.seen["hit on a block of the same step"] += sum(
            not new.isdisjoint(entry.hit_block_ids) for entry in entries
        )
        self.seen["hit after a preemption"] += sum(
            e.hit_block_ids != () and e.request.num_preemptions > 0 for e in entries
        )
        self.seen["chunk"] += sum(not entry.samples for entry in entries)
        self.seen["prefill beside decode"] += len({entry.started_as for entry in entries}) > 1

    # --- what must be true at all times --------------------------------------------------------------------------------

    @invariant()
    def check(self):
        self.check_requests()
        self.check_pool()
        self.check_cached_blocks()

    def check_requests(self) -> None:
        """Each is in exactly one place, holds the blocks of its computed tokens, and has only tokens that are right."""
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        unfinished = [request for request in self.requests if not request.status.is_finished]
        assert sorted(r.request_id for r in running + waiting) == sorted(r.request_id for r in unfinished)
        assert self.engine.has_unfinished_requests == bool(unfinished)
        assert self.scheduler.num_unfinished_requests == len(unfinished)
        assert len(running) <= self.limits.max_num_seqs
        if self.limits.policy == "priority":
            assert waiting == sorted(waiting, key=lambda request: request.urgency)
        for request in self.requests:
            outputs, reason, _ = self.expected[request]
            assert request.output_token_ids == outputs[: request.num_output_tokens], "the tokens of the request alone"
            assert request.finish_reason in (None, reason, "abort")
            if request in running:
                assert request.num_computed_tokens < request.num_tokens, "the last token is not computed yet"
                self.check_slots(request, request.block_ids, request.num_computed_tokens)
            else:
                assert not request.block_ids
        for request in waiting:
            assert request.num_computed_tokens == 0

    def check_slots(self, request: Request, block_ids, num_computed_tokens: int) -> None:
        """Whatever a request reads is its own text, with the keys and values that this text has alone."""
        assert len(block_ids) == -(-num_computed_tokens // self.cache_config.block_size)
        slots = self.slots_of(block_ids, num_computed_tokens)
        assert len(set(slots)) == len(slots) and min(block_ids) > 0
        for position, slot in enumerate(slots, 1):
            assert self.texts[slot] == (request.cache_salt, tuple(request.token_ids[:position]))
        kv = self.expected[request][2][:, :, :num_computed_tokens]
        assert are_close(self.slots[:, :, slots], kv), "keys and values of another text"

    def check_pool(self) -> None:
        """No block is in two states: free or held, by as many as count themselves its holders."""
        pool = self.pool
        holders = Counter(block_id for request in self.requests for block_id in request.block_ids)
        free = list(pool.free_queue)
        assert pool.num_free_blocks == len(free) and pool.num_used_blocks == len(holders)
        assert sorted([*free, *holders]) == list(range(1, pool.num_blocks)), "free + used = total, each block once"
        assert pool.ref_counts == [holders[block_id] for block_id in range(pool.num_blocks)]
        assert all(pool.hashes[block_id] is not None for block_id in holders if holders[block_id] > 1)

    def check_cached_blocks(self) -> None:
        """A block that can be found holds exactly the text that its hash stands for; so do all blocks before it."""
        pool, block_size = self.pool, self.cache_config.block_size
        cached = [block_id for block_id in range(pool.num_blocks) if pool.hashes[block_id] is not None]
        assert pool.num_cached_blocks == len(cached) and 0 not in cached
        assert not cached or self.cache_config.enable_prefix_caching
        for block_id in cached:
            slots = range(block_id * block_size, (block_id + 1) * block_size)
            assert self.texts[slots[-1]] is not None, "the step that should have filled it failed"
            salt, text = self.texts[slots[-1]]
            assert [self.texts[slot] for slot in slots] == [
                (salt, text[: len(text) - block_size + i + 1]) for i in range(block_size)
            ]
            hashes = chain(text, salt, block_size)
            assert pool.hashes[block_id] == hashes[-1]
            for block_hash in hashes:
                found = pool.find(block_hash)
                assert found is not None and pool.hashes[found] == block_hash, "reachable, and from the first block on"
        slots = [block_id * block_size + i for block_id in cached for i in range(block_size)]
        is_right = are_close(self.slots[:, :, slots], self.expected_slots[:, :, slots])
        assert is_right, "a block that can be found holds keys and values of another text"


def are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for float32's rounding; NaN is not."""
    return bool(((found - expected).abs() <= 1e-4).all())


@cache
def chain(text: tuple[int, ...], salt: str | None, block_size: int) -> list[bytes]:
    """The hashes of the blocks that a text fills."""
    assert len(text) % block_size == 0
    hashes = [ROOT_HASH]
    for start in range(0, len(text), block_size):
        extra_keys = (("cache_salt", salt),) if salt is not None and start == 0 else None
        hashes.append(hash_block(hashes[-1], text[start : start + block_size], extra_keys))
    return hashes[1:]


@pytest.fixture
def one_thread():
    """Threads only slow a model of this size down."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("examples", [80, pytest.param(1500, marks=pytest.mark.long)])
def test_whatever_happens_each_request_gets_what_it_gets_alone(examples, tiny_model, one_thread):
    seen: Counter[str] = Counter()
    decoders = {body: tiny_model(attention=body) for body in ("reference", "sdpa")}
    alone = Alone(decoders["reference"])
    with checking(False):
        run_state_machine_as_test(
            lambda: EngineMachine(decoders, alone, seen),
            settings=settings(max_examples=examples, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
        )
    wanted = ("preemption", "eviction", "hit", "hit on a block of the same step", "hit after a preemption", "chunk",
              "prefill beside decode", "failed step", "abort")  # fmt: skip
    wanted = wanted if examples > 1000 else wanted[:3]
    assert all(seen[event] for event in wanted), f"the examples missed something: {seen}"


def test_a_victim_that_had_its_share_of_the_step_leaves_no_block_to_be_found(tiny_model, one_thread):
    """Tokens 9 to 11 of a long prompt would have filled a block; the more urgent request behind it needs one when none is free."""
    seen: Counter[str] = Counter()
    machine = EngineMachine({"sdpa": tiny_model(attention="sdpa")}, Alone(tiny_model()), seen)
    limits = SchedulerConfig(14, 5, 2, policy="priority", long_prefill_token_threshold=3)
    machine.start((CacheConfig(2, 8), limits, "sdpa"))
    params = SamplingParams(max_tokens=2)
    machine.add([(9, 12, [], {"params": params, "priority": 1})])
    machine.one_step()
    machine.add([(9, 0, [3, 3], {"params": params})])
    for _ in range(2):
        machine.one_step()
        machine.check()
    assert seen["preemption of one that had its share"] == 1
    machine.teardown()
