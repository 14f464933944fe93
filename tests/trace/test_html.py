"""The page: one self-contained file, everything escaped, and pictures whose numbers are the record's."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from math import dist, prod

import pytest

from tinyllm import LLM, SamplingParams
from tinyllm.trace.decisions import request_label
from tinyllm.trace.html import render_fragment, render_page
from tinyllm.trace.html.blocks import MAX_BLOCKS
from tinyllm.trace.html.boxes import LONGEST
from tinyllm.trace.html.fold import fold_layers, fold_requests
from tinyllm.trace.html.roofline import NEAREST
from tinyllm.trace.html.words import shorten, show_token
from tinyllm.trace.record import AnswerRecord, Candidate, PromptRecord, RunRecord
from tinyllm.trace.session import trace_steps
from tinyllm.trace.terminal.text import show_number

HOSTILE = "</script><svg onload=alert(1)>\"'&amp;\u202e\ud800\n\x00"
VOID = {"meta", "br", "col"}
RIDGE = 2.0


# ---- a run and a page as a tree ----------------------------------------------------------------------------------------


def record_run(llm: LLM, prompts: list[str], max_tokens: int) -> RunRecord:
    requests = llm.make_requests(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    steps = tuple(trace_steps(llm, requests))
    answers = enumerate(map(llm.completion, requests))
    words = [[word.token_ids for word in llm.tokenizer.encode_words(prompt)] for prompt in prompts]
    text = llm.tokenizer.token_text
    return RunRecord(
        model=llm.loaded.path.name, dtype="float32", attention=llm.loaded.attention,
        kv_shape=tuple(llm.engine.kv_cache.kv.shape), kv_bytes=llm.engine.kv_cache.num_bytes,
        dims={**llm.loaded.config.dims(), **llm.engine.cache_config.dims()},
        prompts=tuple(
            PromptRecord(request_label(i), prompt, tuple(tuple(map(text, ids)) for ids in words[i]))
            for i, prompt in enumerate(prompts)
        ),
        steps=steps,
        answers=tuple(
            AnswerRecord(request_label(i), c.text, tuple(c.token_ids), str(c.finish_reason), c.seed) for i, c in answers
        ),
    )  # fmt: skip


SETTINGS = {
    "chunked": {"max_num_batched_tokens": 4, "num_blocks": 33, "max_model_len": 32},
    "preempted": {"num_blocks": 7, "max_model_len": 12},
    "large pool": {"num_blocks": 300, "max_model_len": 64},
}


@pytest.fixture(scope="module", params=SETTINGS)
def run(request, tiny_llm) -> RunRecord:
    """Two prompts of a tiny model that share a block; a cut prefill, a preemption, a pool drawn span by span."""
    llm = tiny_llm("llama_gqa", "reference", block_size=2, max_num_seqs=4, **SETTINGS[request.param])
    return record_run(llm, ["abc<d", "abxy"], 4)


@pytest.fixture(scope="module")
def default_run(smollm2) -> RunRecord:
    """Eight steps of the default model, of which seven are the same decode step."""
    llm = LLM(smollm2, block_size=4, num_blocks=9, max_model_len=32)
    run = record_run(llm, ["The capital of France is", "Water boils at 100 degrees"], 2)
    return replace(run, steps=(run.steps[0], *(replace(run.steps[1], index=i) for i in range(1, 8))))


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    children: list["Node | str"] = field(default_factory=list)

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def find(self, tag: str, class_: str = "", **attributes: str) -> list["Node"]:
        wanted = {f"data-{key.replace('_', '-')}": value for key, value in attributes.items()}
        return [
            node for node in self.walk()
            if node.tag == tag and (not class_ or class_ in (node.attributes.get("class") or "").split())
            and all(node.attributes.get(key) == value for key, value in wanted.items())
        ]  # fmt: skip

    def with_data(self, name: str) -> list["Node"]:
        return [node for node in self.walk() if f"data-{name}" in node.attributes]

    def data(self, name: str) -> str:
        return self.attributes[f"data-{name}"] or ""

    def number(self, name: str) -> float:
        return float(self.attributes[name] or "nan")

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class TreeBuilder(HTMLParser):
    """Builds the tree and insists that each element is closed where it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Node("root", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag} {attrs}"
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(text: str) -> Node:
    builder = TreeBuilder()
    builder.feed(text)
    builder.close()
    assert builder.open == [builder.root]
    return builder.root


