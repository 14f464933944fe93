"""Terms of the engine: what the scheduler and the pool do, and what happens to texts and tokens."""

from tinyllm.trace.explain.notes.note import Term

ENGINE_TERMS: dict[str, Term] = {
    # --- the scheduler's and the pool's rows ---
    "schedule": Term(
        "who computes how many tokens in this step",
        "running requests first, then waiting ones as long as the token budget and the blocks last",
        "scheduler.py",
        "def schedule",
    ),
    "token budget": Term(
        "tokens of this step, of those that a step may have",
        "--max-num-batched-tokens sets the limit: what does not fit is left for the next step",
        "scheduler.py",
        "def _limit_query_len",
    ),
    "chunk": Term(
        "a prompt's part that this step computes",
        "the token budget ended before the prompt did; keys and values stay in the cache, so the next step goes "
        "on where this one stopped",
        "scheduler.py",
        "def _limit_query_len",
        "the row that a chunk ends with is sampled like any other, and its token is thrown away",
    ),
    "preempt": Term(
        "a running request that lost its blocks",
        "another one needed some; it starts over and keeps its tokens",
        "scheduler.py",
        "def _preempt",
    ),
    "held back": Term(
        "the first waiting request did not start",
        "those behind it wait as well, so that nobody overtakes",
        "scheduler.py",
        "def _why_nobody_starts",
    ),
    "new": Term(
        "a request that this step starts; of a block, one that this step gave out",
        "running ones were started before",
        "scheduler.py",
        "def _start",
    ),
    "resumed": Term(
        "a preempted request that starts over",
        "it computes all its tokens again, the sampled ones too, unless the cache still has them",
        "scheduler.py",
        "def _start",
    ),
    "freed": Term(
        "blocks that ended requests gave back",
        "nobody reads them any more, so the next request may have them",
        "block_pool.py",
        "def free",
    ),
    "prefix hit": Term(
        "blocks that were found instead of computed",
        "equal beginnings have equal keys and values; the last token is always computed, as its logits are needed",
        "kv_cache_manager.py",
        "def find_cached_blocks",
    ),
    "cached": Term(
        "a full block that can be found by its tokens, held or free",
        "a prompt with the same beginning reads it instead of computing it",
        "block_pool.py",
        "def cache",
    ),
    "evicted": Term(
        "cached blocks that were given to other tokens",
        "no block was free but them; they are no longer found",
        "block_pool.py",
        "def _take",
    ),
    "null block": Term(
        "block 0: nobody's, never written",
        "short rows of the block table need some id as padding, and an id that is nobody's does no harm",
        "block_pool.py",
        "class BlockPool",
    ),
    "block": Term(
        "a piece of the KV pool: block_size slots for the keys and values of as many tokens, in every layer",
        "pieces of one size can be given out and taken back in any order; one prompt's need not be neighbours",
        "block_pool.py",
        "class BlockPool",
    ),
    "block map": Term(
        "every block of the pool with its holders",
        "null, held and free blocks add up to the pool; a free one may still be found by its tokens (cached)",
        "trace/decisions.py",
        "def _map_blocks",
    ),
    "kv bytes": Term(
        "what keys and values take in memory",
        "two vectors of kv_size a token in every layer",
        "kv_cache.py",
        "def num_bytes",
        "blocks are held whole: they take more than the tokens that lie in them",
    ),
    "KV": Term(
        "keys and values: what attention keeps of each token",
        "a later token's query reads them, so they are computed once and kept",
        "kv_cache.py",
        "class KVCache",
    ),
    "pool": Term(
        "the KV cache: room for the keys and values of all requests",
        "it is allocated once; requests get blocks of it and give them back",
        "kv_cache.py",
        "class KVCache",
    ),
    "last block": Term(
        "of each request, the slots of its last block that hold a token, of all it has",
        "a block is shared out whole: what is left there is for the request's next tokens",
        "trace/scheduled.py",
        "def num_in_last_block",
    ),
    # --- texts and tokens ---
    "seed": Term(
        "what makes a drawn token repeatable: the noise is a pure function of seed, position and token id",
        "each request has its own, drawn where none is given; printed, so that its answer can be repeated with --seed",
        "request.py",
        "def draw_seed",
    ),
    "token": Term(
        "a piece of text that has a number in the vocabulary",
        "a model reads and writes these numbers alone",
        "tokenizer/bpe.py",
        "class Tokenizer",
    ),
    "bpe": Term(
        "how a prompt became tokens",
        "bytes, words that merges never cross, then the pairs of the merge list",
        "tokenizer/bpe.py",
        "def encode_words",
        "a token may be a piece of a character's bytes: an emoji of four bytes may be three tokens, and each prints "
        "its bytes as escapes",
    ),
    "sampled": Term(
        "the token that each request got, with what else was likely",
        "the numbers are the softmax of the logits, before temperature and truncation",
        "sampler/sample.py",
        "def sample",
    ),
    "greedy": Term(
        "the likeliest token is taken",
        "temperature 0: nothing is drawn, so no noise is made",
        "sampler/sample.py",
        "def sample",
    ),
    "append": Term(
        "where the sampled tokens stand, and what their keys and values will need",
        "a token is appended when it is sampled; the step that computes it writes its key and value",
        "scheduler.py",
        "def _append",
    ),
    "length": Term(
        "why an answer ended: it has as many tokens as were asked for, or as fit",
        "max_tokens or max_model_len; stop is the other reason",
        "scheduler.py",
        "def check_stop",
    ),
    "stop": Term(
        "why an answer ended: the model gave an end token, or a stop token of the request",
        "length is the other reason",
        "scheduler.py",
        "def check_stop",
    ),
}
