"""Prefix caching in the whole engine: it may save work, and may change nothing else.

`peer_01` and `case_068` and the like number the cases of this part: bugs and reports from other engines, reworded.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyllm import SamplingParams
from tinyllm.batch import build_batch
from tinyllm.engine import Engine, StepOutput
from tinyllm.request import Request
from tinyllm.scheduler import Schedule

MAX_MODEL_LEN = 40
ONE = SamplingParams(max_tokens=1)
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="session")
def small_engine(tiny_model, make_engine):
    """small_engine(block_size, ...): an engine around a tiny model, whose shapes other tests check."""

    def small_engine(block_size: int, attention: str = "reference", **limits) -> Engine:
        limits = {"max_model_len": MAX_MODEL_LEN, "check_shapes": False} | limits
        return make_engine(tiny_model(attention=attention), block_size, **limits)

    return small_engine


@pytest.fixture(scope="session")
def run_one(run_engine, make_requests):
    """run_one(engine, prompt, params): (what the request got, how many of its tokens were found in the cache)."""

    def run_one(engine: Engine, prompt, params=GREEDY):
        (request,) = make_requests([prompt], params)
        (run,) = run_engine(engine, [request])
        return run, request.num_cached_tokens

    return run_one


def assert_same(run, expected) -> None:
    """The same tokens, chosen from the same logits up to float32's rounding."""
    assert run.token_ids == expected.token_ids
    torch.testing.assert_close(run.logits, expected.logits, atol=1e-4, rtol=0)


def assert_whole(engine: Engine) -> None:
    """Nobody holds a block, and the map from hashes names exactly the blocks that have them."""
    pool = engine.scheduler.pool
    assert (pool.num_used_blocks, pool.num_free_blocks) == (0, pool.num_blocks - 1)
    assert sorted(pool.free_queue) == list(range(1, pool.num_blocks)) and set(pool.ref_counts) == {0}
    hashes = [block_hash for block_hash in pool.hashes if block_hash is not None]
    assert pool.num_cached_blocks == len(hashes)
    for block_hash in hashes:
        found = pool.find(block_hash)
        assert found is not None and pool.hashes[found] == block_hash


def add(engine: Engine, name: str, prompt, params=GREEDY) -> Request:
    request = Request(name, list(prompt), params)
    engine.add_request(request)
    return request


def finish(engine: Engine) -> list[StepOutput]:
    outputs = []
    while engine.has_unfinished_requests:
        outputs.append(engine.step())
    return outputs


