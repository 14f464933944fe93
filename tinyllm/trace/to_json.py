"""A step's record as the plain values that schema.json describes."""

import importlib.metadata
import math
import platform
from typing import Any

import torch

from tinyllm.shapes import WORDS
from tinyllm.trace.record import (
    Operation,
    RequestRecord,
    RunRecord,
    Stats,
    StepRecord,
    TensorRecord,
    sizes_by_symbol,
)
from tinyllm.trace.sums import RunSums, sum_up

SCHEMA_ID = "tinyllm.trace/1"
OWN_SCOPES = ("request", "call")  # of words whose size holds for one row


def run_to_json(run: RunRecord) -> list[dict[str, Any]]:
    """All records of a run, in the order of the file: header, steps, footer."""
    return [header_to_json(run), *map(step_to_json, run.steps), footer_to_json(run, sum_up(run.steps))]


def header_to_json(run: RunRecord) -> dict[str, Any]:
    """What the steps have in common; needs none of them."""
    return {
        "schema": SCHEMA_ID,
        "type": "header",
        "versions": {
            "tinyllm": _own_version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "argv": list(run.argv),
        "machine": {"ridge": run.ridge, "num_threads": torch.get_num_threads()},
        "model": run.config_name or run.model,
        "dtype": run.dtype,
        "attention": run.attention,
        "prefix_caching": run.prefix_caching,
        "dims": sizes_by_symbol(run.dims),
        "words": {word.symbol: name for name, word in WORDS.items()},
        "conventions": {
            "flops": "a multiply-add counts 2",
            "bytes": "each operand moved once",
            "attention": "causal-exact",
        },
        "prompts": [prompt.text for prompt in run.prompts],
    }


def _own_version() -> str | None:
    try:
        return importlib.metadata.version("tinyllm-trace")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return None


def footer_to_json(run: RunRecord, sums: RunSums) -> dict[str, Any]:
    """What came out of the run, and what its steps cost together; needs none of them."""
    return {
        "schema": SCHEMA_ID,
        "type": "footer",
        "num_steps": sums.total.num_steps,
        "totals": _sums_to_json(sums),
        "completions": [
            {"id": answer.label, "text": answer.text, "token_ids": list(answer.token_ids),
             "finish_reason": answer.finish_reason, "seed": answer.seed}
            for answer in run.answers
        ],
    }  # fmt: skip


def _sums_to_json(sums: RunSums) -> dict[str, Any]:
    total = sums.total
    return {
        "flops": total.flops,
        "flops_is_lower_bound": total.has_unknown_flops,
        "bytes": total.num_bytes,
        "intensity": None if total.intensity is None else round(total.intensity, 4),
        "tokens_in": total.num_tokens,
        "tokens_out": total.num_chosen,
        "traced_ms": round(total.traced_ms, 3),
        "reading_ms": round(total.reading_ms, 3),
        "steps": {phase: part.num_steps for phase, part in sums.phases.items()},
    }


def step_to_json(step: StepRecord) -> dict[str, Any]:
    """One step as the plain values of schema.json."""
    first_seen: dict[tuple, str] = {}
    return {
        "schema": SCHEMA_ID,
        "type": "step",
        "step": step.index,
        "phase": step.phase,
        "dims": sizes_by_symbol(step.dims),
        "requests": [_request_to_json(request) for request in step.requests],
        "scheduler": _scheduler_to_json(step),
        "batch": dict(step.batch_values),
        "kv": _kv_to_json(step),
        "ops": [_operation_to_json(i, operation, first_seen) for i, operation in enumerate(step.operations)],
        "sampling": [_sampling_to_json(i, request) for i, request in enumerate(step.requests)],
        "totals": _totals_to_json(step),
        "residual_rms": [_number(value) for value in step.residual_rms],
        "failure": step.failure,
    }


def _request_to_json(request: RequestRecord) -> dict[str, Any]:
    hit = request.hit
    return {
        "id": request.label,
        "phase": "decode" if request.is_decode else "prefill",
        "started_as": request.started_as,
        "state": request.state,
        "num_computed": request.num_computed_tokens,
        "num_new": request.query_len,
        "num_left": request.num_left,
        "cut_by": request.cut_by,
        "kv_len": request.seq_len,
        "hit": hit and {"blocks": list(hit.block_ids), "tokens": hit.num_tokens, "computed_by": list(hit.computed_by)},
        "blocks": list(request.block_ids),
        "num_in_last_block": request.num_in_last_block,
    }


def _scheduler_to_json(step: StepRecord) -> dict[str, Any]:
    return {
        "token_budget": step.schedule.token_budget,
        "tokens_used": step.dims["num_tokens"],
        "running": [request.label for request in step.requests],
        "num_waiting": len(step.schedule.waiting),
        "waiting": list(step.schedule.waiting),
        "held_back": step.schedule.held_back,
        "preempted": [preempted.label for preempted in step.schedule.preempted],
        "preemptions": [
            {
                "id": preempted.label,
                "for": preempted.for_label,
                "blocks": list(preempted.block_ids),
                "freed": list(preempted.freed_block_ids),
                "num_tokens": preempted.num_tokens,
            }
            for preempted in step.schedule.preempted
        ],
        "finished": list(step.schedule.finished),
    }


def _kv_to_json(step: StepRecord) -> dict[str, Any]:
    return {
        "block_size": step.dims["block_size"],
        "blocks_used": step.schedule.num_used_blocks,
        "blocks_cached": step.schedule.num_cached_blocks,
        "blocks_total": step.schedule.num_blocks - 1,
        "allocated": {request.label: list(request.new_block_ids) for request in step.requests if request.new_block_ids},
        "freed": list(step.schedule.freed_block_ids),
        "evicted": list(step.schedule.evicted_block_ids),
        "map": [
            {
                "first": span.first,
                "last": span.last,
                "state": span.state,
                "holders": list(span.holders),
                "cached": span.is_cached,
            }
            for span in step.schedule.block_map
        ],
        "bytes_per_token": step.kv_bytes_per_token,
    }


def _totals_to_json(step: StepRecord) -> dict[str, Any]:
    return {
        "flops": step.flops,
        "flops_is_lower_bound": step.has_unknown_flops,
        "bytes": step.num_bytes,
        "intensity": round(step.flops / step.num_bytes, 4) if step.num_bytes else None,
        "traced_ms": round(step.traced_ms, 3),
        "reading_ms": round(step.reading_ms, 3),
        "words_compared": step.num_compared,
    }


def _operation_to_json(seq: int, operation: Operation, first_seen: dict[tuple, str]) -> dict[str, Any]:
    """A row; of one equal to a row of an earlier layer what its place and sums need, and in same_as that row's name.

    The name is its path, op and request; all that is left out stands there.
    """
    is_alone = operation.layer is None  # no other layer's row can be the same
    name = " ".join(filter(None, (operation.path, operation.label, operation.request)))
    same_as = name if is_alone else first_seen.setdefault(operation.shape_key(), name)
    is_first = same_as == name or operation.has_values
    whole = _whole_row(operation) if is_first else {}
    return {
        "seq": seq,
        "path": operation.path,
        "op": operation.label,
        "kind": operation.stage.kind,
        "layer": operation.layer,
        "request": operation.request,
        **whole,
        "flops": {"value": operation.flops, **whole.get("flops", {})},
        "bytes": {"read": operation.bytes_read, "write": operation.bytes_written, **whole.get("bytes", {})},
        **({} if operation.time_us is None else {"time_us": round(operation.time_us, 3)}),
        **({"kernels": list(operation.kernels)} if operation.kernels else {}),
        "same_as": None if is_first else same_as,
    }


def _whole_row(operation: Operation) -> dict[str, Any]:
    """What an equal row of another layer need not say again."""
    stage, tensors = operation.stage, operation.tensors
    return {
        "in": [_tensor_to_json(tensors[name]) for name in operation.inputs],
        "out": [_output_to_json(name, operation) for name in operation.outputs],
        **({"locals": [_tensor_to_json(tensors[name]) for name in operation.locals]} if operation.has_values else {}),
        **({"dims": dims} if (dims := _own_dims(operation)) else {}),
        "expr": operation.summary,
        "flops": {
            "formula": stage.flops or "?",
            "counted": None if operation.flops is None else stage.counted,
            **({} if operation.dense_flops is None else {"dense": operation.dense_flops}),
        },
        "bytes": {"formula": f"read {stage.read}, write {stage.write}"},
        "intensity": None if operation.intensity is None else round(operation.intensity, 4),
        "src": f"tinyllm/{operation.source}",
    }


def _own_dims(operation: Operation) -> dict[str, int]:
    """The sizes of the words that this row alone has, by symbol: its request's, and a helper's ``in_size`` and the like."""
    names = [name for name, word in WORDS.items() if word.scope in OWN_SCOPES and name in operation.sizes]
    dims = {WORDS[name].symbol: operation.sizes[name] for name in names}
    for tensor in (tensor for tensor in operation.tensors.values() if tensor.item is not None):
        symbols = zip(tensor.own_symbols, tensor.symbols, tensor.shape, strict=True)
        dims |= {own: size for own, shared, size in symbols if own != shared}
    return dims


def _output_to_json(name: str, operation: Operation) -> dict[str, Any]:
    """A result; or an argument changed in place, with the name of the batch's list that says in which slots."""
    stage, tensor = operation.stage, _tensor_to_json(operation.tensors[name])
    return {**tensor, "written_at": f"batch.{stage.updated_at}"} if name == stage.updates else tensor


def _tensor_to_json(tensor: TensorRecord) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "sym": list(tensor.own_symbols),
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "nbytes": tensor.num_bytes,
        "storage": tensor.storage,
        "contiguous": tensor.is_contiguous,
        "view_of": tensor.view_of,
        **({} if tensor.stats is None else {"stats": _stats_to_json(tensor.stats)}),
    }


