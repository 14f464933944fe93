import json
import pickle
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as OracleTokenizer

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import EncodedWord, Tokenizer, bpe, tokenizer_from_gguf
from tinyllm.tokenizer.bpe import merge_word

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "tokenizer_golden.jsonl").read_text("utf-8").splitlines()
]
GOLDEN_IDS = [row for row in GOLDEN if row["ids"] is not None]
GOLDEN_ERRORS = [row for row in GOLDEN if row["ids"] is None]

# The bytes that no token of SmolLM2 spells. c0, c1 and f5 to ff never occur in UTF-8; the others do: six control
# characters, and f1 and f2, the first bytes of U+40000 to U+BFFFF (planes in which nothing is assigned).
MISSING_BYTES = bytes.fromhex("04 06 13 14 16 1d c0 c1 f1 f2 f5 f6 f7 f8 f9 fa fb fc fd fe ff")
SPECIAL_TEXTS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<reponame>", "<|im_", "end|>"]
PIECES = st.sampled_from(
    ["   5", " the", "'ll", "\n\n", "aaaa", "12", "é", "😀", "½", "\x1c", "\x04", "<|", *SPECIAL_TEXTS]
)


def texts(categories: list[Literal["Cs", "Cn"]]) -> st.SearchStrategy[str]:
    return st.lists(PIECES | st.text(st.characters(exclude_categories=categories), max_size=6), max_size=20).map(
        "".join
    )


ANY_TEXT = texts(["Cs"])
ASSIGNED_TEXT = texts(["Cs", "Cn"])  # of unassigned characters a newer Unicode table may make letters


def drop_missing_bytes(text: str) -> bytes:
    return text.encode().translate(None, MISSING_BYTES)


def small(**changes: Any) -> Tokenizer:
    arguments = {
        "tokens": ["h", "u", "g", "ug", "hug", "<end>", "<e", "Ġ", "<think>"],
        "merges": [("u", "g"), ("h", "ug")],
        "special_tokens": ["<end>"],
        "pre_tokenizer": "smollm",
        "added_tokens": ["<think>"],
    }
    return Tokenizer(**{**arguments, **changes})


# The default model's vocabulary


@pytest.mark.parametrize("row", GOLDEN_IDS, ids=lambda row: row["id"])
def test_golden(smollm2_tokenizer: Tokenizer, row: dict[str, Any]):
    without_special = row["ids"] if row["ids_no_special"] is None else row["ids_no_special"]
    assert smollm2_tokenizer.encode(row["text"], parse_special=True) == row["ids"]
    assert smollm2_tokenizer.encode(row["text"]) == without_special
    assert smollm2_tokenizer.decode(row["ids"]) == row["decoded"]
    assert smollm2_tokenizer.decode(row["ids"], skip_special=True) == row["decoded_skip_special"]
    assert (row["text"] == row["decoded"]) == row["roundtrip"]
    expected_bytes = row["text"].encode() if row["bytes_hex"] is None else bytes.fromhex(row["bytes_hex"])
    assert smollm2_tokenizer.decode_bytes(row["ids"]) == expected_bytes


@pytest.mark.parametrize("row", GOLDEN_ERRORS, ids=lambda row: row["id"])
def test_golden_errors(smollm2_tokenizer: Tokenizer, row: dict[str, Any]):
    with pytest.raises(TokenizerError, match="lone surrogate"):
        smollm2_tokenizer.encode(row["text"])


def test_golden_rows_are_all_there():
    assert (len(GOLDEN_IDS), len(GOLDEN_ERRORS)) == (216, 2)


def test_exactly_these_bytes_are_missing(smollm2_tokenizer: Tokenizer):
    tokens = {smollm2_tokenizer.token_bytes(token_id) for token_id in range(smollm2_tokenizer.vocab_size)}
    assert bytes(byte for byte in range(256) if bytes([byte]) not in tokens) == MISSING_BYTES


@given(ANY_TEXT)
@example("a\x04b \U00040000")
def test_decode_gives_the_text_back(smollm2_tokenizer: Tokenizer, text: str):
    """To the byte, but for the missing ones; so exactly wherever the text has none of these."""
    for parse_special in (False, True):
        token_ids = smollm2_tokenizer.encode(text, parse_special)
        assert smollm2_tokenizer.decode_bytes(token_ids) == drop_missing_bytes(text)
        if drop_missing_bytes(text) == text.encode():
            assert smollm2_tokenizer.decode(token_ids) == text


