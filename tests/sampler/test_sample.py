"""Choosing token ids: greedy beside random rows, unusable rows, invariances of the seed, and the law of the draw."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinyllm.batch import SamplingBatch, build_sampling_batch
from tinyllm.request import Request, SamplingParams
from tinyllm.sampler.sample import process, sample

L = [2.0, 1.0, 0.0, -1.0, -2.0]
INF, NAN = float("inf"), float("nan")
GREEDY = SamplingParams()
RANDOM = SamplingParams(temperature=1.0)
TRUNCATED = SamplingParams(temperature=0.8, top_k=3, top_p=0.95, min_p=0.05)

logit_values = st.floats(-30, 30, width=32)
all_params = st.sampled_from([GREEDY, RANDOM, TRUNCATED, SamplingParams(top_k=2, top_p=0.1, min_p=0.9)])


def sampling_of(
    params: list[SamplingParams], vocab_size: int, seeds: list[int] | None = None, device: str = "cpu"
) -> SamplingBatch:
    """Row i has seed 100 + i and position 40 + i unless seeds say otherwise."""
    row_seeds = [100 + i for i in range(len(params))] if seeds is None else seeds
    return build_sampling_batch(params, row_seeds, [40 + i for i in range(len(params))], vocab_size, device)


def choose(logits: Tensor, params: SamplingParams, seeds: list[int], positions: list[int]) -> list[int]:
    sampling = build_sampling_batch([params] * len(seeds), seeds, positions, logits.shape[-1])
    token_ids, is_valid = sample(logits, sampling)
    assert is_valid.all()
    return token_ids.tolist()


# ---- greedy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY, RANDOM]], ids=["alone", "beside a random row"])
def test_a_tie_goes_to_the_first_token(params: list[SamplingParams]) -> None:
    token_ids, _ = sample(torch.tensor([[1.0, 3.0, 3.0]]).repeat(len(params), 1), sampling_of(params, 3))
    assert token_ids[0].item() == 1


def test_a_tie_goes_to_the_first_token_of_a_large_vocabulary() -> None:
    logits = torch.zeros(2, 50_000)
    logits[:, [777, 31_000, 49_999]] = 4.0
    token_ids, _ = sample(logits, sampling_of([GREEDY, SamplingParams(temperature=1.0, top_k=1)], 50_000))
    assert token_ids.tolist() == [777, 777]


def test_greedy_ignores_the_truncations() -> None:
    greedy = SamplingParams(temperature=0.0, top_k=5, top_p=0.1, min_p=0.9)
    token_ids, is_valid = sample(torch.tensor([L, L[::-1]]), sampling_of([greedy, TRUNCATED], 5))
    assert token_ids[0].item() == 0 and is_valid.all()


@settings(deadline=None, max_examples=80)
@given(data=st.data(), width=st.integers(1, 9), count=st.integers(1, 5))
def test_a_greedy_row_is_the_argmax_beside_whatever(data: st.DataObject, width: int, count: int) -> None:
    rows = data.draw(st.lists(st.lists(logit_values, min_size=width, max_size=width), min_size=count, max_size=count))
    params = data.draw(st.lists(all_params, min_size=count, max_size=count))
    token_ids, is_valid = sample(torch.tensor(rows), sampling_of(params, width))
    assert is_valid.all()
    for row, row_params, token_id in zip(rows, params, token_ids.tolist(), strict=True):
        if row_params.is_greedy:
            assert token_id == row.index(max(row))


def test_whole_numbers_serve_as_parameters() -> None:
    logits = torch.tensor([L] * 50)
    whole, real = SamplingParams(temperature=1, top_p=1, min_p=0), SamplingParams(temperature=1.0, top_p=1.0, min_p=0.0)
    assert choose(logits, whole, [1] * 50, list(range(50))) == choose(logits, real, [1] * 50, list(range(50)))


def test_top_k_1_is_greedy() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    chosen = choose(logits, SamplingParams(temperature=2.0, top_k=1), list(range(50)), list(range(50)))
    assert chosen == logits.argmax(-1).tolist()


# ---- the draw ----------------------------------------------------------------------------------------------------------


def test_gumbel_argmax_equals_the_exponential_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's first sampler divides by exponential noise q, its second adds -log q: the same token."""
    q = torch.tensor([[0.5, 0.1, 2.0, 0.01, 3.0]])
    race = torch.tensor([L]).softmax(-1) / q
    torch.testing.assert_close(race[0], torch.tensor([1.2728, 2.3412, 0.0431, 3.1685, 0.0039]), rtol=0, atol=5e-5)
    monkeypatch.setattr("tinyllm.sampler.sample.gumbel_noise", lambda seeds, positions, vocab_size: -q.log())
    token_ids, _ = sample(torch.tensor([L]), sampling_of([RANDOM], 5))
    assert token_ids.item() == race.argmax().item() == 3


@pytest.mark.parametrize(
    "params", [RANDOM, SamplingParams(temperature=1.7), TRUNCATED], ids=["T=1", "T=1.7", "truncated"]
)
def test_frequencies_follow_the_processed_softmax(params: SamplingParams) -> None:
    """40,000 positions of one seed; Pearson's statistic within five standard deviations, dropped tokens never drawn."""
    count = 40_000
    sampling = build_sampling_batch([params] * count, [9] * count, range(count), 5)
    token_ids, _ = sample(torch.tensor([L]).expand(count, -1), sampling)
    counts = torch.bincount(token_ids, minlength=5)
    one_row = build_sampling_batch([params], [9], [0], 5)
    expected = process(torch.tensor([L]), one_row)[0].softmax(-1).double() * count
    kept = expected > 0
    freedom = int(kept.sum()) - 1
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert counts[~kept].sum() == 0
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    assert freedom == (2 if params is TRUNCATED else 4)  # top_k 3 leaves three


