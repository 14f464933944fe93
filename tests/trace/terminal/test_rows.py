"""The columns of costs."""

import re
from dataclasses import replace

from tinyllm.trace.text import show_number

WIDTHS = [60, 79, 80, 99, 100, 120, 138, 140, 160, 200]


def test_measured_times_stand_beside_the_least_that_is_possible(traced, render):
    _, steps = traced
    timed = [replace(steps[0], operations=tuple(replace(o, time_us=10.0) for o in steps[0].operations))]
    count = len(steps[0].operations)
    assert render(timed)[0] == render(steps[:1])[0], "only with has_time"
    for width in WIDTHS:
        (lines,) = render(timed, has_time=True, ridge=2.0, bandwidth=1e9, width=width)
        total = next(line for line in lines if "step 0 total" in line).split()
        assert (
            re.search(r" T=4 tokens +(=+ )?\d+ ms(, traced|, \d+ of them tracing)? ==$", lines[0])
            and len(lines[0]) == width
        )
        assert all(len(line) <= width for line in lines)
        if width < 80:
            assert total[-1] == show_number(10 * count)
        else:
            assert total[-2] == show_number(10 * count)
            assert total[-1] == show_number(1e-3 * max(steps[0].num_bytes, steps[0].flops / 2))
