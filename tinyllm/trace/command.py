"""The trace command: its options, and what it prints where."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from tinyllm.config import CacheConfig, SchedulerConfig
from tinyllm.console import Parser, working
from tinyllm.errors import ConfigError, RequestError, brief
from tinyllm.layers.attention.backends import BACKENDS
from tinyllm.llm import DEFAULT_MAX_MODEL_LEN, LLM, check_finish_reasons, how_far
from tinyllm.request import Request, SamplingParams
from tinyllm.trace.record import StepRecord, sizes_by_symbol, to_symbol
from tinyllm.trace.recorder import self_test
from tinyllm.trace.session import request_label, trace_steps
from tinyllm.trace.terminal import WIDTH, Options, render_completions, render_header, render_prompts, render_step
from tinyllm.trace.to_json import SCHEMA_ID, step_to_json
from tinyllm.weights.load import DTYPES, LoadedModel, check_prompt, load_model

EXAMPLES = """examples:
  python -m tinyllm.trace "The capital of France is"
  python -m tinyllm.trace "The capital of France is" "Water boils at 100 degrees" --max-tokens 3 --block-size 4
  python -m tinyllm.trace "Once upon a time" --max-num-batched-tokens 3        # chunked prefill
  python -m tinyllm.trace "Hello" --full --layers 0,29 --json trace.jsonl
"""

STYLES = {"=": "bold", "M": "cyan", "W": "yellow", "G": "green", "P": "bright_blue"}  # by kind letter


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The options of the trace command."""
    parser = Parser(
        prog=prog,
        description="Print every dimension change of every step that turns a prompt into tokens, 100 columns wide.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to complete; several run together")
    parser.add_argument(
        "--max-tokens", type=int, default=2, metavar="N", help="tokens to sample per prompt (default 2)"
    )
    parser.add_argument("--layers", type=parse_layers, default="0", metavar="LIST",
                        help="decoder layers to show row by row, such as 0,29 or all (default 0)")  # fmt: skip
    parser.add_argument("--full", action="store_true", help="every row of every step, with every named tensor")
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="token slots in one KV block (default 16)"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N",
                        help="token budget of one step; a small one cuts the prefill into chunks (default 2048)")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, help="for a temperature above 0")
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind an end token")
    parser.add_argument(
        "--special", action="store_true", help="read control tokens such as <|im_start|> in the prompt as tokens"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="a GGUF file or a Hugging Face folder (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--attention", choices=BACKENDS, default="reference", help="the attention body (default reference)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the records as JSON lines; - prints them instead of the text"
    )
    return parser


def parse_layers(text: str) -> tuple[int, ...] | None:
    """``0,29`` as numbers; None for ``all``."""
    if text == "all":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected numbers such as 0,29, or all") from None


def main(argv: Sequence[str] | None = None, prog: str = "python -m tinyllm.trace") -> None:
    """Run the command; raises TinyllmError for what the user can mend."""
    args = make_parser(prog).parse_args(argv)
    params = SamplingParams(
        temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos
    )
    self_test()
    for prompt in args.prompts:
        check_prompt(prompt)
    CacheConfig(args.block_size)
    SchedulerConfig(1, args.max_num_batched_tokens, 1)
    _check_json(args.json)
    with working("loading the model"):
        loaded = load_model(args.model, args.dtype, args.attention)
    options = Options(_check_layers(args.layers, loaded.config.num_layers), args.full)
    llm, requests = _prepare(loaded, args, params)
    with _open_json(args.json) as json_file:
        _trace(llm, requests, args, options, Output(json_file, is_text=args.json != "-"))
    check_finish_reasons(request.finish_reason for request in requests)


def _check_layers(layers: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(num_layers))
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ConfigError(f"--layers names layer {layer}; this model has layers 0 to {num_layers - 1}")
    return layers


