"""GGUF metadata to `ModelConfig`: llama.cpp's key names in, the glossary's words out."""

import math
from typing import Any

from tinyllm.config import ModelConfig, RopeScaling, default_head_dim
from tinyllm.errors import ConfigError
from tinyllm.weights.gguf import GGUFFile

ARCHITECTURE = "llama"
# Keys of llama.cpp that change what is computed and that no step here applies, each with the values that change nothing.
NOT_APPLIED: dict[str, tuple[float, ...]] = {
    "llama.logit_scale": (0, 1),
    "llama.embedding_scale": (0, 1),
    "llama.residual_scale": (0, 1),
    "llama.attention.clamp_kqv": (0,),
    "llama.attention.max_alibi_bias": (0,),
    "llama.final_logit_softcapping": (0,),
    "llama.attn_logit_softcapping": (0,),
}
END_OF_TEXT_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")  # end of the text, end of a turn


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Read the settings of a Llama model from the metadata (and two shapes) of `file`.

    Raises ConfigError where a key is missing, has the wrong type, holds an impossible number, or asks for something
    that this engine does not compute: another architecture, experts, a partial rotary embedding, another rope scaling,
    scaled or capped numbers.
    """
    keys = _Keys(file.metadata)
    architecture = keys.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ConfigError(f"architecture {architecture!r:.60} is not supported; expected {ARCHITECTURE!r}")
    if keys.whole("llama.expert_count", 0):
        raise ConfigError("llama.expert_count is not 0: a mixture of experts is not supported; expected a dense model")
    if keys.whole("llama.attention.sliding_window", 0):
        raise ConfigError("llama.attention.sliding_window is not 0: sliding-window attention is not supported")
    _check_not_applied(keys)
    hidden_size = keys.whole("llama.embedding_length")
    num_heads = keys.whole("llama.attention.head_count")
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=keys.whole("llama.feed_forward_length"),
        num_layers=keys.whole("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.whole("llama.attention.head_count_kv", num_heads),
        head_dim=_head_dim(keys, hidden_size, num_heads),
        vocab_size=_vocab_size(keys, file),
        max_positions=keys.whole("llama.context_length"),
        rms_norm_eps=keys.real("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=keys.real("llama.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(keys, file),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=keys.whole("tokenizer.ggml.bos_token_id") if "tokenizer.ggml.bos_token_id" in keys else None,
        eos_token_ids=tuple(dict.fromkeys(keys.whole(key) for key in END_OF_TEXT_KEYS if key in keys)),
        name=keys.text("general.name", file.path.stem).encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
    )


class _Keys:
    """Typed access to metadata: the file chooses each value's type, so each is checked where it is used."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata

    def __contains__(self, key: str) -> bool:
        return key in self.metadata

    def text(self, key: str, default: str | None = None) -> str:
        return self._value(key, default, (str,), "a string")

    def whole(self, key: str, default: int | None = None) -> int:
        return self._value(key, default, (int,), "a whole number")

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._value(key, default, (int, float), "a number"))

    def _value(self, key: str, default: Any, types: tuple[type, ...], expected: str) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise ConfigError(f"the file has no {key}; expected {expected}")
        if not isinstance(value, types) or isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r:.60}; expected {expected}")
        return value


def _head_dim(keys: _Keys, hidden_size: int, num_heads: int) -> int:
    if "llama.attention.key_length" in keys:
        head_dim = keys.whole("llama.attention.key_length")
    else:
        head_dim = default_head_dim(hidden_size, num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if keys.whole(key, head_dim) != head_dim:
            raise ConfigError(f"{key} is {keys.whole(key)}; expected head_dim = {head_dim}")
    scale = keys.real("llama.attention.scale", 0)  # 0 means the usual one
    if scale and not (head_dim > 0 and math.isclose(scale, head_dim**-0.5, rel_tol=1e-5)):
        raise ConfigError(f"llama.attention.scale is {scale}; expected 1 / sqrt(head_dim = {head_dim}), or no key")
    return head_dim


def _check_not_applied(keys: _Keys) -> None:
    """ConfigError where a key asks for a computation that would be left out."""
    causal = keys.metadata.get("llama.attention.causal", True)
    if causal is not True:
        raise ConfigError(f"llama.attention.causal is {causal!r:.60}, which is not supported; expected true, or no key")
    for key, neutral in NOT_APPLIED.items():
        value = keys.real(key, neutral[0])
        if value not in neutral:
            expected = " or ".join(map(str, neutral))
            raise ConfigError(f"{key} is {value}, which is not supported; expected {expected}, or no key")


def _vocab_size(keys: _Keys, file: GGUFFile) -> int:
    if "llama.vocab_size" not in keys and "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    return keys.whole("llama.vocab_size")


def _rope_scaling(keys: _Keys, file: GGUFFile) -> RopeScaling | None:
    """A factor without a type means linear, as in llama.cpp; `rope_freqs.weight` holds the result of any other rule."""
    rope_type = keys.text("llama.rope.scaling.type", "linear")
    if rope_type not in ("none", "linear"):
        raise ConfigError(f"llama.rope.scaling.type {rope_type!r:.60} is not supported; expected none or linear")
    factor = keys.real("llama.rope.scaling.factor", keys.real("llama.rope.scale_linear", 1.0))
    scaling = RopeScaling("linear", factor) if rope_type == "linear" and factor != 1.0 else None
    if "rope_freqs.weight" not in file.tensors:
        return scaling
    if scaling:
        raise ConfigError(f"the file has both rope_freqs.weight and a linear rope scaling of {factor}; expected one")
    info = file.tensors["rope_freqs.weight"]
    if len(info.shape) != 1:
        raise ConfigError(f"rope_freqs.weight is {list(info.shape)}; expected [half_dim]")
    return RopeScaling("factors", factors=tuple(file.read("rope_freqs.weight").tolist()))
