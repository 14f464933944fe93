"""The scheduler's cases by number: exact values that follow from vLLM's rules (SCH), and what went wrong elsewhere (peer).

The numbers between are other parts' cases. SCH-43, the property, is the workload test of test_scheduler.py.
"""

import pytest

from tinyllm import CacheConfig, ConfigError, RequestError, SamplingParams, SchedulerConfig
from tinyllm.errors import TinyllmError
from tinyllm.request import Request, RequestStatus
from tinyllm.scheduler import Schedule, Scheduler

EOS = 2
SAMPLED = 7  # what every request samples unless a test says otherwise


def make_scheduler(
    block_size=16, num_blocks=1000, max_model_len=1024, budget=1024, max_num_seqs=None, caching=True, **limits
) -> Scheduler:
    config = SchedulerConfig(max_model_len, budget, max_num_seqs or min(128, budget), **limits)
    return Scheduler(config, CacheConfig(block_size, num_blocks, caching))


def make_request(name: str, prompt_len: int, priority=0, arrival_time=0.0, **params) -> Request:
    """Its prompt shares no token with that of another name."""
    prompt = [1000 * sum(map(ord, name)) + i for i in range(prompt_len)]
    settings = SamplingParams(**{"max_tokens": None, **params})
    return Request(name, prompt, settings, (EOS,), priority=priority, arrival_time=arrival_time)


def add(scheduler: Scheduler, **prompt_lens: int) -> list[Request]:
    requests = [make_request(name, length) for name, length in prompt_lens.items()]
    for request in requests:
        scheduler.add_request(request)
    return requests


def shares(schedule: Schedule) -> dict[str, int]:
    return {entry.request.request_id: entry.query_len for entry in schedule.scheduled}


def step(scheduler: Scheduler, **sampled: int) -> dict[str, int]:
    """One whole step; who got how many tokens. `sampled` names those that sample something of their own."""
    schedule = scheduler.schedule()
    scheduler.update(schedule, [[sampled.get(name, SAMPLED)] for name in shares(schedule)])
    return shares(schedule)


# --- queues and budget -------------------------------------------------------------------------------------------------


def test_sch_01_unfinished_requests_are_counted_while_they_are_given_up_one_by_one():
    scheduler = make_scheduler()
    requests = [make_request(f"r{i}", 10) for i in range(10)]
    for count, request in enumerate(requests, start=1):
        scheduler.add_request(request)
        assert (len(scheduler.waiting), scheduler.num_unfinished_requests) == (count, count)
    scheduler.schedule()
    assert (len(scheduler.waiting), len(scheduler.running)) == (0, 10)
    for i, request in enumerate(requests):
        assert scheduler.abort(request.request_id)
        assert scheduler.num_unfinished_requests == len(scheduler.running) == 10 - i - 1
        assert (
            not scheduler.abort("nobody") and not scheduler.abort(request) and not scheduler.abort(request.request_id)
        )
    assert not scheduler.has_unfinished_requests
    assert scheduler.schedule().finished_ids == tuple(request.request_id for request in requests)


def test_sch_02_all_prompts_that_fit_start_together_in_order_of_arrival():
    scheduler = make_scheduler()
    requests = [make_request(f"r{i}", 10) for i in range(10)]
    for request in requests:
        scheduler.add_request(request)
    schedule = scheduler.schedule()
    assert shares(schedule) == {f"r{i}": 10 for i in range(10)}
    assert {entry.started_as for entry in schedule.scheduled} == {RequestStatus.WAITING}
    assert (schedule.finished_ids, schedule.preempted, schedule.held_back) == ((), (), "")
    assert scheduler.running == requests and not scheduler.waiting