def _prepare(loaded: LoadedModel, args: argparse.Namespace, params: SamplingParams) -> tuple[LLM, list[Request]]:
    """An engine whose KV pool is just large enough for these prompts, and their requests."""
    limit = min(loaded.config.max_positions, DEFAULT_MAX_MODEL_LEN)
    lengths = [len(loaded.encode_prompt(prompt, args.special)) for prompt in args.prompts]
    for length in lengths:
        if length >= limit:
            raise RequestError(
                f"the prompt has {length} tokens; expected at most {limit - 1}, as max_model_len is {limit}"
            )
    ends = [min(length + args.max_tokens, limit) for length in lengths]
    num_blocks = 1 + sum(-(-end // max(args.block_size, 1)) for end in ends)
    llm = LLM(
        loaded,
        block_size=args.block_size,
        num_blocks=num_blocks,
        max_model_len=max(ends),
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    return llm, llm.make_requests(args.prompts, params, args.special)


def make_console() -> Console:
    """rich for the terminal; a pipe or a file gets the bare text, whatever the environment says."""
    is_terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout, markup=False, emoji=False, highlight=False,
        width=WIDTH,  # lines are never wrapped; but a width of 0 from the environment would swallow them
        force_terminal=is_terminal, color_system="auto" if is_terminal else None,
        no_color=bool(os.environ.get("NO_COLOR")),  # an empty value does not count; rich before 14 counted it
    )  # fmt: skip


@dataclass
class Output:
    """Where lines and records go."""

    json_file: TextIO | None
    is_text: bool
    console: Console = field(default_factory=make_console)

    def lines(self, lines: Iterator[str]) -> None:
        """Print trace lines, coloured by kind at a terminal; never wrapped, never cut to the window, never markup."""
        for line in lines if self.is_text else ():
            style = STYLES.get(line[:1], "") if self.is_row(line) else ""
            self.console.print(Text(line, style), soft_wrap=True, crop=False, overflow="ignore")

    @staticmethod
    def is_row(line: str) -> bool:
        """Whether a line begins with a kind letter, and is not the answer of a request of that name."""
        return line[:1] in STYLES and ": " not in line[:20]

    def record(self, record: dict[str, Any]) -> None:
        """Write one JSON line."""
        if self.json_file:
            self.json_file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _trace(llm: LLM, requests: list[Request], args: argparse.Namespace, options: Options, output: Output) -> None:
    dims = {**llm.loaded.config.dims(), **llm.engine.cache_config.dims()}
    output.record(_header(llm, args, dims))
    output.lines(render_header(_titles(llm, args), dims))
    output.lines(render_prompts(_encoded(llm, requests, args)))
    steps: list[StepRecord] = []
    for step in _watched(llm, requests):
        output.lines(iter([""]))
        output.lines(render_step(step, steps[-1] if steps else None, options))
        output.record(step_to_json(step))
        steps = [step]
    completions = [llm.completion(request) for request in requests]
    output.lines(iter([""]))
    output.lines(render_completions((request_label(i), c.finish_reason, c.text) for i, c in enumerate(completions)))
    output.record({"schema": SCHEMA_ID, "type": "footer", "num_steps": steps[-1].index + 1 if steps else 0,
                   "completions": [{"id": request_label(i), "text": c.text, "token_ids": list(c.token_ids),
                                    "finish_reason": c.finish_reason, "seed": c.seed}
                                   for i, c in enumerate(completions)]})  # fmt: skip


def _watched(llm: LLM, requests: list[Request]) -> Iterator[StepRecord]:
    """The steps, with a word on stderr while each is computed."""
    steps = trace_steps(llm, requests)
    while True:
        with working(how_far(requests)):
            step = next(steps, None)
        if step is None:
            return
        yield step


def _titles(llm: LLM, args: argparse.Namespace) -> list[str]:
    pool = llm.engine.kv_cache
    shape = ",".join(map(str, pool.kv.shape))
    return [
        f"{llm.loaded.path.name}  {args.dtype}  {llm.loaded.attention} attention",
        f"pool   KV cache [L,2,NB,bs,nk,d]=[{shape}] {pool.num_bytes / 1e6:.1f}MB; block 0 is the null block",
    ]


def _header(llm: LLM, args: argparse.Namespace, dims: dict[str, int]) -> dict[str, Any]:
    return {
        "schema": SCHEMA_ID,
        "type": "header",
        "model": llm.loaded.config.name,
        "dtype": args.dtype,
        "attention": llm.loaded.attention,
        "dims": sizes_by_symbol(dims),
        "words": {to_symbol(word): word for word in dims if to_symbol(word).isidentifier()},
        "conventions": {
            "flops": "a multiply-add counts 2",
            "bytes": "each operand moved once",
            "attention": "causal-exact",
        },
        "prompts": list(args.prompts),
    }


def _encoded(llm: LLM, requests: list[Request], args: argparse.Namespace) -> Iterator[tuple[str, str, list[list[str]]]]:
    tokenizer = llm.tokenizer
    for i, text in enumerate(args.prompts):
        words = tokenizer.encode_words(text, parse_special=args.special)
        pieces = [[tokenizer.token_text(token_id) for token_id in word.token_ids] for word in words]
        begin = [[tokenizer.token_text(token_id)] for token_id in llm.loaded.bos_prefix]
        yield request_label(i), text, [*begin, *pieces]


def _check_json(path: str | None) -> None:
    """Refuse an unwritable path before the model is loaded; a file that is there stays whole until records come."""
    if path is None or path == "-":
        return
    try:
        open(path, "ab").close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot write {brief(path)}: {reason}; give --json a writable file") from None


def _open_json(path: str | None) -> contextlib.AbstractContextManager[TextIO | None]:
    if path is None or path == "-":
        return contextlib.nullcontext(None if path is None else sys.stdout)
    return open(path, "w", encoding="utf-8", newline="\n")
