"""temperature, min_p, top_k and top_p against transformers' numbers, the published rules and a plain-Python reference."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinyllm.batch import build_sampling_batch
from tinyllm.errors import RequestError
from tinyllm.request import SamplingParams
from tinyllm.sampler.processors import apply_min_p, apply_temperature, apply_top_k_top_p, ban_ids
from tinyllm.sampler.sample import process, sample

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "sampling_golden.json").read_text())
# Parameters of the golden file that SamplingParams does not have yet; when one comes, the selection below must take it in.
LATER = {"repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"}
# Where our rule differs from transformers' on purpose (the rows' notes): exactly k tokens, and ties go to the lower id.
OUR_KEPT = {"top_k_ties": [0, 1], "top_p_uniform": [0, 1, 2]}
REFUSED = {"temperature_1e6"}  # by SamplingParams, which ends at 2

ROWS = [row for row in GOLDEN["rows"] if not LATER & set(row["params"])]
CHECKS = [row for row in GOLDEN["parameter_checks"] if not LATER & set(row["params"])]
L = [2.0, 1.0, 0.0, -1.0, -2.0]
INF = float("inf")

steps = st.integers(-80, 80).map(lambda i: i / 8)  # eighths: ties are common, and no division merges two of them
logit_rows = st.integers(2, 9).flatmap(
    lambda width: st.lists(st.lists(steps, min_size=width, max_size=width), min_size=1, max_size=4)
)
sampled_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.7, 2.0]),
    top_k=st.integers(-1, 10),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.floats(0.0, 1.0),
)
any_params = st.one_of(sampled_params, st.just(SamplingParams(top_k=1, top_p=0.1, min_p=0.9)))


def process_row(logits: list[float], **params: float) -> Tensor:
    """One row through build_sampling_batch and all processors; temperature 1 where none is given."""
    sampling = build_sampling_batch([SamplingParams(**{"temperature": 1.0, **params})], [0], [0], len(logits))
    return process(torch.tensor([logits]), sampling)[0]


def kept_ids(processed: Tensor) -> list[int]:
    return [i for i, value in enumerate(processed.tolist()) if value > -INF]


def bits(x: Tensor) -> Tensor:
    """The bit pattern of float32, so that -0.0 differs from 0.0."""
    return x.view(torch.int32)


# ---- golden rows -------------------------------------------------------------------------------------------------------


def test_every_golden_row_is_run_or_belongs_to_a_parameter_that_is_not_here_yet() -> None:
    assert not LATER & {field.name for field in fields(SamplingParams)}
    assert (len(GOLDEN["rows"]), len(ROWS)) == (24, 19)
    assert (len(GOLDEN["parameter_checks"]), len(CHECKS)) == (18, 14)
    assert OUR_KEPT.keys() | REFUSED <= {row["name"] for row in ROWS}


@pytest.mark.parametrize("row", [row for row in ROWS if row["name"] not in REFUSED], ids=lambda row: row["name"])
def test_golden_row(row: dict) -> None:
    processed = process_row([float(value) for value in row["logits"]], **row["params"])
    kept = OUR_KEPT.get(row["name"], row["kept"])
    uniform = torch.zeros(len(processed)).index_fill(0, torch.tensor(kept), 1 / len(kept))
    expected = uniform if row["name"] in OUR_KEPT else torch.tensor(row["probs"])
    assert kept_ids(processed) == kept
    torch.testing.assert_close(processed.softmax(-1), expected, rtol=0, atol=2e-7)


def test_temperature_1e6_is_right_in_the_processor_though_the_parameters_refuse_it() -> None:
    row = next(row for row in ROWS if row["name"] == "temperature_1e6")
    flat = apply_temperature(torch.tensor([row["logits"]]), torch.tensor([1e6]))
    torch.testing.assert_close(flat.softmax(-1)[0], torch.tensor(row["probs"]), rtol=0, atol=2e-7)
    with pytest.raises(RequestError, match=r"temperature is 1000000\.0; expected a number from 0 \(greedy\) to 2"):
        SamplingParams(**row["params"])


@pytest.mark.parametrize("row", CHECKS, ids=lambda row: str(row["params"]))
def test_golden_parameter_check(row: dict) -> None:
    if row["expect"] == "error":
        (name,) = row["params"]
        with pytest.raises(RequestError, match=rf"^{name} is .*; expected [^\n]*$"):
            SamplingParams(**row["params"])
    elif row["means"] == "greedy":
        assert SamplingParams(**row["params"]).is_greedy
    elif row["means"] == "none":
        assert list(getattr(SamplingParams(**row["params"]), *row["params"])) == []
    elif row["means"] == "off":
        assert torch.equal(bits(process_row(L, **row["params"])), bits(torch.tensor(L)))
    else:
        assert SamplingParams(**row["params"]).seed == 0


# ---- stated cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("min_p", "kept"), [(0.1, [0, 1, 2]), (0.5, [0]), (1.0, [0]), (0.0, [0, 1, 2, 3, 4])])
def test_min_p_cases(min_p: float, kept: list[int]) -> None:
    assert kept_ids(process_row(L, min_p=min_p)) == kept


def test_min_p_keeps_equality_and_comes_after_the_temperature() -> None:
    half = torch.tensor(0.5).log().item()
    assert kept_ids(process_row([0.0, half, half - 1e-3], min_p=0.5)) == [0, 1]
    # e^-1 = .37 is dropped at .5; at temperature 2 it is e^-.5 = .61 and stays.
    assert kept_ids(process_row([1.0, 0.0], min_p=0.5)) == [0]
    assert kept_ids(process_row([1.0, 0.0], min_p=0.5, temperature=2.0)) == [0, 1]


@pytest.mark.parametrize(
    ("probs", "params", "kept"),
    [
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.1}, [0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.39}, [0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.41}, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.5}, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.69}, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.71}, [0, 1, 2]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.95}, [0, 1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 1.0}, [0, 1, 2, 3]),
        # top_p is computed on what top_k left: .571 of two is enough for .5, .444 of three is not.
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.5}, [0]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 3, "top_p": 0.5}, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.6}, [0, 1]),
        # Off-by-one reports of other engines, and ascending input.
        ([0.5, 0.41, 0.09], {"top_p": 0.9}, [0, 1]),
        ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.6}, [2, 3]),
        ([0.5, 0.35, 0.10, 0.05], {"top_p": 0.9}, [0, 1, 2]),
        ([0.3, 0.1, 0.1, 0.5], {"top_p": 0.79}, [0, 3]),
        ([0.3, 0.1, 0.1, 0.5], {"top_p": 0.81}, [0, 1, 3]),
    ],
)
def test_top_k_and_top_p_cases(probs: list[float], params: dict, kept: list[int]) -> None:
    assert kept_ids(process_row([math.log(p) for p in probs], **params)) == kept


@pytest.mark.parametrize(("top_p", "count"), [(0.51, 5), (0.3, 3), (0.25, 2), (0.5, 4), (1e-6, 1), (5e-324, 1)])
def test_top_p_of_eight_equal_tokens(top_p: float, count: int) -> None:
    """Probabilities of 1/8 are exact, so .25 and .5 show the rule at the border: mass before the token < p keeps it."""
    assert kept_ids(process_row([0.7] * 8, top_p=top_p)) == list(range(count))


def test_top_p_1_keeps_all_that_top_k_left() -> None:
    """The mass before the second token rounds to 1, so a comparison with 1 would drop it."""
    assert kept_ids(process_row([0.0, -50.0, -100.0], top_k=2, top_p=1.0)) == [0, 1]
    logits = torch.linspace(10, -60, 50_000)[None]
    processed = apply_top_k_top_p(logits, torch.tensor([49_999]), torch.tensor([1.0]))
    assert kept_ids(processed[0]) == list(range(49_999))


@pytest.mark.parametrize(("tail", "kept"), [(3.5e-8, [0, 1]), (2.5e-8, [0])])
def test_top_p_is_exact_near_1(tail: float, kept: list[int]) -> None:
    """Two tails make 7e-8 or 5e-8; the largest top_p below 1 is 1 - 6e-8, and sums in float32 round across it."""
    assert kept_ids(process_row([0.0, math.log(tail), math.log(tail)], top_p=1 - 2**-24)) == kept


def test_temperature_divides_rows_not_columns() -> None:
    """With as many rows as tokens a missing axis would divide columns, silently."""
    tempered = apply_temperature(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([1.0, 2.0]))
    assert torch.equal(tempered, torch.tensor([[0.0, 1.0], [1.0, 1.5]]))


@pytest.mark.parametrize("top_k", [5, 6, 10**6, 0, -1])
def test_off_values_leave_every_bit(top_k: int) -> None:
    logits = [2.0, -0.0, -INF, 1e-40, 3.3]
    row = torch.tensor(logits)
    off = SamplingParams(temperature=1.0, top_k=top_k, top_p=1.0, min_p=0.0)
    sampling = build_sampling_batch([off], [0], [0], len(logits))
    assert not sampling.is_truncated
    assert torch.equal(bits(process(row[None], sampling)[0]), bits(row))
    sorted_anyway = apply_top_k_top_p(row[None], sampling.top_k, sampling.top_p)  # as beside a row that truncates
    assert torch.equal(bits(sorted_anyway[0]), bits(row))


# ---- laws --------------------------------------------------------------------------------------------------------------


def reference_top_k_top_p(logits: list[float], top_k: int, top_p: float) -> list[int]:
    """The rule in plain Python, in exact order and with exact sums."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total = math.fsum(weights)
    return sorted(i for n, i in enumerate(order) if top_p >= 1 or math.fsum(weights[:n]) / total < top_p)


