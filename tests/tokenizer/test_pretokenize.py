import json
import time
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as OracleTokenizer
from tokenizers import models
from tokenizers.pre_tokenizers import PreTokenizer

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import split_words
from tinyllm.tokenizer.byte_alphabet import spell_bytes
from tinyllm.tokenizer.pretokenize import PATTERNS

# The same cuts by another project, spelled as the models' own tokenizer.json files spell them.
NO_CUT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_CUT = {**NO_CUT, "use_regex": True}
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT4O_SPELLED = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split_at(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


JSON_CUTS = {
    "smollm": sequence({"type": "Digits", "individual_digits": True}, GPT2_CUT),
    "gpt2": GPT2_CUT,
    "gpt-2": GPT2_CUT,
    "llama-bpe": sequence(split_at(ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST), NO_CUT),
    "qwen2": sequence(split_at(ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST), NO_CUT),
    "gpt-4o": sequence(split_at(GPT4O_SPELLED), NO_CUT),
    "whole-text": NO_CUT,
}


def oracle_cut(cut: dict[str, Any]) -> PreTokenizer:
    tokenizer = json.loads(OracleTokenizer(models.BPE()).to_str())
    return OracleTokenizer.from_str(json.dumps({**tokenizer, "pre_tokenizer": cut})).pre_tokenizer


ORACLES = {name: oracle_cut(cut) for name, cut in JSON_CUTS.items()}

# Unassigned code points are left out: a newer Unicode table may make letters of them.
CHARACTERS = st.characters(exclude_categories=["Cs", "Cn"]) | st.sampled_from(" \n\t\r\u00a0\u3000'’a1²½Ⅷ٣,.\x1c\u093f")
PIECES = st.sampled_from(["'s", "'ll", " '", "  ", "\n\n", "   7", "I'm", " 12", "’t", "'S"])
TEXTS = st.lists(PIECES | CHARACTERS, max_size=40).map("".join)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("Hello, world!", ["Hello", ",", " world", "!"]),
        ("a  b", ["a", " ", " b"]),
        ("a  5", ["a", "  ", "5"]),  # both blanks stay together: the digit was cut away first
        ("1234", ["1", "2", "3", "4"]),
        ("² ³", ["²", " ", "³"]),
        ("Ⅷ Ⅳ", ["Ⅷ", " ", "Ⅳ"]),
        ("½٣", ["½", "٣"]),
        ("3's", ["3", "'s"]),
        ("'S", ["'", "S"]),  # the endings are lower case
        ("don’t", ["don", "’", "t"]),  # and have the ASCII apostrophe
        ("x \n\n y", ["x", " \n\n", " y"]),
        ("x \n\n4", ["x", " \n\n", "4"]),
        ("\x1c\x1d \x1e", ["\x1c\x1d", " \x1e"]),  # no white space, though Python's `re` takes it for some
        ("a\u00a0b", ["a", "\u00a0", "b"]),  # only the blank proper joins the word that follows
        ("हिन्दी", ["ह", "ि", "न", "्", "द", "ी"]),  # combining marks are no letters
    ],
)
def test_smollm_words(text: str, words: list[str]):
    assert split_words(text, "smollm") == words


@pytest.mark.parametrize(
    ("text", "gpt2", "llama_bpe", "qwen2"),
    [
        ("12345", ["12345"], ["123", "45"], ["1", "2", "3", "4", "5"]),
        (" 12", [" 12"], [" ", "12"], [" ", "1", "2"]),
        ("a  5", ["a", " ", " 5"], ["a", " ", " ", "5"], ["a", " ", " ", "5"]),
        ("I'M (you", ["I", "'", "M", " (", "you"], ["I", "'M", " (", "you"], ["I", "'M", " (", "you"]),
        ("I'Mx", ["I", "'", "Mx"], ["I", "'M", "x"], ["I", "'M", "x"]),  # an ending, though letters follow
        ("\tif(x", ["\t", "if", "(", "x"], ["\tif", "(x"], ["\tif", "(x"]),
        (" \n  \n", [" \n  \n"], [" \n  \n"], [" \n  \n"]),
        (" \n  \n x", [" \n  \n", " x"], [" \n  \n", " x"], [" \n  \n", " x"]),
        ("a.\n\nb", ["a", ".", "\n", "\n", "b"], ["a", ".\n\n", "b"], ["a", ".\n\n", "b"]),
        ("l'ſ", ["l", "'", "ſ"], ["l", "'ſ"], ["l", "'ſ"]),
    ],
)
def test_the_other_patterns(text: str, gpt2: list[str], llama_bpe: list[str], qwen2: list[str]):
    assert split_words(text, "gpt2") == split_words(text, "gpt-2") == gpt2
    assert split_words(text, "llama-bpe") == llama_bpe
    assert split_words(text, "qwen2") == qwen2
    assert split_words(text, "whole-text") == [text]


def test_gpt_4o_starts_words_at_capitals_and_keeps_endings_and_marks():
    assert split_words("aCamelCase isn't नमस्ते ABCdef", "gpt-4o") == ["a", "Camel", "Case", " isn't", " नमस्ते", " ABCdef"]


@pytest.mark.parametrize("name", PATTERNS)
@given(TEXTS)
@example("'ſ 'ſ K'S")  # signs that ignoring case makes letters of ASCII
def test_same_words_as_the_tokenizers_library(name: str, text: str):
    expected = [word for word, _ in ORACLES[name].pre_tokenize_str(text)]
    assert [spell_bytes(word.encode()) for word in split_words(text, name)] == expected


@pytest.mark.parametrize("name", PATTERNS)
@given(st.text())
def test_words_joined_are_the_text(name: str, text: str):
    words = split_words(text, name)
    assert "".join(words) == text
    assert "" not in words


@given(TEXTS)
def test_every_number_sign_stands_alone(text: str):
    for word in split_words(text, "smollm"):
        assert len(word) == 1 or not any(unicodedata.category(char).startswith("N") for char in word)


@pytest.mark.parametrize("name", PATTERNS)
def test_long_runs_take_no_quadratic_time(name: str):
    start = time.perf_counter()
    for unit in ("a", "A", "é", "中", "\u0301", "5", " ", "\n", " \n", ".", "'", "Aa", "'s"):
        text = unit * 100_000
        assert "".join(split_words(text, name)) == text
    assert time.perf_counter() - start < 60  # a guard against hanging: it takes a second


def test_unknown_name():
    names = "smollm, gpt2, gpt-2, llama-bpe, qwen2, gpt-4o, whole-text"
    with pytest.raises(TokenizerError, match=f"^pre-tokenizer 'gpt5' is not supported; expected {names}$"):
        split_words("a", "gpt5")
