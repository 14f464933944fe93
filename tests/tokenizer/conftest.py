"""What the tokenizer tests share: the default model's metadata, and a tokenizer of another project built from it."""

from typing import Any

import pytest
from tokenizers import Tokenizer as OracleTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tinyllm.weights.default import find_default_model
from tinyllm.weights.gguf import read_gguf


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, Any]:
    return read_gguf(find_default_model()).metadata


@pytest.fixture(scope="session")
def oracle_words() -> pre_tokenizers.PreTokenizer:
    """The split of SmolLM2's own tokenizer.json: each digit alone, then GPT-2's pattern."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


@pytest.fixture(scope="session")
def oracle(smollm2_metadata: dict[str, Any], oracle_words: pre_tokenizers.PreTokenizer) -> OracleTokenizer:
    """The `tokenizers` library with the default model's vocabulary; its special tokens are text."""
    tokens = smollm2_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm2_metadata["tokenizer.ggml.merges"]]
    tokenizer = OracleTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = oracle_words
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def oracle_with_special(oracle: OracleTokenizer, smollm2_metadata: dict[str, Any]) -> OracleTokenizer:
    """The same, its special tokens parsed."""
    typed = zip(smollm2_metadata["tokenizer.ggml.tokens"], smollm2_metadata["tokenizer.ggml.token_type"], strict=True)
    tokenizer = OracleTokenizer.from_str(oracle.to_str())
    tokenizer.add_special_tokens([token for token, token_type in typed if token_type == 3])
    return tokenizer
