"""What the tests of the text share: the lines of some steps."""

from collections.abc import Callable, Sequence

import pytest

from tinyllm.trace.record import StepRecord
from tinyllm.trace.terminal import Options, render_step


@pytest.fixture(scope="session")
def render() -> Callable[..., list[list[str]]]:
    """render(steps, **options): the lines of each step, behind the one before it."""

    def render(steps: Sequence[StepRecord], **options) -> list[list[str]]:
        pairs = zip(steps, [None, *steps[:-1]], strict=True)
        return [list(render_step(step, previous, Options(**options))) for step, previous in pairs]

    return render
