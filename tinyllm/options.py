"""Options that several commands share: one wording, one order, and a refusal that names the option."""

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from tinyllm.console import Parser, file_path, read_stdin
from tinyllm.errors import RequestError, brief
from tinyllm.layers.attention.backends import BACKENDS
from tinyllm.llm import DEFAULT_MAX_MODEL_LEN, LLM
from tinyllm.request import MAX_N, MAX_TEMPERATURE, Request, SamplingParams
from tinyllm.weights.load import DTYPES, check_prompt

STDIN = "-"  # the prompt that stands for standard input


# --- what an option's text may be -----------------------------------------------------------------------------------------


def whole_number(least: int, most: int | None = None, expected: str | None = None) -> Callable[[str], int]:
    """A type for argparse: a whole number within these limits."""
    words = expected or (
        f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    )

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            value = int(text)
            if least <= value and (most is None or value <= most):
                return value
        raise argparse.ArgumentTypeError(f"{brief(text)}; expected {words}")

    return read


def number(least: float, most: float, expected: str) -> Callable[[str], float]:
    """A type for argparse: a number within these limits."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = float(text)
            if least <= value <= most:
                return value
        raise argparse.ArgumentTypeError(f"{brief(text)}; expected {expected}")

    return read


def utf8_text(text: str) -> str:
    """A type for argparse: one of `console.arguments` that is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        start = len(text[: error.start].encode())
        raise argparse.ArgumentTypeError(f"{brief(text)} is not UTF-8 at byte {start}; expected UTF-8 text") from None
    return text


def _stop_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' is empty; expected the text before which an answer ends")
    return utf8_text(text)


# --- the options ----------------------------------------------------------------------------------------------------------

ABOVE_ZERO = math.nextafter(0.0, 1.0)


def _option(**settings: Any) -> dict[str, Any]:
    return settings


# In the order of every help text. A command names those that it takes, and defaults of its own.
OPTIONS: dict[str, dict[str, Any]] = {
    "--max-tokens": _option(type=whole_number(1), metavar="N", help="most tokens of an answer (default %(default)s)"),
    "--min-tokens": _option(type=whole_number(0), metavar="N", default=0, help="let nothing end an answer before N tokens"),
    "--temperature": _option(type=number(0, MAX_TEMPERATURE, f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}"), metavar="T",
                             default=0.0, help="0, the default, is greedy"),
    "--top-k": _option(type=whole_number(-1, expected="a whole number; 0 keeps all"), metavar="K", default=0,
                       help="keep the K likeliest tokens (0: all)"),
    "--top-p": _option(type=number(ABOVE_ZERO, 1, "a number above 0 and up to 1; 1 keeps all"), metavar="P", default=1.0,
                       help="keep the fewest tokens that reach P"),
    "--min-p": _option(type=number(0, 1, "a number from 0 to 1; 0 keeps all"), metavar="P", default=0.0,
                       help="drop tokens below P times the likeliest"),
    "--seed": _option(type=whole_number(-(2**63), 2**63 - 1, "a 64-bit whole number"), metavar="N",
                      help="makes a sampled answer repeatable"),
    "--n": _option(type=whole_number(1, MAX_N), metavar="N", default=1,
                   help="answers to each prompt, at a temperature above 0 (default 1)"),
    "--stop": _option(type=_stop_text, action="append", default=[], metavar="TEXT",
                      help="end the answer before TEXT; may be given again"),
    "--ignore-eos": _option(action="store_true", help="go on behind an end token"),
    "--special": _option(action="store_true", help="read control tokens such as <|im_start|> in a prompt as tokens"),
    "--system": _option(type=utf8_text, metavar="TEXT", help="what the model should know or be (default: its template's)"),
    "--model": _option(type=file_path, metavar="PATH",
                       help="a GGUF file or a Hugging Face folder (default: SmolLM2-135M-Instruct)"),
    "--dtype": _option(choices=DTYPES, default="float32", help="of weights and KV cache (default %(default)s)"),
    "--attention": _option(choices=BACKENDS, default="sdpa", help="the attention body (default %(default)s)"),
    "--max-model-len": _option(type=whole_number(1), metavar="N",
                               help="most tokens of a prompt and its answer together (default "
                                    f"{DEFAULT_MAX_MODEL_LEN}, or the model's positions)"),
    "--block-size": _option(type=whole_number(1), default=16, metavar="N", help="token slots of a KV block (default 16)"),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add these of OPTIONS, in its order; `defaults` are by the names that argparse gives, such as max_tokens."""
    for name, settings in OPTIONS.items():
        if name in names:
            parser.add_argument(name, **settings)
    parser.set_defaults(**defaults)


def add_prompts(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    """The texts to complete."""
    parser.add_argument(
        "prompts", nargs=nargs, type=utf8_text, metavar="PROMPT",
        help="a text to complete; several run together; - reads standard input",
    )  # fmt: skip


def subcommand(commands: Any, name: str, short: str, description: str, examples: str) -> Parser:
    """A parser with examples below its options."""
    return commands.add_parser(name, help=short, description=description, epilog=examples,
                               formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip


# --- what they say --------------------------------------------------------------------------------------------------------


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the options of this command name; RequestError, in the options' words, for two that contradict."""
    known = {field.name for field in fields(SamplingParams)}
    given = {name: value for name, value in vars(args).items() if name in known}
    if given.get("min_tokens", 0) > given["max_tokens"]:
        raise RequestError(f"--min-tokens {args.min_tokens} is more than --max-tokens {args.max_tokens}")
    if given.get("n", 1) > 1 and not given["temperature"]:
        raise RequestError(f"--n {args.n} needs a --temperature above 0; at 0 all answers are the same")
    return SamplingParams(**given)


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, standard input in the place of ``-``. Raises RequestError, which says which one is wrong."""
    if given.count(STDIN) > 1:
        raise RequestError("standard input is named twice; expected one prompt that is -")
    prompts = [read_stdin() if prompt == STDIN else prompt for prompt in given]
    for index, prompt in enumerate(prompts):
        with naming_prompt(index, len(prompts)):
            check_prompt(prompt)
    return prompts


def make_requests(llm: LLM, prompts: Sequence[str], params: SamplingParams, parse_special: bool) -> list[Request]:
    """Requests that can run, n for each prompt. Raises RequestError, which says which one is wrong."""
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        with naming_prompt(index, len(prompts)):
            answers = llm.make_requests(prompt, params, parse_special)
            llm.engine.scheduler.check_request(answers[0])
            requests += answers
    return requests


@contextlib.contextmanager
def naming_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """A RequestError names the prompt by its place among several, and never by the engine's request id."""
    try:
        yield
    except RequestError as error:
        reason = re.sub(r"^request \S+: ", "", str(error))
        raise RequestError(reason if num_prompts == 1 else f"prompt {index + 1}: {reason}") from None
