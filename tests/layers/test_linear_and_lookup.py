"""The layers that are one operation: embedding, linear, the gather before the LM head and the LM head."""

import torch
from torch import nn

from tinyllm.layers.embedding import Embedding
from tinyllm.layers.linear import Linear
from tinyllm.layers.lm_head import gather_rows, lm_head


def test_embedding_equals_torch():
    ours, theirs = Embedding(20, 6), nn.Embedding(20, 6)
    ours.load_state_dict(theirs.state_dict())
    token_ids = torch.tensor([3, 19, 0, 3])
    assert torch.equal(ours(token_ids), theirs(token_ids))


def test_linear_equals_torch():
    ours, theirs = Linear(6, 20), nn.Linear(6, 20, bias=False)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 6)
    assert torch.equal(ours(x), theirs(x))


def test_the_lm_head_scores_the_gathered_rows_only():
    hidden, weight = torch.randn(7, 6), torch.randn(20, 6)
    rows = gather_rows(hidden, torch.tensor([2, 6]))
    assert torch.equal(rows, torch.stack([hidden[2], hidden[6]]))
    torch.testing.assert_close(lm_head(rows, weight), (hidden @ weight.T)[[2, 6]])
