"""256 texts in the vocabularies of other models, with the ids that their own tokenizers give."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_json

DATA = Path(__file__).parents[1] / "data"
GOLDEN = [json.loads(line) for line in (DATA / "vocab_golden.jsonl").read_text("utf-8").splitlines()]
PARSE_SPECIAL = {"gpt2": False, "cl100k": False, "o200k": False, "llama3": True, "qwen3": True}


def test_golden_rows_are_all_there():
    assert len(GOLDEN) == 256


@pytest.mark.parametrize("name", PARSE_SPECIAL)
def test_golden(vocabulary: Callable[..., Tokenizer], name: str):
    tokenizer = vocabulary(name)
    for row in GOLDEN:
        assert tokenizer.encode(row["text"], PARSE_SPECIAL[name]) == row[name], row["id"]
        assert tokenizer.decode(row[name]) == row.get("decoded_differs", {}).get(name, row["text"]), row["id"]


@pytest.mark.parametrize(
    ("name", "vocab_size", "pre_tokenizer", "nfc", "whole_words"),
    [
        ("gpt2", 50257, "gpt2", False, False),
        ("llama3", 128256, "llama-bpe", False, True),
        ("qwen3", 151669, "qwen2", True, False),
    ],
)
def test_properties(
    vocabulary: Callable[..., Tokenizer], name: str, vocab_size: int, pre_tokenizer: str, nfc: bool, whole_words: bool
):
    tokenizer = vocabulary(name)
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.pre_tokenizer == pre_tokenizer
    assert (tokenizer.rules.nfc, tokenizer.rules.whole_words) == (nfc, whole_words)
    if name == "qwen3":
        assert {"<think>", "</think>"} <= tokenizer.added_tokens.keys()
        assert {"<|im_start|>", "<|im_end|>"} <= tokenizer.special_tokens.keys()


def test_mistral_is_refused_by_name():
    """Its characters are not spelled as bytes: a blank is U+2581, and bytes are tokens such as <0x0A>."""
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    data: dict[str, Any] = {
        "normalizer": {"type": "Prepend", "prepend": "\u2581"},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
        "model": {**model, "vocab": {"<unk>": 0, "\u2581": 1}, "merges": []},
    }
    with pytest.raises(TokenizerError, match="byte_fallback True is not supported"):
        tokenizer_from_json(json.dumps(data))
    fields = {"model": "llama", "pre": "default", "tokens": ["\u2581"], "merges": [], "token_type": [1]}
    with pytest.raises(TokenizerError, match="tokenizer model 'llama' is not supported"):
        tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
