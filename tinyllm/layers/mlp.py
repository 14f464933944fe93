"""The SwiGLU feed-forward block (arXiv 2002.05202)."""

from jaxtyping import Float
from torch import Tensor, nn

from tinyllm.config import ModelConfig
from tinyllm.layers.linear import Linear


def silu_and_mul(
    gate_up: Float[Tensor, "num_tokens gate_up_size"],
) -> Float[Tensor, "num_tokens intermediate_size"]:
    """silu(gate) * up, where gate is the first half of each row and up the second (vLLM: ``SiluAndMul``).

    >>> import torch
    >>> silu_and_mul(torch.tensor([[0.0, 100.0, 5.0, 2.0]]))
    tensor([[  0., 200.]])
    """
    gate: Float[Tensor, "num_tokens intermediate_size"]
    up: Float[Tensor, "num_tokens intermediate_size"]
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def gelu_and_mul(
    gate_up: Float[Tensor, "num_tokens gate_up_size"],
) -> Float[Tensor, "num_tokens intermediate_size"]:
    """gelu(gate) * up, with the exact normal distribution (arXiv 1606.08415; vLLM: ``GeluAndMul``)."""
    gate: Float[Tensor, "num_tokens intermediate_size"]
    up: Float[Tensor, "num_tokens intermediate_size"]
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.gelu(gate) * up


def gelu_tanh_and_mul(
    gate_up: Float[Tensor, "num_tokens gate_up_size"],
) -> Float[Tensor, "num_tokens intermediate_size"]:
    """gelu(gate) * up, with the distribution told by a tanh, as some checkpoints were trained."""
    gate: Float[Tensor, "num_tokens intermediate_size"]
    up: Float[Tensor, "num_tokens intermediate_size"]
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.gelu(gate, approximate="tanh") * up


GATES = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
}  # by the config's hidden_act


class MLP(nn.Module):
    """Widen, gate, narrow; gate and up are one matrix product because their weights are stored as one."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, config.gate_up_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)
        self.gate_and_mul = GATES[config.hidden_act]

    def forward(self, x: Float[Tensor, "num_tokens hidden_size"]) -> Float[Tensor, "num_tokens hidden_size"]:
        """down(act(gate(x)) * up(x)), row by row: no token sees another one here."""
        gate_up: Float[Tensor, "num_tokens gate_up_size"] = self.gate_up_proj(x)
        activated: Float[Tensor, "num_tokens intermediate_size"] = self.gate_and_mul(gate_up)
        out: Float[Tensor, "num_tokens hidden_size"] = self.down_proj(activated)
        return out
