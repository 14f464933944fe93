"""The scheduler's decisions in sentences."""

from collections import Counter

from tinyllm.trace.html import render_fragment
from tinyllm.trace.html.blocks import MAX_BLOCKS


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


def test_many_requests_that_decode_are_one_sentence(crowd, parse):
    first, second = parse(render_fragment(crowd)).find("details", "step")
    places = ", ".join(f"{request.label} at {request.num_computed_tokens}" for request in crowd.steps[1].requests)
    count = len(crowd.steps[1].requests)
    assert f"{count} requests compute the token that each sampled last: {places}." in second.text
    assert all(f"{request.label} starts and computes" in first.text for request in crowd.steps[0].requests)


def test_the_runs_of_this_folder_have_what_they_are_for(every_run):
    seen = Counter()
    for step in (step for run in every_run.values() for step in run.steps):
        seen["preempted"] += len(step.schedule.preempted)
        seen["cut"] += any(request.cut_by for request in step.requests)
        seen["hit"] += any(request.hit for request in step.requests)
        seen["large"] += step.schedule.num_blocks > MAX_BLOCKS
    assert all(seen[name] for name in ("preempted", "cut", "hit", "large")), seen