@pytest.fixture(scope="module")
def page(run) -> Node:
    return parse(render_page(run, RIDGE))


def rows_of(table: Node) -> list[Node]:
    """The lines of the first table, without those of a table within a line."""
    return [child for child in table.find("tbody")[0].children if isinstance(child, Node)]


def picture(page: Node, title: str) -> Node:
    [found] = [svg for svg in page.find("svg") if svg.find("title")[0].text == title]
    return found


# ---- the file ----------------------------------------------------------------------------------------------------------


def assert_self_contained(text: str) -> None:
    tree = parse(text)
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & {node.tag for node in tree.walk()}
    for node in tree.walk():
        assert all(not name.startswith("on") and name not in ("src", "srcset", "style") for name in node.attributes)
        assert (node.attributes.get("href") or "#").startswith("#")


def test_the_page_needs_nothing_but_itself(run):
    for text in (render_page(run, RIDGE), render_fragment(run)):
        assert_self_contained(text)
        text.encode()


def test_a_page_has_landmarks_and_headings_in_order(page):
    assert page.find("html")[0].attributes["lang"] == "en"
    assert all(len(page.find(tag)) == 1 for tag in ("h1", "main", "header", "footer", "nav"))
    ids = [node.attributes["id"] for node in page.walk() if "id" in node.attributes]
    links = [node.attributes["href"] for node in page.find("a")]
    assert len(set(ids)) == len(ids) and {link[1:] for link in links if link} <= set(ids)
    assert page.find("a")[0].text == "Skip to the steps"
    levels = [int(node.tag[1]) for node in page.walk() if re.fullmatch("h[1-6]", node.tag)]
    assert levels[0] == 1 and all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_pictures_and_tables_speak(page, crowd):
    for tree in (page, parse(render_page(crowd, RIDGE))):
        assert_speaks(tree)


def assert_speaks(page: Node) -> None:
    for svg in page.find("svg"):
        assert svg.attributes["role"] == "img"
        assert all(len(svg.find(tag)) == 1 and svg.find(tag)[0].text for tag in ("title", "desc"))
    for figure in page.find("figure"):
        assert figure.find("figcaption")[0].text
    for table in page.find("table"):
        assert table.find("caption")[0].text
        assert all(node.attributes["scope"] in ("col", "row") for node in table.find("th"))
        assert all(row.find("th")[0].attributes["scope"] == "row" for row in rows_of(table))
    for box in page.find("div", "scroll"):
        assert box.attributes["tabindex"] == "0" and box.attributes["aria-label"]
    assert all(
        isinstance(node.children[0], Node) and node.children[0].tag == "summary" for node in page.find("details")
    )


def make_hostile(run: RunRecord) -> RunRecord:
    token = Candidate(5, HOSTILE, 0.5)
    steps = [
        replace(
            step,
            requests=tuple(replace(r, chosen=token, candidates=(token,), method=HOSTILE) for r in step.requests),
            operations=tuple(replace(op, summary=HOSTILE, label=HOSTILE) for op in step.operations),
            schedule=replace(step.schedule, waiting=("A",), held_back=HOSTILE),
        )
        for step in run.steps
    ]
    prompts = tuple(replace(prompt, text=HOSTILE, words=((HOSTILE,) * 9,)) for prompt in run.prompts)
    answers = tuple(replace(answer, text=HOSTILE, finish_reason=HOSTILE) for answer in run.answers)
    return replace(run, model=HOSTILE, attention=HOSTILE, prompts=prompts, answers=answers, steps=tuple(steps))


