"""A step without weights: any supported config runs on the meta device, where tensors have dimensions but no values.

The layers run as in a real step, so the rows, FLOPs and bytes are those of a real step of these lengths. What needs
values is absent: token ids are placeholders, no token is chosen, and no tokenizer is asked for.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tinyllm.batch import FlatBatch, build_batch, build_sampling_batch
from tinyllm.block_pool import NULL_BLOCK_ID
from tinyllm.config import PRESETS, CacheConfig, ModelConfig, SchedulerConfig, config_from_hf, find_preset
from tinyllm.errors import ConfigError, brief
from tinyllm.kv_cache import KVCache
from tinyllm.model import Decoder
from tinyllm.request import SamplingParams
from tinyllm.sampler.sample import sample
from tinyllm.trace.collect import collect_operations
from tinyllm.trace.decisions import request_label
from tinyllm.trace.ledger import Ledger
from tinyllm.trace.record import PLACEHOLDER, BlockSpan, RequestRecord, RunRecord, ScheduleRecord, StepRecord
from tinyllm.trace.recorder import Call, Recorder
from tinyllm.trace.session import BATCH_FIELDS, batch_tensors
from tinyllm.weights.hf_folder import read_json
from tinyllm.weights.hub import is_hub_name
from tinyllm.weights.load import DTYPES, describe_model

MAX_REQUESTS = 256  # each has rows of its own in every layer
MAX_TOKENS = 2**20  # of the whole step: a batch begins as Python lists
MAX_LENS_TEXT = 8192
LENS_FORM = "expected the tokens that each request computes, such as 4,1,1, or 1@16 for 1 token of 16 in all"


# --- what the user names ------------------------------------------------------------------------------------------------


def read_config(source: str | None = None) -> ModelConfig:
    """The config that `source` names: a preset, a config.json, a model folder or a GGUF file; None is the default model.

    A preset's name comes first, in either case; nothing is fetched, and no weight is read. Raises ConfigError or
    ModelFileError, one line each.
    """
    if source is not None and (source.strip().casefold() in PRESETS or _can_only_be_preset(source)):
        try:
            return find_preset(source)
        except ConfigError as error:
            raise ConfigError(f"there is no such file or folder, and {error}") from None
    if source is None or Path(source).suffix != ".json" or os.path.isdir(source):
        return describe_model(source)[1]
    path = Path(source).absolute()
    try:
        return config_from_hf(read_json(Path(source)), path.parent.name if path.stem == "config" else path.stem)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _can_only_be_preset(source: str) -> bool:
    """Whether a name that is no file here cannot be meant as a path either."""
    path = Path(source)
    is_bare = path.name == source and path.suffix not in (".gguf", ".json", ".safetensors")
    return not os.path.lexists(source) and (not source or is_bare or is_hub_name(path))


def parse_lens(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(query_lens, seq_lens) of ``4,1@16``: what each request computes in the step, and its tokens in all.

    Without ``@`` the two are equal: a prompt of which nothing was computed before. ``1@16`` is a decode that may read 16
    keys, ``4@20`` the last chunk of a prompt of 20.

    >>> parse_lens("4,1@16,1@7")
    ((4, 1, 1), (4, 16, 7))
    """
    if len(text) > MAX_LENS_TEXT:
        raise ConfigError(f"lens is a text of {len(text)} characters; {LENS_FORM}")
    found = [re.fullmatch(r"\s*([0-9]{1,10})(?:@([0-9]{1,10}))?\s*", part) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"lens {brief(text)} is not understood; {LENS_FORM}")
    lens = [(int(part[1]), int(part[2] or part[1])) for part in found if part]
    return tuple(query_len for query_len, _ in lens), tuple(seq_len for _, seq_len in lens)


# --- the run ------------------------------------------------------------------------------------------------------------


def dry_run(
    config: ModelConfig,
    lens: Sequence[int],
    seq_lens: Sequence[int] | None = None,
    *,
    block_size: int = 16,
    dtype: str = "bfloat16",
    attention: str = "reference",
    kernels: bool = False,
) -> RunRecord:
    """The record of one step of requests that compute `lens[i]` tokens each, up to position `seq_lens[i]` - 1.

    seq_lens None is `lens`: prompts of which nothing was computed before. The blocks are handed out in order, in a pool
    just large enough; the sampler is greedy. kernels asks for each row's `kernels`.

    Raises ConfigError for what cannot be a step of this model.
    """
    query_lens, seq_lens = _check_lens(config, lens, lens if seq_lens is None else seq_lens)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"dtype {brief(dtype)} is not supported; expected one of {', '.join(DTYPES)}")
    cache = CacheConfig(block_size, enable_prefix_caching=False)
    cache = replace(cache, num_blocks=1 + sum(map(cache.count_blocks, seq_lens)))
    requests = _make_requests(query_lens, seq_lens, cache)
    with torch.device("meta"):
        decoder = Decoder(config, attention).to(DTYPES[dtype])
    kv_cache = KVCache(config, cache, DTYPES[dtype], "meta")
    start = time.perf_counter()
    calls = _run(decoder, kv_cache, requests, kernels)
    traced_ms = 1000 * (time.perf_counter() - start)
    return RunRecord(
        model=config.name,
        dtype=dtype,
        attention=attention,
        kv_shape=tuple(kv_cache.kv.shape),
        kv_bytes=kv_cache.num_bytes,
        dims={**config.dims(), **cache.dims()},
        prompts=(),
        steps=(_read_step(calls, config, cache, kv_cache, requests, traced_ms),),
        answers=(),
        config_name=config.name,
        prefix_caching=False,
    )


