"""The machine's roofline: measured, remembered, and never in the way."""

import json
import os

import pytest
import torch

from tinyllm.trace import calibrate
from tinyllm.trace.calibrate import Roofline, measured_roofline

ROOF = Roofline(flops_per_s=80e9, bytes_per_s=10e9)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tinyllm" / "roofline.json"


@pytest.fixture
def measured(monkeypatch):
    """How often the machine was measured; each time it is one FLOP faster."""
    found: list[Roofline] = []

    def measure(dtype=torch.float32) -> Roofline:
        found.append(Roofline(80e9 + len(found), 10e9))
        return found[-1]

    monkeypatch.setattr(calibrate, "measure_roofline", measure)
    return found


def test_the_ridge_is_where_both_take_equally_long():
    assert ROOF.ridge == 8


def test_a_second_call_reads_the_file(cache, measured):
    assert measured_roofline() == measured_roofline()
    assert len(measured) == 1
    assert list(cache.parent.iterdir()) == [cache], "no half-written file stays"
    (key,) = json.loads(cache.read_text())
    assert torch.__version__ in key and f"{torch.get_num_threads()} threads" in key


def test_without_the_cache_it_measures_anew_and_remembers_that(cache, measured):
    first = measured_roofline()
    assert measured_roofline(use_cache=False) != first
    assert measured_roofline() == measured[1] and len(measured) == 2


def test_another_number_of_threads_is_another_roofline(cache, measured):
    num_threads = torch.get_num_threads()
    measured_roofline()
    torch.set_num_threads(num_threads + 1)
    try:
        measured_roofline()
    finally:
        torch.set_num_threads(num_threads)
    assert len(measured) == 2 and len(json.loads(cache.read_text())) == 2
    assert measured_roofline() == measured[0]


ENTRIES = ["[]", "[1]", "[1, 0]", "[-1, 2]", '["1", 2]', "[true, 2]", "null", "[1e999, 2]", "[NaN, 1]", "{}"]


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", *ENTRIES])
def test_a_file_that_makes_no_sense_is_as_good_as_none(cache, measured, text):
    measured_roofline()
    (key,) = json.loads(cache.read_text())
    cache.write_text(f'{{"{key}": {text}}}' if text in ENTRIES else text)
    assert measured_roofline() == measured[1]
    assert measured_roofline() == measured[1], "and mended"


def test_a_folder_that_cannot_be_written_is_fine(tmp_path, monkeypatch, measured):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert measured_roofline() == measured[0]
    assert measured_roofline() == measured[1]


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_a_cache_folder_that_is_no_absolute_path_does_not_count(monkeypatch, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert calibrate.cache_file() == calibrate.Path(os.path.expanduser("~")) / ".cache" / "tinyllm" / "roofline.json"


def test_the_peaks_are_the_work_over_the_best_time(monkeypatch):
    """A clock that says how long each round took, and work of known size."""
    ticks = iter([0.0, 0.1, 1.0, 1.05, 2.0, 2.2, 10.0, 10.25, 11.0, 11.125])
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(calibrate, "MATMUL_SIZE", 8)
    monkeypatch.setattr(calibrate, "SUM_VALUES", 1000)
    roofline = calibrate.measure_roofline()
    assert roofline.flops_per_s == pytest.approx(8 * 8 * (8 + 8) / 0.05), (
        "a multiply-add for each value and inner place"
    )
    assert roofline.bytes_per_s == pytest.approx(1000 * torch.float32.itemsize / 0.125), "each value is read once"
    assert next(ticks, None) is None, "a measurement ends with the round in which its time is spent"


def test_a_machine_has_a_plausible_roofline():
    roofline = calibrate.measure_roofline()
    assert 1e8 < roofline.flops_per_s < 1e15 and 1e8 < roofline.bytes_per_s < 1e14


def test_each_dtype_has_a_ridge_of_its_own(cache, measured):
    first = measured_roofline()
    assert measured_roofline(torch.bfloat16) != first, "measured anew"
    assert measured_roofline() == first and measured_roofline(torch.bfloat16) == measured[1] and len(measured) == 2
