"""Token ids to vectors: an index lookup, not a matrix product."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class Embedding(nn.Module):
    """The table of token vectors; the LM head reads the same table where embeddings are tied."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, token_ids: Int[Tensor, " num_tokens"]) -> Float[Tensor, "num_tokens hidden_size"]:
        """Row `token_ids[i]` of the table becomes row i."""
        weight: Float[Tensor, "vocab_size hidden_size"] = self.weight
        return weight[token_ids]
