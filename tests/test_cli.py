"""``tinyllm`` as a user meets it: answers on stdout, one line on stderr for what the user can mend."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tinyllm import LLM, ModelFileError, Piece
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
    assert (code, out, err) == (0, "== 1\n" + FRANCE + " Paris.\n\n== 2\nThe-the-\n", "")


def test_a_seed_repeats_a_sampled_answer(tinyllm):
    sampled = ("generate", FRANCE, "--max-tokens", "6", "--temperature", "1.5", "--top-k", "0", "--min-p", "0")
    first, again, other = (tinyllm(*sampled, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first[1] != other[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", ""], ["the prompt is empty"]),
        (["generate", "a", ""], ["prompt 2: the prompt is empty"]),
        (["generate", "x " * 3000], ["tinyllm: the prompt has", "expected at most 2047", "max_model_len is 2048"]),
        (["generate", "a", "x " * 3000], ["tinyllm: prompt 2: the prompt has"]),
        (["generate", "a", "--max-tokens", "0"], ["--max-tokens: '0'; expected a whole number of at least 1;"]),
        (["generate", "a", "--max-tokens", "-3"], ["--max-tokens: '-3'; expected a whole number of at least 1;"]),
        (["generate", "a", "--max-tokens", "many"], ["--max-tokens: 'many'; expected a whole number of at least 1;"]),
        (["generate", "a", "--max-tokens", "9" * 5000], ["--max-tokens: '9999"]),
        (["generate", "a", "--min-tokens", "-1"], ["--min-tokens: '-1'; expected a whole number of at least 0;"]),
        (["generate", "a", "--min-tokens", "65"], ["--min-tokens 65 is more than --max-tokens 64"]),
        (["generate", "a", "--temperature", "nan"], ["--temperature: 'nan'; expected a number from 0 (greedy) to 2;"]),
        (["generate", "a", "--temperature", "-1"], ["--temperature: '-1'"]),
        (["generate", "a", "--top-k", "-2"], ["--top-k: '-2'; expected a whole number; 0 keeps all;"]),
        (["generate", "a", "--top-p", "0"], ["--top-p: '0'; expected a number above 0 and up to 1; 1 keeps all;"]),
        (["generate", "a", "--top-p", "1.5"], ["--top-p: '1.5'"]),
        (["generate", "a", "--min-p", "1.5"], ["--min-p: '1.5'; expected a number from 0 to 1; 0 keeps all;"]),
        (["generate", "a", "--seed", str(2**63)], ["--seed: '9223372036854775808'; expected a 64-bit whole number;"]),
        (["generate", "a", "--n", "0"], ["--n: '0'; expected a whole number from 1 to 1024;"]),
        (["generate", "a", "--n", "2"], ["--n 2 needs a --temperature above 0"]),
        (["generate", "a", "--max-model-len", "0"], ["--max-model-len: '0'"]),
        (["generate", "a", "--max-model-len", "99999"], ["max_model_len is 99999", "at most 8192 positions"]),
        (["generate", "é \udcff b"], ["argument PROMPT: 'é \\udcff b' is not UTF-8 at byte 3; expected UTF-8 text;"]),
        (["generate", "a", "--stop", "\udcff"], ["argument --stop: '\\udcff' is not UTF-8"]),
        (
            ["generate", "a", "--what"],
            ["tinyllm generate: unrecognized arguments: --what; see tinyllm generate --help"],
        ),
        (["chat", "--what"], ["tinyllm chat: unrecognized arguments: --what; see tinyllm chat --help"]),
        (["--what", "chat"], ["tinyllm: ", "; see tinyllm --help"]),
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


@pytest.mark.parametrize(("mark", "end"), [("", ""), ("", "\n"), ("", "\r\n"), ("\ufeff", "\n")])
def test_a_dash_reads_the_prompt_from_standard_input(mark, end, quick_tinyllm):
    code, out, err = quick_tinyllm((mark + FRANCE + end).encode(), "generate", "-", "The", "--max-tokens", "3")
    assert (code, out, err) == (0, "== 1\n" + FRANCE + " Paris.\n\n== 2\nThe-the-\n", "")


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
        (b"a", ["generate", "a", "--stop", ""], "argument --stop: '' is empty"),
        (b"hi\n\xff\n", ["chat", "--max-tokens", "0"], "--max-tokens: '0'"),
        (b"\n\xff\n", ["chat"], "line 2 of standard input is not UTF-8 at byte 0"),
        (None, ["chat"], "standard input is closed"),
        (b"x " * 3000, ["chat"], "tinyllm: the prompt has"),
        (b"hi", ["chat", "--system", "a\udcff"], "argument --system: 'a\\udcff' is not UTF-8"),
        (b"hi", ["chat", "hello"], "hello"),
    ],
)
def test_bad_standard_input_is_one_line_and_exit_code_2(stdin, arguments, words, quick_tinyllm):
    code, out, err = quick_tinyllm(stdin, *arguments)
    assert (code, out.strip()) == (2, "")
    assert err.count("\n") == 1, err
    assert words in err


def test_several_answers_to_a_prompt_are_numbered(quick_tinyllm):
    sampled = ("--n", "2", "--temperature", "1.5", "--seed", "1", "--max-tokens", "3")
    code, one, _ = quick_tinyllm(b"", "generate", FRANCE, *sampled)
    assert code == 0
    assert one.startswith(f"== 1.1\n{FRANCE}") and f"\n== 1.2\n{FRANCE}" in one
    code, two, _ = quick_tinyllm(b"", "generate", FRANCE, "The", *sampled)
    assert code == 0 and two.startswith(one + "== 2.1\nThe") and "\n== 2.2\nThe" in two


def test_min_tokens_forbids_an_early_end(quick_tinyllm):
    arguments = ("generate", FRANCE, "--stop", "Paris", "--max-tokens", "4")
    assert quick_tinyllm(b"", *arguments) == (0, FRANCE + " \n", "")
    assert quick_tinyllm(b"", *arguments, "--min-tokens", "4")[1].startswith(FRANCE + " Paris.")


@pytest.mark.parametrize("options", [[], ["--stop", "\n"], ["--seed", "3", "--temperature", "1.5"], ["--special"]])
def test_a_terminal_sees_one_answer_as_it_comes_and_the_same_text(options, quick_tinyllm, monkeypatch):
    arguments = ("generate", FRANCE + " 日本", "--max-tokens", "12", *options)
    code, piped, _ = quick_tinyllm(b"", *arguments)
    assert code == 0
    pieces, stream = [], LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda *given: (pieces.append(p) or p for p in stream(*given)))
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    code, *_ = quick_tinyllm(b"", *arguments)
    assert (code, terminal.getvalue()) == (0, piped)
    assert len(pieces) > 1


def test_ctrl_c_ends_the_line_of_a_streamed_answer(quick_tinyllm, monkeypatch):
    def interrupted(*_):
        yield Piece(" Pa", (1,), None)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert quick_tinyllm(b"", "generate", FRANCE)[0] == 130
    assert terminal.getvalue() == FRANCE + " Pa\n"


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


class Terminal(io.StringIO):
    """A stream that a person sits at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_terminal(tinyllm, smollm2_sdpa, monkeypatch):
    """at_terminal(lines, arguments...): `tinyllm` with a person who types these and then Ctrl-D; the prompts seen come last."""

    def at_terminal(lines: list[str], *arguments: str) -> tuple[int | str | None, str, str, list[str]]:
        rest, prompts = iter(lines), []

        def fake_input(prompt: str) -> str:
            prompts.append(prompt)
            for line in rest:
                return line
            raise EOFError

        monkeypatch.setattr(
            "tinyllm.cli.LLM", lambda *_, max_model_len, **__: LLM(smollm2_sdpa, max_model_len=max_model_len)
        )
        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr("builtins.input", fake_input)
        return *tinyllm(*arguments), prompts

    return at_terminal


