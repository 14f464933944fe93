"""A Hugging Face model folder: what its JSON files say, and its tensors by name.

A folder holds ``config.json``; perhaps ``generation_config.json``; and its weights in ``model.safetensors``, or in
several such files (shards) with ``model.safetensors.index.json``, whose ``weight_map`` says for every tensor which
shard has it. Nothing else is opened, above all no code (``*.py``, ``auto_map``) and no pickle (``*.bin``, ``*.pt``):
both could run anything. A folder may come from anyone, so a shard's name must stay inside it. Links are followed: the
Hugging Face cache is made of them.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from os.path import lexists  # a link to nothing is there, too: reading it says what is wrong
from pathlib import Path, PureWindowsPath
from typing import Any

from torch import Tensor

from tinyllm.config import ModelConfig, config_from_hf
from tinyllm.errors import ConfigError, ModelFileError, brief
from tinyllm.tokenizer.tokenizer_json import json_fault
from tinyllm.weights.safetensors import LFS_ADVICE, LFS_POINTER, open_file, read_safetensors

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG_BYTES = 2**20
MAX_INDEX_BYTES = 2**24  # an index of 100,000 tensors has 10 MB, a tokenizer_config.json at most 2
MAX_TOKENIZER_BYTES = 2**26  # the largest tokenizer.json have 33 MB
MAX_SHARD_NAME = 256
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_config(folder: Path) -> ModelConfig:
    """The settings of the model in `folder`. The end tokens of its generation_config.json, if any, join the config's.

    Raises ModelFileError for a file that is no JSON object, ConfigError for settings that cannot work.
    """
    config = config_from_hf(read_json(folder / CONFIG), folder.absolute().name)
    if not lexists(folder / GENERATION_CONFIG):
        return config
    end = read_json(folder / GENERATION_CONFIG).get("eos_token_id")
    end_ids = end if isinstance(end, list) else [] if end is None else [end]
    more = [token_id for token_id in end_ids if token_id not in config.eos_token_ids]
    try:
        return replace(config, eos_token_ids=(*config.eos_token_ids, *more))
    except ConfigError as error:
        raise ConfigError(f"{GENERATION_CONFIG}: {error}") from None


def begins_with_bos(folder: Path, config: ModelConfig) -> bool:
    """Whether the tokenizer's files say that every text starts with the config's begin token.

    tokenizer_config.json says so by ``add_bos_token``; where it is silent, the template that tokenizer.json puts around
    one text does, if its first piece is that token.
    """
    if lexists(folder / TOKENIZER_CONFIG):
        said = read_json(folder / TOKENIZER_CONFIG, MAX_INDEX_BYTES).get("add_bos_token")
        if said is not None:
            return said is True
    if not lexists(folder / TOKENIZER):
        return False
    post = read_json(folder / TOKENIZER, MAX_TOKENIZER_BYTES).get("post_processor")
    processors = _at(post, "processors")
    for step in [post, *(processors if isinstance(processors, list) else [])]:
        first = _at(step, "single", 0, "SpecialToken", "id")
        ids = _at(step, "special_tokens", first, "ids")
        if first is not None and ids == [config.bos_token_id]:
            return True
    return False


def read_chat_template(folder: Path) -> str | None:
    """The Jinja source of the model's chat template: chat_template.jinja, or what tokenizer_config.json holds; None
    where there is none. Of several named templates it is the one named ``default``.
    """
    if lexists(folder / CHAT_TEMPLATE):
        return _read_text(folder / CHAT_TEMPLATE, MAX_CONFIG_BYTES)
    if not lexists(folder / TOKENIZER_CONFIG):
        return None
    template = read_json(folder / TOKENIZER_CONFIG, MAX_INDEX_BYTES).get("chat_template")
    if isinstance(template, list):
        template = next((_at(item, "template") for item in template if _at(item, "name") == "default"), None)
    return template if isinstance(template, str) else None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """bos_token and eos_token by the texts that tokenizer_config.json gives them, each where it gives one.

    They may differ from the config's ids: a chat model's turns often end with another token than its texts.
    """
    if not lexists(folder / TOKENIZER_CONFIG):
        return {}
    values = read_json(folder / TOKENIZER_CONFIG, MAX_INDEX_BYTES)
    said = {name: values.get(name) for name in ("bos_token", "eos_token")}
    texts = {name: _at(token, "content") if isinstance(token, dict) else token for name, token in said.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _at(value: Any, *path: Any) -> Any:
    """What lies at a path of keys and places in a JSON value, or None where it does not lead that far."""
    for step in path:
        if isinstance(value, dict) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file, with or without a byte-order mark; ModelFileError where there is none."""
    text = _read_text(path, max_bytes)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: {json_fault(error)}") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: holds a {type(values).__name__}; expected a JSON object")
    return values


def _read_text(path: Path, max_bytes: int) -> str:
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ModelFileError(f"{path}: is larger than {max_bytes} bytes; expected less")
    if data.startswith(LFS_POINTER):
        raise ModelFileError(f"{path}: {LFS_ADVICE}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ModelFileError(f"{path}: is no UTF-8 text; fetch it again") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model in `folder`, mapped into memory; ModelFileError for weights that are missing or broken.

    Where there is an index, it and the shards must agree about every tensor.
    """
    if lexists(folder / WEIGHTS):
        return read_safetensors(folder / WEIGHTS)
    if lexists(folder / INDEX):
        return _read_shards(folder)
    raise ModelFileError(f"{folder}: has no {WEIGHTS} and no {INDEX}{_what_else(folder)}")


def _what_else(folder: Path) -> str:
    """A hint for a folder whose weights have another format."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in files:
        if name.endswith(".gguf"):
            return f"; give the path of its GGUF file instead, such as {name!r:.100}"
    for name in files:
        if name.endswith(PICKLES):
            return (
                f"; {name!r:.100} is a pickle, which may run code and is never opened: fetch the model as safetensors"
            )
    return "; expected the weights of a model"


def _read_shards(folder: Path) -> dict[str, Tensor]:
    names_in = _shards_of_index(folder / INDEX)
    tensors: dict[str, Tensor] = {}
    for shard, names in names_in.items():
        found = read_safetensors(folder / shard)
        for name in names:
            if name not in found:
                raise ModelFileError(
                    f"{folder / INDEX}: tensor {name!r:.100} is not in {shard!r:.100}, where it should be"
                )
        for name in found:
            if name not in names:
                raise ModelFileError(
                    f"{folder / INDEX}: tensor {name!r:.100} of {shard!r:.100} is not listed for that file"
                )
        tensors |= found
    return tensors


def _shards_of_index(path: Path) -> Mapping[str, set[str]]:
    """Shard -> the tensors that the index promises in it, shard names checked."""
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(
            f"{path}: weight_map is {brief(weight_map):.100}; expected an object: tensor name -> file name"
        )
    shards: dict[str, set[str]] = defaultdict(set)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise ModelFileError(
                f"{path}: weight_map places tensor {name!r:.100} in {brief(shard):.100}; expected a .safetensors file of this folder"
            )
        shards[shard].add(name)
    return shards


def _stays_inside(shard: str) -> bool:
    """Whether a shard's name is a safetensors file at or below its folder, under Windows' rules as well as POSIX's.

    >>> [_stays_inside(name) for name in ("a.safetensors", "sub/a.safetensors", "../a.safetensors", "/a.safetensors")]
    [True, True, False, False]
    """
    path = PureWindowsPath(shard)
    is_name = shard.endswith(".safetensors") and shard.isprintable() and len(shard) < MAX_SHARD_NAME
    return is_name and not path.anchor and ".." not in path.parts
