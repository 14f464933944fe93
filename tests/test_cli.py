"""``tinyllm generate`` as a user meets it: answers on stdout, one line on stderr for what the user can mend."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tinyllm import LLM
from tinyllm.cli import main
from tinyllm.console import run

BAD_FILES = Path(__file__).parent / "data" / "bad_gguf"
FRANCE = "The capital of France is"


@pytest.fixture
def tinyllm(capsys):
    """tinyllm(arguments...): run the command in this process; (exit code, stdout, stderr)."""

    def tinyllm(*arguments: str) -> tuple[int | str | None, str, str]:
        try:
            code = run(main, arguments)
        except SystemExit as usage:  # argparse's way out
            code = usage.code
        return code, *capsys.readouterr()

    return tinyllm


def test_an_answer_follows_its_prompt(tinyllm):
    code, out, err = tinyllm("generate", FRANCE, "The", "--max-tokens", "3")
    assert (code, out, err) == (0, FRANCE + " Paris.\n\nThe-the-\n", "")


def test_a_seed_repeats_a_sampled_answer(tinyllm):
    sampled = ("generate", FRANCE, "--max-tokens", "6", "--temperature", "1.5", "--top-k", "0", "--min-p", "0")
    first, again, other = (tinyllm(*sampled, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first[1] != other[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], ["the prompt is empty"]),
        (["generate", "a", ""], ["the prompt is empty"]),
        (["generate", "x " * 3000], ["the prompt has", "expected at most 2047", "max_model_len is 2048"]),
        (["generate", "a", "--max-tokens", "0"], ["max_tokens is 0"]),
        (["generate", "a", "--max-tokens", "-3"], ["max_tokens is -3"]),
        (["generate", "a", "--max-tokens", "many"], ["--max-tokens", "'many'"]),
        (["generate", "a", "--temperature", "nan"], ["temperature is nan"]),
        (["generate", "a", "--temperature", "-1"], ["temperature is -1"]),
        (["generate", "a", "--top-p", "0"], ["top_p is 0"]),
        (["generate", "a", "--top-p", "1.5"], ["top_p is 1.5"]),
        (["generate", "a", "--seed", str(2**63)], ["seed is 9223372036854775808"]),
        (["generate", "a \udcff b"], ["U+DCFF"]),
        (["generate", "a", "--model", "no/such/file.gguf"], ["no/such/file.gguf"]),
        (["generate", "a", "--model", "."], ["."]),
        (["generate", "a", "--attention", "magic"], ["magic", "reference", "sdpa"]),
        (["generate", "a", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["generate"], ["PROMPT"]),
        (["fly"], ["fly", "generate"]),
        ([], ["COMMAND"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, tinyllm):
    code, out, err = tinyllm(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tinyllm")
    assert err.count("\n") == 1, err
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    "name", ["git_lfs_pointer", "truncated_in_tensor_info", "offset_2e64", "array_of_strings_2e40"]
)
def test_a_broken_model_file_is_one_line_and_exit_code_2(name, tinyllm):
    code, out, err = tinyllm("generate", "a", "--model", str(BAD_FILES / f"{name}.gguf"))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert f"{name}.gguf" in err


def test_output_that_is_no_terminal_is_plain_text(tinyllm):
    _, out, err = tinyllm("generate", FRANCE * 8, "--max-tokens", "1")
    assert "\x1b" not in out + err
    assert out.startswith(FRANCE * 8), "not cut, not wrapped"


def test_a_closed_pipe_ends_quietly():
    code = f"import sys; from tinyllm.cli import entry_point; sys.argv[1:] = ['generate', {FRANCE!r}, '--max-tokens', '1']; "
    process = subprocess.Popen(
        [sys.executable, "-c", code + "sys.exit(entry_point())"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() != 0


# --- standard input ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_tinyllm(tinyllm, smollm2_sdpa, monkeypatch):
    """quick_tinyllm(stdin, arguments...): `tinyllm` with this standard input and the model that is loaded already."""

    def quick_tinyllm(stdin: bytes | None, *arguments: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr("tinyllm.cli.LLM", lambda *_, **__: LLM(smollm2_sdpa))
        stream = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="latin-1")
        monkeypatch.setattr(sys, "stdin", stream)
        return tinyllm(*arguments)

    return quick_tinyllm


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_dash_reads_the_prompt_from_standard_input(end, quick_tinyllm):
    code, out, err = quick_tinyllm((FRANCE + end).encode(), "generate", "-", "The", "--max-tokens", "3")
    assert (code, out, err) == (0, FRANCE + " Paris.\n\nThe-the-\n", "")


def test_standard_input_is_utf8_under_any_locale(quick_tinyllm):
    code, out, _ = quick_tinyllm("Zürich 日本\n\n".encode(), "generate", "-", "--max-tokens", "1")
    assert code == 0
    assert out.startswith("Zürich 日本\n"), "only the last line end goes"


@pytest.mark.parametrize(
    ("stdin", "arguments", "words"),
    [
        (b"", ["generate", "-"], "the prompt is empty"),
        (b"\n", ["generate", "-"], "the prompt is empty"),
        (b"ab\xff", ["generate", "-"], "standard input is not UTF-8 at byte 2"),
        (None, ["generate", "-"], "standard input is closed"),
        (b"a", ["generate", "-", "-"], "standard input is named twice"),
        (b"a", ["generate", "a", "--stop", ""], "stop is ['']"),
        (b"hi\n\xff\n", ["chat", "--max-tokens", "0"], "max_tokens is 0"),
        (b"\xff\n", ["chat"], "standard input is not UTF-8 at byte 0"),
        (None, ["chat"], "standard input is closed"),
        (b"x " * 3000, ["chat"], "the prompt has"),
        (b"hi", ["chat", "--system", "a\udcff"], "U+DCFF"),
        (b"hi", ["chat", "hello"], "hello"),
    ],
)
def test_bad_standard_input_is_one_line_and_exit_code_2(stdin, arguments, words, quick_tinyllm):
    code, out, err = quick_tinyllm(stdin, *arguments)
    assert (code, out.strip()) == (2, "")
    assert err.count("\n") == 1, err
    assert words in err


def test_stop_strings_end_the_answer(quick_tinyllm):
    code, out, _ = quick_tinyllm(b"", "generate", FRANCE, "--stop", "zzz", "--stop", "The answer")
    assert (code, out) == (0, FRANCE + " Paris.\n\n\n")


# --- chat --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"", b"\n", b"\n/exit\nNobody reads this.\n", b"\r\n  /exit  \r\n"])
def test_chat_answers_line_by_line_and_remembers(end, quick_tinyllm):
    code, out, err = quick_tinyllm(b"What is the capital of France?\n\n \nAnd of Italy?" + end, "chat")
    assert (code, out, err) == (0, "The capital of France is Paris.\nThe capital of Italy is Rome.\n", "")


def test_chat_without_input_is_quiet(quick_tinyllm):
    assert quick_tinyllm(b"", "chat") == (0, "", "")
    assert quick_tinyllm(b"/exit\n", "chat") == (0, "", "")


def test_the_system_prompt_stands_first(quick_tinyllm, monkeypatch):
    seen = []
    encode = LLM.encode_chat
    monkeypatch.setattr(LLM, "encode_chat", lambda llm, messages: seen.append(list(messages)) or encode(llm, messages))
    quick_tinyllm(b"Hi\nHo\n", "chat", "--system", "Be brief.", "--max-tokens", "2", "--stop", "zzz")
    assert [[message["role"] for message in messages] for messages in seen] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    assert seen[0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_ctrl_c_ends_the_answer_but_not_the_chat(quick_tinyllm, monkeypatch):
    stream, calls = LLM.stream, []

    def interrupted(llm, prompt, params):
        calls.append(llm)
        pieces = stream(llm, prompt, params)
        if len(calls) > 1:
            yield from pieces
            return
        yield next(pieces)
        yield next(pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    code, out, err = quick_tinyllm(b"What is the capital of France?\nAnd of Italy?\n", "chat", "--max-tokens", "20")
    first, second = out.splitlines()[:2]
    assert (code, err, first) == (0, "", "The capital")
    assert second != ""


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system role here') }}", "refuses the messages: no system role here"),
        ("{% for", "cannot be used: line 1"),
        (None, "this model has no chat template"),
    ],
)
def test_a_template_that_cannot_serve_is_one_line(template, words, tinyllm, smollm2_sdpa, monkeypatch):
    model = replace(smollm2_sdpa, chat_template=template)
    monkeypatch.setattr("tinyllm.cli.LLM", lambda *_, **__: LLM(model))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi\n")))
    code, out, err = tinyllm("chat")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


def test_a_terminal_gets_a_prompt_and_ctrl_d_leaves(tinyllm, smollm2_sdpa, monkeypatch):
    lines = iter(["What is the capital of France?"])
    prompts = []

    def fake_input(prompt: str) -> str:
        prompts.append(prompt)
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("tinyllm.cli.LLM", lambda *_, **__: LLM(smollm2_sdpa))
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", fake_input)
    assert tinyllm("chat") == (0, "The capital of France is Paris.\n\n", "")
    assert prompts == ["> ", "> "]


def test_a_real_ctrl_c_ends_the_answer_and_a_pipe_ends_the_chat():
    code = "import sys; from tinyllm.cli import entry_point; sys.argv[1:] = ['chat', '--max-tokens', '1900', '--ignore-eos']; "
    process = subprocess.Popen(
        [sys.executable, "-c", code + "sys.exit(entry_point())"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    assert process.stdin and process.stdout
    process.stdin.write("Erzähl mir etwas.\n".encode())
    process.stdin.flush()
    assert process.stdout.read(1), "the answer comes piece by piece"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"/exit\n", timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.endswith(b"\n")


def test_models_says_what_a_model_is(tinyllm):
    code, out, err = tinyllm(
        "models", str(BAD_FILES.parent / "gguf" / "llama_f32.gguf"), str(BAD_FILES.parent / "tiny" / "llama_mqa")
    )
    assert (code, err) == (0, "")
    assert out.count("hidden_size") == 2 and "num_kv_heads             1  " in out
    code, out, err = tinyllm("models")
    assert (code, err) == (0, "")
    assert out.startswith("SmolLM2-135M-Instruct.Q4_1.gguf: ") and "(the default model)" in out.splitlines()[0]
    assert "  parameters  134,515,008\n" in out and "  KV cache    46,080 bytes a token in float32\n" in out


def test_models_refuses_what_is_none(tinyllm):
    code, out, err = tinyllm("models", "no/such/file.gguf")
    assert (code, out) == (2, "") and "no/such/file.gguf" in err and len(err.splitlines()) == 1
