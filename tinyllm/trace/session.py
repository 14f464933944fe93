"""Drive an engine step by step under the recorder and make a record of each step."""

import itertools
import time
from collections.abc import Iterator, Sequence

import torch

from tinyllm.engine import StepOutput
from tinyllm.llm import LLM
from tinyllm.request import Request
from tinyllm.scheduler import ScheduledRequest
from tinyllm.trace.collect import collect_operations
from tinyllm.trace.decisions import STARTED_AS, History, count_left, read_schedule, request_label
from tinyllm.trace.ledger import Ledger
from tinyllm.trace.record import Candidate, PrefixHit, RequestRecord, StepRecord, TensorRecord
from tinyllm.trace.recorder import Call, Recorder

NUM_CANDIDATES = 4
BATCH_FIELDS = ("token_ids", "positions", "cu_seqlens_q", "seq_lens", "block_table", "slot_mapping", "logits_indices")


def trace_steps(llm: LLM, requests: Sequence[Request]) -> Iterator[StepRecord]:
    """Run the requests to their end; yield one checked record a step. Whoever stops listening gives them up.

    Raises RequestError before anything runs, and LedgerError where a dimension word has two sizes: then an annotation
    is false.
    """
    history = History({request.request_id: request_label(i) for i, request in enumerate(requests)})
    steps = llm.run(requests)
    for index in itertools.count():
        start = time.perf_counter()
        with Recorder() as recorder:
            output = next(steps, None)
        if output is None:
            return
        yield _record(llm, index, recorder, output, history, 1000 * (time.perf_counter() - start))


def _record(
    llm: LLM, index: int, recorder: Recorder, output: StepOutput, history: History, traced_ms: float
) -> StepRecord:
    ledger = Ledger({**llm.loaded.config.dims(), **llm.engine.cache_config.dims()})
    ledger.check(recorder.calls)
    schedule = output.schedule
    labels = history.name(entry.request.request_id for entry in schedule.scheduled)
    hits = history.read_hits(schedule, llm.engine.cache_config.block_size)
    probabilities = torch.softmax(output.logits.float(), dim=-1)
    return StepRecord(
        index=index,
        requests=tuple(
            _request_record(llm, label, entry, hits.get(label), token_id, row)
            for label, entry, token_id, row in zip(
                labels, schedule.scheduled, output.sampled_token_ids, probabilities, strict=True
            )
        ),
        schedule=read_schedule(schedule, llm.engine.scheduler, history),
        batch=_batch_tensors(recorder),
        batch_values={name: getattr(output.batch, name).tolist() for name in BATCH_FIELDS},
        dims=ledger.sizes,
        operations=collect_operations(recorder.calls, ledger, labels),
        num_compared=ledger.num_compared,
        traced_ms=traced_ms,
        kv_bytes_per_token=llm.engine.kv_cache.num_bytes // llm.engine.cache_config.num_slots,
    )


def _batch_tensors(recorder: Recorder) -> dict[str, TensorRecord]:
    build: Call = next(call for call in recorder.calls if call.name == "build_batch")
    return {
        value.name: TensorRecord(
            value.name, value.words, value.sizes, value.dtype, value.num_bytes, value.storage, True
        )
        for value in build.values
        if value.role == "field" and value.words
    }


def _request_record(
    llm: LLM,
    label: str,
    entry: ScheduledRequest,
    hit: PrefixHit | None,
    token_id: int | None,
    probabilities: torch.Tensor,
) -> RequestRecord:
    request, params = entry.request, entry.request.params
    top = probabilities.topk(min(NUM_CANDIDATES, len(probabilities)))
    ids = [] if token_id is None else top.indices.tolist()
    extras = "".join(
        f" {name}={getattr(params, name)}"
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        if getattr(params, name) != off
    )
    return RequestRecord(
        label=label,
        token_ids=entry.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=entry.num_computed_tokens,
        num_left=count_left(entry),
        block_size=llm.engine.cache_config.block_size,
        block_ids=entry.block_ids,
        new_block_ids=entry.new_block_ids,
        started_as=STARTED_AS[entry.started_as],
        cut_by=entry.cut_by,
        hit=hit,
        samples=entry.samples,
        state="finished" if request.status.is_finished else "running",
        finish_reason=request.finish_reason,
        chosen=None if token_id is None or not entry.samples else _candidate(llm, token_id, probabilities),
        candidates=tuple(_candidate(llm, candidate_id, probabilities) for candidate_id in ids),
        method="greedy" if params.is_greedy else f"T={params.temperature:g}{extras} seed={request.seed}",
    )


def _candidate(llm: LLM, token_id: int, probabilities: torch.Tensor) -> Candidate:
    is_known = token_id < llm.tokenizer.vocab_size
    text = llm.tokenizer.token_text(token_id) if is_known else f"<{token_id}>"
    return Candidate(token_id, text, float(probabilities[token_id]))
