"""``tinyllm generate`` as a user meets it: answers on stdout, one line on stderr for what the user can mend."""

import subprocess
import sys
from pathlib import Path

import pytest

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
