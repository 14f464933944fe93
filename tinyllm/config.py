"""Frozen settings: what a checkpoint is (`ModelConfig`), how its KV pool is cut (`CacheConfig`), what a step may hold
(`SchedulerConfig`). Plain Python; every impossible value is refused here, before a tensor exists."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tinyllm.errors import ConfigError

HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh")  # what the gate of the MLP may be
MAX_SIZE = 2**31  # no real dimension comes near; a larger one is a broken file
MAX_REAL = 1e15  # nor a rope_theta (3.6e9 exists); JSON's whole numbers have no bound, and torch's scalars have one

RopeType = Literal["linear", "llama3", "factors"]


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_REAL


@dataclass(frozen=True)
class RopeScaling:
    """How a checkpoint stretches its rotary frequencies beyond the length it was trained at.

    ``linear`` divides every frequency by `factor`; ``llama3`` only the slow ones (layers/rope.py); ``factors`` divides
    frequency i by `factors[i]`, the form in which GGUF stores the result of any such rule (``rope_freqs.weight``).
    """

    rope_type: RopeType
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in get_args(RopeType):
            raise ConfigError(
                f"rope scaling {self.rope_type!r:.60} is not supported; expected {', '.join(get_args(RopeType))}"
            )
        for value in (
            self.factor,
            self.low_freq_factor,
            self.high_freq_factor,
            self.original_max_positions,
            *self.factors,
        ):
            if not _is_positive(value):
                raise ConfigError(f"rope scaling holds {value!r:.60}; expected positive numbers up to {MAX_REAL:g}")
        if bool(self.factors) != (self.rope_type == "factors"):
            raise ConfigError(
                f"rope scaling {self.rope_type} has {len(self.factors)} factors; they belong to 'factors' alone"
            )
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope scaling low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions of a Llama-architecture decoder, in the glossary's words (shapes.py)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = "model"

    def __post_init__(self) -> None:
        for word in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "max_positions"):  # fmt: skip
            value = getattr(self, word)
            if not _is_whole(value, 1, MAX_SIZE - 1):
                raise ConfigError(f"{word} is {value!r:.60}; expected a whole number from 1 to {MAX_SIZE - 1}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} cannot share num_kv_heads {self.num_kv_heads} evenly")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs")
        if not (_is_positive(self.rms_norm_eps) and self.rms_norm_eps < 1):
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps!r:.60}; expected a number above 0 and below 1")
        if not _is_positive(self.rope_theta):
            raise ConfigError(f"rope_theta is {self.rope_theta!r:.60}; expected a positive number up to {MAX_REAL:g}")
        if self.hidden_act not in HIDDEN_ACTS:
            raise ConfigError(
                f"hidden_act {self.hidden_act!r:.60} is not supported; expected one of {', '.join(HIDDEN_ACTS)}"
            )
        if not isinstance(self.tie_word_embeddings, bool):
            raise ConfigError(f"tie_word_embeddings is {self.tie_word_embeddings!r:.60}; expected true or false")
        if self.rope_scaling and self.rope_scaling.factors and len(self.rope_scaling.factors) != self.half_dim:
            raise ConfigError(
                f"rope_freqs has {len(self.rope_scaling.factors)} factors; expected half_dim = {self.half_dim}"
            )
        for token_id in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            if not _is_whole(token_id, 0, self.vocab_size - 1):
                raise ConfigError(f"special token id {token_id!r:.60} is outside the vocabulary of {self.vocab_size}")

    @property
    def group_size(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def half_dim(self) -> int:
        """Rotary pairs of one head."""
        return self.head_dim // 2

    @property
    def q_size(self) -> int:
        """Width of all query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads side by side."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key and value projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def gate_up_size(self) -> int:
        """Width of the fused gate and up projection."""
        return 2 * self.intermediate_size

    def dims(self) -> dict[str, int]:
        """Every dimension word that the checkpoint fixes, with its size."""
        words = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "group_size", "head_dim",
                 "half_dim", "q_size", "kv_size", "qkv_size", "gate_up_size", "vocab_size")  # fmt: skip
        return {word: getattr(self, word) for word in words}


