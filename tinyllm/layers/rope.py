"""Rotary position embedding: a token's place is the angle by which its query and key are turned (arXiv 2104.09864)."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyllm.config import ModelConfig, RopeScaling


def rope_divisors(inv_freq: Float[Tensor, " half_dim"], scaling: RopeScaling | None) -> Float[Tensor, " half_dim"]:
    """What each frequency is divided by, so that a longer text turns no further than the training saw.

    ``linear``: all by `factor`. ``llama3``: only waves longer than original_max_positions / low_freq_factor, none
    shorter than original_max_positions / high_freq_factor, and between them a blend of the two.
    """
    ones: Float[Tensor, " half_dim"] = torch.ones_like(inv_freq)
    if scaling is None:
        return ones
    if scaling.rope_type == "factors":
        return torch.tensor(scaling.factors, dtype=inv_freq.dtype, device=inv_freq.device)
    if scaling.rope_type == "linear":
        return ones * scaling.factor
    wavelength: Float[Tensor, " half_dim"] = 2 * math.pi / inv_freq
    waves: Float[Tensor, " half_dim"] = scaling.original_max_positions / wavelength  # turns within the trained length
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep: Float[Tensor, " half_dim"] = ((waves - scaling.low_freq_factor) / span).clamp(0, 1)
    return 1 / (keep + (1 - keep) / scaling.factor)


class RotaryEmbedding(nn.Module):
    """Angles for the positions of a step; all layers share them.

    vLLM looks them up in a table with a row for each position; computing them takes no memory and is as exact.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config

    def inv_freq(self, device: torch.device) -> Float[Tensor, " half_dim"]:
        """Radians per position of each rotary pair: theta^(-2i / head_dim), stretched where the checkpoint says so."""
        config = self.config
        exponents: Float[Tensor, " half_dim"]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        plain: Float[Tensor, " half_dim"] = 1.0 / config.rope_theta**exponents
        return plain / rope_divisors(plain, config.rope_scaling)

    def forward(
        self, positions: Int[Tensor, " num_tokens"]
    ) -> tuple[Float[Tensor, "num_tokens 1 half_dim"], Float[Tensor, "num_tokens 1 half_dim"]]:
        """cos and sin of position * frequency; the middle axis of 1 spreads over the heads."""
        inv_freq: Float[Tensor, " half_dim"] = self.inv_freq(positions.device)
        angles: Float[Tensor, "num_tokens 1 half_dim"] = positions.float()[:, None, None] * inv_freq
        return angles.cos(), angles.sin()


def apply_rope(
    x: Float[Tensor, "num_tokens heads head_dim"],
    cos: Float[Tensor, "num_tokens 1 half_dim"],
    sin: Float[Tensor, "num_tokens 1 half_dim"],
) -> Float[Tensor, "num_tokens heads head_dim"]:
    """Turn each pair (x[i], x[i + half_dim]) of every head by its angle.

    The halves, not neighbours, form the pairs: Hugging Face's layout, which our weights follow.

    >>> quarter_turn = apply_rope(torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> quarter_turn
    tensor([[[0., 1.]]])
    """
    first: Float[Tensor, "num_tokens heads half_dim"]
    second: Float[Tensor, "num_tokens heads half_dim"]
    first, second = x.float().chunk(2, dim=-1)
    turned: Float[Tensor, "num_tokens heads head_dim"]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)
