"""Our numbers against those of transformers: the same weights, the same prompts, compared stage by stage.

Nothing is read a second time: transformers' model is built from our config, and its tensors are views of ours. Our side
runs all prompts as one flat batch over the paged cache, theirs each prompt alone; so the comparison also covers what
they do not have.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tinyllm.batch import build_batch
from tinyllm.config import CacheConfig, ModelConfig
from tinyllm.errors import ConfigError, RequestError
from tinyllm.kv_cache import KVCache
from tinyllm.llm import LLM, Prompt
from tinyllm.model import Decoder
from tinyllm.trace.decisions import request_label
from tinyllm.trace.text import show_count
from tinyllm.weights.load import build_decoder
from tinyllm.weights.names import EMBEDDING, LM_HEAD, PREFIX, expected_parameters, shape_of

TOLERANCE = 1e-3  # of a row's rms: sums in another order give 1e-5, behind a thousand positions a fifth of this
INSTALL = "pip install transformers"


@dataclass(frozen=True)
class StageDifference:
    """How far the two models are apart behind one stage: the embedding, a layer, the final norm, the logits."""

    stage: str
    largest: float  # difference of two numbers
    relative: float  # the largest difference as a part of its row's rms
    where: str  # the place of the latter

    @property
    def departs(self) -> bool:
        """Whether it is more than rounding explains; NaN is."""
        return not self.relative <= TOLERANCE


@dataclass(frozen=True)
class Verification:
    """The differences in the order of the data flow, and each prompt's likeliest next token: (label, ours, theirs)."""

    title: str
    stages: tuple[StageDifference, ...]
    next_tokens: tuple[tuple[str, int, int], ...]

    @property
    def first_departure(self) -> StageDifference | None:
        """The stage to look at; those behind it inherit its error."""
        return next((stage for stage in self.stages if stage.departs), None)

    def lines(self) -> Iterator[str]:
        """The table as text of at most 100 columns; a stage that departs is marked with ``!``."""
        yield self.title
        yield f"  {'stage':<14}{'largest difference':>20}{'in rms of its row':>20}   where"
        for stage in self.stages:
            mark, is_equal = "!" if stage.departs else " ", stage.largest == 0
            sizes = f"{stage.largest:>20.2g}{stage.relative:>20.2g}"
            yield f"{mark} {stage.stage:<14}{sizes}   {'equal' if is_equal else stage.where}"
        others = [f"{label}: {ours} here, {theirs} there" for label, ours, theirs in self.next_tokens if ours != theirs]
        num_same = len(self.next_tokens) - len(others)
        same = f"the likeliest is the same after {num_same} of {show_count(len(self.next_tokens), 'prompt')}"
        yield f"  {'next token':<14}{'; '.join([same, *others[:1]])}"
        first = self.first_departure
        if first is None:
            yield f"no stage departs: no difference is above {TOLERANCE:g} of its row's rms"
        else:
            yield f"{first.stage} is the first stage that departs: {first.relative:.2g} of its row's rms, above {TOLERANCE:g}"


def verify(llm: LLM, prompts: Prompt | Sequence[Prompt], parse_special: bool = False) -> Verification:
    """Run the prompts' prefill in float32 here and in transformers, and compare.

    Prompts are those of ``LLM.generate``, with its errors. ConfigError where transformers is not installed or does not
    take this config.
    """
    config, device = llm.loaded.config, llm.engine.device
    requests = llm.make_requests(prompts, parse_special=parse_special)
    if not requests:
        raise RequestError("there is no prompt; expected at least one")
    for request in requests:
        llm.engine.scheduler.check_request(request)
    weights = {name: weight.float() for name, weight in llm.loaded.decoder.state_dict().items()}
    theirs = build_twin(config, weights)
    ours = build_decoder(config, weights, llm.loaded.attention).to(device)
    return compare(ours, theirs, [r.prompt_token_ids for r in requests], llm.engine.cache_config.block_size)


def compare(ours: Decoder, theirs: Any, prompts: Sequence[Sequence[int]], block_size: int = 16) -> Verification:
    """Run token ids through both models and compare what they hold behind each stage."""
    our_stages = _run_ours(ours, prompts, block_size)
    runs = [_run_theirs(theirs, token_ids, ours.embed_tokens.weight.device) for token_ids in prompts]
    their_stages = {stage: torch.cat([run[stage] for run in runs]) for stage in our_stages}
    labels = [request_label(index) for index in range(len(prompts))]
    rows = [f"{label} position {i}" for label, ids in zip(labels, prompts, strict=True) for i in range(len(ids))]
    last_rows = [f"{label} position {len(ids) - 1}" for label, ids in zip(labels, prompts, strict=True)]
    best = [stages["logits"].argmax(dim=-1).tolist() for stages in (our_stages, their_stages)]
    counts = f"{show_count(len(prompts), 'prompt')}, {show_count(len(rows), 'token')}"
    return Verification(
        title=f"prefill in float32 of {counts}; ours against {_their_name(theirs)}",
        stages=tuple(
            _difference(stage, our_stages[stage], their_stages[stage], last_rows if stage == "logits" else rows)
            for stage in our_stages
        ),
        next_tokens=tuple(zip(labels, *best, strict=True)),
    )


