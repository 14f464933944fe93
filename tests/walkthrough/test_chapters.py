"""The chapters run and say what is true, and the notebooks are what the chapters make today."""

import ast
import io
import re
import runpy
import shutil
import tokenize
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tinyllm.shapes import WORDS
from tinyllm.trace.dims import words_of
from walkthrough import build

CHAPTERS = build.find_chapters()
EINOPS = ("rearrange", "einsum", "reduce", "repeat", "pack", "unpack")
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)


@cache
def run(chapter: Path) -> tuple[dict[str, Any], str]:
    """A chapter's variables after its last cell, and all that it printed."""
    with redirect_stdout(io.StringIO()) as printed:
        variables = runpy.run_path(str(chapter))
    return variables, printed.getvalue()


@each_chapter
def test_chapter_runs(chapter: Path):
    _, printed = run(chapter)
    assert printed


def test_one_prompt_ends_as_it_should():
    variables, printed = run(build.CHAPTERS / "ch00_one_prompt.py")
    assert variables["first_token"] == " Paris"
    assert variables["answer"].startswith(" Paris.")
    assert variables["request"].finish_reason == "length"
    assert list(variables["request"].prompt_token_ids) == variables["tokenizer"].encode(variables["prompt"])
    assert variables["first_request"].output_token_ids == variables["request"].output_token_ids
    assert "num_tokens" in variables["shape_error"]
    assert printed.endswith("all answers hold\n")


# --- the notebooks ---------------------------------------------------------------------------------------------------


def test_notebooks_are_made_from_the_chapters():
    assert build.find_differences() == []
    assert build.main(["--check"]) == 0


@each_chapter
def test_notebook_shows_what_the_chapter_prints(chapter: Path):
    notebook = nbformat.read(build.notebook_path(chapter), as_version=4)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {(output.output_type, output.name) for output in outputs} == {("stream", "stdout")}, "no error, no warning"
    shown = "".join(output.text for output in outputs)
    assert not re.search(r"/(home|root|tmp|usr|Users)\b|\x1b|Warning", shown)
    _, printed = run(chapter)
    assert without_probabilities(shown) == without_probabilities(printed), "run: make notebooks"


def without_probabilities(text: str) -> str:
    """Numbers such as 0.773 and .065, whose last digit may depend on the processor, are left out."""
    return re.sub(r"(?<![\w.])[01]?\.\d{3}\b", "#", text)


def test_a_difference_is_found(tmp_path: Path):
    folder = tmp_path / "notebooks"
    shutil.copytree(build.NOTEBOOKS, folder)
    assert build.find_differences(folder) == []
    path = build.notebook_path(CHAPTERS[0], folder)
    (folder / "ch99_foreign.ipynb").write_text("{}")

    whole = nbformat.read(path, as_version=4)
    changed = nbformat.read(path, as_version=4)
    changed.cells[-1].source += " and more"
    nbformat.write(changed, path)
    name = CHAPTERS[0].stem
    foreign = "ch99_foreign.ipynb has no chapter"
    assert build.find_differences(folder) == [f"{name}.ipynb differs from {name}.py", foreign]

    next(cell for cell in whole.cells if cell.cell_type == "code").execution_count = None
    nbformat.write(whole, path)
    assert build.find_differences(folder) == [f"{name}.ipynb has cells that were not executed", foreign]

    path.unlink()
    assert build.find_differences(folder) == [f"{name}.ipynb is missing", foreign]


@pytest.mark.long
@each_chapter
def test_build_executes_a_chapter(chapter: Path, tmp_path: Path):
    built = nbformat.read(build.build(chapter, tmp_path), as_version=4)
    committed = nbformat.read(build.notebook_path(chapter), as_version=4)
    assert build.sources(built) == build.sources(committed)
    assert built.metadata == committed.metadata == build.METADATA
    assert [cell.id for cell in built.cells] == [cell.id for cell in committed.cells]
    outputs = [output for cell in built.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert all(output.output_type != "error" for output in outputs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "reason"),
    [("1 + 'a'", "TypeError: unsupported operand"), ("import os; os._exit(3)", "the kernel died")],
)
def test_a_failing_cell_is_named(code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    chapter = tmp_path / "ch07_bad.py"
    chapter.write_text(f"# %% [markdown]\n# # Title\n\n# %%\nprint('good')\n\n# %%\n{code}\n")
    monkeypatch.setattr(build, "CHAPTERS", tmp_path)
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    assert build.main([]) == 1
    assert f"ch07_bad.py: cell 2 {code!r} failed: {reason}" in capfd.readouterr().err
    assert not list(tmp_path.glob("*.ipynb"))


# --- the laws --------------------------------------------------------------------------------------------------------


@each_chapter
def test_every_dimension_word_is_in_the_glossary(chapter: Path):
    assert dimension_words(chapter.read_text(encoding="utf-8")) - WORDS.keys() == set()


def dimension_words(source: str) -> set[str]:
    """The words of all einops patterns and all tensor annotations; numbers are left out."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EINOPS:
            texts += [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        elif isinstance(node, ast.AnnAssign | ast.arg):
            texts += words_of(node.annotation) or ()
        elif isinstance(node, ast.FunctionDef):
            texts += words_of(node.returns) or ()
    return {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}


def test_dimension_words_are_found():
    source = 'def f(a: Float[Tensor, "one two"]) -> Int[Tensor, " three+1"]:\n    x: Bool[Tensor, "2 four"] = g(a)\n'
    assert dimension_words(source) == {"one", "two", "three", "four"}
    assert dimension_words('rearrange(x, "batch (heads 2) -> heads batch", heads=3)') == {"batch", "heads"}
    assert "group_size" in dimension_words((build.CHAPTERS / "ch00_one_prompt.py").read_text(encoding="utf-8"))


@each_chapter
def test_no_shape_is_typed_by_hand(chapter: Path, typed_shape):
    found = [match[0] for text in prose(chapter) for match in typed_shape.finditer(text)]
    assert found == [], "a shape is printed or asserted by code, never written into prose or a comment"


def prose(chapter: Path) -> list[str]:
    """The markdown cells, and the comments and docstrings of the code cells."""
    texts = []
    for cell in build.read_chapter(chapter).cells:
        if cell.cell_type == "markdown":
            texts.append(cell.source)
            continue
        tokens = tokenize.generate_tokens(io.StringIO(cell.source).readline)
        texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                texts.append(ast.get_docstring(node) or "")
    return texts


@pytest.mark.parametrize(
    "text",
    [
        "gives [13, 576] rows",
        "q is (5, 9, 64)",
        "now [T, H]",
        "of [num_tokens, hidden_size]",
        "stored [out_size in_size]",
        "[5]",
        "a 5 x 576 matrix",
        "5×576",
        "[\n13,\n576 ]",
    ],
)
def test_a_typed_shape_is_found(text: str, typed_shape):
    assert typed_shape.search(text)


@pytest.mark.parametrize(
    "text", ["`frequency[i]` and logits[0]", "`num_tokens` rows", "(temperature 0)", "in 2024, 5 tokens", "[Makefile]"]
)
def test_other_text_is_no_shape(text: str, typed_shape):
    assert not typed_shape.search(text)