def test_sch_04_a_threshold_lets_prompts_share_the_steps():
    scheduler = make_scheduler(long_prefill_token_threshold=400)
    add(scheduler, a=800, b=800, c=800)
    schedule = scheduler.schedule()
    assert [entry.cut_by for entry in schedule.scheduled] == ["long-prefill threshold"] * 2 + ["token budget"]
    scheduler.update(schedule, [[SAMPLED]] * 3)
    assert shares(schedule) == {"a": 400, "b": 400, "c": 224}
    assert step(scheduler) == {"a": 400, "b": 400, "c": 224}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 352}


def test_sch_05_a_lone_request_is_not_held_to_the_threshold():
    scheduler = make_scheduler(budget=100, long_prefill_token_threshold=40)
    add(scheduler, a=250)
    assert step(scheduler) == {"a": 100}
    add(scheduler, b=90)
    assert step(scheduler) == {"a": 40, "b": 40}, "it holds as soon as somebody else waits"
    scheduler.abort("b")
    assert step(scheduler) == {"a": 100}, "and no longer"
    lone = make_scheduler(max_model_len=2048, long_prefill_token_threshold=400)
    add(lone, a=2000)
    assert step(lone) == {"a": 1024}


def test_sch_07_a_decoding_request_is_never_starved_by_a_long_prompt():
    scheduler = make_scheduler(budget=32)
    add(scheduler, a=3)
    step(scheduler)
    add(scheduler, b=70)
    assert [step(scheduler) for _ in range(4)] == [
        {"a": 1, "b": 31},
        {"a": 1, "b": 31},
        {"a": 1, "b": 8},
        {"a": 1, "b": 1},
    ]


def test_sch_08_max_num_seqs_limits_the_running_requests():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, a=8, b=8, c=8, d=8)
    schedule = scheduler.schedule()
    assert shares(schedule) == {"a": 8, "b": 8}
    assert (schedule.num_waiting, schedule.held_back) == (2, "max_num_seqs 2 run already")


def test_sch_10_without_chunks_the_first_that_does_not_fit_holds_back_all_behind_it():
    scheduler = make_scheduler(max_model_len=100, budget=100, enable_chunked_prefill=False)
    add(scheduler, a=80, b=80, c=10)
    schedule = scheduler.schedule()
    assert shares(schedule) == {"a": 80}, "c would fit, and stays behind b"
    assert "chunked prefill is off" in schedule.held_back
    scheduler.update(schedule, [[SAMPLED]])
    assert step(scheduler) == {"a": 1, "b": 80, "c": 10}, "each whole"


def test_sch_11_the_last_prompt_that_fits_gets_the_rest_of_the_budget():
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, a=800, b=800, c=10, d=10)
    assert shares(scheduler.schedule()) == {"a": 800, "b": 224}


# --- preemption and shared blocks --------------------------------------------------------------------------------------


def two_in_five_blocks() -> tuple[Scheduler, Request, Request]:
    """a holds two full blocks, b nearly three, and none is free: what SCH-12, 13 and 14 begin with."""
    scheduler = make_scheduler(block_size=4, num_blocks=6, max_model_len=20)
    a, b = add(scheduler, a=8, b=11)
    assert step(scheduler) == {"a": 8, "b": 11}
    assert (a.block_ids, b.block_ids) == ([1, 2], [3, 4, 5])
    return scheduler, a, b


def test_sch_12_the_latest_request_is_preempted_and_keeps_its_tokens():
    scheduler, a, b = two_in_five_blocks()
    schedule = scheduler.schedule()
    assert shares(schedule) == {"a": 1}
    assert [(p.request_id, p.for_request_id, p.block_ids) for p in schedule.preempted] == [("b", "a", (3, 4, 5))]
    assert (a.block_ids, schedule.scheduled[0].new_block_ids) == ([1, 2, 5], (5,))
    assert list(scheduler.pool.free_queue) == [4, 3]
    assert (b.status, b.num_computed_tokens, b.output_token_ids, b.block_ids) == (
        RequestStatus.PREEMPTED,
        0,
        [SAMPLED],
        [],
    )
    assert (list(scheduler.waiting), scheduler.running, b.num_preemptions) == ([b], [a], 1)
    assert "a running request was preempted in this step" in schedule.held_back


