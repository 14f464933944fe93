# %% [markdown]
# # Chapter 0: one prompt, all the way through
#
# An inference engine takes a text and adds a little more text to it. In between, the text changes its form many times:
# bytes, words, numbers, rows of numbers, scores, and back. This chapter takes one prompt through every stage, with the
# engine's own functions, and stops after each one to look at what came out. You need Python; you need not have met a
# language model before.
#
# No size is written into the text of this chapter. Where a tensor appears, code prints its dimensions: the words are
# those of the engine's source, the numbers are those of the tensor. Where a sentence makes a claim, an `assert` next to
# it checks the claim. So if the engine changes, this page either changes with it or stops with an error.
#
# Each stage imports what it uses, so the import lines tell you which file to open.

# %% [markdown]
# One helper, which you may skip. `show(function, name=tensor)` looks up how `function` annotates `name` in its source
# and prints the dimension words with the tensor's sizes. Inside one `Show`, a word has one size: a second size for the
# same word is an error. The first time that a word appears, its meaning is printed, too.

# %%
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace.dims import Words, field_words, function_specs


class Show:
    """Print tensors with the dimension words of the engine's source, and check that each word keeps its size."""

    introduced: ClassVar[set[str]] = set()  # words whose meaning was printed

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)

    def __call__(self, source: Any, **tensors: Any) -> None:
        """`source` is the function or dataclass whose names the tensors have."""
        for (name, tensor), words in zip(tensors.items(), find_words(source, tensors), strict=True):
            parts = []
            for word, size in zip(words, tensor.shape, strict=True):
                expected = evaluate(word, self.sizes)
                assert expected in (None, size), f"{name}: {word} is {size}, but was {expected} before"
                self.sizes.setdefault(word, size)
                parts.append(word if word.isdigit() else f"{word}={size}")
            is_short = not tensor.is_floating_point() and tensor.numel() <= 16
            print(f"{name:15}[{', '.join(parts)}]" + (f"  {tensor.tolist()}" if is_short else ""))
            for word in [word for word in words if word in WORDS and word not in self.introduced]:
                self.introduced.add(word)
                print(f"{'':15}  {word}: {WORDS[word].meaning}")


def find_words(source: Any, names: Iterable[str]) -> list[Words]:
    """The words of these names; names that the function does not annotate are its results, in order."""
    source = inspect.unwrap(source)
    file = Path(inspect.getfile(source))
    if isinstance(source, type):
        return [field_words(file, source.__name__)[name] for name in names]
    spec = function_specs(file)[source.__code__.co_qualname, source.__code__.co_firstlineno]
    results = iter(spec.results)
    found = [spec.arguments.get(name) or spec.locals.get(name) or next(results) for name in names]
    return [words for words in found if words]


# %% [markdown]
# ## The model
#
# A model file holds three things: a configuration (how many layers, how wide), a vocabulary, and the weights. Loading
# reads all three. Training chose the weights; we only use them. `dims()` lists every size that the file fixes. Some of
# them follow from others, and you will meet each of these sums again below.

# %%
from tinyllm.weights.load import load_model

loaded = load_model()
config, decoder, tokenizer = loaded.config, loaded.decoder, loaded.tokenizer
for word, size in config.dims().items():
    print(f"{word:18}{size:>6}  {WORDS[word].meaning}" + (f" = {WORDS[word].formula}" if WORDS[word].formula else ""))

assert config.q_size == config.num_heads * config.head_dim
assert config.kv_size == config.num_kv_heads * config.head_dim
assert config.qkv_size == config.q_size + 2 * config.kv_size
num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
print(f"\n{num_parameters:,} parameters in {config.num_layers} layers and one embedding table")

# %% [markdown]
# ## 1. Text to token ids
#
# **In:** a string. **Out:** a list of whole numbers, the token ids. **Why this many:** it depends on the vocabulary. A
# frequent word is one token, a rare one several, so the number of tokens follows neither the characters nor the words.
#
# The text becomes bytes (UTF-8). A pattern cuts it into words; the blank in front of a word belongs to the word. Then
# each word starts as single bytes, and neighbours are merged. The vocabulary comes with an ordered list of merges: of
# all neighbours that stand in the list, the pair that stands earliest becomes one token, again and again, until no pair
# is in the list. Merges never cross the border of a word. (Files write the blank as Ġ, to keep it visible.)

# %%
from itertools import pairwise

from tinyllm.tokenizer.byte_alphabet import spell_bytes
from tinyllm.weights.gguf import read_gguf

prompt = "The capital of France is"
words = tokenizer.encode_words(prompt)
token_ids = tokenizer.encode(prompt)
print(f"{len(prompt.encode())} bytes, {len(words)} words, {len(token_ids)} tokens")
for word in words:
    print(f"{word.text!r:12} {word.token_ids}")

merges = read_gguf(loaded.path).metadata["tokenizer.ggml.merges"]
rank_of = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
pieces = list(spell_bytes(b" capital"))
print("\n", *pieces)
while ranked := [(rank_of[pair], left) for left, pair in enumerate(pairwise(pieces)) if pair in rank_of]:
    rank, left = min(ranked)
    pieces[left : left + 2] = [pieces[left] + pieces[left + 1]]
    print(f" {' '.join(pieces):16} merge {rank:>5}")

