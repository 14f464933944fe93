"""Public reports about other tokenizers, reworded as cases, and what this one does about each.

CASES says which test shows a case; the ones that other files hold are named with their file.
"""

import json
import random
import re
import string
import time
from collections.abc import Callable
from heapq import heappop
from itertools import pairwise
from pathlib import Path

import pytest

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import EncodingRules, Tokenizer, bpe, iter_merges, split_words, train
from tinyllm.tokenizer.train import Corpus

CASES = {
    "case-001": "test_tokens_outside_the_byte_alphabet_decode_to_themselves",
    "case-002": "test_long_words_get_the_ids_of_a_plain_merge_loop_and_fast",
    "case-003": "test_nfc_comes_first_where_the_vocabulary_says_so",
    "case-004": "test_digits_are_cut_off_before_the_blanks",
    "case-005": "test_blanks_between_line_ends",
    "case-006": "test_a_token_may_be_a_part_of_a_character",
    "case-007": "test_a_mark_continues_the_word_in_gpt_4o",
    "case-008": "test_each_digit_alone",
    "case-009": "test_surrogates_are_refused",
    "case-010": "test_vocabularies.py: test_mistral_is_refused_by_name",  # its blanks before each text come with it
    "case-011": "test_a_blank_before_every_text_between_special_tokens",
    "case-012": "test_an_added_token_is_text_and_not_spelled_bytes",
    "case-013": "test_gpt2_cuts_at_marks",
    "case-014": "test_a_byte_that_is_no_text",
    "case-015": "test_one_letter_often",
    "case-016": "test_added_tokens_are_found_first_and_stay_visible",
    "case-017": "test_no_character_vanishes_from_a_trained_tokenizer",
    "case-018": "test_a_line_of_many_kinds",
    "case-019": "test_counts_are_corrected_and_not_forgotten",
    "case-020": "test_a_tie_rule_that_does_not_depend_on_the_order_of_the_text",
    "case-021": "test_merges_go_by_rank",
    "case-022": "test_special_text_in_a_text",
    "case-023": "test_a_text_of_nothing_but_special_text",
    "case-024": "test_special_text_is_no_error",
}


