"""From one engine step, seen by a recorder, to its record; and a run whose steps come one by one."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinyllm.batch import build_batch, build_sampling_batch
from tinyllm.config import CacheConfig
from tinyllm.engine import Engine, StepOutput
from tinyllm.kv_cache import KVCache
from tinyllm.llm import LLM
from tinyllm.request import Request
from tinyllm.sampler.sample import sample
from tinyllm.scheduler import Schedule, ScheduledRequest
from tinyllm.tokenizer import Tokenizer
from tinyllm.trace.calls import Call
from tinyllm.trace.collect import Memo, collect_operations
from tinyllm.trace.decisions import STARTED_AS, History, count_left, read_schedule, request_label
from tinyllm.trace.ledger import Ledger
from tinyllm.trace.record import (
    AnswerRecord,
    Candidate,
    PrefixHit,
    PromptRecord,
    RequestRecord,
    RunRecord,
    StepRecord,
    TensorRecord,
)
from tinyllm.trace.recorder import Recorder
from tinyllm.trace.values import Wanted

NUM_CANDIDATES = 4
BATCH_FIELDS = ("token_ids", "positions", "cu_seqlens_q", "seq_lens", "block_table", "slot_mapping", "logits_indices")


def trace_steps(
    llm: LLM,
    requests: Sequence[Request],
    *,
    values: Wanted | None = None,
    residual: bool | None = None,
    times: bool = False,
    kernels: bool = False,
) -> Iterator[StepRecord]:
    """Run the requests to their end; yield one checked record a step. Whoever stops listening gives them up.

    values names functions or rows, such as ``attend`` or ``*_proj``, whose tensors get `stats`; residual asks for
    `residual_rms` (None: where values are asked for); times for each row's `time_us`, after one `warm_up`; kernels for
    its `kernels`.

    Raises RequestError before anything runs, and LedgerError where a dimension word has two sizes: then an annotation
    is false.
    """
    history = History({request.request_id: request_label(i) for i, request in enumerate(requests)})
    reader = StepReader(llm.engine, llm.tokenizer, history, has_times=times)
    has_residual = values is not None if residual is None else residual
    for request in requests:
        llm.engine.check_request(request)
    if times and requests:
        warm_up(llm.engine, requests)
    steps = llm.run(requests)
    while True:
        start = time.perf_counter()
        with Recorder(values=values, residual=has_residual, kernels=kernels) as recorder:
            output = next(steps, None)
        if output is None:
            return
        traced_ms = 1000 * (time.perf_counter() - start)
        yield reader.read(recorder.calls, output.schedule, output, traced_ms, recorder.reading_ms)


def warm_up(engine: Engine, requests: Sequence[Request]) -> None:
    """Run model and sampler once, untimed, so that no row pays for what comes once in a process.

    That is torch's choice of kernels and its first memory, and the recorder's reading of sources: without it a small row of
    the first step shows many times its later time. A prompt of four tokens and a single token pass through, sampled like
    the first request and the last, over a cache of their own: the engine's cache, blocks and requests stay untouched. What
    comes once for each new shape, some microseconds a row, stays in the rows.
    """
    query_lens, block_size = (4, 1), engine.cache_config.block_size
    num_blocks = engine.cache_config.count_blocks(query_lens[0])
    cache = CacheConfig(block_size, 1 + num_blocks + 1)
    kv_cache = KVCache(engine.model.config, cache, engine.kv_cache.kv.dtype, engine.device)
    ends, device = (requests[0], requests[-1]), engine.device
    with Recorder():
        batch = build_batch([[0] * 4, [0]], [0, 0], [[*range(1, 1 + num_blocks)], [1 + num_blocks]], block_size, device)
        sampling = build_sampling_batch(
            [request.params for request in ends],
            [request.seed for request in ends],
            query_lens,
            engine.model.config.vocab_size,
            device,
            [request.banned_ids for request in ends],
        )
        sample(engine.model(batch, kv_cache), sampling)


@dataclass
class StepReader:
    """Makes records of an engine's steps. tokenizer None leaves the tokens' texts out."""

    engine: Engine
    tokenizer: Tokenizer | None
    history: History = field(default_factory=History)
    has_times: bool = False
    _memo: Memo = field(default_factory=Memo)
    _indices: Iterator[int] = field(default_factory=itertools.count)

    def read(
        self,
        calls: Sequence[Call],
        schedule: Schedule,
        output: StepOutput | None,
        traced_ms: float,
        reading_ms: float = 0,
    ) -> StepRecord:
        """The record of the step that these calls made; output None is one that failed, of which the calls tell how.

        Raises LedgerError where a dimension word has two sizes.
        """
        config, cache = self.engine.model.config, self.engine.cache_config
        batch = output.batch if output else self.engine.build_batch(schedule)  # a failed step's once more
        ledger = Ledger({**config.dims(), **cache.dims()})
        ledger.check(calls)
        labels = self.history.name(entry.request.request_id for entry in schedule.scheduled)
        return StepRecord(
            index=next(self._indices),
            requests=self._read_requests(schedule, labels, output),
            schedule=read_schedule(schedule, self.engine.scheduler, self.history),
            batch=batch_tensors(calls),
            batch_values={name: getattr(batch, name).tolist() for name in BATCH_FIELDS},
            dims=ledger.sizes,
            operations=collect_operations(calls, ledger, labels, self._memo, self.has_times),
            num_compared=ledger.num_compared,
            traced_ms=traced_ms,
            kv_bytes_per_token=self.engine.kv_cache.num_bytes // cache.num_slots,
            failure="" if output else _find_failure(calls),
            residual_rms=residual_growth(calls),
            reading_ms=reading_ms,
        )

    def _read_requests(
        self, schedule: Schedule, labels: Sequence[str], output: StepOutput | None
    ) -> tuple[RequestRecord, ...]:
        hits = self.history.read_hits(schedule, self.engine.cache_config.block_size)
        if output is None:
            return tuple(
                self._read_request(label, entry, hits.get(label), None, None)
                for label, entry in zip(labels, schedule.scheduled, strict=True)
            )
        probabilities = torch.softmax(output.logits.float(), dim=-1)
        rows = zip(labels, schedule.scheduled, output.sampled_token_ids, probabilities, strict=True)
        return tuple(
            self._read_request(label, entry, hits.get(label), token_id, row) for label, entry, token_id, row in rows
        )

    def _read_request(
        self,
        label: str,
        entry: ScheduledRequest,
        hit: PrefixHit | None,
        token_id: int | None,
        probabilities: Tensor | None,
    ) -> RequestRecord:
        request = entry.request
        candidates = () if token_id is None or probabilities is None else self._candidates(probabilities)
        is_chosen = token_id is not None and probabilities is not None and entry.samples
        return RequestRecord(
            label=label,
            token_ids=entry.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=entry.num_computed_tokens,
            num_left=count_left(entry),
            block_size=self.engine.cache_config.block_size,
            block_ids=entry.block_ids,
            new_block_ids=entry.new_block_ids,
            started_as=STARTED_AS[entry.started_as],
            cut_by=entry.cut_by,
            hit=hit,
            samples=entry.samples,
            state="finished" if request.status.is_finished else "running",
            finish_reason=request.finish_reason,
            chosen=self._candidate(token_id, probabilities) if is_chosen else None,  # type: ignore[arg-type]
            candidates=candidates,
            method=_method(request),
        )

    def _candidates(self, probabilities: Tensor) -> tuple[Candidate, ...]:
        top = probabilities.topk(min(NUM_CANDIDATES, len(probabilities)))
        return tuple(self._candidate(token_id, probabilities) for token_id in top.indices.tolist())

    def _candidate(self, token_id: int, probabilities: Tensor) -> Candidate:
        return Candidate(token_id, token_text(self.tokenizer, token_id), float(probabilities[token_id]))


def start_run(engine: Engine, llm: LLM | None, prompts: Iterable[PromptRecord]) -> RunRecord:
    """What is known of a run without its steps; llm None is an engine without one."""
    pool, config = engine.kv_cache, engine.model.config
    return RunRecord(
        model=llm.loaded.path.name if llm else config.name,
        dtype=str(pool.kv.dtype).removeprefix("torch."),
        attention=llm.loaded.attention if llm else "",
        kv_shape=tuple(pool.kv.shape),
        kv_bytes=pool.num_bytes,
        dims={**config.dims(), **engine.cache_config.dims()},
        prompts=tuple(prompts),
        steps=(),
        answers=(),
        config_name=config.name,
        prefix_caching=engine.cache_config.enable_prefix_caching,
    )


def answer_record(llm: LLM | None, label: str, request: Request) -> AnswerRecord:
    """What a request gave so far; without an LLM its tokens have no text."""
    completion = llm.completion(request) if llm else None
    text, reason = (completion.text, completion.finish_reason) if completion else ("", request.finish_reason)
    return AnswerRecord(label, text, tuple(request.output_token_ids), reason or "running", request.seed)


def prompt_record(llm: LLM, label: str, text: str, parse_special: bool) -> PromptRecord:
    """A prompt with the texts of its tokens, word by word."""
    tokenizer = llm.tokenizer
    words = tokenizer.encode_words(text, parse_special=parse_special)
    pieces = [tuple(tokenizer.token_text(token_id) for token_id in word.token_ids) for word in words]
    begin = [(tokenizer.token_text(token_id),) for token_id in llm.loaded.bos_prefix]
    return PromptRecord(label, text, (*begin, *pieces))


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The token's own text; its id in angle brackets where it has none."""
    is_known = tokenizer is not None and token_id < tokenizer.vocab_size
    return tokenizer.token_text(token_id) if is_known and tokenizer else f"<{token_id}>"


