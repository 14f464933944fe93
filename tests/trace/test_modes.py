"""What may be asked of a run instead of its trace, through the command."""

import json
import re
from pathlib import Path

import pytest

from tinyllm import SamplingParams
from tinyllm.console import run
from tinyllm.engine import Engine
from tinyllm.shapes import evaluate
from tinyllm.trace import Trace, TraceError, annotate, command, context, trace


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
    code, out, _ = run_trace("Hi there", "--op", "attend", "--values", "--ops", "--max-tokens", "1")
    assert code == 0
    weights = out[out.index("|. weights") :]
    assert re.search(r"0\.\.1 +mean", weights), "attention weights lie between 0 and 1"
    assert "|. torch" in out and "aten.bmm -> [3,6,2]" in out
    _, out, _ = run_trace("Hi there", "--op", "attend", "--time", "--max-tokens", "1")
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
        (["x", "--dry-run", "--lens", "4"], "--dry-run runs shapes alone: it cannot use a prompt"),
        (["--dry-run"], "--dry-run needs --lens"),
        (["--dry-run", "--lens", "4", "--values", "--op", "attend", "--seed", "1"], "cannot use --values, --seed"),
        (["--dry-run", "--lens", "4", "--config", "smollm2-135m", "--step", "1"], "--step names step 1; this run has"),
        (["x", "--verify", "--json", "v.jsonl"], "--json writes a trace, and --verify prints none"),
        (["x", "--explain", "T", "--html", "e.html"], "--html writes a trace, and --explain prints none"),
        (["x", "--json", "-", "--html", "-"], "--json and --html both name '-'"),
        (["x", "--json", "a.out", "--html", "./a.out"], "--json and --html both name 'a.out'"),
        (["x", "--op", "attend", "--ops", "--time"], "--ops slows every stage down, so --time would measure that"),
        (["x", "--verify", "--explain", "T"], "--explain and --verify are answers of different kinds"),
        (["--explain", "T", "--annotate", "rope.py"], "--explain and --annotate are answers of different kinds"),
        (["--verify"], "a prompt is missing"),
        (["--explain", ""], "'' is no word of the trace"),
        (["--annotate", ""], "--annotate"),
        (["--dry-run", "--lens", "4", "--explain", "T", "--special"], "it cannot use --explain, --special"),
        (["--dry-run", "--lens", "4", "--max-tokens", "3", "--ignore-eos"], "it cannot use --max-tokens, --ignore-eos"),
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


def test_a_trace_that_shows_itself_is_built_once_and_only_in_the_forms_asked_for(tiny_llm, monkeypatch):
    with trace() as t:
        tiny_llm().generate("abc")
    whole, built = Trace.run.fget, []
    monkeypatch.setattr(Trace, "run", property(lambda self: built.append(1) or whole(self)))
    assert len(t._repr_mimebundle_()) == 3 and len(built) == 1
    monkeypatch.setattr(context, "render_fragment", None)
    monkeypatch.setattr(context, "run_to_json", None)
    assert set(t._repr_mimebundle_(include=["text/plain"])) == {"text/plain"}


def test_a_dry_run_lists_the_kernels_of_a_stage(capsys):
    argv = ["--dry-run", "--config", "llama-3-8b", "--lens", "4,1@7", "--op", "attend", "--ops"]
    assert run(command.main, argv) == 0
    out = capsys.readouterr().out
    assert "aten.bmm -> [8,16,4]" in out and "aten.bmm -> [8,4,7]" in out, "k^T: of 4 new tokens, and of 1 among 7"
    assert run(command.main, argv[:-1]) == 0
    assert "aten" not in capsys.readouterr().out


def test_an_explanation_runs_no_step_more_than_it_shows(run_trace, monkeypatch):
    step, seen = Engine.step, []
    monkeypatch.setattr(Engine, "step", lambda self: seen.append(1) or step(self))
    for wanted, count in ((0, 1), (2, 3)):
        seen.clear()
        code, out, _ = run_trace("Hi", "--max-tokens", "9", "--explain", "T", "--step", str(wanted))
        assert code == 0 and out.startswith("T: num_tokens") and len(seen) == count
    code, _, err = run_trace("Hi", "--max-tokens", "2", "--explain", "T", "--step", "2")
    assert (code, err) == (2, "tinyllm: --step names step 2; this run has steps 0 to 1\n")


def test_a_dry_run_takes_its_settings_from_the_model_where_no_config_is_named(capsys):
    folder = Path(__file__).parents[1] / "data" / "tiny" / "llama_gqa"
    assert run(command.main, ["--dry-run", "--model", str(folder), "--lens", "2"]) == 0
    assert "layer 0 of 2" in (out := capsys.readouterr().out)
    assert "--step" not in out.splitlines()[-1] and "--explain" not in out.splitlines()[-1], "nothing that would fail"


