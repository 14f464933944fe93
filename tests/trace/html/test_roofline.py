"""The roofline: dots at their numbers, and no label on anything."""

from dataclasses import dataclass, replace
from itertools import combinations
from math import dist

import pytest

from tinyllm.trace.html import render_page
from tinyllm.trace.html.roofline import NEAREST


def test_dots_stand_at_their_numbers_below_the_roof(run, page, picture):
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


def texts_of(svg) -> list[Text]:
    """The texts of a picture with the rectangles that they cover."""
    found = []

    def walk(node, anchor: str | None) -> None:
        anchor = node.attributes.get("text-anchor") or anchor
        if node.tag == "text":
            width, x, y = 6.2 * len(node.text), node.number("x"), node.number("y")
            left = x - {"middle": width / 2, "end": width}.get(anchor or "start", 0)
            found.append(Text(node.text, left, y - 10, left + width, y + 3))
        for child in node.elements:
            walk(child, anchor)

    walk(svg, None)
    return found


def assert_legible(svg) -> None:
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
def test_labels_of_the_roofline_lie_on_nothing(default_run, ridge, parse, picture):
    steps = default_run.steps[:2]
    assert [step.phase for step in steps] == ["prefill", "decode"]
    page = parse(render_page(replace(default_run, steps=steps), ridge))
    for step in steps:
        svg = picture(page, f"Stages of step {step.index} by FLOPs and FLOPs per byte")
        names = {stage.data("stage") for stage in svg.with_data("stage")}
        assert names == {op.label for op in step.operations if op.flops}
        assert_legible(svg)


def test_labels_of_small_models_lie_on_nothing(run, page, picture):
    assert len(run.steps) > 3
    for step in run.steps:
        assert_legible(picture(page, f"Stages of step {step.index} by FLOPs and FLOPs per byte"))


def test_stages_that_would_hide_each_other_share_a_dot(default_run, parse, picture):
    page = parse(render_page(default_run, 12.0))
    svg = picture(page, "Stages of step 1 by FLOPs and FLOPs per byte")
    names = [[stage.data("stage") for stage in dot.with_data("stage")] for dot in svg.find("g", "stage")]
    assert ["lm_head", "down_proj"] in [members[:2] for members in names]


def test_without_a_ridge_there_is_no_roof_but_a_reason(run, ridge):
    text = render_page(run)
    assert 'class="roof"' not in text and "There is no roof in this picture" in text
    assert 'class="roof"' in render_page(run, ridge)
