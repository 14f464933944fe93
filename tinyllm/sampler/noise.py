"""Counter-based noise: a pure function of (seed, position, token id).

There is no generator and no state, so a request draws the same tokens alone or in a batch, in chunks or whole, before
or after a preemption, in any order.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

# SplitMix64's constants (Steele, Lea and Flood, OOPSLA 2014), as the signed numbers that torch's int64 holds.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A shift that fills with zeros; int64's own fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 of any shape: every input bit moves every output bit. Products wrap around."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def uniform_noise(
    seeds: Int[Tensor, " num_logits"], positions: Int[Tensor, " num_logits"], vocab_size: int
) -> Float[Tensor, "num_logits vocab_size"]:
    """A number strictly between 0 and 1 for each row and token id, in float64, from 52 hashed bits.

    Row r is the SplitMix64 stream that starts at mix(mix(seed) + position * GOLDEN).
    """
    token_ids: Int[Tensor, " vocab_size"] = torch.arange(vocab_size, device=seeds.device)
    keys: Int[Tensor, " num_logits"] = mix(mix(seeds) + positions * GOLDEN)
    bits: Int[Tensor, "num_logits vocab_size"] = mix(keys[:, None] + (token_ids + 1) * GOLDEN)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def gumbel_noise(
    seeds: Int[Tensor, " num_logits"], positions: Int[Tensor, " num_logits"], vocab_size: int
) -> Float[Tensor, "num_logits vocab_size"]:
    """Standard Gumbel noise: -log(-log u). The argmax of logits plus it is a draw from their softmax."""
    uniform: Float[Tensor, "num_logits vocab_size"] = uniform_noise(seeds, positions, vocab_size)
    return -torch.log(-torch.log(uniform)).float()
