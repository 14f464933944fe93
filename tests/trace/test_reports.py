"""Public reports about terminals, encodings and notebooks, reworded as cases; REPORTS says which test shows each.

The commands run in this process on a tiny model, on streams that are like the user's; one test starts a real process.
"""

import ast
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tinyllm
from tinyllm import LLM, SamplingParams, cli
from tinyllm.console import run, working
from tinyllm.tokenizer import Tokenizer, load_tokenizer
from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR
from tinyllm.tokenizer.vocab_file import tokenizer_to_text
from tinyllm.trace import command
from tinyllm.weights.load import load_model

TESTS = Path(__file__).parents[1]
PACKAGE = Path(tinyllm.__file__).parent
REPORTS = {
    "case-115": [
        "trace/test_reports.py::test_case_115_any_width_in_the_environment_prints_the_same",
        "trace/test_reports.py::test_case_115_the_spinner_and_the_help_fit_any_width",
        "trace/test_command.py::test_a_width_of_zero_from_the_environment_swallows_nothing",
    ],
    "case-116": [
        "trace/test_reports.py::test_case_116_and_120_any_text_in_any_encoding",
        "trace/test_reports.py::test_case_116_and_121_a_process_in_a_locale_without_utf8",
    ],
    "case-117": ["trace/test_reports.py::test_case_117_an_empty_no_color_does_not_count"],
    "case-118": [
        "trace/test_reports.py::test_case_118_after_an_interrupted_cell_the_next_one_works",
        "test_stream.py::test_an_unfinished_stream_leaves_the_engine_clean",
        "test_stream.py::test_an_interrupt_in_a_stream_leaves_the_engine_clean",
    ],
    "case-119": [
        "trace/test_reports.py::test_case_119_and_121_marks_and_line_ends_of_another_system_change_nothing",
        "weights/test_hf_folder.py::test_odd_folder_gives_the_golden_logits",
    ],
    "case-120": [
        "trace/test_reports.py::test_case_116_and_120_any_text_in_any_encoding",
        "trace/explain/test_terms.py::test_a_token_may_be_a_piece_of_a_character",
    ],
    "case-121": [
        "trace/test_reports.py::test_case_116_and_121_a_process_in_a_locale_without_utf8",
        "trace/test_reports.py::test_case_119_and_121_marks_and_line_ends_of_another_system_change_nothing",
        "trace/test_reports.py::test_case_121_every_text_file_names_its_encoding_and_its_line_ends",
    ],
}
# Emoji and box lines, each as a token of its own; ASCII is spelled byte by byte. 256 tokens, as the tiny models know.
WIDE = [chr(first + i) for first, count in ((0x1F680, 48), (0x1F9D0, 48), (0x2500, 32)) for i in range(count)]
VOCABULARY = [*BYTE_TO_CHAR[:128], *WIDE]
TEXT = "🚀 ┌─┐ 🧩"
ANSWER = ("--max-tokens", "10", "--temperature", "2", "--seed", "1", "--ignore-eos")  # half of its tokens are wide
PARAMS = SamplingParams(max_tokens=10, temperature=2, seed=1, ignore_eos=True)  # the same


def test_every_report_of_this_part_has_its_test():
    assert list(REPORTS) == [f"case-{number}" for number in range(115, 122)]
    for place in (place for places in REPORTS.values() for place in places):
        path, _, name = place.partition("::")
        assert f"\ndef {name}(" in (TESTS / path).read_text("utf-8"), place


@pytest.fixture
def wide_model(tiny_llm, monkeypatch):
    """Both commands get this model: the tiny one, which answers with emoji and box lines."""
    loaded = tiny_llm().loaded
    loaded = replace(loaded, tokenizer=Tokenizer(VOCABULARY, [], [], "gpt2"))
    monkeypatch.setattr(command, "load_model", lambda *_: loaded)
    monkeypatch.setattr(cli, "LLM", lambda *_, **__: LLM(loaded))
    return loaded