def test_every_case_has_its_test():
    assert list(CASES) == [f"case-{number:03}" for number in range(1, 25)]
    for place in CASES.values():
        file, _, name = place.rpartition(": ")
        source = (Path(__file__).parent / (file or Path(__file__).name)).read_text("utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), place


def test_tokens_outside_the_byte_alphabet_decode_to_themselves():
    tokenizer = Tokenizer(["hello", "Ġthere", "\n", "\u203c"], [], [], "gpt2")
    assert tokenizer.decode([0, 2, 1, 3]) == "hello\n there\u203c"


def plain_merge_loop(tokenizer: Tokenizer, word: str) -> list[str]:
    """Merge the pair of lowest rank at its leftmost place, again and again."""
    ranks = {pair: rank for rank, pair in reversed([*enumerate(tokenizer.merges)])}
    parts = list(word)
    while ranked := [(ranks[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in ranks]:
        _, place = min(ranked)
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    return parts


def test_long_words_get_the_ids_of_a_plain_merge_loop_and_fast(smollm2_tokenizer: Tokenizer):
    letters = "".join(random.Random(2).choices(string.ascii_lowercase, k=3000))
    ids = smollm2_tokenizer.encode(letters)
    assert [smollm2_tokenizer.token_text(token_id) for token_id in ids] == plain_merge_loop(smollm2_tokenizer, letters)
    schema = json.dumps({f"name{i}": {"type": "string", "maxLength": i} for i in range(280)}, separators=(",", ":"))
    assert len(schema) > 11_000
    start = time.perf_counter()
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(schema + letters)) == schema + letters
    assert time.perf_counter() - start < 5  # a guard against hanging: it takes hundredths of a second


def test_nfc_comes_first_where_the_vocabulary_says_so(vocabulary: Callable[..., Tokenizer]):
    ids = [vocabulary("qwen3").encode(text) for text in ("\u00e9", "e\u0301", "\u212b", "\u0958")]
    assert ids == [[963], [963], [144044], [64704, 5502, 120]]


def test_digits_are_cut_off_before_the_blanks(smollm2_tokenizer: Tokenizer):
    assert smollm2_tokenizer.encode("   5") == [333, 37]


@pytest.mark.parametrize(
    ("name", "ids"), [("o200k", [77815]), ("cl100k", [49526]), ("gpt2", [220, 198, 220, 220, 198])]
)
def test_blanks_between_line_ends(
    vocabulary: Callable[..., Tokenizer], smollm2_tokenizer: Tokenizer, name: str, ids: list[int]
):
    assert vocabulary(name).encode(" \n  \n") == ids
    assert smollm2_tokenizer.encode(" \n  \n") == [3717, 32057]


@pytest.mark.parametrize(("name", "ids"), [("smollm2", [22052, 119]), ("cl100k", [22447, 102]), ("qwen3", [145224])])
def test_a_token_may_be_a_part_of_a_character(
    vocabulary: Callable[..., Tokenizer], smollm2_tokenizer: Tokenizer, name: str, ids: list[int]
):
    tokenizer = smollm2_tokenizer if name == "smollm2" else vocabulary(name)
    assert tokenizer.encode("\u2229") == ids
    shown = [tokenizer.token_text(token_id) for token_id in ids]
    assert shown == (["\u2229"] if len(ids) == 1 else [r"\xe2\x88", r"\xa9"])


def test_a_mark_continues_the_word_in_gpt_4o(vocabulary: Callable[..., Tokenizer]):
    texts = ["नमस्ते", "ที่", "עִבְרִית"]
    assert all(split_words(text, "gpt-4o") == [text] for text in texts)
    ids = [vocabulary("o200k").encode(text) for text in texts]
    assert ids == [[998, 1637, 14681, 628], [12144], [1250, 59484, 1726, 95059, 1015, 59484, 6277]]


def test_each_digit_alone(smollm2_tokenizer: Tokenizer):
    assert smollm2_tokenizer.encode("1234567890") == [33, 34, 35, 36, 37, 38, 39, 40, 41, 32]


@pytest.mark.parametrize("text", ["\ud83d", "\ud83d\ude00"])
def test_surrogates_are_refused(smollm2_tokenizer: Tokenizer, text: str):
    """Of the choices (U+FFFD, or an error) this is the one that hides nothing."""
    with pytest.raises(TokenizerError, match=r"lone surrogate U\+D83D at position 0"):
        smollm2_tokenizer.encode(text)


def test_a_blank_before_every_text_between_special_tokens(vocabulary: Callable[..., Tokenizer]):
    tokenizer = vocabulary("gpt2", rules=EncodingRules(prefix_space=True))
    assert tokenizer.encode("hello<|endoftext|>world", parse_special=True) == [23748, 50256, 995]


def test_an_added_token_is_text_and_not_spelled_bytes(vocabulary: Callable[..., Tokenizer]):
    tokenizer = vocabulary("gpt2", added_tokens=("<č>",))
    ids = tokenizer.encode("a<č>b")
    assert ids == [64, 50257, 65]
    assert tokenizer.decode(ids) == "a<č>b"


def test_gpt2_cuts_at_marks():
    words = ["हह", "ि", "न", "्", "द", "ी", " व", "ि", "क", "ि", "प", "ी", "ड", "ि", "य", "ा"]
    assert split_words("हहिन्दी विकिपीडिया", "gpt2") == words


def test_a_byte_that_is_no_text(vocabulary: Callable[..., Tokenizer]):
    tokenizer = vocabulary("gpt2")
    token_id = tokenizer.tokens.index("ÿ")  # how the alphabet spells ff
    assert tokenizer.decode_bytes([token_id]) == b"\xff"
    assert tokenizer.decode([token_id]) == "\ufffd"
    assert token_id not in tokenizer.encode("ÿ\ufffd\u00ff")


def test_one_letter_often(smollm2_tokenizer: Tokenizer):
    ids = smollm2_tokenizer.encode("a" * 3000)
    assert (len(ids), ids[:3]) == (750, [46880] * 3)


@pytest.mark.parametrize("size", [10_000, 100_000])
def test_one_letter_often_takes_a_few_steps_for_each(size: int, smollm2_tokenizer: Tokenizer, monkeypatch):
    """Looking through the word for each merge, or at stale pairs again and again, would be quadratic."""
    taken = []
    monkeypatch.setattr(bpe, "heappop", lambda heap: taken.append(1) or heappop(heap))
    smollm2_tokenizer.encode("a" * size)
    assert size / 2 < len(taken) < 4 * size


def test_one_letter_often_in_cl100k(vocabulary: Callable[..., Tokenizer]):
    assert len(vocabulary("cl100k").encode("a" * 3000)) == 375


def test_added_tokens_are_found_first_and_stay_visible(vocabulary: Callable[..., Tokenizer]):
    tokenizer, text = vocabulary("qwen3"), "<think>\n\n</think>"
    for parse_special in (False, True):
        assert tokenizer.encode(text, parse_special) == [151667, 271, 151668]
    assert tokenizer.decode([151667, 271, 151668], skip_special=True) == text


def test_no_character_vanishes_from_a_trained_tokenizer():
    """It knows every byte, so there is no unknown character."""
    words = {"hug": 10, "pug": 5, "pun": 12, "bun": 4, "hugs": 5}
    tokenizer = train(" ".join(word for word, times in words.items() for _ in range(times)), 270)
    assert tokenizer.decode(tokenizer.encode("mug")) == "mug"


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("smollm2", [19556, 905, 17, 48031, 2756, 32564, 90, 16739, 386, 101, 1841, 216, 33, 34, 35, 40303, 228]),
        ("cl100k", [9906, 1917, 0, 66771, 46939, 33614, 2001, 220, 4513, 27623, 232]),
        ("qwen3", [9707, 1879, 0, 65671, 45839, 32514, 1959, 220, 16, 17, 18, 26525, 232]),
        ("llama3", [9906, 1917, 0, 66771, 46939, 33614, 2001, 220, 4513, 27623, 232]),
    ],
)
def test_a_line_of_many_kinds(
    vocabulary: Callable[..., Tokenizer], smollm2_tokenizer: Tokenizer, name: str, ids: list[int]
):
    tokenizer = smollm2_tokenizer if name == "smollm2" else vocabulary(name)
    assert tokenizer.encode("Hello world! Café déjà vu — 123 😊") == ids


