"""A model named ``owner/name`` on the Hugging Face hub, where the huggingface_hub library is installed."""

import re
from pathlib import Path

from tinyllm.errors import ModelFileError

PATTERNS = ["*.json", "*.safetensors"]  # no code and no pickles


def is_hub_name(path: Path) -> bool:
    """Whether a path that is not there can only be meant as a hub name: one slash, no file ending, no such folder.

    >>> [is_hub_name(Path(name)) for name in ("owner/model", "model", "./a/model", "/a/model", "owner/model.gguf")]
    [True, False, True, False, False]
    """
    is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path.as_posix(), re.ASCII) is not None
    return is_name and path.suffix not in (".gguf", ".safetensors") and not (path.exists() or path.parent.exists())


def fetch(name: str) -> Path:
    """The folder with the model `name`, downloaded unless it is in the library's cache; ModelFileError says why not."""
    try:
        import huggingface_hub  # noqa: PLC0415  not a dependency of ours
    except ImportError:
        raise ModelFileError(
            f"{name}: there is no such file or folder; to fetch it from the Hugging Face hub: pip install huggingface_hub"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # the errors of its HTTP library have no common base
        is_offline = getattr(getattr(huggingface_hub, "constants", None), "HF_HUB_OFFLINE", False)
        reason = _why_not(name, error, is_offline)
        raise ModelFileError(f"{name}: there is no such file or folder, and {reason}") from None


def _why_not(name: str, error: Exception, is_offline: bool) -> str:
    """What an error of the library means; its own texts run over many lines. Errors go by name: versions move them."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return f"the Hugging Face hub gives it only to users who accepted its terms; see huggingface.co/{name}, then log in"
    if "RepositoryNotFoundError" in kinds:
        return "the Hugging Face hub has no such model either, or it is private; check the name, or log in"
    if "LocalEntryNotFoundError" in kinds and is_offline:
        return "the Hugging Face hub's cache has no such model; check the path, or unset HF_HUB_OFFLINE to fetch it"
    if "LocalEntryNotFoundError" in kinds:
        return (
            "the Hugging Face hub cannot be reached and its cache has no such model; check the path, or go online"
            f" ({type(error).__name__})"
        )
    return f"the Hugging Face hub did not give it ({type(error).__name__}); check the path, or try again"
