"""Fuzzing of everything that reads a model: random bytes, edits of good files, random settings.

Whatever comes in, the outcome is a model that computes or one line of our own error classes; never another exception, a
hang, or memory beyond the size of what was read and a fixed bound. `make test` runs 150 examples of each kind,
`make test-long` 2,000.
"""

import json
import resource
import shutil
import tracemalloc
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyllm.config import ModelConfig
from tinyllm.errors import TinyllmError
from tinyllm.weights.gguf import read_gguf
from tinyllm.weights.load import load_weights

DATA = Path(__file__).parents[1] / "data"
GOOD_GGUF = (DATA / "gguf" / "llama_q4_0.gguf").read_bytes()
GGUF_HEADER = min(info.start for info in read_gguf(DATA / "gguf" / "llama_q4_0.gguf").tensors.values())
GOOD_FOLDER = DATA / "tiny" / "llama_sharded"
SHARD = "model-00002-of-00005.safetensors"
GOOD_SHARD = (GOOD_FOLDER / SHARD).read_bytes()
SHARD_HEADER = 8 + int.from_bytes(GOOD_SHARD[:8], "little")
GOOD_CONFIG = json.loads((GOOD_FOLDER / "config.json").read_text())
GOOD_INDEX = json.loads((GOOD_FOLDER / "model.safetensors.index.json").read_text())

MOST_SECONDS = 5
MOST_PYTHON_BYTES = 2**24  # beyond the files' size, counted by tracemalloc
MOST_PROCESS_KIB = 2**18  # growth of the whole process over all examples: torch's memory is in it
EXAMPLES = pytest.mark.parametrize("examples", [150, pytest.param(2000, marks=pytest.mark.long)])


# ---- what goes in ------------------------------------------------------------------------------------------------------

Edit = tuple[int, bytes, bool]  # a place, what to write there, and whether the rest moves back for it
numbers = st.sampled_from([0, 1, 2, 3, 8, 9, 31, 255, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
packed = st.builds(
    lambda value, width: (value % 256**width).to_bytes(width, "little"), numbers, st.sampled_from([4, 8])
)
words = st.sampled_from([b"F16", b"I64", b"F8_E4M3", b"BOOL", b"[", b"}", b'"', b",", b"-", b"9" * 20, b"1e9", b"model.",
                         b"data_offsets", b"0", b"\\ud800", b"\n", b"null", b"__metadata__"])  # fmt: skip


def edits(size: int, header: int) -> st.SearchStrategy[list[Edit]]:
    """Up to four edits of a file, mostly in its header."""
    place = st.integers(0, header) | st.integers(0, header) | st.integers(0, size)
    return st.lists(st.tuples(place, packed | words | st.binary(max_size=9), st.booleans()), max_size=4)


def edited(data: bytes, changes: list[Edit], length: int | None) -> bytes:
    for place, piece, moves in changes:
        data = data[:place] + piece + data[place if moves else place + len(piece) :]
    return data[:length]


starts = st.sampled_from([b"", b"GGUF\3\0\0\0", b"GGUF", b"{", b'{"', b"\xef\xbb\xbf{", b"PK\3\4", b"\x80\2", b"[" * 3000,
                          b"\2\0\0\0\0\0\0\0{}", b"\x40\0\0\0\0\0\0\0{", b"version https://git-lfs"])  # fmt: skip
noise = st.builds(lambda start, rest: start + rest, starts, st.binary(max_size=200))
keys = st.sampled_from([*GOOD_CONFIG, "rope_scaling", "rope_theta", "rope_type", "type", "factor", "low_freq_factor"])
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=4),
    st.sampled_from(["llama", "silu", "llama3", "linear", "default", 64, 16, 4, 2, 1e-5, 10000.0]),
)  # fmt: skip
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | st.text(max_size=4), inner, max_size=4)
)
shard_names = st.sampled_from([*sorted(set(GOOD_INDEX["weight_map"].values())), "config.json", ".", "", "/", "../x.safetensors",
                               "model.safetensors/", "./" + SHARD, "\ud800.safetensors", "\0.safetensors"])  # fmt: skip