def config_from_hf(values: Mapping[str, Any], name: str = "model") -> ModelConfig:
    """Read a Hugging Face ``config.json`` of the Llama architecture, in transformers 4 or 5 spelling.

    A key that is absent or null has the value that transformers' LlamaConfig gives it, but for model_type and the
    sizes. Raises ConfigError for another architecture, an unknown activation, biases, sliding windows, quantised weights
    or an impossible value; the file's values are not trusted.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"config.json holds a {type(values).__name__}; expected an object")
    _check_architecture(values)
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for key in required:
        if values.get(key) is None:
            raise ConfigError(f"config.json has no {key}; expected {', '.join(required)}")
    num_heads, hidden_size = values["num_attention_heads"], values["hidden_size"]
    head_dim = values.get("head_dim")
    rope = _rope_parameters(values)
    eos = _get(values, "eos_token_id", [])
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=_get(values, "num_key_value_heads", num_heads),
        head_dim=default_head_dim(hidden_size, num_heads) if head_dim is None else head_dim,
        vocab_size=values["vocab_size"],
        max_positions=_get(values, "max_position_embeddings", 2048),
        rms_norm_eps=_get(values, "rms_norm_eps", 1e-6),
        rope_theta=_get(rope, "rope_theta", 10000.0),
        rope_scaling=_rope_scaling_from_hf(rope),
        hidden_act=_get(values, "hidden_act", "silu"),
        tie_word_embeddings=_get(values, "tie_word_embeddings", False),
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        name=name,
    )


def _check_architecture(values: Mapping[str, Any]) -> None:
    """ConfigError for a config.json of anything but a plain Llama, whose tensors may look alike all the same."""
    if values.get("model_type") is None:
        raise ConfigError("config.json has no model_type; expected 'llama', the one architecture that is supported")
    for key, expected in (
        ("model_type", "llama"),
        ("architectures", ["LlamaForCausalLM"]),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("partial_rotary_factor", 1),  # version 5 has it among the rope_parameters
    ):
        if _get(values, key, expected) != expected:
            raise ConfigError(f"{key} {values[key]!r:.60} is not supported; expected {expected!r}")
    if values.get("sliding_window") is not None and values.get("use_sliding_window") is not False:
        raise ConfigError(
            f"sliding_window {values['sliding_window']!r:.60} is not supported; expected null: full attention"
        )
    if values.get("quantization_config") is not None:
        raise ConfigError(
            f"quantization_config {values['quantization_config']!r:.60} is not supported; expected plain weights: "
            "quantised checkpoints need GGUF"
        )


def _get(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key, where null means the default as much as absence does."""
    value = values.get(key)
    return default if value is None else value


def default_head_dim(hidden_size: Any, num_heads: Any) -> int:
    """hidden_size / num_heads, where a file leaves head_dim out; ConfigError where that is no whole number."""
    if not all(_is_whole(value, 1, MAX_SIZE - 1) for value in (hidden_size, num_heads)):
        raise ConfigError(
            f"hidden_size {hidden_size!r:.60} and num_heads {num_heads!r:.60} must be positive whole numbers"
        )
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size {hidden_size} is no multiple of num_heads {num_heads}, and head_dim is not given"
        )
    return hidden_size // num_heads