def test_one_seed_draws_the_same_alone_in_a_batch_and_in_any_order() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    seeds, positions = [5, -5, 0, 2**63 - 1, -(2**63), 5], [3, 3, 900, 0, 1, 4]
    together = choose(logits, RANDOM, seeds, positions)
    assert choose(logits, RANDOM, seeds, positions) == together
    assert choose(logits.flip(0), RANDOM, seeds[::-1], positions[::-1]) == together[::-1]
    for i in range(6):
        assert choose(logits[i : i + 1], RANDOM, seeds[i : i + 1], positions[i : i + 1]) == [together[i]]
    mates = [GREEDY, TRUNCATED, RANDOM, GREEDY, TRUNCATED, RANDOM]
    token_ids, _ = sample(logits, build_sampling_batch(mates, seeds, positions, 200))
    assert [token_ids[i].item() for i in (2, 5)] == [together[i] for i in (2, 5)]


def test_different_seeds_and_different_positions_differ() -> None:
    logits = torch.zeros(20, 1000)
    one = choose(logits, RANDOM, [1] * 20, list(range(20)))
    assert choose(logits, RANDOM, [2] * 20, list(range(20))) != one
    assert choose(logits, RANDOM, [0] * 20, list(range(20))) != one  # 0 is a seed like any other
    assert len(set(one)) > 15  # the positions of one seed differ, too


def test_a_request_without_a_seed_gets_its_own() -> None:
    drawn = {Request(str(i), [1], RANDOM).seed for i in range(20)}
    assert len(drawn) == 20 and all(0 <= seed < 2**32 for seed in drawn)
    assert Request("fixed", [1], SamplingParams(seed=0)).seed == 0


# ---- unusable rows -----------------------------------------------------------------------------------------------------

UNUSABLE = {
    "one NaN": [1.0, NAN, 3.0, 0.0, 0.0],
    "NaN last": [9.0, 1.0, 3.0, 0.0, NAN],
    "all NaN": [NAN] * 5,
    "all -inf": [-INF] * 5,
    "one +inf": [0.0, INF, 1.0, 2.0, 3.0],
    "NaN and -inf": [-INF, NAN, -INF, -INF, -INF],
}


@pytest.mark.parametrize("params", [GREEDY, RANDOM, TRUNCATED], ids=["greedy", "random", "truncated"])
@pytest.mark.parametrize("row", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_row_is_invalid_and_its_neighbours_do_not_notice(row: list[float], params: SamplingParams) -> None:
    mates = [GREEDY, RANDOM, TRUNCATED]
    sampling = sampling_of([*mates, params], 5)
    clean_ids, clean_valid = sample(torch.tensor([L, L, L, L]), sampling)
    token_ids, is_valid = sample(torch.tensor([L, L, L, row]), sampling)
    assert is_valid.tolist() == [True, True, True, False]
    assert clean_valid.all() and token_ids[:3].tolist() == clean_ids[:3].tolist()
    alone_ids, alone_valid = sample(torch.tensor([row]), sampling_of([params], 5))
    assert not alone_valid.item() and 0 <= alone_ids.item() < 5


@pytest.mark.parametrize("params", [GREEDY, RANDOM, TRUNCATED], ids=["greedy", "random", "truncated"])
def test_a_masked_token_is_never_drawn_and_one_live_token_always(params: SamplingParams) -> None:
    """-inf is what a grammar writes over forbidden tokens."""
    count = 500
    sampling = build_sampling_batch([params] * count, [3] * count, range(count), 5)
    token_ids, is_valid = sample(torch.tensor([[-INF, -80.0, -INF, -80.0, -INF]]).expand(count, -1), sampling)
    assert is_valid.all() and set(token_ids.tolist()) == ({1} if params.is_greedy else {1, 3})
    token_ids, is_valid = sample(torch.tensor([[-INF, -INF, -INF, -1e30, -INF]]).expand(count, -1), sampling)
    assert is_valid.all() and set(token_ids.tolist()) == {3}


# ---- types and devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [[GREEDY, GREEDY], [RANDOM, TRUNCATED], [GREEDY, TRUNCATED]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_is_float32_and_the_callers_logits_stay(dtype: torch.dtype, params: list[SamplingParams]) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = logits.clone()
    token_ids, is_valid = sample(logits, sampling_of(params, 300))
    assert torch.equal(logits, before) and logits.dtype == dtype
    assert token_ids.dtype == torch.int64 and is_valid.dtype == torch.bool
    exact_ids, _ = sample(before.float(), sampling_of(params, 300))
    assert torch.equal(token_ids, exact_ids)


@pytest.mark.parametrize("params", [[GREEDY] * 3, [GREEDY, RANDOM, TRUNCATED]], ids=["greedy", "mixed"])
def test_runs_on_the_meta_device_so_it_never_asks_for_a_value(params: list[SamplingParams]) -> None:
    logits = torch.empty(3, 128256, dtype=torch.bfloat16, device="meta")
    token_ids, is_valid = sample(logits, sampling_of(params, 128256, device="meta"))
    assert token_ids.shape == is_valid.shape == (3,)
    assert token_ids.device.type == is_valid.device.type == "meta"
