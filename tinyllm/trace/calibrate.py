"""This machine's roofline: how fast it multiplies and how fast it reads memory, measured in under a second.

The two bound every stage: it takes at least its FLOPs over the one and, where nothing lies in a cache, its bytes over the
other (Williams, Waterman and Patterson, CACM 2009). `costs.bound_by` and `costs.bound_us` say which of the two it waits for, and how long.
"""

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MATMUL_SIZE = 768  # rows and columns of a square product that fits the caches and fills the vector units
SUM_VALUES = 2**25  # 128 MiB in float32: beyond the caches of most machines
ROUNDS = 5
MAX_SECONDS = 0.3  # of each of the two measurements, once one round is done


@dataclass(frozen=True)
class Roofline:
    """The peaks of a machine, for the dtype and the number of threads it was measured with."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which a stage waits for memory as long as for arithmetic."""
        return self.flops_per_s / self.bytes_per_s


def measured_roofline(dtype: torch.dtype = torch.float32, use_cache: bool = True) -> Roofline:
    """Measure the machine with torch's current number of threads, or read what an earlier run measured.

    The figures lie in the user's cache folder, one for each machine, torch version, number of threads and dtype, as
    products of narrow numbers may be faster; where that
    cannot be read or written, every run measures. use_cache False measures anew, and remembers that.
    """
    path, key = cache_file(), _cache_key(dtype)
    known = _read_cache(path)
    if use_cache and (found := _read_roofline(known.get(key))):
        return found
    roofline = measure_roofline(dtype)
    _write_cache(path, {**known, key: [roofline.flops_per_s, roofline.bytes_per_s]})
    return roofline


def measure_roofline(dtype: torch.dtype = torch.float32) -> Roofline:
    """Both peaks by the best of a few rounds: whatever else the machine does can only slow a round down."""
    with torch.inference_mode():
        square = torch.full((MATMUL_SIZE, MATMUL_SIZE), 0.5, dtype=dtype)
        product = torch.empty_like(square)
        matmul_s = _best_seconds(lambda: torch.mm(square, square, out=product))
        values = torch.ones(SUM_VALUES)
        sum_s = _best_seconds(values.sum)
    return Roofline(2 * MATMUL_SIZE**3 / matmul_s, 4 * SUM_VALUES / sum_s)


def _best_seconds(work: Callable[[], object]) -> float:
    work()  # the first one wakes the threads
    best, spent = math.inf, 0.0
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        best, spent = min(best, seconds), spent + seconds
        if spent > MAX_SECONDS:
            break
    return best


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """``roofline.json`` in the user's cache folder: XDG_CACHE_HOME, or ``~/.cache``."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(folder) if os.path.isabs(folder) else Path(os.path.expanduser("~")) / ".cache"
    return base / "tinyllm" / "roofline.json"


def _cache_key(dtype: torch.dtype) -> str:
    machine = f"{platform.node()} {platform.machine()} {os.cpu_count()} cpus"
    threads = f"{torch.get_num_threads()} threads"
    return f"{machine}, torch {torch.__version__}, {threads}, {str(dtype).removeprefix('torch.')}"


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _read_roofline(entry: Any) -> Roofline | None:
    """The entry's figures, if it is two positive numbers."""
    if not isinstance(entry, list) or len(entry) != 2:
        return None
    if not all(type(number) in (int, float) and 0 < number < math.inf for number in entry):
        return None
    return Roofline(float(entry[0]), float(entry[1]))


def _write_cache(path: Path, known: dict[str, Any]) -> None:
    """Replace the file in one go, so that another process never reads half of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1) + "\n", "utf-8", newline="\n")
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