assert pieces == [spell_bytes(tokenizer.token_bytes(token_ids[1]))] == ["Ġcapital"]
assert "".join(word.text for word in words) == tokenizer.decode(token_ids) == prompt

# %% [markdown]
# This prompt is so ordinary that each of its words is one token. Other texts are not: digits stand alone here, and a
# name that the vocabulary does not know falls into pieces.

# %%
assert len(token_ids) == len(words)
for text in ("in 2024", "Llanfairpwllgwyngyll", "naïve 🙂"):
    print(f"{text!r:24}", [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)])
    assert tokenizer.decode(tokenizer.encode(text)) == text
assert len(tokenizer.encode("2024")) == len("2024")

# %% [markdown]
# ## 2. A request
#
# **In:** token ids and the wishes of the caller (how many tokens, how to choose them). **Out:** a `Request`.
#
# Two counters say everything about how far a request has come: `num_tokens`, the tokens that it has, and
# `num_computed_tokens`, those of them that went through the model. The difference is the work that is left. "Prefill"
# (many tokens left: the prompt) and "decode" (one token left: the newest) are names that people give to the two usual
# cases. The engine has no such states; it only subtracts.

# %%
from tinyllm.request import Request, SamplingParams

request = Request("A", token_ids, SamplingParams(temperature=0.0, max_tokens=6), config.eos_token_ids)
print(f"num_tokens={request.num_tokens}  num_computed_tokens={request.num_computed_tokens}  {request.status}")
assert request.num_tokens - request.num_computed_tokens == len(token_ids)

# %% [markdown]
# ## 3. The scheduler: who computes what in this step
#
# **In:** the waiting and the running requests. **Out:** a `Schedule`: for each request, which of its tokens this step
# computes, and which memory blocks it holds. **Why this many:** each request gets its difference, until the step's
# token budget is used up. Our budget is larger than the prompt, so the whole prompt goes in one step. (A budget that is
# too small cuts it into chunks: see the exercises.)
#
# The memory is the KV cache. For each token and layer the model keeps vectors, keys and values, because later tokens
# will look back at them. The cache is one pool, cut into blocks of `block_size` token slots each, and a request gets
# just as many blocks as its tokens need: the quotient, rounded up. The blocks of a request need not be neighbours, so
# no memory is set aside for a length that a request may never reach. We choose a small `block_size`, so that the prompt
# needs more than one block. Block 0, the null block, is never handed out; it only fills up the short lines of tables.

# %%
from tinyllm.config import CacheConfig, SchedulerConfig
from tinyllm.scheduler import Scheduler

cache_config = CacheConfig(block_size=4, num_blocks=17)
limits = SchedulerConfig(max_model_len=32, max_num_batched_tokens=16, max_num_seqs=4)
scheduler = Scheduler(limits, cache_config)
scheduler.add_request(request)
schedule = scheduler.schedule()
(entry,) = schedule.scheduled
print(f"budget: {schedule.num_tokens} of {schedule.token_budget} tokens used")
print(f"tokens to compute: {entry.token_ids} behind {entry.num_computed_tokens} computed ones")
print(f"blocks: {entry.block_ids}, {schedule.num_used_blocks} of {schedule.num_blocks - 1} in use")

