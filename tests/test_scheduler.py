"""The scheduler alone: laws that hold for any workload, with a fake model that reads what lies in its blocks.

The cases with numbers are in test_scheduler_cases.py.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tinyllm import CacheConfig, RequestError, SamplingParams, SchedulerConfig
from tinyllm.block_pool import BlockPool
from tinyllm.request import Request, RequestStatus
from tinyllm.scheduler import Schedule, ScheduledRequest, Scheduler

EOS = 2


def make_scheduler(block_size=16, num_blocks=1000, max_model_len=1024, budget=1024, max_num_seqs=None, **limits):
    config = SchedulerConfig(max_model_len, budget, max_num_seqs or min(128, budget), **limits)
    return Scheduler(config, CacheConfig(block_size, num_blocks))


def add_requests(scheduler: Scheduler, *prompt_lens: int, **params) -> list[Request]:
    settings = SamplingParams(**{"max_tokens": None, **params})
    requests = [Request(f"r{i}", [100 + i] * length, settings, (EOS,)) for i, length in enumerate(prompt_lens)]
    for request in requests:
        scheduler.add_request(request)
    return requests


def shares(schedule: Schedule) -> dict[str, int]:
    return {entry.request.request_id: entry.query_len for entry in schedule.scheduled}


def step(scheduler: Scheduler, token_id: int | None = 7) -> dict[str, int]:
    """One step in which every request samples `token_id`; who got how many tokens."""
    schedule = scheduler.schedule()
    scheduler.update(schedule, [None if token_id is None else [token_id]] * len(schedule.scheduled))
    return shares(schedule)


def test_only_the_last_chunk_of_a_prompt_samples():
    scheduler = make_scheduler(budget=4)
    (request,) = add_requests(scheduler, 10)
    seen = []
    for _ in range(3):
        (entry,) = (schedule := scheduler.schedule()).scheduled
        scheduler.update(schedule, [[7]])
        seen.append((entry.num_computed_tokens, entry.query_len, entry.seq_len, entry.samples, len(request.token_ids)))
    assert seen == [(0, 4, 4, False, 10), (4, 4, 8, False, 10), (8, 2, 10, True, 11)]


def test_a_request_may_preempt_itself():
    scheduler = make_scheduler(block_size=4, num_blocks=5, max_model_len=16)
    a, b = add_requests(scheduler, 7, 8)
    step(scheduler)
    schedule = scheduler.schedule()
    assert shares(schedule) == {"r0": 1}
    assert (schedule.preempted_ids, b.status, a.status) == (("r1",), RequestStatus.PREEMPTED, RequestStatus.RUNNING)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_a_block_is_taken_exactly_when_the_last_one_is_full(block_size):
    scheduler = make_scheduler(block_size, num_blocks=40, max_model_len=30)
    (request,) = add_requests(scheduler, 3)
    for seq_len in range(3, 25):
        (entry,) = (schedule := scheduler.schedule()).scheduled
        assert entry.seq_len == seq_len
        assert len(entry.block_ids) == -(-seq_len // block_size) == len(request.block_ids)
        scheduler.update(schedule, [[7]])


def test_a_full_pool_still_serves_a_request_that_needs_no_block():
    scheduler = make_scheduler(block_size=4, num_blocks=3, max_model_len=8)
    a, b = add_requests(scheduler, 3, 4)
    step(scheduler)
    assert scheduler.pool.num_free_blocks == 0
    assert step(scheduler) == {"r0": 1}, "a's 4th token fits its block; b's 5th does not: b goes"
    assert (len(a.block_ids), b.status) == (1, RequestStatus.PREEMPTED)


def outcome(tokens: list[int], **params) -> tuple[list[int], str | None]:
    """Sample the given tokens one after the other; what the request kept, and why it ended."""
    scheduler = make_scheduler(max_model_len=params.pop("max_model_len", 1024))
    (request,) = add_requests(scheduler, 4, **params)
    for token_id in tokens:
        if scheduler.has_unfinished_requests:
            step(scheduler, token_id)
    assert request.status.is_finished == (not scheduler.has_unfinished_requests)
    assert (scheduler.pool.num_used_blocks == 0) == request.status.is_finished
    return request.output_token_ids, request.finish_reason


def test_a_request_ends_for_the_first_reason_that_holds():
    assert outcome([10, EOS, 11]) == ([10, EOS], "stop")
    assert outcome([EOS, 10, 11], ignore_eos=True) == ([EOS, 10, 11], None)
    assert outcome([EOS, 10], ignore_eos=True, stop_token_ids=[EOS]) == ([EOS], "stop")
    assert outcome([10, 20, 11], stop_token_ids=[20, 21]) == ([10, 20], "stop")
    assert outcome([10, 11, 12], max_tokens=2) == ([10, 11], "length")
    assert outcome([10, EOS], max_tokens=2) == ([10, EOS], "stop"), "an end token wins over the length"
    assert outcome([10, 20], max_tokens=2, stop_token_ids=[20]) == ([10, 20], "stop")
    assert outcome([10, 11, 12], max_model_len=6) == ([10, 11], "length")
    assert outcome([10, None, 11]) == ([10], "error")


def test_the_token_that_stopped_a_request_is_recorded():
    scheduler = make_scheduler()
    (request,) = add_requests(scheduler, 4, stop_token_ids=[20])
    step(scheduler, 20)
    assert request.stop_token_id == 20


def test_an_unusable_row_of_a_chunk_that_does_not_sample_ends_nothing():
    scheduler = make_scheduler(budget=4)
    (request,) = add_requests(scheduler, 6)
    step(scheduler, None)
    assert request.status is RequestStatus.RUNNING
    step(scheduler, None)
    assert request.finish_reason == "error"


def test_abort_works_wherever_a_request_stands():
    scheduler = make_scheduler(max_num_seqs=2)
    running, ended, waiting = add_requests(scheduler, 4, 4, 4)
    stranger = Request("stranger", [1], SamplingParams())
    scheduler.update(scheduler.schedule(), [[7], [EOS]])
    for request in (running, ended, waiting, stranger, running):
        scheduler.abort(request)
    assert [r.finish_reason for r in (running, ended, waiting, stranger)] == ["abort", "stop", "abort", "abort"]
    assert not scheduler.has_unfinished_requests
    assert scheduler.pool.num_used_blocks == 0


def test_running_requests_keep_their_order_of_admission():
    scheduler = make_scheduler(budget=8)
    add_requests(scheduler, 5, 5, 5)
    orders = []
    for _ in range(6):
        step(scheduler)
        orders.append([request.request_id for request in scheduler.running])
    assert all(after[: len(before)] == before for before, after in pairwise(orders))
    assert orders[-1] == ["r0", "r1", "r2"]


def test_a_request_that_was_given_up_within_a_step_is_passed_over():
    scheduler = make_scheduler()
    first, second = add_requests(scheduler, 3, 3)
    schedule = scheduler.schedule()
    scheduler.abort(first)
    assert scheduler.update(schedule, [[7], [8]]) == []
    assert (first.output_token_ids, second.output_token_ids) == ([], [8])


def test_a_request_whose_tokens_are_all_under_way_is_skipped():
    """Two schedules before the first update, as an engine with overlapping steps would ask for them."""
    scheduler = make_scheduler(budget=4)
    add_requests(scheduler, 4, 6)
    assert [shares(scheduler.schedule()) for _ in range(3)] == [{"r0": 4}, {"r1": 4}, {"r1": 2}]


def test_a_step_that_failed_is_scheduled_again():
    scheduler = make_scheduler(budget=4)
    (request,) = add_requests(scheduler, 6)
    failed = scheduler.schedule()
    scheduler.recover()
    assert (request.num_computed_tokens, list(scheduler.waiting), scheduler.running) == (0, [request], [])
    assert scheduler.pool.num_used_blocks == scheduler.pool.num_cached_blocks == 0
    again = scheduler.schedule()
    assert shares(again) == shares(failed) and again.scheduled[0].block_ids == failed.scheduled[0].block_ids


def test_the_requests_of_a_failed_step_go_back_in_their_order():
    scheduler = make_scheduler(max_num_seqs=3)
    requests = add_requests(scheduler, 3, 3, 3, 3)
    scheduler.schedule()
    scheduler.recover()
    assert (list(scheduler.waiting), scheduler.running) == (requests, [])


def test_a_request_is_queued_only_once():
    scheduler = make_scheduler()
    (request,) = add_requests(scheduler, 3, max_tokens=1)
    with pytest.raises(RequestError, match="request r0 was queued before; make a new Request"):
        scheduler.add_request(request)
    step(scheduler)
    assert request.status.is_finished
    with pytest.raises(RequestError, match="queued before"):
        scheduler.add_request(request)


def test_a_waiting_prompt_starts_only_where_the_whole_of_it_fits():
    """vLLM 0.33's admission gate: not its first chunk, the whole sequence."""
    scheduler = make_scheduler(block_size=4, num_blocks=6, max_model_len=20, budget=8)
    add_requests(scheduler, 7, 13)
    assert [step(scheduler) for _ in range(2)] == [{"r0": 7}, {"r0": 1}]  # three free blocks: one chunk would fit
    scheduler = make_scheduler(block_size=4, num_blocks=6, max_model_len=20, budget=8, reserve_full_sequence=False)
    add_requests(scheduler, 7, 13)
    assert step(scheduler) == {"r0": 7, "r1": 1}, "the gate can be switched off"


