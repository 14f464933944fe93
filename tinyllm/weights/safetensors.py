"""A safetensors file to named tensors.

A file is: the length of its header (8 bytes, little-endian); the header, a JSON object of tensor name -> dtype, shape
and place; the tensors' bytes. https://github.com/huggingface/safetensors#format

The ``safetensors`` library reads it and is strict: every byte belongs to exactly one tensor, nothing is allocated by a
number that the header only claims, and nothing in it is ever run. What is ours is one line for each way to fail.
"""

import os
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinyllm.errors import ModelFileError

LFS_POINTER = b"version https://git-lfs"
LFS_ADVICE = "this is a Git LFS pointer, not the file itself; run `git lfs pull` or download the file"
PICKLE_STARTS = (
    b"\x80",
    b"PK\x03\x04",
)  # a bare pickle of protocol 2 or later, and the zip file that torch.save writes


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by name, mapped into memory: a weight is read when it is used.

    Raises ModelFileError where the file is missing, broken, cut short or something else.
    """
    path = Path(path)
    _check_start(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping: it has keys() alone
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:  # the last three: from torch
        fault = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise ModelFileError(
            f"{path}: no usable safetensors file ({fault!r:.160}); it is broken or cut short: fetch it again"
        ) from None


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading; ModelFileError where that cannot be."""
    try:
        if path.is_dir():
            raise ModelFileError(f"{path}: is a directory; expected a file")
        if not path.is_file():  # a pipe or a device could hold a reader for ever
            fault = "is no regular file, or a link to nothing" if os.path.lexists(path) else "does not exist"
            raise ModelFileError(f"{path}: {fault}")
        return path.open("rb")
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None


def _check_start(path: Path) -> None:
    """Say in our words what a file is that only bears the name."""
    with open_file(path) as file:
        start = file.read(len(LFS_POINTER))
    if not start:
        raise ModelFileError(f"{path}: the file is empty; fetch it again")
    if start == LFS_POINTER:
        raise ModelFileError(f"{path}: {LFS_ADVICE}")
    if start.startswith(PICKLE_STARTS) and start[4:8] != bytes(4):  # a real header is shorter than 2**32 bytes
        raise ModelFileError(
            f"{path}: this is a pickle, which may run code and is never opened; fetch a safetensors file"
        )
