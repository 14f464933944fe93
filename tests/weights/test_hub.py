"""Hub names: what counts as one, and one clear line where it cannot be fetched. The network is never touched."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tinyllm.errors import ModelFileError
from tinyllm.weights.hub import is_hub_name
from tinyllm.weights.load import load_weights

TINY = Path(__file__).parents[1] / "data" / "tiny"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("some-owner/Some_Model-1.5B", True),
        ("model", False),
        ("a/b/c", False),
        ("/owner/model", False),
        ("../model", False),
        ("owner/..", False),
        ("owner/model.gguf", False),
        ("owner/model.safetensors", False),
        ("tests/no-such-model", False),  # the folder is here, so a file in it is meant
        ("owner/mod\nel", False),
        ("öwner/model", False),
    ],
)
def test_what_counts_as_a_hub_name(name, expected, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert is_hub_name(Path(name)) is expected


def test_without_the_library_one_line_says_so(monkeypatch, one_line):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFileError) as error:
        load_weights("owner/model")
    assert one_line(error.value) == (
        "owner/model: there is no such file or folder; to fetch it from the Hugging Face hub: pip install huggingface_hub"
    )


def test_a_download_is_a_folder_without_code_or_pickles(monkeypatch, check_golden):
    def download(name: str, allow_patterns: list[str]) -> str:
        assert (name, allow_patterns) == ("owner/model", ["*.json", "*.safetensors"])
        return str(TINY / "llama_gqa")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    check_golden(*load_weights("owner/model"), "llama_gqa")


def test_any_failure_of_the_library_is_one_line(monkeypatch, one_line):
    def fail(*_, **__) -> str:
        raise RuntimeError("401 Client Error:\n\nthis model is gated " + "x" * 1000)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(ModelFileError) as error:
        load_weights("owner/model")
    assert one_line(error.value) == (
        "owner/model: there is no such file or folder, and the Hugging Face hub did not give it (RuntimeError); "
        "check the path, or try again"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "LocalEntryNotFoundError",
            "and the Hugging Face hub cannot be reached and its cache has no such model; check the path, or go online",
        ),
        ("RepositoryNotFoundError", "and the Hugging Face hub has no such model either, or it is private; check the"),
        ("GatedRepoError", "only to users who accepted its terms; see huggingface.co/owner/model, then log in"),
    ],
)
def test_each_error_of_the_library_has_a_sentence_of_ours(kind, words, monkeypatch, one_line):
    errors = pytest.importorskip("huggingface_hub.errors")

    def fail(*_, **__) -> str:
        raise getattr(errors, kind).__new__(getattr(errors, kind))  # their initialisers differ

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(ModelFileError) as error:
        load_weights("owner/model")
    assert words in one_line(error.value)


def test_offline_is_one_line(monkeypatch, tmp_path, one_line):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelFileError) as error:
        load_weights("owner/model")
    assert one_line(error.value) == (
        "owner/model: there is no such file or folder, and the Hugging Face hub's cache has no such model; "
        "check the path, or unset HF_HUB_OFFLINE to fetch it"
    )
