r"""The tokenizer of a Hugging Face directory: its tokenizer.json, where that describes byte-level BPE.

The file describes a pipeline: a normaliser, pre-tokenizers, a model, decoders. A pipeline that this project does exactly
is loaded; any other part is refused by name, since text with slightly wrong ids makes a model slightly worse and nothing
shows it. The parts that do not touch ids without special tokens (truncation, padding, the post-processor) are not read.

Source: the serialisation of Hugging Face's tokenizers library, version 1.0 of the file.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyllm.errors import TokenizerError, brief
from tinyllm.tokenizer.bpe import EncodingRules, Tokenizer
from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR
from tinyllm.tokenizer.pretokenize import DIGIT, GPT2_WORD, PATTERNS

MAX_JSON_SIZE = 2**26  # characters; the largest tokenizer.json have 33 MB
MAX_PATH = 400  # characters of a path that a message shows

# Patterns that files spell differently from us though they cut alike.
OTHER_SPELLINGS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": GPT2_WORD,
    r"\p{N}": DIGIT,
}


def tokenizer_from_json(source: Path | str) -> Tokenizer:
    """Build the tokenizer from a tokenizer.json: its path, or its text (a str that starts with a brace).

    Special tokens become special tokens, all other added ones added tokens. Where both kinds overlap in a text, the
    leftmost and then the longest wins, whatever their `normalized` says.

    Raises TokenizerError for a file that cannot be read, is no such JSON, contradicts itself, or asks for something else
    than byte-level BPE with one of our pre-tokenizers.

    >>> model = '{"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}'
    >>> bytes_only = '{"type": "ByteLevel", "add_prefix_space": false}'
    >>> text = f'{{"model": {model}, "pre_tokenizer": {bytes_only}, "decoder": {bytes_only}}}'
    >>> tokenizer_from_json(text).encode("abba")
    [2, 1, 0]
    """
    data = read_json_object(source)
    model = _object(data, "model")
    _check_model(model)
    pre_tokenizer, prefix_space = _pre_tokenizer(data.get("pre_tokenizer"))
    nfc = _is_nfc(data.get("normalizer"))
    decoder = data.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        raise TokenizerError(f"decoder {_name(decoder)} is not supported; expected ByteLevel")
    added = _added_tokens(data, nfc)
    tokens = _tokens(_object(model, "vocab"), added)
    if model.get("unk_token") is not None and not set(BYTE_TO_CHAR) <= set(tokens):
        raise TokenizerError("model.unk_token is set and some byte has no token; expected a token for each byte")
    return Tokenizer(
        tokens,
        [_merge(merge) for merge in _list(model, "merges")],
        [token["content"] for token in added if token.get("special")],
        pre_tokenizer,
        [token["content"] for token in added if not token.get("special")],
        EncodingRules(nfc, prefix_space, bool(model.get("ignore_merges"))),
    )


def read_json_object(source: Path | str) -> dict[str, Any]:
    """The JSON object in a file, or in a text that starts with a brace. Raises TokenizerError where it is none."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        name, text, advice = "the text", source, ""
    else:
        name, advice = _name_of_file(source), "; fetch it again"
        text = _read(Path(source), name)
    if len(text) > MAX_JSON_SIZE:
        raise TokenizerError(f"{name}: is longer than {MAX_JSON_SIZE} characters; expected less")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name}: {json_fault(error)}{advice}") from None
    if not isinstance(data, dict):
        raise TokenizerError(f"{name}: holds a {type(data).__name__}; expected a JSON object")
    return data


def json_fault(error: ValueError | RecursionError) -> str:
    """What an error of `json.loads` means, to stand after a file's name."""
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON: {error!s:.100}"
    if isinstance(error, RecursionError):
        return "is nested too deeply; expected a JSON object"
    return "holds a number of thousands of digits; expected a usable one"


def _name_of_file(source: Any) -> str:
    """A file's path for a message; TokenizerError for what is none."""
    if not isinstance(source, str | os.PathLike) or source == "":
        given = "empty" if source == "" else f"a {type(source).__name__}"
        raise TokenizerError(f"the tokenizer's source is {given}; expected the path of a JSON file, or its text")
    name = str(source)
    return name if name.isprintable() and len(name) < MAX_PATH else brief(name)


def _read(path: Path, name: str) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(MAX_JSON_SIZE + 1)
    except UnicodeDecodeError:
        raise TokenizerError(f"{name}: is no UTF-8 text; fetch it again") from None
    except (OSError, ValueError) as error:  # ValueError: a path that holds a zero byte
        fault = getattr(error, "strerror", None) or error
        raise TokenizerError(f"{name}: cannot be read: {fault}; expected a JSON file") from None


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"tokenizer model {_name(model)} is not supported; expected BPE on bytes")
    for key in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise TokenizerError(f"model.{key} {brief(model[key])} is not supported; expected none (BPE on bytes)")