def test_a_terminal_gets_a_prompt_and_ctrl_d_leaves(at_terminal):
    answer = at_terminal(["What is the capital of France?"], "chat")
    assert answer == (0, "The capital of France is Paris.\n\n", "", ["> ", "> "])


def test_a_bad_line_at_a_terminal_is_taken_back_and_the_chat_goes_on(at_terminal):
    lines = ["What is the capital of France?", "word " * 200, "caf\udce9", "And of Italy?"]
    code, out, err, prompts = at_terminal(lines, "chat", "--max-model-len", "150", "--max-tokens", "20")
    assert (code, out) == (0, "The capital of France is Paris.\nThe capital of Italy is Rome.\n\n")
    too_long, not_utf8 = err.splitlines()
    assert too_long.startswith("tinyllm: the prompt has ") and "max_model_len is 150" in too_long
    assert not_utf8.startswith("tinyllm: line 3 of standard input is not UTF-8 at byte 3")
    assert all("your message was dropped" in line and "/exit" in line for line in (too_long, not_utf8))
    assert len(prompts) == 5


def test_a_broken_template_ends_the_chat_at_a_terminal_too(at_terminal, smollm2_sdpa, monkeypatch):
    monkeypatch.setattr(LLM, "encode_chat", lambda *_: (_ for _ in ()).throw(ModelFileError("broken")))
    assert at_terminal(["Hi", "Ho"], "chat") == (2, "", "tinyllm: broken\n", ["> "])