def test_sch_13_a_waiting_request_pushes_out_nobody():
    scheduler, _, b = two_in_five_blocks()
    step(scheduler)
    free, counts = list(scheduler.pool.free_queue), list(scheduler.pool.ref_counts)
    schedule = scheduler.schedule()
    assert shares(schedule) == {"a": 1}
    assert schedule.held_back == "blocks are short: it needs 3, free are 2", (
        "two found ones, which are among the free, and a new one"
    )
    assert (list(scheduler.pool.free_queue), scheduler.pool.ref_counts) == (free, counts)
    assert list(scheduler.waiting) == [b]


def test_sch_14_a_preempted_request_goes_on_behind_the_token_it_kept():
    scheduler, a, b = two_in_five_blocks()
    step(scheduler)
    step(scheduler, a=EOS)
    assert a.finish_reason == "stop"
    schedule = scheduler.schedule()
    (entry,) = schedule.scheduled
    assert (entry.request, entry.started_as) == (b, RequestStatus.PREEMPTED), "resumed, not new"
    assert (entry.query_len, entry.num_computed_tokens, entry.hit_block_ids) == (4, 8, (3, 4))
    assert entry.token_ids[-1] == SAMPLED
    assert schedule.finished_ids == ("a",)
    scheduler.update(schedule, [[9]])
    assert b.output_token_ids == [SAMPLED, 9]


def twins(count: int) -> list[Request]:
    return [Request(name, list(range(10, 26)), SamplingParams()) for name in "abcdef"[:count]]


def test_sch_16_an_equal_prompt_that_comes_later_shares_all_but_its_last_block():
    scheduler = make_scheduler(block_size=4)
    a, b = twins(2)
    scheduler.add_request(a)
    step(scheduler)
    scheduler.add_request(b)
    assert shares(scheduler.schedule()) == {"a": 1, "b": 4}
    assert (a.block_ids, b.block_ids) == ([1, 2, 3, 4, 5], [1, 2, 3, 6])


def test_sch_17_equal_prompts_that_come_together_share_within_the_step():
    scheduler = make_scheduler(block_size=4)
    a, b = twins(2)
    scheduler.add_request(a)
    scheduler.add_request(b)
    assert shares(scheduler.schedule()) == {"a": 16, "b": 4}
    assert (a.block_ids, b.block_ids) == ([1, 2, 3, 4], [1, 2, 3, 5])


def test_sch_19_steps_may_overlap():
    scheduler = make_scheduler()
    a, b = make_request("a", 512), make_request("b", 512)
    scheduler.add_request(a)
    first = scheduler.schedule()
    scheduler.add_request(b)
    second = scheduler.schedule()
    assert (shares(first), shares(second)) == ({"a": 512}, {"b": 512}), "all of a is under way"
    scheduler.update(first, [[SAMPLED]])
    third = scheduler.schedule()
    assert shares(third) == {"a": 1}
    scheduler.update(second, [[SAMPLED]])
    scheduler.update(third, [[SAMPLED]])
    assert (a.output_token_ids, b.output_token_ids) == ([SAMPLED] * 2, [SAMPLED])


# --- how a request ends ------------------------------------------------------------------------------------------------


def test_sch_20_an_end_token_ends_a_request_and_frees_its_blocks():
    scheduler = make_scheduler()
    a, b = add(scheduler, a=20, b=20)
    assert step(scheduler, a=EOS) == {"a": 20, "b": 20}
    assert (a.status, a.output_token_ids, a.block_ids) == (RequestStatus.STOPPED, [EOS], [])
    assert (scheduler.running, scheduler.pool.num_used_blocks) == ([b], 2)
    assert scheduler.schedule().finished_ids == ("a",)
    assert scheduler.schedule().finished_ids == (), "announced once"


