"""From the last rows' hidden states to a score for every token id."""

from jaxtyping import Float, Int
from torch import Tensor, nn


def gather_rows(
    hidden: Float[Tensor, "num_tokens hidden_size"], logits_indices: Int[Tensor, " num_logits"]
) -> Float[Tensor, "num_logits hidden_size"]:
    """Keep each request's last row: only there does a next token start, so only it needs logits."""
    return hidden[logits_indices]


def lm_head(
    rows: Float[Tensor, "num_logits hidden_size"], weight: Float[Tensor, "vocab_size hidden_size"]
) -> Float[Tensor, "num_logits vocab_size"]:
    """Compare each row with every token's vector. Tied models pass the embedding table itself as the weight."""
    return nn.functional.linear(rows, weight)
