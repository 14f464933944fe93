"""Exit codes and streams, whatever the command raises."""

import argparse
import io
import os
import sys
import time
import warnings

import pytest

from tinyllm.console import Parser, file_path, read_line, run, show_path, working
from tinyllm.errors import RequestError


def raising(error: BaseException):
    def main(argv):
        print("some output")
        raise error

    return main


class Terminal(io.StringIO):
    """What a person at a terminal would get."""

    def isatty(self) -> bool:
        return True


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


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_arguments_are_utf8_whatever_the_locale_and_paths_keep_their_bytes(encoding, monkeypatch):
    given = [b"cafe", "café 日本".encode(), b"caf\xe9"]
    monkeypatch.setattr(os, "fsencode", lambda text: str(text).encode(encoding, "surrogateescape"))
    monkeypatch.setattr(os, "fsdecode", lambda data: data.decode(encoding, "surrogateescape"))
    monkeypatch.setattr(sys, "argv", ["tinyllm", *map(os.fsdecode, given)])
    seen: list[str] = []
    run(seen.extend)
    assert seen == ["cafe", "café 日本", "caf\udce9"]
    assert [os.fsencode(file_path(argument)) for argument in seen] == given
    assert [show_path(file_path(argument)) for argument in seen] == ["cafe", "café 日本", "caf\\udce9"]


def test_a_path_that_the_locale_could_not_read_is_read_in_an_error(capsys):
    assert run(raising(RequestError("caf\udcc3\udca9 is not there, nor \udc9b\udcff"))) == 2
    assert capsys.readouterr().err == "tinyllm: café is not there, nor \\udc9b\\udcff\n"


def test_warnings_for_the_user_are_one_line(capsys, monkeypatch):
    def main(argv):
        warnings.warn("two\nlines", stacklevel=1)
        warnings.warn("for programmers", DeprecationWarning, stacklevel=1)

    shown = []
    monkeypatch.setattr(warnings, "showwarning", show := lambda *warning: shown.append(warning))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(main) == 0
    assert capsys.readouterr().err == "tinyllm: two lines\n"
    assert [category for _, category, *_ in shown] == [DeprecationWarning]
    assert warnings.showwarning is show, "it is there again"


def test_a_warning_waits_until_the_progress_line_is_gone(monkeypatch):
    def main(argv):
        with working("loading"):
            warnings.warn("tied", stacklevel=1)
            time.sleep(0.2)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert run(main) == 0
    assert terminal.getvalue().endswith("\x1b[2Ktinyllm: tied\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_person_types_is_utf8_in_any_locale(encoding, monkeypatch):
    """Without a terminal on stdout, input() reads sys.stdin itself."""
    stdin = io.TextIOWrapper(io.BytesIO("café\n".encode() + b"caf\xe9\nlast\n"), encoding)
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    lines = []

    def main(argv):
        lines.append(read_line(1))
        with pytest.raises(RequestError, match="line 2 of standard input is not UTF-8 at byte 3"):
            read_line(2)
        lines.extend([read_line(3), read_line(4)])

    assert run(main, []) == 0
    assert lines == ["café", "last", None]


def test_usage_errors_are_one_line(capsys):
    parser = Parser(prog="tool")
    parser.add_argument("--count", type=int)
    with pytest.raises(SystemExit) as leaving:
        parser.parse_args(["--count", "x"])
    assert leaving.value.code == 2
    assert capsys.readouterr().err == "tool: argument --count: invalid int value: 'x'; see tool --help\n"
    assert isinstance(parser, argparse.ArgumentParser)


def test_a_subcommand_refuses_what_it_does_not_know_itself(capsys):
    parser = Parser(prog="tool")
    parser.add_subparsers().add_parser("sub")
    with pytest.raises(SystemExit):
        parser.parse_args(["sub", "--what", "a\nb"])
    assert capsys.readouterr().err == "tool sub: unrecognized arguments: --what a b; see tool sub --help\n"


def test_progress_is_for_people_only(capsys):
    with working("loading") as say:
        say("half way")
    assert capsys.readouterr() == ("", "")


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