def _check_lens(
    config: ModelConfig, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lengths as tuples; ConfigError names the first request that cannot be, by its label."""
    if not 1 <= len(query_lens) <= MAX_REQUESTS:
        raise ConfigError(f"lens names {len(query_lens)} requests; expected 1 to {MAX_REQUESTS}")
    if len(query_lens) != len(seq_lens):
        raise ConfigError(f"lens names {len(query_lens)} requests but seq_lens {len(seq_lens)}; expected as many")
    limit = config.max_positions
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        label = request_label(index)
        for value in (query_len, seq_len):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise ConfigError(
                    f"lens: request {label} has {brief(value)} tokens; expected 1 to {limit}, the max_positions of {config.name}"
                )
        if query_len > seq_len:
            raise ConfigError(
                f"lens: request {label} computes {query_len} tokens but has {seq_len} in all; expected no more than these"
            )
    if sum(query_lens) > MAX_TOKENS:
        raise ConfigError(f"lens: the step computes {sum(query_lens)} tokens; expected at most {MAX_TOKENS}")
    return tuple(query_lens), tuple(seq_lens)


def _make_requests(query_lens: Sequence[int], seq_lens: Sequence[int], cache: CacheConfig) -> tuple[RequestRecord, ...]:
    """The requests of the step, each with the next free blocks; one token behind others counts as a decode."""
    requests: list[RequestRecord] = []
    free_id = NULL_BLOCK_ID + 1
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        num_computed = seq_len - query_len
        block_ids = tuple(range(free_id, free_id + cache.count_blocks(seq_len)))
        free_id += len(block_ids)
        requests.append(RequestRecord(
            label=request_label(index),
            token_ids=(PLACEHOLDER,) * query_len,
            num_prompt_tokens=num_computed if num_computed and query_len == 1 else seq_len,
            num_computed_tokens=num_computed,
            num_left=query_len,
            block_size=cache.block_size,
            block_ids=block_ids,
            new_block_ids=block_ids[cache.count_blocks(num_computed) :],
            started_as="running" if num_computed else "new",
            cut_by="",
            hit=None,
            samples=True,
            state="running",
            finish_reason=None,
            chosen=None,
            candidates=(),
            method="greedy",
        ))  # fmt: skip
    return tuple(requests)


def _run(decoder: Decoder, kv_cache: KVCache, requests: Sequence[RequestRecord], kernels: bool) -> list[Call]:
    """What the engine does behind the scheduler, seen by a recorder."""
    with Recorder(kernels=kernels) as recorder:
        batch = _build_batch(requests, "meta")
        logits = decoder(batch, kv_cache)
        sampling = build_sampling_batch(
            [SamplingParams()] * len(requests),
            [0] * len(requests),
            [request.seq_len for request in requests],
            decoder.config.vocab_size,
            "meta",
        )
        sample(logits, sampling)
    return recorder.calls


def _build_batch(requests: Sequence[RequestRecord], device: str) -> FlatBatch:
    return build_batch(
        [request.token_ids for request in requests],
        [request.num_computed_tokens for request in requests],
        [request.block_ids for request in requests],
        requests[0].block_size,
        device,
    )


# --- the record ---------------------------------------------------------------------------------------------------------


def _read_step(
    calls: Sequence[Call],
    config: ModelConfig,
    cache: CacheConfig,
    kv_cache: KVCache,
    requests: tuple[RequestRecord, ...],
    traced_ms: float,
) -> StepRecord:
    """The record of the calls; LedgerError where a dimension word has two sizes."""
    ledger = Ledger({**config.dims(), **cache.dims()})
    ledger.check(calls)
    return StepRecord(
        index=0,
        requests=requests,
        schedule=_read_schedule(requests, cache),
        batch=batch_tensors(calls),
        batch_values=_batch_values(requests),
        dims=ledger.sizes,
        operations=collect_operations(calls, ledger, [request.label for request in requests]),
        num_compared=ledger.num_compared,
        traced_ms=traced_ms,
        kv_bytes_per_token=kv_cache.num_bytes // cache.num_slots,
    )


def _batch_values(requests: Sequence[RequestRecord]) -> dict[str, list]:
    """Where each token stands and where it is written follows from the lengths alone; which token it is does not."""
    batch = _build_batch(requests, "cpu")
    values = {name: getattr(batch, name).tolist() for name in BATCH_FIELDS}
    return values | {"token_ids": [None] * len(values["token_ids"])}


def _read_schedule(requests: Sequence[RequestRecord], cache: CacheConfig) -> ScheduleRecord:
    """What a scheduler with this much budget would have decided: everything, at once."""
    num_tokens = sum(request.query_len for request in requests)
    held = (BlockSpan(r.block_ids[0], r.block_ids[-1], "held", (r.label,), False) for r in requests)
    return ScheduleRecord(
        token_budget=max(num_tokens, SchedulerConfig().max_num_batched_tokens),
        waiting=(),
        held_back="",
        preempted=(),
        finished=(),
        freed_block_ids=(),
        evicted_block_ids=(),
        block_map=(BlockSpan(NULL_BLOCK_ID, NULL_BLOCK_ID, "null", (), False), *held),
        num_used_blocks=cache.num_blocks - 1,
        num_cached_blocks=0,
        num_blocks=cache.num_blocks,
    )
