"""Everything is escaped."""

from dataclasses import replace

from tinyllm.trace.html import render_fragment, render_page
from tinyllm.trace.html.words import show_token
from tinyllm.trace.record import Candidate, RunRecord

HOSTILE = "</script><svg onload=alert(1)>\"'&amp;\u202e\ud800\n\x00"


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


def test_hostile_texts_stay_texts(run, ridge, parse):
    hostile = make_hostile(replace(run, steps=run.steps[:2]))
    for text in (render_page(hostile, ridge), render_fragment(hostile)):
        tree = parse(text.encode(errors="replace").decode())
        assert "script" not in {node.tag for node in tree.walk()} and "<svg onload" not in text
        assert all(not name.startswith("on") for node in tree.walk() for name in node.attributes)
        assert show_token(HOSTILE) in tree.text
    assert show_token(HOSTILE).startswith("</script><svg␣onload") and show_token(HOSTILE).isprintable()
    render_page(hostile).encode()  # a lone surrogate anywhere would raise
