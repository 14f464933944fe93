"""RMSNorm, and the residual addition that always comes before it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def rms_norm(
    x: Float[Tensor, "num_tokens hidden_size"], weight: Float[Tensor, " hidden_size"], eps: float
) -> Float[Tensor, "num_tokens hidden_size"]:
    """Divide each row by its root mean square and scale: x / sqrt(mean(x^2) + eps) * weight.

    Computed in float32 and cast back before the weight (arXiv 1910.07467).

    >>> rms_norm(torch.tensor([[3.0, -4.0, 0.0, 0.0]]), torch.ones(4), eps=0.0)
    tensor([[ 1.2000, -1.6000,  0.0000,  0.0000]])
    """
    x_float: Float[Tensor, "num_tokens hidden_size"] = x.float()
    mean_square: Float[Tensor, "num_tokens 1"] = x_float.pow(2).mean(dim=-1, keepdim=True)
    normed: Float[Tensor, "num_tokens hidden_size"] = x_float * torch.rsqrt(mean_square + eps)
    return normed.to(x.dtype) * weight


def add_residual(
    x: Float[Tensor, "num_tokens hidden_size"], residual: Float[Tensor, "num_tokens hidden_size"]
) -> Float[Tensor, "num_tokens hidden_size"]:
    """Put a block's output back onto the stream that runs past it."""
    return x + residual


class RMSNorm(nn.Module):
    """The step between two blocks: add the residual, then normalise; hand both on.

    vLLM fuses the two in one kernel (``fused_add_rms_norm``); here they are one module.
    """

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(
        self,
        x: Float[Tensor, "num_tokens hidden_size"],
        residual: Float[Tensor, "num_tokens hidden_size"] | None,
    ) -> tuple[Float[Tensor, "num_tokens hidden_size"], Float[Tensor, "num_tokens hidden_size"]]:
        """Return (normalised sum, sum). The first layer has no residual yet: its sum is x itself."""
        stream: Float[Tensor, "num_tokens hidden_size"] = x if residual is None else add_residual(x, residual)
        normed: Float[Tensor, "num_tokens hidden_size"] = rms_norm(stream, self.weight, self.eps)
        return normed, stream
