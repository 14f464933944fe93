import json
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import Merge, iter_merges, split_words, tokenizer_from_merges, train
from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR
from tinyllm.tokenizer.train import Corpus

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "train_golden.json").read_text("utf-8"))["rows"]
SPLITS = {"no_split": "whole-text", "gpt2_split": "gpt2"}
TIES: dict[str, Literal["first", "smallest"]] = {"first": "first", "small": "smallest"}


def as_rows(merges: Any) -> list[list[Any]]:
    return [[list(merge.pair), merge.new_id, merge.count] for merge in merges]


def spelled(text: str, num_merges: int, **changes: Any) -> list[tuple[str, str, int]]:
    """The merges as text with their counts."""
    merges = list(iter_merges(text, num_merges, **changes))
    tokenizer = tokenizer_from_merges(merges)
    return [(*(tokenizer.token_text(token_id) for token_id in merge.pair), merge.count) for merge in merges]


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["name"])
def test_golden(row: dict[str, Any], split: str, tie: str):
    merges = iter_merges(row["text"], row["merges"], SPLITS[split], TIES[tie])
    assert as_rows(merges) == row[split][tie]


def test_golden_rows_are_all_there():
    assert len(GOLDEN) == 9
    assert sum(row["gpt2_split"]["first"] != row["gpt2_split"]["small"] for row in GOLDEN) == 3


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["name"])
def test_the_merges_of_the_tokenizers_library_have_the_highest_count_too(row: dict[str, Any]):
    """Its tie rule is another one, by its own order of the alphabet; but each of its merges is one of the best."""
    corpus = Corpus(split_words(row["text"], "gpt2"))
    ids = {bytes([byte]).hex(): byte for byte in range(256)}
    for new_id, (left, right) in enumerate(row["hf_trainer_merges"], 256):
        pair = ids[left], ids[right]
        assert corpus.counts[pair] == max(corpus.counts.values())
        corpus.merge(pair, new_id)
        ids[left + right] = new_id
    assert len(row["hf_trainer_merges"]) == len(list(iter_merges(row["text"], row["merges"])))


# Cases from elsewhere


def test_low_lower_newest_widest():
    """BPE-01: the corpus of Sennrich et al., ties to the pair met first."""
    text = "low\n" * 5 + "lower\n" * 2 + "newest\n" * 6 + "widest\n" * 3  # a line end is a word of its own
    assert spelled(text, 7) == [
        ("e", "s", 9),
        ("es", "t", 9),
        ("l", "o", 7),
        ("lo", "w", 7),
        ("n", "e", 6),
        ("ne", "w", 6),
        ("new", "est", 6),
    ]
    assert spelled(text, 5, ties="smallest")[4] == ("e", "w", 6)  # e stands before n


def test_nothing_to_merge_is_no_error():
    """Case 50: it stops early where no pair is left."""
    assert train("aa", 259).vocab_size == 257
    assert train("", 257).vocab_size == 256
    assert train("a", 257).vocab_size == 256
    assert list(iter_merges("a b c", 5, "smollm")) == [Merge((32, 98), 1, 256), Merge((32, 99), 1, 257)]


def test_a_tie_goes_to_the_pair_met_first():
    """Case 50: after aa the pairs (256, a) and (a, b) both occur twice."""
    merges = list(iter_merges("aaabdaaabac", 3))
    assert [merge.pair for merge in merges] == [(97, 97), (256, 97), (257, 98)]
    assert tokenizer_from_merges(merges).encode("aaabdaaabac") == [258, 100, 258, 97, 99]


def test_special_tokens_decode_and_encode():
    """Case 50: a special token's id decodes, and its text encodes back where that is allowed."""
    tokenizer = train("aaab", 258, special_tokens=["<|endoftext|>"])
    assert tokenizer.special_tokens == {"<|endoftext|>": 257}
    assert tokenizer.decode([257]) == "<|endoftext|>"
    assert tokenizer.encode("<|endoftext|>", parse_special=True) == [257]
    assert 257 not in tokenizer.encode("<|endoftext|>")
    assert [tokenizer.token_text(i) for i in tokenizer.encode("aaa")] == ["aa", "a"]  # the left pair, not the right one


def test_training_cuts_words_as_encoding_does():
    """Case 49: no merge crosses the border of a word, so each learnt token can occur when encoding."""
    tokenizer = train("hello world! hello\nworld 2024 2024" * 3, 300)
    for token_id in range(256, tokenizer.vocab_size):
        assert tokenizer.encode(tokenizer.decode([token_id])) == [token_id]
    assert spelled("ab ab ab", 9) == [("a", "b", 3), (" ", "ab", 2)]
    assert spelled("ab ab ab", 9, pre_tokenizer="whole-text")[-1] == ("ab ab ", "ab", 1)