def _is_nfc(normalizer: Any) -> bool:
    if normalizer is None:
        return False
    is_sequence = isinstance(normalizer, dict) and normalizer.get("type") == "Sequence"
    steps = _list(normalizer, "normalizers") if is_sequence else [normalizer]
    for step in steps:
        if not (isinstance(step, dict) and step.get("type") == "NFC"):
            raise TokenizerError(f"normalizer {_name(step)} is not supported; expected NFC or none")
    return bool(steps)


def _pre_tokenizer(node: Any) -> tuple[str, bool]:
    """Our name of the file's cuts, found by their content, and whether a blank goes before each text."""
    is_sequence = isinstance(node, dict) and node.get("type") == "Sequence"
    steps = _list(node, "pretokenizers") if is_sequence else [node]
    patterns = tuple(pattern for step in steps for pattern in _cut(step))
    to_bytes = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(to_bytes) != 1 or steps[-1] is not to_bytes[0]:
        raise TokenizerError("the pre-tokenizers do not end in one ByteLevel; expected BPE on bytes")
    prefix_space = to_bytes[0].get("add_prefix_space")
    if not isinstance(prefix_space, bool):
        raise TokenizerError(f"ByteLevel.add_prefix_space is {brief(prefix_space)}; expected true or false")
    if prefix_space and len(steps) > 1:
        raise TokenizerError("ByteLevel.add_prefix_space after another cut is not supported; expected false")
    for name, known in PATTERNS.items():
        if patterns == known:
            return name, prefix_space
    raise TokenizerError(f"the pre-tokenizer's patterns {brief(patterns)} are none of ours ({', '.join(PATTERNS)})")


def _cut(step: Any) -> tuple[str, ...]:
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "ByteLevel":
        return (GPT2_WORD,) if step.get("use_regex", True) else ()
    if kind == "Digits" and step.get("individual_digits"):
        return (DIGIT,)
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step.get("pattern")
        regex_text = pattern.get("Regex") if isinstance(pattern, dict) else None
        if isinstance(regex_text, str):
            return (OTHER_SPELLINGS.get(regex_text, regex_text),)
    raise TokenizerError(
        f"pre-tokenizer {_name(step)} is not supported as the file sets it; "
        "expected ByteLevel, Digits (individual) or Split (by a Regex, Isolated)"
    )


def _added_tokens(data: Mapping[str, Any], nfc: bool) -> list[dict[str, Any]]:
    added = _list(data, "added_tokens") if data.get("added_tokens") is not None else []
    for token in added:
        if not (isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int):
            raise TokenizerError(f"added_tokens holds {brief(token)}; expected an object with an id and a content")
        for flag in ("single_word", "lstrip", "rstrip", *(["normalized"] if nfc else [])):
            if token.get(flag):
                raise TokenizerError(
                    f"added token {brief(token['content'])} sets {flag}, which is not supported; expected false"
                )
    return added


def _tokens(vocab: Mapping[str, Any], added: list[dict[str, Any]]) -> list[str]:
    """The tokens in the order of their ids, which have to be 0, 1, 2, ..."""
    token_ids = dict(vocab)
    for token in added:
        if token_ids.setdefault(token["content"], token["id"]) != token["id"]:
            first_id = token_ids[token["content"]]
            raise TokenizerError(
                f"added token {brief(token['content'])} has the ids {brief(first_id)} and {token['id']}; expected one"
            )
    texts = {token_id: text for text, token_id in token_ids.items() if type(token_id) is int}
    if len(texts) != len(token_ids) or texts.keys() != set(range(len(texts))):
        raise TokenizerError(
            f"the vocabulary's {len(token_ids)} ids have gaps or repeat; expected 0, 1, 2, ... once each"
        )
    return [texts[token_id] for token_id in range(len(texts))]


def _merge(merge: Any) -> tuple[str, str]:
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) and part for part in pair):
        return pair[0], pair[1]
    raise TokenizerError(f'model.merges holds {merge!r:.80}; expected "left right" or ["left", "right"]')


def _object(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(data.get(key), dict):
        raise TokenizerError(f"{key} is a {type(data.get(key)).__name__}; expected a JSON object")
    return data[key]


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(data.get(key), list):
        raise TokenizerError(f"{key} is a {type(data.get(key)).__name__}; expected a list")
    return data[key]


def _name(node: Any) -> str:
    return brief(node.get("type")) if isinstance(node, dict) else brief(node)