def is_at_a_border(logits: list[float], top_k: int, top_p: float) -> bool:
    """Whether a rounding of p could change the kept set."""
    around = [reference_top_k_top_p(logits, top_k, min(top_p * factor, 0.9999999)) for factor in (1 - 1e-6, 1 + 1e-6)]
    return around[0] != around[1]


@settings(deadline=None, max_examples=150)
@given(rows=logit_rows, data=st.data())
def test_top_k_top_p_equals_the_plain_reference_and_keeps_the_values(
    rows: list[list[float]], data: st.DataObject
) -> None:
    width = len(rows[0])
    top_k = data.draw(st.lists(st.integers(1, width), min_size=len(rows), max_size=len(rows)))
    top_p = data.draw(st.lists(st.floats(0.0009765625, 1, width=32), min_size=len(rows), max_size=len(rows)))
    processed = apply_top_k_top_p(torch.tensor(rows), torch.tensor(top_k), torch.tensor(top_p))
    for i, row in enumerate(rows):
        kept = kept_ids(processed[i])
        assert [processed[i, j].item() for j in kept] == [row[j] for j in kept]
        if not is_at_a_border(row, top_k[i], top_p[i]):
            assert kept == reference_top_k_top_p(row, top_k[i], top_p[i])


@settings(deadline=None, max_examples=100)
@given(rows=logit_rows, top_k=st.integers(1, 9))
def test_top_k_keeps_exactly_k_lower_ids_first(rows: list[list[float]], top_k: int) -> None:
    for row in rows:
        kept = kept_ids(process_row(row, top_k=top_k))
        assert len(kept) == min(top_k, len(row))
        for i in set(range(len(row))) - set(kept):
            assert all((row[j], -j) > (row[i], -i) for j in kept)


