"""The planner's figures, each an exact integer that can be checked by hand, and the laws that hold for any model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tinyllm.config import PRESETS, CacheConfig, ModelConfig, find_preset
from tinyllm.errors import ConfigError
from tinyllm.kv_cache import KVCache
from tinyllm.model import Decoder
from tinyllm.planner import (
    MAX_BYTES,
    PARAMETER_FORMULAS,
    SIZE_UNITS,
    VALUE_BYTES,
    Plan,
    Pool,
    break_even_tokens,
    check_context,
    count_parameters,
    count_req_blocks,
    count_reserved_requests,
    decode_flops,
    kv_bytes_per_block,
    kv_bytes_per_layer_block,
    kv_bytes_per_request,
    kv_bytes_per_token,
    parse_size,
    pool_of_budget,
    prefill_flops,
    show_size,
    step_flops,
    value_bytes,
)
from tinyllm.shapes import evaluate
from tinyllm.weights.load import describe_model, load_weights
from tinyllm.weights.names import LAYER_PARAMETERS, PARAMETERS, shape_of

TINY = sorted(path.parent for path in (Path(__file__).parent / "data" / "tiny").glob("*/config.json"))
GIB = 2**30
LLAMA2, LLAMA2_70B, LLAMA3 = (PRESETS[f"llama-{name}"] for name in ("2-7b", "2-70b", "3-8b"))

every_preset = pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)


@st.composite
def configs(draw) -> ModelConfig:
    """Any small Llama-architecture model."""
    size = st.integers(1, 40)
    kv_heads, group, half_dim = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    return ModelConfig(
        draw(size), draw(size), draw(size), kv_heads * group, kv_heads, 2 * half_dim, draw(size), draw(size),
        tie_word_embeddings=draw(st.booleans()),
    )  # fmt: skip


def refused(message: str):
    """ConfigError whose one line contains `message`."""
    return pytest.raises(ConfigError, match=rf"^[^\n]*{message}[^\n]*$")


# ---- presets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    assert count_parameters(PRESETS[name]).total == num_parameters


def test_presets_are_found_in_either_case() -> None:
    assert list(PRESETS) == [config.name for config in PRESETS.values()] and len(PRESETS) == 12
    assert all(name == name.casefold() for name in PRESETS)
    assert find_preset("Llama-3-8B") is find_preset(" llama-3-8b ") is LLAMA3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama-3-8b", r"'lama-3-8b' is no preset; did you mean llama-3-8b or "),
        ("SmolLM2", "did you mean smollm2-"),
        ("HuggingFaceTB/SmolLM2-135M", r"did you mean smollm2-135m"),
        ("mixtral", r"did you mean mistral|expected one of llama-2-7b, "),
        ("", r"'' is no preset; expected one of llama-2-7b, .*, smollm2-1\.7b$"),
        ("x" * 100_000, r"expected one of llama-2-7b"),
        ("\ud800\n", r"is no preset"),
        (None, r"the preset's name is None; expected one of llama-2-7b"),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_an_unknown_preset_names_the_near_ones(name, message) -> None:
    with refused(message) as error:
        find_preset(name)
    assert len(str(error.value)) < 400


def test_the_preset_of_the_default_model_is_the_default_model() -> None:
    _, config, num_parameters = describe_model()
    preset = PRESETS["smollm2-135m"]
    assert preset.dims() == config.dims() and num_parameters == count_parameters(preset).total == 134_515_008
    assert (preset.max_positions, preset.rope_theta, preset.rms_norm_eps, preset.tie_word_embeddings) == (
        config.max_positions, config.rope_theta, pytest.approx(config.rms_norm_eps), config.tie_word_embeddings,
    )  # fmt: skip


# ---- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "total", "mlp", "share", "attention", "embedding", "norms"),
    [
        (LLAMA3, 8_030_261_248, 5_637_144_576, "70.20%", 1_342_177_280, 525_336_576, 266_240),
        (LLAMA2, 6_738_415_616, 4_328_521_728, "64.24%", 2_147_483_648, 131_072_000, 266_240),
        (LLAMA2_70B, 68_976_648_192, 56_371_445_760, "81.73%", 12_079_595_520, 262_144_000, 1_318_912),
    ],
    ids=["llama-3-8b", "llama-2-7b", "llama-2-70b"],
)
def test_parameters_by_part(config, total, mlp, share, attention, embedding, norms) -> None:
    count = count_parameters(config)
    assert (count.total, count.mlp, count.attention) == (total, mlp, attention)
    assert (count.embedding, count.lm_head, count.norms) == (embedding, embedding, norms)
    assert f"{count.mlp / count.total:.2%}" == share


def test_one_layer_of_llama_3_8b() -> None:
    one, two = (count_parameters(replace(LLAMA3, num_layers=n)) for n in (1, 2))
    assert (two.attention - one.attention, two.mlp - one.mlp, two.norms - one.norms) == (41_943_040, 176_160_768, 8_192)
    assert two.total - one.total == 218_112_000


def test_weight_bytes_in_bfloat16() -> None:
    weights = [Plan(config, 1).weight_bytes for config in (LLAMA3, LLAMA2, LLAMA2_70B)]
    assert [f"{num_bytes / 1e9:.4f}" for num_bytes in weights] == ["16.0605", "13.4768", "137.9533"]
    assert [f"{num_bytes / GIB:.3f}" for num_bytes in weights[:2]] == ["14.958", "12.551"]


@every_preset
def test_parameters_are_those_that_a_checkpoint_must_have(config: ModelConfig) -> None:
    """Counted a second time, from the list of tensors that the loader insists on, and from the model itself."""
    is_tied = config.tie_word_embeddings
    total = 0
    for parameter in PARAMETERS:
        copies = (
            config.num_layers if parameter in LAYER_PARAMETERS else not (is_tied and parameter.name == "lm_head.weight")
        )
        total += copies * math.prod(shape_of(parameter.words, config))
    assert count_parameters(config).total == total
    with torch.device("meta"):
        decoder = Decoder(replace(config, num_layers=2))
    assert (
        sum(weight.numel() for weight in decoder.parameters()) == count_parameters(replace(config, num_layers=2)).total
    )


@pytest.mark.parametrize("folder", TINY, ids=lambda folder: folder.name)
def test_a_description_counts_what_loading_loads(folder: Path) -> None:
    config, parameters = load_weights(folder)
    assert describe_model(folder) == (folder, config, sum(weight.numel() for weight in parameters.values()))


@given(config=configs())
def test_the_formulas_of_the_text_are_the_counts(config: ModelConfig) -> None:
    count = count_parameters(config)
    assert count.total == sum(getattr(count, part) for part in PARAMETER_FORMULAS)
    for part, formula in PARAMETER_FORMULAS.items():
        is_absent = part == "lm_head" and config.tie_word_embeddings
        assert getattr(count, part) == (0 if is_absent else evaluate(formula, config.dims()))


def test_a_tied_embedding_is_read_as_the_head() -> None:
    tied, untied = (count_parameters(replace(LLAMA3, tie_word_embeddings=is_tied)) for is_tied in (True, False))
    assert untied.total - tied.total == 525_336_576 and tied.lm_head == 0
    assert tied.read_each_step == untied.read_each_step == tied.total == 15_009_849_344 // 2


# ---- keys and values ---------------------------------------------------------------------------------------------------


def test_kv_bytes_of_known_models() -> None:
    assert [kv_bytes_per_token(config) for config in (LLAMA2, LLAMA3, LLAMA2_70B)] == [524_288, 131_072, 327_680]
    assert kv_bytes_per_token(replace(LLAMA2, num_kv_heads=1)) == 16_384
    assert kv_bytes_per_token(PRESETS["smollm2-135m"], 4) == 46_080
    assert kv_bytes_per_request(LLAMA2, 4096) == 2_147_483_648 == 2 * GIB
    assert [kv_bytes_per_request(LLAMA3, n) for n in (4096, 8192, 131_072)] == [GIB // 2, GIB, 16 * GIB]


def test_llama_2_7b_with_a_request_of_4096_tokens() -> None:
    needed = Plan(LLAMA2, 4096).weight_bytes + kv_bytes_per_request(LLAMA2, 4096)
    assert (f"{needed / 1e9:.2f}", f"{needed / GIB:.2f}") == ("15.62", "14.55")


def test_blocks_of_llama_3_8b() -> None:
    assert kv_bytes_per_layer_block(LLAMA3, block_size=16) == 65_536
    assert kv_bytes_per_block(LLAMA3, block_size=16) == 2_097_152
    pool = pool_of_budget(LLAMA3, GIB, block_size=16)
    assert (pool.num_blocks, pool.num_usable_blocks, pool.num_tokens) == (512, 511, 8176)
    assert [pool.count_requests(n) for n in (8192, 8176, 4096, 4081, 4080, 16, 1)] == [0, 1, 1, 1, 2, 511, 511]


def test_break_even_of_llama_3_8b() -> None:
    assert break_even_tokens(LLAMA3) == 114_516 == 15_009_849_344 // 131_072
    assert break_even_tokens(LLAMA3, 1, 2) == 57_258 and break_even_tokens(LLAMA3, 4, 4) == 114_516


@given(config=configs(), block_size=st.integers(1, 40), each=st.sampled_from([1, 2, 4]), budget=st.integers(-9, 10**7))
def test_a_budget_buys_as_many_blocks_as_it_can(config: ModelConfig, block_size: int, each: int, budget: int) -> None:
    block_bytes = kv_bytes_per_block(config, block_size, each)
    pool = pool_of_budget(config, budget, block_size, each)
    assert 0 <= pool.num_blocks * block_bytes <= max(budget, 0) < (pool.num_blocks + 1) * block_bytes
    assert pool.num_usable_blocks == max(pool.num_blocks - 1, 0)
    if pool.num_blocks >= 2:
        assert pool.num_tokens == CacheConfig(block_size, pool.num_blocks).max_cached_tokens


@given(block_size=st.integers(1, 40), num_blocks=st.integers(0, 5000), seq_len=st.integers(1, 3000))
def test_requests_fit_and_one_more_does_not(block_size: int, num_blocks: int, seq_len: int) -> None:
    pool = Pool(block_size, num_blocks)
    fit, each = pool.count_requests(seq_len), count_req_blocks(seq_len, block_size)
    assert (each - 1) * block_size < seq_len <= each * block_size
    assert fit * each <= pool.num_usable_blocks < (fit + 1) * each


@given(config=configs(), block_size=st.integers(1, 40), each=st.sampled_from([1, 2, 4]), seq_len=st.integers(1, 3000))
def test_blocks_waste_less_than_a_block(config: ModelConfig, block_size: int, each: int, seq_len: int) -> None:
    exact = kv_bytes_per_request(config, seq_len, bytes_per_value=each)
    assert exact == seq_len * kv_bytes_per_token(config, each)
    blocks = kv_bytes_per_request(config, seq_len, block_size, each)
    assert exact <= blocks < exact + kv_bytes_per_block(config, block_size, each)
    assert kv_bytes_per_block(config, block_size, each) == block_size * kv_bytes_per_token(config, each)


@given(config=configs(), budget=st.integers(-9, 10**7), reserved_len=st.integers(1, 3000))
def test_reserved_requests(config: ModelConfig, budget: int, reserved_len: int) -> None:
    fit, each = count_reserved_requests(config, budget, reserved_len), kv_bytes_per_request(config, reserved_len)
    assert fit * each <= max(budget, 0) < (fit + 1) * each


@given(config=configs(), weight=st.sampled_from([1, 2, 4]), value=st.sampled_from([1, 2, 4]))
def test_break_even_is_where_the_kv_outweighs_the_weights(config: ModelConfig, weight: int, value: int) -> None:
    even, token = break_even_tokens(config, weight, value), kv_bytes_per_token(config, value)
    assert even * token <= count_parameters(config).read_each_step * weight < (even + 1) * token


@given(config=configs(), block_size=st.integers(1, 5), num_blocks=st.integers(2, 5))
@example(replace(LLAMA3, num_layers=1), 16, 2)
def test_the_cache_takes_what_is_planned(config: ModelConfig, block_size: int, num_blocks: int) -> None:
    for dtype, torch_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        cache = KVCache(config, CacheConfig(block_size, num_blocks), torch_dtype, device="meta")
        assert cache.num_bytes == num_blocks * kv_bytes_per_block(config, block_size, value_bytes(dtype))


@pytest.mark.parametrize("block_size", [0, -1, 2**16 + 1, 1.5, True])
def test_an_impossible_block_size_is_refused(block_size) -> None:
    for call in (kv_bytes_per_block, pool_of_budget):
        with refused("block_size is .*; expected 1 to 65536 tokens"):
            call(LLAMA3, *[GIB] * (call is pool_of_budget), block_size=block_size)
    with refused("block_size is"):
        count_req_blocks(1, block_size)
    with refused("block_size is"):
        Plan(LLAMA3, 1, block_size)


@pytest.mark.parametrize("seq_len", [0, -1])
def test_a_request_has_a_token(seq_len: int) -> None:
    with refused(f"a request of {seq_len} tokens; expected at least 1"):
        count_req_blocks(seq_len)
    with refused(f"context is {seq_len}; expected 1 to 8,192 tokens"):
        check_context(LLAMA3, seq_len)


def test_a_context_has_no_more_tokens_than_the_model_has_positions() -> None:
    check_context(LLAMA3, 8192)
    for call in (check_context, Plan):
        with refused("context is 8,193; expected 1 to 8,192 tokens, the max_positions of llama-3-8b"):
            call(LLAMA3, 8193)


# ---- FLOPs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq_len", "share", "without_head"),
    [
        (0, "75.12%", "80.77%"),
        (512, "73.80%", "79.25%"),
        (1024, "72.52%", "77.78%"),
        (2048, "70.10%", "75.00%"),
        (2092, "70.00%", "74.89%"),
        (4096, "65.71%", "70.00%"),
        (8192, "58.40%", "61.76%"),
        (16384, "47.77%", "50.00%"),
        (32768, "35.03%", "36.21%"),
        (131072, "13.47%", "13.64%"),
    ],
)
def test_the_mlp_share_of_a_decoded_token(seq_len: int, share: str, without_head: str) -> None:
    flops = decode_flops(LLAMA3, seq_len)
    assert (f"{flops.mlp_share:.2%}", f"{flops.mlp_share_without_head:.2%}") == (share, without_head)


def test_the_flops_of_a_decoded_token() -> None:
    flops = decode_flops(LLAMA3, 1000)
    assert flops.attend == 524_288 * 1000
    assert flops.projections + flops.mlp == 13_958_643_712 and flops.lm_head == 1_050_673_152
    assert flops.total == 13_958_643_712 + 1_050_673_152 + 524_288_000


def test_attention_works_in_the_width_of_the_heads() -> None:
    """Which need not be hidden_size: two FLOPs a number of each head's query for its score, two for its value."""
    wide = replace(LLAMA3, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=2, hidden_size=100)
    assert step_flops(wide, num_tokens=1, num_pairs=5, num_logits=0).attend == 4 * 5 * 3 * 2