def test_hostile_texts_stay_texts(run):
    hostile = make_hostile(replace(run, steps=run.steps[:2]))
    for text in (render_page(hostile, RIDGE), render_fragment(hostile)):
        tree = parse(text.encode(errors="replace").decode())
        assert "script" not in {node.tag for node in tree.walk()} and "<svg onload" not in text
        assert all(not name.startswith("on") for node in tree.walk() for name in node.attributes)
        assert show_token(HOSTILE) in tree.text
    assert show_token(HOSTILE).startswith("</script><svg␣onload") and show_token(HOSTILE).isprintable()
    render_page(hostile).encode()  # a lone surrogate anywhere would raise


def test_the_style_of_a_fragment_stays_inside_it(run):
    fragment = parse(render_fragment(run))
    style = re.sub(r"@media[^{]*\{(.*?\})\s*\}", r"\1", fragment.find("style")[0].text)
    selectors = [selector for rule in re.findall(r"([^{}]+)\{", style) for selector in rule.split(",")]
    assert len(selectors) > 80 and all(selector.strip().startswith(".tinyllm") for selector in selectors)
    assert not any("id" in node.attributes for node in fragment.walk())
    assert "prefers-color-scheme:dark" in fragment.find("style")[0].text


def test_sizes(default_run):
    page = render_page(default_run, 12.0)
    assert len(default_run.steps) == 8 and default_run.dims["num_layers"] == 30
    assert len(page.encode()) < 700_000
    assert len(render_fragment(replace(default_run, steps=default_run.steps[:2])).encode()) < 130_000
    names = [node.find("strong")[0].text for node in parse(page).find("details", "layers")]
    assert names == ["before the layers", "layer 0", "layers 1 to 29, all alike", "after the layers"] * 8


TEXTS = [
    "The capital of France is",
    "Water boils at 100 degrees",
    "2 + 2 =",
    "Hello",
    "def add(a, b):",
    "A haiku about rain in autumn and the sound of the river:",
    "Once upon a time, in a land far away,",
    "Name three planets of the solar system and say which one is the largest of them.",
    "The opposite of hot is",
]


