"""The GGUF reader: what a right file gives, and that no wrong one does anything but raise one clear line."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tinyllm.errors import ModelFileError, TinyllmError
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.gguf_config import config_from_gguf
from tinyllm.weights.names import parameters_from_gguf

DATA = Path(__file__).parents[1] / "data"
BAD = DATA / "bad_gguf"
ROWS = [json.loads(line) for line in (BAD / "manifest.jsonl").read_text().splitlines()]
FILE_ROWS = [row for row in ROWS if row["kind"] == "gguf"]
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def header(tensor_count: int, key_count: int, rest: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensor_count, key_count) + rest


def string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor_info(name: bytes, dims: list[int], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def with_data(head: bytes, byte_count: int, alignment: int = 32) -> bytes:
    return head + bytes(-len(head) % alignment) + bytes(byte_count)


def nested_array(depth: int) -> bytes:
    return header(
        0, 1, string(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)
    )


@pytest.fixture
def write(tmp_path):
    def write_file(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write_file


@pytest.fixture
def bad_file(write):
    """The file of a manifest row; the one that is large is made here."""
    return lambda name: write(nested_array(20000)) if name == "array_nested_20000" else BAD / f"{name}.gguf"


def load(path: Path) -> None:
    """Everything that loading a model does with its file."""
    file = read_gguf(path)
    config = config_from_gguf(file)
    parameters_from_gguf(file, config)


def one_line(error: pytest.ExceptionInfo[TinyllmError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 600
    message.encode()  # a lone surrogate could not be printed
    return message


@pytest.mark.parametrize("row", [row for row in FILE_ROWS if row["expect"] == "error"], ids=lambda row: row["name"])
def test_broken_file_is_one_clear_line(row, bad_file):
    with pytest.raises(TinyllmError) as error:
        load(bad_file(row["name"]))
    one_line(error)


@pytest.mark.parametrize("row", [row for row in FILE_ROWS if row["expect"] == "ok"], ids=lambda row: row["name"])
def test_odd_file_loads(row, bad_file):
    file = read_gguf(bad_file(row["name"]))
    for name, info in file.tensors.items():
        assert file.read(name).shape == info.shape


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("git_lfs_pointer", "Git LFS pointer"),
        ("bad_magic", "GGML file"),
        ("big_endian", "big-endian"),
        ("version_99", "version 99 is not supported; expected 2 or 3"),
        ("three_bytes", "starts with b'GGU'; expected b'GGUF'"),
        ("truncated_in_kv", "metadata key 0 needs 20 bytes but 8 remain"),
        ("n_kv_2e63", "the metadata of 9223372036854775808 keys needs"),
        ("n_tensors_2e40", "the directory of 1099511627776 tensors needs"),
        ("string_length_minus1", "metadata value of 'a' needs 18446744073709551615 bytes but 3 remain"),
        ("array_u32_2e63_no_data", "claims 9223372036854775808 array items"),
        ("array_nested_20000", "array of arrays"),
        ("array_type_99", "value type 99"),
        ("n_dims_2e32", "has 4294967295 dimensions; expected 1 to 4"),
        ("dim_zero", "dimensions [0, 4]; expected positive"),
        ("dims_overflow_wraps_to_16", "ends at byte"),
        ("offset_2e64", "ends at byte"),
        ("offset_not_aligned", "offset 4; expected a multiple of the alignment 32"),
        ("alignment_3", "general.alignment is 3; expected a power of two"),
        ("type_9999", "type 9999 (unknown); supported: F32, F16, Q4_0"),
        ("type_removed_4", "type 4 (Q4_2, removed from the format)"),
        ("duplicate_tensor", "tensor 'a' occurs twice"),
        ("duplicate_key", "key 'x' occurs twice"),
        ("no_data_section", "the file has 128; the file is broken or cut short"),
    ],
)
def test_message_names_the_fault(name, words, bad_file):
    with pytest.raises(ModelFileError) as error:
        read_gguf(bad_file(name))
    assert words in one_line(error)


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
def test_hostile_headers_under_a_time_and_a_memory_limit(write):
    """One process reads every broken file with 10 s of CPU time and 256 MiB more address space than it starts with."""
    paths = [str(write(nested_array(20000))), *map(str, sorted(BAD.glob("*.gguf")))]
    program = """
import resource, sys
import torch
from tinyllm.errors import TinyllmError
from tinyllm.weights.gguf import read_gguf
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
resource.setrlimit(resource.RLIMIT_CPU, (used + 10, used + 10))
for path in sys.argv[1:]:
    try:
        read_gguf(path)
    except TinyllmError as error:
        print("refused")
    else:
        print("loaded")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert len(done.stdout.split()) == len(paths)


