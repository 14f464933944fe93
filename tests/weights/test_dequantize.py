"""Dequantisation agrees bit for bit with goldens that the gguf package made, and with a plain loop."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tinyllm.weights.dequantize import GGML_TYPES, dequantize

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "dequant_golden.npz")
TYPE_NAMES = [ggml_type.name for ggml_type in GGML_TYPES.values()]


def same_bits(ours: torch.Tensor, expected: np.ndarray) -> bool:
    return np.array_equal(ours.numpy().view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("type_name", [name for name in TYPE_NAMES if name != "F32"])
def test_golden(type_name):
    raw, expected = GOLDEN[f"{type_name}_raw"], GOLDEN[type_name]
    out = dequantize(torch.from_numpy(raw).flatten(), type_name, torch.empty(expected.shape))
    assert same_bits(out, expected)


@pytest.mark.parametrize("type_name", [name for name in TYPE_NAMES if name != "F32"])
def test_every_byte_pattern_agrees_with_the_gguf_package(type_name):
    """Random bytes, so that scales are also negative, subnormal, infinite and NaN."""
    ggml_type = next(t for t in GGML_TYPES.values() if t.name == type_name)
    raw = np.random.default_rng(5).integers(0, 256, (256, ggml_type.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])
        out = dequantize(torch.from_numpy(raw).flatten(), type_name, torch.empty(expected.shape))
    assert np.array_equal(out.numpy(), expected, equal_nan=True)


def test_float32_keeps_its_bits():
    values = torch.tensor([0.0, -0.0, 1.5, float("inf"), float("-inf"), 1e-45])
    out = dequantize(values.view(torch.uint8), "F32", torch.empty(2, 3))
    assert same_bits(out.flatten(), values.numpy())


@pytest.mark.parametrize(
    ("type_name", "header", "expected"),
    [
        ("Q4_0", struct.pack("<e", 0.5), lambda low, fifth: 0.5 * (low - 8)),
        ("Q4_1", struct.pack("<ee", 0.5, -3.0), lambda low, fifth: 0.5 * low - 3.0),
        ("Q5_0", struct.pack("<eI", 0.5, 0x80000005), lambda low, fifth: 0.5 * (low + 16 * fifth - 16)),
        ("Q5_1", struct.pack("<eeI", 0.5, -3.0, 0x80000005), lambda low, fifth: 0.5 * (low + 16 * fifth) - 3.0),
    ],
)
def test_one_block_by_hand(type_name, header, expected):
    """Weight j is in the low half of byte j, weight j + 16 in its high half; fifth bits 0, 2 and 31 are set."""
    low = [(3 * j + 1) % 16 for j in range(32)]
    packed = bytes(low[j] | low[j + 16] << 4 for j in range(16))
    raw = torch.frombuffer(bytearray(header + packed), dtype=torch.uint8)
    out = dequantize(raw, type_name, torch.empty(32))
    assert out.tolist() == [expected(low[j], int(j in (0, 2, 31))) for j in range(32)]


@pytest.mark.parametrize("ggml_type", GGML_TYPES.items(), ids=lambda item: item[1].name)
def test_block_sizes_are_those_of_the_gguf_package(ggml_type):
    number, ours = ggml_type
    theirs = gguf.GGMLQuantizationType(number)
    assert (ours.name, (ours.block_values, ours.block_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])
