"""The whole decoder against numbers that another implementation made: goldens of SmolLM2 and of tiny checkpoints."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tinyllm import CacheConfig, ConfigError, ModelConfig, SamplingParams
from tinyllm.batch import build_batch, build_sampling_batch
from tinyllm.config import RopeScaling, config_from_hf
from tinyllm.kv_cache import KVCache
from tinyllm.model import Decoder
from tinyllm.sampler.sample import sample
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.gguf_config import config_from_gguf
from tinyllm.weights.load import build_decoder
from tinyllm.weights.names import parameters_from_gguf, parameters_from_hf

DATA = Path(__file__).parent / "data"
BODIES = ("reference", "sdpa")
BLOCK_SIZES = (1, 4, 16)
CHUNKS = (1, 3, 7, 1000)  # the last one is: whole
TINY_NAMES = ("llama_gqa", "llama_mqa", "llama_head_dim", "llama_tied", "llama3_rope")
SETTINGS = pytest.mark.parametrize(("body", "block_size", "chunk"), list(product(BODIES, BLOCK_SIZES, CHUNKS)))
GGUF_NAMES = (
    "llama_f32",
    "llama_head_dim",
    "llama_tied_no_output",
    "llama_rope_freqs",
    "llama_linear",
    "llama_bf16",
    "llama_f16",
)


# --- the default model -------------------------------------------------------------------------------------------------


def golden_prompts(longest: int) -> tuple[list[dict], list[torch.Tensor]]:
    """The golden prompts of at most `longest` tokens, and the logits of each one's last position."""
    prompts = json.loads((DATA / "logits_golden.json").read_text())["prompts"]
    chosen = {name: prompt for name, prompt in prompts.items() if len(prompt["prompt_ids"]) <= longest}
    with np.load(DATA / "logits_golden.npz") as arrays:
        return list(chosen.values()), [torch.from_numpy(arrays[f"{name}_last"]) for name in chosen]


