"""``tinyllm generate`` and ``tinyllm trace``."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from tinyllm.console import Parser, progress, run
from tinyllm.errors import ModelFileError, RequestError
from tinyllm.layers.attention.backends import BACKENDS
from tinyllm.llm import LLM
from tinyllm.request import SamplingParams
from tinyllm.trace import command as trace_command
from tinyllm.weights.load import DTYPES

EXAMPLES = """examples:
  tinyllm generate "The capital of France is"
  tinyllm generate "Once upon a time" "The sky is" --max-tokens 40 --temperature 0.8 --top-p 0.9 --seed 1
  tinyllm trace "The capital of France is"
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = Parser(prog="tinyllm", description="An LLM inference engine that shows its dimensions.", epilog=EXAMPLES,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"tinyllm {importlib.metadata.version('tinyllm-trace')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="complete prompts", epilog=EXAMPLES,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to complete; several run together")
    generate.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="tokens to sample per prompt (default 64)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens (0: all)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the fewest tokens that reach P")
    generate.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the likeliest"
    )
    generate.add_argument("--seed", type=int, help="makes a sampled answer repeatable")
    generate.add_argument("--ignore-eos", action="store_true", help="go on behind an end token")
    generate.add_argument("--special", action="store_true", help="read control tokens such as <|im_start|> as tokens")
    generate.add_argument("--model", metavar="PATH", help="a GGUF file (default: the installed SmolLM2-135M-Instruct)")
    generate.add_argument("--dtype", choices=DTYPES, default="float32")
    generate.add_argument("--attention", choices=BACKENDS, default="sdpa", help="the attention body (default sdpa)")
    commands.add_parser("trace", add_help=False, help="print every dimension change; tinyllm trace --help")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; raises TinyllmError for what the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["trace"]:
        trace_command.main(arguments[1:], prog="tinyllm trace")
        return
    _generate(make_parser().parse_args(arguments))


def _generate(args: argparse.Namespace) -> None:
    params = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.seed, args.max_tokens,
                            ignore_eos=args.ignore_eos)  # fmt: skip
    if "" in args.prompts:
        raise RequestError("the prompt is empty; expected at least one character")
    progress("loading the model ...")
    llm = LLM(args.model, dtype=args.dtype, attention=args.attention)
    completions = llm.generate(args.prompts, params, parse_special=args.special)
    for completion in completions:
        print(completion.prompt + completion.text)
    if any(completion.finish_reason == "error" for completion in completions):
        raise ModelFileError("no token could be sampled: the model's logits are not finite; its weights may be damaged")


def entry_point() -> int:
    """What the installed ``tinyllm`` script calls."""
    return run(main)


if __name__ == "__main__":
    sys.exit(entry_point())
