import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import EncodingRules, Tokenizer, load_tokenizer, save_tokenizer, tokenizer_from_merges, train
from tinyllm.tokenizer.train import iter_merges
from tinyllm.tokenizer.vocab_file import tokenizer_to_text

TRAINED = train("the cat's hat, the other cat; café 2024", 300, "qwen2", special_tokens=["<end>"])


@pytest.mark.parametrize("as_text", [False, True])
def test_saved_and_loaded(tmp_path: Path, as_text: bool):
    path = tmp_path / "vocab.json"
    save_tokenizer(TRAINED, str(path) if as_text else path)
    loaded = load_tokenizer(str(path) if as_text else path)
    text = "the other café<end> 12"
    assert loaded.encode(text, parse_special=True) == TRAINED.encode(text, parse_special=True)
    assert loaded.pre_tokenizer == "qwen2"
    save_tokenizer(loaded, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_everything_is_kept():
    tokens = ["a", "b", "ab", "\n", "Ċ", "\u203c", "\udcff", "<č>", "<think>"]
    rules = EncodingRules(nfc=True, whole_words=True)
    tokenizer = Tokenizer(tokens, [("a", "b"), ("a", "b")], ["<č>"], "llama-bpe", ["<think>"], rules)
    loaded = load_tokenizer(tokenizer_to_text(tokenizer))
    names = ("tokens", "merges", "special_tokens", "added_tokens", "pre_tokenizer", "rules")
    for name in names:
        assert getattr(loaded, name) == getattr(tokenizer, name)
    assert loaded.decode_bytes(range(9)) == tokenizer.decode_bytes(range(9))


@given(st.text(max_size=60), st.integers(0, 20))
def test_any_trained_tokenizer_comes_back(text: str, num_merges: int):
    tokenizer = tokenizer_from_merges(iter_merges(text, num_merges))
    loaded = load_tokenizer(tokenizer_to_text(tokenizer))
    assert loaded.encode(text) == tokenizer.encode(text)
    assert tokenizer_to_text(loaded) == tokenizer_to_text(tokenizer)


def test_the_default_model_comes_back(smollm2_tokenizer: Tokenizer):
    loaded = load_tokenizer(tokenizer_to_text(smollm2_tokenizer))
    text = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n   5"
    assert loaded.encode(text, parse_special=True) == smollm2_tokenizer.encode(text, parse_special=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": None}, "the file's format is None; expected 'tinyllm tokenizer'"),
        ({"version": 2}, "the file's version is 2; expected 1"),
        ({"version": True}, "the file's version is True; expected 1"),
        ({"pre_tokenizer": 3}, "pre_tokenizer is 3; expected a name"),
        ({"pre_tokenizer": "gpt5"}, "pre-tokenizer 'gpt5' is not supported"),
        ({"tokens": "abc"}, "tokens is 'abc'; expected a list of strings"),
        ({"tokens": ["a", 1]}, "tokens is ['a', 1]; expected a list of strings"),
        ({"special_tokens": None}, "special_tokens is None; expected a list of strings"),
        ({"special_tokens": ["<x>"]}, "special or added token '<x>' is empty or not in the vocabulary"),
        ({"added_tokens": {"<x>": 1}}, "expected a list of strings"),
        ({"merges": ["a b"]}, "merges is ['a b']; expected a list of pairs of strings"),
        ({"merges": [["a", "b", "c"]]}, "expected a list of pairs of strings"),
        ({"merges": [["q", "q"]]}, "which is no ordinary token"),
        ({"rules": None}, "rules is None; expected nfc, prefix_space, whole_words, each true or false"),
        ({"rules": {"nfc": True}}, "expected nfc, prefix_space, whole_words"),
        ({"rules": {"nfc": 1, "prefix_space": False, "whole_words": False}}, "each true or false"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str):
    data = json.loads(tokenizer_to_text(TRAINED))
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(json.dumps({**data, **changes}))
    assert message in str(error.value)
    assert str(error.value).isprintable()


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(TokenizerError, match="No such file"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(TokenizerError, match="cannot write"):
        save_tokenizer(TRAINED, tmp_path)
    with pytest.raises(TokenizerError, match="cannot write"):
        save_tokenizer(TRAINED, "a\x00b")
    with pytest.raises(TokenizerError, match="path is a NoneType; expected a path to write to"):
        save_tokenizer(TRAINED, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TokenizerError, match="the tokenizer's source is a NoneType; expected the path of a JSON file"):
        load_tokenizer(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TokenizerError, match="the tokenizer's source is empty; expected"):
        load_tokenizer("")


def test_a_line_ends_alike_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = {}
    monkeypatch.setattr(Path, "write_text", lambda *_, **options: given.update(options))
    save_tokenizer(TRAINED, tmp_path / "vocab.json")
    assert given == {"newline": "\n"}
