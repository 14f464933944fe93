"""The scheduler's decisions in the record: who got what and why not more, and every block of the pool in one state."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

import tinyllm.trace
from tinyllm import SamplingParams
from tinyllm.request import Request, RequestStatus
from tinyllm.scheduler import ScheduledRequest
from tinyllm.trace.annotate.runs import _phase
from tinyllm.trace.decisions import computes_last_token
from tinyllm.trace.record import BlockSpan
from tinyllm.trace.session import trace_steps
from tinyllm.trace.terminal import WIDTH, Options, render_step
from tinyllm.trace.terminal.blocks import _map_row
from tinyllm.trace.to_json import step_to_json

SCHEMA = json.loads((Path(tinyllm.trace.__file__).parent / "schema.json").read_text("utf-8"))
ABOUT_HITS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5, 9]]
RUNS = {
    "alone": ([[1, 2, 3]], 4, {}),
    "preempting": ([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13]], 6, {"num_blocks": 6, "max_model_len": 16}),
    "preempting itself": ([[1, 2, 3, 4], [5, 6, 7, 8]], 8, {"num_blocks": 4, "max_model_len": 12}),
    "preempting a sharer": ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]], 9,
                            {"num_blocks": 6, "max_model_len": 16}),
    "sharing": (ABOUT_HITS, 3, {}),
    "sharing nothing": (ABOUT_HITS, 3, {"enable_prefix_caching": False}),
    "chunked": ([list(range(1, 12)), [40, 41], [50]], 3, {"max_num_batched_tokens": 4, "max_num_seqs": 2}),
    "thresholds": ([list(range(1, 20)), [40, 41], [60] * 9], 4,
                   {"max_num_batched_tokens": 4, "long_prefill_token_threshold": 3}),
    "crowded": ([[i, i + 1] for i in range(1, 31)], 3, {"num_blocks": 20, "max_model_len": 8}),
    "fragmented": ([[i] * (3 * i) for i in range(1, 9)], 12, {"max_model_len": 64}),
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def steps(request, tiny_llm):
    """The steps of one of RUNS, block size 4."""
    return run(tiny_llm, request.param)


def run(tiny_llm, name: str) -> list:
    prompts, max_tokens, settings = RUNS[name]
    llm = tiny_llm(block_size=4, **{"max_model_len": 32, "num_blocks": 100, **settings})
    requests = llm.make_requests(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    steps = list(trace_steps(llm, requests))
    assert len(steps) >= max_tokens and all(step.requests for step in steps)
    return steps


def text_of(steps, width: int = WIDTH, full: bool = False) -> list[str]:
    pairs = zip(steps, [None, *steps[:-1]], strict=True)
    return ["\n".join(render_step(step, previous, Options(width=width, full=full))) for step, previous in pairs]


# --- laws of every run -------------------------------------------------------------------------------------------------


def test_the_block_map_sums_to_the_pool_and_each_block_has_one_state(steps):
    for step in steps:
        kv, num_blocks = step_to_json(step)["kv"], step.dims["num_blocks"]
        ids = [block_id for span in kv["map"] for block_id in range(span["first"], span["last"] + 1)]
        assert ids == list(range(num_blocks))
        size = {"null": 0, "held": 0, "free": 0, "cached": 0}
        for span in kv["map"]:
            assert (span["state"] == "held") == bool(span["holders"])
            size[span["state"]] += span["last"] - span["first"] + 1
            size["cached"] += (span["last"] - span["first"] + 1) * span["cached"]
        assert size == {
            "null": 1, "held": kv["blocks_used"], "free": kv["blocks_total"] - kv["blocks_used"], "cached": kv["blocks_cached"]
        }  # fmt: skip


def test_the_block_map_agrees_with_the_block_table(steps):
    for step in steps:
        record = step_to_json(step)
        held: dict[str, list[int]] = {}
        for span in record["kv"]["map"]:
            for label in span["holders"]:
                held.setdefault(label, []).extend(range(span["first"], span["last"] + 1))
        table = {r["id"]: sorted(b for b in row if b) for r, row in zip(
            record["requests"], record["batch"]["block_table"], strict=True)}  # fmt: skip
        assert held == table == {r["id"]: sorted(r["blocks"]) for r in record["requests"]}


def test_a_step_s_blocks_follow_from_those_of_the_step_before(steps):
    """Held before, minus freed, plus allocated and found again: held now. Every fact of the events is needed for it."""
    before: set[int] = set()
    for step in steps:
        record = step_to_json(step)
        freed = {*record["kv"]["freed"], *(b for p in record["scheduler"]["preemptions"] for b in p["freed"])}
        taken = {b for ids in record["kv"]["allocated"].values() for b in ids}
        hits = {b for r in record["requests"] if r["hit"] for b in r["hit"]["blocks"]}
        now = {
            b for span in record["kv"]["map"] if span["state"] == "held" for b in range(span["first"], span["last"] + 1)
        }
        assert (before - freed) | taken | hits == now
        assert freed <= before and set(record["kv"]["evicted"]) <= taken
        before = now


def test_a_request_s_numbers_agree(steps):
    ends: dict[str, int] = {}  # where each running request's tokens end
    for step in steps:
        record = step_to_json(step)
        block_size = record["dims"]["bs"]
        for label in record["scheduler"]["preempted"]:
            ends.pop(label)
        for request, sample in zip(record["requests"], record["sampling"], strict=True):
            assert (request["num_new"] < request["num_left"]) == (request["cut_by"] != "") == (not sample["kept"])
            hit_tokens = request["hit"]["tokens"] if request["hit"] else 0
            assert (request["started_as"] == "running") == (request["id"] in ends)
            assert request["num_computed"] == ends.get(request["id"], hit_tokens)
            ends[request["id"]] = request["kv_len"]
            num_blocks = -(-request["kv_len"] // block_size)
            assert num_blocks == len(request["blocks"])
            assert request["num_in_last_block"] == request["kv_len"] - (num_blocks - 1) * block_size
            if sample["kept"]:
                assert sample["appended"]["position"] == request["kv_len"]


def test_a_new_block_comes_exactly_when_the_appended_token_was_said_to_need_one(steps):
    needs: dict[str, bool] = {}
    for step in steps:
        record = step_to_json(step)
        for label in record["scheduler"]["preempted"]:
            needs.pop(label)
        for request, sample in zip(record["requests"], record["sampling"], strict=True):
            if request["id"] in needs:
                assert bool(record["kv"]["allocated"].get(request["id"])) == needs.pop(request["id"])
            if sample["kept"] and request["state"] == "finished":
                assert sample["appended"]["kv"] == "never" and sample["appended"]["block"] is None
            elif sample["kept"]:
                assert sample["appended"]["kv"] == "later"
                needs[request["id"]] = sample["appended"]["block"] is None
                assert needs[request["id"]] or sample["appended"]["block"] == request["blocks"][-1]


def test_the_json_follows_the_schema(steps):
    for step in steps:
        jsonschema.validate(json.loads(json.dumps(step_to_json(step))), SCHEMA)


def test_the_text_fits_and_tells_nothing_that_the_json_does_not_hold(steps):
    for step, text in zip(steps, text_of(steps), strict=True):
        scheduler = step_to_json(step)["scheduler"]
        assert all(len(line) <= WIDTH and line.isascii() and line == line.rstrip() for line in text.splitlines())
        assert re.findall(r"^P preempt (\w+)", text, re.M) == scheduler["preempted"]
        assert re.findall(r"^P held back (\w+) +(.*?)(?: \(\d+ more .*)?$", text, re.M) == [
            (label, scheduler["held_back"]) for label in scheduler["waiting"][:1]
        ]
        for name, facts in {
            "freed": scheduler["finished"], "evicted": step.schedule.evicted_block_ids,
            "chunk": [r for r in step.requests if r.cut_by], "prefix hit": [r for r in step.requests if r.hit],
        }.items():  # fmt: skip
            assert bool(re.search(rf"^P {name} ", text, re.M)) == bool(facts), name


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_text_fits_other_widths(steps, width):
    for text in text_of(steps, width):
        assert all(len(line) <= width and line.isascii() and line == line.rstrip() for line in text.splitlines())


# --- what the runs are made to show ------------------------------------------------------------------------------------


def rows(text: str, name: str) -> list[str]:
    return [re.sub(" {2,}", "  ", line) for line in text.splitlines() if line.startswith(f"P {name}")]


def test_a_plain_run_says_nothing_that_is_a_matter_of_course(tiny_llm):
    first, *others = text_of(run(tiny_llm, "alone"))
    usual = ["schedule", "token_ids", "cu_seqlens_q", "seq_lens", "block_table", "slot_mapping", "block map", "sampled"]
    assert re.findall(r"^P (block map|kv bytes|\w+)", first, re.M) == usual
    assert [re.findall(r"^P (block map|\w+)", text, re.M).count("block map") for text in others] == [0, 1, 0]
    first, *others = text_of(run(tiny_llm, "alone"), full=True)
    usual = ["schedule", "token_ids", "positions", "cu_seqlens_q", "seq_lens", "block_table", "slot_mapping",
             "logits_indices", "block map", "kv bytes", "sampled", "append"]  # fmt: skip
    assert re.findall(r"^P (block map|kv bytes|\w+)", first, re.M) == usual
    assert rows(first, "append") == ["P append  A at 3  no KV yet: A has room in block 1"]
    assert rows(others[0], "append") == ["P append  A at 4  no KV yet: A needs a new block"]
    assert rows(others[-1], "append") == ["P append  A at 6  the last one: no step computes its KV"]


def test_who_was_preempted_by_whom_and_how_it_came_back(tiny_llm):
    steps = run(tiny_llm, "preempting")
    records, texts = [step_to_json(step) for step in steps], text_of(steps)
    assert [record["scheduler"]["preempted"] for record in records] == [[], [], [], [], ["B"], [], [], []]
    assert records[4]["scheduler"]["preemptions"] == [
        {"id": "B", "for": "A", "blocks": [3, 4, 5], "freed": [3, 4, 5], "num_tokens": 12}
    ]
    assert rows(texts[4], "preempt") == [
        "P preempt B  for A, which needs blocks  blocks [3,4,5] freed; 12 tokens start over"
    ]
    assert rows(texts[4], "held back")[0].startswith("P held back B  blocks are short: a running request was preempted")
    assert rows(texts[5], "held back") == ["P held back B  blocks are short: it needs 3, free are 2"]
    assert rows(texts[6], "freed") == ["P freed  A ended in step 5  blocks [5,2,1] came back"]
    assert rows(texts[6], "schedule") == ["P schedule  B resumed +4  token budget 4/2048, blocks used 3/5"]
    assert rows(texts[6], "prefix hit") == [
        "P prefix hit B  2 blocks, 8 tokens  [3,4] its own from before: read, not computed"
    ]
    assert records[6]["requests"][0]["hit"] == {"blocks": [3, 4], "tokens": 8, "computed_by": ["B"]}
    assert (records[6]["phase"], records[7]["phase"]) == ("prefill", "decode"), "recomputing is no decode step"
    assert rows(texts[7], "evicted") == ["P evicted  1 cached block  [2] given to new tokens, no longer found"]


def test_the_last_in_line_preempts_itself(tiny_llm):
    steps = run(tiny_llm, "preempting itself")
    (preempted,) = [p for step in steps for p in step.schedule.preempted]
    assert (preempted.label, preempted.for_label) == ("B", "B")
    assert any("P preempt B      no block is left for it " in text for text in text_of(steps))


def test_a_preempted_request_frees_what_nobody_else_holds(tiny_llm):
    steps = run(tiny_llm, "preempting a sharer")
    preempted = [p for step in steps for p in step.schedule.preempted]
    sharers = [p for p in preempted if len(p.freed_block_ids) < len(p.block_ids)]
    assert sharers and all(1 in p.block_ids and 1 not in p.freed_block_ids for p in sharers)
    assert re.search(r"^P preempt C .* freed, 1 shared; ", "\n".join(text_of(steps)), re.M)


def test_shared_blocks_are_named_after_who_computed_them(tiny_llm):
    steps = run(tiny_llm, "sharing")
    text = text_of(steps)[0]
    assert rows(text, "prefix hit") == [
        "P prefix hit B  1 block, 4 tokens  [1] A's block: read, not computed",
        "P prefix hit C  1 block, 4 tokens  [1] A's block: read, not computed",
    ]
    assert rows(text, "schedule")[0].startswith("P schedule  A new +5, B new +1, C new +2 ")
    assert rows(text, "block map") == [
        "P block map  1 null+4 held+95 free=100  0 null  1 A+B+C  2 A  3 B  4 C | free 5..99"
    ]
    assert not any(r.hit for step in run(tiny_llm, "sharing nothing") for r in step.requests)


def test_a_block_of_an_earlier_run_has_no_label(tiny_llm):
    llm = tiny_llm(block_size=4)
    llm.generate([[1, 2, 3, 4, 5], [9]])
    steps = list(trace_steps(llm, llm.make_requests([[1, 2, 3, 4, 6]], SamplingParams(max_tokens=1))))
    (request,) = steps[0].requests
    assert request.hit and request.hit.computed_by == (None,)
    assert steps[0].schedule.finished == () == steps[0].schedule.freed_block_ids, "what was before is not told"
    assert rows(text_of(steps)[0], "prefix hit")[0].endswith("[1] cached before this trace: read, not computed")


def test_chunks_say_what_cut_them_and_what_waits_why(tiny_llm):
    texts = text_of(run(tiny_llm, "chunked"))
    assert rows(texts[0], "chunk") == ["P chunk A  4 of the 11 tokens left  cut by the token budget; 7 left for later"]
    assert rows(texts[0], "held back") == ["P held back B  the token budget is spent (1 more behind it)"]
    assert [rows(text, "chunk A") == [] for text in texts[:4]] == [False, False, True, True]
    assert any("held back C    max_num_seqs 2 run already" in text for text in texts)
    assert any("cut by the long-prefill threshold" in text for text in text_of(run(tiny_llm, "thresholds")))


def test_many_requests_are_counted_where_they_cannot_be_listed(tiny_llm):
    steps = run(tiny_llm, "crowded")
    text = "\n".join(text_of(steps))
    assert re.search(r"^P schedule +19 new +token budget", text, re.M)
    assert re.search(r"^  \| 34 others +gather_kv, attend of 17 requests more +", text, re.M)
    assert re.search(r"^P append +19 tokens +no KV yet: 19 have room$", "\n".join(text_of(steps, full=True)), re.M)
    assert re.search(r"^P freed +19 requests ended in step 2 +blocks \[\d+,.*\] came back$", text, re.M)
    assert re.search(r"^P held back T +blocks are short: it needs 1, free are 0 \(10 more behind it\)$", text, re.M)
    assert re.search(r"^P block map +1 null\+19 held\+0 free=20 +held by 19 requests$", text, re.M)


@pytest.mark.parametrize(
    ("started_as", "num_computed", "num_new", "is_decode"),
    [
        (RequestStatus.RUNNING, 6, 1, True),
        (RequestStatus.RUNNING, 3, 1, False),  # a chunk of one token of its prompt
        (RequestStatus.RUNNING, 5, 1, False),  # of two tokens left the budget leaves one
        (RequestStatus.PREEMPTED, 6, 1, False),  # it comes back, and its last token is all that the cache lacks
        (RequestStatus.PREEMPTED, 4, 3, False),
        (RequestStatus.WAITING, 0, 4, False),
    ],
)
def test_a_request_decodes_where_it_computes_the_token_that_it_sampled_last(
    started_as, num_computed, num_new, is_decode
):
    """Of a request with 4 prompt tokens and 3 sampled ones; for --annotate and for the record alike."""
    request = Request("A", [1, 2, 3, 4], SamplingParams(max_tokens=9))
    request.token_ids.extend([5, 6, 7])
    entry = ScheduledRequest(request, tuple(request.token_ids[num_computed : num_computed + num_new]), num_computed,
                             (1, 2), (), samples=num_computed + num_new == 7, started_as=started_as)  # fmt: skip
    assert computes_last_token(entry) == is_decode
    assert _phase(SimpleNamespace(scheduled=[entry])) == ("decode" if is_decode else "prefill")  # type: ignore[arg-type]


# --- the map's text ----------------------------------------------------------------------------------------------------


def test_a_large_pool_folds_into_one_row():
    spans = [BlockSpan(0, 0, "null", (), False), BlockSpan(1, 300, "held", ("A",), True),
             BlockSpan(301, 301, "held", ("A",), False), BlockSpan(302, 340, "free", (), True),
             BlockSpan(341, 499, "free", (), False)]  # fmt: skip
    assert _map_row(spans, Options()) == (
        "P block map      1 null+301 held+198 free=500  0 null  1..301 A | free 302..499 (cached 302..340)"
    )


def test_a_fragmented_pool_is_counted():
    held = [BlockSpan(i, i, "held", (("A", "B"), ("A",), ("B",))[i % 3], False) for i in range(1, 100)]
    row = _map_row([BlockSpan(0, 0, "null", (), False), *held, BlockSpan(100, 200, "free", (), False)], Options())
    assert row == "P block map      1 null+99 held+101 free=201   A 33  B 33  shared 33 | free 100..200"
