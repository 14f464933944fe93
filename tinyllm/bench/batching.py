"""Static against continuous batching, and reserved against paged memory: one workload, greedy, over one model.

Static batching takes requests in groups, in order of arrival: a group is padded to its longest prompt, runs until its
longest answer is done, and only then the next group starts. Continuous batching is the `Engine` as it is: whoever ends
makes room at once. Both run for real and must give the same tokens.

Four requests in a batch of two places, with answers of 1, 5, 5 and 1 tokens. Static takes 5 steps a group; in the
continuous run the third request starts when the first has ended:

    step         1 2 3 4 5 6 7 8 9 10              step         1 2 3 4 5 6
    static       A - - - - C C C C C               continuous   A C C C C C
                 B B B B B D - - - -                            B B B B B D

Weights of zero make a model that only ever says token 0, which is all that this needs:

>>> from torch.nn.init import zeros_
>>> model = Decoder(ModelConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
...                             head_dim=8, vocab_size=16, max_positions=8)).requires_grad_(False)
>>> _ = [zeros_(weight) for weight in model.parameters()]
>>> workload = [([1, 2], 1), ([3, 4, 5], 5), ([6], 5), ([7, 8, 9, 10], 1)]
>>> result = compare(model, workload, Setup(max_num_seqs=2, max_model_len=8, block_size=4))
>>> result.static.num_steps, result.continuous.num_steps
(10, 6)
>>> result.static.slot_utilisation, result.continuous.slot_utilisation
(0.6, 1.0)

Counted and computed are two things. Our engine's batch is flat and never holds padding, so it computes the same rows
either way; what a rectangular batch would compute is counted (`count_rectangle`). Measured seconds show only what
static batching's additional steps cost, not its padding: they flatter it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinyllm.bench.measure import Timing, take_turns
from tinyllm.config import CacheConfig, ModelConfig, SchedulerConfig
from tinyllm.engine import Engine
from tinyllm.errors import RequestError
from tinyllm.llm import check_finish_reasons
from tinyllm.model import Decoder
from tinyllm.planner import (
    check_context,
    count_req_blocks,
    count_reserved_requests,
    kv_bytes_per_token,
    pool_of_budget,
    show_size,
)
from tinyllm.request import Request, SamplingParams
from tinyllm.scheduler import Schedule

Workload = Sequence[tuple[Sequence[int], int]]  # (token ids of the prompt, tokens of the answer), in order of arrival


@dataclass(frozen=True)
class Setup:
    """The engine that both ways run on: `max_num_seqs` requests at once, of at most `max_model_len` tokens each.

    Token budget and pool are ample: only the places in the batch limit a step. Static batching never shares blocks;
    with enable_prefix_caching the continuous run does. Off by default, so that batching and paging are compared alone.
    Raises ConfigError for a value out of range.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int = 16  # tokens
    enable_prefix_caching: bool = False
    check_shapes: bool = True

    def __post_init__(self) -> None:
        _ = self.limits, self.cache

    @property
    def limits(self) -> SchedulerConfig:
        """A budget for all prompts at once, whole."""
        return SchedulerConfig(self.max_model_len, self.max_num_seqs * self.max_model_len, self.max_num_seqs)

    @property
    def cache(self) -> CacheConfig:
        """A pool in which every running request may become as long as it can."""
        num_blocks = 1 + self.max_num_seqs * count_req_blocks(self.max_model_len, self.block_size)
        return CacheConfig(self.block_size, num_blocks, self.enable_prefix_caching)


# ---- what is reported ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batching:
    """What one way of batching did with a workload.

    A slot is a request's place in the batch here (`max_num_seqs` of them), not a token's place in a KV block.
    """

    max_num_seqs: int
    num_steps: int  # forward passes, each reads all weights
    num_rows: int  # token rows of all batches, padding included: counted as a rectangle where the batch is static
    num_computed_rows: int  # those that stand for a real token; no more than these did our engine compute
    num_output_tokens: int

    @property
    def padded_share(self) -> float:
        """The part of the rows that is padding, below 1: short prompts filled up, and answers that are already done."""
        return (self.num_rows - self.num_computed_rows) / self.num_rows

    @property
    def slot_utilisation(self) -> float:
        """The part of all slots in all steps that gave a token, above 0 and up to 1."""
        return self.num_output_tokens / (self.num_steps * self.max_num_seqs)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the answers that a step gave, on average: no prompt is cut, so one for each running request."""
        return self.num_output_tokens / self.num_steps


@dataclass(frozen=True)
class Usage:
    """Bytes of keys and values at each step of a run."""

    per_step: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Bytes, on average over the steps."""
        return sum(self.per_step) / len(self.per_step)

    @property
    def peak(self) -> int:
        """Bytes of the largest step."""
        return max(self.per_step)