@given(ANY_TEXT)
def test_text_alone_never_makes_a_special_token(smollm2_tokenizer: Tokenizer, text: str):
    assert not set(smollm2_tokenizer.encode(text)) & set(smollm2_tokenizer.special_tokens.values())


@given(ANY_TEXT, st.booleans())
def test_words_joined_are_text_and_ids(smollm2_tokenizer: Tokenizer, text: str, parse_special: bool):
    words = smollm2_tokenizer.encode_words(text, parse_special)
    assert "".join(word.text for word in words) == text
    assert [i for word in words for i in word.token_ids] == smollm2_tokenizer.encode(text, parse_special)
    for word in words:
        assert smollm2_tokenizer.decode_bytes(word.token_ids) == drop_missing_bytes(word.text)


@settings(max_examples=300)
@given(ASSIGNED_TEXT)
def test_same_ids_as_the_tokenizers_library(smollm2_tokenizer: Tokenizer, oracle: OracleTokenizer, text: str):
    assert smollm2_tokenizer.encode(text) == oracle.encode(text).ids


@settings(max_examples=300)
@given(ASSIGNED_TEXT)
def test_same_special_ids_as_the_tokenizers_library(
    smollm2_tokenizer: Tokenizer, oracle_with_special: OracleTokenizer, text: str
):
    assert smollm2_tokenizer.encode(text, parse_special=True) == oracle_with_special.encode(text).ids


@given(st.lists(st.integers(0, 49151), max_size=30))
def test_same_text_as_the_tokenizers_library(
    smollm2_tokenizer: Tokenizer, oracle_with_special: OracleTokenizer, token_ids: list[int]
):
    expected = oracle_with_special.decode(token_ids, skip_special_tokens=False)
    assert smollm2_tokenizer.decode(token_ids) == expected


@pytest.mark.parametrize("letter", ["a", "5"])
def test_a_megabyte_of_one_letter_takes_no_quadratic_time(smollm2_tokenizer: Tokenizer, letter: str):
    text = letter * 1_000_000
    start = time.perf_counter()
    token_ids = smollm2_tokenizer.encode(text)
    assert time.perf_counter() - start < 60  # a guard against hanging: it takes seconds
    assert smollm2_tokenizer.decode(token_ids) == text


def test_long_words_have_the_ids_of_the_tokenizers_library(smollm2_tokenizer: Tokenizer, oracle: OracleTokenizer):
    letters = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=3000))
    tool_schema = json.dumps(
        {f"name_{i}": {"type": "string", "enum": list("abc")} for i in range(200)}, separators=(",", ":")
    )
    for text in (letters, tool_schema, "a" * 3000, "\n" * 999, "<" * 999, "=" * 999 + "x"):
        assert smollm2_tokenizer.encode(text) == oracle.encode(text).ids


def test_token_text(smollm2_tokenizer: Tokenizer):
    token_ids = smollm2_tokenizer.encode("of France\n∩<|im_end|>\u00a0", parse_special=True)
    pieces = [smollm2_tokenizer.token_text(token_id) for token_id in token_ids]
    assert pieces == ["of", " France", r"\n", r"\xe2\x88", r"\xa9", "<|im_end|>", r"\u00a0"]
    assert all(smollm2_tokenizer.token_text(i).isprintable() for i in range(smollm2_tokenizer.vocab_size))


def test_vocab_size_and_special_tokens(smollm2_tokenizer: Tokenizer):
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.special_tokens["<|im_end|>"] == 2
    assert len(smollm2_tokenizer.special_tokens) == 17
    assert smollm2_tokenizer.added_tokens == {}


