"""What a user copies runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.long
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_runs(script: Path):
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "The capital of France is" in done.stdout and "Paris" in done.stdout


def test_there_is_an_example_of_about_ten_lines():
    assert EXAMPLES
    assert all(len(script.read_text().splitlines()) <= 14 for script in EXAMPLES)