@settings(deadline=None, max_examples=100)
@given(rows=logit_rows, top_p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(rows: list[list[float]], top_p: float) -> None:
    for row in rows:
        probs = torch.tensor(row, dtype=torch.float64).softmax(-1)
        kept = kept_ids(process_row(row, top_p=top_p))
        mass = probs[kept].sum().item()
        assert mass >= top_p - 1e-6
        assert len(kept) == 1 or mass - probs[kept].min().item() < top_p + 1e-6
        assert min(probs[kept]) >= max((p for i, p in enumerate(probs) if i not in kept), default=0)


@settings(deadline=None, max_examples=100)
@given(rows=logit_rows, min_p=st.floats(0.0, 1.0, width=32))
def test_min_p_is_a_rule_about_probabilities(rows: list[list[float]], min_p: float) -> None:
    processed = apply_min_p(torch.tensor(rows), torch.full((len(rows),), min_p))
    for row, result in zip(rows, processed, strict=True):
        probs = torch.tensor(row, dtype=torch.float64).softmax(-1)
        threshold = min_p * probs.max().item()
        for i, (prob, value) in enumerate(zip(probs.tolist(), result.tolist(), strict=True)):
            if prob < threshold * (1 - 1e-5):
                assert value == -INF
            elif prob > threshold * (1 + 1e-5) or prob == probs.max().item():
                assert value == row[i]


@settings(deadline=None, max_examples=150)
@given(rows=logit_rows, data=st.data())
def test_processors_never_change_the_argmax_and_only_mask(rows: list[list[float]], data: st.DataObject) -> None:
    params = data.draw(st.lists(any_params, min_size=len(rows), max_size=len(rows)))
    logits = torch.tensor(rows)
    processed = process(logits, build_sampling_batch(params, [0] * len(rows), [0] * len(rows), len(rows[0])))
    assert processed.argmax(-1).tolist() == logits.argmax(-1).tolist()
    for row_params, before, after in zip(params, logits, processed, strict=True):
        kept = kept_ids(after)
        expected = before[kept] / (row_params.temperature or 1.0)
        torch.testing.assert_close(after[kept], expected, rtol=1e-6, atol=0)
        if row_params.is_greedy:
            assert torch.equal(after, before)


@settings(deadline=None, max_examples=60)
@given(rows=logit_rows, data=st.data())
def test_a_row_is_processed_alike_alone_and_beside_others(rows: list[list[float]], data: st.DataObject) -> None:
    params = data.draw(st.lists(any_params, min_size=len(rows), max_size=len(rows)))
    together = process(torch.tensor(rows), build_sampling_batch(params, [0] * len(rows), [0] * len(rows), len(rows[0])))
    for i, row in enumerate(rows):
        alone = process(torch.tensor([row]), build_sampling_batch([params[i]], [0], [0], len(row)))
        assert torch.equal(together[i], alone[0])


def test_the_argmax_law_detects_a_processor_that_breaks_it() -> None:
    """The law above can fail: the order of ascending top-p that other engines shipped drops the best token."""
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    ascending = logits.sort(dim=-1).values.softmax(-1).cumsum(-1) <= 0.6
    broken = logits.masked_fill(~ascending, -INF)
    assert broken.argmax(-1).item() != logits.argmax(-1).item()


# ---- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [-0.1, 2.0001, float("nan"), INF, -INF, "1", True, None])
def test_impossible_temperatures_are_refused(temperature: object) -> None:
    with pytest.raises(RequestError, match=r"^temperature is .*; expected a number from 0 \(greedy\) to 2$"):
        SamplingParams(temperature=temperature)  # pyright: ignore[reportArgumentType]


def test_a_tiny_temperature_is_raised_not_greedy() -> None:
    raised = SamplingParams(temperature=0.001)
    assert raised == SamplingParams(temperature=0.01) and not raised.is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy


def test_a_greedy_row_ignores_the_truncations() -> None:
    sampling = build_sampling_batch([SamplingParams(top_k=5, top_p=0.1, min_p=0.9)], [0], [0], 100)
    assert (sampling.top_k.item(), sampling.top_p.item(), sampling.min_p.item()) == (100, 1.0, 0.0)
    assert sampling.is_all_greedy and not sampling.is_truncated


# --- bans --------------------------------------------------------------------------------------------------------------


def test_a_banned_token_is_impossible_in_its_row_alone():
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    banned = ban_ids(logits, torch.tensor([1, 1]), torch.tensor([0, 2]))
    assert banned.tolist() == [[2.0, 1.0, 0.0], [float("-inf"), 1.0, float("-inf")]]
    assert logits[1].tolist() == [2.0, 1.0, 0.0], "the caller's logits stay"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smp_08_until_min_tokens_no_row_draws_what_would_end_it(temperature):
    logits = torch.zeros(2, 12)
    logits[:, [2, 9]] = 50.0  # what would end both, and is by far the likeliest
    params = [SamplingParams(temperature=temperature, seed=1)] * 2
    sampling = build_sampling_batch(params, [1, 2], [0, 0], 12, banned_ids=[(2, 9, 500), ()])
    assert (sampling.banned_rows.tolist(), sampling.banned_ids.tolist()) == ([0, 0], [2, 9]), (
        "ids without a row are left out"
    )
    token_ids, is_valid = sample(logits, sampling)
    assert token_ids[0] not in (2, 9) and token_ids[1] in (2, 9)
    assert is_valid.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_draw_nothing_is_not_valid(temperature):
    params = [SamplingParams(temperature=temperature, seed=1)]
    _, is_valid = sample(torch.zeros(1, 3), build_sampling_batch(params, [1], [0], 3, banned_ids=[(0, 1, 2)]))
    assert is_valid.tolist() == [False]
