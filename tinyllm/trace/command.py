"""The trace command: a run, and the outputs that follow it step by step."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from rich.console import Console

from tinyllm.config import CacheConfig
from tinyllm.console import EXIT_ERROR, working
from tinyllm.errors import ConfigError, RequestError
from tinyllm.llm import DEFAULT_MAX_MODEL_LEN, LLM, check_finish_reasons, how_far
from tinyllm.options import make_requests, naming_prompt, sampling_params
from tinyllm.request import Request, SamplingParams
from tinyllm.trace.annotate import annotate, annotate_html, find_source, record_calls
from tinyllm.trace.arguments import check_arguments, check_layers, check_step, make_parser, view_options
from tinyllm.trace.calibrate import measured_roofline
from tinyllm.trace.dry_run import dry_run, parse_lens, read_config
from tinyllm.trace.explain import explain
from tinyllm.trace.outputs import HtmlOutput, JsonOutput, Output, TextOutput, terminal_width, write_run
from tinyllm.trace.record import StepRecord
from tinyllm.trace.recorder import self_test
from tinyllm.trace.session import answer_record, prompt_record, request_label, start_run, trace_steps
from tinyllm.trace.terminal import MAX_WIDTH, Options
from tinyllm.trace.text import show_count
from tinyllm.trace.verify import import_transformers, verify
from tinyllm.weights.load import LoadedModel, load_model

DEFAULT_PROMPT = "The capital of France is"  # of --annotate, which needs some run


def main(argv: Sequence[str] | None = None, prog: str = "python -m tinyllm.trace") -> None:
    """Run the command; raises TinyllmError for what the user can mend."""
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser(prog).parse_args(argv)
    args.argv = tuple(argv)
    params = sampling_params(args)
    self_test()
    check_arguments(args)
    if args.dry_run:
        _run_dry(args)
        return
    if args.explain is not None:
        lines = explain(args.explain)  # an unknown word is refused before the model is loaded
        if not args.prompts:
            print("\n".join(lines))
            return
    if args.annotate is not None:
        args.prompts = args.prompts or [DEFAULT_PROMPT]
        find_source(args.annotate)
    if args.verify:
        import_transformers()
    with working("loading the model"):
        loaded = load_model(args.model, args.dtype, args.attention)
    llm, requests = _prepare(loaded, args, params)
    mode = _explain if args.explain else _annotate if args.annotate else _verify if args.verify else _trace
    mode(llm, requests, args)
    check_finish_reasons(request.finish_reason for request in requests)


# --- instead of the trace -------------------------------------------------------------------------------------------------


def _run_dry(args: argparse.Namespace) -> None:
    config = read_config(args.model if args.config is None else args.config)
    with working("running the shapes"):
        run = dry_run(
            config, *parse_lens(args.lens), block_size=args.block_size, dtype=args.dtype, attention=args.attention,
            kernels=args.ops,
        )  # fmt: skip
    options = view_options(args, config.num_layers, terminal_width(), None)
    check_step(args.step, len(run.steps))
    with contextlib.ExitStack() as files:
        write_run(replace(run, argv=args.argv), make_outputs(args, options, files))


def _explain(llm: LLM, requests: Sequence[Request], args: argparse.Namespace) -> None:
    num_steps = 0
    for step in _watched(llm, requests, args):
        num_steps += 1
        if step.index == (args.step or 0):  # the steps behind it need not run
            print("\n".join(explain(args.explain, step)))
            return
    check_step(args.step, num_steps)


def _annotate(llm: LLM, requests: Sequence[Request], args: argparse.Namespace) -> None:
    num_layers = llm.loaded.config.num_layers
    (layer, *_) = check_layers((min(1, num_layers - 1),) if args.layers is None else args.layers, num_layers)
    runs = record_calls(llm, [request.prompt_token_ids for request in requests], requests[0].params)
    if args.html is None:
        print("\n".join(annotate(args.annotate, runs, layer)))
        return
    with contextlib.ExitStack() as files:
        _open(args.html, files).write(annotate_html(args.annotate, runs, layer))


def _verify(llm: LLM, requests: Sequence[Request], args: argparse.Namespace) -> None:
    with working("running both"):
        found = verify(llm, [request.prompt_token_ids for request in requests])
    print("\n".join(found.lines()))
    if found.first_departure is not None:
        raise SystemExit(EXIT_ERROR)


def _trace(llm: LLM, requests: Sequence[Request], args: argparse.Namespace) -> None:
    with working("measuring this machine"):
        roofline = None if args.no_calibrate else measured_roofline(llm.engine.kv_cache.kv.dtype)
    options = view_options(args, llm.loaded.config.num_layers, terminal_width(), roofline)
    with contextlib.ExitStack() as files:
        trace_run(llm, requests, args, make_outputs(args, options, files), options.ridge)


# --- the run --------------------------------------------------------------------------------------------------------------


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
    needs = [CacheConfig(args.block_size).count_blocks(end) for end in ends]
    if args.num_blocks is None:
        return 1 + sum(needs)
    if args.num_blocks <= max(needs):
        raise ConfigError(
            f"--num-blocks {args.num_blocks} holds {show_count((args.num_blocks - 1) * args.block_size, 'token')} beside the null block; "
            f"a prompt and its answer may take {max(ends)}, so expected at least {1 + max(needs)}"
        )
    return args.num_blocks


def trace_run(
    llm: LLM,
    requests: Sequence[Request],
    args: argparse.Namespace,
    outputs: Sequence[Output],
    ridge: float | None = None,
) -> None:
    """Run the requests to their end; every output hears of the start, each step and the end. ridge is the machine's."""
    texts = enumerate(args.prompts)
    prompts = (prompt_record(llm, request_label(i), text, args.special) for i, text in texts)
    run = replace(start_run(llm.engine, llm, prompts), argv=args.argv, ridge=ridge)
    for output in outputs:
        output.start(run)
    num_steps = 0
    for step in _watched(llm, requests, args):
        num_steps += 1
        for output in outputs:
            output.step(step)
    check_step(args.step, num_steps)
    answers = tuple(answer_record(llm, request_label(i), request) for i, request in enumerate(requests))
    run = replace(run, answers=answers)
    for output in outputs:
        output.end(run)


