"""Fixtures that several test files share: the default model and the tiny checkpoints, each read once, and engine runs."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch reads it once, when it is imported

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tinyllm import LLM, CacheConfig, SamplingParams, SchedulerConfig
from tinyllm.config import ModelConfig, config_from_hf
from tinyllm.engine import Engine, StepOutput
from tinyllm.model import Decoder
from tinyllm.request import Request
from tinyllm.shapes import WORDS
from tinyllm.tokenizer import Tokenizer
from tinyllm.tokenizer.byte_alphabet import BYTE_TO_CHAR
from tinyllm.weights.load import LoadedModel, build_decoder, load_model
from tinyllm.weights.names import parameters_from_hf

TINY_FOLDER = Path(__file__).parent / "data" / "tiny"

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(4, os.cpu_count() or 1))
hypothesis.settings.register_profile("tinyllm", deadline=None, database=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("tinyllm")


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The default model with the reference attention body."""
    return load_model()


@pytest.fixture(scope="session")
def smollm2_sdpa(smollm2: LoadedModel) -> LoadedModel:
    """The same parameters, not a copy of them, behind the sdpa body."""
    decoder = build_decoder(smollm2.config, smollm2.decoder.state_dict(), "sdpa")
    return replace(smollm2, decoder=decoder, attention="sdpa")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: LoadedModel) -> Tokenizer:
    """The default model's tokenizer."""
    return smollm2.tokenizer


@cache
def _read_tiny(name: str, dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Tensor]]:
    folder = TINY_FOLDER / name
    config = config_from_hf(json.loads((folder / "config.json").read_text()), name)
    return config, parameters_from_hf(load_file(folder / "model.safetensors"), config, dtype)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Decoder]:
    """tiny_model(name, attention, dtype): a checkpoint of tests/data/tiny as a decoder; parameters are shared."""

    @cache
    def tiny_model(
        name: str = "llama_gqa", attention: str = "reference", dtype: torch.dtype = torch.float32
    ) -> Decoder:
        return build_decoder(*_read_tiny(name, dtype), attention)

    return tiny_model


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """256 tokens, one a byte: any text has ids that the tiny models know."""
    return Tokenizer(list(BYTE_TO_CHAR), [], [], "smollm")


@pytest.fixture(scope="session")
def tiny_llm(tiny_model: Callable[..., Decoder], byte_tokenizer: Tokenizer) -> Callable[..., LLM]:
    """tiny_llm(decoder or checkpoint name, attention, **settings): an LLM over a tiny model, with a byte tokenizer."""

    def tiny_llm(model: Decoder | str = "llama_gqa", attention: str = "reference", **settings: int | None) -> LLM:
        decoder = tiny_model(model, attention) if isinstance(model, str) else model
        return LLM(LoadedModel(decoder.config, decoder, byte_tokenizer, Path("tiny"), attention), **settings)

    return tiny_llm


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """make_engine(decoder, block_size, budget, ...): an engine with an ample pool unless num_blocks says otherwise."""

    def make_engine(
        decoder: Decoder,
        block_size: int = 16,
        budget: int = 1024,
        max_model_len: int = 128,
        max_num_seqs: int | None = None,
        num_blocks: int | None = None,
        check_shapes: bool = True,
        enable_prefix_caching: bool = True,
    ) -> Engine:
        ample = 1 + -(-max(max_model_len, 1024) // block_size)
        cache_config = CacheConfig(block_size, ample if num_blocks is None else num_blocks, enable_prefix_caching)
        limits = SchedulerConfig(max_model_len, budget, min(128, budget) if max_num_seqs is None else max_num_seqs)
        return Engine(decoder, cache_config, limits, check_shapes)

    return make_engine


@dataclass(frozen=True)
class EngineRun:
    """What one request got: its tokens, and the logits that each of them was chosen from."""

    token_ids: list[int]
    logits: Tensor
    num_preemptions: int


@pytest.fixture(scope="session")
def run_engine() -> Callable[..., list[EngineRun]]:
    """run_engine(engine, requests): run them together to the end; every step must keep the laws of `check_step`."""

    def run_engine(engine: Engine, requests: Sequence[Request]) -> list[EngineRun]:
        for request in requests:
            engine.add_request(request)
        rows: dict[str, list[Tensor]] = {request.request_id: [] for request in requests}
        while engine.has_unfinished_requests:
            output = engine.step()
            check_step(engine, output)
            for entry, row in zip(output.schedule.scheduled, output.logits, strict=True):
                if entry.samples:
                    rows[entry.request.request_id].append(row)
        assert engine.scheduler.pool.num_used_blocks == 0, "every block is free at the end"
        return [EngineRun(r.output_token_ids, torch.stack(rows[r.request_id]), r.num_preemptions) for r in requests]

    return run_engine


@pytest.fixture(scope="session")
def make_requests() -> Callable[..., list[Request]]:
    """make_requests(prompts, params): one Request for each prompt; params is one for all or one for each."""

    def make_requests(
        prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return [Request(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, each, strict=True))]

    return make_requests


def check_step(engine: Engine, output: StepOutput) -> None:
    """The laws of one step: progress within the budget, and every slot holds one token after one beginning."""
    schedule, batch = output.schedule, output.batch
    limits, block_size = engine.scheduler.config, engine.cache_config.block_size
    assert 0 < schedule.num_tokens <= limits.max_num_batched_tokens, "progress, within the budget"
    assert len(schedule.scheduled) <= limits.max_num_seqs
    written_slots: list[int] = []
    text_of: dict[int, list[int]] = {}  # block -> all tokens up to its end
    for entry in schedule.scheduled:
        assert min(entry.block_ids) > 0, "the null block belongs to nobody"
        slots = [entry.block_ids[p // block_size] * block_size + p % block_size for p in range(entry.seq_len)]
        assert len(set(slots)) == len(slots), "two tokens of one request share a slot"
        written_slots += slots[entry.num_computed_tokens :]
        for index, block_id in enumerate(entry.block_ids):
            text = entry.request.token_ids[: min(entry.seq_len, (index + 1) * block_size)]
            assert text_of.setdefault(block_id, text) == text, "a block is shared by equal beginnings only"
    assert len(set(written_slots)) == len(written_slots), "two tokens are written into one slot"
    assert batch.slot_mapping.tolist() == written_slots


DIM = "|".join([r"\d+", *(re.escape(name) for word in WORDS.values() for name in (word.name, word.symbol))])


@pytest.fixture(scope="session")
def typed_shape() -> re.Pattern[str]:
    """Finds a shape that somebody typed into prose or a comment; shapes are annotations or come out of a run."""
    return re.compile(
        rf"[\[(]\s*(?:{DIM})(?:\s*[,x×*]\s*(?:{DIM}))+\s*[\])]"  # [13, 576], (T, H), [num_tokens, hidden_size]
        rf"|\[\s*(?:{DIM})(?:\s+(?:{DIM}))+\s*\]"  # [num_tokens hidden_size]
        rf"|(?<![\w\])])\[\s*(?:{DIM})\s*\]"  # [13], but not logits[0]
        r"|\b\d+ ?[x×] ?\d+\b"  # 13 x 576
    )
