"""How every command of ours meets a terminal: one-line errors, exit codes, UTF-8, closed pipes."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tinyllm.errors import TinyllmError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, without the usage block."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Call `main` and turn what it raises into an exit code.

    A TinyllmError is the user's to mend: its line on stderr, code 2. A reader that closed the pipe (``| head``) ends us
    quietly. Anything else is a bug of ours and keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's or a test's stream is none
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        main(argv)
        sys.stdout.flush()
    except TinyllmError as error:
        print(f"tinyllm: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end; into the void, so that this is quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return 0


def progress(message: str) -> None:
    """A word on stderr about something that takes a moment; only people at a terminal see it."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)