def test_what_ended_before_a_failed_step_is_announced_behind_it():
    scheduler = make_scheduler()
    first, second, _ = add_requests(scheduler, 3, 3, 3)
    scheduler.schedule()
    scheduler.abort(first)
    failed = scheduler.schedule()
    assert failed.finished_ids == ("r0",)
    scheduler.recover()
    scheduler.abort(second)
    assert scheduler.schedule().finished_ids == ("r0", "r1")
    assert scheduler.schedule().finished_ids == ()


@pytest.mark.parametrize("token_id", [7, EOS])
def test_a_token_that_was_under_way_reaches_a_request_that_was_preempted(token_id):
    scheduler = make_scheduler()
    (request,) = add_requests(scheduler, 3)
    schedule = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status is RequestStatus.PREEMPTED
    scheduler.update(schedule, [[token_id]])
    assert request.output_token_ids == [token_id]
    assert (step(scheduler) == {"r0": 4}) if token_id != EOS else not (scheduler.waiting or scheduler.running)


@pytest.mark.parametrize("nobody", ["r1", "", 0, None, ("r0",)])
def test_giving_up_what_nobody_knows_changes_nothing(nobody):
    scheduler = make_scheduler()
    add_requests(scheduler, 3)
    assert scheduler.abort(nobody) is False
    assert step(scheduler) == {"r0": 3}


