"""What fits: parameters, bytes of keys and values, blocks that a budget buys and requests that they hold, and FLOPs.

Plain arithmetic over a `ModelConfig`: nothing is loaded, and every count is an exact integer. Sizes are in bytes, and
`bytes_per_value` is 2 for bfloat16. What a step needs besides (activations, the logits, a library's workspace) is not counted.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from tinyllm.config import CacheConfig, ModelConfig
from tinyllm.errors import ConfigError, brief

VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
              "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
MAX_BYTES = 2**50  # 1 PiB: no machine comes near

# ---- sizes -------------------------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Whole bytes of a size such as ``24GiB`` (2**30 each), ``24GB`` (10**9 each), ``1.5 TiB``, or plain bytes.

    >>> parse_size("24GiB"), parse_size("500MB"), parse_size("4096")
    (25769803776, 500000000, 4096)
    """
    found = (
        re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    )
    units = {unit.casefold(): size for unit, size in SIZE_UNITS.items()}
    if found is None or found[2].casefold() not in units:
        raise ConfigError(f"size {brief(text)} is none; expected bytes, or a number with a unit: 24GiB, 24GB, 500MB")
    num_bytes = int(Fraction(found[1]) * units[found[2].casefold()])
    if not 1 <= num_bytes <= MAX_BYTES:
        raise ConfigError(f"size {brief(text)} is {num_bytes:,} bytes; expected 1 to {MAX_BYTES:,}")
    return num_bytes


def show_size(num_bytes: int) -> str:
    """A size in its largest binary unit, for a reader.

    >>> show_size(2_147_483_648), show_size(65_536), show_size(100)
    ('2.00 GiB', '64.00 KiB', '100 B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(num_bytes) >= SIZE_UNITS[unit]:
            return f"{num_bytes / SIZE_UNITS[unit]:.2f} {unit}"
    return f"{num_bytes} B"


def value_bytes(dtype: str) -> int:
    """Bytes of one number; the scales of 8-bit formats are not counted.

    >>> value_bytes("float32"), value_bytes("bfloat16")
    (4, 2)
    """
    if dtype not in VALUE_BYTES:
        raise ConfigError(f"dtype {brief(dtype)} is not supported; expected one of {', '.join(VALUE_BYTES)}")
    return VALUE_BYTES[dtype]


# ---- parameters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterCount:
    """A model's parameters by part; `lm_head` is 0 where the embedding's matrix serves as the head, too."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    lm_head: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.mlp + self.norms + self.lm_head

    @property
    def read_each_step(self) -> int:
        """What every decode step reads: all but an embedding that is no head, of which it reads a row a token."""
        return self.total - (self.embedding if self.lm_head else 0)


# The counts below as formulas over the glossary's words, for a reader; a test evaluates each one.
PARAMETER_FORMULAS = {
    "embedding": "vocab_size*hidden_size",
    "attention": "num_layers*hidden_size*(qkv_size+q_size)",
    "mlp": "3*num_layers*hidden_size*intermediate_size",
    "norms": "(2*num_layers+1)*hidden_size",
    "lm_head": "vocab_size*hidden_size",
}


def count_parameters(config: ModelConfig) -> ParameterCount:
    """The parameters of each part, in all layers.

    >>> from tinyllm.config import PRESETS
    >>> count = count_parameters(PRESETS["llama-3-8b"])
    >>> count.mlp, count.total
    (5637144576, 8030261248)
    """
    embedding = config.vocab_size * config.hidden_size
    attention = (config.qkv_size + config.q_size) * config.hidden_size  # qkv_proj and o_proj
    mlp = (config.gate_up_size + config.intermediate_size) * config.hidden_size  # gate_up_proj and down_proj
    return ParameterCount(
        embedding=embedding,
        attention=config.num_layers * attention,
        mlp=config.num_layers * mlp,
        norms=(2 * config.num_layers + 1) * config.hidden_size,  # two a layer, and the final one
        lm_head=0 if config.tie_word_embeddings else embedding,
    )


# ---- keys and values ---------------------------------------------------------------------------------------------------


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: int = 2) -> int:
    """Bytes of one token's keys and values in all layers: ``2 * num_layers * kv_size * bytes_per_value``.

    >>> from tinyllm.config import PRESETS
    >>> kv_bytes_per_token(PRESETS["llama-2-7b"]), kv_bytes_per_token(PRESETS["llama-3-8b"])
    (524288, 131072)
    """
    return 2 * config.num_layers * config.kv_size * bytes_per_value