weight_maps = st.dictionaries(
    st.sampled_from(list(GOOD_INDEX["weight_map"])) | st.text(max_size=3), shard_names | json_values
)


# ---- what must come out ------------------------------------------------------------------------------------------------


@pytest.fixture
def check(logits_of, one_line) -> Callable[[Path], ModelConfig | None]:
    """check(path): load it under the promises; a model that loads computes logits of the right shape."""

    def check(path: Path) -> ModelConfig | None:
        files = [path] if path.is_file() else list(path.iterdir())
        size = sum(file.stat().st_size for file in files)
        tracemalloc.start()
        try:
            config, parameters = load_weights(path)
        except TinyllmError as error:
            one_line(error)
            return None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < size + MOST_PYTHON_BYTES
        assert logits_of(config, parameters, [0, 1, 2]).shape == (3, config.vocab_size)
        return config

    return check


def fuzz(examples: int, test: Callable[..., None], *inputs: st.SearchStrategy[Any]) -> None:
    """Run `test` on that many random inputs, and watch the clock and the process's memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = settings(
        max_examples=examples,
        deadline=timedelta(seconds=MOST_SECONDS),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tied model's other lm_head
        limits(given(*inputs)(test))()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_PROCESS_KIB


@pytest.fixture
def folder(tmp_path) -> Path:
    """A good folder whose shards are links, ready to be spoilt."""
    for path in GOOD_FOLDER.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / path.name).symlink_to(path)
        elif path.suffix == ".json" and "v4" not in path.name:
            shutil.copy(path, tmp_path)
    return tmp_path


@EXAMPLES
@pytest.mark.parametrize(
    "name", ["model.gguf", "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_random_bytes(name, examples, folder, check):
    path = folder / name

    def test(data: bytes) -> None:
        path.write_bytes(data)
        check(path if name == "model.gguf" else folder)

    fuzz(examples, test, noise)


@EXAMPLES
def test_edits_of_a_good_gguf_file(examples, tmp_path, check):
    path = tmp_path / "model.gguf"

    def test(changes: list[Edit], length: int | None) -> None:
        path.write_bytes(edited(GOOD_GGUF, changes, length))
        check(path)

    fuzz(examples, test, edits(len(GOOD_GGUF), GGUF_HEADER), st.none() | st.integers(0, len(GOOD_GGUF)))


@EXAMPLES
def test_edits_of_a_good_safetensors_file(examples, folder, check):
    (folder / SHARD).unlink()

    def test(changes: list[Edit], length: int | None) -> None:
        (folder / SHARD).write_bytes(edited(GOOD_SHARD, changes, length))
        check(folder)

    fuzz(examples, test, edits(len(GOOD_SHARD), SHARD_HEADER), st.none() | st.integers(0, len(GOOD_SHARD)))


@EXAMPLES
def test_random_settings(examples, folder, check):
    def test(changes: dict[str, Any], generation: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps({**GOOD_CONFIG, **changes}))
        (folder / "generation_config.json").write_text(json.dumps(generation))
        check(folder)

    generation = st.fixed_dictionaries({}, optional={"eos_token_id": json_values})
    fuzz(examples, test, st.dictionaries(keys, json_values, max_size=4), generation)


@EXAMPLES
def test_random_indexes(examples, folder, check):
    def test(changes: dict[str, Any], whole: bool) -> None:
        weight_map = changes if whole else {**GOOD_INDEX["weight_map"], **changes}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        check(folder)

    fuzz(examples, test, weight_maps, st.booleans())


def test_the_good_files_pass_the_same_check(folder, tmp_path, check):
    assert check(folder) is not None
    (tmp_path / "model.gguf").write_bytes(edited(GOOD_GGUF, [], None))
    assert check(tmp_path / "model.gguf") is not None
