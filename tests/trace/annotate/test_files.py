"""Which file a path names, and what is said of one that cannot be annotated."""

import pytest

from tinyllm import ConfigError
from tinyllm.trace.annotate import annotatable, annotate, find_source
from tinyllm.trace.explain import tensor_files
from tinyllm.trace.recorder import PACKAGE


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("tinyllm/layers/norm.py", "layers/norm.py"),
        ("layers/norm.py", "layers/norm.py"),
        (str(PACKAGE / "layers" / "norm.py"), "layers/norm.py"),
        ("norm.py", "layers/norm.py"),
        ("reference.py", "layers/attention/reference.py"),
        ("attention/reference.py", "layers/attention/reference.py"),
        ("./tinyllm/batch.py", "batch.py"),
    ],
)
def test_a_file_is_found_from_wherever_it_is_named(path, file, monkeypatch):
    monkeypatch.chdir(PACKAGE.parent)
    assert find_source(path) == PACKAGE / file


@pytest.mark.parametrize(
    ("path", "said", "not_said"),
    [
        ("tinyllm/layers/attention/referense.py", "did you mean tinyllm/layers/attention/reference.py?", "norm.py"),
        ("layers/atention/gqa.py", "did you mean tinyllm/layers/attention/gqa.py", "norm.py"),
        ("layers/gqa.py", "did you mean tinyllm/layers/attention/gqa.py", "norm.py"),
        ("attention/norm.py", "did you mean tinyllm/layers/norm.py", "mlp.py"),
        ("gqa", "did you mean tinyllm/layers/attention/gqa.py?", "norm.py"),
        ("ROPE.py", "did you mean tinyllm/layers/rope.py?", "norm.py"),
        ("__init__.py", "may be tinyllm/layers/__init__.py or tinyllm/layers/attention/__init__.py", "norm.py"),
        ("tinyllm/layers", "is a folder; expected one of tinyllm/layers/", "batch.py"),
        ("tinyllm/sampler", "is a folder; expected one of tinyllm/sampler/__init__.py, tinyllm/sampler/", "norm.py"),
        ("tinyllm/weights", "is a folder; expected one of tinyllm/batch.py", "weights/"),
        (
            "tinyllm/scheduler.py",
            "makes no tensors in a step, so no run can annotate it; expected one of tinyllm/batch.py",
            "?",
        ),
        ("scheduler.py", "makes no tensors in a step", "?"),
        ("README.md", "is no file of the model's source; expected one of tinyllm/batch.py", "?"),
        ("nowhere/zzzzz.txt", "is no file of the model's source; expected one of tinyllm/batch.py", "?"),
        ("", "--annotate needs a file; expected one of tinyllm/batch.py", "?"),
    ],
)
def test_another_file_is_refused_with_those_that_may_be_meant(path, said, not_said, monkeypatch):
    monkeypatch.chdir(PACKAGE.parent)
    with pytest.raises(ConfigError) as error:
        annotate(path, ())
    message = str(error.value)
    assert said in message and not_said not in message.partition(said)[2] and "\n" not in message
    assert annotatable() == [file.relative_to(PACKAGE.parent).as_posix() for file in tensor_files()]


def test_a_foreign_file_of_the_same_name_is_not_taken_for_ours(tmp_path, monkeypatch):
    (tmp_path / "norm.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is no file of the model's source"):
        find_source("norm.py")
