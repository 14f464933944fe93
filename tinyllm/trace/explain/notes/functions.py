"""Notes on the functions of the model, on its named parts, and on the tensors inside a function."""

from tinyllm.trace.explain.notes.note import POOL, STORED, Note

# fmt: off
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
        vllm="qkv.split, then view", huggingface="view, then transpose"),
    "apply_rope": Note(
        why="a rotation keeps every size: two halves go in, two turned halves come out",
        care="the halves of a head form the pairs, not neighbours; GGUF files store queries and keys for the other "
        "way, and loading reorders them",
        vllm="RotaryEmbedding.forward", huggingface="apply_rotary_pos_emb"),
    "write_kv": Note(
        why="each row's key and value go into its slot; the pool itself keeps its size, however many rows there are",
        care=POOL,
        vllm="reshape_and_cache_flash", huggingface="DynamicLayer.update, which concatenates"),
    "gather_kv": Note(
        why="whole blocks are read and cut to seq_len: the last block may hold slots that are not written yet",
        care="a decode reads all keys of the request again, for one new query: that is what makes it slow. A paged "
        "kernel reads them in place; this copy is for the reader",
        vllm="inside the paged attention kernel",
        huggingface="none in a DynamicCache; read_index in its PagedAttentionCache"),
    "attend": Note(
        why="every query gets one row of heads back, however many keys it reads: the key axis is summed away",
        care="the matrix of scores is query_len by seq_len, not square: in a decode it is a single row. Queries stand "
        "at the end of the keys, so the causal mask leans against the right edge",
        vllm="flash_attn_varlen_func", huggingface="eager_attention_forward"),
    "lay_flat": Note(
        why="the requests' rows behind each other again, as the flat batch has them",
        vllm="none: its kernel writes into one output", huggingface="none: all requests are one tensor"),
    "merge_heads": Note(
        why="the heads of a row side by side again: their number times their size",
        care="why do others transpose, and call contiguous, before they view? Their heads stand in front of the "
        "tokens, and a view there would mix rows. Here tokens never left the front, so this is a view",
        vllm="view", huggingface="attn_output.reshape"),
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
        care="where embeddings are tied it reads the embedding table itself: no second matrix is stored; " + STORED,
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
        vllm="inside gumbel_sample", huggingface="none: torch.multinomial"),
    "add_noise": Note(
        why="the largest sum of logit and noise is a draw from the softmax; greedy rows get no noise",
        vllm="inside gumbel_sample", huggingface="none: torch.multinomial"),
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
    "lm_head": Note(why="one output for each token id; only models whose embeddings are not tied have it, the others "
                    "score with the embedding table; the stage lm_head reads it",
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
        care="this is the matrix that grows with the square of the text, and that fused kernels never store",
        huggingface="attn_weights"),
    ("attend", "scaled"): Note(why="the same numbers divided by sqrt(head_dim): nothing changes its size"),
    ("attend", "is_hidden"): Note(
        why="one mask for all heads: it depends on positions only", huggingface="attention_mask, which is added"),
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
    ("Embedding.forward", "weight"): Note(
        "one vector for each token id", "the LM head reads the same table where embeddings are tied"),
    ("rms_norm", "weight"): Note("one trained factor for each column", "every row is scaled by the same factors"),
}
# fmt: on