def test_every_prefix_of_a_file_is_refused(write):
    whole = (BAD / "ok_version2.gguf").read_bytes()
    for length in range(len(whole)):
        with pytest.raises(ModelFileError):
            read_gguf(write(whole[:length]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header(1, 0, tensor_info(b"a", [33], 2, 0)), "the first in 32s"),
        (header(1, 0, tensor_info(b"a", [32], 39, 0)), "type 39 (MXFP4); supported"),
        (header(2, 0, tensor_info(b"a", [16], 0, 0) + tensor_info(b"b", [8], 0, 32)), "'a' and 'b' overlap"),
        (header(1, 0, tensor_info(b"n" * 2000, [8], 0, 0)), "claims 2000 bytes; expected at most 1024"),
        (header(0, 1, string(b"a") + struct.pack("<IIQQ", 9, 8, 2, 0)), "needs 16 bytes but 8 remain"),
        (header(0, 1, string(b"a") + struct.pack("<IIQQ", 9, 8, 1, 5)), "needs 13 bytes but 8 remain"),
        (header(0, 1, string(b"a") + struct.pack("<IIQQQ", 9, 8, 2, 6, 0)), "needs 8 bytes but 2 remain"),
        (header(0, 1, string(b"a") + struct.pack("<IIQ", 9, 4, 2**24)), "needs 67108864 bytes but 0 remain"),
        (header(0, 1, string(b"general.alignment") + struct.pack("<I", 8) + string(b"x" * 5000)), "power of two"),
        (header(0, 0, version=1), "version 1 is not supported"),
        (header(1, 0, tensor_info(b"new\nline\xff", [0], 0, 0)), r"tensor 'new\nline\udcff' has dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_broken_headers(data, words, write):
    with pytest.raises(ModelFileError) as error:
        read_gguf(write(with_data(data, 128) if "remain" not in words else data))
    assert words in one_line(error)


def test_unreadable_paths(tmp_path, monkeypatch):
    empty = tmp_path / "empty.gguf"
    empty.touch()
    for path, words in [
        (tmp_path, "is a directory"),
        (tmp_path / "none.gguf", "does not exist"),
        (Path("/dev/zero"), "no regular file"),
        (empty, "is empty"),
        ("x" * 5000, "File name too long"),
    ]:
        with pytest.raises(ModelFileError, match=words):
            read_gguf(path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything, so a mode of 000 would prove nothing
    with pytest.raises(ModelFileError, match="cannot be read: Permission denied"):
        read_gguf(empty)


def test_every_value_type(tmp_path):
    values = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "float32": 0.5, "uint64": 2**64 - 1, "int64": -(2**63), "float64": 0.1, "bool": True,
        "string": "Grüße \U0001f600",
    }  # fmt: skip
    arrays = {"ints": [1, -2, 3], "floats": [0.5, -1.25], "strings": ["", "a", "Ġthe"], "bools": [True, False, True]}
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    for key, items in arrays.items():
        writer.add_array(key, items)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = read_gguf(path)
    assert file.metadata == {"general.architecture": "llama", **values, **arrays}
    assert [type(file.metadata[key]) for key in ("bool", "uint8", "float32")] == [bool, int, float]


@pytest.mark.parametrize("name", ["llama_f32", "llama_q4_1", "llama_bf16"])
def test_agrees_with_the_gguf_package(name):
    file, theirs = read_gguf(DATA / "gguf" / f"{name}.gguf"), gguf.GGUFReader(DATA / "gguf" / f"{name}.gguf")
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert np.array_equal(file.read(tensor.name).numpy(), gguf.dequantize(tensor.data, tensor.tensor_type))


def test_bytes_that_are_no_utf8_survive():
    file = read_gguf(BAD / "ok_invalid_utf8_value.gguf")
    odd = [value for value in file.metadata.values() if isinstance(value, str) and "\udcff" in value]
    assert odd
    assert b"\xff" in odd[0].encode("utf-8", "surrogateescape")


def test_read_into_a_slice_of_a_larger_tensor():
    file = read_gguf(DATA / "gguf" / "llama_q8_0.gguf")
    whole = torch.zeros(100, 64)
    assert file.read("blk.0.attn_k.weight", out=whole[10:42]).data_ptr() == whole[10:].data_ptr()
    assert torch.equal(whole[10:42], file.read("blk.0.attn_k.weight"))
    assert not whole[:10].any()
    assert not whole[42:].any()
    with pytest.raises(ValueError, match="is \\[32, 64\\]"):
        file.read("blk.0.attn_k.weight", out=whole)


def test_reading_gives_memory_of_its_own():
    file = read_gguf(DATA / "gguf" / "llama_f32.gguf")
    before = file.read("output_norm.weight")
    file.read("output_norm.weight").zero_()
    assert torch.equal(file.read("output_norm.weight"), before)
    assert before.any()


@given(st.binary(max_size=200), st.booleans())
@QUICK
def test_random_bytes_are_refused_or_read(write, noise, with_magic):
    path = write(header(1, 1)[:8] + noise if with_magic else noise)
    try:
        load(path)
    except TinyllmError as error:
        assert "\n" not in str(error)


VALID = (DATA / "gguf" / "llama_q4_0.gguf").read_bytes()
HEADER_BYTES = min(info.start for info in read_gguf(DATA / "gguf" / "llama_q4_0.gguf").tensors.values())
NUMBERS = st.sampled_from([0, 1, 2, 3, 8, 9, 31, 255, 2**16, 2**31, 2**32 - 1])


@example([], None)
@given(
    st.lists(st.tuples(st.integers(0, HEADER_BYTES - 5), NUMBERS), max_size=3), st.none() | st.integers(0, len(VALID))
)
@QUICK
def test_random_edits_are_refused_or_load(write, edits, length):
    data = bytearray(VALID)
    for position, value in edits:
        data[position : position + 4] = value.to_bytes(4, "little")
    try:
        load(write(bytes(data[:length])))
    except TinyllmError as error:
        assert "\n" not in str(error)
