"""Static against continuous batching: what is counted can be checked by hand, and holds its laws on any workload."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm import ConfigError, ModelFileError, RequestError, SamplingParams
from tinyllm.bench import batching
from tinyllm.bench.batching import Setup, compare, count_rectangle, skewed_workload, split_groups

TOKEN = 2 * 2 * 32 * 4  # bytes of a token of the tiny model: keys and values, 2 layers, 2 heads of 16, float32
EXAMPLE = [([1, 2], 1), ([3, 4, 5], 5), ([6], 5), ([7, 8, 9, 10], 1)]  # the one that the module draws
TWO_SLOTS = Setup(max_num_seqs=2, max_model_len=8, block_size=4)
MAX_MODEL_LEN = 20


@pytest.fixture(scope="module")
def example(tiny_model):
    """The comparison of the example."""
    return compare(tiny_model(), EXAMPLE, TWO_SLOTS)


@st.composite
def workloads(draw):
    prompt = st.lists(st.integers(0, 255), min_size=1, max_size=12)
    return draw(st.lists(st.tuples(prompt, st.integers(1, 8)), min_size=1, max_size=7))


setups = st.builds(
    Setup,
    max_num_seqs=st.integers(1, 4),
    max_model_len=st.just(MAX_MODEL_LEN),
    block_size=st.integers(1, 9),
    enable_prefix_caching=st.booleans(),
    check_shapes=st.just(False),
)

# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_the_example_static(example):
    static = example.static
    assert static.num_steps == 5 + 5, "each group as long as its longest answer"
    assert static.num_rows == 2 * (3 + 4) + 2 * (4 + 4)
    assert static.num_computed_rows == 2 + 7 + 5 + 4, "prompt and answer of each, without the answer's last token"
    assert static.padded_share == pytest.approx(12 / 30)
    assert static.slot_utilisation == pytest.approx(12 / 20)
    assert static.tokens_per_step == pytest.approx(1.2)


def test_the_example_continuous(example):
    continuous = example.continuous
    assert continuous.num_steps == 6
    assert continuous.num_rows == continuous.num_computed_rows == 18
    assert (continuous.padded_share, continuous.slot_utilisation, continuous.tokens_per_step) == (0, 1, 2)


def test_the_example_in_memory(example):
    reserved, paged = example.reserved, example.paged
    # tokens of the two that run:  2+3   4+1   5+2   6+3    7+4    5+4
    used = [5, 5, 7, 9, 11, 9]
    blocks = [2, 2, 3, 3, 3, 3]
    assert reserved.held.per_step == (16 * TOKEN,) * 6
    assert reserved.used.per_step == paged.used.per_step == tuple(TOKEN * count for count in used)
    assert paged.held.per_step == tuple(4 * TOKEN * count for count in blocks)
    assert paged.wasted.per_step == tuple(TOKEN * count for count in (3, 3, 5, 3, 1, 3))
    assert (paged.wasted.mean, paged.wasted.peak) == (3 * TOKEN, 5 * TOKEN)
    assert (reserved.held.mean, reserved.held.peak, reserved.wasted.peak) == (16 * TOKEN, 16 * TOKEN, 11 * TOKEN)
    assert reserved.used_share == pytest.approx(46 / 96) and paged.used_share == pytest.approx(46 / 64)
    assert reserved.num_fit == 2, "16 tokens are reserved"
    assert paged.num_fit == 2, "16 tokens buy 4 blocks, one of them the null block; the requests need 1 + 2 + 2 + 1"


def test_answers_are_those_of_each_request_alone(example, tiny_model, make_engine, run_engine, make_requests):
    for (prompt, max_tokens), answer in zip(EXAMPLE, example.answers, strict=True):
        requests = make_requests([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert list(answer) == run_engine(make_engine(tiny_model()), requests)[0].token_ids


def test_a_shared_block_and_its_tokens_count_once(tiny_model):
    workload = [([1, 2, 3, 4, 5, 6, 7, 8], 2)] * 2
    shared = compare(tiny_model(), workload, Setup(2, 12, 4, enable_prefix_caching=True))
    # step 1: blocks [1, 2] and [1, 3], all full; step 2: one block more for each, of which one token is used
    assert shared.paged.held.per_step == (12 * TOKEN, 20 * TOKEN)
    assert shared.paged.used.per_step == (12 * TOKEN, 14 * TOKEN)
    assert shared.reserved.used.per_step == (16 * TOKEN, 18 * TOKEN), "a reservation shares nothing"
    assert (shared.continuous.num_rows, shared.static.num_rows) == (14, 18), "nor does a static group"
    assert shared.static.num_computed_rows == 18
    alone = compare(tiny_model(), workload, Setup(2, 12, 4))
    assert alone.paged.used == alone.reserved.used == shared.reserved.used
    assert alone.paged.held.per_step == (16 * TOKEN, 24 * TOKEN)
    assert alone.continuous.num_rows == 18


def test_a_last_group_may_be_smaller(tiny_model):
    groups = split_groups(EXAMPLE, 3)
    assert [len(group) for group in groups] == [3, 1]
    assert [count_rectangle(group) for group in groups] == [3 * (3 + 4), 4]
    static = compare(tiny_model(), EXAMPLE, Setup(max_num_seqs=3, max_model_len=8)).static
    assert (static.num_steps, static.num_rows, static.num_computed_rows) == (5 + 1, 25, 18)
    assert static.slot_utilisation == pytest.approx(12 / 18), "an empty slot is one that gave no token"


def test_the_null_block_takes_its_part_of_the_same_bytes(tiny_model):
    comparison = compare(tiny_model(), [([1], 2)], Setup(1, 8, block_size=4))
    assert (comparison.reserved.num_fit, comparison.paged.num_fit) == (1, 1), "8 tokens are 2 blocks, one of them null"


def test_blocks_larger_than_a_request_fit_worse_than_a_reservation(tiny_model):
    comparison = compare(tiny_model(), [([1], 2)], Setup(1, 4, block_size=16))
    assert comparison.paged.held.per_step == (16 * TOKEN,) * 2 and comparison.reserved.held.per_step == (4 * TOKEN,) * 2
    assert (comparison.reserved.num_fit, comparison.paged.num_fit) == (1, 0)
    assert all(len(line) <= 90 for line in comparison.lines())


# ---- laws ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(workloads(), setups)
def test_laws_of_batching(tiny_model, workload, setup):
    comparison = compare(tiny_model(attention="sdpa"), workload, setup)
    static, continuous = comparison.static, comparison.continuous
    assert [len(answer) for answer in comparison.answers] == [max_tokens for _, max_tokens in workload]
    assert continuous.num_steps <= static.num_steps, "whoever waits for a group in the one starts no later in the other"
    assert static.num_steps == sum(max(n for _, n in group) for group in split_groups(workload, setup.max_num_seqs))
    assert static.num_computed_rows == sum(len(prompt) + max_tokens - 1 for prompt, max_tokens in workload)
    assert continuous.padded_share == 0 <= static.padded_share < 1
    assert continuous.num_rows <= static.num_computed_rows and (
        setup.enable_prefix_caching or continuous.num_rows == static.num_computed_rows
    )
    for ran in (static, continuous):
        assert 0 < ran.slot_utilisation <= 1
        assert ran.tokens_per_step == pytest.approx(ran.slot_utilisation * setup.max_num_seqs)


@settings(max_examples=25)
@given(workloads(), setups)
def test_laws_of_memory(tiny_model, workload, setup):
    comparison = compare(tiny_model(attention="sdpa"), workload, setup)
    reserved, paged = comparison.reserved, comparison.paged
    assert len(paged.held.per_step) == comparison.continuous.num_steps
    assert sum(reserved.held.per_step) == setup.max_model_len * TOKEN * sum(len(a) for a in comparison.answers)
    for step, wasted in enumerate(paged.wasted.per_step):
        num_reqs = reserved.held.per_step[step] // (MAX_MODEL_LEN * TOKEN)
        assert 1 <= num_reqs <= setup.max_num_seqs
        assert 0 <= wasted <= num_reqs * (setup.block_size - 1) * TOKEN, "at most the end of each one's last block"
        assert paged.used.per_step[step] <= reserved.used.per_step[step] <= reserved.held.per_step[step]
    if not setup.enable_prefix_caching:
        assert paged.used == reserved.used
    assert paged.held.mean <= paged.held.peak and 0 < paged.used_share <= 1
    assert reserved.num_fit == min(len(workload), setup.max_num_seqs), "the peak itself"


# ---- what is refused, and what is printed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ([], "the workload is empty"),
        ([([1], 1), ([], 1)], "request 1: the prompt is empty"),
        ([([1], 1), ([1] * 8, 1)], "request 1: 8 prompt tokens and an answer of 1 are 9; .* max_model_len 8"),
        ([([1], 8)], "request 0: 1 prompt tokens and an answer of 8 are 9"),
        ([([1], 0)], "max_tokens is 0"),
        ([([1, 256], 1)], "request 0: token id 256 is outside the vocabulary of 256"),
    ],
)  # fmt: skip
def test_impossible_workloads_are_refused(tiny_model, workload, message):
    with pytest.raises(RequestError, match=message):
        compare(tiny_model(), workload, TWO_SLOTS)


def test_the_longest_request_that_is_allowed_gets_its_whole_answer(tiny_model):
    comparison = compare(tiny_model(), [([1] * 5, 3)], TWO_SLOTS)
    assert [len(answer) for answer in comparison.answers] == [3]


def test_impossible_setups_are_refused(tiny_model):
    for values in ((0, 8), (2, 0), (2, 8, 0)):
        with pytest.raises(ConfigError):
            Setup(*values)
    with pytest.raises(ConfigError, match="max_positions"):
        compare(tiny_model(), EXAMPLE, Setup(2, max_model_len=129))


def test_a_model_without_finite_logits_is_refused(tiny_model):
    model = copy.deepcopy(tiny_model())
    model.norm.weight.fill_(torch.nan)
    with pytest.raises(ModelFileError, match="not finite"):
        compare(model, EXAMPLE, TWO_SLOTS)


def test_different_tokens_are_an_error(tiny_model, monkeypatch):
    run = batching._run
    monkeypatch.setattr(batching, "_run", lambda engine, groups: run(engine, [list(group)[:1] for group in groups]))
    with pytest.raises(AssertionError, match="must not change a token"):
        compare(tiny_model(), EXAMPLE, TWO_SLOTS)


def test_the_tables(example, tiny_model):
    lines = list(example.lines())
    assert lines[0].startswith("4 requests in 2 slots, answers of 1 to 5 tokens, 12 in all")
    cells = {line[:48].strip(): line[48:].split() for line in lines}
    assert cells["batching"] == ["static", "continuous", "ratio"]
    assert cells["steps"] == ["10", "6", "1.67"]
    assert cells["slots that gave a token"] == ["60.0%", "100.0%", "0.60"]
    assert cells["padding among them"] == ["40.0%", "0.0%"]
    assert cells["token rows that this engine computed"] == ["18", "18", "1.00"]
    assert cells["held, mean over steps"] == ["8.00", "KiB", "5.33", "KiB", "1.50"]
    assert not any("seconds" in line for line in lines), "nothing was measured"
    timed = compare(tiny_model(), EXAMPLE, TWO_SLOTS, rounds=1)
    assert [timing.name for timing in timed.timings] == ["static", "continuous"]
    timed_lines = list(timed.lines())
    assert [line for line in timed_lines if "seconds" not in line] == lines
    assert sum(line.startswith("  seconds") for line in timed_lines) == 1
    assert max(map(len, timed_lines)) <= 90


def test_the_skewed_workload_is_skewed():
    workload = skewed_workload(range(24))
    max_tokens = [count for _, count in workload]
    assert len(workload) == 24 and max_tokens.count(24) == 4 and max(n for n in max_tokens if n != 24) == 6
    assert {len(prompt) for prompt, _ in workload} <= set(range(4, 25))
