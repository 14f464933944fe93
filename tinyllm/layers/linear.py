"""A matrix product with stored weights."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Linear(nn.Module):
    """``y = x W^T`` without bias. The weight is stored [out_size in_size], as checkpoints have it."""

    def __init__(self, in_size: int, out_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))

    def forward(self, x: Float[Tensor, "num_tokens in_size"]) -> Float[Tensor, "num_tokens out_size"]:
        """Multiply each row by the weight: 2 * num_tokens * in_size * out_size FLOPs."""
        weight: Float[Tensor, "out_size in_size"] = self.weight
        return nn.functional.linear(x, weight)