def _rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5's rope_parameters, or the same put together from version 4's rope_theta and rope_scaling.

    A file may hold both spellings, where they say the same.
    """
    parts = [_get(values, key, {}) for key in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError(f"rope_scaling or rope_parameters is {parts!r:.60}; expected an object")
    old, new = ({"rope_theta": values.get("rope_theta"), **part} for part in parts)
    if not parts[1]:
        return old
    if parts[0] and _rope_scaling_from_hf(old) != _rope_scaling_from_hf(new):
        raise ConfigError(
            f"rope_scaling and rope_parameters disagree: {parts!r:.160}; expected one of them, or the same"
        )
    if _get(old, "rope_theta", new["rope_theta"]) != new["rope_theta"]:
        raise ConfigError(
            f"rope_theta {old['rope_theta']!r:.60} and rope_parameters' {new['rope_theta']!r:.60} disagree; expected one"
        )
    return new


def _rope_scaling_from_hf(rope: Mapping[str, Any]) -> RopeScaling | None:
    rope_type = _get(rope, "rope_type", _get(rope, "type", "default"))
    if _get(rope, "partial_rotary_factor", 1) != 1:
        raise ConfigError(f"partial_rotary_factor {rope['partial_rotary_factor']!r:.60} is not supported; expected 1")
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return RopeScaling("linear", factor=rope.get("factor", 0))  # an absent factor fails as an impossible one
    if rope_type == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return RopeScaling("llama3", *(rope.get(key, 0) for key in keys))
    raise ConfigError(f"rope scaling {rope_type!r:.60} is not supported; expected default, linear or llama3")


def _preset(name: str, *sizes: Any, **rest: Any) -> ModelConfig:
    return ModelConfig(*sizes, name=name, **rest)


# Public models by name, for a plan or a dry run that needs no weights. Their columns, in ModelConfig's order: hidden_size,
# intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size, max_positions.
# fmt: off
_PRESET_LIST = [
    _preset("llama-2-7b", 4096, 11008, 32, 32, 32, 128, 32000, 4096),
    _preset("llama-2-13b", 5120, 13824, 40, 40, 40, 128, 32000, 4096),
    _preset("llama-2-70b", 8192, 28672, 80, 64, 8, 128, 32000, 4096),
    _preset("llama-3-8b", 4096, 14336, 32, 32, 8, 128, 128256, 8192, rope_theta=5e5),
    _preset("llama-3-70b", 8192, 28672, 80, 64, 8, 128, 128256, 8192, rope_theta=5e5),
    _preset("llama-3.1-405b", 16384, 53248, 126, 128, 8, 128, 128256, 131072, rope_theta=5e5,
            rope_scaling=RopeScaling("llama3", 8.0)),
    _preset("llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128256, 131072, rope_theta=5e5,
            rope_scaling=RopeScaling("llama3", 32.0), tie_word_embeddings=True),
    _preset("mistral-7b-v0.3", 4096, 14336, 32, 32, 8, 128, 32768, 32768, rope_theta=1e6),
    _preset("tinyllama-1.1b", 2048, 5632, 22, 32, 4, 64, 32000, 2048),
    _preset("smollm2-135m", 576, 1536, 30, 9, 3, 64, 49152, 8192, rope_theta=1e5, tie_word_embeddings=True),
    _preset("smollm2-360m", 960, 2560, 32, 15, 5, 64, 49152, 8192, rope_theta=1e5, tie_word_embeddings=True),
    _preset("smollm2-1.7b", 2048, 8192, 24, 32, 32, 64, 49152, 8192, rope_theta=1.3e5, tie_word_embeddings=True),
]
# fmt: on
PRESETS: dict[str, ModelConfig] = {preset.name: preset for preset in _PRESET_LIST}


def find_preset(name: str) -> ModelConfig:
    """The preset of a name, in either case; ConfigError names the nearest ones, or all where none is near.

    >>> find_preset("Llama-3-8B").num_kv_heads
    8
    """
    if not isinstance(name, str):
        raise ConfigError(f"the preset's name is {name!r:.60}; expected one of {', '.join(PRESETS)}")
    wanted = name.strip().casefold()
    if wanted in PRESETS:
        return PRESETS[wanted]
    near = difflib.get_close_matches(wanted.rpartition("/")[2][:60], PRESETS)
    raise ConfigError(
        f"{name!r:.60} is no preset; "
        + (f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(PRESETS)}")
    )


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV pool: `num_blocks` blocks of `block_size` token slots, block 0 being the null block."""

    block_size: int = 16
    num_blocks: int = 513
    enable_prefix_caching: bool = True  # requests that begin with the same tokens share full blocks

    def __post_init__(self) -> None:
        if not _is_whole(self.block_size, 1, 2**16):
            raise ConfigError(f"block_size is {self.block_size!r:.60}; expected 1 to {2**16} tokens")
        if not _is_whole(self.num_blocks, 2, MAX_SIZE - 1):
            raise ConfigError(
                f"num_blocks is {self.num_blocks!r:.60}; expected 2 (block 0 is the null block) to {MAX_SIZE - 1}"
            )
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)

    @property
    def num_slots(self) -> int:
        """Token slots of the whole pool, the null block's included."""
        return self.num_blocks * self.block_size

    def count_blocks(self, seq_len: int) -> int:
        """Blocks that hold `seq_len` tokens: ceil(seq_len / block_size)."""
        return -(-seq_len // self.block_size)

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that the usable blocks can hold."""
        return (self.num_blocks - 1) * self.block_size

    def dims(self) -> dict[str, int]:
        """The dimension words that the pool fixes, with their sizes."""
        return {"block_size": self.block_size, "num_blocks": self.num_blocks, "num_slots": self.num_slots}


POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of one engine step, and who goes first. Names and rules are vLLM's."""

    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048  # the token budget
    max_num_seqs: int = 128
    policy: str = "fcfs"  # first come, first served; or "priority": the smallest priority number first
    enable_chunked_prefill: bool = True  # a prompt may be computed over several steps
    long_prefill_token_threshold: int = 0  # most tokens of one request in a step while there are others; 0 is off
    reserve_full_sequence: bool = True  # a request starts only where all its tokens fit, not just its first chunk

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if not _is_whole(value, 1, MAX_SIZE - 1):
                raise ConfigError(f"{name} is {value!r:.60}; expected a whole number from 1 to {MAX_SIZE - 1}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "every running request needs one token a step; raise the budget or lower max_num_seqs"
            )
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is {self.policy!r:.60}; expected {' or '.join(POLICIES)}")
        _check_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        _check_bool("reserve_full_sequence", self.reserve_full_sequence)
        if not _is_whole(self.long_prefill_token_threshold, 0, MAX_SIZE - 1):
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold!r:.60}; expected a whole number, 0 for off"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_model_len {self.max_model_len}, and "
                "without chunked prefill a prompt must fit one step; raise the budget, lower max_model_len, or switch "
                "enable_chunked_prefill on"
            )


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r:.60}; expected True or False")
