"""From lists to the tensors of one step."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm import CacheConfig, ModelConfig, SamplingParams, ShapeError
from tinyllm.batch import FlatBatch, build_batch, build_sampling_batch, map_slots
from tinyllm.kv_cache import KVCache, write_kv
from tinyllm.model import Decoder
from tinyllm.request import Request
from tinyllm.trace import Recorder


def test_run_01_decode_prefill_and_decode_lie_flat_behind_each_other():
    batch = build_batch([[70], [1, 2, 3, 4], [90]], [6, 0, 11], [[1, 2], [3], [4, 5, 6]], block_size=4)
    assert batch.token_ids.tolist() == [70, 1, 2, 3, 4, 90]
    assert batch.positions.tolist() == [6, 0, 1, 2, 3, 11]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5, 6]
    assert torch.arange(3).repeat_interleave(batch.cu_seqlens_q.diff()).tolist() == [0, 1, 1, 1, 1, 2], (
        "whose rows they are"
    )
    assert batch.seq_lens.tolist() == [7, 4, 12]
    assert batch.logits_indices.tolist() == [0, 4, 5]
    assert batch.block_table.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]], "short rows end in the null block"
    assert (batch.query_lens_cpu, batch.seq_lens_cpu) == ((1, 4, 1), (7, 4, 12))


def test_peer_37_the_last_row_of_each_prompt_gives_its_logits_whatever_their_lengths():
    batch = build_batch([[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]], [0, 0], [[1], [2, 3]], block_size=4)
    assert batch.token_ids.tolist() == list(range(1, 11))
    assert batch.logits_indices.tolist() == [2, 9] == (batch.cu_seqlens_q[1:] - 1).tolist()


def test_run_02_slots_follow_the_block_table():
    table = torch.tensor([[5, 2, 9], [1, 7, 0]])
    requests, positions = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([6, 7, 8, 0, 1, 4])
    assert map_slots(table, requests, positions, block_size=4).tolist() == [10, 11, 36, 4, 5, 28]


def test_peer_29_the_first_decode_step_stands_right_behind_the_prompt():
    """Its token is the seventh, so its position is 6: the length that it makes, less one."""
    prefill = build_batch([[1, 2, 3, 4, 5, 6]], [0], [[1, 2]], block_size=4)
    decodes = [build_batch([[9]], [computed], [[1, 2, 3]], block_size=4) for computed in (6, 7, 8)]
    assert prefill.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert [batch.positions.tolist() for batch in decodes] == [[6], [7], [8]]
    assert [batch.seq_lens.tolist() for batch in decodes] == [[7], [8], [9]]


@pytest.mark.parametrize(
    ("block_ids", "num_computed", "block_size", "slot"),
    [
        ([10, 11], 7, 4, 47),  # the 8th token fills the second block
        ([10, 11], 3, 4, 43),
        ([1, 2, 3, 4], 3, 1, 4),  # a block a token
        ([3, 1, 2], 15, 8, 15),
    ],
)
def test_a_decode_step_writes_behind_the_last_token(block_ids, num_computed, block_size, slot):
    batch = build_batch([[9]], [num_computed], [block_ids], block_size)
    assert batch.slot_mapping.tolist() == [slot]
    assert batch.positions.tolist() == [num_computed]


@st.composite
def steps(draw):
    """(block_size, per request: computed tokens, new tokens, a row of the block table)."""
    block_size = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=5))
    counts = [-(-(computed + new) // block_size) for computed, new in lengths]
    ids = draw(st.permutations(range(1, sum(counts) + 3)))
    return block_size, [
        (computed, new, [ids.pop() for _ in range(n)]) for (computed, new), n in zip(lengths, counts, strict=True)
    ]


@given(steps())
def test_the_tensors_say_what_the_lists_said(step):
    block_size, requests = step
    tokens = [[100 * i + t for t in range(new)] for i, (_, new, _) in enumerate(requests)]
    batch = build_batch(tokens, [c for c, _, _ in requests], [row for _, _, row in requests], block_size)
    ends = batch.cu_seqlens_q.tolist()
    assert batch.logits_indices.tolist() == [end - 1 for end in ends[1:]]
    live_slots = []
    for i, (computed, new, row) in enumerate(requests):
        rows = slice(ends[i], ends[i + 1])
        assert batch.token_ids[rows].tolist() == tokens[i]
        assert batch.positions[rows].tolist() == list(range(computed, computed + new))
        assert batch.block_table[i].tolist()[: len(row)] == row
        assert not any(batch.block_table[i].tolist()[len(row) :])
        slots = [row[p // block_size] * block_size + p % block_size for p in range(computed + new)]
        assert batch.slot_mapping[rows].tolist() == slots[computed:]
        live_slots += slots
    assert len(set(live_slots)) == len(live_slots), "slot_mapping is injective over live tokens"
    assert min(live_slots) >= block_size, "no token lies in the null block"
    assert batch.seq_lens.tolist() == list(batch.seq_lens_cpu) == [computed + new for computed, new, _ in requests]


@given(steps())
def test_run_08_no_row_is_padding(step):
    """vLLM pads a batch and gives its empty rows slot -1, which its write skips. Here every row is a token of a request."""
    block_size, requests = step
    tokens = [[7] * new for _, new, _ in requests]
    batch = build_batch(tokens, [c for c, _, _ in requests], [row for _, _, row in requests], block_size)
    assert len(batch.slot_mapping) == sum(new for _, new, _ in requests)
    assert batch.slot_mapping.min() >= block_size, "none is negative, and none lies in the null block"
    num_blocks = 1 + max(block_id for _, _, row in requests for block_id in row)
    layer_kv = torch.zeros(2, num_blocks, block_size, 1, 1)
    ones = torch.ones(len(batch.slot_mapping), 1, 1)
    write_kv(layer_kv, ones, ones, batch.slot_mapping)
    written = layer_kv[0].flatten().nonzero().flatten().tolist()
    assert written == sorted(batch.slot_mapping.tolist()), "nothing else is touched"


def test_run_08_a_negative_slot_is_refused_and_never_counts_from_the_end():
    layer_kv = torch.zeros(2, 3, 2, 1, 1)
    ones = torch.ones(1, 1, 1)
    with pytest.raises((IndexError, RuntimeError)):
        write_kv(layer_kv, ones, ones, torch.tensor([-1]))
    assert not layer_kv.any()


def test_one_field_of_another_length_is_refused():
    batch = build_batch([[1, 2, 3], [5]], [0, 6], [[1], [3, 2]], block_size=4)
    for field in fields(FlatBatch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor) and field.name != "logits_indices":  # its length is its own
            with pytest.raises(ShapeError, match=r"num_tokens|num_reqs"):
                replace(batch, **{field.name: torch.cat([value, value])})


def test_greedy_rows_ignore_the_truncations():
    greedy = SamplingParams(top_k=5, top_p=0.5, min_p=0.5)
    batch = build_sampling_batch([greedy, greedy], [1, 2], [4, 5], vocab_size=100)
    assert (batch.top_k.tolist(), batch.top_p.tolist(), batch.min_p.tolist()) == ([100, 100], [1.0, 1.0], [0.0, 0.0])
    assert batch.is_all_greedy
    assert not batch.is_truncated


def test_rows_keep_their_own_parameters():
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=7, min_p=0.25),
        SamplingParams(temperature=1.5, top_k=-1, top_p=0.75),
        SamplingParams(temperature=1, top_k=1000),
    ]
    batch = build_sampling_batch(params, [-(2**63), 2**63 - 1, 5, 6], [1, 2, 3, 4], vocab_size=100)
    assert batch.temperature.tolist() == [0.0, 0.5, 1.5, 1.0]
    assert batch.top_k.tolist() == [100, 7, 100, 100], "off, or more than there are, is the whole vocabulary"
    assert batch.top_p.tolist() == [1.0, 1.0, 0.75, 1.0]
    assert batch.min_p.tolist() == [0.0, 0.25, 0.0, 0.0]
    assert batch.seeds.tolist() == [-(2**63), 2**63 - 1, 5, 6]
    assert batch.positions.tolist() == [1, 2, 3, 4]
    assert not batch.is_all_greedy
    assert batch.is_truncated


@pytest.mark.parametrize(
    ("params", "is_truncated"),
    [({}, False), ({"min_p": 0.5}, False), ({"top_k": 3}, True), ({"top_p": 0.9}, True), ({"top_k": 100}, False)],
)
def test_only_top_k_and_top_p_need_the_sort(params, is_truncated):
    batch = build_sampling_batch([SamplingParams(temperature=1, **params)], [1], [0], vocab_size=100)
    assert batch.is_truncated is is_truncated


def test_banned_ids_lie_flat_with_their_rows():
    params = [SamplingParams()] * 3
    batch = build_sampling_batch(params, [1, 2, 3], [4, 5, 6], 100, banned_ids=[(2, 7), (), (99, 100)])
    assert (batch.banned_rows.tolist(), batch.banned_ids.tolist()) == ([0, 0, 2], [2, 7, 99]), "100 is no token"
    assert batch.is_banning
    plain = build_sampling_batch(params, [1, 2, 3], [4, 5, 6], 100, banned_ids=[(), (), (100,)])
    assert not plain.is_banning


# --- through the model -------------------------------------------------------------------------------------------------


def test_run_05_a_prompt_in_chunks_samples_behind_its_last_one(tiny_model, make_engine):
    engine = make_engine(tiny_model(), block_size=4, budget=4)
    request = Request("0", list(range(10, 20)), SamplingParams(max_tokens=2))
    engine.add_request(request)
    seen = []
    for _ in range(4):
        output = engine.step()
        seen.append((output.batch.positions.tolist(), output.batch.logits_indices.tolist(), request.num_output_tokens))
    assert seen == [([0, 1, 2, 3], [3], 0), ([4, 5, 6, 7], [3], 0), ([8, 9], [1], 1), ([10], [0], 2)]


LLAMA_3_8B = ModelConfig(
    hidden_size=4096, intermediate_size=14336, num_layers=2, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
    max_positions=8192,
)  # fmt: skip  # two of its 32 layers, which are alike


def test_run_10_the_shapes_of_llama_3_8b():
    """The batch of RUN-01, six tokens of three requests, through a model without weights."""
    with torch.device("meta"):
        decoder = Decoder(LLAMA_3_8B).to(torch.bfloat16)
    kv_cache = KVCache(LLAMA_3_8B, CacheConfig(4, 7), torch.bfloat16, "meta")
    with Recorder() as recorder:
        batch = build_batch([[70], [1, 2, 3, 4], [90]], [6, 0, 11], [[1, 2], [3], [4, 5, 6]], 4, "meta")
        decoder(batch, kv_cache)
    calls = list(recorder.walk())

    def sizes(path: str, name: str = "result") -> tuple[int, ...]:
        found = {value.sizes for call in calls if call.path == path for value in call.values if value.name == name}
        (same,) = found
        return same

    for name in ("token_ids", "positions", "slot_mapping"):
        assert sizes("build_batch", name) == (6,)
    assert sizes("embed_tokens") == sizes("norm", "result[0]") == (6, 4096)
    for layer in ("layers.0", "layers.1"):
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        assert sizes(f"{layer}.input_layernorm", "result[0]") == (6, 4096)
        assert sizes(f"{layer}.input_layernorm", "result[1]") == (6, 4096)
        assert (sizes(f"{attention}.qkv_proj", "weight"), sizes(f"{attention}.qkv_proj")) == ((6144, 4096), (6, 6144))
        assert [sizes(attention, name) for name in ("q", "k", "v")] == [(6, 32, 128), (6, 8, 128), (6, 8, 128)]
        assert [sizes(f"{attention}.write_kv", name) for name in ("k", "v")] == [(6, 8, 128)] * 2
        assert (sizes(attention, "attended"), sizes(attention, "merged")) == ((6, 32, 128), (6, 4096))
        assert (sizes(f"{attention}.o_proj", "weight"), sizes(f"{attention}.o_proj")) == ((4096, 4096), (6, 4096))
        assert sizes(f"{layer}.post_attention_layernorm", "result[0]") == (6, 4096)
        assert (sizes(f"{mlp}.gate_up_proj", "weight"), sizes(f"{mlp}.gate_up_proj")) == ((28672, 4096), (6, 28672))
        assert sizes(f"{mlp}.silu_and_mul") == (6, 14336)
        assert (sizes(f"{mlp}.down_proj", "weight"), sizes(f"{mlp}.down_proj")) == ((4096, 14336), (6, 4096))
    assert (sizes("gather_rows"), sizes("lm_head", "weight"), sizes("lm_head")) == (
        (3, 4096),
        (128256, 4096),
        (3, 128256),
    )
    assert (batch.block_table.shape, batch.seq_lens.shape, batch.cu_seqlens_q.shape) == ((3, 3), (3,), (4,))