def test_a_refused_run_leaves_no_file(run_trace, tmp_path):
    path = tmp_path / "new.jsonl"
    assert run_trace("Hello there", "--num-blocks", "2", "--block-size", "1", "--json", str(path))[0] == 2
    assert not path.exists()
    page = tmp_path / "page.html"
    page.write_text("an older page")
    assert run_trace("Hi", "--max-tokens", "1", "--html", str(page), "--step", "9")[0] == 2
    assert page.read_text() == "an older page"
    code, _, err = run_trace("Hi", "--max-tokens", "1", "--json", "-", "--step", "9")
    assert (code, err) == (2, "tinyllm: --step names step 9; this run has steps 0 to 0\n")


def test_annotate_shows_the_layer_that_is_asked_for(run_trace):
    assert "layers.0: " in run_trace("--annotate", "tinyllm/layers/decoder.py", "--layers", "0")[1]
    assert "layers.1: " in run_trace("--annotate", "tinyllm/layers/decoder.py")[1]
    code, _, err = run_trace("--annotate", "tinyllm/layers/decoder.py", "--layers", "40")
    assert code == 2 and "--layers names layer 40" in err


@pytest.mark.parametrize(
    "word", ["schedule", "sampled", "append", "block map", "kv bytes", "ridge", "ledger", "decode"]
)
def test_words_of_the_plain_rows_are_explained(word, refuse_to_load, capsys):
    assert run(command.main, ["--explain", word]) == 0
    assert capsys.readouterr().out.startswith(f"{word}: a word of the trace")


def test_what_a_draw_was_likely_is_said_before_its_temperature(run_trace):
    _, out, _ = run_trace("Hi", "--max-tokens", "1", "--temperature", "0.8", "--seed", "3")
    assert re.search(r"^P sampled A +T=0.8 seed=3 .*  at T=1, uncut  \(length\)$", out, re.M)


def test_two_engines_of_one_block_are_told_apart(tiny_llm):
    one, other = tiny_llm(), tiny_llm(block_size=4)
    with trace() as t:
        one.generate("abc", SamplingParams(max_tokens=2))
        other.generate("xyz!", SamplingParams(max_tokens=2))
    keys = [(row["engine"], row["step"], row["path"], row["op"], row["request"]) for row in t.table()]
    assert len(set(keys)) == len(keys)
    assert "another engine made 2 more steps" in str(t)
    with trace() as first:
        tiny_llm().generate("abc", SamplingParams(max_tokens=2))
    assert {row["engine"] for row in first.diff(t)} == {1}


def test_a_block_cannot_be_entered_within_itself(tiny_llm):
    t, llm = trace(), tiny_llm()
    with t:
        with pytest.raises(TraceError, match="this trace's block is under way"), t:
            pass
        llm.generate("abc", SamplingParams(max_tokens=2))
    assert len(t.steps) == 2
    with t:
        llm.generate("abc", SamplingParams(max_tokens=2))
    assert len(t.steps) == 4, "one after the other it can"


def test_a_failed_step_shows_no_layer_that_never_ran(tiny_llm, monkeypatch):
    llm = tiny_llm()
    hook = llm.engine.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with trace() as t, pytest.raises(ZeroDivisionError):
        llm.generate("abc")
    hook.remove()
    assert "the step ended here" in str(t) and "layer 0 of 2" in str(t)
    assert "layers 1" not in str(t) and "layer 1 " not in str(t)


def test_the_records_can_be_read_without_the_program(tiny_llm):
    with trace() as t:
        tiny_llm().generate(["abc", "de"], SamplingParams(max_tokens=1))
    header, step, _ = t.to_json()
    whole = [operation for operation in step["ops"] if operation["same_as"] is None]
    assert {operation["op"] for operation in whole} == {operation["op"] for operation in step["ops"]}
    for operation in whole:
        sizes = step["dims"] | operation.get("dims", {})
        for tensor in operation["in"] + operation["out"]:
            assert [evaluate(symbol, sizes) for symbol in tensor["sym"]] == tensor["shape"]
    words = set(re.findall(r"[a-z]\w+", " ".join(operation["flops"]["formula"] for operation in whole)))
    assert words <= set(header["words"].values())


def test_a_trace_of_nothing_says_so():
    assert str(Trace()) == "<Trace: 0 steps, 0 tokens sampled, 0 calls outside steps>"
    assert set(Trace()._repr_mimebundle_()) == {"text/plain"}