def _watched(llm: LLM, requests: Sequence[Request], args: argparse.Namespace) -> Iterator[StepRecord]:
    """The steps, with a word on stderr while each is computed."""
    values = args.op if args.values else None
    steps = trace_steps(llm, requests, values=values, residual=True, times=args.time, kernels=args.ops)
    while True:
        with working(how_far(requests)):
            step = next(steps, None)
        if step is None:
            return
        yield step


# --- the outputs --------------------------------------------------------------------------------------------------------


def make_outputs(args: argparse.Namespace, options: Options, files: contextlib.ExitStack) -> list[Output]:
    """What this command writes to; `files` closes what is opened for it."""
    outputs: list[Output] = []
    if args.json is not None:
        outputs.append(JsonOutput(_open(args.json, files)))
    if args.html is not None:
        outputs.append(HtmlOutput(lambda: _open(args.html, files), options.ridge))
    if "-" not in (args.json, args.html):
        outputs.append(TextOutput(args, options, make_console()))
    return outputs


def _open(path: str, files: contextlib.ExitStack) -> TextIO:
    return sys.stdout if path == "-" else files.enter_context(open(path, "w", encoding="utf-8", newline="\n"))


def make_console() -> Console:
    """rich for the terminal; a pipe or a file gets the bare text, whatever the environment says."""
    is_terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout, markup=False, emoji=False, highlight=False,
        width=MAX_WIDTH,  # lines are never wrapped; but a width of 0 from the environment would swallow them
        force_terminal=is_terminal, color_system="auto" if is_terminal else None,
        no_color=bool(os.environ.get("NO_COLOR")),  # an empty value does not count; rich before 14 counted it
    )  # fmt: skip