@pytest.mark.parametrize(
    ("num_tokens", "share"),
    [(128, "80.5%"), (512, "80.0%"), (1024, "79.2%"), (2048, "77.8%"), (4096, "75.0%"), (8192, "70.0%"),
     (32768, "50.0%"), (131072, "23.3%")],
)  # fmt: skip
def test_the_mlp_share_of_a_prefill(num_tokens: int, share: str) -> None:
    assert f"{prefill_flops(LLAMA3, num_tokens).mlp_share:.1%}" == share


def test_a_prefill_that_computes_the_full_square() -> None:
    assert f"{step_flops(LLAMA3, 4096, num_pairs=4096**2, num_logits=1).mlp_share:.1%}" == "70.0%"


@given(config=configs(), num_tokens=st.integers(1, 60))
def test_a_prefill_does_what_decoding_token_by_token_does(config: ModelConfig, num_tokens: int) -> None:
    """All but the LM head, which a prefill asks for one row."""
    steps, prefill = [decode_flops(config, 1 + i) for i in range(num_tokens)], prefill_flops(config, num_tokens)
    for part in ("projections", "attend", "mlp"):
        assert getattr(prefill, part) == sum(getattr(step, part) for step in steps)
    assert {step.lm_head for step in steps} == {prefill.lm_head}
    assert prefill.total == prefill.projections + prefill.attend + prefill.mlp + prefill.lm_head