def sample_at_once(tokens: list[int], **params) -> Request:
    """All of these come out of one step."""
    scheduler = make_scheduler()
    request = make_request("a", 4, **params)
    scheduler.add_request(request)
    scheduler.update(scheduler.schedule(), [tokens])
    assert scheduler.has_unfinished_requests != request.status.is_finished
    return request


def test_sch_22_tokens_behind_the_last_that_fits_are_dropped():
    request = sample_at_once([10, 11, 12], max_tokens=2)
    assert (request.output_token_ids, request.status) == ([10, 11], RequestStatus.LENGTH_CAPPED)
    request = sample_at_once([10, EOS, 12], max_tokens=9)
    assert (request.output_token_ids, request.status) == ([10, EOS], RequestStatus.STOPPED)


def test_sch_23_an_ignored_end_token_is_a_token_like_others():
    request = sample_at_once([EOS, 10, 11], ignore_eos=True, max_tokens=100)
    assert (request.output_token_ids, request.status) == ([EOS, 10, 11], RequestStatus.RUNNING)


@pytest.mark.parametrize(
    ("token_id", "max_model_len", "status"),
    [(EOS, 1024, RequestStatus.STOPPED), (10, 1024, None), (10, 5, RequestStatus.LENGTH_CAPPED)],
)
def test_sch_25_min_tokens_is_the_sampler_s_and_not_the_scheduler_s(token_id, max_model_len, status):
    request = make_request("a", 4, min_tokens=5, max_tokens=9)
    request.token_ids.append(token_id)
    assert make_scheduler(max_model_len=max_model_len).check_stop(request) is status


def test_sch_26_max_model_len_counts_the_prompt():
    scheduler = make_scheduler(max_model_len=6)
    (request,) = add(scheduler, a=4)
    assert [step(scheduler), step(scheduler)] == [{"a": 4}, {"a": 1}]
    assert (request.output_token_ids, request.status) == ([SAMPLED] * 2, RequestStatus.LENGTH_CAPPED)
    assert not scheduler.has_unfinished_requests


# --- priority ----------------------------------------------------------------------------------------------------------


def test_sch_28_a_smaller_priority_then_an_earlier_arrival_then_a_smaller_id_goes_first():
    scheduler = make_scheduler(policy="priority")
    for name, (priority, arrival_time) in enumerate([(2, 1), (1, 3), (1, 2), (0, 4)]):
        scheduler.add_request(make_request(str(name), 10, priority, arrival_time))
    assert list(shares(scheduler.schedule())) == ["3", "2", "1", "0"]
    for name in "cab":
        scheduler.add_request(make_request(name, 10, priority=1, arrival_time=5.0))
    assert [request.request_id for request in scheduler.waiting] == ["a", "b", "c"]


def run_out_of_blocks(*urgencies: tuple[int, float]) -> tuple[Scheduler, Schedule, list[Request]]:
    """r0 of 33 tokens decodes, r1 of 32 joins, all five blocks are taken, and r1's next token needs another one."""
    scheduler = make_scheduler(num_blocks=6, max_model_len=80, policy="priority")
    requests = [make_request(f"r{i}", 32, *urgency) for i, urgency in enumerate(urgencies)]
    scheduler.add_request(requests[0])
    assert step(scheduler) == {"r0": 32}
    scheduler.add_request(requests[1])
    assert step(scheduler) == {"r0": 1, "r1": 32}
    assert scheduler.pool.num_free_blocks == 0
    return scheduler, scheduler.schedule(), requests


def test_sch_29_the_least_urgent_request_is_preempted_although_it_came_first():
    scheduler, schedule, (low, high) = run_out_of_blocks((5, 1.0), (0, 2.0))
    assert shares(schedule) == {"r1": 1}, "low had got its share in this very step, and gave it back"
    assert [(p.request_id, p.for_request_id) for p in schedule.preempted] == [("r0", "r1")]
    assert (scheduler.running, list(scheduler.waiting)) == ([high], [low])
    assert (low.status, low.num_computed_tokens, low.num_output_tokens) == (RequestStatus.PREEMPTED, 0, 2)


