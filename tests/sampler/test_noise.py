"""The noise is SplitMix64, a pure function of (seed, position, token id), uniform, independent, and Gumbel in law.

The statistical tests have fixed inputs, so each either always passes or never does; their bounds are five standard
deviations or a significance below 0.001.
"""

import math
from itertools import islice

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinyllm.sampler import noise
from tinyllm.sampler.noise import gumbel_noise, mix, uniform_noise

MASK = 2**64 - 1
# The published test vector of SplitMix64, seed 1234567.
VECTOR = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]

int64 = st.integers(-(2**63), 2**63 - 1)
positions = st.integers(0, 2**20)


def splitmix64(state: int):
    """An independent reference in Python's unbounded integers (Steele, Lea and Flood, OOPSLA 2014)."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def finalise(state: int) -> int:
    """The output function alone: one step from the state before."""
    return next(splitmix64((state - 0x9E3779B97F4A7C15) & MASK))


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def uniform_of(seed: int, position: int, count: int) -> list[float]:
    start = finalise((finalise(seed & MASK) + position * 0x9E3779B97F4A7C15) & MASK)
    return [((z >> 12) + 0.5) * 2.0**-52 for z in islice(splitmix64(start), count)]


def kolmogorov_distance(sample: Tensor) -> float:
    """sqrt(n) * sup |F_n - F| against the uniform law; above 1.95 with probability 0.001."""
    ordered = sample.flatten().sort().values
    n = len(ordered)
    grid = torch.arange(n, dtype=torch.float64) / n
    return math.sqrt(n) * max((ordered - grid).max().item(), (grid + 1 / n - ordered).max().item())


def correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1].item()


def chi_square_excess(counts: Tensor, probs: Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean (its law has len - 1 degrees of freedom)."""
    expected = probs.double() * counts.sum()
    freedom = counts.numel() - 1
    return ((((counts - expected) ** 2) / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


# ---- SplitMix64 --------------------------------------------------------------------------------------------------------


def test_reference_and_mix_give_the_published_vector() -> None:
    assert list(islice(splitmix64(1234567), 5)) == VECTOR
    states = 1234567 + torch.arange(1, 6) * noise.GOLDEN
    assert mix(states).tolist() == [signed(z) for z in VECTOR]


@settings(deadline=None, max_examples=100)
@given(st.lists(int64, min_size=1, max_size=8))
@example([0, -1, 2**63 - 1, -(2**63)])
def test_mix_equals_the_reference(values: list[int]) -> None:
    assert mix(torch.tensor(values)).tolist() == [signed(finalise(value & MASK)) for value in values]


@settings(deadline=None, max_examples=60)
@given(seed=int64, position=positions)
@example(seed=0, position=0)
def test_uniform_noise_is_the_stream_that_the_docstring_names(seed: int, position: int) -> None:
    ours = uniform_noise(torch.tensor([seed]), torch.tensor([position]), 5)
    assert ours.dtype == torch.float64
    assert ours[0].tolist() == uniform_of(seed, position, 5)


def test_mix_spreads_every_input_bit() -> None:
    """Flipping one input bit flips each output bit about half the time (avalanche)."""
    inputs = mix(torch.arange(1, 2001))  # any 2000 different numbers
    shifts = torch.arange(64)
    for bit in range(64):
        flipped = mix(inputs) ^ mix(inputs ^ torch.tensor(1).bitwise_left_shift(torch.tensor(bit)))
        rates = ((flipped[:, None] >> shifts) & 1).double().mean(0)
        assert ((rates - 0.5).abs() < 5 * 0.5 / math.sqrt(2000)).all()


# ---- a pure function of (seed, position, token id) ---------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(keys=st.lists(st.tuples(int64, positions), min_size=1, max_size=5), vocab_size=st.integers(1, 40))
def test_a_row_does_not_depend_on_its_neighbours_or_the_vocabulary(
    keys: list[tuple[int, int]], vocab_size: int
) -> None:
    seeds, at = torch.tensor([seed for seed, _ in keys]), torch.tensor([position for _, position in keys])
    together = uniform_noise(seeds, at, vocab_size)
    assert torch.equal(uniform_noise(seeds.flip(0), at.flip(0), vocab_size), together.flip(0))
    for i in range(len(keys)):
        assert torch.equal(uniform_noise(seeds[i : i + 1], at[i : i + 1], vocab_size)[0], together[i])
    assert torch.equal(uniform_noise(seeds, at, vocab_size + 7)[:, :vocab_size], together)


def test_no_two_seeds_or_positions_share_a_stream() -> None:
    seeds, at = torch.meshgrid(torch.arange(-100, 100), torch.arange(200), indexing="ij")
    first_two = uniform_noise(seeds.flatten(), at.flatten(), 2)
    assert len(set(first_two.flatten().tolist())) == 2 * 200 * 200


@pytest.mark.parametrize(("hashed", "expected"), [(0, 2.0**-53), (-1, 1 - 2.0**-53), (2**63 - 1, 0.5 - 2.0**-53)])
def test_the_extreme_hashes_stay_strictly_inside(hashed: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "mix", lambda x: torch.full_like(x, hashed))
    key = torch.tensor([0])
    assert uniform_noise(key, key, 1).item() == expected
    assert gumbel_noise(key, key, 1).item() == pytest.approx(-math.log(-math.log(expected)), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(seed=int64, position=positions)
def test_uniform_is_inside_and_gumbel_finite(seed: int, position: int) -> None:
    key = torch.tensor([seed]), torch.tensor([position])
    uniform = uniform_noise(*key, 500)
    assert uniform.min() > 0 and uniform.max() < 1
    gumbel = gumbel_noise(*key, 500)
    assert gumbel.dtype == torch.float32 and gumbel.isfinite().all()
    torch.testing.assert_close(gumbel.double(), -(-uniform.log()).log(), rtol=1e-6, atol=1e-6)


def test_the_meta_device_is_enough() -> None:
    key = torch.zeros(3, dtype=torch.int64, device="meta")
    assert gumbel_noise(key, key, 7).shape == (3, 7)
    assert gumbel_noise(key, key, 7).device.type == "meta"


# ---- the law -----------------------------------------------------------------------------------------------------------

COUNT = 20_000


def grids() -> dict[str, Tensor]:
    """Uniform numbers along each of the three directions, two neighbouring lines each: [2, COUNT]."""
    line, pair, zero = torch.arange(COUNT), torch.tensor([5, 6]), torch.zeros(COUNT, dtype=torch.int64)
    return {
        "token ids": uniform_noise(torch.tensor([7, 7]), torch.tensor([3, 4]), COUNT),
        "positions": uniform_noise(zero + 7, line, 2).T,
        "seeds": uniform_noise(line, zero + 3, 2).T,
        "seeds far apart": uniform_noise(line << 40, zero + 3, 2).T,
        "seeds, next positions": torch.stack([uniform_noise(line, zero + p, 1)[:, 0] for p in pair]),
    }


@pytest.mark.parametrize("direction", grids())
def test_uniform_along_every_direction(direction: str) -> None:
    first, second = grids()[direction]
    for line in (first, second):
        assert kolmogorov_distance(line) < 1.95
        for lag in (1, 2, 3):
            assert abs(correlation(line[lag:], line[:-lag])) < 5 / math.sqrt(COUNT)
    assert abs(correlation(first, second)) < 5 / math.sqrt(COUNT)


def test_neighbours_are_jointly_uniform() -> None:
    """Pairs of adjacent token ids, and of adjacent positions, fill a 16 x 16 grid evenly."""
    for first, second in (grids()["token ids"], grids()["positions"], grids()["seeds, next positions"]):
        for x, y in ((first, second), (first[1:], first[:-1])):
            cells = (x * 16).long() * 16 + (y * 16).long()
            counts = torch.bincount(cells, minlength=256)
            assert chi_square_excess(counts, torch.full((256,), 1 / 256)) < 5


def test_gumbel_mean_and_variance() -> None:
    gumbel = gumbel_noise(torch.tensor([1]), torch.tensor([1]), 200_000)[0].double()
    assert abs(gumbel.mean().item() - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / 200_000)
    assert gumbel.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_gumbel_argmax_draws_from_the_softmax(along: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    line, fixed = torch.arange(60_000), torch.full((60_000,), 11)
    seeds, at = (fixed, line) if along == "positions" else (line, fixed)
    draws = (logits + gumbel_noise(seeds, at, 5)).argmax(-1)
    assert chi_square_excess(torch.bincount(draws, minlength=5), logits.softmax(-1)) < 5
    pairs = torch.bincount(draws[:-1] * 5 + draws[1:], minlength=25)  # one draw says nothing about the next
    assert chi_square_excess(pairs, torch.outer(logits.softmax(-1), logits.softmax(-1)).flatten()) < 5
