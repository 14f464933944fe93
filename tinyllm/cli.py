"""``tinyllm generate``, ``chat``, ``trace``, ``plan`` and ``models``."""

import argparse
import contextlib
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from tinyllm.config import PRESETS, ModelConfig, find_preset
from tinyllm.console import Parser, complain, file_path, one_line, read_line, run, show_path, stdin_is_terminal, working
from tinyllm.errors import ConfigError, RequestError, TokenizerError
from tinyllm.llm import DEFAULT_MAX_MODEL_LEN, LLM, Piece, check_finish_reasons, how_far
from tinyllm.options import (
    add_options,
    add_prompts,
    make_requests,
    naming_prompt,
    read_prompts,
    sampling_params,
    subcommand,
    whole_number,
)
from tinyllm.planner import VALUE_BYTES, Plan, count_parameters, kv_bytes_per_token, parse_size
from tinyllm.request import SamplingParams
from tinyllm.shapes import WORDS
from tinyllm.trace import command as trace_command
from tinyllm.weights.hub import is_hub_name
from tinyllm.weights.load import describe_model

EXAMPLES = """examples:
  tinyllm generate "The capital of France is"
  tinyllm chat --system "You are terse."
  tinyllm trace "The capital of France is"
  tinyllm plan --model llama-3-8b --memory 24GiB
  tinyllm models
"""
GENERATE_EXAMPLES = """examples:
  tinyllm generate "The capital of France is"
  tinyllm generate "Once upon a time" "The sky is" --temperature 0.8 --seed 1
  tinyllm generate "Once upon a time" --n 3 --temperature 0.8
  tinyllm generate "1, 2, 3," --stop " 7" --stop ";"
  tinyllm generate - < letter.txt
"""
CHAT_EXAMPLES = """examples:
  tinyllm chat
  tinyllm chat --system "You are terse." --temperature 0.7 --seed 1
  echo "What is the capital of France?" | tinyllm chat
"""
PLAN_EXAMPLES = """examples:
  tinyllm plan
  tinyllm plan --list
  tinyllm plan --model llama-3-8b --memory 24GiB --context 4096
  tinyllm plan --model path/to/folder --memory 8GB --dtype bfloat16
"""
MODELS_EXAMPLES = """examples:
  tinyllm models
  tinyllm models model.gguf path/to/folder
"""
CHOICE = ("--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--stop", "--ignore-eos")  # of tokens and an end
MODEL = ("--model", "--dtype", "--attention", "--max-model-len")
ADVICE = "your message was dropped: send another or a shorter one, or leave with /exit and start a new conversation"


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = Parser(prog="tinyllm", description="An LLM inference engine that shows its dimensions.", epilog=EXAMPLES,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"tinyllm {importlib.metadata.version('tinyllm-trace')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = subcommand(
        commands, "generate", "complete prompts",
        "Print each prompt with what the model makes of it; several answers\n"
        "under lines == 1, == 2 and so on (== 1.2: of prompt 1 answer 2).",
        GENERATE_EXAMPLES,
    )  # fmt: skip
    add_prompts(generate)
    add_options(generate, "--max-tokens", "--min-tokens", "--n", "--special", *CHOICE, *MODEL, max_tokens=64)
    chat = subcommand(
        commands, "chat", "talk with a model",
        "Answer each line of standard input; /exit or the end of input leaves,\nCtrl-C cuts an answer short.",
        CHAT_EXAMPLES,
    )  # fmt: skip
    add_options(chat, "--max-tokens", "--system", *CHOICE, *MODEL, max_tokens=512)
    commands.add_parser("trace", add_help=False, help="print every dimension change; see tinyllm trace --help")
    plan = subcommand(
        commands, "plan", "say what fits into a memory, without the weights",
        "Parameters, bytes of keys and values, and how many requests fit.", PLAN_EXAMPLES,
    )  # fmt: skip
    _add_plan_options(plan)
    models = subcommand(
        commands, "models", "say what a model is, without its weights",
        "The size of a model, and every dimension that it fixes.", MODELS_EXAMPLES,
    )  # fmt: skip
    models.add_argument("paths", nargs="*", type=file_path, metavar="PATH",
                        help="GGUF files or Hugging Face folders (default: SmolLM2-135M-Instruct)")  # fmt: skip
    return parser


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=file_path, metavar="MODEL",
        help="a preset, a GGUF file or a Hugging Face folder (default: SmolLM2-135M-Instruct)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=VALUE_BYTES, help="of the weights (default: bfloat16 for a preset, else float32)"
    )
    parser.add_argument("--kv-dtype", choices=VALUE_BYTES, help="of the KV cache (default: that of the weights)")
    parser.add_argument(
        "--memory", type=_memory, metavar="SIZE", help="what weights and KV cache share: 24GiB, 24GB, 500MB, or bytes"
    )
    parser.add_argument(
        "--context", type=whole_number(1), metavar="N",
        help=f"tokens of one request, answer included (default {DEFAULT_MAX_MODEL_LEN}, or the model's positions)",
    )  # fmt: skip
    add_options(parser, "--block-size")
    parser.add_argument("--list", action="store_true", help="list the presets instead")


