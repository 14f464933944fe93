"""Colours: none is red, and none says anything that its row's letter does not say."""

import argparse
import io
import re

import pytest
from rich.console import Console
from rich.style import Style

from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.outputs import STYLES, TextOutput
from tinyllm.trace.terminal import Options

COLOURS = {start: Style.parse(style).color for start, style in STYLES.items() if Style.parse(style).color}
MARK = re.compile(r"\x1b\[([\d;]*)m")
PLAIN = {"", "0", "1"}  # nothing, back to nothing, bold


def test_no_colour_is_red():
    """Nor leans to it: red says an error, and red beside green is what many cannot tell apart."""
    assert len(COLOURS) > 3
    for start, colour in COLOURS.items():
        red, green, blue = colour.get_truecolor()
        assert "red" not in colour.name and red <= max(green, blue) + 64, start


def test_each_colour_belongs_to_one_letter():
    assert COLOURS.keys() <= set(KIND_LETTERS.values())
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.parametrize("is_unicode", [False, True])
def test_every_coloured_row_has_its_letter(traced, is_unicode):
    _, steps = traced
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, color_system="standard", width=100, no_color=False, legacy_windows=False
    )
    output = TextOutput(argparse.Namespace(), Options(full=True, is_unicode=is_unicode), console)
    for step in steps:
        output.step(step)
    coloured = [line for line in file.getvalue().splitlines() if set(MARK.findall(line)) - PLAIN]
    letters = {MARK.sub("", line)[:2] for line in coloured}
    assert letters == {f"{letter} " for letter in COLOURS} and len(coloured) > 40
    codes = {code for line in coloured for codes in MARK.findall(line) for code in codes.split(";")}
    assert codes and not codes & {"31", "41", "91", "101"}
