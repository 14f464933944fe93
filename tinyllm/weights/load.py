"""A model on disk, a GGUF file or a Hugging Face folder, becomes a decoder with weights and a tokenizer."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyllm.config import ModelConfig
from tinyllm.errors import ConfigError, ModelFileError, RequestError, TinyllmError, TokenizerError, brief
from tinyllm.layers.attention.backends import find_backend
from tinyllm.model import Decoder
from tinyllm.planner import count_parameters
from tinyllm.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_json
from tinyllm.weights.default import find_default_model
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.gguf_config import config_from_gguf
from tinyllm.weights.hf_folder import (
    TOKENIZER,
    begins_with_bos,
    read_chat_template,
    read_config,
    read_special_tokens,
    read_tensors,
)
from tinyllm.weights.hub import fetch, is_hub_name
from tinyllm.weights.names import parameters_from_gguf, parameters_from_hf

EXPECTED = "the path of a GGUF file or a Hugging Face folder, or a hub name owner/model"
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
    chat_template: str | None = None  # the Jinja source, where the model brings one
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # what its files call bos_token and eos_token

    @property
    def template_tokens(self) -> dict[str, str]:
        """bos_token and eos_token as chat templates use them; where no file says, the config's ids do, the first of several."""
        ids = {"bos_token": self.config.bos_token_id, "eos_token": next(iter(self.config.eos_token_ids), None)}
        known = {name: i for name, i in ids.items() if i is not None and i < self.tokenizer.vocab_size}
        return {name: self.tokenizer.decode([token_id]) for name, token_id in known.items()} | dict(self.special_tokens)

    def encode_prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Token ids of a prompt; RequestError where it is empty, or has no byte that the vocabulary can spell."""
        check_prompt(text)
        token_ids = self.tokenizer.encode(text, parse_special=parse_special)
        if not token_ids:
            raise RequestError(f"the prompt {text!r:.40} has no token: this vocabulary spells none of its bytes")
        return [*self.bos_prefix, *token_ids]


def check_prompt(text: str) -> None:
    """RequestError where a prompt is empty; needs no model, so that a command can say so before it loads one."""
    if not text:
        raise RequestError("the prompt is empty; expected at least one character")


@dataclass(frozen=True)
class _OpenModel:
    """A model on disk whose settings are read; its vocabulary and its weights are read when they are asked for."""

    path: Path
    config: ModelConfig
    read_tokenizer: Callable[[], Tokenizer]
    begins_with_bos: Callable[[], bool]  # whether every prompt starts with the begin token
    read_parameters: Callable[[torch.dtype], dict[str, Tensor]]
    read_chat_template: Callable[[], Any]  # text, where there is one and the file is sound
    read_special_tokens: Callable[[], dict[str, str]]  # what its files call bos_token and eos_token


def load_model(path: str | Path | None = None, dtype: str = "float32", attention: str = "reference") -> LoadedModel:
    """Load a GGUF file or a Hugging Face folder, or the default model where path is None.

    A path ``owner/model`` that is not there is fetched from the Hugging Face hub, where huggingface_hub is installed.
    Nothing is guessed: a missing weight is an error. Raises ModelFileError, ConfigError or TokenizerError, one line each.
    """
    weight_dtype = _find_dtype(dtype)
    find_backend(str(attention))
    model = _open(path)
    with _errors_name(model.path):
        tokenizer = model.read_tokenizer()
        if tokenizer.vocab_size > model.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} tokens but the embedding only {model.config.vocab_size} rows"
            )
        bos = model.config.bos_token_id if model.begins_with_bos() else None
        template = model.read_chat_template()
        special_tokens = model.read_special_tokens()
        decoder = build_decoder(model.config, model.read_parameters(weight_dtype), attention)
    bos_prefix = () if bos is None else (bos,)
    chat_template = template if isinstance(template, str) else None
    return LoadedModel(
        model.config, decoder, tokenizer, model.path, attention, bos_prefix, chat_template, special_tokens
    )


def load_weights(path: str | Path | None = None, dtype: str = "float32") -> tuple[ModelConfig, dict[str, Tensor]]:
    """Settings and parameters alone, of the same paths as `load_model` and with its errors; no tokenizer is needed."""
    weight_dtype = _find_dtype(dtype)
    model = _open(path)
    with _errors_name(model.path):
        return model.config, model.read_parameters(weight_dtype)


def describe_model(path: str | Path | None = None) -> tuple[Path, ModelConfig, int]:
    """(where it is, its settings, its number of parameters), of the same paths as `load_model`; no weight is read."""
    model = _open(path)
    return model.path, model.config, count_parameters(model.config).total


def _find_dtype(dtype: str) -> torch.dtype:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"dtype {brief(dtype)} is not supported; expected one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _open(path: str | Path | None) -> _OpenModel:
    if path is not None and (path == "" or not isinstance(path, str | os.PathLike)):
        given = "an empty path" if path == "" else f"a {type(path).__name__}"
        raise ConfigError(f"model is {given}; expected {EXPECTED}, or None for the default")
    found = find_default_model() if path is None else Path(path)
    if is_hub_name(found):
        found = fetch(found.as_posix())
    if os.path.isdir(found):  # unlike Path.is_dir it never raises
        return _open_folder(found)
    if found.suffix == ".safetensors":
        raise ModelFileError(f"{found}: is the weights alone; give the folder that also holds config.json")
    if not os.path.lexists(found):
        raise ModelFileError(f"{found}: does not exist; give {EXPECTED}, or none for the default model")
    if found.suffix == ".json":
        raise ModelFileError(f"{found}: is a part of a model; give its folder, {str(found.absolute().parent)!r}")
    return _open_gguf(found)


def _open_gguf(path: Path) -> _OpenModel:
    file = read_gguf(path)
    with _errors_name(path):
        config = config_from_gguf(file)
    return _OpenModel(
        path,
        config,
        read_tokenizer=lambda: tokenizer_from_gguf(file.metadata),
        begins_with_bos=lambda: file.metadata.get("tokenizer.ggml.add_bos_token") is True,
        read_parameters=lambda dtype: parameters_from_gguf(file, config, dtype),
        read_chat_template=lambda: file.metadata.get("tokenizer.chat_template"),
        read_special_tokens=dict,  # a GGUF file gives ids, which are the config's
    )


def _open_folder(folder: Path) -> _OpenModel:
    with _errors_name(folder):
        config = read_config(folder)
    return _OpenModel(
        folder,
        config,
        read_tokenizer=lambda: _read_tokenizer(folder),
        begins_with_bos=lambda: begins_with_bos(folder, config),
        read_parameters=lambda dtype: parameters_from_hf(read_tensors(folder), config, dtype),
        read_chat_template=lambda: read_chat_template(folder),
        read_special_tokens=lambda: read_special_tokens(folder),
    )


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise TokenizerError(f"the folder has no {TOKENIZER}; fetch it, too")
    return tokenizer_from_json(path)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Put the model's name in front of an error that does not name its file; an unreadable folder is one of ours."""
    try:
        yield
    except TinyllmError as error:
        if str(error).startswith(str(path)):
            raise
        raise type(error)(f"{path.absolute().name}: {error}") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None


def build_decoder(config: ModelConfig, parameters: dict[str, torch.Tensor], attention: str = "reference") -> Decoder:
    """A decoder that owns the given parameters; every name must be there and none may be left over."""
    with torch.device("meta"):
        decoder = Decoder(config, attention)
    decoder.load_state_dict(parameters, strict=True, assign=True)
    return decoder.requires_grad_(False)
