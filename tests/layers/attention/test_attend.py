"""Both bodies at the seam `attend(q, k, v)` of one request, against torch with repeated heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tinyllm.layers.attention import reference, sdpa

BODIES = {"reference": reference.attend, "sdpa": sdpa.attend}
every_body = pytest.mark.parametrize("body", BODIES)


def attend_with_repeated_heads(q, k, v):
    """The plainest statement: one head and one query at a time, each key/value head copied for its group."""
    query_len, num_heads, _ = q.shape
    group_size = num_heads // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    out = torch.empty_like(q)
    for i in range(query_len):
        visible = k.shape[0] - query_len + i + 1  # keys up to the query's own position
        for head in range(num_heads):
            query, keys, values = q[None, i : i + 1, head], k[None, :visible, head], v[None, :visible, head]
            out[i, head] = scaled_dot_product_attention(query, keys, values)[0, 0]
    return out


@st.composite
def tensors(draw):
    """q, k and v of any size: multi-head (group_size 1), grouped, multi-query (num_kv_heads 1), chunk or decode step."""
    num_kv_heads, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    query_len, head_dim = draw(st.integers(1, 6)), draw(st.sampled_from([2, 8, 10]))
    seq_len = query_len + draw(st.sampled_from([0, 1, 2, 9]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    q = torch.randn(query_len, num_kv_heads * group_size, head_dim, generator=generator) * 3
    k, v = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator)
    return q, k, v


@every_body
@given(tensors())
def test_every_body_equals_torch_with_repeated_heads(body, qkv):
    torch.testing.assert_close(BODIES[body](*qkv), attend_with_repeated_heads(*qkv), atol=1e-5, rtol=1e-5)


@every_body
@given(tensors(), st.data())
def test_a_query_never_sees_a_later_key(body, qkv, data):
    q, k, v = qkv
    row = data.draw(st.integers(0, q.shape[0] - 1))
    visible = k.shape[0] - q.shape[0] + row + 1
    before = BODIES[body](q, k, v)[row]
    k[visible:], v[visible:] = 100, 100
    assert torch.equal(BODIES[body](q, k, v)[row], before)


@every_body
@given(tensors(), st.integers(1, 6))
def test_the_last_queries_alone_get_what_they_get_in_the_whole(body, qkv, count):
    q, k, v = qkv
    torch.testing.assert_close(BODIES[body](q[-count:], k, v), BODIES[body](q, k, v)[-count:], atol=1e-5, rtol=1e-5)


@every_body
def test_query_head_h_reads_key_value_head_h_by_group_size(body):
    q, k = torch.zeros(1, 6, 4), torch.zeros(3, 2, 4)
    v = torch.stack([torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)], dim=1)
    assert BODIES[body](q, k, v)[0, :, 0].tolist() == pytest.approx([1, 1, 1, 2, 2, 2])


@every_body
def test_scores_are_scaled_by_the_root_of_head_dim(body):
    q, k = torch.full((1, 1, 4), 1.0), torch.stack([torch.zeros(1, 4), torch.full((1, 4), 0.5)])
    v = torch.stack([torch.zeros(1, 4), torch.ones(1, 4)])
    weight = torch.tensor([0.0, 4 * 0.5 / 2]).softmax(0)[1].item()
    assert BODIES[body](q, k, v)[0, 0].tolist() == pytest.approx([weight] * 4)


@every_body
def test_bfloat16_comes_back_as_bfloat16_near_the_float32_result(body):
    q, k, v = torch.randn(4, 6, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    low = BODIES[body](*(x.to(torch.bfloat16) for x in (q, k, v)))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), BODIES[body](q, k, v), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("query_len", [1, 3, 9])
def test_sdpa_shares_the_keys_of_a_group_and_copies_nothing(query_len, monkeypatch):
    seen = []

    def spy(q, k, v, **options):
        seen.append((q, k, v))
        return scaled_dot_product_attention(q, k, v, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    q, k, v = torch.randn(query_len, 6, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    sdpa.attend(q, k, v)
    ((_, shared_k, shared_v),) = seen
    for given_tensor, shared in ((k, shared_k), (v, shared_v)):
        assert shared.shape[:2] == (2, 3), "[num_kv_heads group_size ...]"
        assert shared.stride(1) == 0, "one key/value head serves its whole group"
        assert shared.data_ptr() == given_tensor.data_ptr()


@pytest.mark.parametrize("attend", [reference.attend, sdpa.attend])
def test_more_queries_than_keys_are_refused_alike(attend):
    with pytest.raises(AssertionError, match="6 queries stand at the end of only 5 keys"):
        attend(torch.ones(6, 2, 4), torch.ones(5, 2, 4), torch.ones(5, 2, 4))


def test_the_reference_body_weighs_in_float32_even_for_bfloat16():
    """Scores that bfloat16 cannot tell apart still get their own weights."""
    q = torch.full((1, 1, 64), 8.0, dtype=torch.bfloat16)
    k = torch.randn(12, 1, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    v = torch.eye(12, 64, dtype=torch.bfloat16)[:, None]
    scores = torch.einsum("qhd,khd->qk", q, k).float() / 8  # the products in bfloat16, as the body has them
    expected = scores.softmax(-1).to(torch.bfloat16)
    assert torch.equal(reference.attend(q, k, v)[0, :, :12], expected)