def kv_bytes_per_layer_block(config: ModelConfig, block_size: int = 16, bytes_per_value: int = 2) -> int:
    """Bytes of one KV block in one layer (vLLM: ``page_size_bytes``).

    >>> from tinyllm.config import PRESETS
    >>> kv_bytes_per_layer_block(PRESETS["llama-3-8b"])
    65536
    """
    return 2 * CacheConfig(block_size).block_size * config.kv_size * bytes_per_value


def kv_bytes_per_block(config: ModelConfig, block_size: int = 16, bytes_per_value: int = 2) -> int:
    """Bytes of one KV block in all layers: what the pool hands out.

    >>> from tinyllm.config import PRESETS
    >>> kv_bytes_per_block(PRESETS["llama-3-8b"])
    2097152
    """
    return config.num_layers * kv_bytes_per_layer_block(config, block_size, bytes_per_value)


def count_req_blocks(seq_len: int, block_size: int = 16) -> int:
    """The blocks that a request of `seq_len` tokens holds; the last one may be part empty.

    >>> count_req_blocks(4096), count_req_blocks(4097)
    (256, 257)
    """
    if seq_len < 1:
        raise ConfigError(f"a request of {seq_len} tokens; expected at least 1")
    return CacheConfig(block_size).count_blocks(seq_len)


def kv_bytes_per_request(config: ModelConfig, seq_len: int, block_size: int = 1, bytes_per_value: int = 2) -> int:
    """Bytes of a request's keys and values: in whole blocks, or to the token where `block_size` is 1.

    >>> from tinyllm.config import PRESETS
    >>> kv_bytes_per_request(PRESETS["llama-2-7b"], 4096)
    2147483648
    >>> kv_bytes_per_request(PRESETS["llama-2-7b"], 4096, block_size=1000)
    2621440000
    """
    return count_req_blocks(seq_len, block_size) * kv_bytes_per_block(config, block_size, bytes_per_value)


