"""The tokenizer that a GGUF file carries in its metadata.

Source: the keys ``tokenizer.ggml.*`` of the GGUF specification, which names token types by number.
"""

from collections.abc import Mapping
from typing import Any

from tinyllm.errors import TokenizerError, brief
from tinyllm.tokenizer.bpe import EncodingRules, Tokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
TOKEN_TYPES = range(1, 7)  # besides these three: normal 1, unused 5, byte 6; all spelled in the byte alphabet


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer from GGUF metadata: a plain mapping of keys to values.

    Needs ``tokenizer.ggml.`` model ("gpt2": byte-level BPE), pre (the pre-tokenizer), tokens, merges ("left right") and
    token_type. Unknown and control tokens become special tokens, user defined ones added tokens. The format has no field
    for EncodingRules: as in llama.cpp a ``llama-bpe`` vocabulary looks for whole words first, and none is brought to NFC.

    Raises TokenizerError for a missing key, a value of the wrong type, another model or pre-tokenizer, and a vocabulary
    that contradicts itself.

    >>> fields = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1, 1]}
    >>> tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()}).encode("abba")
    [2, 1, 0]
    """
    model = _string(metadata, "tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(f"tokenizer model {brief(model)} is not supported; expected 'gpt2' (byte-level BPE)")
    pre_tokenizer = _string(metadata, "tokenizer.ggml.pre")
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    merges = _list(metadata, "tokenizer.ggml.merges", str)
    token_types = _list(metadata, "tokenizer.ggml.token_type", int)
    if len(token_types) != len(tokens):
        raise TokenizerError(
            f"tokenizer.ggml.token_type has {len(token_types)} entries; expected {len(tokens)}, one a token"
        )
    for token_type in set(token_types).difference(TOKEN_TYPES):
        raise TokenizerError(f"tokenizer.ggml.token_type holds {token_type}; expected 1 to {TOKEN_TYPES[-1]}")
    typed_tokens = list(zip(tokens, token_types, strict=True))
    return Tokenizer(
        tokens,
        [_split_merge(merge) for merge in merges],
        [token for token, token_type in typed_tokens if token_type in (UNKNOWN, CONTROL)],
        pre_tokenizer,
        [token for token, token_type in typed_tokens if token_type == USER_DEFINED],
        EncodingRules(whole_words=pre_tokenizer == "llama-bpe"),
    )


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")  # the byte alphabet has no blank
    if not (left and right):
        raise TokenizerError(f"tokenizer.ggml.merges holds {merge!r:.60}; expected two tokens and a blank between")
    return left, right


def _string(metadata: Mapping[str, Any], key: str) -> str:
    value = _value(metadata, key)
    if not isinstance(value, str):
        raise TokenizerError(f"{key} is a {type(value).__name__}; expected a string")
    return value


def _list(metadata: Mapping[str, Any], key: str, item_type: type) -> list[Any]:
    value = _value(metadata, key)
    if not isinstance(value, list):
        raise TokenizerError(f"{key} is a {type(value).__name__}; expected a list")
    for found in set(map(type, value)) - {item_type}:
        raise TokenizerError(f"{key} holds a {found.__name__}; expected {item_type.__name__} only")
    return value


def _value(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise TokenizerError(f"the file has no {key}; expected a model file that carries its tokenizer")
    return metadata[key]