def test_an_id_is_free_again_once_its_request_has_ended():
    scheduler = make_scheduler()
    (old,) = add_requests(scheduler, 3)
    in_flight = scheduler.schedule()
    assert scheduler.abort("r0")
    (new,) = add_requests(scheduler, 3)
    assert scheduler.update(in_flight, [[EOS]]) == []
    assert not scheduler.abort(old)
    assert scheduler.schedule().finished_ids == ("r0",)
    assert (new.status, new.output_token_ids, scheduler.running) == (RequestStatus.RUNNING, [], [new])


# --- the policy "priority" ---------------------------------------------------------------------------------------------


def token_by_token(num_usable: int, budget: int, **limits) -> Scheduler:
    """Each token fills a block, and the pool holds one whole request at least."""
    return make_scheduler(1, num_usable + 1, max_model_len=12, budget=budget, policy="priority", **limits)


def add_urgent(scheduler: Scheduler, **given: tuple[int, int]) -> list[Request]:
    """Requests by name, each with (priority, length of its prompt); no two share a token."""
    requests = []
    for name, (priority, length) in given.items():
        prompt = [1000 * ord(name) + i for i in range(length)]
        params = SamplingParams(max_tokens=None)
        requests.append(Request(name, prompt, params, (EOS,), priority=priority, arrival_time=0.0))
        scheduler.add_request(requests[-1])
    return requests


