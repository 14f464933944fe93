"""Notes on the tensors that a step's batch brings: the flat batch, and what the sampler needs."""

from tinyllm.trace.explain.notes.note import SUM, Note

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
        "they start anew for each request, behind the tokens computed before; a row's number is no position",
        "positions", "position_ids"),
    ("FlatBatch", "slot_mapping"): Note(
        "where each row's key and value are written: block id * block_size + place within the block",
        "one slot for each row: every token that is computed leaves a key and a value",
        "it says where to write, block_table says where to read; slots of the null block never occur in it",
        "slot_mapping", "write_index"),
    ("FlatBatch", "block_table"): Note(
        "each request's blocks, in the order of its tokens",
        "one line for each request, as wide as the longest of this step needs",
        "short lines are padded with 0, the null block, which nobody reads; there is no axis for layers, as a block "
        "has the same id in each of them",
        "block_table", "block_table"),
    ("FlatBatch", "cu_seqlens_q"): Note(
        "the borders between the requests: request i has the rows from entry i up to, not including, entry i+1",
        "each request has a begin and an end, but its begin is the end of the one before: one end for each request, "
        "and the first begin, 0 (that is why the +1). The last entry is the number of rows",
        "it accumulates query_lens, not seq_lens: in a decode the entries grow by one, however long the texts are",
        "query_start_loc", "cu_seq_lens_q"),
    ("FlatBatch", "seq_lens"): Note(
        "how many keys each request may read: all its tokens so far, those of this step included",
        "one number for each request",
        SUM,
        "seq_lens", "cu_seq_lens_k (their sums)"),
    ("FlatBatch", "logits_indices"): Note(
        "the rows that go on to the LM head: each request's last",
        "one for each request: the token behind any other row is known already",
        "they are row numbers of the flat batch, not positions in a text",
        "logits_indices", "logits_indices; logits_to_keep of a forward call"),
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
        "", "SamplingMetadata.generators; seed, of gumbel_sample", ""),
    ("SamplingBatch", "positions"): Note(
        "the place in its text that each row's next token will take", "one for each gathered row: seed, position and "
        "token id make the noise", "these are not FlatBatch's positions: one for each request, of a token to come",
        "pos, of gumbel_sample"),
    ("SamplingBatch", "banned_rows"): Note(
        "the row of each ban", "one for each pair of a row and a forbidden token; empty where nothing is forbidden",
        "", "MinTokensLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
    ("SamplingBatch", "banned_ids"): Note(
        "the token id of each ban",
        "one for each pair of a row and a forbidden token; empty where nothing is forbidden",
        "", "MinTokensLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
}
# fmt: on
