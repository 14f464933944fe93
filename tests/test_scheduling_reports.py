"""Public reports about scheduling, seeds and min_tokens, reworded as cases, through whole engines with tiny models.

The tables say which test shows each: REPORTS the public reports, CASES the rules and other engines' bugs by number.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tinyllm import LLM, CacheConfig, ConfigError, RequestError, SamplingParams
from tinyllm.batch import build_batch
from tinyllm.kv_cache import KVCache
from tinyllm.request import Request, RequestStatus
from tinyllm.tokenizer import Tokenizer
from tinyllm.weights.load import build_decoder

REPORTS = {
    "case-032": [
        "test_scheduling_reports.py::test_case_032_before_min_tokens_no_end_token_is_drawn",
        "test_scheduling_reports.py::test_case_032_before_min_tokens_no_stop_string_ends_an_answer",
        "test_request.py::test_before_min_tokens_nothing_that_ends_a_request_may_be_sampled",
    ],
    "case-046": ["test_scheduling_reports.py::test_case_046_a_long_neighbour_changes_nothing_and_nothing_is_padded"],
    "case-047": ["test_scheduling_reports.py::test_case_047_equal_seeds_agree_within_a_batch_and_across_runs"],
    "case-048": ["test_scheduling_reports.py::test_case_048_a_seeded_request_does_not_notice_an_unseeded_one"],
    "case-049": [
        "test_scheduling_reports.py::test_case_049_seven_neighbours_change_no_choice_that_is_clear",
        "test_model.py::test_smollm2_gives_the_golden_logits_and_tokens",
    ],
    "case-058": [
        "test_scheduling_reports.py::test_case_058_giving_up_what_has_ended_or_never_was_changes_nothing",
        "test_scheduler.py::test_giving_up_what_nobody_knows_changes_nothing",
    ],
    "case-059": [
        "test_scheduling_reports.py::test_case_059_and_064_a_prompt_that_is_too_long_is_refused_and_the_next_served"
    ],
    "case-060": ["test_scheduling_reports.py::test_case_060_the_only_request_never_outgrows_the_pool"],
    "case-061": ["test_scheduling_reports.py::test_case_061_a_budget_below_the_model_length_changes_no_answer"],
    "case-062": ["test_scheduling_reports.py::test_case_062_room_for_one_and_a_half_requests"],
    "case-063": [
        "test_scheduling_reports.py::test_case_063_an_id_may_be_used_again_at_once",
        "test_scheduler.py::test_an_id_is_free_again_once_its_request_has_ended",
    ],
    "case-064": [
        "test_scheduling_reports.py::test_case_059_and_064_a_prompt_that_is_too_long_is_refused_and_the_next_served"
    ],
    "case-065": ["test_scheduling_reports.py::test_case_065_max_tokens_is_one_at_least"],
    "case-066": ["test_scheduling_reports.py::test_case_066_a_preempted_request_computes_its_outputs_again"],
    "case-067": ["test_scheduling_reports.py::test_case_067_a_request_that_preempts_itself_waits_and_does_not_run"],
}
CASES = {
    "SCH-43": ["test_scheduler.py::test_every_request_gets_what_it_would_get_alone"],
    "RUN-01": ["test_batch.py::test_run_01_decode_prefill_and_decode_lie_flat_behind_each_other"],
    "RUN-02": ["test_batch.py::test_run_02_slots_follow_the_block_table"],
    "RUN-05": ["test_batch.py::test_run_05_a_prompt_in_chunks_samples_behind_its_last_one"],
    "RUN-07": [
        "test_engine.py::test_together_in_blocks_and_chunks_equals_alone",
        "test_engine.py::test_the_order_of_requests_does_not_matter",
        "test_engine.py::test_a_request_never_sees_its_neighbours_tokens",
    ],
    "RUN-08": [
        "test_batch.py::test_run_08_no_row_is_padding",
        "test_batch.py::test_run_08_a_negative_slot_is_refused_and_never_counts_from_the_end",
    ],
    "RUN-10": ["test_batch.py::test_run_10_the_shapes_of_llama_3_8b"],
    "peer-20": ["test_scheduler_cases.py::test_peer_20_a_request_behind_max_num_seqs_one_gets_all_its_tokens"],
    "peer-22": ["test_scheduling_reports.py::test_peer_22_the_token_sampled_before_a_preemption_is_kept"],
    "peer-25": ["test_scheduler_cases.py::test_peer_25_a_chunk_never_reaches_behind_what_is_written"],
    "peer-26": ["test_scheduling_reports.py::test_peer_26_a_preempted_stream_gives_each_token_once"],
    "peer-28": ["test_scheduler_cases.py::test_peer_28_a_stream_of_long_prompts_starves_no_running_request"],
    "peer-29": ["test_batch.py::test_peer_29_the_first_decode_step_stands_right_behind_the_prompt"],
    "peer-31": ["test_scheduling_reports.py::test_peer_31_a_prompt_in_chunks_of_any_size_sees_no_future"],
    "peer-32": ["test_scheduling_reports.py::test_peer_32_equal_rows_of_a_batch_get_equal_answers"],
    "peer-34": ["test_scheduling_reports.py::test_peer_34_every_token_but_the_last_is_in_the_cache"],
    "peer-37": ["test_batch.py::test_peer_37_the_last_row_of_each_prompt_gives_its_logits_whatever_their_lengths"],
}
TESTS = Path(__file__).parent
PROMPT = [3, 4, 5, 6, 7]


def test_every_case_of_this_part_has_its_test():
    numbers = (32, *range(46, 50), *range(58, 68))
    assert list(REPORTS) == [f"case-{number:03}" for number in numbers]
    runs = [f"RUN-{number:02}" for number in (1, 2, 5, 7, 8, 10)]
    peers = [f"peer-{number}" for number in (20, 22, 25, 26, 28, 29, 31, 32, 34, 37)]
    assert list(CASES) == ["SCH-43", *runs, *peers]
    for place in (place for places in (REPORTS | CASES).values() for place in places):
        path, _, name = place.partition("::")
        assert f"\ndef {name}(" in (TESTS / path).read_text("utf-8"), place


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def is_clean(llm: LLM) -> bool:
    """Nothing is queued and every block is free."""
    return not llm.engine.has_unfinished_requests and llm.engine.scheduler.pool.num_used_blocks == 0


# --- seeds and batches -------------------------------------------------------------------------------------------------


def test_case_046_a_long_neighbour_changes_nothing_and_nothing_is_padded(
    tiny_model, make_engine, run_engine, make_requests
):
    prompts = [[7, 8], list(range(60))]
    together = run_engine(make_engine(tiny_model()), make_requests(prompts, greedy(6)))
    for run, prompt in zip(together, prompts, strict=True):
        (alone,) = run_engine(make_engine(tiny_model()), make_requests([prompt], greedy(6)))
        assert run.token_ids == alone.token_ids
        torch.testing.assert_close(run.logits, alone.logits, atol=1e-4, rtol=0)
    engine = make_engine(tiny_model())
    for request in make_requests(prompts, greedy(6)):
        engine.add_request(request)
    assert len(engine.step().batch.token_ids) == 62, "two and sixty, not twice sixty"


def test_case_047_equal_seeds_agree_within_a_batch_and_across_runs(tiny_llm):
    params = SamplingParams(temperature=2, max_tokens=12, ignore_eos=True)
    seeds = [1, 1, 2, None]
    first = tiny_llm().generate(["abc"] * 4, [replace(params, seed=seed) for seed in seeds])
    second = tiny_llm().generate(["abc"] * 4, [replace(params, seed=seed) for seed in reversed(seeds)])
    ones = [first[0], first[1], second[2], second[3]]
    assert len({answer.token_ids for answer in ones}) == 1
    assert first[2].token_ids == second[1].token_ids
    assert len({answer.token_ids for answer in (first[0], first[2], first[3], second[0])}) == 4, "else nothing is shown"
    zeros = tiny_llm().generate(["abc"] * 3, replace(params, seed=0))
    assert [answer.seed for answer in zeros] == [0] * 3, "a seed like any other"
    assert len({answer.token_ids for answer in zeros}) == 1
    assert zeros[0].token_ids != first[0].token_ids


def test_case_048_a_seeded_request_does_not_notice_an_unseeded_one(tiny_llm):
    params = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)
    seeded = replace(params, seed=42)
    (alone,) = tiny_llm().generate("abc", seeded)
    beside = set()
    for order in ([seeded, params], [params, seeded], [params, seeded, params]):
        answers = tiny_llm(max_num_batched_tokens=4, block_size=2).generate(["abc"] * len(order), order)
        assert answers[order.index(seeded)] == replace(
            alone, num_cached_tokens=answers[order.index(seeded)].num_cached_tokens
        )
        beside |= {answer.token_ids for answer in answers if answer.seed != 42}
    assert len(beside) == 4, "the others draw anew each time"


def test_case_049_seven_neighbours_change_no_choice_that_is_clear(tiny_model, make_engine, run_engine, make_requests):
    params = SamplingParams(temperature=2, seed=3, max_tokens=10)  # its tokens follow from the seed, and stay the same
    (alone,) = run_engine(make_engine(tiny_model()), make_requests([PROMPT], params))
    best = alone.logits.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 1e-3
    assert is_clear.sum() >= 5
    for others in ([[9, 8, 7]] * 7, [[20 + i] * (i + 1) for i in range(7)]):
        run, *_ = run_engine(make_engine(tiny_model()), make_requests([PROMPT, *others], params))
        assert run.token_ids == alone.token_ids
        assert torch.equal(run.logits.argmax(-1)[is_clear], alone.logits.argmax(-1)[is_clear])


# --- scheduling --------------------------------------------------------------------------------------------------------


def test_case_058_giving_up_what_has_ended_or_never_was_changes_nothing(tiny_model, make_engine):
    def run(is_disturbed: bool) -> list[int]:
        engine = make_engine(tiny_model(), block_size=4)
        short, long, twice = (Request(name, PROMPT, greedy(n)) for name, n in (("short", 1), ("long", 6), ("twice", 6)))
        for request in (short, long, twice):
            engine.add_request(request)
        engine.step()
        assert short.finish_reason == "length"
        assert engine.abort("twice") and twice.finish_reason == "abort"
        while engine.has_unfinished_requests:
            if is_disturbed:
                assert [engine.abort(name) for name in ("short", "never", "twice")] == [False] * 3
            engine.step()
        assert (short.finish_reason, twice.finish_reason) == ("length", "abort")
        assert engine.scheduler.pool.num_used_blocks == 0
        return long.output_token_ids

    assert run(is_disturbed=True) == run(is_disturbed=False)


def test_case_059_and_064_a_prompt_that_is_too_long_is_refused_and_the_next_served(tiny_llm):
    llm = tiny_llm(max_model_len=128)
    expected = llm.generate("good", greedy(5))
    for call in (llm.generate, llm.stream):
        with pytest.raises(
            RequestError, match=r"the prompt has 200 tokens; expected at most 127, as max_model_len is 128"
        ):
            call([9] * 200, greedy(5))
        assert is_clean(llm)
        assert [answer.token_ids for answer in llm.generate("good", greedy(5))] == [expected[0].token_ids]


def test_case_060_the_only_request_never_outgrows_the_pool(tiny_llm):
    """Two blocks of four tokens: what could grow beyond them is refused at once, and what fits ends by its length."""
    pool = {"block_size": 4, "num_blocks": 3}  # with the null block
    with pytest.raises(
        ConfigError, match=r"holds 8 tokens and can never fit one request of max_model_len 16"
    ) as caught:
        tiny_llm(**pool, max_model_len=16)
    assert "\n" not in str(caught.value)
    llm = tiny_llm(**pool, max_model_len=8)
    with pytest.raises(RequestError, match=r"the prompt has 8 tokens; expected at most 7"):
        llm.generate([9] * 8, greedy(8))
    for prompt_len, num_tokens in ((7, 1), (4, 4), (1, 7)):
        (answer,) = llm.generate([9] * prompt_len, greedy(8))
        assert (len(answer.token_ids), answer.finish_reason) == (num_tokens, "length")
    assert is_clean(llm)


def test_case_061_a_budget_below_the_model_length_changes_no_answer(tiny_llm, tiny_model):
    plain = tiny_model()
    decoder = build_decoder(replace(plain.config, max_positions=512), plain.state_dict())
    prompt = [(7 * i) % 256 for i in range(400)]
    answers = [
        tiny_llm(
            decoder, max_model_len=512, max_num_batched_tokens=budget, enable_chunked_prefill=budget < 512
        ).generate([prompt, prompt[:90]], greedy(8))
        for budget in (32, 2048)
    ]
    assert [answer.token_ids for answer in answers[0]] == [answer.token_ids for answer in answers[1]]
    assert {answer.finish_reason for answer in answers[0]} == {"length"}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
def test_case_062_room_for_one_and_a_half_requests(policy, caching, tiny_llm):
    """Each of the two takes four blocks in the end, and there are six."""
    prompts = ["one text", "another."]
    ample = tiny_llm(block_size=4).generate(prompts, greedy(8))
    llm = tiny_llm(
        block_size=4,
        num_blocks=7,
        max_model_len=24,
        policy=policy,
        enable_prefix_caching=caching,
        max_num_batched_tokens=16,
    )
    requests = llm.make_requests(prompts, greedy(8), priority=[1, 0])
    for _ in llm.run(requests):
        pass
    assert [request.num_preemptions > 0 for request in requests] == [policy == "priority", policy == "fcfs"]
    assert [llm.completion(request).text for request in requests] == [answer.text for answer in ample]
    assert [tuple(request.output_token_ids) for request in requests] == [answer.token_ids for answer in ample]
    assert is_clean(llm)


def test_case_063_an_id_may_be_used_again_at_once(tiny_model, make_engine, run_engine, make_requests):
    (expected,) = run_engine(make_engine(tiny_model()), make_requests([[9, 9]], greedy(6)))
    engine = make_engine(tiny_model(), block_size=2)
    old = Request("x", PROMPT, greedy(20))
    engine.add_request(old)
    for _ in range(3):
        engine.step()
    old_tokens = list(old.output_token_ids)
    assert engine.abort("x")
    new = Request("x", [9, 9], greedy(6))
    engine.add_request(new)
    (entry,) = engine.step().schedule.scheduled
    assert (entry.request, entry.token_ids, entry.started_as) == (new, (9, 9), RequestStatus.WAITING)
    while engine.has_unfinished_requests:
        engine.step()
    assert (new.output_token_ids, new.finish_reason) == (expected.token_ids, "length")
    assert (old.output_token_ids, old.finish_reason) == (old_tokens, "abort")


def test_case_065_max_tokens_is_one_at_least(tiny_llm):
    with pytest.raises(RequestError, match=r"^max_tokens is 0; expected a whole number of at least 1"):
        SamplingParams(max_tokens=0)
    (answer,) = tiny_llm().generate("abc", SamplingParams(max_tokens=1, ignore_eos=True))
    assert (len(answer.token_ids), answer.finish_reason) == (1, "length")


@pytest.mark.parametrize("budget", [3, 64])
def test_case_066_a_preempted_request_computes_its_outputs_again(
    budget, tiny_model, make_engine, run_engine, make_requests
):
    prompts, params = [[3, 4], [5, 6]], greedy(12)
    expected = run_engine(make_engine(tiny_model()), make_requests(prompts, params))
    engine = make_engine(
        tiny_model(), block_size=2, budget=budget, max_model_len=14, num_blocks=8, enable_prefix_caching=False
    )
    first, second = requests = make_requests(prompts, params)
    for request in requests:
        engine.add_request(request)
    while not second.num_preemptions:
        engine.step()
    assert second.num_output_tokens > second.num_prompt_tokens and first.status is RequestStatus.RUNNING
    kept, computed = list(second.token_ids), []
    while second.num_tokens == len(kept):
        entries = [entry for entry in engine.step().schedule.scheduled if entry.request is second]
        computed += [token_id for entry in entries for token_id in entry.token_ids]
    assert computed == kept, "prompt and outputs, each once"
    while engine.has_unfinished_requests:
        engine.step()
    assert [request.output_token_ids for request in requests] == [run.token_ids for run in expected]


def test_case_067_a_request_that_preempts_itself_waits_and_does_not_run(tiny_model, make_engine):
    """A pool that holds max_model_len never lets it happen to a lone request, so here somebody else takes the blocks."""
    engine = make_engine(tiny_model(), block_size=4, num_blocks=33)
    scheduler = engine.scheduler
    request = Request("0", [3, 4, 5, 6], greedy(4))
    engine.add_request(request)
    engine.step()
    taken = scheduler.pool.allocate(scheduler.pool.num_free_blocks)
    schedule = scheduler.schedule()
    assert (schedule.scheduled, schedule.preempted_ids) == ((), ("0",))
    assert (list(scheduler.waiting), scheduler.running) == ([request], [])
    assert (request.status, request.block_ids) == (RequestStatus.PREEMPTED, [])
    scheduler.pool.free(taken)
    while engine.has_unfinished_requests:
        engine.step()
    assert request.num_output_tokens == 4 and scheduler.pool.num_used_blocks == 0


# --- min_tokens --------------------------------------------------------------------------------------------------------

SMALL = {"block_size": 2, "num_blocks": 16, "max_model_len": 30, "max_num_batched_tokens": 5, "max_num_seqs": 4}


@pytest.fixture
def llm_with_ends(tiny_llm):
    """llm_with_ends(eos_token_ids, **settings): a tiny LLM whose model names these end tokens."""

    def llm_with_ends(eos_token_ids: tuple[int, ...], **settings) -> LLM:
        loaded = tiny_llm().loaded
        return LLM(replace(loaded, config=replace(loaded.config, eos_token_ids=eos_token_ids)), **settings)

    return llm_with_ends


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["ample", "small"])
@pytest.mark.parametrize("temperature", [0, 2])
def test_case_032_before_min_tokens_no_end_token_is_drawn(temperature, settings, llm_with_ends):
    """All even ids end an answer, so that it would end soon; half of them as end tokens, half as stop ids."""
    ends, stops = tuple(range(0, 256, 4)), tuple(range(2, 256, 4))
    llm = llm_with_ends(ends, **settings)
    prompts = ["abc", "de", "fghij", "k"]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, stop_token_ids=stops)
    assert min(len(answer.token_ids) for answer in llm.generate(prompts, params)) < 5, "else nothing is shown"
    for min_tokens in (1, 5, 20):
        answers = llm.generate(prompts, replace(params, min_tokens=min_tokens))
        for answer in answers:
            assert all(token_id % 2 for token_id in answer.token_ids[:min_tokens])
            assert len(answer.token_ids) > min_tokens or min_tokens == 20
            assert answer.finish_reason == (
                "length" if len(answer.token_ids) == 20 and answer.token_ids[-1] % 2 else "stop"
            )
        assert min_tokens == 20 or "stop" in {answer.finish_reason for answer in answers}, "behind them it may end"
    ignoring = llm.generate(prompts, SamplingParams(max_tokens=20, min_tokens=20, ignore_eos=True))
    free = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [answer.token_ids for answer in ignoring] == [answer.token_ids for answer in free], "nothing needs a ban"


def test_case_032_a_model_without_end_tokens_has_nothing_to_forbid(llm_with_ends):
    llm = llm_with_ends(())
    (answer,) = llm.generate("abc", SamplingParams(min_tokens=5, max_tokens=8))
    assert (len(answer.token_ids), answer.finish_reason) == (8, "length")


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 6, 12])
def test_case_032_before_min_tokens_no_stop_string_ends_an_answer(min_tokens, tiny_llm):
    """The tokens are letters, two each; whichever two stand next to each other somewhere in the answer are a stop."""
    letters = [chr(ord("a") + i % 26) + chr(ord("a") + i // 26) for i in range(256)]
    llm = LLM(replace(tiny_llm().loaded, tokenizer=Tokenizer(letters, [], [], "smollm")))
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=12, ignore_eos=True)
    (free,) = llm.generate(PROMPT, params)
    stops = sorted({free.text[i : i + 2] for i in range(len(free.text) - 1)})
    stopped = [replace(params, min_tokens=min_tokens, stop=stop) for stop in stops]
    answers = llm.generate([PROMPT] * len(stops), stopped)
    texts = [""] * len(stops)
    for piece in llm.stream([PROMPT] * len(stops), stopped):
        texts[piece.index] += piece.text
    for stop, answer, text in zip(stops, answers, texts, strict=True):
        ends = [i + 2 for i in range(len(free.text)) if free.text.startswith(stop, i)]
        stopping = [end for end in ends if (end + 1) // 2 > min_tokens]  # by the token that holds the end
        if stopping:
            assert (answer.text, answer.finish_reason) == (free.text[: stopping[0] - 2], "stop")
            assert len(answer.token_ids) == (stopping[0] + 1) // 2 >= min_tokens
        else:
            assert (answer.text, answer.finish_reason) == (free.text, "length")
        assert text == answer.text


# --- bad input ---------------------------------------------------------------------------------------------------------

BAD_SETTINGS = {
    "no such policy": ({"policy": "lifo"}, "policy is 'lifo'; expected fcfs or priority"),
    "a prompt may not fit one step": (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 65},
        "max_num_batched_tokens 64 is below max_model_len 65, and without chunked prefill",
    ),
    "more requests than tokens": ({"max_num_batched_tokens": 4, "max_num_seqs": 5}, "is below max_num_seqs 5"),
    "a small pool": ({"num_blocks": 4, "max_model_len": 64}, "the KV pool of 3 usable blocks of 16 holds 48 tokens"),
    "a threshold below 0": ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1"),
    "a switch that is a number": ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1; expected True or False"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_an_impossible_setting_is_refused_in_one_line(bad, message, tiny_llm):
    with pytest.raises(ConfigError) as caught:
        tiny_llm(**bad)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


BAD_CALLS = {
    "a priority in words": lambda llm: llm.generate("x", priority="high"),
    "a priority that is no whole number": lambda llm: llm.generate("x", priority=0.5),
    "a truth value as a priority": lambda llm: llm.generate("x", priority=True),
    "one such priority of several": lambda llm: llm.generate(["x", "y"], priority=[0, None]),
    "fewer priorities than prompts": lambda llm: llm.generate(["x", "y"], priority=[0]),
    "a salt that is no text": lambda llm: llm.generate("x", cache_salt=5),
    "min_tokens above max_tokens": lambda llm: llm.generate("x", SamplingParams(min_tokens=5, max_tokens=4)),
    "several equal answers": lambda llm: llm.generate("x", SamplingParams(n=2)),
    "an empty prompt": lambda llm: llm.generate(["x", []]),
    "a long prompt behind a good one": lambda llm: llm.generate(["x", [9] * 200]),
    "a stream with a bad priority": lambda llm: llm.stream("x", priority="high"),
    "an id that is taken": lambda llm: llm.engine.add_request(
        Request(llm.engine.scheduler.running[0].request_id, [5], SamplingParams())
    ),
    "an id that nobody has": lambda llm: llm.engine.scheduler.find_request("nobody"),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_request_is_refused_in_one_line_and_the_others_go_on(call, tiny_llm):
    llm = tiny_llm(policy="priority", max_model_len=64, block_size=4)
    (expected,) = llm.generate("abc", greedy(6))
    with closing(llm.stream("abc", greedy(6))) as stream:
        pieces = []
        for piece in stream:
            pieces.append(piece)
            before = llm.engine.scheduler.num_unfinished_requests
            if before:
                with pytest.raises(RequestError) as caught:
                    call(llm)
                assert str(caught.value) and "\n" not in str(caught.value)
                assert isinstance(caught.value, ValueError)
                assert llm.engine.scheduler.num_unfinished_requests == before
    assert tuple(token_id for piece in pieces for token_id in piece.token_ids) == expected.token_ids
    assert is_clean(llm)


# --- what went wrong in other engines ----------------------------------------------------------------------------------


def test_peer_22_the_token_sampled_before_a_preemption_is_kept(tiny_model, make_engine, run_engine, make_requests):
    """Two prompts of one block each; the second one's first decode step finds none free: it is preempted at length 5."""
    prompts = [[3, 4, 5, 6], [7, 8, 9, 10]]
    expected = run_engine(make_engine(tiny_model(), 4, max_model_len=12), make_requests(prompts, greedy(8)))
    engine = make_engine(tiny_model(), 4, max_model_len=12, num_blocks=4)
    first, second = requests = make_requests(prompts, greedy(8))
    for request in requests:
        engine.add_request(request)
    engine.step()
    assert engine.step().schedule.preempted_ids == ("1",)
    assert (second.num_tokens, first.num_tokens, second.output_token_ids) == (5, 6, expected[1].token_ids[:1])
    while engine.has_unfinished_requests:
        engine.step()
    assert [request.output_token_ids for request in requests] == [run.token_ids for run in expected]


