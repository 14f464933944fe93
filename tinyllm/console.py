"""How every command of ours meets a terminal: UTF-8 whatever the locale, one-line errors, exit codes, closed pipes."""

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from tinyllm.errors import RequestError, TinyllmError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
BYTE_ORDER_MARK = "\ufeff"


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, printed by the command that they concern."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, without the usage block."""
        self.exit(EXIT_USAGE, f"{self.prog}: {one_line(message, 300)}; see {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """A subcommand refuses what it does not know itself, where argparse hands it to the parser above."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Call `main` with the arguments, those of the process by default, and turn what it raises into an exit code.

    A TinyllmError is the user's to mend: its line on stderr, code 2. A reader that closed the pipe (``| head``) ends us
    quietly. Anything else is a bug of ours and keeps its traceback.
    """
    _open_streams()
    try:
        with _one_line_warnings():
            main(arguments() if argv is None else argv)
        sys.stdout.flush()
    except TinyllmError as error:
        complain(str(error))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_ERROR
    except OSError as error:
        _drop_stdout()
        complain(f"cannot write: {error.strerror or error}")
        return EXIT_ERROR
    return 0


def complain(message: str) -> None:
    """Say in one line on stderr what is wrong."""
    print(f"tinyllm: {one_line(message)}", file=sys.stderr)


def _open_streams() -> None:
    """Streams that are there and speak UTF-8, whatever the shell and the locale made of them."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (closed by the caller's shell: >&-)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    streams = [(sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"), (sys.stdin, "surrogateescape")]
    for stream, errors in streams:
        if isinstance(stream, io.TextIOWrapper):  # a notebook's or a test's stream is none
            with contextlib.suppress(io.UnsupportedOperation):  # stdin that has been read from
                stream.reconfigure(encoding="utf-8", errors=errors)


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """What concerns the user in the form of our errors; other warnings, for programmers, as Python shows them."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(
            message: Warning | str, category: type[Warning], filename: str, lineno: int,
            file: TextIO | None = None, line: str | None = None,
        ) -> None:  # fmt: skip
            if issubclass(category, UserWarning):
                complain(str(message))
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_line
        yield


def _drop_stdout() -> None:
    """The interpreter flushes stdout once more at its end; into the void, so that this is quiet too."""
    with contextlib.suppress(io.UnsupportedOperation):  # a test's or a notebook's stream has no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- arguments and standard input ---------------------------------------------------------------------------------------


def arguments() -> list[str]:
    """The command's arguments read as UTF-8, whatever the locale says; bytes that are none stay surrogate escapes."""
    return [os.fsencode(argument).decode("utf-8", "surrogateescape") for argument in sys.argv[1:]]


def file_path(argument: str) -> str:
    """The path that one of `arguments` names: the same bytes as the locale reads them, and so the same file."""
    return os.fsdecode(argument.encode("utf-8", "surrogateescape"))


def show_path(path: str | Path) -> str:
    """A path in one line for people: its bytes as UTF-8, whatever the locale says."""
    return one_line(os.fsencode(path).decode("utf-8", "surrogateescape"))


def stdin_is_terminal() -> bool:
    """Whether a person types."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_stdin() -> str:
    """All of standard input as UTF-8, without a byte-order mark and the end of its last line."""
    text = _decode_utf8(_stdin_bytes().read(), "standard input").removeprefix(BYTE_ORDER_MARK)
    return text.removesuffix("\n").removesuffix("\r")


def read_line(number: int, prompt: str = "> ") -> str | None:
    """Line `number` (from 1) of standard input as UTF-8, without its end; None behind the last one.

    A person at a terminal sees the prompt. Raises RequestError for what is not UTF-8; the next line can be read then.
    """
    data = _type_line(prompt) if stdin_is_terminal() else _stdin_bytes().readline() or None
    if data is None:
        return None
    text = _decode_utf8(data, f"line {number} of standard input")
    return (text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text).rstrip("\r\n")


def _type_line(prompt: str) -> bytes | None:
    """What a person types; whoever leaves finds the shell's prompt on a line of its own."""
    try:
        return input(prompt).encode("utf-8", "surrogateescape")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        raise


def _stdin_bytes() -> BinaryIO:
    if sys.stdin is None:  # closed by the caller's shell: <&-
        raise RequestError("standard input is closed; expected a text")
    return sys.stdin.buffer


def _decode_utf8(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 at byte {error.start}; expected UTF-8 text") from None


# --- what is said ---------------------------------------------------------------------------------------------------------


def one_line(text: str, max_length: int = 1000) -> str:
    """Text that stays on its line and cannot move the cursor: what is not printable becomes an escape."""
    with contextlib.suppress(UnicodeEncodeError):  # the bytes of a path that the locale could not read
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    return line if len(line) <= max_length else line[:max_length] + "..."


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what takes a moment; the caller may say how far it is. Only people at a terminal see it.

    Print nothing to that terminal meanwhile: the line is rewritten in place, and gone at the end. Warnings wait for that.
    """
    if not sys.stderr.isatty():
        yield lambda message: None
        return
    console = Console(stderr=True, highlight=False)
    if console.is_dumb_terminal:  # it cannot rewrite a line
        print(f"{message} ...", file=sys.stderr, flush=True)
    spinner = Spinner("line", Text(message))
    live = Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    with _late_warnings(), live:
        yield lambda message: spinner.update(text=Text(message))


@contextlib.contextmanager
def _late_warnings() -> Iterator[None]:
    """Hold warnings back until the end."""
    caught: list[warnings.WarningMessage] | None = None
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    finally:
        for warning in caught or ():
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
