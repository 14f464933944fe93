"""The errors that a user can act upon.

Each message is one line: what is wrong, what was expected, what to do. The command line prints it on stderr without a
traceback and leaves with exit code 2; every other exception is a bug of ours and shows its traceback.
"""


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
