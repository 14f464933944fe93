"""What the tests of model files share: the logits of loaded weights, goldens, and the look of an error."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tinyllm import CacheConfig
from tinyllm.batch import build_batch
from tinyllm.config import ModelConfig
from tinyllm.errors import TinyllmError
from tinyllm.kv_cache import KVCache
from tinyllm.weights.load import build_decoder

TINY = Path(__file__).parents[1] / "data" / "tiny"


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., Tensor]:
    """logits_of(config, parameters, token_ids): the logits of every position of one prompt."""

    @torch.inference_mode()
    def logits_of(config: ModelConfig, parameters: dict[str, Tensor], token_ids: list[int]) -> Tensor:
        decoder = build_decoder(config, parameters)
        num_blocks = -(-len(token_ids) // 4)
        batch = build_batch([token_ids], [0], [list(range(1, 1 + num_blocks))], 4)
        batch = replace(batch, logits_indices=torch.arange(len(token_ids)))
        cache = KVCache(config, CacheConfig(4, 1 + num_blocks), decoder.embed_tokens.weight.dtype)
        return decoder(batch, cache)

    return logits_of


@pytest.fixture(scope="session")
def check_golden(logits_of: Callable[..., Tensor]) -> Callable[..., None]:
    """check_golden(config, parameters, golden): the first prompt of a golden.npz has its logits within 1e-4."""

    def check_golden(config: ModelConfig, parameters: dict[str, Tensor], golden: str | Path) -> None:
        with np.load(TINY / golden / "golden.npz" if isinstance(golden, str) else golden) as arrays:
            token_ids, expected = arrays["input_ids"][0].tolist(), torch.from_numpy(arrays["logits"])
        torch.testing.assert_close(logits_of(config, parameters, token_ids), expected.float(), atol=1e-4, rtol=0)

    return check_golden


@pytest.fixture(scope="session")
def one_line() -> Callable[[TinyllmError], str]:
    """one_line(error): its message, which is one printable line of moderate length."""

    def one_line(error: TinyllmError) -> str:
        message = str(error)
        assert message and "\n" not in message and message.isprintable(), message
        assert len(message) < 700, message
        return message

    return one_line
