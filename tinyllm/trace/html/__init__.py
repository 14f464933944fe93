"""The trace as HTML: a page that reads offline and without a script, and a fragment for notebooks.

Everything on it, pictures included, is drawn from the `RunRecord`; any text of a user or a model is escaped.
"""

import re
from pathlib import Path

from tinyllm.trace.html.markup import Html, element, join
from tinyllm.trace.html.page import render_body, render_steps, summary_line
from tinyllm.trace.record import RunRecord

__all__ = ["render_fragment", "render_page"]


def render_page(run: RunRecord, ridge: float | None = None) -> str:
    """A whole page, self-contained.

    ridge is the FLOPs that the machine does while one byte comes from memory; with it the page says of each stage what
    it waits for, and draws the roof.
    """
    if ridge is not None and not ridge > 0:
        raise ValueError(f"the ridge is {ridge}; expected a number of FLOPs for each byte")
    head = element(
        "head", element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"tinyllm trace of {run.model}"), _style(),
    )  # fmt: skip
    return "<!DOCTYPE html>\n" + element(
        "html", head, element("body", render_body(run, ridge), class_="tinyllm page"), lang="en"
    )


def render_fragment(run: RunRecord) -> str:
    """The steps as a part of another page, such as a notebook: its style with it, no script."""
    return element("div", _style(), element("p", summary_line(run)), join(render_steps(run, None)), class_="tinyllm")


def _style() -> Html:
    """The style sheet, without its comments and the spaces that mean nothing."""
    text = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    rules = " ".join(line for line in text.splitlines() if not line.startswith("/*"))
    return element("style", Html(re.sub(r"\s*([{};,>])\s*|(:)\s+", r"\1\2", rules)))