def _memory(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: Sequence[str]) -> None:
    """Run one command; raises TinyllmError for what the user can mend."""
    if argv[:1] == ["trace"]:
        trace_command.main(argv[1:], prog="tinyllm trace")
        return
    args = make_parser().parse_args(argv)
    {"generate": _generate, "chat": _chat, "plan": _plan, "models": _models}[args.command](args)


# --- generate and chat ----------------------------------------------------------------------------------------------------


def _load(args: argparse.Namespace) -> LLM:
    with working("loading the model"):
        return LLM(args.model, dtype=args.dtype, attention=args.attention, max_model_len=args.max_model_len)


def _generate(args: argparse.Namespace) -> None:
    params = sampling_params(args)
    prompts = read_prompts(args.prompts)
    llm = _load(args)
    if len(prompts) == params.n == 1 and sys.stdout.isatty():
        with naming_prompt(0, 1):
            pieces = llm.stream(prompts[0], params, args.special)
        _print_stream(pieces, "reading the prompt", [prompts[0]])
    else:
        _print_answers(llm, prompts, params, args.special)


def _print_answers(llm: LLM, prompts: Sequence[str], params: SamplingParams, special: bool) -> None:
    """Every answer when all of them are there, several under numbers: that of the prompt, and with n that of its answer."""
    requests = make_requests(llm, prompts, params, special)
    with working(how_far(requests)) as say:
        for _ in llm.run(requests):
            say(how_far(requests))
    completions = [llm.completion(request) for request in requests]
    for index, completion in enumerate(completions):
        if len(completions) > 1:
            which, answer = divmod(index, params.n)
            print(f"== {which + 1}" + (f".{answer + 1}" if params.n > 1 else ""))
        print(completion.prompt + completion.text)
    check_finish_reasons(completion.finish_reason for completion in completions)


def _chat(args: argparse.Namespace) -> None:
    params = sampling_params(args)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    llm = _load(args)
    if llm.loaded.chat_template is None:
        raise RequestError("this model has no chat template; use tinyllm generate, or a model that was tuned for chat")
    for number in itertools.count(1):
        try:
            line = read_line(number)
            if line is None or line.strip() == "/exit":
                return
            if line.strip():
                messages = _take_turn(llm, messages, line, params)
        except (RequestError, TokenizerError) as error:  # a broken model, unlike a message, cannot be mended here
            if not stdin_is_terminal():
                raise
            complain(f"{error}; {ADVICE}")


def _take_turn(llm: LLM, messages: Sequence[dict[str, str]], line: str, params: SamplingParams) -> list[dict[str, str]]:
    """The conversation with the user's line and the model's answer, which Ctrl-C ends where it is."""
    asked = [*messages, {"role": "user", "content": line}]
    parts: list[str] = []
    with contextlib.suppress(KeyboardInterrupt), naming_prompt(0, 1):
        _print_stream(llm.stream(llm.encode_chat(asked), params), "reading the conversation", parts)
    return [*asked, {"role": "assistant", "content": "".join(parts)}]


