"""The words between the shapes: columns, roles, remarks and the engine's events."""

import pytest

from tinyllm import SamplingParams
from tinyllm.trace.session import trace_steps
from tinyllm.trace.text import show_pieces


@pytest.mark.parametrize(
    "word",
    ["FLOP", "FLOPs", "BYTE", "F/B", "BYTE/token", "e", "Hin", "Hout", "ridge", "bound", "us", "pairs", "result",
     "argument", "local", "weight", "view", "prefill", "decode", "mixed", "chunk", "preempt", "evicted", "freed",
     "resumed", "new", "ledger", "append", "greedy", "A", "B", "rms", "others", "memory-bound", "view of q",
     "preempt B", "prefix hit", "prefix hit B", "null block", "block map", "kv bytes", "residual rms", "as before",
     "13 as before", "held back", "held back B", "not contiguous", "token budget 13/2048"],
)  # fmt: skip
def test_what_stands_between_the_shapes_is_explained(word, pair, meanings, has_parts):
    """Columns, roles and remarks: at least what it is, why, and where in the code."""
    for step in (None, pair[0]):
        assert all(has_parts(meaning, "is", "code") for meaning in meanings(word, step))
    assert any(has_parts(meaning, "why") for meaning in meanings(word))


def test_a_token_may_be_a_piece_of_a_character(meanings, smollm2_tokenizer):
    """What the trace prints of an emoji that is cut: its bytes, as the explanation says."""
    pieces = [smollm2_tokenizer.token_text(token_id) for token_id in smollm2_tokenizer.encode("\N{ROCKET}")]
    assert len(pieces) == 3 and show_pieces(pieces) == r"\xf0\x9f|\x9a|\x80"
    (meaning,) = meanings("bpe")
    assert " ".join(meaning["care"]).startswith(
        "a token may be a piece of a character's bytes: an emoji of four bytes may"
    )


def test_e_is_told_from_the_kind(meanings):
    assert meanings("e")[0][""][0].startswith("e: a word of the trace")
    assert meanings("E")[0][""][0].startswith("E: a kind of row")
    assert meanings("m")[0][""][0].startswith("memory-bound") and meanings("M")[0][""][0].startswith("M: a kind of row")


@pytest.mark.parametrize(
    ("word", "index", "said"),
    [
        ("prefill", 0, "step 0 is a prefill: A prefills 5 tokens, B prefills 3 tokens"),
        ("decode", 1, "step 1 is a decode: A decodes, B decodes"),
        ("block map", 0, "1 null + 3 held + 5 free = 9 blocks"),
        ("token budget", 1, "2 of 2048 tokens are used"),
        ("kv bytes", 0, "2 * num_layers * kv_size * 4 bytes = 2*2*32*4 = 512 bytes a token"),
        ("append", 0, "A at 5, B at 3"),
        ("chunk", 0, "no prompt is cut in this step"),
        ("prefix hit", 0, "no request found any in this step"),
    ],
)
def test_terms_in_numbers(pair, word, index, said, meanings):
    assert meanings(word, pair[index])[0]["here"] == [said]


def test_a_step_with_a_cut_prompt_and_one_that_waits(traced, tiny_llm, one):
    """A chunk, a request that must wait, and tokens found in the cache."""
    first = traced[1][0]
    assert one("R", "R: num_reqs", first)["here"] == ["R = 1: A; B must wait"]
    assert one("token budget", "token budget", first)["here"] == ["4 of 4 tokens are used; A was cut by it"]
    assert one("chunk", "chunk", first)["here"] == ["A computes 4 of 5 left"]
    llm = tiny_llm("llama_gqa", block_size=2, max_model_len=32)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    steps = list(trace_steps(llm, llm.make_requests([[5, 6, 7, 8, 9], [5, 6, 7, 8, 11]], params)))
    assert one("S", "S: seq_len", steps[0])["here"][1] == (
        "S = 5 for B: 4 found in the cache + 0 computed before + 1 in this step"
    )
    assert one("s", "s: query_len", steps[0])["here"][1] == "s = 1 for B: all 1 left to compute, 4 found in the cache"
    assert one("prefix hit", "prefix hit", steps[0])["here"] == ["B found 4 tokens"]
