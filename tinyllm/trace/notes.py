"""What no source says by itself: reasons, pitfalls and the names that others use, for ``--explain``.

No shape stands here. Those in an explanation come from annotations, formulas and the run.
"""

from dataclasses import dataclass

from tinyllm.trace.costs import Kind


@dataclass(frozen=True)
class Note:
    """What may be said of a tensor or a stage; an empty name means that the other project has none."""

    what: str = ""
    why: str = ""
    care: str = ""  # what readers trip over
    vllm: str = ""
    huggingface: str = ""


POOL = (
    "the pool is room for all requests, not one text: none of its axes is a sequence length. What one request "
    "reads is the result of gather_kv, as long as its seq_len"
)
STORED = (
    "the weight is stored with one row per output, as checkpoints have it, and the product reads it transposed "
    "(x W^T): the stored columns are the inputs, and the trace's row shows the matrix as it is used"
)
SUM = (
    "query_len counts what this step computes, seq_len what its queries may read: they are equal only in a prefill "
    "in one piece. The seq_lens of a step do not add up to its rows; the query_lens do"
)

CARE: dict[str, str] = {  # by dimension word
    "num_tokens": "it is no sequence length: it counts all requests' tokens; in a decode it is the number of requests",
    "num_logits": "it is no batch size by law: drafts or prompt scores would need more rows for one request",
    "query_len": SUM,
    "seq_len": SUM,
    "block_size": "it counts tokens, not bytes, and it is not the context length; " + POOL,
    "num_blocks": POOL,
    "num_slots": POOL,
    "num_kv_heads": "the KV cache is as wide as these, not as the query heads",
    "q_size": "it equals hidden_size in many models, but not by law: only o_proj leads from the one to the other",
    "in_size": STORED,
    "out_size": STORED,
    "heads": "the axis is next to head_dim, behind the tokens: nothing in this model is stored heads first",
}

