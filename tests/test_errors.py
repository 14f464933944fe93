"""One base class for everything that a user can act upon, and one line each."""

import inspect

import pytest

import tinyllm
from tinyllm import errors
from tinyllm.errors import ConfigError, ModelFileError, RequestError, TinyllmError, TokenizerError
from tinyllm.shapes import ShapeError


@pytest.mark.parametrize("error", [ConfigError, ModelFileError, RequestError, TokenizerError])
def test_user_errors_share_one_base_that_is_a_value_error(error: type[Exception]) -> None:
    assert issubclass(error, TinyllmError) and issubclass(error, ValueError)
    assert str(error("what, expected, do")) == "what, expected, do"
    assert getattr(tinyllm, error.__name__) is error


def test_every_class_of_the_module_is_a_user_error_with_a_docstring() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(classes) >= 5
    assert all(issubclass(value, TinyllmError) and value.__doc__ for value in classes)


def test_a_shape_error_is_no_user_error() -> None:
    """It is a bug of ours or of the code that calls a layer: the command line must show its traceback."""
    assert not issubclass(ShapeError, TinyllmError)