def test_a_victim_of_this_very_step_gives_back_its_tokens():
    scheduler = token_by_token(14, budget=6, long_prefill_token_threshold=3)
    (low,) = add_urgent(scheduler, l=(9, 11))
    assert step(scheduler) == {"l": 6}
    running = add_urgent(scheduler, a=(0, 1), b=(1, 1), c=(2, 1))
    assert step(scheduler) == {"l": 3, "a": 1, "b": 1, "c": 1}
    assert scheduler.pool.num_free_blocks == 2, "which low gets, and then a needs one"
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=4, max_num_seqs=4)
    schedule = scheduler.schedule()
    assert shares(schedule) == {"a": 1, "b": 1, "c": 1}, "low had taken two of the four tokens"
    assert [(p.request_id, p.for_request_id, len(p.block_ids)) for p in schedule.preempted] == [("l", "a", 11)]
    assert (scheduler.running, list(scheduler.waiting)) == (running, [low])


def test_what_a_victim_was_about_to_compute_is_never_found():
    scheduler = token_by_token(12, budget=6, long_prefill_token_threshold=3)
    (low,) = add_urgent(scheduler, l=(9, 11))
    assert step(scheduler) == {"l": 6}
    add_urgent(scheduler, a=(0, 1))
    assert step(scheduler) == {"l": 3, "a": 1}
    schedule = scheduler.schedule()
    assert (shares(schedule), schedule.preempted_ids) == ({"a": 1}, ("l",)), (
        "low took the last two blocks, so a had none"
    )
    assert scheduler.pool.num_free_blocks == 10, "a needed one of them; the other one keeps no hash"
    found = [scheduler.pool.find(block_hash) is not None for block_hash in low.block_hashes]
    assert found == [True] * 9 + [False] * 2
    scheduler.update(schedule, [[EOS]])
    (entry,) = scheduler.schedule().scheduled
    assert (entry.request, entry.num_computed_tokens, entry.query_len) == (low, 9, 2)


def test_when_a_request_preempts_itself_the_more_urgent_ones_behind_it_go_on():
    scheduler = token_by_token(13, budget=32)
    requests = []
    for name, (priority, length) in {"h": (0, 2), "l": (9, 5), "m": (1, 2)}.items():
        requests += add_urgent(scheduler, **{name: (priority, length)})
        step(scheduler)
    high, low, middle = requests
    assert scheduler.pool.num_free_blocks == 1
    schedule = scheduler.schedule()
    assert shares(schedule) == {"h": 1, "m": 1}
    assert [(p.request_id, p.for_request_id) for p in schedule.preempted] == [("l", "l")]
    assert (scheduler.running, list(scheduler.waiting)) == ([high, middle], [low])


def test_as_many_go_as_are_needed_the_least_urgent_first():
    scheduler = token_by_token(12, budget=6, reserve_full_sequence=False)
    add_urgent(scheduler, a=(9, 2), b=(8, 2), c=(7, 2))
    assert step(scheduler) == {"c": 2, "b": 2, "a": 2}
    add_urgent(scheduler, h=(0, 11))
    assert step(scheduler) == {"c": 1, "b": 1, "a": 1, "h": 3}
    assert scheduler.pool.num_free_blocks == 0
    schedule = scheduler.schedule()
    assert [(p.request_id, p.for_request_id) for p in schedule.preempted] == [("a", "c"), ("b", "h")]
    assert shares(schedule) == {"c": 1, "h": 4}, "b had got a token, and gave it back"
    assert "preempted in this step" in schedule.held_back
    assert [request.request_id for request in scheduler.waiting] == ["b", "a"]


