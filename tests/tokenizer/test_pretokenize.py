import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import PreTokenizer

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import split_words
from tinyllm.tokenizer.byte_alphabet import spell_bytes
from tinyllm.tokenizer.pretokenize import PATTERNS

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


@given(TEXTS)
def test_same_words_as_the_tokenizers_library(oracle_words: PreTokenizer, text: str):
    expected = [word for word, _ in oracle_words.pre_tokenize_str(text)]
    assert [spell_bytes(word.encode()) for word in split_words(text, "smollm")] == expected


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


def test_unknown_name():
    with pytest.raises(TokenizerError, match=r"^pre-tokenizer 'gpt5' is not supported; expected smollm$"):
        split_words("a", "gpt5")
