"""Sizes, shapes and values are those of the step that is asked about."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace.explain import explain, explainable
from tinyllm.trace.explain.sources import tensor_functions
from tinyllm.trace.record import to_symbol

SPECS = tensor_functions()


def sizes_said(lines: list[str]) -> Iterator[tuple[str, int]]:
    """(word, size) of every ``T = 8: num_tokens, ...`` and ``q_size = num_heads*head_dim = 4*16 = 64``."""
    for line in lines:
        if match := re.match(r" *(?:why +)?(\S+) = (\d+): ([\w+]+),", line):
            assert to_symbol(match[3]) == match[1]
            yield match[3], int(match[2])
        for match in re.finditer(r"\b([a-z_]+) = .* = (\d+)$", line):
            if match[1] in WORDS:
                yield match[1], int(match[2])


def test_numbers_are_those_of_the_step(traced):
    _, steps = traced
    said = [
        (word, size, step) for step in steps for name in explainable() for word, size in sizes_said(explain(name, step))
    ]
    assert {word for word, _, _ in said} >= {
        "num_tokens",
        "num_reqs+1",
        "q_size",
        "qkv_size",
        "vocab_size",
        "max_blocks",
    }
    assert [(word, size) for word, size, step in said if evaluate(word, step.dims) != size] == []


def test_each_request_s_numbers(traced, meanings):
    _, steps = traced
    for step in steps:
        for name, attribute in (("query_len", "query_len"), ("seq_len", "seq_len")):
            expected = [f"{to_symbol(name)} = {getattr(r, attribute)} for {r.label}" for r in step.requests]
            assert [line.partition(":")[0] for line in meanings(name, step)[0]["here"]] == expected


def test_shapes_are_those_of_the_rows(traced):
    """Every tensor of every row in a layer's first occurrence is shown under its name with its shape."""
    _, steps = traced
    checked = 0
    for step in steps:
        for operation in step.layer(None) + step.layer(1):
            spec = next(s for s in SPECS if s.qualname == operation.function and str(s.first_line) in operation.source)
            for name, tensor in operation.tensors.items():
                if name in spec.locals:
                    row = operation.label + (f" {operation.request}" if operation.request else "")
                    text = " ".join(explain(name, step))
                    assert f"{row} [{','.join(map(str, tensor.shape))}]" in text
                    checked += 1
    assert checked > 50


def test_batch_tensors_show_their_values(traced, one):
    _, steps = traced
    for step in steps:
        meaning = one("cu_seqlens_q", "cu_seqlens_q", step)
        ends = ",".join(map(str, step.batch_values["cu_seqlens_q"]))
        assert meaning["here"][0] == f"[R+1]=[{len(step.requests) + 1}] = [{ends}]"
        assert meaning["here"][-1].startswith(f"R+1 = {len(step.requests) + 1}: {len(step.requests)} + 1, an end")


