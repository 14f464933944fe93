"""A strict reader of GGUF files, the single-file model format of llama.cpp.

A file is: magic, version, two counts; the metadata (key, type, value); one entry per tensor (name, dimensions, type,
offset); padding up to the alignment; the tensors' bytes. All numbers are little-endian; a string is its length
(8 bytes) and its bytes. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A file may come from anyone, so no number in it is believed before it is compared with the bytes that really remain:
nothing is allocated and nothing loops by a count that the file only claims.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tinyllm.errors import ModelFileError
from tinyllm.weights.dequantize import GGML_TYPES, dequantize
from tinyllm.weights.safetensors import LFS_ADVICE, LFS_POINTER

MAGIC = b"GGUF"
OLDER_MAGICS = (b"GGML", b"lmgg", b"fmgg", b"tjgg")  # GGML, GGMF and GGJT files, before August 2023
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
MAX_DIMS = 4
MAX_NAME_BYTES = 1024  # of a key or a tensor's name; real ones stay below 64
MAX_ARRAY_LENGTH = 2**24  # the largest vocabularies have 2**18 tokens
SMALLEST_KEY_VALUE = 8 + 4 + 1  # length of the key, type, a one-byte value
SMALLEST_TENSOR_INFO = 8 + 4 + 8 + 4 + 8  # length of the name, number of dimensions, one dimension, type, offset

STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type -> letter of the struct module: integers of 1, 2 and 4 bytes, float32, bool, integers of 8, float64."""
UNREADABLE_TYPES = {
    4: "Q4_2, removed from the format", 5: "Q4_3, removed from the format", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in torch's order, outermost first: the file stores it the other way round."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int  # of its bytes in the file
    end: int


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file: its metadata and tensor directory, read; its weights, mapped and read on demand.

    Strings in `metadata` that are no UTF-8 keep their bytes as lone surrogates (Python's ``surrogateescape``): token
    lists can hold such pieces. Arrays are lists.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap = field(repr=False)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """The tensor `name` as float32 of its `shape`, dequantised; written into `out` where given.

        `out` must be float32, contiguous, and of that shape: a slice of rows of a larger tensor is.
        """
        info = self.tensors[name]
        values = torch.empty(info.shape) if out is None else out
        if values.shape != info.shape:
            raise ValueError(f"out is {list(values.shape)}; tensor {name!r:.100} is {list(info.shape)}")
        raw = torch.frombuffer(self.data, dtype=torch.uint8, count=info.end - info.start, offset=info.start)
        return dequantize(raw, info.type_name, values)


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a GGUF file, version 2 or 3, and map its weights; ModelFileError says what is wrong."""
    path = Path(path)
    data = _map(path)
    header = _Header(data, path)
    version, tensor_count, key_count = header.preamble()
    metadata = _metadata(header, key_count)
    alignment = _alignment(header, metadata)
    return GGUFFile(path, version, metadata, _tensors(header, tensor_count, alignment), data)


def _map(path: Path) -> mmap.mmap:
    try:
        if not path.is_file():
            fault = "is a directory; expected a .gguf file" if path.is_dir() else "does not exist or is no regular file"
            raise ModelFileError(f"{path}: {fault}")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path}: the file is empty; fetch it again")
            # A private copy-on-write mapping: torch warns about a buffer that it could not write to.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None


class _Header:
    """A cursor over the header. Every read first checks that the bytes are there."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.position = 0

    def fail(self, fault: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {fault}")

    def need(self, byte_count: int, what: str) -> None:
        remaining = self.size - self.position
        if byte_count > remaining:
            self.fail(
                f"{what} needs {byte_count} bytes but {remaining} remain at byte {self.position}; "
                "the file is broken or cut short: fetch it again"
            )

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def string(self, what: str, max_bytes: int | None = None) -> str:
        length = self.number("Q", what)
        if max_bytes is not None and length > max_bytes:
            self.fail(f"{what} claims {length} bytes; expected at most {max_bytes}")
        self.need(length, what)
        start, self.position = self.position, self.position + length
        return self.data[start : self.position].decode("utf-8", "surrogateescape")

    def value(self, what: str) -> Any:
        value_type = self.number("I", what)
        if value_type == ARRAY:
            return self.array(what)
        if value_type == STRING:
            return self.string(what)
        return self.number(self.code(value_type, what), what)

    def code(self, value_type: int, what: str) -> str:
        if value_type not in NUMBERS:
            self.fail(f"{what} has value type {value_type}; expected 0 to 12")
        return NUMBERS[value_type]

    def array(self, what: str) -> list[Any]:
        item_type, length = self.number("I", what), self.number("Q", what)
        if item_type == ARRAY:
            self.fail(f"{what} is an array of arrays, which no model uses; expected numbers or strings")
        if length > MAX_ARRAY_LENGTH:
            self.fail(f"{what} claims {length} array items; expected at most {MAX_ARRAY_LENGTH}")
        if item_type == STRING:
            return self.strings(length, what)
        layout = f"<{length}{self.code(item_type, what)}"
        self.need(struct.calcsize(layout), what)
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return list(values)

    def strings(self, count: int, what: str) -> list[str]:
        """`count` times what `string` does, in one loop: a vocabulary and its merges are 100,000 strings."""
        self.need(8 * count, what)
        data, position, size = self.data, self.position, self.size
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            end = start + read_length(data, position)[0] if start <= size else start
            if end > size:
                self.position = position
                self.need(end - position, what)
            strings.append(data[start:end].decode("utf-8", "surrogateescape"))
            position = end
        self.position = position
        return strings

    def preamble(self) -> tuple[int, int, int]:
        """Version and the claimed numbers of tensors and of metadata keys."""
        start = self.data[:32]
        if start.startswith(LFS_POINTER):
            self.fail(LFS_ADVICE)
        if start[:4] in OLDER_MAGICS:
            self.fail("this is a GGML file, the format before GGUF; convert the model again or fetch a GGUF of it")
        if start[:4] != MAGIC:
            self.fail(f"this is no GGUF file: it starts with {start[:4]!r}; expected {MAGIC!r}")
        self.position = 4
        version = self.number("I", "the version")
        if version and version % 2**16 == 0:
            self.fail("this is a big-endian GGUF file; expected a little-endian one")
        if version not in (2, 3):
            self.fail(f"GGUF version {version} is not supported; expected 2 or 3")
        return version, self.number("Q", "the tensor count"), self.number("Q", "the metadata count")


def _metadata(header: _Header, count: int) -> dict[str, Any]:
    header.need(count * SMALLEST_KEY_VALUE, f"the metadata of {count} keys")
    metadata: dict[str, Any] = {}
    for i in range(count):
        key = header.string(f"metadata key {i}", MAX_NAME_BYTES)
        if key in metadata:
            header.fail(f"metadata key {key!r:.100} occurs twice")
        metadata[key] = header.value(f"metadata value of {key!r:.100}")
    return metadata


def _alignment(header: _Header, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    # The specification asks for a multiple of 8, which also lets float32 be read in place.
    allowed = [2**power for power in range(3, MAX_ALIGNMENT.bit_length())]
    if alignment not in allowed:
        header.fail(f"general.alignment is {alignment!r:.60}; expected a power of two from 8 to {MAX_ALIGNMENT}")
    return int(alignment)


def _tensors(header: _Header, count: int, alignment: int) -> dict[str, TensorInfo]:
    header.need(count * SMALLEST_TENSOR_INFO, f"the directory of {count} tensors")
    entries = [_tensor_entry(header, i, alignment) for i in range(count)]
    data_start = -(-header.position // alignment) * alignment  # rounded up; the offsets count from here
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        info = replace(entry, start=data_start + entry.start, end=data_start + entry.end)
        if info.name in tensors:
            header.fail(f"tensor {info.name!r:.100} occurs twice")
        if info.end > header.size:
            header.fail(
                f"tensor {info.name!r:.100} {list(info.shape)} {info.type_name} ends at byte {info.end} but the file "
                f"has {header.size}; the file is broken or cut short: fetch it again"
            )
        tensors[info.name] = info
    for before, after in pairwise(sorted(tensors.values(), key=lambda info: info.start)):
        if before.end > after.start:
            header.fail(f"tensors {before.name!r:.100} and {after.name!r:.100} overlap")
    return tensors


def _tensor_entry(header: _Header, i: int, alignment: int) -> TensorInfo:
    """One entry of the directory, with start and end counted from the start of the data."""
    name = header.string(f"the name of tensor {i}", MAX_NAME_BYTES)
    what = f"tensor {name!r:.100}"
    dim_count = header.number("I", what)
    if not 1 <= dim_count <= MAX_DIMS:
        header.fail(f"{what} has {dim_count} dimensions; expected 1 to {MAX_DIMS}")
    dims = [header.number("Q", what) for _ in range(dim_count)]
    type_id, offset = header.number("I", what), header.number("Q", what)
    if type_id not in GGML_TYPES:
        supported = ", ".join(ggml_type.name for ggml_type in GGML_TYPES.values())
        header.fail(f"{what} has type {type_id} ({UNREADABLE_TYPES.get(type_id, 'unknown')}); supported: {supported}")
    ggml_type = GGML_TYPES[type_id]
    if 0 in dims or dims[0] % ggml_type.block_values:
        header.fail(f"{what} has dimensions {dims}; expected positive ones, the first in {ggml_type.block_values}s")
    if offset % alignment:
        header.fail(f"{what} has offset {offset}; expected a multiple of the alignment {alignment}")
    byte_count = math.prod(dims) // ggml_type.block_values * ggml_type.block_bytes
    return TensorInfo(name, tuple(reversed(dims)), ggml_type.name, offset, offset + byte_count)