@pytest.fixture
def terminal(monkeypatch):
    """terminal(function): what two pseudo-terminals get from it, as its standard output and its standard error."""

    def terminal(function) -> tuple[str, str]:
        texts, readers, streams = ["", ""], [], []

        def read(index: int, end: int) -> None:
            data = b""
            try:
                while piece := os.read(end, 4096):
                    data += piece
            except OSError:  # how Linux says that the other side is closed
                pass
            os.close(end)
            texts[index] = data.decode().replace("\r\n", "\n")

        for index in range(2):
            our_end, its_end = pty.openpty()
            readers.append(threading.Thread(target=read, args=(index, our_end)))
            streams.append(open(its_end, "w", encoding="utf-8"))  # noqa: SIM115
        for reader in readers:
            reader.start()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", streams[0])
                patch.setattr(sys, "stderr", streams[1])
                function()
        finally:
            for stream in streams:
                stream.close()
            for reader in readers:
                reader.join()
        return texts[0], texts[1]

    return terminal


@pytest.fixture
def plain_environment(monkeypatch):
    """A colour terminal, and nothing else that rich or argparse would look at."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


# --- the width of the window -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["1", "0", "abc"])
def test_case_115_any_width_in_the_environment_prints_the_same(
    columns, wide_model, plain_environment, terminal, capsys
):
    commands = [
        (command.main, ["abc", "--max-tokens", "2", "--ignore-eos"]),
        (cli.main, ["models", str(TESTS / "data" / "gguf" / "llama_f32.gguf")]),
    ]

    def outputs() -> Iterator[str]:
        for main, arguments in commands:
            assert run(main, arguments) == 0  # no terminal
            yield capsys.readouterr().out
            codes = []
            out, _ = terminal(lambda: codes.append(run(main, arguments)))  # noqa: B023 (called at once)
            assert codes == [0]
            yield re.sub(r"\x1b\[[\d;]*m", "", out)

    usual = list(outputs())
    rows, cut_rows = usual[0].splitlines(), usual[1].splitlines()
    assert "STEP 1" in usual[0] and max(map(len, cut_rows)) <= 100
    for row, cut in zip(rows, cut_rows, strict=True):  # a pipe gets the same rows, with whole lists
        assert row == cut or (len(row) > 100 and row[:17] == cut[:17])
    assert "hidden_size" in usual[2] and usual[3] == usual[2]
    plain_environment.setenv("COLUMNS", columns)
    assert list(outputs()) == usual


@pytest.mark.parametrize("columns", ["1", "0", "abc"])
def test_case_115_the_spinner_and_the_help_fit_any_width(columns, plain_environment, terminal, capsys):
    plain_environment.setenv("COLUMNS", columns)

    def work() -> None:
        with working("reading the prompt") as say:
            time.sleep(0.1)
            say("at 7 of 9")
            time.sleep(0.1)

    out, err = terminal(work)
    assert out == "" and err != ""
    with pytest.raises(SystemExit) as leaving:
        command.main(["--help"])
    assert leaving.value.code == 0
    assert "--max-tokens" in capsys.readouterr().out


# --- colour ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("no_color", "has_colour"), [(None, True), ("", True), ("0", False), ("1", False)])
def test_case_117_an_empty_no_color_does_not_count(no_color, has_colour, wide_model, plain_environment, terminal):
    if no_color is not None:
        plain_environment.setenv("NO_COLOR", no_color)
    asked = []
    console = command.Console
    plain_environment.setattr(command, "Console", lambda **given: asked.append(given) or console(**given))
    out, err = terminal(lambda: run(command.main, ["abc", "--max-tokens", "1"]))
    assert "STEP 0" in out
    codes = [int(code) for codes in re.findall(r"\x1b\[([\d;]+)m", out + err) for code in codes.split(";")]
    assert any(30 <= code <= 49 or 90 <= code <= 107 for code in codes) == has_colour
    assert asked[0]["no_color"] == (not has_colour), "rich before 14 counted an empty value, so we decide"


# --- encodings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_case_116_and_120_any_text_in_any_encoding(encoding, wide_model, monkeypatch, byte_tokenizer):
    """PYTHONIOENCODING sets the encoding of the streams; ours are UTF-8 whatever it says, and a sign stays that sign."""

    def run_on(main, *arguments: str) -> tuple[int, str, str]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            code = run(main, arguments)
            for stream in streams:
                stream.flush()
        out, err = (stream.buffer.getvalue().decode() for stream in streams)
        assert not re.search(r"\\U000|\\u[2-9a-f]|\\N\{", out + err), "the sign itself, no escape of it"
        return code, out, err

    (answer,) = LLM(wide_model).generate("abc", PARAMS)
    assert set(answer.text) & set(WIDE), "else the test shows nothing"
    assert run_on(cli.main, "generate", "abc", *ANSWER) == (0, f"abc{answer.text}\n", "")
    code, out, err = run_on(command.main, "abc", *ANSWER)
    assert (code, err) == (0, "") and set(out.splitlines()[-2]) >= set(answer.text) & set(WIDE)
    code, out, err = run_on(command.main, "abc", *ANSWER, "--json", "-")
    footer = json.loads(out.splitlines()[-1])
    assert (code, err, footer["completions"][0]["text"]) == (0, "", answer.text)
    code, out, err = run_on(cli.main, "models", f"no/{TEXT}.gguf")
    assert (code, out) == (2, "") and f"no/{TEXT}.gguf" in err and err.count("\n") == 1
    byte_model = replace(wide_model, tokenizer=byte_tokenizer)
    monkeypatch.setattr(cli, "LLM", lambda *_, **__: LLM(byte_model))
    code, out, err = run_on(cli.main, "generate", TEXT, "--max-tokens", "1", "--stop", "zzz")
    assert (code, err) == (0, "") and out.startswith(TEXT)


def write_folder(folder: Path, mark: str = "", line_end: str = "\n") -> Path:
    """A model's folder whose text files hold signs beyond ASCII, unescaped."""
    source = TESTS / "data" / "tiny" / "llama_gqa"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text("utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(VOCABULARY)}, "merges": []}
    tokenizer = {"pre_tokenizer": byte_level, "decoder": {"type": "ByteLevel"}, "model": model}
    texts = {
        "config.json": json.dumps({**config, "note": f"größer {TEXT}"}, ensure_ascii=False, indent=1),
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1),
        "chat_template.jinja": "{# é 🚀 #}{% for m in messages %}\n{{ m.content }}\n{% endfor %}",
    }
    for name, text in texts.items():
        assert not text.isascii() and "\n" in text
        (folder / name).write_bytes((mark + text.replace("\n", line_end)).encode())
    return folder


