"""RMSNorm against torch's, and the residual that passes through it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.layers.norm import RMSNorm, add_residual, rms_norm


@given(
    st.integers(1, 7), st.integers(1, 40), st.sampled_from([1e-6, 1e-5, 0.1]), st.floats(0.01, 100), st.integers(0, 99)
)
def test_rms_norm_equals_torch(num_tokens, hidden_size, eps, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden_size, generator=generator) * scale
    weight = torch.randn(hidden_size, generator=generator)
    expected = torch.nn.functional.rms_norm(x, (hidden_size,), weight, eps)
    torch.testing.assert_close(rms_norm(x, weight, eps), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_normalised_in_float32():
    x = (torch.randn(5, 64) * 300).to(torch.bfloat16)
    weight = torch.rand(64, dtype=torch.bfloat16)
    normed = rms_norm(x, weight, 1e-5)
    exact = torch.nn.functional.rms_norm(x.float(), (64,), None, 1e-5)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, exact.to(torch.bfloat16) * weight), "rounded once before the weight, once after it"


def test_a_row_of_zeros_stays_finite():
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-5), torch.zeros(2, 4))


@pytest.fixture
def norm():
    norm = RMSNorm(8, 1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm.requires_grad_(False)


def test_the_sum_is_normalised_and_passed_on(norm):
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    before = x.clone(), residual.clone()
    normed, stream = norm(x, residual)
    assert torch.equal(stream, before[0] + before[1])
    assert torch.equal(add_residual(x, residual), stream)
    assert torch.equal(normed, rms_norm(stream, norm.weight, 1e-5))
    assert torch.equal(x, before[0]), "nothing is added in place: the caller still needs both"
    assert torch.equal(residual, before[1])


def test_the_first_layer_starts_the_stream(norm):
    x = torch.randn(3, 8)
    normed, stream = norm(x, None)
    assert torch.equal(stream, x)
    assert torch.equal(normed, rms_norm(x, norm.weight, 1e-5))
