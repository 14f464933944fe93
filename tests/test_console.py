"""Exit codes and streams, whatever the command raises."""

import argparse
import io
import sys
import time

import pytest

from tinyllm.console import Parser, run, working
from tinyllm.errors import RequestError


def raising(error: BaseException):
    def main(argv):
        print("some output")
        raise error

    return main


def test_codes(capsys):
    assert run(lambda argv: None) == 0
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_a_user_s_error_is_one_line_whatever_it_quotes(capsys):
    assert run(raising(RequestError("two\nlines and a \udcff"))) == 2
    assert capsys.readouterr().err.splitlines() == ["tinyllm: two lines and a \\udcff"]


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError("ours")))


def test_the_arguments_reach_the_command():
    seen = []
    run(seen.append, ["a", "b"])
    assert seen == [["a", "b"]]


def test_usage_errors_are_one_line(capsys):
    parser = Parser(prog="tool")
    parser.add_argument("--count", type=int)
    with pytest.raises(SystemExit) as leaving:
        parser.parse_args(["--count", "x"])
    assert leaving.value.code == 2
    assert capsys.readouterr().err == "tool: argument --count: invalid int value: 'x'; see tool --help\n"
    assert isinstance(parser, argparse.ArgumentParser)


def test_progress_is_for_people_only(capsys):
    with working("loading") as say:
        say("half way")
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    """What a person at a terminal would get."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_sees_what_takes_a_moment(term, monkeypatch, capsys):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(KeyboardInterrupt), working("reading [b]") as say:
        say("at 7 of 9")
        time.sleep(0.3)  # two turns of the spinner
        raise KeyboardInterrupt
    text = terminal.getvalue()
    if term == "dumb":
        assert text == "reading [b] ...\n"
    else:
        assert "reading [b]" in text
        assert "at 7 of 9" in text
        assert text.endswith("\x1b[2K"), "the line is taken away, whatever ended the work"
        assert text.isascii()
    assert capsys.readouterr().out == ""