def test_case_116_and_121_a_process_in_a_locale_without_utf8(tmp_path):
    """Files are ASCII there unless one says otherwise, and the streams cp1252, so a forgotten encoding shows."""
    folder, records = write_folder(tmp_path / "model"), tmp_path / "trace.jsonl"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252"}
    arguments = ["abc", *ANSWER, "--model", str(folder), "--json", str(records)]
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-W", "always::EncodingWarning", "-m", "tinyllm.trace", *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, err
    assert not [line for line in err.splitlines() if "EncodingWarning" in line and str(PACKAGE) in line]
    (answer,) = LLM(load_model(folder)).generate("abc", PARAMS)
    assert set(answer.text) & set(WIDE)
    footer = json.loads(records.read_text("utf-8").splitlines()[-1])
    assert footer["completions"][0]["text"] == answer.text
    assert set(out.splitlines()[-2]) >= set(answer.text) & set(WIDE)


@pytest.mark.parametrize(("mark", "line_end"), [("\ufeff", "\n"), ("\ufeff", "\r\n"), ("", "\r\n")])
def test_case_119_and_121_marks_and_line_ends_of_another_system_change_nothing(mark, line_end, tmp_path):
    """A Windows editor writes a byte-order mark and its own line ends."""
    plain = LLM(load_model(write_folder(tmp_path / "plain" / "model")))
    other = LLM(load_model(write_folder(tmp_path / "other" / "model", mark, line_end)))
    assert (other.loaded.config, other.tokenizer.tokens) == (plain.loaded.config, plain.tokenizer.tokens)
    messages = [{"role": "user", "content": "a\nb"}]
    assert other.encode_chat(messages) == plain.encode_chat(messages)
    assert other.generate("abc")[0].token_ids == plain.generate("abc")[0].token_ids


LAST_PLACE = {"open": 3, "read_text": 0, "write_text": 1}  # where a positional encoding stands