@dataclass(frozen=True)
class Memory:
    """One way to keep the keys and values of the requests that run, step by step.

    Used is what holds a token whose key and value exist once the step has run. `num_fit` says how many requests would
    fit into the same bytes: those that a contiguous reservation took at its peak.
    """

    held: Usage
    used: Usage
    num_fit: int

    @property
    def wasted(self) -> Usage:
        """Held and empty: the unwritten end of each reservation, or of each request's last block."""
        return Usage(tuple(held - used for held, used in zip(self.held.per_step, self.used.per_step, strict=True)))

    @property
    def used_share(self) -> float:
        """The part of the held bytes that is used, over all steps."""
        return sum(self.used.per_step) / sum(self.held.per_step)


@dataclass(frozen=True)
class Comparison:
    """One workload both ways. The memory is that of the continuous run's steps, as either way would keep them.

    Seconds are those of our engine, which computes no padding: see the module. Without rounds there are none.
    """

    setup: Setup
    static: Batching
    continuous: Batching
    reserved: Memory  # each request holds max_model_len tokens in one piece
    paged: (
        Memory  # each holds the blocks that its tokens need; one that several share counts once, and so do its tokens
    )
    answers: tuple[tuple[int, ...], ...]  # the same both ways, in order of the workload
    timings: tuple[Timing, Timing]  # static, continuous

    def lines(self) -> Iterator[str]:
        """Two tables of at most 90 columns."""
        yield from _batching_lines(self)
        yield from _memory_lines(self)


# ---- the comparison --------------------------------------------------------------------------------------------------


def compare(model: Decoder, workload: Workload, setup: Setup, rounds: int = 0) -> Comparison:
    """Run the workload both ways and count; with rounds also measure both, in turns, after the round that is counted.

    Every answer has exactly the tokens that the workload asks for: end tokens are ignored. Raises RequestError for a
    workload that is empty or holds a request that cannot run, ConfigError for more than the model's max_positions.
    """
    check_workload(model.config, workload, setup)
    groups = split_groups(workload, setup.max_num_seqs)
    runs: dict[str, _Run] = {}

    def run_static() -> None:
        runs["static"] = _run(_make_engine(model, setup, enable_prefix_caching=False), groups)

    def run_continuous() -> None:
        runs["continuous"] = _run(_make_engine(model, setup, setup.enable_prefix_caching), [workload])

    timings = take_turns({"static": run_static, "continuous": run_continuous}, rounds)
    static, continuous = runs["static"], runs["continuous"]
    assert static.answers == continuous.answers, "how requests are batched must not change a token"
    reserved, paged = _memories(model, workload, setup, continuous)
    return Comparison(
        setup=setup,
        static=_batching(setup, static, sum(map(count_rectangle, groups))),
        continuous=_batching(setup, continuous, continuous.num_rows),
        reserved=reserved,
        paged=paged,
        answers=continuous.answers,
        timings=(timings[0], timings[1]),
    )


def check_workload(config: ModelConfig, workload: Workload, setup: Setup) -> None:
    """RequestError or ConfigError where the model or the setup cannot run all of the workload to its end."""
    check_context(config, setup.max_model_len)
    if not workload:
        raise RequestError("the workload is empty; expected at least one pair of prompt token ids and max_tokens")
    for request, (prompt, max_tokens) in zip(_make_requests(workload), workload, strict=True):
        if len(prompt) + max_tokens > setup.max_model_len:
            raise RequestError(
                f"request {request.request_id}: {len(prompt)} prompt tokens and an answer of {max_tokens} are "
                f"{len(prompt) + max_tokens}; expected at most max_model_len {setup.max_model_len}"
            )
        for token_id in request.token_ids:
            if token_id not in range(config.vocab_size):
                raise RequestError(
                    f"request {request.request_id}: token id {token_id} is outside the vocabulary of "
                    f"{config.vocab_size}"
                )


def split_groups(workload: Workload, max_num_seqs: int) -> list[Workload]:
    """Static batching's groups, in order of arrival; the last one may be smaller.

    >>> split_groups([([5], 1), ([6], 2), ([7], 3)], max_num_seqs=2)
    [[([5], 1), ([6], 2)], [([7], 3)]]
    """
    return [workload[start : start + max_num_seqs] for start in range(0, len(workload), max_num_seqs)]


