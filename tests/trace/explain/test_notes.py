"""The notes speak of what there is, say what readers trip over, and hold no shape."""

import ast
import re
from pathlib import Path

import pytest

from tinyllm.shapes import WORDS
from tinyllm.trace import explain as package
from tinyllm.trace.costs import KIND_LETTERS, STAGES
from tinyllm.trace.explain import explain
from tinyllm.trace.explain.dimensions import CARE
from tinyllm.trace.explain.fields import FIELDS_HERE
from tinyllm.trace.explain.kinds import KINDS
from tinyllm.trace.explain.notes.fields import FIELDS
from tinyllm.trace.explain.notes.functions import FUNCTIONS, LOCALS, MODULES
from tinyllm.trace.explain.notes.terms import SPELLINGS, TERMS
from tinyllm.trace.explain.sources import batch_fields, modules, tensor_functions
from tinyllm.trace.explain.terms import TERMS_HERE
from tinyllm.trace.recorder import PACKAGE


def test_the_notes_name_what_there_is():
    specs = tensor_functions()
    qualnames = {spec.qualname for spec in specs}
    arguments = [(spec.qualname, name) for spec in specs for name, words in spec.arguments.items() if words]
    named = [(spec.qualname, name) for spec in specs for name in spec.locals]
    assert FIELDS.keys() == set(batch_fields())
    assert STAGES.keys() <= FUNCTIONS.keys() <= qualnames
    assert MODULES.keys() == {module.name for module in modules()}
    assert LOCALS.keys() <= {*named, *arguments}
    assert CARE.keys() <= WORDS.keys()
    assert KINDS.keys() == KIND_LETTERS.keys()


def test_terms_come_from_lines_that_exist():
    for name, term in TERMS.items():
        lines = (PACKAGE / term.file).read_text().splitlines()
        assert any(line.strip().startswith(term.start) for line in lines), name
    assert set(SPELLINGS.values()) <= TERMS.keys()
    assert TERMS_HERE.keys() <= TERMS.keys()
    assert FIELDS_HERE.keys() <= {name for _, name in batch_fields()}


def is_used(file: str, start: str) -> bool:
    """Whether production code uses what a line such as ``def render_totals`` begins: elsewhere in its file or by import.

    A method or property is used where any module reads an attribute of its name.
    """
    name = re.sub(r"^(def|class) |\W.*", "", start)
    trees = {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    body = trees[PACKAGE / file].body
    own = [
        node
        for node in body
        if getattr(node, "name", "") == name or ast.unparse(node).startswith((f"{name} =", f"{name}:"))
    ]
    if not own:  # of a class
        readers = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        return any(node.attr == name for node in readers)
    module = "tinyllm." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imports = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if any(node.module == module and alias.name == name for node in imports for alias in node.names):
        return True
    return any(isinstance(n, ast.Name) and n.id == name for node in body if node not in own for n in ast.walk(node))


def test_terms_come_from_code_that_runs():
    """A term that sends the reader to code which nothing but a test calls would explain what the trace does not do."""
    places = {(term.file, term.start) for term in TERMS.values()}
    assert len(places) > 40
    assert [place for place in sorted(places) if not is_used(*place)] == []
    assert not is_used("trace/explain/texts.py", "def no_such_function"), "the rule finds what it looks for"


def test_no_shape_is_typed_into_a_reason(typed_shape):
    texts = [word.why for word in WORDS.values()]
    for file in Path(package.__file__ or "").parent.rglob("*.py"):
        tree = ast.parse(file.read_text())
        texts += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert [text for text in texts if typed_shape.search(text)] == []


@pytest.mark.parametrize(
    ("word", "pitfall"),
    [
        ("cu_seqlens_q", "why the +1"),
        ("split_heads", "why no transpose"),
        ("merge_heads", "why do others transpose"),
        ("Linear", "stored with one row per output"),
        ("qkv_proj", "stored with one row per output"),
        ("num_blocks", "none of its axes is a sequence length"),
        ("block_size", "none of its axes is a sequence length"),
        ("layer_kv", "none of its axes is a sequence length"),
        ("seq_lens", "do not add up to its rows"),
        ("query_len", "do not add up to its rows"),
    ],
)
def test_what_readers_trip_over_is_said(word, pitfall):
    assert pitfall in " ".join(" ".join(explain(word)).split())
