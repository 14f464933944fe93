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

from tinyllm.config import CacheConfig
from tinyllm.console import Parser, file_path, working
from tinyllm.errors import ConfigError, RequestError, brief
from tinyllm.llm import DEFAULT_MAX_MODEL_LEN, LLM, check_finish_reasons, how_far
from tinyllm.options import (
    add_options,
    add_prompts,
    make_requests,
    naming_prompt,
    read_prompts,
    sampling_params,
    whole_number,
)
from tinyllm.request import Request, SamplingParams
from tinyllm.trace.record import StepRecord, sizes_by_symbol, to_symbol
from tinyllm.trace.recorder import self_test
from tinyllm.trace.session import request_label, trace_steps
from tinyllm.trace.terminal import WIDTH, Options, render_completions, render_header, render_prompts, render_step
from tinyllm.trace.to_json import SCHEMA_ID, step_to_json
from tinyllm.weights.load import LoadedModel, load_model

EXAMPLES = """examples:
  {prog} "The capital of France is"
  {prog} "The capital of France is" "Water boils at 100 degrees" --max-tokens 3 --block-size 4
  {prog} "Once upon a time" --max-num-batched-tokens 3        # chunked prefill
  {prog} "The sky is blue and the" "The sky is blue and grass" --block-size 4     # shared blocks
  {prog} "Once upon a time" "Hello" --block-size 4 --num-blocks 3     # too few blocks: a preemption
  {prog} "Hello" --full --layers 0,29 --json trace.jsonl
"""

STYLES = {"=": "bold", "M": "cyan", "W": "yellow", "G": "green", "P": "bright_blue"}  # by kind letter


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The options of the trace command."""
    parser = Parser(
        prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES.format(prog=prog),
        description="Print every dimension change of every step that turns a prompt into tokens, 100 columns wide.",
    )  # fmt: skip
    add_prompts(parser)
    add_options(
        parser, "--max-tokens", "--temperature", "--seed", "--ignore-eos", "--special", "--model", "--dtype",
        "--attention", "--block-size", max_tokens=2, attention="reference",
    )  # fmt: skip
    parser.add_argument("--num-blocks", type=whole_number(2), metavar="N",
                        help="KV blocks in the pool, the null block included; few of them force preemptions "
                        "(default: as many as the prompts and their answers can need)")  # fmt: skip
    parser.add_argument("--no-prefix-caching", action="store_true",
                        help="share no blocks between prompts that begin with the same tokens")  # fmt: skip
    parser.add_argument("--max-num-batched-tokens", type=whole_number(1), default=2048, metavar="N",
                        help="token budget of one step; a small one cuts the prefill into chunks (default 2048)")  # fmt: skip
    parser.add_argument("--layers", type=parse_layers, default="0", metavar="LIST",
                        help="decoder layers to show row by row, such as 0,29 or all (default 0)")  # fmt: skip
    parser.add_argument("--full", action="store_true", help="every row of every step, with every named tensor")
    parser.add_argument("--json", type=file_path, metavar="FILE",
                        help="also write the records as JSON lines; - prints them instead of the text")  # fmt: skip
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
    params = sampling_params(args)
    self_test()
    args.prompts = read_prompts(args.prompts)
    CacheConfig(args.block_size)
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
    """An engine for these prompts, and their requests."""
    limit = min(loaded.config.max_positions, DEFAULT_MAX_MODEL_LEN)
    ends = []
    for i, prompt in enumerate(args.prompts):
        with naming_prompt(i, len(args.prompts)):
            length = len(loaded.encode_prompt(prompt, args.special))
            if length >= limit:
                raise RequestError(
                    f"the prompt has {length} tokens; expected at most {limit - 1}, as max_model_len is {limit}"
                )
        ends.append(min(length + args.max_tokens, limit))
    llm = LLM(
        loaded,
        block_size=args.block_size,
        num_blocks=_count_blocks(args, ends),
        max_model_len=max(ends),
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=not args.no_prefix_caching,
    )
    return llm, make_requests(llm, args.prompts, params, args.special)


def _count_blocks(args: argparse.Namespace, ends: Sequence[int]) -> int:
    """The pool's size: as asked for, or just large enough for all requests at their ends, and the null block."""
    needs = [-(-end // args.block_size) for end in ends]
    if args.num_blocks is None:
        return 1 + sum(needs)
    if args.num_blocks <= max(needs):
        raise ConfigError(
            f"--num-blocks {args.num_blocks} holds {(args.num_blocks - 1) * args.block_size} tokens beside the null block; "
            f"a prompt and its answer may take {max(ends)}, so expected at least {1 + max(needs)}"
        )
    return args.num_blocks


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
    caching = "" if llm.engine.cache_config.enable_prefix_caching else "; no prefix caching"
    return [
        f"{llm.loaded.path.name}  {args.dtype}  {llm.loaded.attention} attention",
        f"pool   KV cache [L,2,NB,bs,nk,d]=[{shape}] {pool.num_bytes / 1e6:.1f}MB; block 0 is the null block{caching}",
    ]


def _header(llm: LLM, args: argparse.Namespace, dims: dict[str, int]) -> dict[str, Any]:
    return {
        "schema": SCHEMA_ID,
        "type": "header",
        "model": llm.loaded.config.name,
        "dtype": args.dtype,
        "attention": llm.loaded.attention,
        "prefix_caching": llm.engine.cache_config.enable_prefix_caching,
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
