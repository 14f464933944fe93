"""``python -m tinyllm.bench``: what checking, tracing, the attention bodies and batching cost on the default model.

The overheads of checking and tracing are measured here; the fast bodies, and static against continuous batching, in a
second process that starts with TINYLLM_CHECK=0, where nothing is wrapped at all.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from tinyllm.bench.batching import Setup, compare, skewed_workload
from tinyllm.bench.measure import render, take_turns
from tinyllm.console import run
from tinyllm.llm import LLM
from tinyllm.request import SamplingParams
from tinyllm.shapes import checking
from tinyllm.trace import Ledger, Recorder
from tinyllm.trace.collect import collect_operations
from tinyllm.weights.load import LoadedModel, build_decoder, load_model

PROMPTS = ["The capital of France is", "Water boils at 100 degrees"]
ROUNDS = 15
MAX_TOKENS = 400
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

    def traced(self, step: Callable[[], None], has_records: bool) -> None:
        """A step under the recorder; with records also the ledger and the rows."""
        with Recorder() as recorder:
            step()
        if has_records:
            ledger = Ledger({**self.llm.loaded.config.dims(), **self.llm.engine.cache_config.dims()})
            ledger.check(recorder.calls)
            collect_operations(recorder.calls, ledger, ["A", "B"])


def bench_overheads() -> None:
    """A decode step and a prefill: unchecked, checked, traced."""
    loaded = load_model()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        steps = Steps(loaded)
        _bench_overhead("decode step, 2 requests", steps, steps.decode)
        _bench_overhead("prefill, 13 tokens", steps, steps.prefill)


def _bench_overhead(title: str, steps: Steps, step: Callable[[], None]) -> None:
    variants = {
        "unchecked": lambda: _unchecked(step),
        "checked": step,
        "traced": lambda: steps.traced(step, has_records=False),
        "traced, ledger and records": lambda: steps.traced(step, has_records=True),
    }
    _print(render(f"{title}, {_threads()}", take_turns(variants, ROUNDS)))


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
