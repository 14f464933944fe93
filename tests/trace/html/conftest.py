"""What the tests of the page share: runs, and a page as a tree of elements."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import pytest

from tinyllm import LLM, SamplingParams
from tinyllm.trace.decisions import request_label
from tinyllm.trace.html import render_page
from tinyllm.trace.record import AnswerRecord, PromptRecord, RunRecord
from tinyllm.trace.session import trace_steps

VOID = {"meta", "br", "col"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    children: list["Node | str"] = field(default_factory=list)

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.elements:
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
    def elements(self) -> list["Node"]:
        return [child for child in self.children if isinstance(child, Node)]

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


@pytest.fixture(scope="session")
def parse():
    """parse(text): the page as a tree, whose elements are closed where they must be."""

    def parse(text: str) -> Node:
        builder = TreeBuilder()
        builder.feed(text)
        builder.close()
        assert builder.open == [builder.root]
        return builder.root

    return parse


@pytest.fixture(scope="session")
def rows_of():
    """rows_of(table): the lines of the first table, without those of a table within a line."""

    def rows_of(table: Node) -> list[Node]:
        return table.find("tbody")[0].elements

    return rows_of


@pytest.fixture(scope="session")
def picture():
    """picture(page, title): the only one of that title."""

    def picture(page: Node, title: str) -> Node:
        [found] = [svg for svg in page.find("svg") if svg.find("title")[0].text == title]
        return found

    return picture


@pytest.fixture(scope="session")
def record_run():
    """record_run(llm, prompts, max_tokens): the record that the command would make."""

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

    return record_run


SETTINGS = {
    "chunked": {"max_num_batched_tokens": 4, "num_blocks": 33, "max_model_len": 32},
    "preempted": {"num_blocks": 7, "max_model_len": 12},
    "large pool": {"num_blocks": 300, "max_model_len": 64},
}


@pytest.fixture(scope="session")
def every_run(tiny_llm, record_run) -> dict[str, RunRecord]:
    """Two prompts of a tiny model that share a block; a cut prefill, a preemption, a pool drawn span by span."""
    llms = {
        name: tiny_llm("llama_gqa", "reference", block_size=2, max_num_seqs=4, **settings)
        for name, settings in SETTINGS.items()
    }
    return {name: record_run(llm, ["abc<d", "abxy"], 4) for name, llm in llms.items()}


@pytest.fixture(scope="module", params=SETTINGS)
def run(request, every_run) -> RunRecord:
    """One of them."""
    return every_run[request.param]


@pytest.fixture(scope="module")
def default_run(smollm2, record_run) -> RunRecord:
    """Eight steps of the default model, of which seven are the same decode step."""
    llm = LLM(smollm2, block_size=4, num_blocks=9, max_model_len=32)
    run = record_run(llm, ["The capital of France is", "Water boils at 100 degrees"], 2)
    return replace(run, steps=(run.steps[0], *(replace(run.steps[1], index=i) for i in range(1, 8))))


@pytest.fixture(scope="session")
def ridge() -> float:
    """The FLOPs for each byte of the machine that the page is for."""
    return 2.0


@pytest.fixture(scope="module")
def page(run, ridge, parse) -> Node:
    return parse(render_page(run, ridge))


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
def crowd(request, smollm2, record_run) -> RunRecord:
    """Two steps of the default model with many requests of different lengths, some of which share a block."""
    texts = [TEXTS[i % len(TEXTS)] + " and more" * (i // len(TEXTS) + 4 * (i % 5)) for i in range(request.param)]
    run = record_run(LLM(smollm2), texts, 2)
    assert [len(step.requests) for step in run.steps] == [request.param] * 2
    assert len(set(run.steps[0].batch_values["seq_lens"])) > 7
    return run
