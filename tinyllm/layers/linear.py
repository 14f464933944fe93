"""A matrix product with stored weights."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tinyllm.shapes import ShapeError


class Linear(nn.Module):
    """``y = x W^T`` without bias. The weight is stored with one row per output, as checkpoints have it."""

    def __init__(self, in_size: int, out_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))

    def forward(self, x: Float[Tensor, "num_tokens in_size"]) -> Float[Tensor, "num_tokens out_size"]:
        """Multiply each row by the weight: 2 * num_tokens * in_size * out_size FLOPs."""
        weight: Float[Tensor, "out_size in_size"] = self.weight
        if x.shape[-1] != weight.shape[-1]:  # the checks hold arguments against each other, but not against self
            raise ShapeError(f"Linear: in_size of x {tuple(x.shape)} is {x.shape[-1]}, expected {weight.shape[-1]}")
        return nn.functional.linear(x, weight)