@dataclass(frozen=True)
class Pool:
    """The KV blocks that a budget buys. `num_blocks` counts block 0, the null block, which holds no request's tokens."""

    block_size: int
    num_blocks: int

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return max(self.num_blocks - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens that the usable blocks hold."""
        return self.num_usable_blocks * self.block_size

    def count_requests(self, seq_len: int) -> int:
        """How many requests of `seq_len` tokens fit at once, where no two share a block."""
        return self.num_usable_blocks // count_req_blocks(seq_len, self.block_size)


def pool_of_budget(config: ModelConfig, num_bytes: int, block_size: int = 16, bytes_per_value: int = 2) -> Pool:
    """The largest pool within `num_bytes`; one without a block where the budget is below a block, or negative.

    >>> from tinyllm.config import PRESETS
    >>> pool = pool_of_budget(PRESETS["llama-3-8b"], 2**30)
    >>> pool.num_blocks, pool.num_usable_blocks, pool.num_tokens, pool.count_requests(4096)
    (512, 511, 8176, 1)
    """
    block_bytes = kv_bytes_per_block(config, block_size, bytes_per_value)
    return Pool(block_size, max(num_bytes, 0) // block_bytes)


def count_reserved_requests(config: ModelConfig, num_bytes: int, reserved_len: int, bytes_per_value: int = 2) -> int:
    """How many requests fit without paging, where each reserves one stretch of `reserved_len` tokens for itself.

    >>> from tinyllm.config import PRESETS
    >>> count_reserved_requests(PRESETS["llama-3-8b"], 2**34, reserved_len=8192)
    16
    """
    return max(num_bytes, 0) // kv_bytes_per_request(config, reserved_len, bytes_per_value=bytes_per_value)


def break_even_tokens(config: ModelConfig, bytes_per_weight: int = 2, bytes_per_value: int = 2) -> int:
    """The tokens of context, all requests together, whose keys and values weigh what a decode step reads of the weights.

    Below it a step's time goes into the weights, above it into the KV cache; a fraction of a token is cut off.

    >>> from tinyllm.config import PRESETS
    >>> break_even_tokens(PRESETS["llama-3-8b"])
    114516
    """
    return count_parameters(config).read_each_step * bytes_per_weight // kv_bytes_per_token(config, bytes_per_value)


def check_context(config: ModelConfig, seq_len: int) -> None:
    """ConfigError where a request of `seq_len` tokens has more positions than the model was made for, or none."""
    if not 1 <= seq_len <= config.max_positions:
        raise ConfigError(
            f"context is {seq_len:,}; expected 1 to {config.max_positions:,} tokens, the max_positions of {config.name}"
        )


# ---- FLOPs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """FLOPs by part, a multiply-add counting two; those of norms, rotary embedding and activations are left out."""

    projections: int  # qkv_proj and o_proj
    attend: int  # scores and weighted values
    mlp: int
    lm_head: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.projections + self.attend + self.mlp + self.lm_head

    @property
    def mlp_share(self) -> float:
        """The part of the total that the MLP makes, from 0 to 1."""
        return self.mlp / self.total

    @property
    def mlp_share_without_head(self) -> float:
        """The part of all layers' FLOPs that the MLP makes: the LM head is not counted."""
        return self.mlp / (self.total - self.lm_head)


def step_flops(config: ModelConfig, num_tokens: int, num_pairs: int, num_logits: int) -> Flops:
    """The FLOPs of one step: two a weight and row, and four a pair of query and key for each number of a query.

    `num_pairs` counts the pairs that the mask keeps; `num_logits` the rows that the LM head sees.
    """
    count = count_parameters(config)
    return Flops(
        projections=2 * num_tokens * count.attention,
        attend=4 * num_pairs * config.num_layers * config.q_size,
        mlp=2 * num_tokens * count.mlp,
        lm_head=2 * num_logits * config.vocab_size * config.hidden_size,
    )


def decode_flops(config: ModelConfig, seq_len: int) -> Flops:
    """FLOPs of one decoded token that may read `seq_len` keys.

    >>> from tinyllm.config import PRESETS
    >>> llama = PRESETS["llama-3-8b"]
    >>> round(decode_flops(llama, 2092).mlp_share, 4), round(decode_flops(llama, 4096).mlp_share_without_head, 4)
    (0.7, 0.7)
    """
    return step_flops(config, num_tokens=1, num_pairs=seq_len, num_logits=1)


def prefill_flops(config: ModelConfig, num_tokens: int) -> Flops:
    """FLOPs of a prompt computed in one step: the query of token i reads i keys, and only the last row sees the LM head.

    >>> from tinyllm.config import PRESETS
    >>> round(prefill_flops(PRESETS["llama-3-8b"], 8192).mlp_share, 3)
    0.7
    """
    return step_flops(config, num_tokens, num_tokens * (num_tokens + 1) // 2, num_logits=1)


# ---- a whole plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A model, the length of its requests and, where it is given, a memory; and what follows from them.

    Raises ConfigError for a context beyond the model's max_positions, an unknown dtype or an impossible block size.
    """

    config: ModelConfig
    seq_len: int
    block_size: int = 16
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    memory: int = 0  # bytes; 0 where none is given

    def __post_init__(self) -> None:
        check_context(self.config, self.seq_len)
        CacheConfig(self.block_size)
        value_bytes(self.weight_dtype)
        value_bytes(self.kv_dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return count_parameters(self.config).total * value_bytes(self.weight_dtype)

    @property
    def kv_budget(self) -> int:
        """What the weights leave of the memory; negative where they do not fit."""
        return self.memory - self.weight_bytes

    @property
    def pool(self) -> Pool:
        """The KV blocks that fit behind the weights."""
        return pool_of_budget(self.config, self.kv_budget, self.block_size, value_bytes(self.kv_dtype))

    @property
    def num_requests(self) -> int:
        """Requests of `seq_len` tokens that fit at once in the paged pool."""
        return self.pool.count_requests(self.seq_len)

    @property
    def num_reserved_requests(self) -> int:
        """Requests that fit where each reserves the model's max_positions in advance."""
        return count_reserved_requests(
            self.config, self.kv_budget, self.config.max_positions, value_bytes(self.kv_dtype)
        )

    def lines(self) -> Iterator[str]:
        """The plan as text of at most 80 columns, for every size that a real model has."""
        yield from _dimension_lines(self.config)
        yield ""
        yield from _parameter_lines(self.config)
        yield ""
        yield from _byte_lines(self)
        yield ""
        yield from _flops_lines(self)
        if self.memory:
            yield ""
            yield from _memory_lines(self)


_COLUMNS = (
    ("num_layers", "hidden_size", "intermediate_size", "vocab_size"),
    ("num_heads", "num_kv_heads", "head_dim", "max_positions"),
    ("q_size", "kv_size", "qkv_size", "gate_up_size"),
)


def _dimension_lines(config: ModelConfig) -> Iterator[str]:
    yield "dimensions"
    for words in zip(*_COLUMNS, strict=True):
        cells = [f"{word:<{width}}{getattr(config, word):>9,}" for word, width in zip(words, (17, 13, 12), strict=True)]
        yield "  " + "   ".join(cells)


def _parameter_lines(config: ModelConfig) -> Iterator[str]:
    count = count_parameters(config)
    yield "parameters"
    for part, formula in PARAMETER_FORMULAS.items():
        number = getattr(count, part)
        note = "tied: it is the embedding" if part == "lm_head" and not number else formula
        yield f"  {part:<10}{number:>15,}{number / count.total:>9.2%}  {note}"
    yield f"  {'total':<10}{count.total:>15,}{1:>9.2%}"


def _row(label: str, number: int, note: str) -> str:
    return f"  {label:<12}{number:>21,}  {note}"


def _byte_row(label: str, num_bytes: int, note: str) -> str:
    return _row(label, num_bytes, f"{show_size(num_bytes):>11}  {note}")


def _byte_lines(plan: Plan) -> Iterator[str]:
    config, seq_len, block_size, each = plan.config, plan.seq_len, plan.block_size, value_bytes(plan.kv_dtype)
    token = kv_bytes_per_token(config, each)
    num_blocks = count_req_blocks(seq_len, block_size)
    numbers = f"2*{config.num_layers}*{config.kv_size}*{each}"
    even = break_even_tokens(config, value_bytes(plan.weight_dtype), each)
    yield f"bytes, weights in {plan.weight_dtype} and KV cache in {plan.kv_dtype}"
    yield _byte_row("weights", plan.weight_bytes, f"total*{value_bytes(plan.weight_dtype)}")
    yield f"  KV cache    2*num_layers*kv_size*{each} bytes = {numbers} = {token:,} a token"
    yield _byte_row("token", token, "in all layers")
    yield _byte_row(
        "layer block", kv_bytes_per_layer_block(config, block_size, each), f"block_size {block_size:,}, one layer"
    )
    yield _byte_row("block", kv_bytes_per_block(config, block_size, each), "in all layers")
    yield _byte_row("request", kv_bytes_per_request(config, seq_len, 1, each), f"{seq_len:,} tokens")
    note = f"{num_blocks:,} blocks, {num_blocks * block_size - seq_len:,} slots empty"
    yield _byte_row("in blocks", kv_bytes_per_request(config, seq_len, block_size, each), note)
    yield _row("break-even", even, "tokens: steps read as much KV as weights")


def _flops_lines(plan: Plan) -> Iterator[str]:
    decode, prefill = decode_flops(plan.config, plan.seq_len), prefill_flops(plan.config, plan.seq_len)
    headings = (f"decode at {plan.seq_len:,}", f"prefill of {plan.seq_len:,}")
    yield f"{'FLOPs':<14}{headings[0]:>23}{headings[1]:>33}"
    for part in ("projections", "attend", "mlp", "lm_head", "total"):
        ones, many = getattr(decode, part), getattr(prefill, part)
        yield f"  {part:<12}{ones:>23,}{ones / decode.total:>9.2%}{many:>24,}{many / prefill.total:>9.2%}"


def _memory_lines(plan: Plan) -> Iterator[str]:
    pool, seq_len, max_positions = plan.pool, plan.seq_len, plan.config.max_positions
    yield "memory, without activations"
    yield _byte_row("memory", plan.memory, "as given")
    yield _byte_row("for KV", plan.kv_budget, "memory - weights")
    if plan.kv_budget < 0:
        yield f"  the weights alone need {show_size(-plan.kv_budget)} more: no request fits"
        return
    yield _row("num_blocks", pool.num_blocks, "block 0 included, the null block")
    yield _row("usable", pool.num_usable_blocks, "blocks that requests can hold")
    yield _row("tokens", pool.num_tokens, "usable*block_size")
    yield _row("requests", plan.num_requests, f"of {seq_len:,} tokens, paged")
    yield _row("reserved", plan.num_reserved_requests, f"where each reserves max_positions {max_positions:,}")
    if not plan.num_requests:
        needed = count_req_blocks(seq_len, plan.block_size)
        yield f"  no request of {seq_len:,} tokens fits: blocks needed {needed:,}, usable {pool.num_usable_blocks:,}"
