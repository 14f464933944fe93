"""Names and shapes: which tensors of a file become which parameter of the model.

`PARAMETERS` is the whole story. Our names are Hugging Face's without the leading ``model.``; two parameters are fused,
as in vLLM: ``qkv_proj`` holds the rows of q, k and v one below the other and ``gate_up_proj`` those of gate and up, so
that one matrix product does the work of three, or two. ``{i}`` is the layer.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinyllm.config import ModelConfig
from tinyllm.errors import ModelFileError, brief
from tinyllm.weights.gguf import GGUFFile


@dataclass(frozen=True)
class Source:
    """One tensor of a file: its name in either format, its dimension words, and the heads whose rows GGUF reorders."""

    huggingface: str
    gguf: str
    words: str
    heads: str = ""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the model: its dimension words, and the tensors whose rows it holds from top to bottom."""

    name: str
    words: str
    sources: tuple[Source, ...]


def _same(name: str, gguf: str, words: str) -> ParameterSpec:
    """A parameter that is one tensor of the file, under the same name in Hugging Face's."""
    return ParameterSpec(name, words, (Source(name, gguf, words),))


ATTENTION, MLP = "layers.{i}.self_attn.", "layers.{i}.mlp."
LAYER_PARAMETERS = (
    _same("layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight", "hidden_size"),
    ParameterSpec(ATTENTION + "qkv_proj.weight", "qkv_size hidden_size", (
        Source(ATTENTION + "q_proj.weight", "blk.{i}.attn_q.weight", "q_size hidden_size", heads="num_heads"),
        Source(ATTENTION + "k_proj.weight", "blk.{i}.attn_k.weight", "kv_size hidden_size", heads="num_kv_heads"),
        Source(ATTENTION + "v_proj.weight", "blk.{i}.attn_v.weight", "kv_size hidden_size"),
    )),
    _same(ATTENTION + "o_proj.weight", "blk.{i}.attn_output.weight", "hidden_size q_size"),
    _same("layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight", "hidden_size"),
    ParameterSpec(MLP + "gate_up_proj.weight", "gate_up_size hidden_size", (
        Source(MLP + "gate_proj.weight", "blk.{i}.ffn_gate.weight", "intermediate_size hidden_size"),
        Source(MLP + "up_proj.weight", "blk.{i}.ffn_up.weight", "intermediate_size hidden_size"),
    )),
    _same(MLP + "down_proj.weight", "blk.{i}.ffn_down.weight", "hidden_size intermediate_size"),
)  # fmt: skip
EMBEDDING = _same("embed_tokens.weight", "token_embd.weight", "vocab_size hidden_size")
FINAL_NORM = _same("norm.weight", "output_norm.weight", "hidden_size")
LM_HEAD = _same("lm_head.weight", "output.weight", "vocab_size hidden_size")  # absent where tied to the embedding
PARAMETERS = (EMBEDDING, *LAYER_PARAMETERS, FINAL_NORM, LM_HEAD)
SOURCES_PER_LAYER = sum(len(parameter.sources) for parameter in LAYER_PARAMETERS)