@pytest.fixture(scope="module", params=[9, 16])
def crowd(request, smollm2) -> RunRecord:
    """Two steps of the default model with many requests of different lengths, some of which share a block."""
    texts = [TEXTS[i % len(TEXTS)] + " and more" * (i // len(TEXTS) + 4 * (i % 5)) for i in range(request.param)]
    run = record_run(LLM(smollm2), texts, 2)
    assert [len(step.requests) for step in run.steps] == [request.param] * 2
    assert len(set(run.steps[0].batch_values["seq_lens"])) > 7
    return run


def test_sizes_with_many_requests(crowd):
    fragment = render_fragment(crowd)
    assert len(fragment.encode()) < 200_000
    assert_self_contained(fragment)
    eight = replace(crowd, steps=(crowd.steps[0], *(replace(crowd.steps[1], index=i) for i in range(1, 8))))
    assert len(render_page(eight, 12.0).encode()) < 1_500_000


def test_rows_of_many_requests_are_one_line_with_each_share(crowd):
    step = crowd.steps[0]
    table = parse(render_fragment(crowd)).find("details", "layers")[1]
    folded = [line for line in rows_of(table) if "data-requests" in line.attributes]
    first, last = step.requests[0].label, step.requests[-1].label
    assert [line.find("th")[0].text for line in folded] == [
        f"{name} {first}…{last}" for name in ("gather_kv", "attend")
    ]
    for line, name in zip(folded, ("gather_kv", "attend"), strict=True):
        calls = [op for op in step.layer(0) if op.label == name]
        flops, num_bytes = (int(data.attributes["value"] or -1) for data in line.find("data"))
        assert (flops, num_bytes) == (sum(op.flops or 0 for op in calls), sum(op.num_bytes for op in calls))
        [shares] = line.find("table", "shares")
        heads = [head.text for head in shares.find("thead")[0].find("th")]
        assert heads[0] == "request" and "S" in heads and heads[-1] == "bytes"
        cells = [[cell.text for cell in share.children if isinstance(cell, Node)] for share in rows_of(shares)]
        assert [row[0] for row in cells] == [request.label for request in step.requests]
        assert [row[heads.index("S")] for row in cells] == [str(request.seq_len) for request in step.requests]
        assert [row[-1] for row in cells] == [show_number(op.num_bytes) for op in calls]
    low, high = (pick(request.query_len for request in step.requests) for pick in (min, max))
    assert f"[s,nq,d].[S,nk,d] → [s,nq,d] [{low}–{high},9,64]." in folded[1].text


def test_a_folded_row_shows_what_was_in_the_step_before(crowd):
    table = parse(render_fragment(crowd)).find("details", "step")[1].find("details", "layers")[1]
    [attend] = [line for line in rows_of(table) if line.find("th")[0].text.startswith("attend")]
    low, high = (pick(request.query_len for request in crowd.steps[0].requests) for pick in (min, max))
    assert f"in the step before: [{low}–{high},9,64]." in attend.text


def test_rows_stay_apart_for_two_requests_and_fold_for_three(default_run):
    operations = default_run.steps[0].layer(0)
    assert all(len(row) == 1 for row in fold_requests(operations))
    of_two = [op for op in operations if op.request]
    of_three = [*of_two, *(replace(op, request="C") for op in of_two if op.request == "B")]
    rows = [[op.request for op in row] for row in fold_requests(of_three)]
    assert rows == [["A", "B", "C"]] * 2


def test_many_requests_that_decode_are_one_sentence(crowd):
    first, second = parse(render_fragment(crowd)).find("details", "step")
    places = ", ".join(f"{request.label} at {request.num_computed_tokens}" for request in crowd.steps[1].requests)
    count = len(crowd.steps[1].requests)
    assert f"{count} requests compute the token that each sampled last: {places}." in second.text
    assert all(f"{request.label} starts and computes" in first.text for request in crowd.steps[0].requests)


def test_backticks_in_a_meaning_become_code(default_run):
    text = render_page(replace(default_run, steps=default_run.steps[:1]))
    assert (
        "Row <code>token_ids[i]</code> of the table" in text and "(vLLM: <code>reshape_and_cache_flash</code>)" in text
    )


def test_reasons_that_stand_above_are_not_said_again(default_run):
    tables = parse(render_page(default_run, 12.0)).find("details", "step")[0].find("details", "layers")
    first, others = ({line.find("th")[0].text: line for line in rows_of(table)} for table in tables[1:3])
    assert all(line.find("details") for line in first.values())
    assert {name for name, line in others.items() if line.find("details")} == set()
    for name, line in others.items():
        shown = line.find("td", "dims")[0].text
        assert first[name].find("summary")[0].text == shown
    assert "A row that does not open" in tables[2].text and "A row that does not open" not in tables[1].text


# ---- the rows ----------------------------------------------------------------------------------------------------------


def test_every_step_and_row_is_there(run, page):
    parts = page.find("details", "step")
    assert [part.data("step") for part in parts] == [str(step.index) for step in run.steps]
    for step, part in zip(run.steps, parts, strict=True):
        tables = part.find("details", "layers")
        rows = [int(table.data("layers")) * len(rows_of(table)) for table in tables]
        assert sum(rows) == len(step.operations)
        shown = [row.find("th")[0].text for table in tables for row in rows_of(table)]
        folded = [op for layers in fold_layers(step) for op in layers.operations]
        assert shown == [op.label + (f" {op.request}" if op.request else "") for op in folded]
        assert step.phase in part.find("h3")[0].text


def test_the_rows_add_up_to_the_step(run, page):
    for step, part in zip(run.steps, page.find("details", "step"), strict=True):
        flops = num_bytes = 0
        for table in part.find("details", "layers"):
            values = [[int(n.attributes["value"] or 0) for n in row.find("data")] for row in table.find("tr")]
            count = int(table.data("layers"))
            flops += count * sum(row[0] for row in values if len(row) == 2)
            num_bytes += count * sum(row[-1] for row in values if row)
        assert (flops, num_bytes) == (step.flops, step.num_bytes)
    totals = page.find("section")[4].find("tbody")[0].find("tr")
    shown = [[int(data.attributes["value"] or 0) for data in row.find("data")] for row in totals]
    assert shown == [[step.flops, step.num_bytes] for step in run.steps]


def test_a_row_says_why(run, page):
    [step, *_] = page.find("details", "step")
    row = next(row for row in step.find("tr") if row.find("th") and row.find("th")[0].text == "qkv_proj")
    operation = next(op for op in run.steps[0].operations if op.label == "qkv_proj")
    sizes = operation.sizes
    for part in (
        f"[T,H] @ [H,qkv] → [T,qkv] [{sizes['num_tokens']},64] @ [64,128] → [{sizes['num_tokens']},128]",
        operation.summary,
        f"FLOP: 2*num_tokens*in_size*out_size = 2·{sizes['num_tokens']}·64·128 = {operation.flops:,}",
        f"tinyllm/{operation.source}",
    ):
        assert part in row.text
    attend = next(row for row in step.find("tr") if row.find("th") and row.find("th")[0].text == "attend A")
    named = [item.text.split(" ")[0] for item in attend.find("ol")[0].find("code")]
    assert named == ["grouped_q", "scores", "scaled", "is_hidden", "masked", "weights", "out"]


def test_a_row_that_differs_from_the_step_before_says_from_what(default_run):
    step = parse(render_page(default_run)).find("details", "step")[1]
    row = next(row for row in step.find("tr") if row.find("th") and row.find("th")[0].text == "qkv_proj")
    assert "in the step before: [13,576] @ [576,960] → [13,960]" in row.text


def test_what_a_row_waits_for_depends_on_the_ridge(run):
    first = replace(run, steps=run.steps[:1])

    def waits(ridge: float | None) -> Counter[str]:
        tables = parse(render_page(first, ridge)).find("details", "layers")
        rows = [row for table in tables for row in table.find("tbody")[0].find("tr")]
        return Counter(row.find("td")[-1].text for row in rows)

    assert waits(1e9).keys() == {"memory", ""} and waits(1e-9)["compute"] > 20
    assert not {"memory", "compute"} & waits(None).keys()
    with pytest.raises(ValueError, match="ridge is 0"):
        render_page(run, 0)


def test_the_legend_gives_each_word_its_size_and_meaning(run, page):
    rows = {row.find("th")[0].text: row.text for row in page.find("section")[2].find("tbody")[0].find("tr")}
    assert "num_tokens" in rows["T"] and "by step" in rows["T"]
    assert "hidden_size" in rows["H"] and str(run.dims["hidden_size"]) in rows["H"]
    assert len(rows) > len(run.dims)


def test_decisions_stand_in_words(run, page):
    text = page.text
    for step in run.steps:
        for preempted in step.schedule.preempted:
            is_itself = preempted.label == preempted.for_label
            why = "as no block is left for it" if is_itself else f"as {preempted.for_label} needs blocks"
            assert f"{preempted.label} is preempted, {why}" in text
        for request in step.requests:
            if request.cut_by:
                assert f"cut by the {request.cut_by}" in text
            if request.hit:
                assert f"{request.label} found block" in text
        if step.schedule.finished:
            assert f"{', '.join(step.schedule.finished)} ended with the step before" in text


def test_the_runs_of_this_file_have_what_they_are_for(tiny_llm):
    seen = Counter()
    for settings in SETTINGS.values():
        llm = tiny_llm("llama_gqa", "reference", block_size=2, max_num_seqs=4, **settings)
        for step in record_run(llm, ["abc<d", "abxy"], 4).steps:
            seen["preempted"] += len(step.schedule.preempted)
            seen["cut"] += any(request.cut_by for request in step.requests)
            seen["hit"] += any(request.hit for request in step.requests)
            seen["large"] += step.schedule.num_blocks > MAX_BLOCKS
    assert all(seen[name] for name in ("preempted", "cut", "hit", "large")), seen


# ---- the pictures' numbers ---------------------------------------------------------------------------------------------


def test_the_borders_in_the_batch_are_cu_seqlens(run, page):
    for step in run.steps:
        svg = picture(page, f"Packed batch of step {step.index}")
        ends = step.batch_values["cu_seqlens_q"]
        parts = svg.with_data("request")
        assert [part.data("request") for part in parts] == [request.label for request in step.requests]
        assert [len(part.find("rect", "cell")) for part in parts] == [end - start for start, end in pairwise(ends)]
        cells = svg.find("rect", "cell")
        borders = [line.number("x1") for line in svg.find("line", "border")]
        unit = cells[0].number("width")
        assert [round((x - borders[0]) / unit) for x in borders] == ends
        assert [round((cell.number("x") - borders[0]) / unit) for cell in cells] == list(range(ends[-1]))
        for y, name in ((106, "positions"), (128, "slot_mapping")):
            below = [text.text for text in svg.find("text") if text.number("y") == y]
            assert below[1:] == [str(value) for value in step.batch_values[name]]
        assert svg.text.count("▲") == len(step.batch_values["logits_indices"])


def test_a_large_batch_is_one_bar_a_request(tiny_llm):
    llm = tiny_llm("llama_gqa", "reference", block_size=2, max_num_seqs=4, num_blocks=99, max_model_len=99)
    run = record_run(llm, ["a" * 90, "b", "c"], 1)
    svg = picture(parse(render_page(run)), "Packed batch of step 0")
    bars = svg.with_data("request")
    assert [(bar.data("request"), bar.data("rows")) for bar in bars] == [
        ("A", "0..89"),
        ("B", "90..90"),
        ("C", "91..91"),
    ]
    widths = [bar.find("rect")[0].number("width") for bar in bars]
    assert widths[0] == pytest.approx(800 * 90 / 92, abs=0.1) and widths[1:] == [48, 48]
    assert [text.text for text in svg.find("text", "number")] == ["0", "90", "91", "92"]


def test_the_cells_of_the_pool_are_the_block_map(run, page):
    for step in run.steps:
        shown: dict[int, tuple[str, str]] = {}
        for cell in picture(page, f"Block pool in step {step.index}").with_data("block"):
            first, _, last = cell.data("block").partition("..")
            for block_id in range(int(first), int(last or first) + 1):
                shown[block_id] = cell.data("state"), cell.data("holders")
        expected = {
            block_id: (span.state, " ".join(span.holders))
            for span in step.schedule.block_map
            for block_id in range(span.first, span.last + 1)
        }
        assert shown == expected


def count_dashes(cell: Node, class_: str) -> int:
    """How many dashes the paths have: a slot is one."""
    paths = cell.find("path", class_)
    lengths = [sum(map(int, re.findall(r"h(\d+)", path.attributes["d"] or ""))) for path in paths]
    pitches = [sum(map(int, (path.attributes["stroke-dasharray"] or "").split())) for path in paths]
    return sum(length // pitch for length, pitch in zip(lengths, pitches, strict=True))


def test_the_slots_of_a_block_are_those_that_hold_tokens(run, page):
    for step in run.steps:
        written = Counter(slot // 2 for slot in step.batch_values["slot_mapping"])
        for cell in picture(page, f"Block pool in step {step.index}").with_data("block"):
            holders = [r for r in step.requests if r.label in cell.data("holders").split()]
            if holders and cell.data("block").isdigit():
                block_id = int(cell.data("block"))
                filled = max(min(2, r.seq_len - 2 * r.block_ids.index(block_id)) for r in holders)
                assert count_dashes(cell, "full") == filled
                assert count_dashes(cell, "new") == written[block_id]


def test_changes_of_the_pool_are_those_between_the_maps(run, page):
    def holders(index: int) -> dict[int, set[str]]:
        spans = run.steps[index].schedule.block_map if index >= 0 else ()
        return {i: set(span.holders) for span in spans for i in range(span.first, span.last + 1)}

    seen = set()
    for i, step in enumerate(run.steps):
        before, now = holders(i - 1), holders(i)
        for cell in picture(page, f"Block pool in step {step.index}").with_data("block"):
            block_id = int(cell.data("block").partition("..")[0])
            was, held = before.get(block_id, set()), now[block_id]
            expected = None if was == held else "+" if not was else "±" if held else "−"
            assert cell.attributes.get("data-change") == expected
            seen.add(expected)
    assert seen >= {None, "+"}


def test_query_heads_point_to_their_kv_head(run, page):
    size = run.dims["group_size"]
    groups = picture(page, "Which query heads read which key/value head").with_data("kv-head")
    shown = {int(head): int(part.data("kv-head")) for part in groups for head in part.data("heads").split()}
    assert shown == {head: head // size for head in range(run.dims["num_heads"])}
    assert sum(len(part.find("line", "link")) for part in groups) == run.dims["num_heads"]


def test_boxes_have_the_sizes_of_the_tensors(run, page):
    for step in run.steps:
        boxes = picture(page, f"Tensors of step {step.index} in scale").with_data("tensor")
        shapes = {tensor.shape for op in step.operations if op.stage.kind == "matmul" for tensor in op.tensors.values()}
        scales = []
        for box in boxes:
            shape = tuple(map(int, box.data("shape").split(",")))
            assert shape in shapes
            [rect] = box.find("rect")
            if 2 < rect.number("width") < LONGEST and 2 < rect.number("height") < LONGEST / 2:
                scales.append(rect.number("width") * rect.number("height") / prod(shape) ** 0.5)
        assert len(scales) > 8 and max(scales) < 1.1 * min(scales)


def test_dots_stand_at_their_numbers_below_the_roof(run, page):
    for step in run.steps:
        svg = picture(page, f"Stages of step {step.index} by FLOPs and FLOPs per byte")
        assert sum(int(stage.data("flops")) for stage in svg.with_data("stage")) == step.flops
        slope, flat = svg.find("line", "roof")
        assert slope.number("y2") == flat.number("y1") == flat.number("y2")
        gaps, places = [], []
        for dot in svg.find("g", "stage"):
            [circle] = dot.find("circle")
            x, y = circle.number("cx"), circle.number("cy")
            rise = (slope.number("y2") - slope.number("y1")) / (slope.number("x2") - slope.number("x1"))
            roof = slope.number("y1") + rise * (x - slope.number("x1")) if x < flat.number("x1") else flat.number("y1")
            gaps.append(y - roof)
            places.append((int(dot.with_data("stage")[0].data("flops")), -y))
        assert -0.5 < min(gaps) < NEAREST  # the slowest touches it, or shares a dot with one that is as near as that
        assert [y for _, y in sorted(places)] == sorted(y for _, y in places)


@dataclass(frozen=True)
class Text:
    """A text of a picture, with a rectangle around it as wide as most fonts make it at 11 pixels."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Text") -> float:
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return min(wide, high)


def texts_of(svg: Node) -> list[Text]:
    """The texts of a picture with the rectangles that they cover."""
    found = []

    def walk(node: Node, anchor: str | None) -> None:
        anchor = node.attributes.get("text-anchor") or anchor
        if node.tag == "text":
            width, x, y = 6.2 * len(node.text), node.number("x"), node.number("y")
            left = x - {"middle": width / 2, "end": width}.get(anchor or "start", 0)
            found.append(Text(node.text, left, y - 10, left + width, y + 3))
        for child in node.children:
            if isinstance(child, Node):
                walk(child, anchor)

    walk(svg, None)
    return found


def assert_legible(svg: Node) -> None:
    """No text lies on another one or beside the picture, no dot on another dot or on a stage's name."""
    texts, box = texts_of(svg), (svg.attributes["viewbox"] or "").split()
    assert all(min(text.left, text.top) >= 0 for text in texts)
    assert all(text.right <= float(box[2]) and text.bottom <= float(box[3]) for text in texts)
    lying = [(one.text, two.text) for one, two in combinations(texts, 2) if one.overlap(two) > 0]
    assert lying == []
    dots = [(circle.number("cx"), circle.number("cy"), circle.number("r")) for circle in svg.find("circle")]
    assert all(dist(one[:2], two[:2]) >= one[2] + two[2] for one, two in combinations(dots, 2))
    for x, y, r in dots:
        circle = Text("", x - r, y - r, x + r, y + r)
        assert [text.text for text in texts if len(text.text) > 1 and text.overlap(circle) > 0] == []


@pytest.mark.parametrize("ridge", [None, 0.5, 3.8, 12.0, 80.0])
def test_labels_of_the_roofline_lie_on_nothing(default_run, ridge):
    steps = default_run.steps[:2]
    assert [step.phase for step in steps] == ["prefill", "decode"]
    page = parse(render_page(replace(default_run, steps=steps), ridge))
    for step in steps:
        svg = picture(page, f"Stages of step {step.index} by FLOPs and FLOPs per byte")
        names = {stage.data("stage") for stage in svg.with_data("stage")}
        assert names == {op.label for op in step.operations if op.flops}
        assert_legible(svg)


def test_labels_of_small_models_lie_on_nothing(run, page):
    for step in run.steps:
        assert_legible(picture(page, f"Stages of step {step.index} by FLOPs and FLOPs per byte"))


def test_stages_that_would_hide_each_other_share_a_dot(default_run):
    page = parse(render_page(default_run, 12.0))
    svg = picture(page, "Stages of step 1 by FLOPs and FLOPs per byte")
    names = [[stage.data("stage") for stage in dot.with_data("stage")] for dot in svg.find("g", "stage")]
    assert ["lm_head", "down_proj"] in [members[:2] for members in names]


def test_without_a_ridge_there_is_no_roof_but_a_reason(run):
    text = render_page(run)
    assert 'class="roof"' not in text and "There is no roof in this picture" in text
    assert 'class="roof"' in render_page(run, RIDGE)


def test_bars_are_probabilities(run, page):
    num_bars = 0
    for step in run.steps:
        for request in step.requests:
            if not request.samples:
                continue
            svg = picture(page, f"Candidates for request {request.label} in step {step.index}")
            groups = {node.attributes.get("class", "") or "": node for node in svg.find("g")}
            bars = next(node for class_, node in groups.items() if class_.startswith("bar ")).find("rect")
            num_bars += len(bars)
            names = [text.text for text in svg.find("g")[0].find("text")]
            shares = [text.text for text in groups["small"].find("text")]
            assert request.chosen is not None
            shown = [*request.candidates]
            if request.chosen.token_id not in [candidate.token_id for candidate in shown]:
                shown.append(request.chosen)
            marks = ["▶ " if candidate.token_id == request.chosen.token_id else "" for candidate in shown]
            texts = [shorten(show_token(candidate.text), 11) for candidate in shown]
            assert names == [*(mark + text for mark, text in zip(marks, texts, strict=True)), "all others"]
            assert shares[:-1] == [f"{100 * candidate.probability:.1f} %" for candidate in shown]
            assert [bar.attributes.get("class") for bar in bars] == ["cell" if mark else None for mark in marks]
            for bar, candidate in zip(bars, shown, strict=True):
                assert bar.number("width") == pytest.approx(max(1, 146 * candidate.probability), abs=0.06)
    assert num_bars > 20


# ---- runs that are not whole -------------------------------------------------------------------------------------------


def test_a_dry_run_has_no_tokens(run):
    steps = [
        replace(
            step,
            requests=tuple(
                replace(r, token_ids=(-1,) * r.query_len, chosen=None, candidates=()) for r in step.requests
            ),
        )
        for step in run.steps
    ]
    text = render_page(replace(run, prompts=(), answers=(), steps=tuple(steps)))
    assert "no values, so no token: a dry run" in text
    assert_self_contained(text)


def test_a_step_that_failed_says_where(run):
    step = run.steps[0]
    dims = {word: size for word, size in step.dims.items() if word != "num_tokens"}
    broken = replace(step, failure="rms_norm: <boom>", dims=dims, batch_values={}, batch={}, operations=step.operations[:2],
                     requests=tuple(replace(r, chosen=None, candidates=()) for r in step.requests))  # fmt: skip
    tree = parse(render_page(replace(run, steps=(broken,)), RIDGE))
    assert "the step ended with rms_norm: <boom>" in tree.text
    assert parse(render_page(replace(run, steps=(), prompts=(), answers=()))).find("main")
