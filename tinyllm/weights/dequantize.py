"""Quantised weights to float32: the block types of llama.cpp's ggml library.

A block is a short run of neighbouring weights of one row (32, or 256 for the K types) that shares one scale, so a
weight costs 4 to 8 bits and a little for the scale. In bytes, from the front (d and m are float16, 2 bytes each):

======  =========================  ==================================  =========================
type    block                      q, the stored whole number          weight
======  =========================  ==================================  =========================
Q8_0    d, 32 signed bytes         -128 to 127                         d * q
Q4_0    d, 16 bytes                0 to 15                             d * (q - 8)
Q4_1    d, m, 16 bytes             0 to 15                             d * q + m
Q5_0    d, 4 bytes, 16 bytes       0 to 31                             d * (q - 16)
Q5_1    d, m, 4 bytes, 16 bytes    0 to 31                             d * q + m
======  =========================  ==================================  =========================

What surprises: the 16 bytes hold two 4-bit numbers each, but not two neighbours. Byte j keeps weight j in its low half
and weight j + 16 in its high half. In the 5-bit types bit j of the 4 bytes is the fifth (highest) bit of weight j.

The K types (Q2_K to Q6_K) and IQ4_NL, IQ4_XS nest scales within scales or look values up in a table; their arithmetic
is left to the ``gguf`` package, which is imported only when such a tensor is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GGMLType:
    """How ggml stores a tensor: `block_bytes` bytes for every `block_values` weights of a row."""

    name: str
    block_values: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    20: GGMLType("IQ4_NL", 32, 18),
    23: GGMLType("IQ4_XS", 256, 136),
    30: GGMLType("BF16", 1, 2),
}
"""The types we read, by the number that a GGUF file gives them."""

_BY_NAME = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}


def dequantize(raw: Tensor, type_name: str, out: Tensor) -> Tensor:
    """Write the float32 weights that the bytes `raw` (uint8, one axis) store as `type_name` into `out`; return `out`.

    `out` is float32, contiguous, and holds exactly as many weights as `raw` has blocks for, in any shape. The values
    are those of llama.cpp bit for bit: one float32 multiplication and at most one addition each, never fused.

    >>> raw = torch.tensor([0, 0x3C, 255, 1, *[2] * 30], dtype=torch.uint8)  # d = 1.0, then q = -1, 1, 2, 2, ...
    >>> dequantize(raw, "Q8_0", torch.empty(32))[:4].tolist()
    [-1.0, 1.0, 2.0, 2.0]
    """
    ggml_type = _BY_NAME[type_name]
    blocks = raw.view(-1, ggml_type.block_bytes)
    values = out.view(-1, ggml_type.block_values)
    if type_name in _DEQUANTIZERS:
        _DEQUANTIZERS[type_name](blocks, values)
    else:
        _by_gguf_package(blocks, type_name, values)
    return out


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as a float32 column."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: Tensor, values: Tensor) -> None:
    """Spread 16 bytes a block over 32 values: the low halves first, then the high halves."""
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4


def _add_fifth_bits(packed: Tensor, values: Tensor) -> None:
    """Add 16 to value j of a block where bit j of its 4 bytes is set."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    values.add_(bits.view(-1, 32), alpha=16)


def _f32(blocks: Tensor, values: Tensor) -> None:
    values.copy_(blocks.view(torch.float32))


def _f16(blocks: Tensor, values: Tensor) -> None:
    values.copy_(blocks.view(torch.float16))


def _bf16(blocks: Tensor, values: Tensor) -> None:
    values.copy_(blocks.view(torch.bfloat16))


def _q8_0(blocks: Tensor, values: Tensor) -> None:
    values.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 2:], values)
    values.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 4:], values)
    values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 6:], values)
    _add_fifth_bits(blocks[:, 2:6], values)
    values.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, values: Tensor) -> None:
    _nibbles(blocks[:, 8:], values)
    _add_fifth_bits(blocks[:, 4:8], values)
    values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


_DEQUANTIZERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
}


def _by_gguf_package(blocks: Tensor, type_name: str, values: Tensor) -> None:
    import gguf  # noqa: PLC0415  here, because the import takes longer than reading a small model

    quantization = gguf.GGMLQuantizationType[type_name]
    values.copy_(torch.from_numpy(gguf.dequantize(blocks.numpy(), quantization)))