def count_rectangle(group: Workload) -> int:
    """Token rows of a static group: its longest prompt for each request, then one row for each in every further step.

    The last token of an answer is never computed, as nobody asks what comes behind it.

    >>> count_rectangle([([1, 2], 1), ([3, 4, 5], 5)])   # 2 requests, each 3 rows of prompt and 4 more; real are 2 + 7
    14
    """
    longest_prompt = max(len(prompt) for prompt, _ in group)
    longest_answer = max(max_tokens for _, max_tokens in group)
    return len(group) * (longest_prompt + longest_answer - 1)


def skewed_workload(token_ids: Sequence[int], num_requests: int = 24, long_answer: int = 24) -> Workload:
    """Mostly short answers and a few long ones, the case for which continuous batching was made.

    Prompts are the first 4 to 24 of `token_ids`; every sixth answer is long, the others have 2 to 6 tokens.

    >>> [(len(prompt), max_tokens) for prompt, max_tokens in skewed_workload(range(24), 6)]
    [(4, 2), (11, 3), (18, 24), (4, 5), (11, 6), (18, 2)]
    """
    return [
        (token_ids[: 4 + 7 * index % 21], long_answer if index % 6 == 2 else 2 + index % 5)
        for index in range(num_requests)
    ]


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """The steps that a workload took, and what came of it."""

    schedules: tuple[Schedule, ...]
    num_rows: int  # of all flat batches
    answers: tuple[tuple[int, ...], ...]


def _make_engine(model: Decoder, setup: Setup, enable_prefix_caching: bool) -> Engine:
    cache = CacheConfig(setup.block_size, setup.cache.num_blocks, enable_prefix_caching)
    return Engine(model, cache, setup.limits, setup.check_shapes)


