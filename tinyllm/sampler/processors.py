"""What happens to logits before the draw, in this order: bans, temperature, min_p, top_k, top_p.

None but a ban changes the argmax.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def ban_ids(
    logits: Float[Tensor, "num_logits vocab_size"],
    banned_rows: Int[Tensor, " num_banned"],
    banned_ids: Int[Tensor, " num_banned"],
) -> Float[Tensor, "num_logits vocab_size"]:
    """Make token banned_ids[i] impossible in row banned_rows[i] (vLLM's min_tokens bans what would end a request).

    >>> ban_ids(torch.zeros(2, 3), torch.tensor([0, 0]), torch.tensor([1, 2]))
    tensor([[0., -inf, -inf],
            [0., 0., 0.]])
    """
    impossible: Float[Tensor, " num_banned"] = torch.full_like(banned_ids, float("-inf"), dtype=logits.dtype)
    return logits.index_put((banned_rows, banned_ids), impossible)


def apply_temperature(
    logits: Float[Tensor, "num_logits vocab_size"], temperature: Float[Tensor, " num_logits"]
) -> Float[Tensor, "num_logits vocab_size"]:
    """Divide by the temperature; a greedy row (0) is left as it is."""
    divisor: Float[Tensor, " num_logits"] = torch.where(temperature == 0, 1.0, temperature)
    return logits / divisor[:, None]


def apply_min_p(
    logits: Float[Tensor, "num_logits vocab_size"], min_p: Float[Tensor, " num_logits"]
) -> Float[Tensor, "num_logits vocab_size"]:
    """Drop tokens whose probability is below min_p times the largest one; 0 drops none.

    >>> apply_min_p(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.3]))   # e^-1 = 0.37 stays, e^-2 = 0.14 goes
    tensor([[2., 1., -inf]])
    """
    threshold: Float[Tensor, "num_logits 1"] = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
    return logits.masked_fill(logits < threshold, float("-inf"))


def apply_top_k_top_p(
    logits: Float[Tensor, "num_logits vocab_size"],
    top_k: Int[Tensor, " num_logits"],
    top_p: Float[Tensor, " num_logits"],
) -> Float[Tensor, "num_logits vocab_size"]:
    """Keep exactly the top_k largest, then of those the fewest whose probability reaches top_p.

    Of equal logits the lower id comes first. A token stays if the mass before it is below top_p, so the largest always
    does; the mass is that of what top_k left. vocab_size and 1 switch the two off.

    >>> logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    >>> apply_top_k_top_p(logits, torch.tensor([3]), torch.tensor([0.5])).softmax(-1)   # .44 < .5, .78 >= .5
    tensor([[0.5714, 0.4286, 0.0000, 0.0000]])
    """
    ordered: Float[Tensor, "num_logits vocab_size"]
    order: Int[Tensor, "num_logits vocab_size"]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank: Int[Tensor, " vocab_size"] = torch.arange(logits.shape[-1], device=logits.device)
    is_beyond_k: Bool[Tensor, "num_logits vocab_size"] = rank >= top_k[:, None]
    probs: Float[Tensor, "num_logits vocab_size"] = ordered.masked_fill(is_beyond_k, float("-inf")).double().softmax(-1)
    mass_before: Float[Tensor, "num_logits vocab_size"] = probs.cumsum(-1) - probs
    # rank > 0: a top_p that rounds to 0 in float32 keeps the first, too.
    is_beyond_p: Bool[Tensor, "num_logits vocab_size"]
    is_beyond_p = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0)
    kept: Float[Tensor, "num_logits vocab_size"] = ordered.masked_fill(is_beyond_k | is_beyond_p, float("-inf"))
    return torch.empty_like(logits).scatter(-1, order, kept)
