"""Exit codes and streams, whatever the command raises."""

import argparse

import pytest

from tinyllm.console import Parser, progress, run
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
    progress("loading")
    assert capsys.readouterr() == ("", "")
