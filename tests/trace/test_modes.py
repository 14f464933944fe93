"""What may be asked of a run instead of its trace, through the command."""

import json
import re

import pytest

from tinyllm.console import run
from tinyllm.trace import Trace, annotate, command, trace
from tinyllm.trace.calibrate import Roofline


@pytest.fixture
def run_trace(monkeypatch, capsys, smollm2, smollm2_sdpa):
    """run_trace(*argv) -> (exit code, stdout, stderr); the machine has a ridge of 8, whatever it is."""

    def load(path, dtype, attention):
        return {"reference": smollm2, "sdpa": smollm2_sdpa}[attention]

    def run_trace(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(command, "load_model", load)
        monkeypatch.setattr(command, "measured_roofline", lambda: Roofline(80e9, 10e9))
        code = run(command.main, argv)
        return code, *capsys.readouterr()

    return run_trace


@pytest.fixture
def refuse_to_load(monkeypatch):
    def load(*_):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(command, "load_model", load)


def test_a_word_is_explained_without_a_model(refuse_to_load, capsys):
    assert run(command.main, ["--explain", "cu_seqlens_q"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cu_seqlens_q [R+1]: a tensor of FlatBatch") and "why the +1" in out


def test_with_a_prompt_a_word_has_the_size_of_that_run(run_trace):
    code, out, err = run_trace("The capital of France is", "--explain", "T")
    assert (code, err) == (0, "") and re.search(r"^  here +T = 5", out, re.M)
    code, out, _ = run_trace("The capital of France is", "--explain", "T", "--step", "1")
    assert code == 0 and re.search(r"^  here +T = 1", out, re.M)


def test_a_file_is_annotated_as_text_and_as_a_page(run_trace, tmp_path):
    code, out, err = run_trace("--annotate", "tinyllm/layers/attention/reference.py")
    assert (code, err) == (0, "")
    assert re.search(r"#\| scores +\[nk,g,s,S\] +prefill \[3,3,5,5\] +decode \[3,3,1,6\]", out)
    assert annotate.find_source("tinyllm/layers/attention/reference.py").read_text("utf-8").splitlines()[0] in out
    page = tmp_path / "page.html"
    code, out, err = run_trace("Hi there", "--annotate", "tinyllm/layers/norm.py", "--html", str(page))
    assert (code, out, err) == (0, "", "")
    assert page.read_text("utf-8").lower().startswith("<!doctype html>")


def test_the_same_prompts_through_transformers(run_trace):
    pytest.importorskip("transformers")
    code, out, err = run_trace("Hi there", "--verify")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("no stage departs")


def test_a_model_that_departs_ends_with_code_1(run_trace, monkeypatch):
    found = type("Found", (), {"lines": lambda self: ["layer 3 departs"], "first_departure": "layer 3"})()
    monkeypatch.setattr(command, "verify", lambda *_: found)
    with pytest.raises(SystemExit) as leaving:
        run_trace("Hi", "--verify")
    assert leaving.value.code == 1


def test_a_dry_run_needs_neither_weights_nor_prompt(refuse_to_load, capsys):
    assert run(command.main, ["--dry-run", "--config", "smollm2-135m", "--lens", "4,1@16,1@7"]) == 0
    out = capsys.readouterr().out
    assert "== STEP 0  MIXED  R=3 requests  T=6 tokens" in out
    assert "[6,576]@[576,960]->[6,960]" in out


def test_a_page_is_written_beside_the_trace_or_in_its_place(run_trace, tmp_path):
    page, records = tmp_path / "t.html", tmp_path / "t.jsonl"
    code, out, _ = run_trace("Hi", "--max-tokens", "1", "--html", str(page), "--json", str(records))
    assert code == 0 and "== STEP 0" in out
    text = page.read_text("utf-8")
    assert (
        text.lower().startswith("<!doctype html>") and "Step 0" in text and re.search(r"[Rr]idge: 8(\.0+)? FLOPs", text)
    )
    assert [json.loads(line)["type"] for line in records.read_text("utf-8").splitlines()] == [
        "header",
        "step",
        "footer",
    ]
    code, out, _ = run_trace("Hi", "--max-tokens", "1", "--html", "-")
    assert code == 0 and out.lower().startswith("<!doctype html>")


def test_a_ridge_says_what_a_step_waits_for_unless_it_is_not_measured(run_trace):
    assert "memory-bound (0.5 < ridge 8.0)" in run_trace("Hi", "--max-tokens", "1")[1]
    assert "ridge" not in run_trace("Hi", "--max-tokens", "1", "--no-calibrate")[1]


def test_values_kernels_and_times_of_one_stage(run_trace):
    code, out, _ = run_trace("Hi there", "--op", "attend", "--values", "--ops", "--time", "--max-tokens", "1")
    assert code == 0
    weights = out[out.index("|. weights") :]
    assert re.search(r"0\.\.1 +mean", weights), "attention weights lie between 0 and 1"
    assert "|. torch" in out and "aten.bmm -> [3,6,2]" in out
    assert re.search(r"F/B .* us +bound", out)


def test_the_residual_stream_is_one_line(run_trace):
    assert len(re.findall(r"^  residual rms +layers 0\.\.29 ", run_trace("Hi", "--max-tokens", "1")[1], re.M)) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "a prompt is missing; expected a text"),
        (["x", "--values"], "--values shows what lies under one stage; give --op NAME"),
        (["x", "--ops"], "--ops shows"),
        (["x", "--lens", "4"], "--config and --lens belong to --dry-run"),
        (["x", "--dry-run", "--lens", "4"], "--dry-run runs shapes alone: it takes no prompt"),
        (["--dry-run"], "--dry-run needs --lens"),
        (["--dry-run", "--config", "llama-3-9b", "--lens", "4"], "'llama-3-9b' is no preset; did you mean llama-3-8b"),
        (["--dry-run", "--config", "llama-3-8b", "--lens", "4,x"], "lens '4,x' is not understood"),
        (["--explain", "cu_seqlen_q"], "cu_seqlens_q"),
        (["x", "--explain", "qkv_prj"], "qkv_proj"),
        (["--annotate", "tinyllm/llm.py"], "layers/attention/reference.py"),
        (["x", "--html", "/nonexistent/x.html"], "cannot write '/nonexistent/x.html': No such file"),
    ],
)
def test_bad_input_is_one_line_before_the_model_is_loaded(argv, message, refuse_to_load, capsys):
    assert run(command.main, argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err, err


def test_a_trace_shows_itself(tiny_llm):
    llm = tiny_llm()
    with trace() as t:
        (answer,) = llm.generate("abc")
    bundle = t._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "application/json"}
    assert bundle["text/plain"] == str(t) and "== STEP 0  PREFILL" in str(t) and f"A {answer.finish_reason}:" in str(t)
    assert bundle["text/html"].startswith('<div class="tinyllm">')
    assert [record["type"] for record in bundle["application/json"]][:2] == ["header", "step"]
    assert set(t._repr_mimebundle_(include=["text/plain", "text/html"], exclude=["text/html"])) == {"text/plain"}
    assert t.run.prompts[0].words == (("a", "b", "c"),), "one word of three tokens"


def test_a_trace_of_nothing_says_so():
    assert str(Trace()) == "<Trace: 0 steps, 0 tokens sampled, 0 calls outside steps>"
    assert set(Trace()._repr_mimebundle_()) == {"text/plain"}