def test_a_model_without_a_chat_template_is_refused_before_anybody_types(tinyllm, smollm2_sdpa, monkeypatch):
    monkeypatch.setattr("tinyllm.cli.LLM", lambda *_, **__: LLM(replace(smollm2_sdpa, chat_template=None)))
    monkeypatch.setattr("tinyllm.cli.read_line", lambda number: pytest.fail("reads a line"))
    code, out, err = tinyllm("chat")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "this model has no chat template; use tinyllm generate" in err


def test_a_byte_order_mark_is_no_part_of_the_first_line(quick_tinyllm, monkeypatch):
    seen = []
    encode = LLM.encode_chat
    monkeypatch.setattr(LLM, "encode_chat", lambda llm, messages: seen.append(messages[-1]) or encode(llm, messages))
    quick_tinyllm("\ufeffHi\n\ufeffHo\n".encode(), "chat", "--max-tokens", "2")
    assert [message["content"] for message in seen] == ["Hi", "\ufeffHo"]


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


# --- plan --------------------------------------------------------------------------------------------------------------

PLAN = """llama-3-8b (a preset)

dimensions
  num_layers              32   num_heads           32   q_size          4,096
  hidden_size          4,096   num_kv_heads         8   kv_size         1,024
  intermediate_size   14,336   head_dim           128   qkv_size        6,144
  vocab_size         128,256   max_positions    8,192   gate_up_size   28,672

parameters
  embedding     525,336,576    6.54%  vocab_size*hidden_size
  attention   1,342,177,280   16.71%  num_layers*hidden_size*(qkv_size+q_size)
  mlp         5,637,144,576   70.20%  3*num_layers*hidden_size*intermediate_size
  norms             266,240    0.00%  (2*num_layers+1)*hidden_size
  lm_head       525,336,576    6.54%  vocab_size*hidden_size
  total       8,030,261,248  100.00%

bytes, weights in bfloat16 and KV cache in bfloat16
  weights            16,060,522,496    14.96 GiB  total*2
  KV cache    2*num_layers*kv_size*2 bytes = 2*32*1024*2 = 131,072 a token
  token                     131,072   128.00 KiB  in all layers
  layer block                65,536    64.00 KiB  block_size 16, one layer
  block                   2,097,152     2.00 MiB  in all layers
  request               536,870,912   512.00 MiB  4,096 tokens
  in blocks             536,870,912   512.00 MiB  256 blocks, 0 slots empty
  break-even                114,516  tokens: steps read as much KV as weights

FLOPs                 decode at 4,096                 prefill of 4,096
  projections           2,684,354,560   15.65%      10,995,116,277,760   17.86%
  attend                2,147,483,648   12.52%       4,399,120,252,928    7.14%
  mlp                  11,274,289,152   65.71%      46,179,488,366,592   75.00%
  lm_head               1,050,673,152    6.12%           1,050,673,152    0.00%
  total                17,156,800,512  100.00%      61,574,775,570,432  100.00%

memory, without activations
  memory             25,769,803,776    24.00 GiB  as given
  for KV              9,709,281,280     9.04 GiB  memory - weights
  num_blocks                  4,629  block 0 included, the null block
  usable                      4,628  blocks that requests can hold
  tokens                     74,048  usable*block_size
  requests                       18  of 4,096 tokens, paged
  reserved                        9  where each reserves max_positions 8,192
"""


