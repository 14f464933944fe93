"""The options of the trace command, and what can be refused before a model is loaded."""

import argparse
import os
from collections.abc import Iterable, Sequence

from tinyllm.config import CacheConfig
from tinyllm.console import Parser, file_path
from tinyllm.errors import ConfigError, brief
from tinyllm.options import add_options, add_prompts, read_prompts, whole_number
from tinyllm.trace.calibrate import Roofline
from tinyllm.trace.terminal import MAX_WIDTH, MIN_WIDTH, WIDTH, Options, near_stages

TOKEN_BUDGET, MAX_TOKENS = 2048, 2
EXAMPLES = """examples:
  {prog} "The capital of France is"
  {prog} "The capital of France is" "Water boils at 100 degrees" --max-tokens 3 --block-size 4
  {prog} "Once upon a time" --max-num-batched-tokens 3        # chunked prefill
  {prog} "The sky is blue and the" "The sky is blue and grass" --block-size 4     # shared blocks
  {prog} "Once upon a time" "Hello" --block-size 4 --num-blocks 3     # too few blocks: a preemption
  {prog} "Hello" --full --layers 0,29 --json trace.jsonl
  {prog} "Hello" --op attend --layers 0,29 --step 1     # one stage, with its formulas and tensors
  {prog} "Hello" --html trace.html     # a page with pictures
  {prog} "Hello" --explain cu_seqlens_q
  {prog} --annotate tinyllm/layers/attention/reference.py
  {prog} --dry-run --config llama-3-8b --lens 4,1@16,1@7
"""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The options of the trace command."""
    parser = Parser(
        prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES.format(prog=prog),
        description="Print every dimension change of every step that turns a prompt into tokens.",
    )  # fmt: skip
    add_prompts(parser, nargs="*")
    add_options(
        parser, "--max-tokens", "--temperature", "--seed", "--ignore-eos", "--special", "--model", "--dtype",
        "--attention", "--block-size", max_tokens=MAX_TOKENS, attention="reference",
    )  # fmt: skip
    parser.add_argument("--num-blocks", type=whole_number(2), metavar="N",
                        help="KV blocks in the pool, the null block included; few of them force preemptions "
                        "(default: as many as the prompts and their answers can need)")  # fmt: skip
    parser.add_argument("--no-prefix-caching", action="store_true",
                        help="share no blocks between prompts that begin with the same tokens")  # fmt: skip
    parser.add_argument("--max-num-batched-tokens", type=whole_number(1), default=TOKEN_BUDGET, metavar="N",
                        help="token budget of one step; a small one cuts the prefill into chunks (default 2048)")  # fmt: skip
    _add_views(parser)
    parser.add_argument("--json", type=file_path, metavar="FILE",
                        help="also write the records as JSON lines; - prints them instead of the text")  # fmt: skip
    parser.add_argument("--html", type=file_path, metavar="FILE", help="also write the run as one page, with pictures")
    _add_modes(parser)
    parser.set_defaults(argv=())  # as they were given; the command puts them there, for the record
    return parser


def _add_modes(parser: argparse.ArgumentParser) -> None:
    """What else may be asked of a run, instead of its trace."""
    modes = parser.add_argument_group("instead of the trace")
    modes.add_argument("--explain", metavar="WORD",
                       help="what a dimension, tensor, stage or kind is and, with a prompt, why it has its size there")  # fmt: skip
    modes.add_argument("--annotate", type=file_path, metavar="FILE",
                       help="this file of the engine's source with the shapes that its tensors had; with --html, as a page")  # fmt: skip
    modes.add_argument("--verify", action="store_true",
                       help="run the prompts through transformers as well, and say where the two depart")  # fmt: skip
    modes.add_argument("--dry-run", action="store_true", help="the trace of shapes alone: no weights, no prompt")
    modes.add_argument("--config", type=file_path, metavar="FILE",
                       help="of --dry-run: config.json, folder, GGUF file or a preset such as llama-3-8b")  # fmt: skip
    modes.add_argument("--lens", metavar="LIST",
                       help="of --dry-run: tokens of each request, such as 4,1,1; 1@16 is a decode that reads 16 keys")  # fmt: skip


def _add_views(parser: argparse.ArgumentParser) -> None:
    """What is shown, and how."""
    parser.add_argument("--layers", type=parse_layers, metavar="LIST",
                        help="decoder layers to show row by row, such as 0,29 or all (default 0)")  # fmt: skip
    parser.add_argument("--full", action="store_true",
                        help="every row of every step, with every named tensor, its source line and the cost formulas")  # fmt: skip
    parser.add_argument("--step", type=whole_number(0), metavar="N",
                        help="this step with all its rows, the others in one line each")  # fmt: skip
    parser.add_argument("--op", metavar="NAME",
                        help="this stage alone, such as attend or qkv_proj: formulas with numbers, source, every tensor")  # fmt: skip
    parser.add_argument("--values", action="store_true", help="with --op: what its tensors held, in a few numbers")
    parser.add_argument("--ops", action="store_true", help="with --op: the torch kernels that it ran")
    parser.add_argument("--time", action="store_true",
                        help="what each stage took, and what its bytes from memory or its FLOPs alone take on this machine")  # fmt: skip
    parser.add_argument("--no-calibrate", action="store_true",
                        help="do not measure this machine: no word about what a stage waits for")  # fmt: skip
    parser.add_argument("--width", type=whole_number(MIN_WIDTH, MAX_WIDTH), metavar="N",
                        help=f"columns, {MIN_WIDTH} to {MAX_WIDTH} (default: the terminal's; "
                        f"in a pipe {WIDTH}, where lists are not shortened to fit)")  # fmt: skip
    parser.add_argument("--unicode", action="store_true", help="arrows and lines beyond ASCII")


def parse_layers(text: str) -> tuple[int, ...]:
    """``0,29`` as numbers; none for ``all``."""
    if text == "all":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"{brief(text)}; expected numbers such as 0,29, or all")
    return tuple(int(part) for part in parts)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot be done with any model, and read the prompts."""
    if args.op is not None and (near := near_stages(args.op)):
        which = "near it" if len(near) <= 5 else "rows are"
        raise ConfigError(f"--op names {brief(args.op)}, which no row has; {which}: {', '.join(near)}")
    for option, is_given in (("--values", args.values), ("--ops", args.ops)):
        if is_given and args.op is None:
            raise ConfigError(f"{option} shows what lies under one stage; give --op NAME as well")
    if args.time and args.ops:
        raise ConfigError("--ops slows every stage down, so --time would measure that; ask for one after the other")
    if not args.dry_run and (args.config or args.lens):
        raise ConfigError("--config and --lens belong to --dry-run, which is missing")
    _check_dry_run(args)
    _check_outputs(args)
    if not args.prompts and (args.verify or not (args.dry_run or _modes(args))):
        raise ConfigError("a prompt is missing; expected a text to complete, or - for standard input")
    args.prompts = read_prompts(args.prompts)
    CacheConfig(args.block_size)
    check_writable("--json", args.json)
    check_writable("--html", args.html)