def _method(request: Request) -> str:
    params = request.params
    extras = "".join(
        f" {name}={getattr(params, name)}"
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        if getattr(params, name) != off
    )
    return "greedy" if params.is_greedy else f"T={params.temperature:g}{extras} seed={request.seed}"


def batch_tensors(calls: Sequence[Call]) -> dict[str, TensorRecord]:
    """The fields of the flat batch, as the call that built it shows them; none where it was not reached."""
    build = next((call for call in calls if call.name == "build_batch"), None)
    return {
        value.name: TensorRecord(
            value.name, value.words, value.sizes, value.dtype, value.num_bytes, value.storage, True
        )
        for value in (build.values if build else ())
        if value.role == "field" and value.words
    }


def residual_growth(calls: Sequence[Call]) -> tuple[float, ...]:
    """What each layer left of the residual stream, as its root mean square over all rows; none where not asked for."""
    every = (call for root in calls for call in root.walk())
    return tuple(call.residual_rms for call in every if call.residual_rms is not None)


def _find_failure(calls: Sequence[Call]) -> str:
    """Where the step ended and why, from the innermost call that raised: ``layers.3.mlp (layers/mlp.py:20): ...``."""
    failed = [call for root in calls for call in root.walk() if call.has_failed]
    if not failed:
        return "outside the tensor functions"
    call = failed[-1]  # calls keep time order, and a failed call has nothing after it
    return f"{call.path or call.name} ({call.spec.file.name}:{call.spec.first_line}): {call.error}"