def test_plan_says_what_fits(tinyllm):
    assert tinyllm("plan", "--model", "Llama-3-8B", "--memory", "24GiB", "--context", "4096") == (0, PLAN, "")


def test_plan_of_llama_2_7b_states_2_gib(tinyllm):
    code, out, err = tinyllm("plan", "--model", "llama-2-7b", "--context", "4096")
    assert (code, err) == (0, "")
    assert "  request             2,147,483,648     2.00 GiB  4,096 tokens\n" in out
    assert "memory" not in out, "none was given"


def test_plan_of_the_default_model_is_in_the_dtype_that_it_runs_in(tinyllm):
    code, out, err = tinyllm("plan", "--memory", "1GB")
    assert (code, err) == (0, "")
    assert out.startswith("SmolLM2-135M-Instruct.Q4_1.gguf (the default model)\n")
    assert "= 2*30*192*4 = 46,080 a token\n" in out and "  lm_head                 0    0.00%  tied: " in out
    assert "  requests                        4  of 2,048 tokens, paged\n" in out


def test_plan_of_a_folder_needs_no_weights(tinyllm, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text((BAD_FILES.parent / "tiny" / "llama_mqa" / "config.json").read_text())
    options = ("--block-size", "7", "--dtype", "float16", "--kv-dtype", "float8", "--context", "15")
    code, out, err = tinyllm("plan", "--model", str(folder), *options)
    assert (code, err) == (0, "")
    assert out.startswith("bare\n") and "bytes, weights in float16 and KV cache in float8\n" in out
    assert "  3 blocks, 6 slots empty\n" in out


def test_plan_says_when_nothing_fits(tinyllm):
    code, out, err = tinyllm("plan", "--model", "llama-3-8b", "--memory", "15GiB", "--context", "4096")
    assert (code, err) == (0, "")
    assert out.endswith("  no request of 4,096 tokens fits: blocks needed 256, usable 20\n")
    code, out, err = tinyllm("plan", "--model", "llama-3-8b", "--memory", "8GiB")
    assert (code, err) == (0, "")
    assert out.endswith("  the weights alone need 6.96 GiB more: no request fits\n")


def test_plan_lists_presets(tinyllm):
    code, out, err = tinyllm("plan", "--list")
    assert (code, err) == (0, "")
    assert "llama-3-8b          8,030,261,248           131,072          8,192\n" in out
    assert out.count("\n") == 14 and max(map(len, out.splitlines())) <= 80


def test_plan_fetches_nothing(tinyllm, monkeypatch):
    monkeypatch.setattr("tinyllm.weights.load.fetch", lambda name: pytest.fail(f"fetches {name}"))
    code, out, err = tinyllm("plan", "--model", "HuggingFaceTB/SmolLM2-360M")
    assert (code, out) == (2, "") and "did you mean smollm2-360m" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama-3-8b"], ["no such file or folder", "'lama-3-8b' is no preset", "did you mean llama-3-8b"]),
        (["--model", "zzz"], ["'zzz' is no preset", "expected one of llama-2-7b", "smollm2-1.7b"]),
        (["--model", "llama-3.1"], ["did you mean llama-3"]),
        (["--model", ""], ["'' is no preset"]),
        (["--model", "no/such/file.gguf"], ["no/such/file.gguf"]),
        (["--model", "file.gguf"], ["file.gguf: does not exist"]),
        (["--model", "."], ["."]),
        (["--model", "a\0b"], ["is no preset"]),
        (["--memory", "lots"], ["argument --memory: size 'lots' is none", "24GiB"]),
        (["--memory", "0"], ["size '0' is 0 bytes"]),
        (["--memory=-1GiB"], ["size '-1GiB' is none"]),
        (["--memory", "nan"], ["size 'nan' is none"]),
        (["--memory", "inf"], ["size 'inf' is none"]),
        (["--memory", "9999999TiB"], ["expected 1 to 1,125,899,906,842,624"]),
        (["--context", "0"], ["argument --context: '0'; expected a whole number of at least 1;"]),
        (["--context=-5"], ["argument --context: '-5'"]),
        (["--context", "8193"], ["context is 8,193", "the max_positions of"]),
        (["--context", "long"], ["--context", "'long'"]),
        (["--block-size", "0"], ["argument --block-size: '0'; expected a whole number of at least 1;"]),
        (["--dtype", "int3"], ["int3", "bfloat16"]),
        (["--kv-dtype", "int3"], ["int3", "float8"]),
        (["llama-3-8b"], ["tinyllm plan: unrecognized arguments: llama-3-8b; see tinyllm plan --help"]),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line_and_exit_code_2(arguments, words, tinyllm):
    code, out, err = tinyllm("plan", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tinyllm") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_help_of_plan_has_examples_that_work(tinyllm, monkeypatch):
    code, out, _ = tinyllm("plan", "--help")
    examples = [line.split() for line in out.split("examples:\n")[1].splitlines()]
    assert code == 0 and len(examples) == 4
    monkeypatch.chdir(BAD_FILES.parent / "tiny")
    for name, *arguments in examples:
        assert name == "tinyllm"
        code, _, err = tinyllm(*("llama_gqa" if argument == "path/to/folder" else argument for argument in arguments))
        assert (code, err) == (0, "")


# --- in a process of its own -------------------------------------------------------------------------------------------

ENTRY = [sys.executable, "-c", "import sys, tinyllm_entry; sys.exit(tinyllm_entry.main())"]
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_arguments_and_paths_are_utf8_in_an_ascii_locale(tmp_path):
    folder = tmp_path / "caf\u00e9"
    shutil.copytree(BAD_FILES.parent / "tiny" / "llama_mqa", folder)
    found = subprocess.run([*ENTRY, "models", folder], capture_output=True, env={**os.environ, **ASCII}, check=True)
    assert found.stdout.decode().startswith("caf\u00e9: ") and found.stderr == b""
    said = subprocess.run([*ENTRY, "generate", "caf\u00e9 \u65e5\u672c", "--model", tmp_path / "n\u00e9"],
                          capture_output=True, env={**os.environ, **ASCII}, check=False)  # fmt: skip
    assert said.returncode == 2, "the prompt is fine, the model is not there"
    assert said.stderr.decode().startswith(f"tinyllm: {tmp_path}/n\u00e9: does not exist")


@pytest.mark.parametrize("module", ["signal", "jaxtyping", "torch._C", "rich.console", "tinyllm.cli"])
def test_ctrl_c_while_it_starts_is_quiet(module):
    """SIGINT as soon as this module has been imported, the last one being the whole command line."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *ENTRY[1:], "chat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.split("|")[-1].strip() == module:
            break
    if module == "signal":
        time.sleep(0.3)  # the handler stands in the next line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert [line for line in err.splitlines() if not line.startswith("import time:")] == []


def test_a_background_job_that_ignores_ctrl_c_goes_on_ignoring_it():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import tinyllm_entry; tinyllm_entry.main(); "
    code += "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", code, "models"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True\n")
