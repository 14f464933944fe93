"""The page: one self-contained file that can be read aloud, and is not too large; also of runs that are not whole."""

import re
from dataclasses import replace
from itertools import pairwise

from tinyllm.trace.html import render_fragment, render_page


def assert_self_contained(text: str, tree) -> None:
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & {node.tag for node in tree.walk()}
    for node in tree.walk():
        assert all(not name.startswith("on") and name not in ("src", "srcset", "style") for name in node.attributes)
        assert (node.attributes.get("href") or "#").startswith("#")


def test_the_page_needs_nothing_but_itself(run, ridge, parse):
    for text in (render_page(run, ridge), render_fragment(run)):
        assert_self_contained(text, parse(text))
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


def test_pictures_and_tables_speak(page, crowd, ridge, parse, rows_of):
    for tree in (page, parse(render_page(crowd, ridge))):
        assert_speaks(tree, rows_of)


def assert_speaks(page, rows_of) -> None:
    assert all(len(page.find(tag)) > 5 for tag in ("svg", "figure", "table", "details")) and page.find("div", "scroll")
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
        node.elements[0] is node.children[0] and node.elements[0].tag == "summary" for node in page.find("details")
    )


def test_the_style_of_a_fragment_stays_inside_it(run, parse):
    fragment = parse(render_fragment(run))
    style = re.sub(r"@media[^{]*\{(.*?\})\s*\}", r"\1", fragment.find("style")[0].text)
    selectors = [selector for rule in re.findall(r"([^{}]+)\{", style) for selector in rule.split(",")]
    assert len(selectors) > 80 and all(selector.strip().startswith(".tinyllm") for selector in selectors)
    assert not any("id" in node.attributes for node in fragment.walk())
    assert "prefers-color-scheme:dark" in fragment.find("style")[0].text


def test_sizes(default_run, parse):
    page = render_page(default_run, 12.0)
    assert len(default_run.steps) == 8 and default_run.dims["num_layers"] == 30
    assert len(page.encode()) < 700_000
    assert len(render_fragment(replace(default_run, steps=default_run.steps[:2])).encode()) < 130_000
    names = [node.find("strong")[0].text for node in parse(page).find("details", "layers")]
    assert names == ["before the layers", "layer 0", "layers 1 to 29, all alike", "after the layers"] * 8


def test_sizes_with_many_requests(crowd, parse):
    fragment = render_fragment(crowd)
    assert len(fragment.encode()) < 200_000
    assert_self_contained(fragment, parse(fragment))
    eight = replace(crowd, steps=(crowd.steps[0], *(replace(crowd.steps[1], index=i) for i in range(1, 8))))
    assert len(render_page(eight, 12.0).encode()) < 1_500_000


def test_the_legend_gives_each_word_its_size_and_meaning(run, page):
    rows = {row.find("th")[0].text: row.text for row in page.find("section")[2].find("tbody")[0].find("tr")}
    assert "num_tokens" in rows["T"] and "by step" in rows["T"]
    assert "hidden_size" in rows["H"] and str(run.dims["hidden_size"]) in rows["H"]
    assert len(rows) > len(run.dims)


def test_a_dry_run_has_no_tokens(run, parse):
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
    (svg, *_) = [svg for svg in parse(text).find("svg") if svg.find("title")[0].text == "Packed batch of step 0"]
    ids = [node.text for node in svg.find("text", "on") if node.number("y") == 68]
    assert ids == ["?"] * steps[0].dims["num_tokens"]
    assert_self_contained(text, parse(text))


def test_a_step_that_failed_says_where(run, ridge, parse):
    step = run.steps[0]
    broken = replace(step, failure="rms_norm: <boom>", operations=step.operations[:2],
                     requests=tuple(replace(r, chosen=None, candidates=()) for r in step.requests))  # fmt: skip
    tree = parse(render_page(replace(run, steps=(broken,)), ridge))
    assert "the step ended with rms_norm: <boom>" in tree.text
    assert parse(render_page(replace(run, steps=(), prompts=(), answers=()))).find("main")