@given(st.text())
@example("  Hello World.")
@example("hello\nworld")
def test_any_text_comes_back(text: str):
    """BPE-02, and case 49."""
    tokenizer = train("hello world.  hello\n" * 3, 280)
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Against the definition


def naive_merges(text: str, num_merges: int, pre_tokenizer: str, ties: str) -> list[Merge]:
    """Every word of the text, every count anew."""
    words = [list(word.encode()) for word in split_words(text, pre_tokenizer)]
    merges = []
    for new_id in range(256, 256 + num_merges):
        counts: dict[tuple[int, int], int] = {}  # in the order in which the pairs are met
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts.values())
        tied = [pair for pair, count in counts.items() if count == best]
        pair = tied[0] if ties == "first" else min(tied)
        merges.append(Merge(pair, best, new_id))
        for word in words:
            place = 0
            while place < len(word) - 1:
                if tuple(word[place : place + 2]) == pair:
                    word[place : place + 2] = [new_id]
                place += 1
    return merges


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(["a", "aa", "ab", "b", " ", "\n", "é", "1"]), max_size=40).map("".join),
    st.integers(0, 30),
    st.sampled_from(["gpt2", "smollm", "qwen2", "whole-text"]),
    st.sampled_from(["first", "smallest"]),
)
def test_same_merges_as_the_definition(
    text: str, num_merges: int, pre_tokenizer: str, ties: Literal["first", "smallest"]
):
    merges = list(iter_merges(text, num_merges, pre_tokenizer, ties))
    assert merges == naive_merges(text, num_merges, pre_tokenizer, ties)
    tokenizer = tokenizer_from_merges(merges, pre_tokenizer)  # so no two merges make the same token
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.permutations(["bbb", "aaa", "dddd", "cccc"]), st.integers(0, 8))
def test_smallest_does_not_depend_on_the_order_of_the_text(words: list[str], num_merges: int):
    merges = list(iter_merges("\n".join(words), num_merges, ties="smallest"))
    assert merges == list(iter_merges("aaa\nbbb\ncccc\ndddd", num_merges, ties="smallest"))


def test_merges_come_one_by_one_and_a_longer_training_starts_with_the_shorter():
    text = "the cat sat on the mat with the other cat"
    merges = iter_merges(text, 1000)
    first = next(merges)
    assert [first, *merges][:5] == list(iter_merges(text, 5))
    assert train(text, 300).tokens == train(text, 300).tokens
    assert train(text, 261).tokens == train(text, 300).tokens[:261]


def test_the_bytes_have_their_own_numbers():
    tokenizer = train("", 256)
    assert tokenizer.tokens == tuple(BYTE_TO_CHAR)
    assert tokenizer.encode("Aé") == [0x41, 0xC3, 0xA9]


def test_time_does_not_explode():
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(2000)]
    text = " ".join(rng.choices(words, k=50_000))
    start = time.perf_counter()
    assert len(list(iter_merges(text, 300))) == 300
    assert time.perf_counter() - start < 30  # a guard: it takes about a second


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": None}, "cannot encode a NoneType; expected a str"),
        ({"text": "\ud800"}, "lone surrogate U+D800"),
        ({"vocab_size": 255}, "vocab_size is 255; expected an int of 256 or more"),
        ({"vocab_size": 256, "special_tokens": ["<s>"]}, "vocab_size is 256; expected an int of 257 or more"),
        ({"vocab_size": True}, "vocab_size is True; expected an int"),
        ({"vocab_size": 300.0}, "vocab_size is 300.0; expected an int"),
        ({"pre_tokenizer": "default"}, "pre-tokenizer 'default' is not supported; expected smollm"),
        ({"ties": "small"}, "tie rule 'small' is not supported; expected first or smallest"),
        ({"special_tokens": ["aa"]}, "token 'aa' is listed twice, as 256 and 257"),
        ({"special_tokens": [""]}, "'' is empty"),
        ({"special_tokens": [5]}, "special_tokens is [5]; expected a list of strings"),
        ({"special_tokens": None}, "special_tokens is None; expected a list of strings"),
        ({"special_tokens": "<e>"}, "special_tokens is '<e>'; expected a list of strings"),
        ({"pre_tokenizer": []}, "pre-tokenizer [] is not supported; expected smollm"),
    ],
)
def test_errors(changes: dict[str, Any], message: str):
    with pytest.raises(TokenizerError) as error:
        train(**{"text": "aa", "vocab_size": 300, **changes})
    assert message in str(error.value)


@pytest.mark.parametrize("num_merges", [-1, 1.5, True, None])
def test_the_number_of_merges_is_checked_at_the_call(num_merges: Any):
    with pytest.raises(TokenizerError, match="expected an int of 0 or more"):
        iter_merges("aa", num_merges)