@given(config=configs(), num_reqs=st.integers(1, 300))
def test_a_byte_of_bfloat16_weights_serves_a_flop_of_each_request(config: ModelConfig, num_reqs: int) -> None:
    flops, count = step_flops(config, num_reqs, num_pairs=0, num_logits=num_reqs), count_parameters(config)
    assert flops.total == num_reqs * (count.read_each_step - count.norms) * VALUE_BYTES["bfloat16"]


# ---- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 25_769_803_776),
        ("24GB", 24_000_000_000),
        ("500MB", 500_000_000),
        ("1.5TiB", 1_649_267_441_664),
        ("0.1GB", 100_000_000),
        ("0.3KiB", 307),
        ("1.001KB", 1001),
        (" 8 gib ", 8 * GIB),
        ("12345", 12_345),
        ("7B", 7),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("3mib", 3 * 2**20),
        ("2TB", 2 * 10**12),
        ("1024TiB", MAX_BYTES),
        (str(MAX_BYTES), MAX_BYTES),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "24G", "24GiBs", "24 Gi B", "-1", "-1GiB", "+1GB", "inf", "nan", "infGiB", "1e3", "1,000", "1_000",
     ".5GB", "5.GB", "1.2.3GB", "0x10", "٣GB", "24GIB\0", "9" * 5000, "1" + "0" * 30, 24, 24.0, None, b"24GB"],
    ids=lambda text: f"{text!r:.12}",
)  # fmt: skip
def test_what_is_no_size(text) -> None:
    with refused("size .* is none; expected bytes, or a number with a unit: 24GiB, 24GB, 500MB") as error:
        parse_size(text)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("text", ["0", "0GiB", "0.9", "0.0001KiB", "1025TiB", str(MAX_BYTES + 1), "9" * 20 + "TiB"])