@pytest.mark.parametrize(
    ("word", "index", "said"),
    [
        ("T", 0, ["T = 8 = 5 + 3: A computes 5 tokens, B 3"]),
        ("T", 1, ["T = 2 = 1 + 1: A computes 1 token, B 1"]),
        ("R", 0, ["R = 2: A, B"]),
        ("N", 0, ["N = 2: the last row of each request, A's is 4, B's is 7"]),
        ("MB", 0, ["MB = 2: A holds 2 blocks, B 1, for 5, 3 tokens in blocks of 4"]),
        ("s", 0, ["s = 5 for A: all 5 tokens of its prompt", "s = 3 for B: all 3 tokens of its prompt"]),
        ("NB", 0, ["NB = 9 = 1 null + 3 held + 5 free"]),
        ("s", 1, ["s = 1 for A: the token that it sampled last, behind 5 computed before",
                  "s = 1 for B: the token that it sampled last, behind 3 computed before"]),
        ("S", 1, ["S = 6 for A: 5 computed before + 1 in this step",
                  "S = 4 for B: 3 computed before + 1 in this step"]),
        ("nb", 0, ["nb = 2 for A: 5 tokens / 4 slots, rounded up; its blocks are 1, 2",
                   "nb = 1 for B: 3 tokens / 4 slots, rounded up; its blocks are 3"]),
        ("g", 0, ["g = 2: group_size = num_heads / num_kv_heads = 4 / 2 = 2"]),
        ("qkv", 0, ["qkv = 128: qkv_size = q_size + 2*kv_size = 64 + 2*32 = 128",
                    "with q_size = num_heads*head_dim = 4*16 = 64",
                    "with kv_size = num_kv_heads*head_dim = 2*16 = 32"]),
        ("ban", 0, ["ban = 0: no id that min_tokens forbids"]),
        ("heads", 0, ["h = 8 in split_heads", "h = 4 in rope q, the caller's num_heads",
                      "h = 2 in rope k, the caller's num_kv_heads"]),
        ("scores", 0, ["attend A [2,2,5,5]", "attend B [2,2,3,3]"]),
        ("seq_lens", 1, ["[R]=[2] = [6,4]", "A 5 before + 1 now, B 3 before + 1 now",
                         "6 + 4 = 10 keys are read by T = 2 rows"]),
        ("cu_seqlens_q", 0, ["[R+1]=[3] = [0,5,8]", "A has rows 0..4, B has rows 5..7",
                             "0 where the first begins, then each one's end: 0 + 5 = 5, 5 + 3 = 8",
                             "R+1 = 3: 2 + 1, an end for each request and the first begin"]),
        ("slot_mapping", 0, ["[T]=[8] = [4,5,6,7,8,12,13,14]",
                             "A writes 4..8: its last, position 4, is place 0 of block 2, 2 * 4 + 0 = 8",
                             "B writes 12..14: its last, position 2, is place 2 of block 3, 3 * 4 + 2 = 14"]),
        ("block_table", 0, ["[R,MB]=[2,2] = [[1,2],[3,0]]", "A: 5 tokens need 2 blocks of 4 slots",
                            "B: 3 tokens need 1 block of 4 slots, and 1 x padding"]),
        ("positions", 1, ["[T]=[2] = [5,3]", "A stands at 5, B stands at 3"]),
        ("logits_indices", 0, ["[N]=[2] = [4,7]",
                               "A's rows end before 5, so its last is 4, B's rows end before 8, so its last is 7"]),
        ("pairs", 0, ["A 15 of 25, B 6 of 9"]),
        ("qkv_proj", 0, ["qkv_proj [8,64]@[64,128] -> [8,128], 2 times"]),
    ],
)  # fmt: skip
def test_reasons_in_numbers(pair, word, index, said, meanings):
    assert meanings(word, pair[index])[0]["here"] == said


@pytest.mark.parametrize(
    ("row", "slot", "said"),
    [
        (
            3,
            9,
            "A writes 4..6, 9, 8: position 3 is place 3 of block 1, 1 * 4 + 3 = 7, but slot_mapping says 9: it is wrong",
        ),
        (
            4,
            12,
            "A writes 4..7, 12: position 4 is place 0 of block 2, 2 * 4 + 0 = 8, but slot_mapping says 12: it is wrong",
        ),
    ],
)
def test_a_wrong_slot_is_not_explained_as_right(pair, row, slot, said, meanings):
    slots = list(pair[0].batch_values["slot_mapping"])
    slots[row] = slot
    step = replace(pair[0], batch_values={**pair[0].batch_values, "slot_mapping": slots})
    here = " ".join(meanings("slot_mapping", step)[0]["here"])
    assert said in here and here.count("it is wrong") == 1
    assert "it is wrong" not in " ".join(meanings("slot_mapping", pair[0])[0]["here"])


def test_a_budget_that_cuts_a_prompt_is_named(traced):
    _, steps = traced
    assert "s = 4 for A: 4 of 5 left to compute, cut by the token budget" in " ".join(explain("s", steps[0]))
