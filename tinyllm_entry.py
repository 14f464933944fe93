"""The installed ``tinyllm`` command.

It stands outside the package because the package's import takes seconds, torch's for the most part: Ctrl-C ends these as
quietly as the rest.
"""

import os
import signal

EXIT_INTERRUPTED = 130


def main() -> int:
    """Import the command line and run it; the exit code."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's & may have switched it off
    if is_ours:
        signal.signal(signal.SIGINT, _leave)  # an exception would meet half-made modules, and C code that hides it
    from tinyllm.cli import entry_point  # noqa: PLC0415 (what the handler above is for)

    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return entry_point()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, _leave)  # the interpreter's end is no place for an exception either


def _leave(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)
