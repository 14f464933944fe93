"""What the sources say of their shapes is read as Python reads it."""

import ast
import inspect
from pathlib import Path

import pytest

from tinyllm import batch
from tinyllm.layers.attention import reference
from tinyllm.layers.norm import RMSNorm
from tinyllm.trace.dims import field_words, function_specs, words_of

SOURCE = '''
def outer(a: Float[Tensor, "num_tokens hidden_size"], n: int = 1) -> tuple[Int[Tensor, " num_tokens"], None]:
    """First sentence. Second.

    More."""
    b: Float[Tensor, "hidden_size"] = a[0]
    c: Float[Tensor, " num_tokens"] | None
    c = None
    d = [e for e in a]
    for i in range(n):
        f = i
        f = f + 1
    a = a + 1

    def inner(g: Float[Tensor, "2 half_dim"]) -> None:
        h: Float[Tensor, "head_dim"] = g

    return b, c


class Layer:
    field: Float[Tensor, "num_reqs+1"]

    @decorated
    @twice
    def forward(self, x: Float[Tensor, "num_tokens 1"] | None) -> Float[Tensor, "num_tokens 1"]:
        return x
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    return file


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if text in line)


def test_a_function_s_words(source):
    spec = function_specs(source)["outer", line_of("def outer")]
    assert spec.arguments == {"a": ("num_tokens", "hidden_size"), "n": None}
    assert spec.locals == {"b": ("hidden_size",), "c": ("num_tokens",)}
    assert spec.results == (("num_tokens",), None)
    assert spec.summary == "First sentence. Second."


def test_last_assignment_counts_and_inner_scopes_do_not(source):
    spec = function_specs(source)["outer", line_of("def outer")]
    assert spec.assigned_lines["c"] == line_of("c = None")
    assert spec.assigned_lines["f"] == line_of("f = f + 1")
    assert "e" not in spec.assigned_lines and "h" not in spec.assigned_lines
    assert spec.rebound_arguments == {"a"}
    assert spec.source_of(spec.assigned_lines["a"]) == "a = a + 1"


def test_methods_nested_functions_and_fields(source):
    specs = function_specs(source)
    assert specs["outer.<locals>.inner", line_of("def inner")].locals == {"h": ("head_dim",)}
    # A code object's first line is that of its first decorator.
    assert specs["Layer.forward", line_of("@decorated")].arguments["x"] == ("num_tokens", "1")
    assert field_words(source, "Layer") == {"field": ("num_reqs+1",)}
    assert field_words(source, "Missing") == {}


@pytest.mark.parametrize("function", [reference.attend, RMSNorm.forward, batch.build_batch])
def test_the_key_is_what_a_code_object_knows_of_itself(function):
    code = inspect.unwrap(function).__code__
    assert (code.co_qualname, code.co_firstlineno) in function_specs(Path(code.co_filename))


@pytest.mark.parametrize("text", ["int", "list[int]", "Callable[[Tensor], Tensor]", "None", "Tensor | None"])
def test_annotations_without_words(text):
    assert words_of(ast.parse(text, mode="eval").body) is None


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        ('list[Float[Tensor, "query_len num_heads"]]', ("query_len", "num_heads")),
        ('Sequence[Float[Tensor, "_query_len num_heads"]] | None', ("query_len", "num_heads")),
        ('tuple[Float[Tensor, " num_tokens"], ...]', ("num_tokens",)),
        ('tuple[Float[Tensor, " num_tokens"], Float[Tensor, " num_tokens"]]', None),
        ("list[int]", None),
        ("tuple[int, ...]", None),
        ("Sequence[Tensor]", None),
    ],
)
def test_the_words_of_a_list_are_those_of_its_items(annotation, words):
    assert words_of(ast.parse(annotation, mode="eval").body) == words


def test_results_of_any_number_have_the_words_of_each(tmp_path):
    file = tmp_path / "lists.py"
    file.write_text('def cut(x) -> tuple[Float[Tensor, " num_tokens"], ...]:\n    return x\n')
    assert function_specs(file)["cut", 1].results == (("num_tokens",),)
