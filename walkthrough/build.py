"""Make the notebooks: every chapter becomes notebooks/<chapter>.ipynb, executed from its first cell to its last.

``python -m walkthrough.build`` runs the chapters; ``--check`` runs nothing and fails where a notebook's cells differ
from its chapter. What changes from run to run is left out, so an unchanged chapter gives an unchanged notebook.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "walkthrough"
NOTEBOOKS = ROOT / "notebooks"
CELL_TIMEOUT = 300  # seconds
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class BuildError(RuntimeError):
    """A chapter that cannot become a notebook; one line that names the chapter and the cell."""


def find_chapters() -> list[Path]:
    """The chapters in their order."""
    return sorted(CHAPTERS.glob("ch[0-9][0-9]_*.py"))


def read_chapter(chapter: Path) -> NotebookNode:
    """The chapter's cells as a notebook without outputs; cell ids are numbers, not random ones."""
    notebook = jupytext.read(chapter, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02}"
    return notebook


def execute(notebook: NotebookNode, name: str) -> None:
    """Run all cells in a fresh kernel of this interpreter; BuildError names the first one that fails."""
    with _kernel_manager() as manager:
        # Not recorded: times. Joined: the pieces in which a kernel happens to send one cell's output.
        client = NotebookClient(notebook, km=manager, timeout=CELL_TIMEOUT, record_timing=False, coalesce_streams=True)
        with client.setup_kernel(cwd=str(ROOT), cleanup_kc=True):
            for index, cell in enumerate(notebook.cells):
                try:
                    client.execute_cell(cell, index)
                except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                    raise BuildError(f"{name}: cell {index} {_first_line(cell)!r} failed: {_reason(error)}") from None
    notebook.metadata = nbformat.from_dict(METADATA)  # the kernel adds the version of its Python


@contextmanager
def _kernel_manager() -> Iterator[AsyncKernelManager]:
    """A manager that starts this interpreter, whatever kernels and IPython settings the user has."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"IPYTHONDIR": f"{folder}/ipython"}):
        yield AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # leaves ipykernel's own entry for sys.executable
            connection_file=f"{folder}/kernel.json",
            transport="tcp" if os.name == "nt" else "ipc",  # sockets in the folder: nothing listens on the network
        )


def _first_line(cell: NotebookNode) -> str:
    return next((line for line in cell.source.splitlines() if line.strip()), "")


def _reason(error: Exception) -> str:
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: {error.evalue}"
    if isinstance(error, CellTimeoutError):
        return f"it took more than {CELL_TIMEOUT} s"
    return "the kernel died"


def build(chapter: Path, folder: Path = NOTEBOOKS) -> Path:
    """Execute a chapter and write its notebook; a chapter that fails leaves the old notebook as it is."""
    notebook = read_chapter(chapter)
    execute(notebook, chapter.name)
    folder.mkdir(parents=True, exist_ok=True)
    path = notebook_path(chapter, folder)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return path


def notebook_path(chapter: Path, folder: Path = NOTEBOOKS) -> Path:
    """Where a chapter's notebook lies."""
    return folder / f"{chapter.stem}.ipynb"


def sources(notebook: NotebookNode) -> list[tuple[str, str, dict]]:
    """What a chapter states of each cell: its type, text and metadata; no outputs."""
    return [(cell.cell_type, cell.source, dict(cell.metadata)) for cell in notebook.cells]


def find_differences(folder: Path = NOTEBOOKS) -> list[str]:
    """One line for each notebook that is missing, differs from its chapter, was not executed, or has no chapter."""
    problems = []
    chapters = find_chapters()
    for chapter in chapters:
        path = notebook_path(chapter, folder)
        if not path.exists():
            problems.append(f"{path.name} is missing")
            continue
        notebook = nbformat.read(path, as_version=4)
        if sources(notebook) != sources(read_chapter(chapter)):
            problems.append(f"{path.name} differs from {chapter.name}")
        elif any(cell.cell_type == "code" and cell.execution_count is None for cell in notebook.cells):
            problems.append(f"{path.name} has cells that were not executed")
    known = {notebook_path(chapter, folder) for chapter in chapters}
    problems += [f"{path.name} has no chapter" for path in sorted(folder.glob("*.ipynb")) if path not in known]
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Build or check; 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m walkthrough.build", description="Make the notebooks of the chapters."
    )
    parser.add_argument("--check", action="store_true", help="execute nothing; fail where a notebook is out of date")
    if parser.parse_args(argv).check:
        problems = find_differences()
        for problem in problems:
            print(f"{problem}; run: python -m walkthrough.build", file=sys.stderr)
        return 1 if problems else 0
    try:
        for chapter in find_chapters():
            print(f"{chapter.name}: executing ...", file=sys.stderr, flush=True)
            start = time.perf_counter()
            path = build(chapter)
            print(f"{path.relative_to(ROOT)}: written after {time.perf_counter() - start:.0f} s", file=sys.stderr)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