def _check_dry_run(args: argparse.Namespace) -> None:
    if not args.dry_run:
        return
    surplus = [
        name
        for name, is_given in (
            ("a prompt", args.prompts), *((mode, True) for mode in _modes(args)),
            ("--time", args.time), ("--values", args.values),
            ("--num-blocks", args.num_blocks), ("--temperature", args.temperature), ("--seed", args.seed is not None),
            ("--max-num-batched-tokens", args.max_num_batched_tokens != TOKEN_BUDGET),
            ("--max-tokens", args.max_tokens != MAX_TOKENS), ("--ignore-eos", args.ignore_eos),
            ("--special", args.special), ("--no-prefix-caching", args.no_prefix_caching),
        )
        if is_given
    ]  # fmt: skip
    if surplus:
        raise ConfigError(f"--dry-run runs shapes alone: it cannot use {', '.join(surplus)}")
    if not args.lens:
        raise ConfigError("--dry-run needs --lens, the tokens of each request, such as --lens 4,1,1")


def _modes(args: argparse.Namespace) -> list[str]:
    """What is asked for instead of the trace."""
    asked = {"--explain": args.explain is not None, "--annotate": args.annotate is not None, "--verify": args.verify}
    return [option for option, is_asked in asked.items() if is_asked]


def _check_outputs(args: argparse.Namespace) -> None:
    """Each output has a place of its own, and something to be written there."""
    modes = _modes(args)
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} are answers of different kinds; expected one of them")
    mode = "".join(modes)
    for option, path in (("--json", args.json), ("--html", args.html)):
        if mode and path is not None and (mode, option) != ("--annotate", "--html"):
            raise ConfigError(f"{option} writes a trace, and {mode} prints none; leave one of them out")
    if args.json is not None and args.html is not None and _place(args.json) == _place(args.html):
        raise ConfigError(f"--json and --html both name {brief(args.json)}; expected two places")


def _place(path: str) -> str:
    return path if path == "-" else os.path.realpath(path)


def check_writable(option: str, path: str | None) -> None:
    """Refuse a path that cannot be written; a file that is there stays whole until records come."""
    if path is None or path == "-":
        return
    is_there = os.path.lexists(path)
    try:
        open(path, "ab").close()
        if not is_there:
            os.remove(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot write {brief(path)}: {reason}; give {option} a writable file") from None


def view_options(args: argparse.Namespace, num_layers: int, width: int | None, roofline: Roofline | None) -> Options:
    """What to print of a model with so many layers.

    `width` is the terminal's, None in a pipe: there rows keep their columns, but no list is shortened.
    """
    return Options(
        has_values=args.values,
        has_time=args.time,
        ridge=roofline.ridge if roofline else None,
        bandwidth=roofline.bytes_per_s if roofline else None,
        layers=check_layers((0,) if args.layers is None else args.layers, num_layers),
        full=args.full,
        step=args.step,
        op=args.op,
        width=args.width or width or WIDTH,
        is_whole=args.width is None and width is None,
        is_unicode=args.unicode,
    )


def check_layers(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The layers that are asked for; ConfigError where the model has no such."""
    if not layers:
        return tuple(range(num_layers))
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ConfigError(f"--layers names layer {layer}; this model has layers 0 to {num_layers - 1}")
    return layers


def check_step(wanted: int | None, num_steps: int) -> None:
    """Refuse a step that the run did not come to; known only at its end."""
    if wanted is not None and wanted >= num_steps:
        raise ConfigError(f"--step names step {wanted}; this run has steps 0 to {num_steps - 1}")


def suggestions(args: argparse.Namespace, num_layers: int, num_steps: int) -> Iterable[str]:
    """Options to try next: those that this command did not use."""
    tries: Sequence[tuple[str, bool]] = [
        ("--full", args.full or args.op is not None),
        (f"--layers 0,{num_layers - 1}", args.layers is not None or num_layers < 2),
        ("--step 1", args.step is not None or num_steps < 2),
        ("--op attend", args.op is not None),
        ("--html t.html", args.html is not None),
        ("--explain cu_seqlens_q", args.dry_run),
        ("--json t.jsonl", args.json is not None),
    ]
    return (text for text, is_used in tries if not is_used)
