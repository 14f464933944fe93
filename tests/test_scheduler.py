"""The scheduler alone: vLLM V1's rules, with a fake model that makes each token a function of those before it."""

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tinyllm import CacheConfig, ConfigError, RequestError, SamplingParams, SchedulerConfig
from tinyllm.request import Request, RequestStatus
from tinyllm.scheduler import Schedule, Scheduler

EOS = 2


def make_scheduler(block_size=16, num_blocks=1000, max_model_len=1024, budget=1024, max_num_seqs=None):
    limits = SchedulerConfig(max_model_len, budget, max_num_seqs or min(128, budget))
    return Scheduler(limits, CacheConfig(block_size, num_blocks))


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
    scheduler.update(schedule, [token_id] * len(schedule.scheduled))
    return shares(schedule)


def test_all_prompts_that_fit_start_together_in_order_of_arrival():
    scheduler = make_scheduler()
    requests = add_requests(scheduler, *[10] * 10)
    assert shares(scheduler.schedule()) == {f"r{i}": 10 for i in range(10)}
    assert scheduler.running == requests
    assert not scheduler.waiting


def test_a_decoding_request_is_never_starved_by_a_long_prompt():
    scheduler = make_scheduler(budget=32)
    add_requests(scheduler, 3)
    step(scheduler)
    scheduler.add_request(Request("long", [9] * 70, SamplingParams()))
    assert [step(scheduler) for _ in range(4)] == [
        {"r0": 1, "long": 31},
        {"r0": 1, "long": 31},
        {"r0": 1, "long": 8},
        {"r0": 1, "long": 1},
    ]


def test_a_stream_of_long_prompts_starves_no_running_request():
    scheduler = make_scheduler(budget=32, max_num_seqs=8)
    add_requests(scheduler, 3, 3)
    step(scheduler)
    for i in range(6):
        scheduler.add_request(Request(f"long{i}", [9] * 40, SamplingParams(max_tokens=2)))
    for _ in range(10):
        got = step(scheduler)
        assert got["r0"] == got["r1"] == 1


def test_max_num_seqs_limits_the_running_requests():
    scheduler = make_scheduler(max_num_seqs=2)
    add_requests(scheduler, 8, 8, 8, 8)
    assert shares(scheduler.schedule()) == {"r0": 8, "r1": 8}
    assert len(scheduler.waiting) == 2


def test_the_last_prompt_that_fits_gets_the_rest_of_the_budget():
    scheduler = make_scheduler(budget=1024, max_num_seqs=3)
    add_requests(scheduler, 800, 800, 10, 10)
    assert shares(scheduler.schedule()) == {"r0": 800, "r1": 224}


def test_only_the_last_chunk_of_a_prompt_samples():
    scheduler = make_scheduler(budget=4)
    (request,) = add_requests(scheduler, 10)
    seen = []
    for _ in range(3):
        (entry,) = (schedule := scheduler.schedule()).scheduled
        scheduler.update(schedule, [7])
        seen.append((entry.num_computed_tokens, entry.query_len, entry.seq_len, entry.samples, len(request.token_ids)))
    assert seen == [(0, 4, 4, False, 10), (4, 4, 8, False, 10), (8, 2, 10, True, 11)]


def test_a_chunk_never_reaches_behind_what_is_written():
    scheduler = make_scheduler(budget=6)
    add_requests(scheduler, 14)
    assert [scheduler.schedule().scheduled[0].seq_len for _ in range(3)] == [6, 12, 14]


def test_the_latest_request_is_preempted_and_keeps_its_tokens():
    scheduler = make_scheduler(block_size=4, num_blocks=6, max_model_len=20)
    a, b = add_requests(scheduler, 8, 11)
    assert step(scheduler) == {"r0": 8, "r1": 11}
    assert (a.block_ids, b.block_ids) == ([1, 2], [3, 4, 5])
    schedule = scheduler.schedule()
    assert shares(schedule) == {"r0": 1}
    assert schedule.preempted_ids == ("r1",)
    assert (a.block_ids, b.block_ids) == ([1, 2, 5], [])
    assert schedule.scheduled[0].new_block_ids == (5,)
    assert (b.status, b.num_computed_tokens, b.output_token_ids) == (RequestStatus.PREEMPTED, 0, [7])
    assert (list(scheduler.waiting), b.num_preemptions) == ([b], 1)
    scheduler.update(schedule, [7])
    assert step(scheduler) == {"r0": 1}, "b needs 3 blocks, 2 are free: a waiting request pushes out nobody"
    scheduler.abort(a)
    assert step(scheduler) == {"r1": 12}, "prompt and sampled token are computed again, in one prefill"
    assert b.output_token_ids == [7, 7]


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
        scheduler.update(schedule, [7])


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
    scheduler.update(scheduler.schedule(), [7, EOS])
    for request in (running, ended, waiting, stranger, running):
        scheduler.abort(request)
    assert [r.finish_reason for r in (running, ended, waiting, stranger)] == ["abort", "stop", "abort", "abort"]
    assert not scheduler.has_unfinished_requests
    assert scheduler.pool.num_used_blocks == 0


def test_ten_requests_are_given_up_one_by_one():
    scheduler = make_scheduler()
    requests = add_requests(scheduler, *[10] * 10)
    scheduler.schedule()
    for left, request in zip(range(9, -1, -1), requests, strict=True):
        scheduler.abort(request)
        assert len(scheduler.running) + len(scheduler.waiting) == left