def _make_requests(workload: Workload, first_id: int = 0) -> list[Request]:
    return [
        Request(str(request_id), prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        for request_id, (prompt, max_tokens) in enumerate(workload, first_id)
    ]


def _run(engine: Engine, groups: Sequence[Workload]) -> _Run:
    """Each group to its end before the next; continuous batching is one group, of which the engine runs what fits."""
    schedules: list[Schedule] = []
    num_rows = 0
    requests: list[Request] = []
    for group in groups:
        members = _make_requests(group, first_id=len(requests))
        requests += members
        for request in members:
            engine.add_request(request)
        while engine.has_unfinished_requests:
            output = engine.step()
            schedules.append(output.schedule)
            num_rows += len(output.batch.token_ids)
    check_finish_reasons(request.finish_reason for request in requests)
    return _Run(tuple(schedules), num_rows, tuple(tuple(request.output_token_ids) for request in requests))


# ---- counting --------------------------------------------------------------------------------------------------------


def _batching(setup: Setup, run: _Run, num_rows: int) -> Batching:
    return Batching(
        max_num_seqs=setup.max_num_seqs,
        num_steps=len(run.schedules),
        num_rows=num_rows,
        num_computed_rows=sum(schedule.num_tokens for schedule in run.schedules),
        num_output_tokens=sum(map(len, run.answers)),
    )


def _memories(model: Decoder, workload: Workload, setup: Setup, run: _Run) -> tuple[Memory, Memory]:
    """(reserved, paged) at each step of a run."""
    bytes_per_value = model.embed_tokens.weight.element_size()
    token = kv_bytes_per_token(model.config, bytes_per_value)
    reserved = Usage(tuple(token * setup.max_model_len * len(schedule.scheduled) for schedule in run.schedules))
    paged = Usage(tuple(token * setup.block_size * schedule.num_used_blocks for schedule in run.schedules))
    seq_lens = [[entry.seq_len for entry in schedule.scheduled] for schedule in run.schedules]
    used_reserved = Usage(tuple(token * sum(lens) for lens in seq_lens))
    used_paged = Usage(tuple(token * count_used_slots(schedule, setup.block_size) for schedule in run.schedules))
    num_reserved = count_reserved_requests(model.config, reserved.peak, setup.max_model_len, bytes_per_value)
    pool = pool_of_budget(model.config, reserved.peak, setup.block_size, bytes_per_value)
    num_paged = count_mean_requests(workload, pool.num_usable_blocks, setup.block_size)
    return Memory(reserved, used_reserved, num_reserved), Memory(paged, used_paged, num_paged)


def count_used_slots(schedule: Schedule, block_size: int) -> int:
    """Token slots of all held blocks that hold a key and a value once the step has run; a shared block's count once."""
    used: dict[int, int] = {}  # block -> its written slots; a shared block is full for each of its holders
    for entry in schedule.scheduled:
        for index, block_id in enumerate(entry.block_ids):
            used[block_id] = min(block_size, entry.seq_len - index * block_size)
    assert len(used) == schedule.num_used_blocks, "every block is held by a request of this step"
    return sum(used.values())


def count_mean_requests(workload: Workload, num_blocks: int, block_size: int) -> int:
    """How many requests of the workload's mean size `num_blocks` hold, each with all its tokens and nothing shared.

    >>> count_mean_requests([([1, 2], 1), ([3, 4, 5], 5)], num_blocks=6, block_size=4)   # 2 and 7 tokens: 1 + 2 blocks
    4
    """
    each = [count_req_blocks(len(prompt) + max_tokens - 1, block_size) for prompt, max_tokens in workload]
    return num_blocks * len(each) // sum(each)


# ---- the tables ------------------------------------------------------------------------------------------------------


def _row(label: str, first: str, second: str, ratio: float | None = None) -> str:
    return f"  {label:46}{first:>12}{second:>12}" + ("" if ratio is None else f"{ratio:>8.2f}")


def _heading(title: str, first: str, second: str) -> str:
    return f"{title:48}{first:>12}{second:>12}{'ratio':>8}"


def _batching_lines(comparison: Comparison) -> Iterator[str]:
    a, b = comparison.static, comparison.continuous
    lens = [len(answer) for answer in comparison.answers]
    answers = f"answers of {min(lens)} to {max(lens)} tokens, {sum(lens)} in all"
    yield f"{len(lens)} requests in {a.max_num_seqs} slots, {answers}; ratio: first / second"
    yield _heading("batching", "static", "continuous")
    yield _row("steps", f"{a.num_steps:,}", f"{b.num_steps:,}", a.num_steps / b.num_steps)
    yield _row("answer tokens a step", f"{a.tokens_per_step:.2f}", f"{b.tokens_per_step:.2f}",
               a.tokens_per_step / b.tokens_per_step)  # fmt: skip
    yield _row("slots that gave a token", f"{a.slot_utilisation:.1%}", f"{b.slot_utilisation:.1%}",
               a.slot_utilisation / b.slot_utilisation)  # fmt: skip
    yield _row("token rows of a rectangle / of the flat batch", f"{a.num_rows:,}", f"{b.num_rows:,}",
               a.num_rows / b.num_rows)  # fmt: skip
    yield _row("padding among them", f"{a.padded_share:.1%}", f"{b.padded_share:.1%}")
    yield _row("token rows that this engine computed", f"{a.num_computed_rows:,}", f"{b.num_computed_rows:,}",
               a.num_computed_rows / b.num_computed_rows)  # fmt: skip
    if comparison.timings[0].seconds:
        first, second = (timing.median for timing in comparison.timings)
        yield _row("seconds, without any padding", f"{first:.2f} s", f"{second:.2f} s", first / second)
        yield "  Padding is counted, not computed: static's seconds show its steps alone, and flatter it."


def _memory_lines(comparison: Comparison) -> Iterator[str]:
    a, b, setup = comparison.reserved, comparison.paged, comparison.setup
    yield _heading("KV memory of the continuous run", "reserved", "paged")
    for label, first, second in (
        ("held, mean over steps", a.held.mean, b.held.mean),
        ("held, peak", a.held.peak, b.held.peak),
        ("used, mean", a.used.mean, b.used.mean),
        ("wasted, mean; paged: inside blocks", a.wasted.mean, b.wasted.mean),
        ("wasted, peak", a.wasted.peak, b.wasted.peak),
    ):
        yield _row(label, show_size(round(first)), show_size(round(second)), first / second if second else None)
    yield _row("used of held", f"{a.used_share:.1%}", f"{b.used_share:.1%}", a.used_share / b.used_share)
    fit = f"requests that fit in {show_size(a.held.peak)}"
    yield _row(fit, f"{a.num_fit:,}", f"{b.num_fit:,}", a.num_fit / b.num_fit if b.num_fit else None)
    paging = f"blocks of {setup.block_size}, requests of mean length"
    yield f"  Reserved: {setup.max_model_len:,} tokens for each request. Paged: {paging}."