def _number(value: float) -> float | str:
    """JSON knows no NaN and no infinity: these are texts."""
    return value if math.isfinite(value) else str(value)


def _stats_to_json(stats: Stats) -> dict[str, Any]:
    return {
        "min": stats.minimum,
        "max": stats.maximum,
        "mean": stats.mean,
        "rms": stats.rms,
        "not_finite": stats.num_not_finite,
        "largest": [[list(index), _number(value)] for index, value in stats.largest],
        "row": [_number(value) for value in stats.row],
    }


def _sampling_to_json(row: int, request: RequestRecord) -> dict[str, Any]:
    return {
        "request": request.label,
        "logits_row": row,
        "method": request.method,
        "candidates": [[c.token_id, c.text, round(c.probability, 6)] for c in request.candidates],
        "chosen": request.chosen.token_id if request.chosen else None,
        "text": request.chosen.text if request.chosen else None,
        "kept": request.samples,
        "appended": _appended_to_json(request),
        "finish_reason": request.finish_reason,
    }


def _appended_to_json(request: RequestRecord) -> dict[str, Any] | None:
    if request.chosen is None:
        return None
    return {
        "position": request.seq_len,
        "block": None if request.is_finished else request.next_block_id,
        "kv": "never" if request.is_finished else "later",
    }
