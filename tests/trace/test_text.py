"""Numbers, lists and texts that fit their columns."""

from itertools import pairwise

import pytest

from tinyllm.trace.text import cut_to, elide, fold_words, show_count, show_list, show_number, show_runs


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (14_400_000, "14.4M"),
        (999_499, "999k"),
        (999_500, "1.00M"),
        (5e15, "5000T"),
    ],
)
def test_numbers_keep_three_digits(value, text):
    assert show_number(value) == text


def test_lists_and_runs():
    assert show_list([1, 2]) == "[1,2]"
    assert show_list(range(20)) == "[0,1,2,3,4,...,18,19]"
    assert show_list([[1, 2], list(range(9))]) == "[[1,2],[0,1,2,3,4,...,7,8]]"
    assert [show_count(count, "slot") for count in (0, 1, 2)] == ["0 slots", "1 slot", "2 slots"]
    assert show_runs([4, 5, 6, 12, 20, 21]) == "4..6,12,20..21"
    assert cut_to("abcdefgh", 6) == "abc..."


def test_texts_fold_between_words_and_lists_leave_out_their_middle():
    assert list(fold_words("dims   ", ["a=1 b", "c=2 d", "e" * 30], 20)) == [
        "dims   a=1 b  c=2 d",
        "       eeeeeeeeee...",
    ]
    assert elide(list("abcdefghij"), 11, " ") == "a b ... i j"
    assert elide(list("abcd"), 7, " ") == "a b c d"
    widths = [len(show_list(range(1000), width)) for width in range(30, 60)]
    assert all(size <= width for size, width in zip(widths, range(30, 60), strict=True))
    assert all(0 <= later - size <= 5 for size, later in pairwise(widths))