def test_a_request_behind_max_num_seqs_one_gets_all_its_tokens():
    scheduler = make_scheduler(max_num_seqs=1)
    requests = add_requests(scheduler, 3, 3, max_tokens=3)
    while scheduler.has_unfinished_requests:
        step(scheduler)
    assert [len(request.output_token_ids) for request in requests] == [3, 3]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SchedulerConfig(1024, 8, 16), ["max_num_batched_tokens 8", "max_num_seqs 16"]),
        (lambda: SchedulerConfig(0, 8, 8), ["max_model_len is 0"]),
        (lambda: CacheConfig(0, 8), ["block_size is 0"]),
        (lambda: CacheConfig(16, 1), ["num_blocks is 1"]),
        (lambda: make_scheduler(4, 5, max_model_len=17), ["num_blocks to 6", "max_model_len to 16"]),
    ],
)
def test_impossible_limits_are_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_advice_for_a_small_pool_is_right():
    make_scheduler(4, 6, max_model_len=17)
    make_scheduler(4, 5, max_model_len=16)


def test_a_prompt_that_leaves_no_room_is_refused():
    scheduler = make_scheduler(max_model_len=8)
    add_requests(scheduler, 7)
    with pytest.raises(RequestError, match=r"the prompt has 8 tokens; expected at most 7"):
        add_requests(scheduler, 8)
    assert len(scheduler.waiting) == 1


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


def check_laws(scheduler: Scheduler, schedule: Schedule, known: list[Request]) -> None:
    assert 0 < schedule.num_tokens <= scheduler.config.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    held = [block_id for request in known for block_id in request.block_ids]
    assert len(set(held)) == len(held) == scheduler.pool.num_used_blocks
    assert schedule.num_used_blocks == len(held)
    for request in known:
        places = scheduler.running.count(request) + scheduler.waiting.count(request)
        assert places == (0 if request.status.is_finished else 1), "a request is in exactly one queue until it ends"
        num_kept = 0 if request.status.is_finished else request.num_computed_tokens
        assert len(request.block_ids) == -(-num_kept // scheduler.block_size)
    for entry in schedule.scheduled:
        assert list(entry.token_ids) == entry.request.token_ids[entry.num_computed_tokens : entry.seq_len]
        assert entry.samples == (entry.seq_len == entry.request.num_tokens)


@st.composite
def workloads(draw):
    block_size, max_model_len = draw(st.integers(1, 5)), draw(st.integers(2, 24))
    budget = draw(st.integers(1, 30))
    smallest_pool = 1 + -(-max_model_len // block_size)
    limits = SchedulerConfig(max_model_len, budget, draw(st.integers(1, min(budget, 6))))
    cache = CacheConfig(block_size, draw(st.integers(smallest_pool, smallest_pool + 8)))
    request = st.tuples(
        st.integers(0, 6),  # steps before it arrives
        st.lists(st.integers(3, 99), min_size=1, max_size=max_model_len - 1),
        st.integers(1, 12),  # max_tokens
    )
    return limits, cache, draw(st.lists(request, min_size=1, max_size=7))


@given(workloads())
def test_every_request_gets_what_it_would_get_alone(workload):
    limits, cache, arrivals = workload
    scheduler = Scheduler(limits, cache)
    requests = [Request(str(i), p, SamplingParams(max_tokens=m), (EOS,)) for i, (_, p, m) in enumerate(arrivals)]
    pending = deque(sorted(zip([steps for steps, _, _ in arrivals], requests, strict=True), key=lambda item: item[0]))
    known, now = [], 0
    while pending or scheduler.has_unfinished_requests:
        while pending and pending[0][0] <= now:
            known.append(pending.popleft()[1])
            scheduler.add_request(known[-1])
        now += 1
        if scheduler.has_unfinished_requests:
            schedule = scheduler.schedule()
            check_laws(scheduler, schedule, known)
            tokens = [fake_token([*e.request.token_ids[: e.seq_len]]) for e in schedule.scheduled]
            scheduler.update(schedule, tokens)
    for request, (_, prompt, max_tokens) in zip(requests, arrivals, strict=True):
        expected = fake_outputs(prompt, max_tokens, limits.max_model_len)
        assert (request.output_token_ids, request.finish_reason) == expected
    assert scheduler.pool.num_used_blocks == 0
    event(f"preemptions: {min(3, sum(request.num_preemptions for request in requests))}")


@given(workloads(), st.randoms(use_true_random=False))
def test_giving_up_at_random_leaves_the_others_and_the_pool_whole(workload, random):
    limits, cache, arrivals = workload
    scheduler = Scheduler(limits, cache)
    requests = [Request(str(i), p, SamplingParams(max_tokens=m), (EOS,)) for i, (_, p, m) in enumerate(arrivals)]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests:
        schedule = scheduler.schedule()
        check_laws(scheduler, schedule, requests)
        scheduler.update(schedule, [fake_token([*e.request.token_ids[: e.seq_len]]) for e in schedule.scheduled])
        if random.random() < 0.3:
            scheduler.abort(random.choice(requests))
    for request, (_, prompt, max_tokens) in zip(requests, arrivals, strict=True):
        outputs, reason = fake_outputs(prompt, max_tokens, limits.max_model_len)
        if request.finish_reason == "abort":
            outputs = outputs[: len(request.output_token_ids)]
            reason = "abort"
        assert (request.output_token_ids, request.finish_reason) == (outputs, reason)
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
    assert scheduler.update(schedule, [7, 8]) == []
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
    scheduler.undo(failed)
    assert request.num_computed_tokens == 0
    again = scheduler.schedule()
    assert shares(again) == shares(failed) and again.scheduled[0].block_ids == failed.scheduled[0].block_ids


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