assert entry.query_len == request.num_tokens <= schedule.token_budget
assert len(entry.block_ids) == -(-entry.seq_len // cache_config.block_size) > 1  # -(-a // b) rounds up
assert 0 not in entry.block_ids
assert request.num_computed_tokens == request.num_tokens  # counted when scheduled: the step will compute them

# %% [markdown]
# ## 4. The flat batch: lists become tensors
#
# **In:** the schedule's lists. **Out:** a `FlatBatch` of whole numbers. **Why these sizes:** all tokens of all requests
# lie behind each other, one row for each token. A table with one line for each request would have to be filled up to
# the longest of them; here nothing is filled up. What the rows alone do not tell, namely whose they are, other tensors
# do.
#
# - `token_ids` and `positions` describe the rows: which token, and at which place of its own request.
# - `cu_seqlens_q` holds the borders: request i has the rows from entry i up to, but without, entry i+1. That takes one
#   number more than there are requests.
# - `block_table` has one row for each request: its blocks, in order of position. It says where keys and values are
#   READ.
# - `slot_mapping` says where each row's new key and value are WRITTEN. A slot is a place in the pool: the block's id
#   times `block_size`, plus the position's remainder by `block_size`.
# - `seq_lens` tells how many tokens each request has in total once this step is done: so many keys its rows may read.
# - `logits_indices` are the rows for which we want a prediction: the last one of each request.

# %%
from tinyllm.batch import FlatBatch, build_batch

batch = build_batch([entry.token_ids], [entry.num_computed_tokens], [entry.block_ids], cache_config.block_size)
show = Show({**config.dims(), **cache_config.dims()})
show(
    FlatBatch,
    token_ids=batch.token_ids,
    positions=batch.positions,
    block_table=batch.block_table,
    cu_seqlens_q=batch.cu_seqlens_q,
    slot_mapping=batch.slot_mapping,
    seq_lens=batch.seq_lens,
    logits_indices=batch.logits_indices,
)

for position, slot in zip(batch.positions.tolist(), batch.slot_mapping.tolist(), strict=True):
    block_id = entry.block_ids[position // cache_config.block_size]
    assert slot == block_id * cache_config.block_size + position % cache_config.block_size
assert batch.logits_indices.tolist() == [batch.cu_seqlens_q[1] - 1]

# %% [markdown]
# ## 5. Embedding: ids become vectors
#
# **In:** one id for each row. **Out:** one vector for each row. **Why this size:** `hidden_size` is the width that the
# model was built with, and every layer reads and writes rows of just this width; only so can layers be stacked.
#
# The table has a row for each token of the vocabulary. The embedding is a lookup in it: no product, no sum. Equal
# tokens get equal vectors here, wherever they stand; place and neighbours come into play in the layers.

# %%
import torch

from tinyllm.layers.embedding import Embedding
from tinyllm.model import Decoder

x = decoder.embed_tokens(batch.token_ids)
show(Embedding.forward, weight=decoder.embed_tokens.weight)
show(Decoder.forward, x=x)

for row, token_id in zip(x, token_ids, strict=True):
    assert torch.equal(row, decoder.embed_tokens.weight[token_id])

# %% [markdown]
# ## 6. One decoder layer, by hand
#
# Every layer has the same two blocks: attention, where a token reads from itself and the tokens before it, and the MLP,
# where each token is worked on alone. Rows go in and rows of the same size come out. Nothing that follows changes the
# number of rows until the very end.
#
# ### 6.1 RMSNorm
#
# **In:** rows of any magnitude. **Out:** rows of the same size, each divided by its root mean square and multiplied,
# element by element, by a learnt weight. **Why:** each block adds something to the rows, so their magnitude drifts from
# layer to layer (section 7 checks how far); a block, however deep, gets rows of a magnitude that it knows.
#
# The module gives back two tensors: the normalised rows, which go into the block, and the rows as they were, the
# residual. The residual runs past the block, and the block's output is added to it later.

# %%
from tinyllm.layers.norm import RMSNorm, rms_norm

layer = decoder.layers[0]
attn_in, residual = layer.input_layernorm(x, None)
show(RMSNorm.forward, normed=attn_in, stream=residual)

assert torch.equal(residual, x)  # before the first block there is nothing to add
assert torch.equal(attn_in, rms_norm(x, layer.input_layernorm.weight, config.rms_norm_eps))
mean_square = (attn_in / layer.input_layernorm.weight).pow(2).mean(dim=-1)
assert torch.allclose(mean_square, torch.ones_like(mean_square), atol=0.01)

# %% [markdown]
# ### 6.2 Queries, keys and values
#
# **In:** normalised rows. **Out:** for each row several queries ("what am I looking for?"), keys ("what can I be found
# by?") and values ("what do I hand over?"), each a vector of `head_dim` numbers. **Why these sizes:** the queries, keys
# and values come from one matrix product, because their three weights are stored as one matrix; `qkv_size` is the sum
# of the three widths. A head is one such small vector, and each head can look for something else.
#
# There are fewer key/value heads than query heads: `group_size` query heads share one key/value head (grouped-query
# attention). Keys and values are what the cache must hold, so sharing makes the cache smaller by that factor. Query
# head h reads key/value head `h // group_size`; sharing is only this index, nothing is copied.

# %%
from tinyllm.layers.attention.gqa import GroupedQueryAttention, split_heads

qkv = layer.self_attn.qkv_proj(attn_in)
q_straight, k_straight, v = split_heads(qkv, config.num_heads, config.num_kv_heads, config.head_dim)
show(GroupedQueryAttention.forward, qkv=qkv)
show(split_heads, q_straight=q_straight, k_straight=k_straight, v=v)

# A row is: query heads, then key heads, then value heads.
assert torch.equal(q_straight[:, 0], qkv[:, : config.head_dim])
assert torch.equal(k_straight[:, 0], qkv[:, config.q_size : config.q_size + config.head_dim])
assert q_straight.data_ptr() == qkv.data_ptr()  # a view: the same memory, read in another way
assert config.num_heads == config.group_size * config.num_kv_heads
print([f"query head {h} -> kv head {h // config.group_size}" for h in range(0, config.num_heads, config.group_size)])

# %% [markdown]
# ### 6.3 RoPE: the place of a token is an angle
#
# **In:** queries and keys, and the positions. **Out:** the same sizes. So far nothing told the model which token comes
# first. RoPE cuts each head into two halves; number i of the first half and number i of the second are a pair, that is
# a point in a plane, and the point is turned by the angle `position * frequency[i]`. That gives `half_dim` angles for
# each row, and the axis of 1 between lets all heads use the same ones. Values are not turned.
#
# **Why it works:** the product of a turned query and a turned key depends on the distance of their positions only. The
# last lines check it: both moved by the same number of places, the product stays what it was.

# %%
from tinyllm.layers.rope import RotaryEmbedding, apply_rope

cos, sin = decoder.rotary(batch.positions)
show(RotaryEmbedding.forward, cos=cos, sin=sin)
q = apply_rope(q_straight, cos, sin)
k = apply_rope(k_straight, cos, sin)
show(GroupedQueryAttention.forward, q=q, k=k)

first, second = q_straight[..., : config.half_dim], q_straight[..., config.half_dim :]
assert torch.allclose(q[..., : config.half_dim], first * cos - second * sin)
assert torch.allclose(q[..., config.half_dim :], second * cos + first * sin)
assert torch.equal(q[0], q_straight[0])  # position 0: an angle of 0
moved_cos, moved_sin = decoder.rotary(batch.positions + 100)
moved_q, moved_k = apply_rope(q_straight, moved_cos, moved_sin), apply_rope(k_straight, moved_cos, moved_sin)
assert not torch.allclose(moved_q, q, atol=0.1)
assert torch.allclose(moved_q[:, 0] @ moved_k[:, 0].T, q[:, 0] @ k[:, 0].T, atol=1e-3)

# %% [markdown]
# ### 6.4 Write keys and values into the cache
#
# **In:** one key and one value for each row and key/value head. **Out:** nothing new; they now lie in the pool, each in
# the slot that `slot_mapping` names. **Why the pool has this size:** it was made once, when the engine started, and it
# never grows. In each layer, each slot of each block has room for one key and one value, `head_dim` numbers each, of
# every key/value head.
#
# All rows are written before any is read. So a token finds itself and its prompt in the cache in the same way in which
# a later token will find them: there is one way of reading, not one for the prompt and another one for later.

# %%
from tinyllm.kv_cache import KVCache, write_kv

kv_cache = KVCache(config, cache_config)
layer_kv = kv_cache.layer(0)
write_kv(layer_kv, k, v, batch.slot_mapping)
show(write_kv, layer_kv=layer_kv)

used_slots = layer_kv[0].flatten(0, 1).abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
print("slots in use:", used_slots)
assert used_slots == batch.slot_mapping.tolist()
bytes_per_token = 2 * config.num_layers * config.kv_size * kv_cache.kv.element_size()
assert bytes_per_token == kv_cache.num_bytes // cache_config.num_slots
print(
    f"a token costs 2 * num_layers * kv_size * {kv_cache.kv.element_size()} bytes = {bytes_per_token:,} bytes of cache"
)

# %% [markdown]
# ### 6.5 Attention in six steps
#
# From here to the end of attention we look at ONE request. Its rows of this step are `query_len` many, and the keys
# that it can read are `seq_len` many. Now, with nothing computed before, the two are equal; in later steps they are
# not.
#
# **In:** queries of this step, and keys and values of all steps so far, gathered through the block table. **Out:** one
# vector for each query. The six steps, in the names of `layers/attention/reference.py`:
#
# 1. `grouped_q`: sort the query heads by the key/value head that they share.
# 2. `scores`: the product of every query with every key, a number for each pair.
# 3. `scaled`: divide by the square root of `head_dim`, so that wider heads do not mean larger scores.
# 4. `masked`: a query may not look at keys behind its own position; those scores become minus infinity.
# 5. `weights`: softmax makes of each row of scores numbers between 0 and 1 that sum to 1; minus infinity becomes 0.
# 6. `out`: the sum of the values, each multiplied by its weight. The key axis is gone: it was summed over.

# %%
from einops import einsum, rearrange

from tinyllm.kv_cache import gather_kv
from tinyllm.layers.attention.reference import attend, causal_mask

keys, values = gather_kv(layer_kv, batch.block_table[0], batch.seq_lens_cpu[0])
show(gather_kv, keys=keys, values=values)
assert torch.equal(keys, k)
assert torch.equal(values, v)

grouped_q = rearrange(
    q,
    "query_len (num_kv_heads group_size) head_dim -> query_len num_kv_heads group_size head_dim",
    num_kv_heads=config.num_kv_heads,
)
scores = einsum(
    grouped_q,
    keys,
    "query_len num_kv_heads group_size head_dim, seq_len num_kv_heads head_dim -> num_kv_heads group_size query_len seq_len",
)
scaled = scores * config.head_dim**-0.5
is_hidden = causal_mask(len(q), len(keys), q.device)
masked = scaled.masked_fill(is_hidden, float("-inf"))
weights = masked.softmax(dim=-1)
out = einsum(
    weights,
    values,
    "num_kv_heads group_size query_len seq_len, seq_len num_kv_heads head_dim -> query_len num_kv_heads group_size head_dim",
)
show(attend, grouped_q=grouped_q, scores=scores, scaled=scaled)
show(attend, is_hidden=is_hidden, masked=masked, weights=weights, out=out)

# %% [markdown]
# The six steps are what the engine's `attend` does, to the last bit. And the heads share as promised: the scores of
# query head h come from key head `h // group_size`.
#
# The table shows the weights of one head. A row is a token that looks, a column a token that is looked at. The first
# token can only look at itself; above the diagonal all is 0, because nobody sees the future. This mask is also what
# makes the cache possible: an old token's row does not change when a new token arrives behind it.

# %%
attended = attend(q, keys, values)
assert torch.equal(attended, out.flatten(1, 2))
for h in range(config.num_heads):
    kv_head, member = h // config.group_size, h % config.group_size
    assert torch.allclose(scores[kv_head, member], q[:, h] @ keys[:, kv_head].T, atol=1e-4)

pieces = [tokenizer.token_text(token_id) for token_id in token_ids]
print(f"query head {config.num_heads - 1}", *(f"{piece:>9}" for piece in pieces), sep="")
for piece, row in zip(pieces, weights[-1, -1].tolist(), strict=True):
    print(f"{piece:>12}", *(f"{weight:9.3f}" for weight in row), sep="")

assert torch.allclose(weights.sum(dim=-1), torch.ones(()))
assert weights[..., is_hidden].eq(0).all()
assert weights[:, :, 0, 0].eq(1).all()

# %% [markdown]
# ### 6.6 Merge the heads, project, and add to the residual
#
# **In:** a vector for each row and query head. **Out:** a row of `hidden_size` again. **Why:** the heads of a row are
# laid side by side, which gives `q_size` numbers (a view, nothing moves), and `o_proj` mixes the heads and brings the
# row back to the width of the residual. In this model `q_size` happens to equal `hidden_size`; in others it need not.
#
# Then comes the next norm. It adds the block's output to the residual first: attention does not replace the row, it
# adds what it found to it. That sum is the new residual.

# %%
from tinyllm.layers.attention.gqa import merge_heads
from tinyllm.layers.norm import add_residual

merged = merge_heads(attended)
attn_out = layer.self_attn.o_proj(merged)
show(GroupedQueryAttention.forward, merged=merged, out=attn_out)
mlp_in, mlp_residual = layer.post_attention_layernorm(attn_out, residual)
show(RMSNorm.forward, normed=mlp_in, stream=mlp_residual)

assert config.q_size == config.hidden_size
assert merged.data_ptr() == attended.data_ptr()
assert torch.equal(mlp_residual, add_residual(attn_out, residual))
assert torch.equal(mlp_in, rms_norm(mlp_residual, layer.post_attention_layernorm.weight, config.rms_norm_eps))

# %% [markdown]
# ### 6.7 The MLP
#
# **In:** normalised rows. **Out:** rows of the same size. **Why it is wide in the middle:** each row is widened to
# `intermediate_size`, filtered there, and narrowed again. Two products make the wide row, `gate` and `up`; their
# weights are stored as one matrix, so they are one product of width `gate_up_size`. Then `silu_and_mul` takes the
# halves apart again: `silu(gate) * up`, where `silu(z) = z * sigmoid(z)`. The gate decides, number by number, how much
# of `up` may pass (SwiGLU). No row sees another one here.

# %%
from tinyllm.layers.mlp import MLP, silu_and_mul

gate_up = layer.mlp.gate_up_proj(mlp_in)
activated = silu_and_mul(gate_up)
mlp_out = layer.mlp.down_proj(activated)
show(MLP.forward, gate_up=gate_up, activated=activated, out=mlp_out)

gate, up = gate_up[:, : config.intermediate_size], gate_up[:, config.intermediate_size :]
assert torch.allclose(activated, gate * gate.sigmoid() * up, atol=1e-5)
assert torch.allclose(layer.mlp(mlp_in[-1:]), mlp_out[-1:], atol=1e-4)  # the last row alone gives the same

# %% [markdown]
# That was one layer. The engine's own call gives the same two tensors. The MLP's output is not added to the residual
# yet: the first norm of the next layer does it, just as above.

# %%
from tinyllm.layers.decoder import DecoderLayer

layer_out, layer_residual = layer(x, None, cos, sin, layer_kv, batch)
show(DecoderLayer.forward, mlp_out=layer_out)
assert torch.equal(layer_out, mlp_out)
assert torch.equal(layer_residual, mlp_residual)

# %% [markdown]
# ## 7. All layers, the final norm, and a score for every token
#
# **In:** the embedded rows. **Out:** `logits`: for each gathered row one score for every token of the vocabulary.
#
# The layers differ only in their weights, so the loop is short: what leaves one layer enters the next one. After the
# last layer one more norm adds the last MLP's output. **Why only some rows go on:** row i has seen the tokens up to i,
# so it predicts token i+1. For all rows but the last, that token is known: it stands in the prompt. So `gather_rows`
# keeps the last row of each request, and the largest product of the model, with the whole vocabulary, is made for that
# row alone.
#
# The LM head compares the row with a vector for each token. In this model these vectors are the embedding table itself
# (tied embeddings): the table that turned ids into rows at the start now turns a row into scores for ids.

# %%
from tinyllm.layers.lm_head import gather_rows, lm_head

hidden_states, residual = x, None
for index, each_layer in enumerate(decoder.layers):
    hidden_states, residual = each_layer(hidden_states, residual, cos, sin, kv_cache.layer(index), batch)
hidden, _ = decoder.norm(hidden_states, residual)
rows = gather_rows(hidden, batch.logits_indices)
logits = lm_head(rows, decoder.embed_tokens.weight)
show(gather_rows, hidden=hidden)
show(Decoder.forward, rows=rows, logits=logits)

assert config.tie_word_embeddings
assert torch.equal(logits, decoder(batch, kv_cache))  # Decoder.forward is this cell
assert residual.pow(2).mean() > 1000 * x.pow(2).mean()  # this is what the norms shield the blocks from
largest = max(decoder.named_parameters(), key=lambda parameter: parameter[1].numel())
assert largest[0] == "embed_tokens.weight"
assert torch.equal(rows[0], hidden[-1])
guesses = lm_head(hidden, decoder.embed_tokens.weight).argmax(dim=-1)  # only to look: the scores of every row
for piece, guess in zip(pieces, guesses.tolist(), strict=True):
    print(f"...{piece:10} -> {tokenizer.token_text(guess)!r}")

# %% [markdown]
# ## 8. Choose one token
#
# **In:** a row of scores. **Out:** one token id for each row. **Why this size:** every request whose tokens are all
# computed gets just one more token in a step.
#
# Softmax turns scores into probabilities, which is nice to look at. Greedy sampling (temperature 0) does not need them:
# it takes the largest score. With a higher temperature, less likely tokens get their chance, too.

# %%
from tinyllm.batch import build_sampling_batch
from tinyllm.sampler.sample import sample

top = torch.softmax(logits[0], dim=-1).topk(5)
for probability, token_id in zip(top.values.tolist(), top.indices.tolist(), strict=True):
    print(f"{tokenizer.token_text(token_id)!r:12} {probability:.3f}")

sampling = build_sampling_batch([request.params], [request.seed], [entry.seq_len], config.vocab_size)
sampled, is_valid = sample(logits, sampling)
show(sample, sampled=sampled, is_valid=is_valid)
first_token = tokenizer.token_text(sampled[0].item())
print(f"{prompt}...{first_token!r}")

assert first_token == " Paris"
assert sampled[0] == logits[0].argmax()

# %% [markdown]
# ## 9. Append, and go round again: the decode step
#
# The new token is appended to the request. Now the request has one token more than were computed, so the next step's
# difference is one. The same code runs: schedule, batch, model, sample. Compare the sizes with those above: one row
# where there was a whole prompt, `query_len` of one, and `seq_len` one longer than before.
#
# **Why so little work is enough:** keys and values of the earlier tokens lie in the cache and stay as they are, as the
# mask kept them from depending on later tokens. The one new row writes its own key and value and reads the rest. The
# first check looks at the pool before and after; the second one computes everything anew without the cache, and gets
# the same scores.

# %%
scheduler.update(schedule, [[token_id] for token_id in sampled.tolist()])
print(f"num_tokens={request.num_tokens}  num_computed_tokens={request.num_computed_tokens}")
assert request.num_tokens - request.num_computed_tokens == 1

decode_schedule = scheduler.schedule()
(decode_entry,) = decode_schedule.scheduled
decode_batch = build_batch(
    [decode_entry.token_ids], [decode_entry.num_computed_tokens], [decode_entry.block_ids], cache_config.block_size
)
kv_before = kv_cache.kv.clone()
decode_logits = decoder(decode_batch, kv_cache)

show = Show({**config.dims(), **cache_config.dims()})
show(
    FlatBatch,
    token_ids=decode_batch.token_ids,
    positions=decode_batch.positions,
    block_table=decode_batch.block_table,
    slot_mapping=decode_batch.slot_mapping,
    seq_lens=decode_batch.seq_lens,
)
assert decode_batch.query_lens_cpu == (1,)
assert decode_batch.seq_lens_cpu[0] == batch.seq_lens_cpu[0] + 1
decode_keys, _ = gather_kv(layer_kv, decode_batch.block_table[0], decode_batch.seq_lens_cpu[0])
show(attend, k=decode_keys)
show(Decoder.forward, logits=decode_logits)

# %%
changed = (kv_cache.kv != kv_before).flatten(2, 3).any(dim=4).any(dim=3).any(dim=1).any(dim=0)
assert changed.nonzero().flatten().tolist() == decode_batch.slot_mapping.tolist()

anew = build_batch([request.token_ids], [0], [decode_entry.block_ids], cache_config.block_size)
anew_logits = decoder(anew, KVCache(config, cache_config))
assert len(decode_batch.token_ids) == 1 < len(anew.token_ids) == request.num_tokens
assert torch.allclose(decode_logits, anew_logits, atol=1e-3)
print(f"{len(anew.token_ids)} rows without a cache, {len(decode_batch.token_ids)} row with it: the same scores")

# %% [markdown]
# ## 10. Back to text
#
# **In:** token ids. **Out:** text. Each token is a string of bytes; the bytes of all tokens are joined first and read
# as UTF-8 then, since one character may be spread over several tokens. We finish the loop by hand: it is all that an
# engine does. The loop ends when the request has its `max_tokens`, or earlier if the model chooses its end token.

# %%
decode_sampling = build_sampling_batch([request.params], [request.seed], [decode_entry.seq_len], config.vocab_size)
finished = scheduler.update(decode_schedule, sample(decode_logits, decode_sampling)[0][:, None].tolist())
while not finished:
    schedule = scheduler.schedule()
    (entry,) = schedule.scheduled
    batch = build_batch([entry.token_ids], [entry.num_computed_tokens], [entry.block_ids], cache_config.block_size)
    sampling = build_sampling_batch([request.params], [request.seed], [entry.seq_len], config.vocab_size)
    finished = scheduler.update(schedule, sample(decoder(batch, kv_cache), sampling)[0][:, None].tolist())

answer = tokenizer.decode(request.output_token_ids)
print(repr(prompt + answer), request.finish_reason)
assert answer.startswith(" Paris.")
assert len(request.output_token_ids) == request.params.max_tokens
assert scheduler.pool.num_used_blocks == 0  # the blocks went back to the pool

# %% [markdown]
# ## 11. Two requests in one step
#
# `Engine.step()` is the loop body above, and `LLM` puts a tokenizer in front of it. Now a second request comes while
# the first one is under way. The step that follows holds both: one row of the first request, which only goes on, and
# all rows of the second, which has just come. Nothing in the model is told which is which. `cu_seqlens_q` draws the
# border, and each request reads through its own row of the block table, where a shorter row is filled up with the null
# block.

# %%
from tinyllm import LLM

llm = LLM(
    loaded,
    block_size=cache_config.block_size,
    num_blocks=cache_config.num_blocks,
    max_model_len=limits.max_model_len,
    max_num_batched_tokens=limits.max_num_batched_tokens,
    max_num_seqs=limits.max_num_seqs,
    enable_prefix_caching=False,  # each run below computes all of its prompt, though another began with the same words
)
prompts = [prompt, "The water boils at 100 degrees"]
first_request, second_request = llm.make_requests(prompts, SamplingParams(max_tokens=6))
llm.engine.add_request(first_request)
steps = [llm.engine.step(), llm.engine.step()]
llm.engine.add_request(second_request)
mixed = llm.engine.step()
steps.append(mixed)
for entry in mixed.schedule.scheduled:
    print(
        f"request {entry.request.request_id}: {entry.query_len} new behind {entry.num_computed_tokens} computed tokens"
    )
show = Show({**config.dims(), **cache_config.dims()})
show(
    FlatBatch,
    token_ids=mixed.batch.token_ids,
    positions=mixed.batch.positions,
    slot_mapping=mixed.batch.slot_mapping,
    block_table=mixed.batch.block_table,
    cu_seqlens_q=mixed.batch.cu_seqlens_q,
    seq_lens=mixed.batch.seq_lens,
    logits_indices=mixed.batch.logits_indices,
)
show(Decoder.forward, logits=mixed.logits)

first_entry, second_entry = mixed.schedule.scheduled
assert first_entry.query_len == 1
assert first_entry.num_computed_tokens > 0
assert second_entry.query_len == second_request.num_prompt_tokens > 1
assert second_entry.num_computed_tokens == 0
assert len(set(mixed.batch.slot_mapping.tolist())) == len(mixed.batch.token_ids)  # no two rows share a slot
assert len(first_entry.block_ids) < len(second_entry.block_ids)
assert mixed.batch.block_table[0].tolist() == [*first_entry.block_ids, 0]

# %% [markdown]
# The proof that neither disturbs the other: run each request alone, then compare every score of every step, and the
# text. (The scores agree up to rounding: a product with more rows may sum in another order.)
#
# Look at the last table of the first request, too. When it needed one more block, its neighbour in the pool belonged to
# the second request already. Attention does not mind: it reads through the table.

# %%
while llm.engine.has_unfinished_requests:
    steps.append(llm.engine.step())


def logits_of(request: Request, steps: list) -> list:
    """The scores from which each token of the request was chosen."""
    return [
        row
        for step in steps
        for entry, row in zip(step.schedule.scheduled, step.logits, strict=True)
        if entry.request is request
    ]


for together in (first_request, second_request):
    alone = Request("alone", together.prompt_token_ids, together.params, config.eos_token_ids)
    llm.engine.add_request(alone)
    steps_alone = []
    while llm.engine.has_unfinished_requests:
        steps_alone.append(llm.engine.step())
    for row, row_alone in zip(logits_of(together, steps), logits_of(alone, steps_alone), strict=True):
        assert torch.allclose(row, row_alone, atol=1e-3)
    assert together.output_token_ids == alone.output_token_ids
    print(repr(tokenizer.decode(together.token_ids)))

assert tokenizer.decode(first_request.output_token_ids) == answer  # what we made by hand
last_block_ids = [e.block_ids for step in steps for e in step.schedule.scheduled if e.request is first_request][-1]
print("blocks of the first request at its end:", last_block_ids)
assert last_block_ids[-1] != last_block_ids[-2] + 1
assert last_block_ids[-2] + 1 in second_entry.block_ids

# %% [markdown]
# ## 12. All of it at once
#
# You need not print every tensor yourself. `with trace()` watches the engine's functions while a block runs, and reads
# name, dimension words and sizes of each tensor when a function returns. There is no trace call in any layer: the code
# that you read is the code that runs and the code that is traced. Here are the names that `attend` had in the first
# layer of a decode step.

# %%
from tinyllm.trace import trace

traced_request = llm.make_requests(prompt, SamplingParams(max_tokens=2))[0]
llm.engine.add_request(traced_request)
llm.engine.step()
with trace() as t:
    llm.engine.step()
attend_row = next(operation for operation in t.steps[0].operations if operation.function == "attend")
for tensor in attend_row.tensors.values():
    sizes = ", ".join(f"{word}={size}" for word, size in zip(tensor.words, tensor.shape, strict=True))
    print(f"{tensor.name:10}", sizes)

# %% [markdown]
# The trace command (`make trace`) prints this for a whole step, layer 0 in full and the equal layers folded into one
# line, with the floating-point operations (FLOP) and the bytes of each stage. Before it prints a word, it checks that
# this word has one size in the whole step. Every stage of this chapter is a row of it: find them.

# %%
from tinyllm.trace.terminal import Options, render_step

with trace() as t:
    llm.generate(prompt, SamplingParams(max_tokens=2))
print("\n".join(render_step(t.steps[0], None, Options())))

# %% [markdown]
# ## 13. A wrong shape, and what stops it
#
# Suppose that a slip of the pen hands RoPE the angles of the first row only. torch would not mind: an axis of size one
# fits everything, so each row would be turned by the angle of position 0, that is, not at all. The model would run and
# talk nonsense, and no error would say why. The first lines below do just that, with the shape checks switched off.
#
# The checks are on by default, in a notebook as in a test. They compare the annotations of a function with what it
# gets, and the error names the function, the tensor, the axis, and both sizes.

# %%
from tinyllm import ShapeError
from tinyllm.shapes import checking

with checking(False):
    not_turned = apply_rope(q_straight, cos[:1], sin[:1])
assert torch.equal(not_turned, q_straight)

try:
    apply_rope(q_straight, cos[:1], sin[:1])
    shape_error = ""
except ShapeError as error:
    shape_error = str(error)
print(shape_error)
assert "num_tokens" in shape_error, "the shape checks are off: unset TINYLLM_CHECK"

# %% [markdown]
# ## Exercises
#
# Work them out on paper first. The cell below holds the answers, checked by the engine's own functions.
#
# 1. **Slots.** A request holds block 7 and then block 2, with four slots in a block. In which slot lies the key of
#    position 5?
# 2. **Sharing.** In this model, which query heads change their output if the value head 1 is set to zero?
# 3. **Memory.** A model has 32 layers, 8 key/value heads and a `head_dim` of 128, and stores 2 bytes a number. How many
#    bytes of cache does each token cost? How many if all of its 32 query heads had key/value heads of their own?
# 4. **Gather.** Three requests run in one step, with seven, one and two rows. What is `cu_seqlens_q`, and what is
#    `logits_indices`?
# 5. **Chunks.** The token budget of a step is 3. In how many steps is our prompt computed, and which of them samples?
# 6. **The mask.** A request has computed four tokens and now computes three more. How many pairs of query and key does
#    attention need, of all that the scores hold?

# %% jupyter={"source_hidden": true}
from tinyllm.batch import map_slots

# 1. Position 5 lies in the second block (5 // 4 is 1), which is block 2, at place 1 (5 % 4).
exercise_slot = map_slots(torch.tensor([[7, 2]]), torch.tensor([0]), torch.tensor([5]), block_size=4)
assert exercise_slot.tolist() == [2 * 4 + 1] == [9]

# 2. Those with h // group_size == 1; the rest reads other heads.
silenced = values.clone()
silenced[:, 1] = 0
differs = (attend(q, keys, silenced) != attended).flatten(2).any(dim=2).any(dim=0)
assert differs.nonzero().flatten().tolist() == [h for h in range(config.num_heads) if h // config.group_size == 1]
assert differs.nonzero().flatten().tolist() == [3, 4, 5]

# 3. 2 (key and value) * layers * key/value heads * head_dim * bytes; with 32 of them it is four times as much.
assert 2 * 32 * 8 * 128 * 2 == 131_072
assert 2 * 32 * 32 * 128 * 2 == 4 * 131_072 == 524_288

# 4. The borders are running sums; the last row of a request stands just before its border.
exercise_batch = build_batch([[1] * 7, [1], [1] * 2], [0, 9, 0], [[1, 2], [3, 4, 5], [6]], block_size=4)
assert exercise_batch.cu_seqlens_q.tolist() == [0, 7, 8, 10]
assert exercise_batch.logits_indices.tolist() == [6, 7, 9]

# 5. Two: three tokens, then the other two. Only the second reaches the end of the prompt, so only it samples.
small = Scheduler(SchedulerConfig(max_model_len=32, max_num_batched_tokens=3, max_num_seqs=3), cache_config)
small.add_request(Request("chunked", token_ids, SamplingParams()))
chunks = [small.schedule().scheduled[0] for _ in range(2)]
assert [(chunk.query_len, chunk.samples) for chunk in chunks] == [(3, False), (2, True)]

# 6. The three queries see 5, 6 and 7 keys: 18 pairs of the 21 that a matrix of three rows and seven columns holds.
exercise_hidden = causal_mask(3, 7, torch.device("cpu"))
assert (~exercise_hidden).sum() == 5 + 6 + 7 == 18
assert exercise_hidden.numel() == 21
print("all answers hold")

# %% [markdown]
# ## Where to read on
#
# You have now called the functions that make up a step of the engine. Read the files in the order of this chapter:
# `tokenizer/`, `request.py`, `scheduler.py`, `batch.py`, `layers/`, `kv_cache.py`, `model.py`, `sampler/`, and then
# `engine.py`, whose `step()` ties them together.
