"""The bars of a sampled token's candidates are probabilities."""

import pytest

from tinyllm.trace.html.words import shorten, show_token


def test_bars_are_probabilities(run, page, picture):
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
