"""Values on request: what a tensor holds, told in a few numbers over all of it, and one row of it.

Everything is measured at once, while the tensor is there; the tensor itself is never kept.
"""

import math
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from tinyllm.trace.record import Stats

NUM_LARGEST = 5
MAX_ROW = 64
PIECE = 2**20  # values that are converted to float64 at a time

Wanted = str | Collection[str] | Callable[[Collection[str]], bool]


def name_matcher(wanted: Wanted | None) -> Callable[[Collection[str]], bool] | None:
    """Whether any of a call's names is wanted, or fits a pattern such as ``*_proj``; of ``rope q`` counts the first word.

    >>> matches = name_matcher("attend, *_proj")
    >>> matches(["qkv_proj", "Linear.forward"]), matches(["rms_norm"])
    (True, False)
    """
    if wanted is None or callable(wanted):
        return wanted
    names = wanted.split(",") if isinstance(wanted, str) else wanted
    patterns = [name.split()[0] for name in names if name.strip()]
    return lambda known: any(fnmatchcase(name, pattern) for name in known for pattern in patterns)


def measure(tensor: Tensor) -> Stats | None:
    """The numbers of one tensor, over all its values; None where there are none, as on the meta device.

    All are those of the finite values; those that are not, such as a mask's -inf, are counted beside them.
    """
    if tensor.is_meta or tensor.numel() == 0:
        return None
    flat, shape = tensor.detach().reshape(-1), tuple(tensor.shape)
    total = squares = 0.0
    minimum, maximum, num_finite = math.inf, -math.inf, 0
    largest: list[tuple[float, int]] = []  # (minus the value, place): in order, the largest first, of equals any
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE].double()
        is_finite = piece.isfinite()
        finite = piece if bool(is_finite.all()) else piece[is_finite]
        if not finite.numel():
            continue
        num_finite += finite.numel()
        total += float(finite.sum())
        squares += float(finite.square().sum())
        low, high = finite.aminmax()
        minimum, maximum = min(minimum, float(low)), max(maximum, float(high))
        if len(largest) < NUM_LARGEST or high > -largest[-1][0]:
            top = piece.masked_fill(~is_finite, -math.inf).topk(min(NUM_LARGEST, finite.numel()))
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            largest = sorted([*largest, *((-value, start + place) for value, place in pairs)])[:NUM_LARGEST]
    return Stats(
        minimum=minimum if num_finite else None,
        maximum=maximum if num_finite else None,
        mean=total / num_finite if num_finite else None,
        rms=math.sqrt(squares / num_finite) if num_finite else None,
        num_not_finite=len(flat) - num_finite,
        largest=tuple((_unravel(place, shape), -negative) for negative, place in largest),
        row=_read_row(tensor),
    )


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return tuple(reversed(index))


def _read_row(tensor: Tensor) -> tuple[float, ...]:
    """The last row of the first index of the axes before it: of attention weights, the last query of the first head."""
    row = tensor.detach()
    while row.ndim > 2:
        row = row[0]
    row = row[-1] if row.ndim == 2 else row.reshape(-1)
    return tuple(map(float, row[:MAX_ROW].tolist()))


def stream_rms(result: Any) -> float | None:
    """The root mean square of the residual stream behind a decoder layer, which hands on (output, residual)."""
    if not isinstance(result, tuple) or not isinstance(result[0], Tensor) or result[0].is_meta:
        return None
    stream = result[0] + result[1]
    norm = torch.linalg.vector_norm(stream, dtype=torch.float32)
    return norm.item() / math.sqrt(max(1, stream.numel()))