def test_a_size_is_neither_nothing_nor_too_much(text: str) -> None:
    with refused(r"bytes; expected 1 to 1,125,899,906,842,624"):
        parse_size(text)


@given(number=st.integers(1, 1000), unit=st.sampled_from([*SIZE_UNITS]), space=st.sampled_from(["", " "]))
def test_a_size_is_a_number_times_its_unit(number: int, unit: str, space: str) -> None:
    assert parse_size(f"{number}{space}{unit}") == number * SIZE_UNITS[unit]
    assert parse_size(f"{number}.50{unit.upper()}") == number * SIZE_UNITS[unit] + SIZE_UNITS[unit] // 2


def test_sizes_for_a_reader() -> None:
    sizes = [0, 1023, 1024, 1536, 2**20, 25_769_803_776, 2**40, -(2**30)]
    assert [show_size(size) for size in sizes] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "1.00 MiB", "24.00 GiB", "1.00 TiB", "-1.00 GiB",
    ]  # fmt: skip


def test_bytes_of_a_dtype() -> None:
    assert [value_bytes(dtype) for dtype in ("float32", "float16", "bfloat16", "float8")] == [4, 2, 2, 1]
    with refused("dtype 'int3' is not supported; expected one of float32, float16, bfloat16, float8"):
        value_bytes("int3")
    for name in ("weight_dtype", "kv_dtype"):
        with refused("dtype 'half' is not supported"):
            Plan(LLAMA3, 1, **{name: "half"})