def test_a_preempted_request_queues_by_its_urgency():
    scheduler = token_by_token(12, budget=32, max_num_seqs=2)
    low, high = add_urgent(scheduler, l=(5, 5)) + add_urgent(scheduler, h=(0, 5))
    step(scheduler)
    add_urgent(scheduler, x=(4, 1), y=(6, 1))
    step(scheduler)
    assert step(scheduler) == {"h": 1}
    assert (scheduler.running, [request.request_id for request in scheduler.waiting]) == ([high], ["x", "l", "y"])
    assert low.num_preemptions == 1


def test_an_urgent_request_that_waits_pushes_out_nobody():
    scheduler = token_by_token(12, budget=32, max_num_seqs=1)
    add_urgent(scheduler, l=(9, 2))
    step(scheduler)
    add_urgent(scheduler, h=(0, 2))
    assert [step(scheduler) for _ in range(3)] == [{"l": 1}] * 3
    scheduler.abort("l")
    assert step(scheduler) == {"h": 2}


# --- any workload ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request to come."""

    steps: int  # before it comes
    prompt: list[int]
    max_tokens: int
    priority: int
    salt: str | None
    skips_cache: bool


@dataclass(frozen=True)
class Workload:
    """Requests, limits that may be tight in every way, and what else happens, by the number of the step."""

    limits: SchedulerConfig
    cache: CacheConfig
    arrivals: list[Arrival]
    failing_steps: frozenset[int]
    reset_steps: frozenset[int]


@st.composite
def workloads(draw, fails=True):
    block_size, max_model_len, chunked = draw(st.integers(1, 5)), draw(st.integers(2, 24)), draw(st.booleans())
    budget = draw(st.integers(1 if chunked else max_model_len, 30))
    smallest_pool = 1 + -(-max_model_len // block_size)
    limits = SchedulerConfig(
        max_model_len,
        budget,
        max_num_seqs=draw(st.integers(1, min(budget, 6))),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3, 8])),
        reserve_full_sequence=draw(st.booleans()),
    )
    cache = CacheConfig(block_size, smallest_pool + draw(st.integers(0, 8)), draw(st.sampled_from([True, True, False])))
    token_ids = st.sampled_from([3, 4]) if draw(st.booleans()) else st.integers(3, 99)
    arrival = st.builds(
        Arrival,
        st.integers(0, 6),
        st.lists(token_ids, min_size=1, max_size=max_model_len - 1),
        st.integers(1, 12),
        st.integers(0, 2),
        st.sampled_from([None, None, None, "salt"]),
        st.sampled_from([False, False, False, True]),
    )
    some_steps = st.frozensets(st.integers(1, 30), max_size=4)
    arrivals = draw(st.lists(arrival, min_size=1, max_size=7))
    return Workload(limits, cache, arrivals, draw(some_steps) if fails else frozenset(), draw(some_steps))


def fake_token(token_ids: list[int]) -> int:
    """A stand-in for the model: the next token depends on every token before it, and is an end token now and then."""
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id) % 1009
    return EOS if value % 13 == 0 else 3 + value


def fake_outputs(prompt: list[int], max_tokens: int, max_model_len: int) -> tuple[list[int], str]:
    """What a request must get, worked out without a scheduler."""
    token_ids = list(prompt)
    while True:
        token_ids.append(fake_token(token_ids))
        outputs = token_ids[len(prompt) :]
        if outputs[-1] == EOS:
            return outputs, "stop"
        if len(token_ids) >= max_model_len or len(outputs) >= max_tokens:
            return outputs, "length"