def shares(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """Each scheduled request's (tokens before this step, tokens of this step)."""
    return {entry.request.request_id: (entry.num_computed_tokens, entry.query_len) for entry in schedule.scheduled}


# --- on equals off -----------------------------------------------------------------------------------------------------


@st.composite
def pairs(draw):
    """Two prompts, of which the second often begins as the first does, or as its answer does, or is the same."""
    token = st.integers(0, 255)
    first = draw(st.lists(token, min_size=1, max_size=20))
    num_common = draw(st.integers(0, len(first)))
    return first, num_common, draw(st.lists(token, min_size=num_common == 0, max_size=8))


@settings(max_examples=20)
@given(
    pairs(),
    st.integers(1, 20),
    st.sampled_from([1, 3, 7, 1000]),
    st.sampled_from(["reference", "sdpa"]),
    st.sampled_from([GREEDY, SAMPLED]),
)
@example((list(range(16)), 16, []), 4, 1000, "reference", GREEDY)  # cached whole, and it ends with a block
@example((list(range(16)), 16, []), 16, 1000, "reference", GREEDY)
@example((list(range(16)), 16, []), 1, 1000, "sdpa", GREEDY)
def test_with_the_cache_on_every_pair_gets_what_it_gets_with_the_cache_off(
    small_engine, run_one, run_engine, make_requests, pair, block_size, budget, attention, params
):
    first, num_common, ending = pair
    second = first[:num_common] + ending
    off = small_engine(block_size, enable_prefix_caching=False)
    expected = []
    for prompt in (first, second):
        run, num_cached = run_one(off, prompt, params)
        expected.append(run)
        assert num_cached == 0
    chat = [*first, *expected[0].token_ids, *ending]  # the first, its answer, and on: the answer is cached, too
    expected.append(run_one(off, chat, params)[0])

    engine = small_engine(block_size, attention, budget=budget)
    for prompt, which, least in ((first, 0, 0), (second, 1, num_common), (first, 0, len(first)), (chat, 2, len(first))):
        got, num_cached = run_one(engine, prompt, params)
        assert_same(got, expected[which])
        assert min(least, len(prompt) - 1) // block_size * block_size <= num_cached < len(prompt)
        assert num_cached % block_size == 0
        assert_whole(engine)

    engine = small_engine(block_size, attention, budget=budget)  # and all of them together
    for got, run in zip(run_engine(engine, make_requests([first, second, chat], params)), expected, strict=True):
        assert_same(got, run)
    assert_whole(engine)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_peer_16_every_request_behind_a_common_beginning_equals_one_without_the_cache(
    block_size, attention, small_engine, run_one
):
    common = [(7 * i + 3) % 256 for i in range(16)]
    a, b = [*common, 90, 91, 92, 93], [*common, 82, 80, 81]
    on, off = small_engine(block_size, attention), small_engine(block_size, enable_prefix_caching=False)
    cached = []
    for prompt in (a, b, a, b, common, a):
        run, num_cached = run_one(on, prompt)
        assert_same(run, run_one(off, prompt)[0])
        cached.append(num_cached)
    assert cached[:3] == [0, 16, 19 // block_size * block_size]
    assert off.scheduler.pool.num_cached_blocks == 0


def test_a_small_pool_that_evicts_and_preempts_changes_no_output(small_engine, run_engine, make_requests):
    common = list(range(60, 66))
    prompts = [[*common, *[i] * i] for i in range(6)]
    runs = {}
    for is_on, num_blocks in ((True, 12), (True, 200), (False, 200)):
        engine = small_engine(2, max_model_len=16, num_blocks=num_blocks, enable_prefix_caching=is_on)
        runs[is_on, num_blocks] = run_engine(engine, make_requests(prompts, SAMPLED))
        assert_whole(engine)
    for small, ample, off in zip(*runs.values(), strict=True):
        assert_same(small, off)
        assert_same(ample, off)
    assert sum(run.num_preemptions for run in runs[True, 12]) > 0


def test_a_text_given_again_is_completed_the_same(tiny_llm):
    llm = tiny_llm(block_size=4)
    prompt = "The capital of France is"
    answers = [answer for count in (1, 1, 2) for answer in llm.generate([prompt] * count, GREEDY)]
    assert len(answers) == 4 and len({answer.token_ids for answer in answers}) == 1
    assert llm.engine.scheduler.prefix_cache_stats.num_hit_tokens > 0


# --- blocks and slots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 8])
def test_peer_01_the_last_token_of_every_length_has_the_slot_behind_the_one_before(block_size):
    table = [10, 11, 7, 3, 25, 4, 18, 9, 30, 2, 1, 5, 6, 8, 12, 13, 14, 15, 16, 17]
    slots = [block_id * block_size + i for block_id in table for i in range(block_size)]
    for seq_len in range(1, 21):
        row = table[: -(-seq_len // block_size)]
        assert build_batch([[9]], [seq_len - 1], [row], block_size).slot_mapping.tolist() == [slots[seq_len - 1]]


def test_peer_01_the_eighth_token_fills_the_second_block():
    assert build_batch([[9]], [7], [[10, 11]], 4).slot_mapping.tolist() == [47]


def test_peer_04_blocks_of_one_token_give_each_token_its_own_slot(small_engine):
    engine = small_engine(1)
    request = add(engine, "r", [1, 2, 3])
    slots = [output.batch.slot_mapping.tolist() for output in finish(engine)]
    assert slots == [[1, 2, 3], [4], [5], [6]]
    assert len(request.output_token_ids) == 4


def test_peer_05_two_blocks_of_eight_are_sixteen_slots():
    batch = build_batch([list(range(16))], [0], [[1, 2, 3]], 8)  # the third is not used yet
    assert batch.slot_mapping.tolist() == list(range(8, 24))


def test_peer_07_any_block_size_gives_the_same_output(small_engine, run_one):
    prompt = list(range(100, 117))
    expected, _ = run_one(small_engine(16), prompt)
    for block_size in (1, 2, 3, 5, 8, 17, 64, 256):
        engine = small_engine(block_size)
        for _ in range(2):  # without and with a hit
            assert_same(run_one(engine, prompt)[0], expected)


def test_peer_08_the_last_block_of_the_pool_is_the_last_of_the_cache(small_engine):
    engine = small_engine(4, max_model_len=16, num_blocks=5)
    add(engine, "r", range(15))
    (first, *_) = finish(engine)
    assert engine.scheduler.pool.num_blocks == engine.cache_config.num_blocks == engine.kv_cache.kv.shape[2] == 5
    assert first.batch.block_table.tolist() == [[1, 2, 3, 4]]
    assert first.batch.slot_mapping.max() == 4 * 4 + 2 < engine.cache_config.num_slots == 20


# --- the cache ---------------------------------------------------------------------------------------------------------


def test_peer_10_a_prompt_cached_whole_still_has_a_query(small_engine, run_one):
    engine = small_engine(4)
    runs = []
    for expected in ((0, 8), (4, 4)):
        add(engine, "r", range(8), ONE)
        (output,) = finish(engine)
        assert shares(output.schedule) == {"r": expected}
        runs.append(output.logits)
    torch.testing.assert_close(runs[0], runs[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_together", [True, False])
def test_peer_11_what_is_left_of_a_prompt_is_counted_behind_the_hit(is_together, small_engine):
    engine = small_engine(4, budget=8)
    add(engine, "a", [*range(12), 50], ONE)
    if not is_together:
        assert [shares(output.schedule) for output in finish(engine)] == [{"a": (0, 8)}, {"a": (8, 5)}]
    add(engine, "b", [*range(12), 60], ONE)
    seen = [shares(output.schedule) for output in finish(engine)]
    assert seen == ([{"a": (0, 8)}, {"a": (8, 5), "b": (12, 1)}] if is_together else [{"b": (12, 1)}])
    assert_whole(engine)


@pytest.mark.parametrize("is_reading", [True, False])
def test_peer_13_two_identical_prompts_in_one_step_get_the_same_tokens(is_reading, small_engine, run_one):
    prompt = list(range(30, 39))
    expected, _ = run_one(small_engine(4), prompt)
    engine = small_engine(4)
    params = SamplingParams(max_tokens=4, ignore_eos=True, skip_reading_prefix_cache=not is_reading)
    requests = [add(engine, name, prompt, params) for name in "ab"]
    first = engine.step()
    tables = [list(entry.block_ids) for entry in first.schedule.scheduled]
    assert tables == [[1, 2, 3], [1, 2, 4] if is_reading else [4, 5, 6]], "shared, or two equal ones side by side"
    finish(engine)
    assert [request.output_token_ids for request in requests] == [expected.token_ids] * 2
    assert_whole(engine)
    assert run_one(engine, prompt)[0].token_ids == expected.token_ids


def test_case_070_two_identical_prompts_in_one_step_share_what_the_first_writes(small_engine, run_one):
    prompt = list(range(30, 47))
    expected, _ = run_one(small_engine(4), prompt)
    engine = small_engine(4)
    first, second = (add(engine, name, prompt) for name in "ab")
    output = engine.step()
    assert shares(output.schedule) == {"a": (0, 17), "b": (16, 1)}
    torch.testing.assert_close(output.logits[1], expected.logits[0], atol=1e-4, rtol=0)
    assert engine.abort("a")
    assert first.finish_reason == "abort"
    finish(engine)
    assert second.output_token_ids == expected.token_ids, "the blocks of the one that left are still its own"
    assert_whole(engine)


def test_case_070_the_one_that_wrote_may_be_outlived_by_many_others(small_engine, run_one):
    prompt = list(range(30, 47))
    expected, _ = run_one(small_engine(4), prompt)
    engine = small_engine(4, num_blocks=16, max_model_len=24)
    writer, reader = add(engine, "writer", prompt), add(engine, "reader", prompt)
    engine.step()
    engine.abort("writer")
    others = [add(engine, str(i), [200 + i] * 9, ONE) for i in range(8)]  # they need more blocks than there are
    finish(engine)
    assert all(request.finish_reason == "length" for request in others)
    assert (writer.finish_reason, reader.output_token_ids) == ("abort", expected.token_ids)


def test_peer_14_a_block_that_another_request_took_is_not_found_for_the_old_one(small_engine, run_one):
    engine = small_engine(4, max_model_len=12, num_blocks=4)
    (run, _) = run_one(engine, [1, 2, 3, 4, 5], ONE)
    _, num_cached = run_one(engine, list(range(100, 109)), ONE)
    assert (num_cached, engine.scheduler.pool.num_cached_blocks) == (0, 2)
    assert_whole(engine)
    again, num_cached = run_one(engine, [1, 2, 3, 4, 5], ONE)
    assert num_cached == 0
    assert_same(again, run)


def test_peer_17_a_pool_full_of_cached_blocks_serves_ever_new_prompts(small_engine, run_one):
    engine = small_engine(16, max_model_len=40, num_blocks=9)
    for i in range(20):
        run, num_cached = run_one(engine, [i] * 16)
        assert (len(run.token_ids), num_cached) == (4, 0)
        assert_whole(engine)
    assert engine.scheduler.pool.num_cached_blocks <= 8
    assert run_one(engine, [*[19] * 16, 1])[1] == 16, "the latest is still there"
    assert run_one(engine, [*[0] * 16, 1])[1] == 0, "the first is not"


def test_peer_19_a_running_requests_table_only_grows(small_engine):
    """What it computed itself stays its own, though an equal block is cached; nothing is exchanged under its feet."""
    engine = small_engine(2)
    prompt = list(range(30, 37))
    params = SamplingParams(max_tokens=12, ignore_eos=True, skip_reading_prefix_cache=True)
    requests = [add(engine, name, prompt, params) for name in "abc"]
    tables: dict[str, tuple[int, ...]] = {}
    for output in finish(engine):
        for entry in output.schedule.scheduled:
            before = tables.get(entry.request.request_id, ())
            assert entry.block_ids[: len(before)] == before
            tables[entry.request.request_id] = entry.block_ids
    assert len({block_id for table in tables.values() for block_id in table}) == 3 * 9, "18 of 19 tokens have a slot"
    assert requests[0].output_token_ids == requests[1].output_token_ids == requests[2].output_token_ids


def test_kv_28_a_request_that_computes_its_whole_prompt_leaves_it_to_others(small_engine, run_one):
    engine = small_engine(16, max_model_len=64)
    prompt = list(range(50))
    no_reading = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    runs = [run_one(engine, prompt, params) for params in (no_reading, ONE, no_reading)]
    assert [num_cached for _, num_cached in runs] == [0, 48, 0]
    assert_same(runs[1][0], runs[0][0])
    assert_same(runs[2][0], runs[0][0])
    assert engine.scheduler.prefix_cache_stats.num_requests == 1


def test_answers_are_cached_as_prompts_are(small_engine, run_one):
    engine = small_engine(4)
    run, _ = run_one(engine, range(6), SamplingParams(max_tokens=7, ignore_eos=True))
    _, num_cached = run_one(engine, [*range(6), *run.token_ids])
    assert num_cached == 12, "of 13 tokens the last was never computed"


def test_a_salt_keeps_its_requests_apart(small_engine):
    engine = small_engine(4)
    seen = []
    for salt in (None, "me", "you", "me", None):
        request = Request("r", list(range(9)), ONE, cache_salt=salt)
        engine.add_request(request)
        finish(engine)
        seen.append(request.num_cached_tokens)
    assert seen == [0, 0, 0, 8, 8]


def test_after_a_reset_nothing_is_found(small_engine, run_one):
    engine = small_engine(4)
    first, _ = run_one(engine, range(9))
    assert run_one(engine, range(9))[1] == 8
    assert engine.reset_prefix_cache()
    assert engine.scheduler.pool.num_cached_blocks == 0
    again, num_cached = run_one(engine, range(9))
    assert num_cached == 0
    assert_same(again, first)


def test_a_reset_while_a_request_runs_does_nothing(small_engine):
    engine = small_engine(4)
    request = add(engine, "r", range(9))
    engine.step()
    table = list(request.block_ids)
    assert engine.reset_prefix_cache() is False
    assert (engine.scheduler.pool.num_cached_blocks, request.block_ids) == (2, table)
    assert engine.scheduler.running == [request]
    finish(engine)
    assert engine.reset_prefix_cache() is True


def test_a_reset_may_let_running_requests_start_over(small_engine, run_one):
    prompts = [list(range(9)), list(range(20, 26)), list(range(9))]
    expected = [run_one(small_engine(4), prompt)[0].token_ids for prompt in prompts]
    engine = small_engine(4)
    requests = [add(engine, str(i), prompt) for i, prompt in enumerate(prompts)]
    engine.step()
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert engine.scheduler.pool.num_cached_blocks == engine.scheduler.pool.num_used_blocks == 0
    assert list(engine.scheduler.waiting) == requests, "in their order"
    finish(engine)
    assert [request.output_token_ids for request in requests] == expected
    assert [request.num_cached_tokens for request in requests] == [0, 0, 8], "what they found at their first start"


def test_what_a_prompt_found_is_counted_at_its_first_start_alone(small_engine):
    """On this one's second start it finds its own blocks, which say nothing about its prompt."""
    engine = small_engine(4)
    request = add(engine, "0", list(range(9)))
    engine.step()
    other = add(engine, "1", list(range(20, 29)))
    engine.step()
    engine.scheduler._preempt(request)
    engine.step()
    assert other.num_computed_tokens > 8 and request.num_preemptions == 1
    assert (request.num_cached_tokens, engine.scheduler.prefix_cache_stats.num_hit_tokens) == (0, 8)


def test_what_a_failed_step_would_have_written_is_not_found(small_engine, run_one, monkeypatch):
    engine = small_engine(4)
    expected, _ = run_one(small_engine(4), range(13))
    run_one(engine, range(5), ONE)  # block 1 is computed
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_run", lambda schedule: 1 / 0)
        for name in "ab":
            add(engine, name, range(13))
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.scheduler.pool.num_cached_blocks == 0
    outputs = finish(engine)
    assert shares(outputs[0].schedule) == {"a": (0, 13), "b": (12, 1)}
    assert [request.output_token_ids for request in outputs[-1].finished] == [expected.token_ids] * 2
    assert_whole(engine)


# --- the default model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden_runs(smollm2_sdpa, make_engine, run_one):
    """Golden prompts one after the other through one engine: (prompt's name, its golden, first logits, run, cached)."""
    data = Path(__file__).parent / "data"
    prompts = json.loads((data / "logits_golden.json").read_text())["prompts"]
    assert prompts["n600"]["prompt_ids"][:200] == prompts["n200"]["prompt_ids"]
    engine = make_engine(smollm2_sdpa.decoder, max_model_len=700, check_shapes=False)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    names = ("n200", "n200", "n600", "n600", "n600")
    return [(name, prompts[name], *run_one(engine, prompts[name]["prompt_ids"], params)) for name in names]


@pytest.fixture(scope="module")
def golden_logits():
    """Prompt name -> the logits of its last position, computed by another implementation, which has no cache."""
    with np.load(Path(__file__).parent / "data" / "logits_golden.npz") as arrays:
        return {name: torch.from_numpy(arrays[f"{name}_last"]) for name in ("n200", "n600")}


def check_golden(runs, golden_logits) -> list[int]:
    """Every run has the golden tokens and first logits; how many tokens each found in the cache."""
    for name, golden, run, _ in runs:
        assert run.token_ids == golden["greedy_ids"][:2]
        torch.testing.assert_close(run.logits[0], golden_logits[name], atol=2e-4, rtol=0)
    return [num_cached for *_, num_cached in runs]


def test_case_068_a_long_prompt_gives_the_same_every_time(golden_runs, golden_logits):
    runs = [run for run in golden_runs if run[0] == "n600"]
    assert check_golden(runs, golden_logits) == [192, 592, 592]


def test_case_071_a_miss_a_hit_and_a_partial_hit_give_the_text_of_misses(golden_runs, golden_logits):
    assert [name for name, *_ in golden_runs[:3]] == ["n200", "n200", "n600"]
    assert check_golden(golden_runs[:3], golden_logits) == [0, 192, 192]