@pytest.mark.parametrize(("arrivals", "victim"), [((1.0, 2.0), "r1"), ((2.0, 1.0), "r0")])
def test_sch_31_of_equal_priorities_the_later_arrival_is_preempted(arrivals, victim):
    _, schedule, _ = run_out_of_blocks(*((3, arrival) for arrival in arrivals))
    assert schedule.preempted_ids == (victim,)
    assert list(shares(schedule)) == ["r0" if victim == "r1" else "r1"]


# --- the prefix cache's counters and its reset -------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_sch_40_the_prefix_cache_is_asked_once_when_a_request_starts(caching):
    scheduler = make_scheduler(block_size=4, max_num_seqs=1, caching=caching)
    for request in twins(2):
        scheduler.add_request(request)
    stats = scheduler.prefix_cache_stats
    for _ in range(2):
        step(scheduler)
        counted = stats.num_requests, stats.num_queried_tokens, stats.num_hit_tokens
        assert counted == ((1, 16, 0) if caching else (0, 0, 0)), "the second one waits, and is not counted yet"
    scheduler.abort("a")
    assert step(scheduler) == {"b": 4 if caching else 16}
    counted = stats.num_requests, stats.num_queried_tokens, stats.num_hit_tokens
    assert counted == ((2, 32, 12) if caching else (0, 0, 0))


def test_sch_41_a_reset_may_start_the_running_requests_over():
    scheduler = make_scheduler()
    requests = [make_request(f"r{i}", 20) for i in range(10)]
    for request in requests:
        scheduler.add_request(request)
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    assert scheduler.running == requests and scheduler.pool.num_cached_blocks == 10, "a refused reset changes nothing"
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (scheduler.running, list(scheduler.waiting)) == ([], requests)
    assert scheduler.pool.num_cached_blocks == scheduler.pool.num_used_blocks == 0
    assert step(scheduler) == {f"r{i}": 21 for i in range(10)}, "everything again, the sampled token too"


# --- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SchedulerConfig(1024, 8, 16), ["max_num_batched_tokens 8", "max_num_seqs 16"]),
        (
            lambda: SchedulerConfig(100, 99, 8, enable_chunked_prefill=False),
            ["max_num_batched_tokens 99", "max_model_len 100", "without chunked prefill"],
        ),
        (lambda: SchedulerConfig(policy="lifo"), ["policy is 'lifo'", "fcfs or priority"]),
        (lambda: SchedulerConfig(policy=None), ["policy is None"]),
        (lambda: SchedulerConfig(enable_chunked_prefill=1), ["enable_chunked_prefill is 1", "True or False"]),
        (lambda: SchedulerConfig(reserve_full_sequence=None), ["reserve_full_sequence is None"]),
        (lambda: SchedulerConfig(long_prefill_token_threshold=-1), ["long_prefill_token_threshold is -1"]),
        (lambda: SchedulerConfig(long_prefill_token_threshold=0.5), ["long_prefill_token_threshold is 0.5"]),
        (lambda: SchedulerConfig(0, 8, 8), ["max_model_len is 0"]),
        (lambda: CacheConfig(0, 8), ["block_size is 0"]),
        (lambda: CacheConfig(16, 1), ["num_blocks is 1"]),
        (lambda: CacheConfig(16, 8, 1), ["enable_prefix_caching is 1"]),
        (lambda: make_scheduler(4, 5, max_model_len=17), ["num_blocks to 6", "max_model_len to 16"]),
    ],
)
def test_sch_44_impossible_limits_are_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_sch_44_the_advice_is_right():
    make_scheduler(4, 6, max_model_len=17)
    make_scheduler(4, 5, max_model_len=16)
    make_scheduler(max_model_len=100, budget=100, enable_chunked_prefill=False)