# ---- a whole plan ------------------------------------------------------------------------------------------------------


def test_llama_3_8b_in_24_gib() -> None:
    plan = Plan(LLAMA3, 4096, memory=24 * GIB)
    assert (plan.kv_budget, plan.pool) == (9_709_281_280, Pool(16, 4629))
    assert (plan.num_requests, plan.num_reserved_requests) == (18, 9)
    smaller = replace(plan, weight_dtype="float8", kv_dtype="float8")
    assert smaller.kv_budget == 24 * GIB - 8_030_261_248
    assert (smaller.pool.num_blocks, smaller.num_requests) == (16_917, 66)
    mixed = replace(plan, weight_dtype="float8", kv_dtype="float32")
    assert mixed.kv_budget == smaller.kv_budget
    assert mixed.pool == pool_of_budget(LLAMA3, smaller.kv_budget, bytes_per_value=4)
    assert mixed.num_reserved_requests == smaller.kv_budget // (8192 * 262_144)


def test_a_memory_below_the_weights_holds_no_request() -> None:
    plan = Plan(LLAMA3, 1, memory=14 * GIB)
    assert plan.kv_budget < 0 and (plan.pool.num_blocks, plan.num_requests, plan.num_reserved_requests) == (0, 0, 0)
    assert [*plan.lines()][-1] == "  the weights alone need 980.51 MiB more: no request fits"


def test_the_null_block_may_be_the_one_that_is_missing() -> None:
    config = replace(LLAMA3, max_positions=16)
    enough = Plan(config, 16).weight_bytes + 2 * kv_bytes_per_block(config)
    assert [Plan(config, 16, memory=memory).num_requests for memory in (enough, enough - 1)] == [1, 0]
    assert Plan(config, 16, memory=enough - 1).num_reserved_requests == 1, "without blocks there is no null block"
    last = [*Plan(config, 16, memory=enough - 1).lines()][-1]
    assert last == "  no request of 16 tokens fits: blocks needed 1, usable 0"


@every_preset
@pytest.mark.parametrize("block_size", [1, 17, 2**16])
def test_a_plan_is_plain_text_of_80_columns(config: ModelConfig, block_size: int) -> None:
    for memory in (0, 1, 24 * GIB, 2**45, MAX_BYTES):
        plan = Plan(config, config.max_positions, block_size, "float32", "float32", memory)
        lines = [*plan.lines()]
        assert [line for line in lines if len(line) > 80 or not line.isascii() or line != line.rstrip()] == []
        assert ("memory, without activations" in lines) == (memory > 0)


@given(config=configs())
def test_the_numbers_of_the_kv_formula_are_true(config: ModelConfig) -> None:
    (line,) = (line for line in Plan(config, 1).lines() if line.startswith("  KV cache"))
    words, numbers, result = line.removeprefix("  KV cache").removesuffix(" a token").replace(" bytes", "").split(" = ")
    assert evaluate(words, config.dims()) == evaluate(numbers, {}) == int(result.replace(",", ""))
