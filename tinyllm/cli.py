"""``tinyllm generate``, ``chat``, ``models`` and ``trace``."""

import argparse
import contextlib
import importlib.metadata
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from tinyllm.console import Parser, one_line, run, working
from tinyllm.errors import RequestError
from tinyllm.layers.attention.backends import BACKENDS
from tinyllm.llm import LLM, check_finish_reasons, how_far
from tinyllm.request import SamplingParams
from tinyllm.shapes import WORDS
from tinyllm.trace import command as trace_command
from tinyllm.weights.load import DTYPES, check_prompt, describe_model

MODELS_EXAMPLES = """examples:
  tinyllm models
  tinyllm models model.gguf path/to/folder
"""
GENERATE_EXAMPLES = """examples:
  tinyllm generate "The capital of France is"
  tinyllm generate "Once upon a time" "The sky is" --max-tokens 40 --temperature 0.8 --top-p 0.9 --seed 1
  tinyllm generate "1, 2, 3," --stop " 7" --stop ";"
  tinyllm generate - < letter.txt
"""
CHAT_EXAMPLES = """examples:
  tinyllm chat
  tinyllm chat --system "You are terse." --temperature 0.7 --seed 1
  echo "What is the capital of France?" | tinyllm chat
"""
EXAMPLES = """examples:
  tinyllm generate "The capital of France is"
  tinyllm chat --system "You are terse."
  tinyllm trace "The capital of France is"
"""
STDIN = "-"  # the prompt that stands for standard input


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = Parser(prog="tinyllm", description="An LLM inference engine that shows its dimensions.", epilog=EXAMPLES,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"tinyllm {importlib.metadata.version('tinyllm-trace')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="complete prompts", epilog=GENERATE_EXAMPLES,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    generate.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="a text to complete; several run together; - reads standard input"
    )
    generate.add_argument("--special", action="store_true", help="read control tokens such as <|im_start|> as tokens")
    _add_options(generate, max_tokens=64)
    chat = commands.add_parser("chat", help="talk with a model", epilog=CHAT_EXAMPLES,
                               description="Answers each line of standard input; /exit or the end of input leaves.",
                               formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    chat.add_argument("--system", metavar="TEXT", help="what the model should know or be (default: its template's)")
    _add_options(chat, max_tokens=512)
    models = commands.add_parser("models", help="say what a model is, without its weights", epilog=MODELS_EXAMPLES,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    models.add_argument("paths", nargs="*", metavar="PATH", help="GGUF files or folders (default: the default model)")
    commands.add_parser("trace", add_help=False, help="print every dimension change; tinyllm trace --help")
    return parser


def _add_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"tokens to sample (default {max_tokens})"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the fewest tokens that reach P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the likeliest")
    parser.add_argument("--seed", type=int, help="makes a sampled answer repeatable")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be given again"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind an end token")
    parser.add_argument(
        "--model", metavar="PATH", help="a GGUF file or a Hugging Face folder (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--attention", choices=BACKENDS, default="sdpa", help="the attention body (default sdpa)")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; raises TinyllmError for what the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["trace"]:
        trace_command.main(arguments[1:], prog="tinyllm trace")
        return
    args = make_parser().parse_args(arguments)
    if args.command == "models":
        for path in args.paths or [None]:
            print("\n".join(_describe(path)))
        return
    params = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.seed, args.max_tokens,
                            ignore_eos=args.ignore_eos, stop=args.stop)  # fmt: skip
    command = {"generate": _generate, "chat": _chat}[args.command]
    command(args, params)


def _describe(path: str | None) -> Iterator[str]:
    """What a model is: its file, its size, and every dimension that it fixes, in the glossary's words."""
    found, config, num_parameters = describe_model(path)
    yield one_line(f"{found.name}: {config.name}" + ("" if path else " (the default model)"))
    yield f"  path        {one_line(str(found))}"
    yield f"  parameters  {num_parameters:,}"
    yield f"  positions   {config.max_positions}"
    kv_bytes = 2 * config.num_layers * config.kv_size * 4
    yield f"  KV cache    {kv_bytes:,} bytes a token in float32"
    for word, size in config.dims().items():
        yield f"  {word:18}{size:>8}  {WORDS[word].meaning}"


def _load(args: argparse.Namespace) -> LLM:
    with working("loading the model"):
        return LLM(args.model, dtype=args.dtype, attention=args.attention)


def _generate(args: argparse.Namespace, params: SamplingParams) -> None:
    if args.prompts.count(STDIN) > 1:
        raise RequestError("standard input is named twice; expected one prompt that is -")
    prompts = [_read_stdin() if prompt == STDIN else prompt for prompt in args.prompts]
    for prompt in prompts:
        check_prompt(prompt)
    llm = _load(args)
    requests = llm.make_requests(prompts, params, parse_special=args.special)
    with working(how_far(requests)) as say:
        for _ in llm.run(requests):
            say(how_far(requests))
    completions = [llm.completion(request) for request in requests]
    for completion in completions:
        print(completion.prompt + completion.text)
    check_finish_reasons(completion.finish_reason for completion in completions)


def _chat(args: argparse.Namespace, params: SamplingParams) -> None:
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    llm = _load(args)
    for line in _read_lines():
        if line.strip() == "/exit":
            return
        if line.strip():
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _answer(llm: LLM, messages: Sequence[dict[str, str]], params: SamplingParams) -> str:
    """Print an answer as it comes and return it; Ctrl-C ends it where it is."""
    text, reason = "", None
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(llm.stream(llm.encode_chat(messages), params)) as pieces,
    ):
        with working("reading the conversation"):
            first = next(pieces)
        for piece in itertools.chain([first], pieces):
            text, reason = text + piece.text, piece.finish_reason
            print(piece.text, end="", flush=True)
    print(flush=True)
    check_finish_reasons([reason])
    return text


def _read_lines() -> Iterator[str]:
    """The user's lines without their ends, until the end of input; a person at a terminal sees a prompt."""
    if sys.stdin is not None and sys.stdin.isatty():
        with contextlib.suppress(EOFError):
            while True:
                yield input("> ")
        print()  # the shell's prompt gets a line of its own
        return
    for line in _stdin_bytes():
        yield _decode_utf8(line).rstrip("\r\n")


def _read_stdin() -> str:
    """All of standard input, without the end of its last line."""
    text = _decode_utf8(_stdin_bytes().read())
    return text.removesuffix("\n").removesuffix("\r")


def _stdin_bytes() -> BinaryIO:
    if sys.stdin is None:  # closed by the caller's shell: <&-
        raise RequestError("standard input is closed; expected a text")
    return sys.stdin.buffer


def _decode_utf8(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 at byte {error.start}; expected UTF-8 text") from None


def entry_point() -> int:
    """What the installed ``tinyllm`` script calls."""
    return run(main)


if __name__ == "__main__":
    sys.exit(entry_point())