def _difference(stage: str, ours: Tensor, theirs: Tensor, rows: Sequence[str]) -> StageDifference:
    difference = (ours - theirs).abs()
    rms = theirs.square().mean(dim=-1, keepdim=True).sqrt()
    relative = difference / rms.clamp(min=torch.finfo(torch.float32).tiny)
    row, column = divmod(int(relative.argmax()), relative.shape[1])  # a NaN counts as the largest
    where = f"{rows[row]}, {'token' if stage == 'logits' else 'value'} {column}"
    return StageDifference(stage, float(difference.max()), float(relative[row, column]), where)


# --- our side -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _run_ours(decoder: Decoder, prompts: Sequence[Sequence[int]], block_size: int) -> dict[str, Tensor]:
    """What stands behind each stage, a row for each token of all prompts; of the logits one for each prompt."""
    cache = CacheConfig(block_size)
    tables: list[range] = []
    for token_ids in prompts:
        first = tables[-1].stop if tables else 1
        tables.append(range(first, first + cache.count_blocks(len(token_ids))))
    weight = decoder.embed_tokens.weight
    kv_cache = KVCache(decoder.config, replace(cache, num_blocks=tables[-1].stop), weight.dtype, weight.device)
    batch = build_batch(prompts, [0] * len(prompts), tables, block_size, weight.device)
    layers = {f"layer {i}": (layer, _stream) for i, layer in enumerate(decoder.layers)}
    stages = {"embed_tokens": (decoder.embed_tokens, _first), **layers, "norm": (decoder.norm, _first)}
    with _watching(stages) as seen:
        logits = decoder(batch, kv_cache)
    return {**seen, "logits": logits}


Read = Callable[[Any], Tensor]


@contextlib.contextmanager
def _watching(stages: Mapping[str, tuple[nn.Module, Read]]) -> Iterator[dict[str, Tensor]]:
    """Collects what each module returns inside the block, as its reader reads it."""
    seen: dict[str, Tensor] = {}

    def note(stage: str, read: Read, module: nn.Module, args: Any, output: Any) -> None:
        seen[stage] = read(output)

    handles = [module.register_forward_hook(partial(note, stage, read)) for stage, (module, read) in stages.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _stream(output: tuple[Tensor, Tensor]) -> Tensor:
    """Our layer leaves its last addition to the next norm; theirs does it itself."""
    x, residual = output
    return x + residual


# --- their side -----------------------------------------------------------------------------------------------------------


def build_twin(config: ModelConfig, weights: Mapping[str, Tensor]) -> Any:
    """transformers' LlamaForCausalLM with these parameters of ours, in float32 and without a copy."""
    transformers = import_transformers()
    try:
        their_config = transformers.LlamaConfig(**_their_config(config, transformers.__version__))
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(their_config)
    except Exception as error:  # its own classes, which versions move
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"transformers {transformers.__version__} does not take this model: {reason:.160}") from None
    model.load_state_dict(to_hf(config, weights), strict=True, assign=True)
    rotary = type(model.model.rotary_emb)(config=their_config)  # computed, not loaded: the first one is without values
    if config.rope_scaling and config.rope_scaling.factors:
        rotary.inv_freq = rotary.inv_freq / torch.tensor(config.rope_scaling.factors)
    model.model.rotary_emb = rotary
    return model.to(weights[EMBEDDING.name].device).eval()


def import_transformers() -> Any:
    """The library; ConfigError says how to install it. A command may ask before it loads a model."""
    try:
        import transformers  # noqa: PLC0415  not a dependency of ours
    except ImportError:
        raise ConfigError(f"the comparison needs transformers, which is not installed; run: {INSTALL}") from None
    return transformers


def _their_config(config: ModelConfig, version: str) -> dict[str, Any]:
    """LlamaConfig's arguments; version 5 has rope_theta among the rope_parameters, version 4 beside rope_scaling."""
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling = config.rope_scaling
    if scaling and not scaling.factors:
        rope = {"rope_type": scaling.rope_type, "factor": float(scaling.factor)}
    if scaling and scaling.rope_type == "llama3":
        rope |= {
            "low_freq_factor": float(scaling.low_freq_factor),
            "high_freq_factor": float(scaling.high_freq_factor),
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    is_old = int(version.partition(".")[0]) < 5
    old = {"rope_theta": config.rope_theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_implementation": "eager",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **(old if is_old else {"rope_parameters": {**rope, "rope_theta": config.rope_theta}}),
    }


def to_hf(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters under Hugging Face's names: the fused ones cut into views of their parts."""
    tensors: dict[str, Tensor] = {}
    for parameter in expected_parameters(config):
        row_counts = [shape_of(source.words, config)[0] for source in parameter.sources]
        for source, rows in zip(parameter.sources, weights[parameter.name].split(row_counts), strict=True):
            tensors[("" if parameter is LM_HEAD else PREFIX) + source.huggingface] = rows
    return {LM_HEAD.name: tensors[PREFIX + EMBEDDING.name], **tensors}


@torch.inference_mode()
def _run_theirs(model: Any, token_ids: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """The same stages of one prompt."""
    layers = {f"layer {i}": layer for i, layer in enumerate(model.model.layers)}
    modules = {"embed_tokens": model.model.embed_tokens, **layers, "norm": model.model.norm}
    with _watching({stage: (module, lambda output: _first(output)[0]) for stage, module in modules.items()}) as seen:
        output = model(torch.tensor([list(token_ids)], device=device), logits_to_keep=1, use_cache=False)
    return {**seen, "logits": output.logits[0]}


def _their_name(model: Any) -> str:
    return f"transformers {import_transformers().__version__} ({model.config._attn_implementation} attention)"