def test_the_cache_changes_no_id_and_is_bounded(smollm2_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    text = " one two three four one two" + "x" * 100
    expected = tokenizer_from_gguf(smollm2_metadata).encode(text)
    monkeypatch.setattr(bpe, "MAX_CACHED_WORDS", 2)
    tokenizer = tokenizer_from_gguf(smollm2_metadata)
    for _ in range(3):
        assert tokenizer.encode(text) == expected
        assert 1 <= len(tokenizer._word_cache) <= 2
        assert max(map(len, tokenizer._word_cache)) <= bpe.MAX_CACHED_WORD_LENGTH


# Merging


def naive_merge(token_ids: list[int], merges: list[tuple[int, int, int]]) -> list[int]:
    """The definition, one merge at a time: of all neighbours with the lowest rank, merge the leftmost."""
    ranks = {}
    for rank, (left, right, _) in enumerate(merges):
        ranks.setdefault((left, right), rank)
    ids = list(token_ids)
    while True:
        ranked = [(ranks[pair], place) for place, pair in enumerate(pairwise(ids)) if pair in ranks]
        if not ranked:
            return ids
        rank, place = min(ranked)
        ids[place : place + 2] = [merges[rank][2]]


@st.composite
def random_merges(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Merges over the letters 0, 1 and 2 in any order: also a merge of what only a later one makes."""
    count = draw(st.integers(1, 12))
    ids = st.integers(0, 2 + count)
    merges = [(draw(ids), draw(ids), 3 + number) for number in range(count)]
    return draw(st.permutations(merges))


@settings(max_examples=500)
@given(random_merges(), st.lists(st.integers(0, 2), max_size=40))
@example([(0, 0, 3)], [0, 0, 0])  # overlapping: the left pair goes first
@example([(0, 3, 4), (1, 2, 3)], [0, 1, 2])  # rank 0 becomes possible by rank 1
@example([(0, 0, 3), (3, 3, 4)], [0] * 9)
@example([], [0, 1])
def test_heap_merging_is_naive_merging(merges: list[tuple[int, int, int]], word: list[int]):
    ranks = {}
    for rank, (left, right, _) in enumerate(merges):
        ranks.setdefault((left, right), rank)
    assert merge_word(word, ranks, [merged for _, _, merged in merges]) == naive_merge(word, merges)


def test_rank_decides_not_place():
    tokenizer = Tokenizer(["t", "h", "u", "g", "ug", "hug", "hu"], [("u", "g"), ("h", "ug"), ("h", "u")], [], "smollm")
    assert [tokenizer.token_text(i) for i in tokenizer.encode("thug")] == ["t", "hug"]


def test_a_merge_listed_twice_counts_at_its_first_place():
    tokenizer = Tokenizer(["a", "b", "c", "ab", "bc"], [("a", "b"), ("b", "c"), ("a", "b")], [], "smollm")
    assert tokenizer.encode("abc") == [3, 2]


# Special and added tokens


def test_special_tokens_only_where_the_caller_allows():
    tokenizer = small()
    assert tokenizer.encode("hug<end>hug", parse_special=True) == [4, 5, 4]
    assert tokenizer.encode("hug<end>hug") == [4, 4]  # no token spells < e n d >
    assert tokenizer.decode([4, 5, 4]) == "hug<end>hug"
    assert tokenizer.decode([4, 5, 4], skip_special=True) == "hughug"


def test_added_tokens_always_and_never_skipped():
    tokenizer = small()
    for parse_special in (False, True):
        assert tokenizer.encode("u<think> g", parse_special) == [1, 8, 7, 2]
    assert tokenizer.decode([1, 8, 7, 2], skip_special=True) == "u<think> g"
    assert tokenizer.added_tokens == {"<think>": 8}


def test_leftmost_then_longest_match():
    tokens = ["a", "<x>", "<x><y>", "<y>", "<y><x>", "|", ".*"]
    tokenizer = Tokenizer(tokens, [], tokens[1:], "smollm")
    assert tokenizer.encode("<x><y><x>", parse_special=True) == [2, 1]
    assert tokenizer.encode("a<y><x><y>a|.*", parse_special=True) == [0, 4, 3, 0, 5, 6]


def test_special_text_is_not_spelled_in_the_byte_alphabet():
    # č stands for the byte 0d in the alphabet, é for e9; in a special or added token they are themselves.
    tokenizer = small(tokens=["a", "é", "<č>", "<é>"], merges=[], special_tokens=["<č>"], added_tokens=["<é>"])
    assert tokenizer.decode([0, 2, 3]) == "a<č><é>"
    assert tokenizer.encode("a<č><é>", parse_special=True) == [0, 2, 3]
    assert tokenizer.token_bytes(1) == b"\xe9"


def test_raw_tokens_decode_to_themselves():
    tokenizer = Tokenizer(["hello", "Ġthere", "\n", "\u203c", "Ċ"], [], [], "smollm")
    assert tokenizer.decode([0, 2, 1, 3]) == "hello\n there\u203c"
    assert tokenizer.encode("\n") == [4]


def test_a_special_token_of_one_byte_is_not_spelled_by_text():
    tokenizer = small(tokens=["a", "b"], merges=[], special_tokens=["a"], added_tokens=[])
    assert tokenizer.encode("ab") == [1]
    assert tokenizer.encode("ab", parse_special=True) == [0, 1]


# Encoding and decoding, small


def test_encode_words():
    words = small().encode_words("hug hug<end>5", parse_special=True)
    assert words == [
        EncodedWord("hug", (4,)),
        EncodedWord(" hug", (7, 4)),
        EncodedWord("<end>", (5,)),
        EncodedWord("5", ()),
    ]


def test_nothing():
    tokenizer = small()
    assert tokenizer.encode("") == []
    assert tokenizer.encode_words("", parse_special=True) == []
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode_bytes([]) == b""
    for token_ids in (None, 5):
        with pytest.raises(
            TokenizerError, match=rf"token_ids is a {type(token_ids).__name__}; expected a list of ints"
        ):
            tokenizer.decode(token_ids)  # pyright: ignore[reportArgumentType]


def test_a_dropped_byte_lets_its_neighbours_merge():
    assert small().encode("huXg") == small().encode("hug") == [4]


def test_cut_characters_decode_to_the_replacement_character():
    tokenizer = Tokenizer(["â", "Ī", "©", "a"], [], [], "smollm")  # e2, 88 and a9: together U+2229
    assert tokenizer.decode([0, 1, 2]) == "\u2229"
    assert tokenizer.decode([3, 0, 1]) == "a\ufffd"
    assert tokenizer.decode([1, 2, 3]) == "\ufffd\ufffda"
    assert tokenizer.decode_bytes([3, 0, 1]) == b"a\xe2\x88"


def test_it_pickles():
    assert pickle.loads(pickle.dumps(small())).encode("hug") == [4]


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\udc80b", "U+DC80 at position 1"),
        ("\ud83d\ude00", "U+D83D at position 0"),  # a pair in a str is two surrogates, no emoji
        ("hug<end>\udfff", "U+DFFF at position 8"),
        (b"hug", "cannot encode a bytes"),
        (None, "cannot encode a NoneType"),
    ],
)
def test_text_that_cannot_be_encoded(text: Any, message: str):
    for call in (small().encode, small().encode_words):
        with pytest.raises(TokenizerError) as error:
            call(text, parse_special=True)
        assert message in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "token_id", [-1, 9, 2**70, 10**5000, 1.0, True, "1", None, [1]], ids=lambda value: repr(type(value))
)
def test_bad_token_ids(token_id: Any):
    tokenizer = small()
    for call in (
        lambda: tokenizer.decode([1, token_id]),
        lambda: tokenizer.decode([token_id], skip_special=True),
        lambda: tokenizer.decode_bytes([token_id]),
        lambda: tokenizer.token_bytes(token_id),
        lambda: tokenizer.token_text(token_id),
    ):
        with pytest.raises(TokenizerError, match=r"^token id .*expected (an int|0 to 8)"):
            call()


def test_a_float_is_refused_also_where_the_special_token_would_be_skipped():
    with pytest.raises(TokenizerError, match="float"):
        small().decode([5.0], skip_special=True)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ["a", "b", "a"]}, "token 'a' is listed twice, as 0 and 2"),
        ({"tokens": ["a", "\ud83d"]}, r"holds a surrogate"),
        ({"tokens": ["a", "\ud83d"], "special_tokens": ["\ud83d"]}, r"holds a surrogate"),
        ({"merges": [("u", "g"), ("u", "x")]}, r"merge 1 \('u' \+ 'x'\) needs 'x', which is no ordinary token"),
        ({"merges": [("u", "h")]}, r"merge 0 \('u' \+ 'h'\) needs 'uh'"),
        ({"tokens": ["<e", "nd>", "<end>"], "merges": [("<e", "nd>")], "special_tokens": ["<end>"]}, "needs '<end>'"),
        (
            {"tokens": ["<", "<end>", "<<end>"], "merges": [("<", "<end>")], "special_tokens": ["<end>"]},
            "needs '<end>'",
        ),
        ({"special_tokens": ["<start>"]}, "'<start>' is empty or not in the vocabulary"),
        ({"tokens": ["a", ""], "special_tokens": [""]}, "'' is empty or not in the vocabulary"),
        ({"added_tokens": ["<end>"]}, "'<end>' is both special and added"),
        ({"pre_tokenizer": "gpt5"}, "'gpt5' is not supported; expected smollm"),
    ],
)
def test_unusable_vocabularies(changes: dict[str, Any], message: str):
    if "tokens" in changes:
        changes = {"merges": [], "special_tokens": [], "added_tokens": [], **changes}
    with pytest.raises(TokenizerError, match=message) as error:
        small(**changes)
    assert "\n" not in str(error.value)
