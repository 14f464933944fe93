"""Which file a path means, and what is said where it means none."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from tinyllm.errors import ConfigError, brief
from tinyllm.trace.explain.sources import show_path, tensor_files
from tinyllm.trace.reading import PACKAGE


def annotatable() -> list[str]:
    """The files that can be annotated, as paths from the folder above the package."""
    return [show_path(file) for file in tensor_files()]


def find_source(path: str | Path) -> Path:
    """The tensor module that a path names, from here, from the package or from above it, or by the end of its path.

    Raises ConfigError for any other, with the files that it may mean.
    """
    text = Path(path).as_posix() if str(path) else ""
    for file in _places_of(text):
        if file in tensor_files():
            return file
    named = [file for file in tensor_files() if f"/{file.as_posix()}".endswith(f"/{text}")] if text else []
    if len(named) == 1 and not Path(text).exists():
        return named[0]
    raise ConfigError(_refusal(text, named))


def _places_of(text: str) -> list[Path]:
    return [(root / text).resolve() for root in (Path.cwd(), PACKAGE.parent, PACKAGE)]


def _refusal(text: str, named: Sequence[Path]) -> str:
    """Why a path cannot be annotated, and what may have been meant."""
    quoted, every = brief(text), f"expected one of {', '.join(annotatable())}"
    found = next((file for file in _places_of(text) if file.exists()), None) if text else None
    if not text:
        return f"--annotate needs a file; {every}"
    if found and found.is_dir():
        inside = [show_path(file) for file in tensor_files() if file.is_relative_to(found)]
        return f"{quoted} is a folder; " + (f"expected one of {', '.join(inside)}" if inside else every)
    if len(named) > 1:
        return f"{quoted} may be {' or '.join(map(show_path, named))}; give more of its path"
    if found and found.is_relative_to(PACKAGE):
        return f"{quoted} makes no tensors in a step, so no run can annotate it; {every}"
    if found:
        return f"{quoted} is no file of the model's source; {every}"
    near = _near(text)
    hint = f"did you mean {' or '.join(near)}?" if near else every
    return f"{quoted} is no file of the model's source; {hint}"


def _near(text: str) -> list[str]:
    """The files whose path, or the end of it that is as long, is spelt like the text; the nearest first."""
    count = text.count("/") + 1
    likeness: dict[str, float] = {}
    for name in annotatable():
        ends = {"/".join(name.split("/")[-count:]), Path(name).name}
        forms = {*ends, *(end.removesuffix(".py") for end in ends)}
        texts = (text.lower(), Path(text).name.lower())
        likeness[name] = max(difflib.SequenceMatcher(None, a, b).ratio() for a in texts for b in forms)
    best = max(likeness.values())
    near = [name for name, ratio in likeness.items() if ratio >= max(0.7, best - 0.1)]
    return sorted(near, key=lambda name: -likeness[name])[:4]