def test_peer_26_a_preempted_stream_gives_each_token_once(tiny_llm):
    """Three blocks of 16, two prompts of 16 tokens, 20 tokens each."""
    prompts = [[5] * 16, [6] * 16]
    expected = tiny_llm().generate(prompts, greedy(20))
    llm = tiny_llm(block_size=16, num_blocks=4, max_model_len=48)
    requests = llm.make_requests(prompts, greedy(20))
    for _ in llm.run(requests):
        pass
    assert sum(request.num_preemptions for request in requests) > 0
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for piece in llm.stream(prompts, greedy(20)):
        tokens[piece.index] += piece.token_ids
    assert [len(ids) for ids in tokens.values()] == [20, 20]
    assert [tuple(ids) for ids in tokens.values()] == [answer.token_ids for answer in expected]


def scores(decoder, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
    """The logits of every position of one text that is computed in chunks of these sizes."""
    kv_cache, rows, start = KVCache(decoder.config, CacheConfig(4, 6)), [], 0
    for size in chunks:
        batch = build_batch([token_ids[start : start + size]], [start], [[5, 1, 3, 2]], 4)
        rows.append(decoder(replace(batch, logits_indices=torch.arange(size)), kv_cache))
        start += size
    assert start == len(token_ids)
    return torch.cat(rows)


@pytest.mark.parametrize("body", ["reference", "sdpa"])
def test_peer_31_a_prompt_in_chunks_of_any_size_sees_no_future(body, tiny_model):
    decoder, token_ids = tiny_model(attention=body), [3 * i + 1 for i in range(16)]
    # No token can see the future where it is the last one, so these are right whatever the mask does.
    right = torch.stack([scores(decoder, token_ids[: i + 1], [i + 1])[-1] for i in range(16)])
    for chunks in ([1] * 16, [2] * 8, [3] * 5 + [1], [16], [7, 9], [15, 1]):
        torch.testing.assert_close(scores(decoder, token_ids, chunks), right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("body", ["reference", "sdpa"])
def test_peer_32_equal_rows_of_a_batch_get_equal_answers(
    body, caching, tiny_model, make_engine, run_engine, make_requests
):
    engine = make_engine(tiny_model(attention=body), 2, enable_prefix_caching=caching)
    first, second = run_engine(engine, make_requests([PROMPT] * 2, greedy(8)))
    assert first.token_ids == second.token_ids
    torch.testing.assert_close(first.logits, second.logits, atol=1e-5, rtol=0)


def test_peer_34_every_token_but_the_last_is_in_the_cache(tiny_model, make_engine, run_engine, make_requests):
    """From the first step on; and each step's logits are those of a whole prefill."""
    engine = make_engine(tiny_model(), block_size=4)
    request = Request("0", PROMPT, greedy(8))
    engine.add_request(request)
    while engine.has_unfinished_requests:
        output = engine.step()
        (entry,) = output.schedule.scheduled
        assert entry.seq_len == len(PROMPT) + request.num_output_tokens - 1
        written = engine.kv_cache.kv.flatten(2, 3).ne(0).any(-1).any(-1)
        slots = [entry.block_ids[p // 4] * 4 + p % 4 for p in range(entry.seq_len)]
        assert all(row.nonzero().flatten().tolist() == sorted(slots) for layer in written for row in layer)
        text = make_requests([request.token_ids[: entry.seq_len]], greedy(1))
        (whole,) = run_engine(make_engine(tiny_model()), text)
        torch.testing.assert_close(output.logits, whole.logits, atol=1e-4, rtol=0)
        assert request.token_ids[-1] == whole.token_ids[0]
