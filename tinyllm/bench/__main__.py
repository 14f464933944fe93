"""``python -m tinyllm.bench``: what checking, tracing, the attention bodies and batching cost on the default model.

The overheads of checking and tracing are measured here; the fast bodies, and static against continuous batching, in a
second process that starts with TINYLLM_CHECK=0, where nothing is wrapped at all.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import gguf
import torch

from tinyllm.bench.batching import Setup, compare, skewed_workload
from tinyllm.bench.measure import render, take_turns
from tinyllm.console import run
from tinyllm.llm import LLM
from tinyllm.request import SamplingParams
from tinyllm.shapes import checking
from tinyllm.trace import Recorder, Trace, trace
from tinyllm.trace.terminal import render_run
from tinyllm.weights.default import find_default_model
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.load import LoadedModel, build_decoder, load_model

PROMPTS = ["The capital of France is", "Water boils at 100 degrees"]
ROUNDS = 15
MAX_TOKENS = 400
NUM_DECODES = 8
MAX_STEP_RATIO, MAX_RUN_SECONDS, MAX_RENDER_SECONDS = 1.7, 1, 0.5  # what tracing may cost
PASSAGE = (
    "Water boils at 100 degrees and freezes at 0. A kettle of it takes some minutes and a cup of it less; a lake never "
    "boils, as the sun is too far away."
)


class Steps:
    """Endless decode steps (or prefills) of the two prompts on one engine."""

    def __init__(self, loaded: LoadedModel):
        self.llm = LLM(loaded, check_shapes=True, max_model_len=512)
        self.params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

    def start(self) -> None:
        """Queue both prompts and run their prefill, so that the next step is a decode."""
        self.clear()
        for request in self.llm.make_requests(PROMPTS, self.params):
            self.llm.engine.add_request(request)
        self.llm.engine.step()

    def clear(self) -> None:
        """Forget what runs."""
        scheduler = self.llm.engine.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            scheduler.abort(request)

    def decode(self) -> None:
        """One decode step of both prompts."""
        if not self.llm.engine.has_unfinished_requests:
            self.start()
        self.llm.engine.step()

    def prefill(self) -> None:
        """One prefill of both prompts, 13 tokens."""
        self.start()

    def run(self) -> None:
        """Both prompts from their prefill to the end of `NUM_DECODES` decode steps."""
        self.clear()
        self.llm.generate(PROMPTS, SamplingParams(max_tokens=1 + NUM_DECODES, ignore_eos=True))


def bench_overheads() -> None:
    """A decode step and a prefill unchecked, checked and traced; then what a whole traced run costs."""
    loaded = load_model()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        steps = Steps(loaded)
        _bench_overhead("decode step, 2 requests", steps.decode)
        _bench_overhead("prefill, 13 tokens", steps.prefill)
        _bench_run(steps)
    _bench_requests(steps)


def _bench_overhead(title: str, step: Callable[[], None]) -> None:
    variants = {
        "unchecked": lambda: _unchecked(step),
        "checked": step,
        "recorder alone": lambda: _recorded(step),
        "with trace(), ledger included": lambda: _traced(step),
    }
    timings = take_turns(variants, ROUNDS)
    _print(render(f"{title}, {_threads()}", timings))
    if "decode" in title:
        ratio = timings[-1].median / timings[0].median
        _print([f"  tracing a decode step: {ratio:.2f} times the unchecked one (target: at most {MAX_STEP_RATIO})"])


def _bench_run(steps: Steps) -> None:
    """What tracing adds to a run, what printing it takes, and that nothing of it stays."""
    timings = take_turns({"unchecked": lambda: _unchecked(steps.run), "with trace()": lambda: _traced(steps.run)}, 5)
    _print(render(f"prefill of 13 tokens and {NUM_DECODES} decode steps, {_threads()}", timings))
    added = timings[1].median - timings[0].median
    seen = _traced(steps.run)
    begin = time.perf_counter()
    num_lines = len(list(render_run(seen.run)))
    rendering = time.perf_counter() - begin
    visited = count_visited_frames(steps.decode)
    assert visited == 0, f"tracing is off, and the recorder still sees {visited} frames"
    _print([
        f"  tracing the run: {added:.2f} s more than the unchecked one (target: at most {MAX_RUN_SECONDS:.0f} s)",
        f"  printing its {num_lines} lines: {rendering:.2f} s (target: under {MAX_RENDER_SECONDS} s)",
        f"  off: {visited} frames visited in a decode step",
    ])  # fmt: skip


def count_visited_frames(step: Callable[[], None]) -> int:
    """How many frames a recorder that was on, and is off again, looks at during the step."""
    visited = 0

    class Counting(Recorder):
        def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
            nonlocal visited
            visited += 1
            return super()._on_call(frame, event, _)

    with Counting():
        step()
    assert visited > 100, "it counts"
    visited = 0
    step()
    return visited


def _bench_requests(steps: Steps) -> None:
    """What a traced decode step costs with what is recorded on request only."""
    asked: dict[str, dict[str, Any]] = {
        "with trace()": {},
        "residual=True": {"residual": True},
        "times=True": {"times": True},
        'values="attend"': {"values": "attend"},
        "kernels=True": {"kernels": True},
    }
    variants = {name: lambda options=options: _traced(steps.decode, **options) for name, options in asked.items()}
    _print(render(f"traced decode step and what is asked for, {_threads()}", take_turns(variants, ROUNDS)))


def _recorded(step: Callable[[], None]) -> None:
    with Recorder():
        step()


def _traced(step: Callable[[], None], **options: Any) -> Trace:
    with trace(**options) as seen:
        step()
    return seen


def _threads() -> str:
    return f"{torch.get_num_threads()} thread{'s'[: torch.get_num_threads() - 1]}"


def _unchecked(step: Callable[[], None]) -> None:
    with checking(False):
        step()


def bench_bodies() -> None:
    """The attention bodies against each other, with nothing wrapped."""
    loaded = load_model()
    fast = LoadedModel(loaded.config, build_decoder(loaded.config, loaded.decoder.state_dict(), "sdpa"), loaded.tokenizer,
                       loaded.path, "sdpa")  # fmt: skip
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        bench_generation(fast)
        bodies = {"reference": Steps(loaded), "sdpa": Steps(fast)}
        for title, name in (("decode step, 2 requests", "decode"), ("prefill, 13 tokens", "prefill")):
            variants = {body: getattr(steps, name) for body, steps in bodies.items()}
            _print(render(f"{title}, {_threads()}, nothing wrapped", take_turns(variants, ROUNDS)))
    bench_batching(fast)


def bench_generation(loaded: LoadedModel) -> None:
    """Tokens and characters per second side by side: only the second can be compared between tokenizers."""
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    llm = LLM(loaded, max_model_len=512)
    for num_prompts in (1, 4):
        prompts = (PROMPTS * 2)[:num_prompts]
        (timing,) = take_turns({"generate": lambda prompts=prompts: llm.generate(prompts, params)}, 3)
        answers = llm.generate(prompts, params)
        num_tokens = sum(len(answer.token_ids) for answer in answers)
        num_characters = sum(len(answer.text) for answer in answers)
        rates = f"{num_tokens / timing.median:7.1f} tokens/s {num_characters / timing.median:8.1f} characters/s"
        print(f"generate, {num_prompts} together, {_threads()}: {rates}", flush=True)


def bench_batching(loaded: LoadedModel) -> None:
    """Static against continuous batching and reserved against paged memory, on a skewed workload."""
    workload = skewed_workload(loaded.tokenizer.encode(PASSAGE))
    _print(list(compare(loaded.decoder, workload, Setup(max_num_seqs=8, max_model_len=256), rounds=1).lines()))


def bench_command() -> None:
    """The newcomer's command from process start to process end, and the model's share of it."""
    command = [sys.executable, "-m", "tinyllm.trace", PROMPTS[0]]
    variants = {
        'python -m tinyllm.trace "..."': lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True),
        "import tinyllm": lambda: subprocess.run([sys.executable, "-c", "import tinyllm"], check=True),
    }
    _print(render("whole processes", take_turns(variants, 5)))
    _print(render("in this process", take_turns({"load the default model": load_model}, 3)))
    path = find_default_model()
    readers = {"ours": lambda: read_gguf(path), "the gguf package's": lambda: gguf.GGUFReader(path)}
    _print(render("reading the header of its GGUF file", take_turns(readers, 3)))


def _print(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every measurement; the second process runs the bodies and the batching only."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["bodies"]:
        bench_bodies()
        return
    bench_command()
    bench_overheads()
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(
            [sys.executable, "-m", "tinyllm.bench", "bodies"], env={**os.environ, "TINYLLM_CHECK": "0"}, check=True
        )


if __name__ == "__main__":
    sys.exit(run(main))
