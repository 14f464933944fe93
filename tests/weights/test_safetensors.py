"""Safetensors files: right ones give their tensors without a copy, and every wrong one is one clear line."""

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tinyllm.errors import ModelFileError
from tinyllm.weights.safetensors import read_safetensors

DATA = Path(__file__).parents[1] / "data"
BAD = DATA / "bad_safetensors"
ROWS = [json.loads(line) for line in (BAD / "manifest.jsonl").read_text().splitlines()]
VALUES = {
    "ok_one": [0.0] * 16,
    "ok_metadata": [0.0] * 16,
    "ok_scalar": [1.0],
    "ok_zero_size": [],
    "ok_bf16": [1.0, -3.0],
}


def file_of(dtype: str, shape: list[int], byte_count: int, name: str = "a") -> bytes:
    """A file with one tensor of zeros."""
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, byte_count]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(byte_count)


def test_the_manifest_and_the_folder_agree():
    assert {row["name"] for row in ROWS} == {path.stem for path in BAD.glob("*.safetensors")}
    assert {row["name"] for row in ROWS if row["expect"] == "ok"} == set(VALUES)


@pytest.mark.parametrize("row", [row for row in ROWS if row["expect"] == "error"], ids=lambda row: row["name"])
def test_broken_file_is_one_clear_line(row, one_line):
    with pytest.raises(ModelFileError) as error:
        read_safetensors(BAD / f"{row['name']}.safetensors")
    assert f"{row['name']}.safetensors: " in one_line(error.value)


@pytest.mark.parametrize("name", VALUES)
def test_odd_file_loads(name):
    (tensor,) = read_safetensors(BAD / f"{name}.safetensors").values()
    assert tensor.flatten()[: len(VALUES[name])].tolist() == VALUES[name]
    assert tensor.dtype == (torch.bfloat16 if name == "ok_bf16" else torch.float32)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("git_lfs_pointer", "this is a Git LFS pointer, not the file itself; run `git lfs pull` or download the file"),
        ("pickle_renamed", "this is a pickle, which may run code and is never opened; fetch a safetensors file"),
        ("empty_file", "the file is empty; fetch it again"),
        ("header_2e63", "('header too large'); it is broken or cut short: fetch it again"),
        ("truncated_data", "'incomplete metadata, file not fully covered'"),
        ("duplicate_key", "'invalid offset for tensor `a`'"),
    ],
)
def test_message_names_the_fault(name, words):
    with pytest.raises(ModelFileError) as error:
        read_safetensors(BAD / f"{name}.safetensors")
    assert words in str(error.value)


def test_tensors_are_those_of_the_library():
    path = DATA / "tiny" / "llama_gqa" / "model.safetensors"
    ours, theirs = read_safetensors(path), load_file(path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_every_prefix_of_a_file_is_refused(tmp_path):
    whole = (BAD / "ok_metadata.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            read_safetensors(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ModelFileError, match="not fully covered"):
        read_safetensors(path)


@pytest.mark.parametrize(
    "data",
    [
        file_of("F6_E2M3", [4], 3),
        file_of("F32", [0, 2**63], 0),
        file_of("nonsense", [1], 4),
        file_of("F32", [2**32, 2**32], 4),
        file_of("F32", [2], 8, name="new\nline\x1b"),
    ],
    ids=["six bits", "2**63", "unknown dtype", "overflow", "odd name"],
)
def test_more_odd_headers(data, tmp_path, one_line):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    try:
        read_safetensors(path)
    except ModelFileError as error:
        one_line(error)
    else:
        assert b"new" in data
    path.write_bytes(data[:-1])
    with pytest.raises(ModelFileError) as cut:
        read_safetensors(path)
    one_line(cut.value)


def test_unreadable_paths(tmp_path, monkeypatch):
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "full").write_bytes(b"x")
    for path, words in [
        (tmp_path, "is a directory; expected a file"),
        (tmp_path / "none", "none: does not exist"),
        (tmp_path / "dangling", "is no regular file, or a link to nothing"),
        (tmp_path / "pipe", "is no regular file, or a link to nothing"),
        ("x" * 5000, "File name too long"),
        (Path("/dev/zero"), "no regular file"),
    ]:
        with pytest.raises(ModelFileError, match=words):
            read_safetensors(path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match="cannot be read: Permission denied"):
        read_safetensors(tmp_path / "full")


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process")
def test_a_tensor_is_mapped_not_copied(tmp_path):
    """Memory of one's own (anonymous pages) does not grow with the file."""

    def own_memory() -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("RssAnon"))

    save_file({"a": torch.zeros(2**24)}, tmp_path / "model.safetensors")
    before = own_memory()
    tensor = read_safetensors(tmp_path / "model.safetensors")["a"]
    assert float(tensor.sum()) == 0.0
    assert own_memory() - before < 2**14, "of 65536 KiB in the file"
    assert np.array_equal(tensor[:3].numpy(), [0, 0, 0])