# fmt: off
FIELDS: dict[tuple[str, str], Note] = {  # by the batch's class and field
    ("FlatBatch", "token_ids"): Note(
        "the ids that this step computes, one request's behind the other's",
        "one id for each row of the flat batch; requests of different length need no padding",
        "in a decode they are the tokens sampled last, not the prompt: what was computed before is in the KV cache",
        "input_ids", "input_ids"),
    ("FlatBatch", "positions"): Note(
        "each row's place in its own request, counted from 0",
        "one for each row: rotary embedding needs to know where in its text a token stands",
        "they start anew for each request, behind the tokens computed before; the row's number says nothing of it",
        "positions", "position_ids"),
    ("FlatBatch", "slot_mapping"): Note(
        "where each row's key and value are written: block id * block_size + place within the block",
        "one slot for each row: every token that is computed leaves a key and a value",
        "it says where to write, block_table says where to read; slots of the null block never occur in it",
        "slot_mapping", ""),
    ("FlatBatch", "block_table"): Note(
        "each request's blocks, in the order of its tokens",
        "one line for each request, as wide as the longest of this step needs",
        "short lines are padded with 0, the null block, which nobody reads; there is no axis for layers, as a block "
        "has the same id in each of them",
        "block_table", ""),
    ("FlatBatch", "cu_seqlens_q"): Note(
        "the borders between the requests: request i has the rows from entry i up to, not including, entry i+1",
        "why the +1: as many pieces need one border more. Each request has a begin and an end, but a begin is the end "
        "of the one before, so only the first 0 is added; the last entry is the number of rows",
        "it accumulates query_lens, not seq_lens: in a decode the entries grow by one, however long the texts are",
        "query_start_loc", "cu_seq_lens_q"),
    ("FlatBatch", "seq_lens"): Note(
        "how many keys each request may read: all its tokens so far, those of this step included",
        "one number for each request",
        SUM,
        "seq_lens", ""),
    ("FlatBatch", "logits_indices"): Note(
        "the rows that go on to the LM head: each request's last",
        "one for each request: the token behind any other row is known already",
        "they are row numbers of the flat batch, not positions in a text",
        "logits_indices", "logits_to_keep"),
    ("SamplingBatch", "temperature"): Note(
        "what each row's logits are divided by; 0 means greedy", "one for each gathered row, as each request may "
        "ask for another", "", "SamplingMetadata.temperature", "TemperatureLogitsWarper"),
    ("SamplingBatch", "top_k"): Note(
        "how many of the largest logits each row keeps", "one for each gathered row; the size of the vocabulary where "
        "it is off", "", "SamplingMetadata.top_k", "TopKLogitsWarper"),
    ("SamplingBatch", "top_p"): Note(
        "the probability mass that each row keeps", "one for each gathered row; 1 where it is off", "",
        "SamplingMetadata.top_p", "TopPLogitsWarper"),
    ("SamplingBatch", "min_p"): Note(
        "the share of the largest probability below which a token is dropped",
        "one for each gathered row; 0 where it is off", "", "MinPLogitsProcessor", "MinPLogitsWarper"),
    ("SamplingBatch", "seeds"): Note(
        "the seed of each row's noise", "one for each gathered row: a request draws the same tokens in any company",
        "", "SamplingMetadata.generators", ""),
    ("SamplingBatch", "positions"): Note(
        "the place in its text that each row's next token will take", "one for each gathered row: seed, position and "
        "token id make the noise", "these are not FlatBatch's positions: one for each request, of a token to come"),
    ("SamplingBatch", "banned_rows"): Note(
        "the row of each ban", "one for each pair of a row and a forbidden token; empty where nothing is forbidden",
        "", "MinTokensLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
    ("SamplingBatch", "banned_ids"): Note(
        "the token id of each ban",
        "one for each pair of a row and a forbidden token; empty where nothing is forbidden",
        "", "MinTokensLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
}

FUNCTIONS: dict[str, Note] = {  # by qualified name
    "Embedding.forward": Note(
        why="one table row for each token id: an index, no product, so it costs no FLOPs",
        vllm="VocabParallelEmbedding", huggingface="nn.Embedding"),
    "RotaryEmbedding.forward": Note(
        why="an angle for each token and rotary pair; the axis between them spreads over the heads",
        care="only queries and keys are turned, never values",
        vllm="RotaryEmbedding (a table, cos_sin_cache)", huggingface="LlamaRotaryEmbedding"),
    "add_residual": Note(
        why="a block's output and the stream have the same shape, or they could not be added",
        care="layer 0 has none: nothing has run before it. Each norm adds what the block before it made",
        vllm="inside fused_add_rms_norm", huggingface="residual + hidden_states"),
    "rms_norm": Note(
        why="every row is scaled on its own, so nothing changes its size; the weight has one factor for each column",
        care="each row is divided by a number of its own; rows never mix",
        vllm="RMSNorm", huggingface="LlamaRMSNorm"),
    "Linear.forward": Note(
        why="each row is multiplied by the same matrix: the number of rows stays, their width becomes the output's",
        care=STORED,
        vllm="ColumnParallelLinear, RowParallelLinear and their kin", huggingface="nn.Linear"),
    "split_heads": Note(
        why="a fused row holds all query heads, then all key heads, then all value heads; it is cut, not copied",
        care="why no transpose, as others do after their view? The view must leave tokens in front and cut only the "
        "row, or a head would mix values of different tokens. Others then move the heads in front, since a batched "
        "product wants them there; here tokens stay in front, and attention's einsum names the axes instead",
        vllm="qkv.split", huggingface="view, then transpose"),
    "apply_rope": Note(
        why="a rotation keeps every size: two halves go in, two turned halves come out",
        care="the halves of a head form the pairs, not neighbours; GGUF files store queries and keys for the other "
        "way, and loading reorders them",
        vllm="RotaryEmbedding.forward", huggingface="apply_rotary_pos_emb"),
    "write_kv": Note(
        why="each row's key and value go into its slot; the pool itself keeps its size, however many rows there are",
        care=POOL,
        vllm="reshape_and_cache", huggingface="DynamicCache.update (it concatenates)"),
    "gather_kv": Note(
        why="whole blocks are read and cut to seq_len: the last block may hold slots that are not written yet",
        care="a decode reads all keys of the request again, for one new query: that is what makes it slow. A paged "
        "kernel reads them in place; this copy is for the reader",
        vllm="inside the paged attention kernel", huggingface="none: its cache is not paged"),
    "attend": Note(
        why="every query gets one row of heads back, however many keys it reads: the key axis is summed away",
        care="the matrix of scores is query_len by seq_len, not square: in a decode it is a single row. Queries stand "
        "at the end of the keys, so the causal mask leans against the right edge",
        vllm="flash_attn_varlen_func", huggingface="eager_attention_forward"),
    "lay_flat": Note(
        why="the requests' rows behind each other again, as the flat batch has them",
        vllm="none: its kernel writes into one output", huggingface="none"),
    "merge_heads": Note(
        why="the heads of a row side by side again: their number times their size",
        care="why do others transpose, and call contiguous, before they view? Their heads stand in front of the "
        "tokens, and a view there would mix rows. Here tokens never left the front, so this is a view",
        vllm="view", huggingface="attn_output.reshape(*input_shape, -1)"),
    "silu_and_mul": Note(
        why="gate and up are the two halves of each row; their product is half as wide",
        care="the first half is the gate, and only it passes the activation",
        vllm="SiluAndMul", huggingface="LlamaMLP: act_fn(gate_proj(x)) * up_proj(x)"),
    "gelu_and_mul": Note(
        why="gate and up are the two halves of each row; their product is half as wide",
        vllm="GeluAndMul", huggingface="act_fn(gate_proj(x)) * up_proj(x)"),
    "gelu_tanh_and_mul": Note(
        why="gate and up are the two halves of each row; their product is half as wide",
        vllm="GeluAndMul(approximate='tanh')", huggingface="act_fn(gate_proj(x)) * up_proj(x)"),
    "gather_rows": Note(
        why="of each request only its last row goes on: the LM head is as wide as the vocabulary, and no other row's "
        "next token is in question",
        care="a chunk that does not end its prompt is gathered too, and its token is thrown away",
        vllm="hidden_states[logits_indices]", huggingface="logits_to_keep"),
    "lm_head": Note(
        why="one score for each gathered row and token id",
        care="where embeddings are tied it reads the embedding table itself: no second matrix is stored. " + STORED,
        vllm="ParallelLMHead", huggingface="lm_head"),
    "ban_ids": Note(
        why="a logit is set to minus infinity for each pair; the logits keep their size",
        vllm="MinTokensLogitsProcessor", huggingface="MinNewTokensLengthLogitsProcessor"),
    "apply_temperature": Note(
        why="each row is divided by its own number", vllm="Sampler.apply_temperature",
        huggingface="TemperatureLogitsWarper"),
    "apply_min_p": Note(
        why="what is dropped becomes minus infinity, so that the logits keep their size",
        vllm="MinPLogitsProcessor", huggingface="MinPLogitsWarper"),
    "apply_top_k_top_p": Note(
        why="what is dropped becomes minus infinity, so that the logits keep their size",
        care="its FLOPs are unknown: a sort's depend on the values",
        vllm="apply_top_k_top_p", huggingface="TopKLogitsWarper, TopPLogitsWarper"),
    "gumbel_noise": Note(
        why="one number for each row and token id, made from seed, position and id alone",
        vllm="gumbel_sample", huggingface="none: torch.multinomial"),
    "add_noise": Note(
        why="the largest sum of logit and noise is a draw from the softmax; greedy rows get no noise",
        vllm="gumbel_sample", huggingface="none: torch.multinomial"),
    "sample": Note(
        why="the largest score of each row: one token id a row is left of the whole vocabulary",
        vllm="Sampler.forward", huggingface="argmax or multinomial, in generate"),
    "causal_mask": Note(
        why="True where a query must not look: at keys behind its own position",
        care="with a cache there are more keys than queries; a mask in the upper left corner hides the wrong ones"),
    "attend_request": Note(why="one request's rows, its own line of the block table: requests never meet"),
    "attend_batch": Note(why="a loop over the requests: each has its own number of keys"),
    "map_slots": Note(why="one slot for each row", vllm="compute_slot_mapping"),
    "build_batch": Note(why="the only place where lists become tensors", vllm="_prepare_inputs"),
    "KVCache.layer": Note(why="one layer's part of the pool, as a view", care=POOL),
}

MODULES: dict[str, Note] = {  # by attribute name
    "embed_tokens": Note(why="one table row for each token id", vllm="embed_tokens (VocabParallelEmbedding)",
                         huggingface="model.embed_tokens"),
    "rotary": Note(why="angles depend on positions only, so they are made once a step, for all layers",
                   vllm="rotary_emb, one shared by the layers", huggingface="model.rotary_emb"),
    "layers": Note(why="each layer reads and returns the same shapes, so they can be stacked",
                   vllm="layers", huggingface="model.layers"),
    "norm": Note(why="the last addition and norm, behind all layers", vllm="norm", huggingface="model.norm"),
    "lm_head": Note(why="one output for each token id; only models whose embeddings are not tied have it. It is "
                    "never called: the stage lm_head reads its weight",
                    vllm="lm_head (ParallelLMHead)", huggingface="lm_head"),
    "input_layernorm": Note(why="adds what the layer before made, and normalises for attention",
                            vllm="input_layernorm", huggingface="input_layernorm"),
    "post_attention_layernorm": Note(why="adds what attention made, and normalises for the MLP",
                                     vllm="post_attention_layernorm", huggingface="post_attention_layernorm"),
    "self_attn": Note(why="it returns rows of the width that it was given", vllm="self_attn (LlamaAttention)",
                      huggingface="self_attn (LlamaAttention)"),
    "mlp": Note(why="it returns rows of the width that it was given", vllm="mlp (LlamaMLP)",
                huggingface="mlp (LlamaMLP)"),
    "qkv_proj": Note(why="the stored matrix holds the rows of q, k and v one below the other: one product does "
                     "the work of three", vllm="qkv_proj (QKVParallelLinear)", huggingface="q_proj, k_proj and v_proj"),
    "o_proj": Note(why="from all heads side by side back to the width of the residual stream",
                   vllm="o_proj (RowParallelLinear)", huggingface="o_proj"),
    "gate_up_proj": Note(why="the stored matrix holds the rows of gate and up one below the other: one product does "
                         "the work of two", vllm="gate_up_proj (MergedColumnParallelLinear)",
                         huggingface="gate_proj and up_proj"),
    "down_proj": Note(why="from the MLP's width back to that of the residual stream",
                      vllm="down_proj (RowParallelLinear)", huggingface="down_proj"),
}

LOCALS: dict[tuple[str, str], Note] = {  # by function and name
    ("attend", "q"): Note(why="as many query heads as the checkpoint has, for each token that this step computes"),
    ("attend", "k"): Note(why="all keys of the request, from the cache: those of this step were written just before"),
    ("attend", "grouped_q"): Note(
        why="query heads that share a key/value head lie next to each other, so the head axis is cut in two: no copy",
        huggingface="none: repeat_kv copies keys and values instead"),
    ("attend", "scores"): Note(
        why="one number for each head, query and key: head_dim is summed away by the product",
        care="this is the matrix that grows with the text twice, and that fused kernels never store",
        huggingface="attn_weights"),
    ("attend", "scaled"): Note(why="the same numbers divided by sqrt(head_dim): nothing changes its size"),
    ("attend", "is_hidden"): Note(
        why="one mask for all heads: it depends on positions only", huggingface="attention_mask"),
    ("attend", "masked"): Note(why="hidden scores are minus infinity now; none is taken out"),
    ("attend", "weights"): Note(
        why="softmax runs along the keys and keeps every size: each row adds up to 1",
        care="these are attention weights, not parameters", huggingface="attn_weights"),
    ("attend", "out"): Note(why="the keys are summed away, and head_dim is back, from the values"),
    ("rms_norm", "mean_square"): Note(why="one number for each row; the axis is kept so that it divides the whole row"),
    ("RotaryEmbedding.forward", "angles"): Note(
        why="position times frequency, for each token and pair; the axis of one spreads over the heads"),
    ("write_kv", "k_slots"): Note(
        why="blocks laid one behind the other: a slot's number is then simply its index", care=POOL),
    ("gather_kv", "blocks"): Note(why="whole blocks, in the order of the request's tokens"),
    ("gather_kv", "kv"): Note(why="the blocks laid behind each other, without the slots that hold nothing yet"),
    ("write_kv", "layer_kv"): Note(care=POOL),
    ("split_heads", "heads"): Note(
        why="here heads counts query, key and value heads together; they are told apart in the next line"),
    ("Linear.forward", "weight"): Note(care=STORED),
}
# fmt: on

KINDS: dict[Kind, tuple[str, str]] = {
    "matmul": (
        "matrix products: linear layers, attention's two products, the LM head",
        "a multiply-add counts 2 FLOPs; attention counts only the pairs that the causal mask leaves",
    ),
    "elementwise": (
        "every value on its own, or with one other",
        "one FLOP for each arithmetic step and value; they move far more bytes than they compute",
    ),
    "reduce": (
        "many values become one: a mean, a maximum, a rank",
        "a row's values are reduced among themselves: rows never mix",
    ),
    "gather": (
        "rows are picked or copied by index",
        "no arithmetic, so no FLOPs; the bytes are what is read and written",
    ),
    "cache write": (
        "new keys and values go into the KV pool",
        "no arithmetic; its result is the pool itself, whose shape never changes",
    ),
    "view": ("the same storage is read under other axes", "nothing moves: no FLOPs, no bytes"),
    "host": ("plain Python, before or behind the model", "no tensor is computed, so there is nothing to count"),
}

COLUMNS: dict[str, tuple[str, str]] = {
    "FLOP": ("arithmetic steps of a row", "a multiply-add counts 2; unknown is ?, never 0"),
    "BYTE": (
        "what a row reads and writes",
        "each operand moved once, in the type that it has; a real kernel may move more, or less where a cache helps",
    ),
    "F/B": (
        "FLOPs per byte, the arithmetic intensity",
        "a machine does so many FLOPs in the time that it moves a byte; rows below that number wait for memory",
    ),
    "pairs": (
        "pairs of a query and a key that attention needs, of those that a full matrix has",
        "the causal mask hides the keys behind each query; only a decode, with one query, needs all of them",
    ),
    "schedule": (
        "who computes how many tokens in this step",
        "running requests first, then waiting ones as long as the token budget and the blocks last",
    ),
    "bpe": ("how a prompt became tokens", "bytes, words that merges never cross, then the pairs of the merge list"),
    "sampled": (
        "the token that each request got, with what else was likely",
        "the numbers are the softmax of the logits, before temperature and truncation",
    ),
    "append": (
        "where the sampled tokens stand, and what their keys and values will need",
        "a token is appended when it is sampled; the step that computes it writes its key and value",
    ),
    "block map": (
        "every block of the pool with its holders",
        "null, held and free blocks add up to the pool; a free one may still be found by its tokens (cached)",
    ),
    "kv bytes": ("what keys and values take in memory", "two vectors of kv_size a token in every layer"),
    "prefix hit": (
        "blocks that were found instead of computed",
        "equal beginnings have equal keys and values; the last token is always computed, as its logits are needed",
    ),
    "preempt": (
        "a running request that lost its blocks",
        "another one needed some; it starts over and keeps its tokens",
    ),
    "held back": ("the first waiting request did not start", "those behind it wait as well, so that nobody overtakes"),
    "prefill": (
        "a step, or a request's part of it, that computes a prompt",
        "many rows share each weight that is read",
    ),
    "decode": ("a step that computes the token sampled last", "one row a request: the weights are read for few tokens"),
    "mixed": ("a step in which some requests prefill and others decode", "the flat batch needs no distinction"),
    "ledger": ("the comparison of all sizes in a step", "each word must have one size everywhere, or the run stops"),
    "ridge": (
        "FLOPs that this machine does while it moves a byte",
        "a row with fewer FLOPs per byte waits for memory, one with more for arithmetic",
    ),
    "us": ("microseconds that a row took", "measured inside the tracer, its own reading taken off"),
    "bound": (
        "the least that a row can take on this machine",
        "the larger of its FLOPs and its bytes over the two peaks",
    ),
    "residual rms": (
        "the size of the residual stream behind each layer",
        "every layer adds to it; a few values of the first token make it large in the middle layers",
    ),
}
