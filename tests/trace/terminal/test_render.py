"""The trace as a whole: how long it is, its parts in order, and the signs that it is drawn with."""

from tinyllm import LLM, SamplingParams
from tinyllm.trace.record import AnswerRecord, RunRecord
from tinyllm.trace.session import trace_steps
from tinyllm.trace.terminal import (
    WIDTH,
    render_run,
)


def test_the_usual_view_is_short(smollm2, render):
    """A prefill and a decode step of one prompt, with their totals: what a screen or a slide holds."""
    llm = LLM(smollm2, block_size=4, num_blocks=9, max_model_len=32)
    requests = llm.make_requests(["The capital of France is"], SamplingParams(max_tokens=2))
    steps = list(trace_steps(llm, requests, residual=True))
    assert [len(lines) for lines in render(steps)] == [41, 19]


def test_one_step_is_shown_whole_and_the_others_in_one_line(traced, render):
    _, steps = traced
    views = render(steps, step=2)
    assert [len(view) == 1 for view in views] == [index != 2 for index in range(len(steps))]
    assert views[0][0].startswith("= step 0 ") and "4 tokens in, 0 out" in views[0][0]
    assert "as before" not in "\n".join(views[2]) and any("| qkv_proj" in line for line in views[2])


def test_unicode_changes_signs_and_nothing_else(traced, render):
    _, steps = traced
    for ascii_lines, lines in zip(render(steps), render(steps, is_unicode=True), strict=True):
        assert any("\N{RIGHTWARDS ARROW}" in line for line in lines) and "->" not in "".join(lines)
        plain = [line.translate({0x2502: "|", 0x2550: "=", 0x251C: "|"}) for line in lines]
        assert [len(line) <= WIDTH for line in plain] == [True] * len(ascii_lines)
        assert [line.split()[-1] for line in plain] == [line.split()[-1] for line in ascii_lines]


def test_a_whole_run_is_its_parts(traced, render):
    llm, steps = traced
    run = RunRecord("tiny", "float32", "", (2, 2, 8, 2, 4, 8), 123456, llm.loaded.config.dims(), (), tuple(steps),
                    (AnswerRecord("A", "text", (1,), "stop", 0),), prefix_caching=False)  # fmt: skip
    text = "\n".join(render_run(run))
    assert text.startswith(
        "tiny  float32\npool   KV cache [L,2,NB,bs,nk,d]=[2,2,8,2,4,8] 0.1MB, 7.72kB a token; no prefix caching\n"
    )
    assert all("\n".join(step) in text for step in render(steps))
    assert "; no prefix caching\n" in text and text.endswith("\nA stop: 'text'")
