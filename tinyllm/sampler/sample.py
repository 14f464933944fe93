"""Choose one token id per gathered row."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tinyllm.batch import SamplingBatch
from tinyllm.sampler.noise import gumbel_noise
from tinyllm.sampler.processors import apply_min_p, apply_temperature, apply_top_k_top_p, ban_ids


@torch.inference_mode()
def sample(
    logits: Float[Tensor, "num_logits vocab_size"], sampling: SamplingBatch
) -> tuple[Int[Tensor, " num_logits"], Bool[Tensor, " num_logits"]]:
    """Return (token id, whether it is valid) of each row; a row with NaN or +inf, or of nothing but -inf, is not.

    What a row may not draw counts as -inf. A greedy row takes the largest logit, the lowest id among equals; any other
    one draws from the softmax of its processed logits. All arithmetic is in float32 or wider, and the caller's logits
    stay as they are.
    """
    float_logits: Float[Tensor, "num_logits vocab_size"] = logits.float()
    allowed: Float[Tensor, "num_logits vocab_size"]
    allowed = ban_ids(float_logits, sampling.banned_rows, sampling.banned_ids) if sampling.is_banning else float_logits
    scores: Float[Tensor, "num_logits vocab_size"]
    scores = allowed if sampling.is_all_greedy else draw_scores(allowed, sampling)
    token_ids: Int[Tensor, " num_logits"] = scores.argmax(dim=-1)
    best: Float[Tensor, "num_logits 1"] = allowed.gather(-1, token_ids[:, None])
    is_valid: Bool[Tensor, " num_logits"] = best[:, 0].isfinite()
    return token_ids, is_valid


def draw_scores(
    logits: Float[Tensor, "num_logits vocab_size"], sampling: SamplingBatch
) -> Float[Tensor, "num_logits vocab_size"]:
    """Processed logits plus Gumbel noise, whose argmax is the draw."""
    processed: Float[Tensor, "num_logits vocab_size"] = process(logits, sampling)
    noise: Float[Tensor, "num_logits vocab_size"] = gumbel_noise(sampling.seeds, sampling.positions, logits.shape[-1])
    return add_noise(processed, noise, sampling.temperature)


def add_noise(
    logits: Float[Tensor, "num_logits vocab_size"],
    noise: Float[Tensor, "num_logits vocab_size"],
    temperature: Float[Tensor, " num_logits"],
) -> Float[Tensor, "num_logits vocab_size"]:
    """Logits plus noise, but for greedy rows (temperature 0), which get none."""
    is_greedy: Bool[Tensor, "num_logits 1"] = (temperature == 0)[:, None]
    return logits + noise.masked_fill(is_greedy, 0.0)


def process(
    logits: Float[Tensor, "num_logits vocab_size"], sampling: SamplingBatch
) -> Float[Tensor, "num_logits vocab_size"]:
    """Temperature, min_p, then top_k and top_p: vLLM's order."""
    tempered: Float[Tensor, "num_logits vocab_size"] = apply_temperature(logits, sampling.temperature)
    likely: Float[Tensor, "num_logits vocab_size"] = apply_min_p(tempered, sampling.min_p)
    return apply_top_k_top_p(likely, sampling.top_k, sampling.top_p) if sampling.is_truncated else likely
