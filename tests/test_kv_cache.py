"""The paged pool: what is written by slot is what is read through the block table."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm import CacheConfig, ConfigError, ModelConfig
from tinyllm.kv_cache import KVCache, gather_kv, write_kv

CONFIG = ModelConfig(
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
    max_positions=128,
)
LLAMA_3_8B = ModelConfig(
    hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
    max_positions=8192,
)  # fmt: skip


def test_one_pool_holds_every_layer():
    cache = KVCache(CONFIG, CacheConfig(block_size=4, num_blocks=7))
    assert cache.kv.shape == (3, 2, 7, 4, 2, 16)
    assert cache.kv.count_nonzero() == 0
    assert cache.num_bytes == 3 * 2 * 7 * 4 * 2 * 16 * 4


def test_a_layer_is_a_view_of_the_pool():
    cache = KVCache(CONFIG, CacheConfig(block_size=4, num_blocks=7))
    cache.layer(1).fill_(5)
    assert (cache.kv[1] == 5).all()
    assert cache.kv[[0, 2]].count_nonzero() == 0


def test_a_block_of_llama_3_8b_takes_two_mebibytes():
    cache = KVCache(LLAMA_3_8B, CacheConfig(block_size=16, num_blocks=512), torch.bfloat16, "meta")
    assert cache.num_bytes // 512 == 2 * 2**20
    assert cache.layer(0).nbytes // 512 == 64 * 2**10
    assert cache.num_bytes == 2**30


@st.composite
def pools(draw):
    """(block_size, num_blocks, the block table rows and lengths of a few requests)."""
    block_size = draw(st.integers(1, 6))
    seq_lens = draw(st.lists(st.integers(1, 15), min_size=1, max_size=4))
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    ids = draw(st.permutations(range(1, sum(counts) + 3)))
    rows = [[ids.pop() for _ in range(count)] for count in counts]
    return block_size, sum(counts) + 3, list(zip(seq_lens, rows, strict=True))


@given(pools(), st.randoms(use_true_random=False))
def test_every_request_reads_its_own_tokens_in_order(pool, random):
    block_size, num_blocks, requests = pool
    layer_kv = torch.zeros(2, num_blocks, block_size, 2, 8)
    tokens = [(i, position) for i, (seq_len, _) in enumerate(requests) for position in range(seq_len)]
    random.shuffle(tokens)  # the order of writing must not matter
    slots = [requests[i][1][p // block_size] * block_size + p % block_size for i, p in tokens]
    k = torch.tensor([[100.0 * i + p + 1] for i, p in tokens])[:, :, None].expand(-1, 2, 8)
    write_kv(layer_kv, k, -k, torch.tensor(slots))
    for i, (seq_len, row) in enumerate(requests):
        got_k, got_v = gather_kv(layer_kv, torch.tensor(row), seq_len)
        assert got_k[:, 0, 0].tolist() == [100.0 * i + p + 1 for p in range(seq_len)]
        assert torch.equal(got_v, -got_k)
        assert got_k.shape == (seq_len, 2, 8)
    assert (layer_kv[0] != 0).any(-1).any(-1).sum() == len(tokens), "no other slot was touched"


def test_heads_and_channels_stay_apart():
    layer_kv = torch.zeros(2, 5, 4, 3, 8)
    k, v = torch.randn(6, 3, 8), torch.randn(6, 3, 8)
    write_kv(layer_kv, k, v, torch.tensor([8, 9, 10, 11, 16, 17]))
    got_k, got_v = gather_kv(layer_kv, torch.tensor([2, 4]), 6)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)


def test_a_pool_that_no_machine_has_is_refused_in_one_line():
    with pytest.raises(
        ConfigError, match=r"a KV pool of 1073741824 blocks of 65536 tokens takes .* GB, which this machine"
    ):
        KVCache(CONFIG, CacheConfig(2**16, 2**30))