def careless_files(source: str) -> Iterator[str]:
    """Text files that are opened without an encoding, or written without saying what ends a line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or "devnull" in ast.unparse(node):
            continue
        function, given = node.func, {keyword.arg for keyword in node.keywords}
        is_method = isinstance(function, ast.Attribute)
        name = function.attr if is_method else getattr(function, "id", "")
        if name not in LAST_PLACE or (is_method and ast.unparse(function.value) == "os"):
            continue
        if name == "open":
            modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
            mode = ast.unparse([*modes, *node.args[0 if is_method else 1 :], ast.Constant("r")][0])
            is_text, is_written = "b" not in mode, re.search("[wax+]", mode) is not None
        else:
            is_text, is_written = True, name == "write_text"
        place = LAST_PLACE[name] - (name == "open" and is_method)
        if is_text and "encoding" not in given and len(node.args) <= place:
            yield f"no encoding: {ast.unparse(node)}"
        if is_text and is_written and "newline" not in given:
            yield f"no newline: {ast.unparse(node)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_case_121_every_text_file_names_its_encoding_and_its_line_ends(path):
    assert list(careless_files(path.read_text("utf-8"))) == []


def test_our_tokenizer_file_is_read_with_either_line_end(tmp_path):
    text = tokenizer_to_text(Tokenizer(VOCABULARY, [], [], "gpt2"))
    assert text.count("\n") == 1 and text.isascii()
    (tmp_path / "saved.json").write_bytes(text.replace("\n", "\r\n").encode())
    assert list(load_tokenizer(tmp_path / "saved.json").tokens) == VOCABULARY


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("open(path)", 1),
        ("open(path, 'w')", 2),
        ("open(path, 'w', encoding='utf-8')", 1),
        ("open(path, 'w', encoding='utf-8', newline='\\n')", 0),
        ("open(path, mode='a')", 2),
        ("path.open()", 1),
        ("path.open('x')", 2),
        ("path.open('rb')", 0),
        ("open(path, 'rb')", 0),
        ("path.read_text()", 1),
        ("path.read_text('utf-8')", 0),
        ("path.write_text(text)", 2),
        ("path.write_text(text, 'utf-8', newline='\\n')", 0),
        ("open(os.devnull, 'w'), os.open(path, os.O_RDONLY)", 0),
    ],
)
def test_the_search_finds_what_it_looks_for(source, count):
    assert len(list(careless_files(source))) == count


# --- a notebook --------------------------------------------------------------------------------------------------------

LOOPS = {
    "a stream of the loop's own": "for piece in llm.stream('abc', params):\n    see(piece)",
    "a stream that has a name": "stream = llm.stream('abc', params)\nfor piece in stream:\n    see(piece)",
}


@pytest.fixture
def interrupts():
    """Ctrl-C is a KeyboardInterrupt, even where the tests run in a background that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("place", ["in the prefill", "in a decode step", "in the loop's body"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_case_118_after_an_interrupted_cell_the_next_one_works(loop, place, tiny_llm, interrupts):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = list(tiny_llm(block_size=2).stream("abc", params))
    llm, seen, num_steps = tiny_llm(block_size=2), [], 0
    scheduler = llm.engine.scheduler
    variables = {"llm": llm, "params": params}

    def run_cell(see) -> KeyboardInterrupt | None:
        """Like a notebook, which keeps the variables, and the traceback of the last error with all its frames."""
        variables["see"] = see
        try:
            exec(compile(loop, "<cell>", "exec"), variables)
        except KeyboardInterrupt as error:
            return error
        return None

    def in_a_step(*_) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == (1 if place == "in the prefill" else 3):
            assert scheduler.pool.num_used_blocks > 0
            signal.raise_signal(signal.SIGINT)

    def in_the_body(piece) -> None:
        seen.append(piece)
        if place == "in the loop's body" and len(seen) == 2:
            signal.raise_signal(signal.SIGINT)

    hook = llm.engine.model.layers[0].register_forward_hook(in_a_step)
    try:
        kept = run_cell(in_the_body)
    finally:
        hook.remove()
    assert kept is not None and kept.__traceback__ is not None
    assert seen == expected[: 0 if place == "in the prefill" else 2]
    if place != "in the loop's body" or "stream =" not in loop:  # else its name holds it, as in any program
        assert scheduler.pool.num_used_blocks == 0 and not llm.engine.has_unfinished_requests
    again = []
    assert run_cell(again.append) is None
    assert again == expected
    assert scheduler.pool.num_used_blocks == 0 and not llm.engine.has_unfinished_requests
