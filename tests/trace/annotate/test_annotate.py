"""Every tensor module, annotated, is its source and, between the lines, what the recorder saw."""

import ast
import html
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tinyllm.trace.annotate import MARK, Run, annotatable, annotate, annotate_html, find_source
from tinyllm.trace.dims import function_specs
from tinyllm.trace.recorder import PACKAGE

every_file = pytest.mark.parametrize("path", annotatable())


def test_every_tensor_file_is_here() -> None:
    assert len(annotatable()) > 15 and "tinyllm/layers/attention/reference.py" in annotatable()


def notes_in(lines: list[str]) -> list[tuple[str, str, list[str]]]:
    """(name, symbols, shape in each run) of every note that has shapes."""
    found = []
    for line in lines:
        columns = re.split(r" {2,}", line.strip().removeprefix(f"{MARK} "))
        shapes = [column.partition(" ")[2].strip() for column in columns if column.startswith(("prefill ", "decode "))]
        if len(shapes) == 2 and line.lstrip().startswith(MARK) and "computes" not in line and columns[0] != "call":
            found.append((columns[0], columns[1] if len(columns) == 4 else "", shapes))
    return found


def functions_in(text: str) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                found[prefix + child.name] = child
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(text), "")
    return found


@every_file
def test_the_source_stands_in_it_word_for_word(runs, path):
    lines = annotate(path, runs)
    source = (PACKAGE.parent / path).read_text().splitlines()
    assert [line for line in lines if not line.lstrip().startswith(MARK)] == source, "without the notes"
    assert not any(MARK in line for line in source), "a source with the mark in it could not be told from a note"
    ast.parse("\n".join(lines))
    assert all(line == line.rstrip() for line in lines if MARK in line)
    assert max((len(line) for line in lines if MARK in line), default=0) <= 120


@every_file
def test_every_annotated_local_of_what_ran_has_a_note(runs, path, calls_of):
    lines = annotate(path, runs)
    functions = functions_in("\n".join(lines))
    specs = function_specs(find_source(path))
    assert sorted(qualname for qualname, _ in specs) == sorted(functions)
    assert len(specs) > 0 or path.endswith("__init__.py")
    for spec in specs.values():
        node = functions[spec.qualname]
        end = node.end_lineno or node.lineno
        own = lines[node.lineno - 1 : end] + list(itertools.takewhile(lambda line: MARK in line, lines[end:]))
        calls = [call for run in runs for call in calls_of(run, path).get((spec.qualname, spec.first_line), [])]
        names = {name for name, _, _ in notes_in(own)}
        if not calls:
            assert any("not run here" in line for line in own) and not names
            continue
        seen = {value.name for call in calls for value in call.values if value.role == "result"}
        seen |= {v.name.partition("[")[0] for call in calls for v in call.values if v.role == "argument"}
        seen |= {value.name for call in calls for value in call.values if value.name in spec.locals}
        assert seen - {"_"} <= names, spec.qualname


@every_file
def test_every_shape_was_recorded(runs, path, calls_of):
    """And with it its symbols: they are those of the annotation that the ledger has checked."""
    recorded: set[tuple[int, str, str]] = set()
    for index, run in enumerate(runs):
        for calls in calls_of(run, path).values():
            for call in calls:
                recorded |= {(index, value.name, f"[{','.join(map(str, value.sizes))}]") for value in call.values}
                recorded |= {(index, name, str(size)) for name, size in call.ints.items()}
    notes = notes_in(annotate(path, runs))
    assert bool(notes) == bool(recorded)
    for name, _, shapes in notes:
        for index, shape in enumerate(shapes):
            if " " in shape and shape != "no tensor":  # a list: each item is what some call got or gave back
                of_any = {text for i, _, text in recorded if i == index}
                assert set(shape.split()) <= of_any | {"..."}, (name, shape)
                continue
            assert shape in ("-", "no tensor") or (index, name, shape) in recorded, (name, shape)


@every_file
def test_the_tracer_s_lines_fit_in_100_columns(runs, path):
    """But for the indentation that the source gives them."""
    titled = [replace(run, title=", ".join(f"{chr(65 + i)} computes 5 of 5 tokens" for i in range(20))) for run in runs]
    lines = [line for line in annotate(path, titled) if MARK in line]
    assert max(len(line.strip()) for line in lines) <= 100


# --- as a page --------------------------------------------------------------------------------------------------------


def head_of(path: str, runs: tuple[Run, ...]) -> list[str]:
    """The tracer's lines before the source's first."""
    return list(itertools.takewhile(lambda line: line.startswith(MARK), annotate(path, runs)))


class Tags(HTMLParser):
    """Collects the names of tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@every_file
def test_the_page_holds_the_source_too(runs, path):
    """With a number before each line that is the line's anchor, and without a script or anything else from outside."""
    page = annotate_html(path, runs)
    code = page.rpartition("<pre>")[2].partition("</pre>")[0].split("\n")
    numbered = [re.fullmatch(r'<a id="L(\d+)" href="#L(\d+)"> *(\d+)</a>(?:  (.*))?', line) for line in code]
    lines = [match for match in numbered if match]
    source = (PACKAGE.parent / path).read_text().splitlines()
    assert [html.unescape(match[4] or "") for match in lines] == source
    assert [match.groups()[:3] for match in lines] == [(str(n),) * 3 for n in range(1, len(source) + 1)]
    others = [line for line, match in zip(code, numbered, strict=True) if not match]
    assert [html.unescape(line.strip().removeprefix("<b>").removesuffix("</b>")) for line in others] == [
        line.rstrip() for line in annotate(path, runs)[len(head_of(path, runs)) :] if line.lstrip().startswith(MARK)
    ]
    parser = Tags()
    parser.feed(page)
    assert parser.tags <= {"html", "head", "meta", "title", "style", "body", "h1", "pre", "a", "b"}
    assert parser.attributes <= {"id", "href", "lang", "charset", "name", "content"}


def test_the_page_escapes_what_the_source_and_the_run_hold(plain):
    hostile = Run("prefill", "<script>alert(1)</script> & so on", "<b>model</b>", plain[0].calls, plain[0].lines,
                  plain[0].requests)  # fmt: skip
    page = annotate_html("layers/attention/reference.py", (hostile, plain[1]))
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; so on" in page
    assert "assert query_len &lt;= seq_len" in page and "-&gt; Float[Tensor" in page
    assert "&lt;b&gt;model&lt;/b&gt;" in page
    assert "prefers-color-scheme: dark" in page and "http" not in page.partition("<pre>")[0]


def test_the_page_suits_a_phone(plain):
    page = annotate_html("batch.py", plain)
    assert "overflow-wrap: anywhere" in page and "white-space: pre-wrap" in page and "max-width: 600px" in page