PREFIX = "model."  # of all names but the LM head's in a Hugging Face checkpoint

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Files may carry the rotary frequencies as a tensor; ours follow from the config (which has read GGUF's rope_freqs).
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight")


def parameters_from_gguf(file: GGUFFile, config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Dequantise every weight of `file` into the parameters of a `config` model, by name.

    Raises ModelFileError for a tensor that is missing, surplus, or of another shape than `config` says.
    """

    def read(source: Source, rows: Tensor) -> None:
        if rows.dtype == torch.float32 and not source.heads:
            file.read(source.gguf, out=rows)
            return
        values = file.read(source.gguf)
        heads = config.dims().get(source.heads)
        rows.copy_(unpermute(values, heads) if heads else values)

    shapes = {name: info.shape for name, info in file.tensors.items()}
    _check(shapes, config, lambda source: source.gguf)
    if config.tie_word_embeddings and "output.weight" in file.tensors:
        _warn_if_untied(file.read("token_embd.weight"), file.read("output.weight"), "output.weight", config)
    return _build(config, dtype, read)


def parameters_from_hf(
    tensors: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Copy a Hugging Face checkpoint's tensors into the parameters of a `config` model, by name.

    Raises ModelFileError for a tensor that is missing, surplus, of another shape than `config` says, or not of floating
    point numbers of 16 to 64 bits (a quantised checkpoint).
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS and not name.endswith(IGNORED_SUFFIXES):  # float8 needs scales beside it
            raise ModelFileError(
                f"tensor {name!r:.100} is {tensor.dtype}; expected floating point of 16 to 64 bits: quantised "
                "checkpoints need GGUF"
            )
    spell = _spelling(tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _check(shapes, config, lambda source: spell(source.huggingface))
    lm_head = spell(LM_HEAD.name)
    if config.tie_word_embeddings and lm_head in tensors:
        _warn_if_untied(tensors[spell(EMBEDDING.name)], tensors[lm_head], lm_head, config)
    return _build(config, dtype, lambda source, rows: rows.copy_(tensors[spell(source.huggingface)]))


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Put the rows of a GGUF q or k projection back into Hugging Face's order.

    Rotary embedding turns pairs of numbers. In HF's layout row j of a head pairs with row j + half_dim; llama.cpp
    stores the two rows of a pair next to each other: 0, half_dim, 1, half_dim + 1, and so on.

    >>> unpermute(torch.tensor([[0], [2], [1], [3]]), heads=1).flatten().tolist()
    [0, 1, 2, 3]
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def expected_parameters(config: ModelConfig) -> list[ParameterSpec]:
    """The parameters of a `config` model in the order of the data flow, with the layer numbers filled in."""
    layers = [_of_layer(parameter, i) for i in range(config.num_layers) for parameter in LAYER_PARAMETERS]
    return [EMBEDDING, *layers, FINAL_NORM, *([] if config.tie_word_embeddings else [LM_HEAD])]


def shape_of(words: str, config: ModelConfig) -> tuple[int, ...]:
    """The sizes of dimension words such as ``q_size hidden_size`` in a `config` model."""
    dims = config.dims()
    return tuple(dims[word] for word in words.split())


def _of_layer(parameter: ParameterSpec, i: int) -> ParameterSpec:
    def named(name: str) -> str:
        return name.replace("{i}", str(i))

    sources = [replace(s, huggingface=named(s.huggingface), gguf=named(s.gguf)) for s in parameter.sources]
    return ParameterSpec(named(parameter.name), parameter.words, tuple(sources))


def _build(config: ModelConfig, dtype: torch.dtype, read: Callable[[Source, Tensor], object]) -> dict[str, Tensor]:
    """Allocate each parameter once and let `read` fill it, source by source: a fused one never exists twice."""
    parameters = {}
    for parameter in expected_parameters(config):
        weight = torch.empty(shape_of(parameter.words, config), dtype=dtype)
        row_counts = [shape_of(source.words, config)[0] for source in parameter.sources]
        for source, rows in zip(parameter.sources, weight.split(row_counts), strict=True):
            read(source, rows)
        parameters[parameter.name] = weight
    return parameters


def _check(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, name_of: Callable[[Source], str]) -> None:
    """Compare the tensors of a file with those that `config` asks for, before anything of their size is allocated."""
    needed = config.num_layers * SOURCES_PER_LAYER
    if needed > len(shapes):  # a broken file may claim 2**31 layers: do not loop
        raise ModelFileError(f"{config.num_layers} layers need {needed} tensors but the file has {len(shapes)}")
    expected = {name_of(source): source.words for p in expected_parameters(config) for source in p.sources}
    for name, words in expected.items():
        if name not in shapes:
            raise ModelFileError(
                f"tensor {name!r:.100} is missing; expected [{words}] = {list(shape_of(words, config))}"
            )
        if shapes[name] != shape_of(words, config):
            wanted = f"[{words}] = {list(shape_of(words, config))}"
            raise ModelFileError(f"tensor {name!r:.100} is {brief(list(shapes[name]))}; expected {wanted}")
    tied = {name_of(source) for source in LM_HEAD.sources} if config.tie_word_embeddings else set()
    surplus = [
        name for name in shapes if name not in expected and name not in tied and not name.endswith(IGNORED_SUFFIXES)
    ]
    if surplus:
        raise ModelFileError(f"tensor {surplus[0]!r:.100} has no place in a Llama model ({len(surplus)} such)")


def _spelling(names: Collection[str]) -> Callable[[str], str]:
    """Our name of a tensor -> the file's: with a leading ``model.``, which a checkpoint of the bare decoder has not.

    >>> spell = _spelling(["model.norm.weight", "lm_head.weight"])
    >>> [spell(name) for name in ("norm.weight", "embed_tokens.weight", "lm_head.weight")]
    ['model.norm.weight', 'model.embed_tokens.weight', 'lm_head.weight']
    """
    spelled = {name.removeprefix(PREFIX): name for name in names}
    if len(spelled) != len(names):
        raise ModelFileError(f"a tensor occurs twice: with and without the leading {PREFIX!r}")
    prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
    return lambda name: spelled.get(name, name if name == LM_HEAD.name else prefix + name)


def _warn_if_untied(embedding: Tensor, lm_head: Tensor, name: str, config: ModelConfig) -> None:
    """The config wins where it ties the LM head to the embedding and the file nevertheless holds another one."""
    if not torch.equal(embedding, lm_head):
        text = f"{config.name}: {name} differs from the embedding, but the config ties them: it is ignored"
        warnings.warn(text, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """The stack level, for `warnings.warn` in the function that asks, of the code that called this package."""
    level, frame = 1, inspect.currentframe()
    while (frame := frame and frame.f_back) and frame.f_globals.get("__name__", "").startswith("tinyllm."):
        level += 1
    return level
