"""The errors that a user can act upon.

Each message is one line: what is wrong, what was expected, what to do. The command line prints it on stderr without a
traceback and leaves with exit code 2; every other exception is a bug of ours and shows its traceback.
"""

import reprlib


def brief(value: object) -> str:
    """`repr` in one short line, for an error message that quotes what it was given.

    >>> brief(list(range(1000)))
    '[0, 1, 2, 3, 4, 5, ...]'
    """
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        return "(too long to print)"


class TinyllmError(ValueError):
    """Base of every error that names something the user gave and can change."""


class ConfigError(TinyllmError):
    """A model, cache or scheduler setting is impossible or unsupported."""


class ModelFileError(TinyllmError):
    """A model file is missing, broken, foreign or lies about its content."""


class RequestError(TinyllmError):
    """A prompt or its sampling parameters cannot be served."""


class TokenizerError(TinyllmError):
    """Text or token ids that the vocabulary cannot express, or an unusable vocabulary."""
