"""How every command of ours meets a terminal: one-line errors, exit codes, UTF-8, closed pipes."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from tinyllm.errors import TinyllmError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, without the usage block."""
        self.exit(EXIT_USAGE, f"{self.prog}: {one_line(message, 300)}; see {self.prog} --help\n")


def run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Call `main` and turn what it raises into an exit code.

    A TinyllmError is the user's to mend: its line on stderr, code 2. A reader that closed the pipe (``| head``) ends us
    quietly. Anything else is a bug of ours and keeps its traceback.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (closed by the caller's shell: >&-)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's or a test's stream is none
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        main(argv)
        sys.stdout.flush()
    except TinyllmError as error:
        print(f"tinyllm: {one_line(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_ERROR
    except OSError as error:
        _drop_stdout()
        print(f"tinyllm: cannot write: {error.strerror or error}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def _drop_stdout() -> None:
    """The interpreter flushes stdout once more at its end; into the void, so that this is quiet too."""
    with contextlib.suppress(io.UnsupportedOperation):  # a test's or a notebook's stream has no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str, max_length: int = 1000) -> str:
    """Text that stays on its line and cannot move the cursor: what is not printable becomes an escape."""
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    return line if len(line) <= max_length else line[:max_length] + "..."


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what takes a moment; the caller may say how far it is. Only people at a terminal see it.

    Print nothing to that terminal meanwhile: the line is rewritten in place, and gone at the end.
    """
    if not sys.stderr.isatty():
        yield lambda message: None
        return
    console = Console(stderr=True, highlight=False)
    if console.is_dumb_terminal:  # it cannot rewrite a line
        print(f"{message} ...", file=sys.stderr, flush=True)
    spinner = Spinner("line", Text(message))
    with Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield lambda message: spinner.update(text=Text(message))