BAD_REQUESTS = {
    "an empty prompt": (
        lambda: make_request("new", 0),
        "request new: the prompt is empty; expected at least one token",
    ),
    "a prompt that leaves no room": (
        lambda: make_request("new", 8),
        "request new: the prompt has 8 tokens; expected at most 7, as max_model_len is 8",
    ),
    "an id that is taken": (lambda: make_request("a", 2), "request id a is taken by one that still runs"),
    "another's id while it waits": (lambda: make_request("b", 2), "request id b is taken by one that still runs"),
    "a priority in words": (lambda: make_request("new", 2, priority="high"), "request new: priority is 'high'"),
    "a priority that is no whole number": (
        lambda: make_request("new", 2, priority=0.5),
        "request new: priority is 0.5",
    ),
    "a truth value as a priority": (lambda: make_request("new", 2, priority=True), "request new: priority is True"),
    "more min_tokens than max_tokens": (lambda: make_request("new", 2, min_tokens=5, max_tokens=4), "min_tokens is 5"),
    "several equal answers": (lambda: make_request("new", 2, n=2), "n is 2; expected 1 at temperature 0"),
}


@pytest.mark.parametrize(("make", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_sch_44_a_request_that_cannot_run_is_refused_and_the_others_go_on(make, message):
    def run(is_disturbed: bool) -> list[dict[str, int]]:
        scheduler, got = make_scheduler(block_size=2, num_blocks=8, max_model_len=8, max_num_seqs=1), []
        add(scheduler, a=3, b=4)
        while scheduler.has_unfinished_requests:
            got.append(step(scheduler))
            if is_disturbed and len(got) < 4:
                with pytest.raises(TinyllmError) as caught:
                    scheduler.add_request(make())
                assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
                assert isinstance(caught.value, ValueError)
                assert scheduler.num_unfinished_requests == 2
        assert scheduler.pool.num_used_blocks == 0
        return got

    assert run(is_disturbed=True) == run(is_disturbed=False)


def test_sch_44_an_id_that_nobody_has():
    scheduler = make_scheduler()
    (a,) = add(scheduler, a=3)
    assert scheduler.find_request("a") is a
    for unknown in ("b", "", "A"):
        assert scheduler.abort(unknown) is False
        with pytest.raises(
            RequestError, match=rf"^no request {unknown} waits or runs; it was never added, or it has ended$"
        ):
            scheduler.find_request(unknown)
    assert step(scheduler) == {"a": 3}
    assert scheduler.abort("a") is True
    with pytest.raises(RequestError, match="no request a waits or runs"):
        scheduler.find_request("a")


# --- what went wrong in other engines ----------------------------------------------------------------------------------


def test_peer_20_a_request_behind_max_num_seqs_one_gets_all_its_tokens():
    scheduler = make_scheduler(max_num_seqs=1)
    requests = [make_request(name, 3, max_tokens=3) for name in "ab"]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests:
        step(scheduler)
        for request in requests:
            places = (request in scheduler.running) + (request in list(scheduler.waiting))
            assert places == (not request.status.is_finished), "never in neither queue"
    assert [len(request.output_token_ids) for request in requests] == [3, 3]


def test_peer_25_a_chunk_never_reaches_behind_what_is_written():
    scheduler = make_scheduler(budget=6)
    add(scheduler, a=14)
    assert [scheduler.schedule().scheduled[0].seq_len for _ in range(3)] == [6, 12, 14]


def test_peer_28_a_stream_of_long_prompts_starves_no_running_request():
    """Every running request gets a token in every step, which is better than one in four."""
    scheduler = make_scheduler(budget=32, max_num_seqs=8)
    add(scheduler, a=3, b=3)
    step(scheduler)
    for i in range(6):
        scheduler.add_request(make_request(f"long{i}", 40, max_tokens=2))
    for _ in range(10):
        got = step(scheduler)
        assert got["a"] == got["b"] == 1