def test_counts_are_corrected_and_not_forgotten():
    """The merges of the tokenizers library, whose tie rule is another one: each has the highest count when its turn comes."""
    corpus = Corpus(split_words("bc a aaa", "gpt2"))
    for new_id, pair in enumerate([(0x61, 0x61), (0x62, 0x63), (0x20, 0x61)], 256):
        assert corpus.counts[pair] == max(corpus.counts.values())
        corpus.merge(pair, new_id)
    merges = [(merge.pair, merge.count) for merge in iter_merges("bc a aaa", 4)]
    assert merges == [((0x20, 0x61), 2), ((0x62, 0x63), 1), ((256, 0x61), 1), ((258, 0x61), 1)]


@pytest.mark.parametrize("text", ["bbbaaaddddcccc", "aaabbbccccdddd"])
def test_a_tie_rule_that_does_not_depend_on_the_order_of_the_text(text: str):
    merges = [(merge.pair, merge.new_id, merge.count) for merge in iter_merges(text, 4, ties="smallest")]
    assert merges == [((99, 99), 256, 3), ((100, 100), 257, 3), ((97, 97), 258, 2), ((98, 98), 259, 2)]


def test_merges_go_by_rank():
    tokenizer = Tokenizer(["t", "h", "u", "g", "ug", "hug", "hu"], [("u", "g"), ("h", "ug"), ("h", "u")], [], "gpt2")
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("thug")] == ["t", "hug"]


def test_special_text_in_a_text(smollm2_tokenizer: Tokenizer):
    assert smollm2_tokenizer.encode("a<|im_end|>b", parse_special=True) == [81, 2, 82]
    assert smollm2_tokenizer.encode("a<|im_end|>b") == [81, 44, 108, 306, 79, 486, 108, 46, 82]


def test_a_text_of_nothing_but_special_text(smollm2_tokenizer: Tokenizer):
    ids = smollm2_tokenizer.encode("<|im_start|><|im_end|>")
    assert ids == [44, 108, 306, 79, 3738, 108, 21198, 108, 306, 79, 486, 108, 46]
    assert not set(ids) & set(smollm2_tokenizer.special_tokens.values())


def test_special_text_is_no_error(vocabulary: Callable[..., Tokenizer]):
    assert vocabulary("cl100k").encode("<|endoftext|>") == [27, 91, 8862, 728, 428, 91, 29]
    assert vocabulary("cl100k").encode("<|endoftext|>", parse_special=True) == [100257]


# Bugs of other small engines


def test_gpt2_keeps_every_character(vocabulary: Callable[..., Tokenizer]):
    """Case 49: a comma got a wrong id, a line end was lost, blanks were lost; and special text as text (case 50)."""
    tokenizer = vocabulary("gpt2")
    assert tokenizer.encode("Hello,") == [15496, 11]
    for text in ("hello\nworld", "  Hello World.", "<|endoftext|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == text
    assert tokenizer.encode("<|endoftext|>", parse_special=True) == [50256]
