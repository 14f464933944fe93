"""Streaming detokenisation and stop strings: no half characters, nothing taken back, nothing lost."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer.bpe import Tokenizer
from tinyllm.tokenizer.detokenize import Detokenizer, StopFinder

DATA = Path(__file__).parents[1] / "data"
DETOK = [json.loads(line) for line in (DATA / "detok_golden.jsonl").read_text().splitlines()]
STREAMS = [row for row in DETOK if "text" in row]
STOPS = [json.loads(line) for line in (DATA / "stop_golden.jsonl").read_text().splitlines()]

hypothesis_settings = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer: Tokenizer, token_ids: list[int], skip_special: bool = True) -> list[str]:
    """The piece of each token, then the flush."""
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


def find(pieces: list[str], stop: list[str], include_stop: bool = False) -> tuple[str, str | None, int]:
    """The text let through, the match, and the number of pieces it took."""
    finder, text, used = StopFinder(stop, include_stop), "", 0
    for piece in pieces:
        used += 1
        text += finder.push(piece)
        if finder.matched is not None:
            break
    return text + finder.flush(), finder.matched, used


# --- pieces of characters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", STREAMS, ids=lambda row: f"{row['name']}-{row['skip_special']}")
def test_the_pieces_join_to_the_golden_text(row, smollm2_tokenizer):
    pieces = stream(smollm2_tokenizer, row["ids"], row["skip_special"])
    assert "".join(pieces) == row["text"]
    assert pieces == [*row["deltas"], row["flush"]]


def test_all_rows_were_read():
    assert (len(STREAMS), len(DETOK), len(STOPS)) == (41, 42, 14)


def test_the_answer_completes_the_character_in_which_the_prompt_ended(smollm2_tokenizer):
    row = DETOK[-1]
    detokenizer = Detokenizer(smollm2_tokenizer, prompt_token_ids=row["prompt_ids"])
    assert detokenizer.push(row["ids"]) + detokenizer.flush() == "\U0001f336 ok"


@hypothesis_settings
@given(data=st.data(), skip_special=st.booleans())
def test_joined_pieces_are_the_decode_of_all_ids(data, skip_special, smollm2_tokenizer):
    # Half of the ids are of one byte, where characters are cut.
    ids = st.one_of(st.integers(0, smollm2_tokenizer.vocab_size - 1), st.integers(0, 300))
    token_ids = data.draw(st.lists(ids, max_size=30))
    pieces = stream(smollm2_tokenizer, token_ids, skip_special)
    assert "".join(pieces) == smollm2_tokenizer.decode(token_ids, skip_special)
    shown = ""
    for count, piece in enumerate(pieces[:-1], start=1):
        shown += piece
        later = smollm2_tokenizer.decode(token_ids[:count], skip_special)
        held = later[len(shown) :]  # two of a surrogate, whose bytes are replaced together
        assert later.startswith(shown) and held in ("", "\ufffd", "\ufffd\ufffd"), "all that is certain, and no more"


def test_the_begin_of_a_surrogate_waits_for_its_end(smollm2_tokenizer):
    """Its three bytes can only be replaced, one by one, as in the whole text; a seed of the property above met two."""
    ids = [
        next(i for i in range(300) if smollm2_tokenizer.token_bytes(i) == bytes([byte])) for byte in b"\xed\xa1\x80!"
    ]
    assert stream(smollm2_tokenizer, ids) == ["", "", "\ufffd\ufffd\ufffd", "!", ""]
    assert stream(smollm2_tokenizer, ids[:2]) == ["", "", "\ufffd\ufffd"]


@hypothesis_settings
@given(text=st.text(max_size=40))
def test_text_comes_back_without_a_replacement_character(text, byte_tokenizer):
    token_ids = byte_tokenizer.encode(text)
    pieces = stream(byte_tokenizer, token_ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert sum("\ufffd" in piece for piece in pieces) == sum(char == "\ufffd" for char in text)


def test_an_id_of_no_vocabulary_is_refused(byte_tokenizer):
    with pytest.raises(TokenizerError, match="token id 256 is outside the vocabulary"):
        Detokenizer(byte_tokenizer).push([256])


def test_a_flushed_detokenizer_starts_afresh(byte_tokenizer):
    detokenizer = Detokenizer(byte_tokenizer)
    assert [detokenizer.push([0xC3]), detokenizer.flush(), detokenizer.push([0xA9]), detokenizer.flush()] == [
        "",
        "\ufffd",
        "\ufffd",
        "",
    ]


# --- stop strings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", STOPS, ids=lambda row: row["text"])
def test_stop_strings_as_the_golden_rows_say(row, smollm2_tokenizer):
    pieces = stream(smollm2_tokenizer, row["ids"])[:-1]
    assert find(pieces, row["stop"]) == (row["output"], row["matched"], row["tokens_used"])
    assert find(pieces, row["stop"], include_stop=True) == (
        row["include_stop_output"],
        row["matched"],
        row["tokens_used"],
    )


def test_at_equal_places_the_first_of_the_list_counts():
    assert find(["abcd"], ["abcd", "ab"], True) == ("abcd", "abcd", 1)
    assert find(["abcd"], ["ab", "abcd"], True) == ("ab", "ab", 1)
    assert find(["abcd"], ["cd", "bcd"], True) == ("abcd", "bcd", 1), "the earlier place, wherever it is listed"


SMALL_TEXTS = st.lists(st.text("ab", max_size=4), max_size=8)


@hypothesis_settings
@given(pieces=SMALL_TEXTS, stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_shown_is_taken_back_and_nothing_is_lost(pieces, stop):
    """Against a search in the whole text so far, after each piece."""
    finder, shown, text = StopFinder(stop), "", ""
    for piece in pieces:
        text += piece
        shown += finder.push(piece)
        places = [text.find(word) for word in stop if word in text]
        if places:
            assert finder.matched is not None
            assert text.startswith(finder.matched, min(places))
            assert shown == text[: min(places)]
            return
        assert finder.matched is None
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(word.startswith(held) for word in stop), "only what may begin a stop string waits"
    assert shown + finder.flush() == text


# --- public reports ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "token_ids", "deltas"),
    [
        ("case-025", [81, 10813, 242, 218], ["a", "", "", "😀", ""]),
        ("case-026", [143, 233, 5415, 82, 1025, 91, 2756], ["", "ď", "á", "b", "els", "k", "é", ""]),
        ("case-031", [81, 10813, 242], ["a", "", "", "\ufffd"]),
    ],
)
def test_reported_pieces(case, token_ids, deltas, smollm2_tokenizer):
    assert stream(smollm2_tokenizer, token_ids) == deltas


def test_case_022_and_023_control_tokens_are_parsed_only_where_asked(smollm2_tokenizer):
    encode = smollm2_tokenizer.encode
    assert encode("a<|im_end|>b", parse_special=True) == [81, 2, 82]
    assert encode("a<|im_end|>b") == [81, 44, 108, 306, 79, 486, 108, 46, 82]
    assert encode("<|im_start|><|im_end|>") == [44, 108, 306, 79, 3738, 108, 21198, 108, 306, 79, 486, 108, 46]


def test_case_028_the_work_per_token_does_not_grow_with_the_text(byte_tokenizer):
    detokenizer, finder = Detokenizer(byte_tokenizer), StopFinder(["never " * 5])
    start = time.perf_counter()
    for _ in range(20_000):
        finder.push(detokenizer.push([97]))
    assert time.perf_counter() - start < 30, (
        "a guard: hundredths of a second; decoding everything each time takes minutes"
    )


def test_case_029_the_text_behind_a_prompt_is_decoded_and_not_sliced(vocabulary):
    tokenizer = vocabulary("gpt2")
    token_ids = tokenizer.encode("x ∩ y")
    assert len(tokenizer.decode(token_ids)) == 5
    for cut in range(len(token_ids)):  # a prompt may even end inside the sign
        detokenizer = Detokenizer(tokenizer, prompt_token_ids=token_ids[:cut])
        text = detokenizer.push(token_ids[cut:]) + detokenizer.flush()
        assert text and "x ∩ y".endswith(text)


def test_case_030_a_character_behind_garbage_survives(smollm2_tokenizer):
    assert "".join(stream(smollm2_tokenizer, [218, 218, 218, 2756])) == "\ufffd\ufffd\ufffdé"


@pytest.mark.parametrize(
    ("case", "pieces", "stop", "output", "used"),
    [
        ("case-034", ["line", "\n", "next"], ["\n"], "line", 2),
        ("case-035", ["no stop text in it"], ["something rather long that never comes"], "no stop text in it", 1),
        ("case-036", ["a", ",", "b", ",", "c"], ["b,c"], "a,", 5),
    ],
)
def test_reported_stops(case, pieces, stop, output, used):
    assert find(pieces, stop)[::2] == (output, used)


def test_case_037_several_tokens_that_show_the_same_text_all_stop():
    tokenizer = Tokenizer(["T", "x", "<T>"], [], [], "smollm")
    for pieces in (["T"], ["xT"], ["x", "T"]):
        assert find(pieces, ["T"])[1] == "T"
    assert tokenizer.decode([0]) == "T"
