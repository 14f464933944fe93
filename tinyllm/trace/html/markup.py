"""HTML and SVG as strings that escape themselves: only a text of type `Html` counts as markup, any other is text."""

import html
from collections.abc import Iterable

from tinyllm.trace.text import make_printable

Value = str | int | float | None
VOID = frozenset({"br", "col", "meta", "rect", "line", "circle", "path"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: Value) -> Html:
    """An element. Children that are not `Html` are escaped; an underscore in an attribute's name stands for a hyphen.

    >>> element("p", "a < b & c", class_="note", data_row=3)
    '<p class="note" data-row="3">a &lt; b &amp; c</p>'
    """
    start = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_show(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{start}/>" if name in ("rect", "line", "circle", "path") else f"<{start}>")
    return Html(f"<{start}>{join(children)}</{name}>")


def join(children: Iterable[str | None], between: str = "") -> Html:
    """Children behind each other, escaped where they are no markup."""
    texts = (child if isinstance(child, Html) else _escape(child, False) for child in children if child is not None)
    return Html(_escape(between, False).join(texts))


def _show(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return _escape(str(value), True)


def _escape(text: str, is_attribute: bool) -> str:
    """Text that is no markup; what does not print, such as half a surrogate or a turn of the writing, as an escape."""
    return html.escape(text if text.isprintable() else make_printable(text), quote=is_attribute)


def exact(value: int, short: str) -> Html:
    """A number said briefly, with its exact value for machines."""
    return element("data", short, value=value)


def code(text: str) -> Html:
    """Text of a program: a shape, a name, a formula."""
    return element("code", text)


def disclosure(summary: str, *children: str | None, is_open: bool = False, **attributes: Value) -> Html:
    """A part that opens and closes without a script, by mouse and keyboard."""
    return element("details", element("summary", summary), *children, open="" if is_open else None, **attributes)


def scroll_box(name: str, *children: str) -> Html:
    """A box that scrolls by itself where its content is wider than the window; the keyboard reaches it."""
    return element("div", *children, class_="scroll", tabindex=0, role="group", aria_label=name)


def table(name: str, heads: Iterable[str], rows: Iterable[Html], class_: str | None = None) -> Html:
    """A table in a box of its own; the name is its caption."""
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in heads)))
    body = element("table", element("caption", name), head, element("tbody", *rows), class_=class_)
    return scroll_box(f"Table: {name}", body)


# ---- SVG ---------------------------------------------------------------------------------------------------------------


def figure(svg: Html, name: str, caption: str) -> Html:
    """A picture that scrolls by itself, with what it shows below it."""
    return element("figure", scroll_box(f"Picture: {name}", svg), element("figcaption", caption))


def small_figure(svg: Html, caption: str) -> Html:
    """A picture that shrinks where the window is narrower than it, so that it needs no scroll box."""
    return element("figure", svg, element("figcaption", caption), class_="small")


def picture(width: float, height: float, title: str, description: str, *children: str | None) -> Html:
    """An SVG with its text alternative. Texts take the page's colour also where a site strips the style sheet."""
    return element(
        "svg", element("title", title), element("desc", description), *children, role="img",
        viewBox=f"0 0 {width:.0f} {height:.0f}", width=f"{width:.0f}", height=f"{height:.0f}", fill="currentColor",
    )  # fmt: skip


def outlines(*shapes: str | None) -> Html:
    """Shapes that stay lines where a site strips the style sheet, so that they hide no text."""
    return element("g", *shapes, fill="none", stroke="currentColor")


def rect(x: float, y: float, width: float, height: float, class_: str | None, **attributes: Value) -> Html:
    """A rectangle."""
    return element(
        "rect", x=float(x), y=float(y), width=float(width), height=float(height), class_=class_, **attributes
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str = "line") -> Html:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def label(x: float, y: float, text: str, class_: str | None = None, anchor: str | None = None) -> Html:
    """Text in a picture; anchor is "middle" or "end" where x is not its start and no group around it says so."""
    return element("text", text, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def group(*children: str | None, class_: str | None = None, **attributes: Value) -> Html:
    """Parts of a picture that belong together."""
    return element("g", *children, class_=class_, **attributes)