def _print_stream(pieces: Generator[Piece, None, None], message: str, parts: list[str]) -> None:
    """Print `parts` and then an answer as it comes, which is added to them; the line ends whatever happens."""
    reason = None
    try:
        with contextlib.closing(pieces):
            with working(message):
                first = next(pieces)
            print(*parts, end="")
            for piece in itertools.chain([first], pieces):
                print(piece.text, end="", flush=True)
                parts.append(piece.text)
                reason = piece.finish_reason
    finally:
        print(flush=True)
    check_finish_reasons([reason])


# --- plan and models ------------------------------------------------------------------------------------------------------


def _models(args: argparse.Namespace) -> None:
    for path in args.paths or [None]:
        print("\n".join(_describe(path)))


def _describe(path: str | None) -> Iterator[str]:
    """What a model is: its file, its size, and every dimension that it fixes, in the glossary's words."""
    found, config, num_parameters = describe_model(path)
    yield f"{show_path(found.name)}: {one_line(config.name)}" + ("" if path else " (the default model)")
    yield f"  path        {show_path(found)}"
    yield f"  parameters  {num_parameters:,}"
    yield f"  positions   {config.max_positions}"
    yield f"  KV cache    {kv_bytes_per_token(config, bytes_per_value=4):,} bytes a token in float32"
    for word, size in config.dims().items():
        yield f"  {word:18}{size:>8}  {WORDS[word].meaning}"


def _plan(args: argparse.Namespace) -> None:
    print("\n".join(_list_presets() if args.list else _plan_lines(args)))


def _plan_lines(args: argparse.Namespace) -> Iterator[str]:
    """What a model needs and, where a memory is given, how many requests fit."""
    title, config, dtype = _find_config(args.model)
    dtype = args.dtype or dtype
    context = min(DEFAULT_MAX_MODEL_LEN, config.max_positions) if args.context is None else args.context
    plan = Plan(config, context, args.block_size, dtype, args.kv_dtype or dtype, args.memory or 0)
    yield one_line(title, 77)
    yield ""
    yield from plan.lines()


def _find_config(model: str | None) -> tuple[str, ModelConfig, str]:
    """(what the user named, its dimensions, its usual dtype): of a preset that of publication, of a file that of LLM()."""
    if model is not None and (model.casefold() in PRESETS or _is_bare_name(model)):
        try:
            preset = find_preset(model)
        except ConfigError as error:
            raise ConfigError(f"there is no such file or folder, and {error}") from None
        return f"{preset.name} (a preset)", preset, "bfloat16"
    found, config, _ = describe_model(model)
    return show_path(found.name) + ("" if model else " (the default model)"), config, "float32"


def _is_bare_name(model: str) -> bool:
    """Whether a name that is no file here can only be a preset's, since a plan fetches nothing from the hub."""
    path = Path(model)
    is_bare = path.name == model and path.suffix not in (".gguf", ".safetensors")
    return not os.path.exists(model) and (is_bare or is_hub_name(path))


def _list_presets() -> Iterator[str]:
    """The presets' names and sizes."""
    yield f"{'preset':<16}{'parameters':>17}{'KV bytes a token':>18}{'max_positions':>15}"
    for name, config in PRESETS.items():
        sizes = (count_parameters(config).total, kv_bytes_per_token(config), config.max_positions)
        yield f"{name:<16}{sizes[0]:>17,}{sizes[1]:>18,}{sizes[2]:>15,}"
    yield "KV cache in bfloat16; for another model: tinyllm plan --model PATH"


def entry_point() -> int:
    """Run the command line of this process; the exit code."""
    return run(main)


if __name__ == "__main__":
    sys.exit(entry_point())
