"""A model file becomes a decoder with weights and a tokenizer."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tinyllm.config import ModelConfig
from tinyllm.errors import ConfigError, RequestError, TinyllmError
from tinyllm.layers.attention.backends import find_backend
from tinyllm.model import Decoder
from tinyllm.tokenizer import Tokenizer, tokenizer_from_gguf
from tinyllm.weights.default import find_default_model
from tinyllm.weights.gguf import GGUFFile, read_gguf
from tinyllm.weights.gguf_config import config_from_gguf
from tinyllm.weights.names import parameters_from_gguf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """Everything that a model file gave; attention names the body that the decoder was built with."""

    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    path: Path
    attention: str
    bos_prefix: tuple[int, ...] = ()  # the begin token, where the file says that every prompt starts with it

    def encode_prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Token ids of a prompt; RequestError where it is empty, or has no byte that the vocabulary can spell."""
        if not text:
            raise RequestError("the prompt is empty; expected at least one character")
        token_ids = self.tokenizer.encode(text, parse_special=parse_special)
        if not token_ids:
            raise RequestError(f"the prompt {text!r:.40} has no token: this vocabulary spells none of its bytes")
        return [*self.bos_prefix, *token_ids]


def load_model(path: str | Path | None = None, dtype: str = "float32", attention: str = "reference") -> LoadedModel:
    """Load a GGUF file, or the default model where path is None. Nothing is guessed: a missing weight is an error.

    Raises ModelFileError, ConfigError or TokenizerError, one line each.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; expected one of {', '.join(DTYPES)}")
    if path is not None and not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"model is a {type(path).__name__}; expected the path of a GGUF file, or None for the default"
        )
    find_backend(str(attention))
    file = read_gguf(find_default_model() if path is None else Path(path))
    try:
        return _load(file, dtype, attention)
    except TinyllmError as error:
        raise type(error)(f"{file.path.name}: {error}") from None


def _load(file: GGUFFile, dtype: str, attention: str) -> LoadedModel:
    config = config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file.metadata)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the embedding only {config.vocab_size} rows"
        )
    decoder = build_decoder(config, parameters_from_gguf(file, config, DTYPES[dtype]), attention)
    bos = config.bos_token_id if file.metadata.get("tokenizer.ggml.add_bos_token") is True else None
    return LoadedModel(config, decoder, tokenizer, file.path, attention, () if bos is None else (bos,))


def build_decoder(config: ModelConfig, parameters: dict[str, torch.Tensor], attention: str = "reference") -> Decoder:
    """A decoder that owns the given parameters; every name must be there and none may be left over."""
    with torch.device("meta"):
        decoder = Decoder(config, attention)
    decoder.load_state_dict(parameters, strict=True, assign=True)
    return decoder.requires_grad_(False)