class FakeModel:
    """Keeps in each slot what a key and value depend on: the salt, and all tokens up to this one."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[int, tuple | None] = {}

    def _slots(self, entry: ScheduledRequest) -> list[int]:
        size = self.block_size
        return [entry.block_ids[p // size] * size + p % size for p in range(entry.seq_len)]

    def run(self, schedule: Schedule) -> list[list[int]]:
        """First all writes, then all reads, as in a layer: a token for each request."""
        for entry in schedule.scheduled:
            for position, slot in list(enumerate(self._slots(entry)))[entry.num_computed_tokens :]:
                self.slots[slot] = (entry.request.cache_salt, *entry.request.token_ids[: position + 1])
        tokens = []
        for entry in schedule.scheduled:
            texts = [self.slots.get(slot) for slot in self._slots(entry)]
            expected = [(entry.request.cache_salt, *entry.request.token_ids[: p + 1]) for p in range(entry.seq_len)]
            assert texts == expected, "all that is read was computed, for this text and no other"
            tokens.append([fake_token([text[-1] for text in expected])])
        return tokens

    def fail(self, schedule: Schedule) -> None:
        """Break off in the middle: what the step was to write holds anything now."""
        for entry in schedule.scheduled:
            for slot in self._slots(entry)[entry.num_computed_tokens :]:
                self.slots[slot] = None


def check_pool(pool: BlockPool, tables: list[list[int]]) -> None:
    """No block is in two states, and what is shared or can be found is what it should be."""
    holders = Counter(block_id for table in tables for block_id in table)
    free = list(pool.free_queue)
    assert len(set(free)) == len(free) == pool.num_free_blocks
    assert len(free) + len(holders) == pool.num_blocks - 1, "free + used = total"
    assert pool.num_used_blocks == len(holders)
    for block_id in range(1, pool.num_blocks):
        assert pool.ref_counts[block_id] == holders[block_id]
        assert (block_id in pool.free_queue) == (holders[block_id] == 0)
        block_hash = pool.hashes[block_id]
        assert holders[block_id] < 2 or block_hash is not None, "only a full block is shared"
        assert block_hash is None or pool.find(block_hash) is not None, "what has a hash can be found"
    assert pool.hashes[0] is None and 0 not in holders


def check_laws(scheduler: Scheduler, schedule: Schedule, known: list[Request]) -> None:
    limits, running = scheduler.config, scheduler.running
    assert 0 < schedule.num_tokens <= limits.max_num_batched_tokens, "progress, within the budget"
    assert len(running) <= limits.max_num_seqs
    check_pool(scheduler.pool, [request.block_ids for request in known])
    assert schedule.num_used_blocks == scheduler.pool.num_used_blocks
    for request in known:
        places = running.count(request) + list(scheduler.waiting).count(request)
        assert places == (0 if request.status.is_finished else 1), "a request is in exactly one queue until it ends"
        num_kept = 0 if request.status.is_finished else request.num_computed_tokens
        assert len(request.block_ids) == -(-num_kept // scheduler.block_size)
        assert num_kept == 0 or request in running, "who waits has nothing"
    scheduled = [entry.request for entry in schedule.scheduled]
    assert len(set(scheduled)) == len(scheduled) and set(scheduled) <= set(running)
    assert set(scheduled) == set(running) or schedule.num_tokens == limits.max_num_batched_tokens, "no token is wasted"
    assert bool(schedule.held_back) == (schedule.num_waiting > 0)


def check_entries(scheduler: Scheduler, schedule: Schedule) -> None:
    limits, threshold = scheduler.config, scheduler.config.long_prefill_token_threshold
    is_alone = scheduler.num_unfinished_requests == 1
    for entry in schedule.scheduled:
        assert list(entry.token_ids) == entry.request.token_ids[entry.num_computed_tokens : entry.seq_len]
        assert entry.samples == (entry.seq_len == entry.request.num_tokens) == (entry.cut_by == "")
        assert is_alone or not threshold or entry.query_len <= threshold
        assert not (is_alone and entry.cut_by) or schedule.num_tokens == limits.max_num_batched_tokens
        if entry.started_as is not RequestStatus.RUNNING:
            assert not schedule.preempted, "nobody starts in a step that preempts"
            assert limits.enable_chunked_prefill or entry.cut_by != "token budget", "whole, if not by the threshold"
            assert entry.num_computed_tokens == len(entry.hit_block_ids) * scheduler.block_size
            assert not entry.hit_block_ids or scheduler.manager.reads_cache(entry.request)
    assert scheduler.manager.enable_prefix_caching or scheduler.pool.num_cached_blocks == 0


def check_order(scheduler: Scheduler, schedule: Schedule, known: list[Request], fails: bool) -> None:
    by_id = {request.request_id: request for request in known}
    waiting = [request.urgency for request in scheduler.waiting]
    pairs = [(by_id[p.request_id], by_id[p.for_request_id]) for p in schedule.preempted]
    if scheduler.config.policy == "priority":
        assert waiting == sorted(waiting)
        assert all(victim.urgency >= winner.urgency for victim, winner in pairs)
        assert all(victim.urgency > request.urgency for victim, _ in pairs for request in scheduler.running)
    elif not fails:  # the requests of a failed step go behind those that were running and had no share in it
        order = [known.index(request) for request in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order), "first come, first served"


def make_workload_request(name: str, arrival: Arrival) -> Request:
    params = SamplingParams(max_tokens=arrival.max_tokens, skip_reading_prefix_cache=arrival.skips_cache)
    at = {"priority": arrival.priority, "arrival_time": float(arrival.steps), "cache_salt": arrival.salt}
    return Request(name, arrival.prompt, params, (EOS,), **at)


def run_workload(workload: Workload, after_step: Callable[[Scheduler], object] = lambda _: None) -> list[Request]:
    """Run to the end, or fail where a law breaks; the requests, in the order of `arrivals`."""
    scheduler, model = Scheduler(workload.limits, workload.cache), FakeModel(workload.cache.block_size)
    requests = [make_workload_request(str(i), arrival) for i, arrival in enumerate(workload.arrivals)]
    pending = deque(sorted(requests, key=lambda request: request.arrival_time))
    known: list[Request] = []
    announced: list[str] = []
    now = 0
    while pending or scheduler.has_unfinished_requests:
        assert now < 1000, "it comes to an end"
        while pending and pending[0].arrival_time <= now:
            known.append(pending.popleft())
            scheduler.add_request(known[-1])
        now += 1
        if not scheduler.has_unfinished_requests:
            continue
        schedule = scheduler.schedule()
        check_laws(scheduler, schedule, known)
        check_entries(scheduler, schedule)
        check_order(scheduler, schedule, known, bool(workload.failing_steps))
        if now in workload.failing_steps:
            model.fail(schedule)
            scheduler.recover()
        else:
            announced += schedule.finished_ids
            scheduler.update(schedule, model.run(schedule))
        if now in workload.reset_steps:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        after_step(scheduler)
    announced += scheduler.schedule().finished_ids
    assert sorted(announced) == sorted(request.request_id for request in requests), "each end is announced once"
    check_pool(scheduler.pool, [])
    return requests


@settings(max_examples=200)
@given(workloads())
def test_every_request_gets_what_it_would_get_alone(workload):
    requests = run_workload(workload)
    for request, arrival in zip(requests, workload.arrivals, strict=True):
        expected = fake_outputs(arrival.prompt, arrival.max_tokens, workload.limits.max_model_len)
        assert (request.output_token_ids, request.finish_reason) == expected
    event(f"{workload.limits.policy}, preemptions: {min(3, sum(request.num_preemptions for request in requests))}")


@settings(max_examples=80)
@given(workloads(fails=False))
def test_undisturbed_requests_keep_their_order(workload):
    """No step fails here, so that "first come, first served" must hold for every single one."""
    run_workload(workload)


@settings(max_examples=80)
@given(workloads(), st.randoms(use_true_random=False))
def test_giving_up_at_random_leaves_the_others_and_the_pool_whole(workload, random):
    def give_up_one(scheduler: Scheduler) -> None:
        if random.random() < 0.3:
            scheduler.abort(str(random.randrange(len(workload.arrivals))))

    requests = run_workload(workload, give_up_one)
    for request, arrival in zip(requests, workload.arrivals, strict=True):
        outputs, reason = fake_outputs(arrival.prompt, arrival.max_tokens, workload.limits.max_model_len)
        if request.finish_reason == "abort":
            outputs, reason = outputs[: request.num_output_tokens], "abort"
        assert (request.output_token_ids, request.finish_reason) == (outputs, reason)
