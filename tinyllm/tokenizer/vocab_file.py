"""Our own file for a tokenizer: one JSON object that holds what `Tokenizer` is made from, and nothing else.

    {"format": "tinyllm tokenizer", "version": 1, "pre_tokenizer": "gpt2", "rules": {"nfc": false, ...},
     "tokens": ["!", ...], "merges": [["h", "i"], ...], "special_tokens": ["<end>"], "added_tokens": []}

Tokens and merges are spelled in the byte alphabet, as in model files. The file is ASCII: other characters are escaped.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tinyllm.errors import TokenizerError, brief
from tinyllm.tokenizer.bpe import EncodingRules, Tokenizer
from tinyllm.tokenizer.tokenizer_json import read_json_object

FORMAT = "tinyllm tokenizer"
VERSION = 1


def save_tokenizer(tokenizer: Tokenizer, path: Path | str) -> None:
    """Write `tokenizer` to `path`; an existing file is replaced.

    Raises TokenizerError where the file cannot be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise TokenizerError(f"path is a {type(path).__name__}; expected a path to write to")
    try:
        Path(path).write_text(tokenizer_to_text(tokenizer), "ascii", newline="\n")
    except (OSError, ValueError) as error:  # ValueError: a path that holds a zero byte
        raise TokenizerError(f"cannot write {brief(str(path))}: {error}; expected a path to write to") from None


def tokenizer_to_text(tokenizer: Tokenizer) -> str:
    """What `save_tokenizer` writes; equal tokenizers give equal text.

    >>> text = tokenizer_to_text(Tokenizer(["h", "i", "hi"], [("h", "i")], [], "gpt2"))
    >>> load_tokenizer(text).encode("hihi")
    [2, 2]
    """
    data = {
        "format": FORMAT,
        "version": VERSION,
        "pre_tokenizer": tokenizer.pre_tokenizer,
        "rules": asdict(tokenizer.rules),
        "tokens": tokenizer.tokens,
        "merges": tokenizer.merges,
        "special_tokens": list(tokenizer.special_tokens),
        "added_tokens": list(tokenizer.added_tokens),
    }
    return json.dumps(data) + "\n"


def load_tokenizer(source: Path | str) -> Tokenizer:
    """The tokenizer that `save_tokenizer` wrote: from its path, or from its text (a str that starts with a brace).

    Raises TokenizerError for a file that cannot be read, is none of ours, is of a later version or contradicts itself.
    """
    data = read_json_object(source)
    if data.get("format") != FORMAT:
        raise TokenizerError(f"the file's format is {brief(data.get('format'))}; expected {FORMAT!r}")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise TokenizerError(f"the file's version is {brief(data.get('version'))}; expected {VERSION}")
    pre_tokenizer = data.get("pre_tokenizer")
    if not isinstance(pre_tokenizer, str):
        raise TokenizerError(f"pre_tokenizer is {brief(pre_tokenizer)}; expected a name")
    merges = data.get("merges")
    if not (isinstance(merges, list) and all(_is_pair(merge) for merge in merges)):
        raise TokenizerError(f"merges is {brief(merges)}; expected a list of pairs of strings")
    return Tokenizer(
        _strings(data, "tokens"),
        [(left, right) for left, right in merges],
        _strings(data, "special_tokens"),
        pre_tokenizer,
        _strings(data, "added_tokens"),
        _rules(data.get("rules")),
    )


def _is_pair(merge: Any) -> bool:
    return isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge)


def _strings(data: Mapping[str, Any], key: str) -> list[str]:
    value = data.get(key)
    if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise TokenizerError(f"{key} is {brief(value)}; expected a list of strings")
    return value


def _rules(value: Any) -> EncodingRules:
    names = {field.name for field in fields(EncodingRules)}
    if not (isinstance(value, dict) and value.keys() == names and all(isinstance(v, bool) for v in value.values())):
        raise TokenizerError(f"rules is {brief(value)}; expected {', '.join(sorted(names))}, each true or false")
    return EncodingRules(**value)