def check_golden(engine, run_engine, make_requests, longest: int, max_tokens: int = 32) -> None:
    """Run the golden prompts together; the first logits and the greedy tokens of each must be the golden ones."""
    prompts, last_logits = golden_prompts(longest)
    requests = make_requests([p["prompt_ids"] for p in prompts], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    for run, prompt, golden in zip(run_engine(engine, requests), prompts, last_logits, strict=True):
        torch.testing.assert_close(run.logits[0], golden, atol=2e-4, rtol=0)
        assert run.token_ids == prompt["greedy_ids"][:max_tokens]


@pytest.mark.parametrize("body", BODIES)
def test_smollm2_gives_the_golden_logits_and_tokens(
    body, smollm2, smollm2_sdpa, make_engine, run_engine, make_requests
):
    decoder = {"reference": smollm2, "sdpa": smollm2_sdpa}[body].decoder
    engine = make_engine(decoder, max_model_len=700, check_shapes=body == "reference")
    check_golden(engine, run_engine, make_requests, longest=600)


# Every pair of (body, block size), (body, chunk) and (block size, chunk) occurs.
PAIRWISE = [(BODIES[(i + j) % 2], bs, chunk) for i, bs in enumerate(BLOCK_SIZES) for j, chunk in enumerate(CHUNKS)]


@pytest.mark.parametrize(("body", "block_size", "chunk"), PAIRWISE)
def test_smollm2_gives_them_in_blocks_and_chunks_of_any_size(
    body, block_size, chunk, smollm2, smollm2_sdpa, make_engine, run_engine, make_requests
):
    decoder = {"reference": smollm2, "sdpa": smollm2_sdpa}[body].decoder
    engine = make_engine(decoder, block_size, budget=chunk, check_shapes=False)
    check_golden(engine, run_engine, make_requests, longest=64, max_tokens=8)  # the long test below takes all 32


ALL_TOKENS = [(*setting, 64) for setting in PAIRWISE]
LONG_PROMPTS = [("reference", 4, 7, 600), ("sdpa", 1, 7, 600), ("sdpa", 16, 64, 600)]


@pytest.mark.long
@pytest.mark.parametrize(("body", "block_size", "chunk", "longest"), ALL_TOKENS + LONG_PROMPTS)
def test_smollm2_gives_all_tokens_in_small_chunks_and_for_long_prompts(
    body, block_size, chunk, longest, smollm2, smollm2_sdpa, make_engine, run_engine, make_requests
):
    decoder = {"reference": smollm2, "sdpa": smollm2_sdpa}[body].decoder
    engine = make_engine(decoder, block_size, budget=chunk, max_model_len=700, check_shapes=False)
    check_golden(engine, run_engine, make_requests, longest)


# --- tiny checkpoints --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def score_all_positions(decoder: Decoder, prompts: list[list[int]], block_size: int, chunk: int) -> list[torch.Tensor]:
    """The logits of every position: the prompts run together, `chunk` tokens of each a step, in scattered blocks."""
    counts = [-(-len(ids) // block_size) for ids in prompts]
    free_ids = list(range(1, 1 + sum(counts)))
    tables = [[free_ids.pop(len(free_ids) // 2) for _ in range(count)] for count in counts]
    weight = decoder.embed_tokens.weight
    kv_cache = KVCache(decoder.config, CacheConfig(block_size, 1 + sum(counts)), weight.dtype)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        active = [i for i, ids in enumerate(prompts) if start < len(ids)]
        pieces = [prompts[i][start : start + chunk] for i in active]
        batch = build_batch(pieces, [start] * len(active), [tables[i] for i in active], block_size)
        batch = replace(batch, logits_indices=torch.arange(len(batch.token_ids)))
        for i, part in zip(active, decoder(batch, kv_cache).split(batch.query_lens_cpu), strict=True):
            rows[i].append(part)
    return [torch.cat(parts) for parts in rows]


def load_golden(path: Path) -> tuple[list[list[int]], list[torch.Tensor], dict[str, np.ndarray]]:
    """The golden's one or two prompts, the logits of their positions, and everything else in it."""
    with np.load(path) as file:
        arrays = dict(file)
    suffixes = [suffix for suffix in ("", "_b") if "input_ids" + suffix in arrays]
    prompts = [arrays["input_ids" + suffix][0].tolist() for suffix in suffixes]
    return prompts, [torch.from_numpy(arrays["logits" + suffix]) for suffix in suffixes], arrays


def check_scores(decoder: Decoder, golden: Path, block_size: int, chunk: int) -> None:
    prompts, logits, _ = load_golden(golden)
    for got, expected in zip(score_all_positions(decoder, prompts, block_size, chunk), logits, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@SETTINGS
@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_tiny_checkpoint_gives_the_golden_logits_at_every_position(name, body, block_size, chunk, tiny_model):
    check_scores(tiny_model(name, body), DATA / "tiny" / name / "golden.npz", block_size, chunk)


@SETTINGS
@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_tiny_checkpoint_gives_the_golden_tokens(
    name, body, block_size, chunk, tiny_model, make_engine, run_engine, make_requests
):
    prompts, logits, arrays = load_golden(DATA / "tiny" / name / "golden.npz")
    engine = make_engine(tiny_model(name, body), block_size, budget=chunk, check_shapes=False)
    first, second = run_engine(engine, make_requests(prompts, SamplingParams(max_tokens=16, ignore_eos=True)))
    assert first.token_ids == arrays["greedy"].tolist()
    torch.testing.assert_close(first.logits[0], logits[0][-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(second.logits[0], logits[1][-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", GGUF_NAMES)
def test_the_same_checkpoint_as_gguf_gives_the_same_logits(name, body):
    file = read_gguf(DATA / "gguf" / f"{name}.gguf")
    config = config_from_gguf(file)
    decoder = build_decoder(config, parameters_from_gguf(file, config), body)
    check_scores(decoder, DATA / "gguf" / f"{name}.npz", block_size=4, chunk=7)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_bfloat16_stays_near_the_golden_of_bfloat16(body, chunk, tiny_model):
    prompts, logits, arrays = load_golden(DATA / "tiny" / "llama_bf16" / "golden.npz")
    low = score_all_positions(tiny_model("llama_bf16", body, torch.bfloat16), prompts[:1], 4, chunk)[0]
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), torch.from_numpy(arrays["logits_lowp"]), atol=0.15, rtol=0)
    exact = score_all_positions(tiny_model("llama_bf16", body), prompts[:1], 4, chunk)[0]
    torch.testing.assert_close(exact, logits[0], atol=1e-4, rtol=0)
    assert not torch.equal(low.float(), exact), "the two really ran in different precision"


# --- random weights against transformers -------------------------------------------------------------------------------


@st.composite
def llama_configs(draw) -> LlamaConfig:
    num_kv_heads, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ropes = (
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    )
    return LlamaConfig(
        hidden_size=num_kv_heads * group_size * draw(st.integers(1, 6)),  # transformers wants a multiple; we do not
        intermediate_size=draw(st.sampled_from([8, 20])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=num_kv_heads * group_size,
        num_key_value_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 6)),
        vocab_size=draw(st.integers(5, 40)),
        max_position_embeddings=64,
        tie_word_embeddings=draw(st.booleans()),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_parameters={"rope_theta": draw(st.sampled_from([100.0, 10000.0])), **draw(st.sampled_from(ropes))},
        initializer_range=0.5,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


@settings(max_examples=30)
@given(
    llama_configs(),
    st.integers(1, 20),
    st.sampled_from(BODIES),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(0, 9),
)
def test_any_small_llama_equals_transformers(hf_config, length, body, block_size, chunk, seed):
    torch.manual_seed(seed)
    theirs = LlamaForCausalLM(hf_config).eval()
    for name, weight in theirs.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)  # they start at 1, which would hide a missing weight
    config = config_from_hf(hf_config.to_dict())
    ours = build_decoder(config, parameters_from_hf(theirs.state_dict(), config), body)
    token_ids = torch.randint(0, config.vocab_size, (1, length))
    with torch.inference_mode():
        expected = theirs(token_ids).logits[0]
    got = score_all_positions(ours, [token_ids[0].tolist()], block_size, chunk)[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


# --- shapes without weights --------------------------------------------------------------------------------------------

LLAMA_3_8B = ModelConfig(
    hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
    max_positions=131072, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_a_step_of_llama_3_8b_runs_without_weights(body):
    with torch.device("meta"):
        decoder = Decoder(LLAMA_3_8B, body)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == 8_030_261_248
    kv_cache = KVCache(LLAMA_3_8B, CacheConfig(16, 64), torch.float32, "meta")
    tokens = [[1] * 13, [2], [3] * 100]
    tables = [[1], [2], [3, 4, 5, 6, 7, 8, 9]]
    batch = build_batch(tokens, [0, 6, 0], tables, 16, "meta")
    params = [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1, min_p=0.1)]
    sampling = build_sampling_batch(params, [1, 2, 3], [13, 7, 100], LLAMA_3_8B.vocab_size, "meta")
    logits = decoder(batch, kv_cache)
    sampled, is_valid = sample(logits, sampling)
    assert logits.shape == (3, 128256)
    assert sampled.shape == is_valid.shape == (3,)
    everything = [*decoder.parameters(), *decoder.buffers(), kv_cache.kv, logits, sampled]
    assert all(tensor.is_meta for tensor in everything)


def test_an_unknown_attention_body_is_refused_by_name():
    with pytest.raises(ConfigError, match="'flash' is unknown; expected one of reference, sdpa"):
        Decoder(LLAMA_3_8B, "flash")


def test_tied_models_have_no_second_table(tiny_model):
    assert "lm_head.weight" not in tiny_model("llama_tied").state_dict()
    assert "lm_head.weight" in tiny_model("llama_gqa").state_dict()
