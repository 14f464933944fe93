"""One word per dimension: every word in an annotation or an einops pattern stands in the glossary, and every word is used."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinyllm
from tinyllm.shapes import WORDS

PACKAGE = Path(tinyllm.__file__).parent
WALKTHROUGH = Path(__file__).parent.parent / "walkthrough"
LITERALS = {"1", "2"}
EXPRESSIONS = {"num_reqs+1"}
EINOPS = {"rearrange", "einsum", "reduce", "repeat", "pack", "unpack", "parse_shape"}
# What other code calls the same things; the design has one word for each.
NEVER = {"batch_size", "n_head", "n_heads", "n_layer", "n_layers", "d_model", "page_size", "n_rep", "head_size", "context_len",
         "d_ff", "d_k", "n_local_heads"}  # fmt: skip


def source_files() -> dict[str, str]:
    files = {str(path.relative_to(PACKAGE.parent)): path for path in sorted(PACKAGE.rglob("*.py"))}
    files |= {f"walkthrough/{path.name}": path for path in sorted(WALKTHROUGH.glob("*.py"))}
    return {name: path.read_text() for name, path in files.items()}


SOURCES = source_files()
every_file = pytest.mark.parametrize("name", SOURCES)


def imported_from(tree: ast.AST, library: str) -> dict[str, str]:
    """Local name -> name in the library, for ``from library import ...``."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == library]
    return {alias.asname or alias.name: alias.name for node in nodes for alias in node.names}


def is_from(node: ast.expr, library: str, names: dict[str, str]) -> bool:
    """Whether an expression is ``name`` imported from the library, or ``library.name``."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == library
    return isinstance(node, ast.Name) and node.id in names


def annotations(text: str) -> Iterator[ast.expr]:
    """The dimension string of every ``Float[Tensor, "..."]``, wherever it stands: signature, local, field, alias."""
    tree = ast.parse(text)
    names = imported_from(tree, "jaxtyping")
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Tuple)
            and is_from(node.value, "jaxtyping", names)
        ):
            yield node.slice.elts[-1]


def einops_calls(text: str) -> Iterator[ast.Call]:
    tree = ast.parse(text)
    names = {local: name for local, name in imported_from(tree, "einops").items() if name in EINOPS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_from(node.func, "einops", names):
            yield node


def pattern_of(call: ast.Call) -> ast.expr | None:
    """The pattern is rearrange's second argument and einsum's last."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    strings = [arg for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if strings:
        return strings[0]
    return call.args[-1 if name == "einsum" else 1] if len(call.args) > 1 else None


def used_words(text: str) -> Iterator[str]:
    """Every word, number and expression of the annotations, patterns and einops' axis sizes of a source."""
    for node in annotations(text):
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if not is_string:
            yield f"{ast.unparse(node)}: no literal string"
            continue
        yield from (word.removeprefix("_") for word in node.value.split())  # _query_len: each item has its own
    for call in einops_calls(text):
        pattern = pattern_of(call)
        if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str):
            yield from re.sub(r"->|[(),]", " ", pattern.value).split()
        else:
            yield f"{ast.unparse(call)}: no literal pattern"
        yield from (keyword.arg or "**" for keyword in call.keywords if keyword.arg != "reduction")


def unknown_words(text: str) -> list[str]:
    return sorted(set(used_words(text)) - WORDS.keys() - LITERALS - EXPRESSIONS)


def without_leading_space(text: str) -> list[str]:
    """One-axis strings that a linter would take for a forward reference to a name."""
    strings = [node.value for node in annotations(text) if isinstance(node, ast.Constant)]
    return [string for string in strings if re.fullmatch(r"\w+", string)]


def identifiers(text: str) -> Iterator[str]:
    """Names, attributes, arguments, keywords, functions, classes and imports of a source."""
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def forbidden_names(text: str) -> list[str]:
    return sorted(NEVER & set(identifiers(text)))


# ---- the package -------------------------------------------------------------------------------------------------------


@every_file
def test_every_word_stands_in_the_glossary(name: str) -> None:
    assert unknown_words(SOURCES[name]) == []


@every_file
def test_one_axis_strings_start_with_a_space(name: str) -> None:
    assert without_leading_space(SOURCES[name]) == []


@every_file
def test_no_second_word_for_a_dimension(name: str) -> None:
    assert forbidden_names(SOURCES[name]) == []


def test_every_word_is_used_or_belongs_to_a_config() -> None:
    used = {word for text in SOURCES.values() for word in used_words(text)}
    unused = [word.name for word in WORDS.values() if word.name not in used and word.scope not in ("config", "cache")]
    assert unused == []
    assert len(used & WORDS.keys()) > 20, "the search finds the annotations"


def test_symbols_are_unique_and_short() -> None:
    symbols = [word.symbol for word in WORDS.values()]
    assert len(set(symbols)) == len(symbols)
    assert all(1 <= len(symbol) <= 5 and " " not in symbol for symbol in symbols)


def test_words_are_lower_case_and_explained() -> None:
    for word in WORDS.values():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", word.name), word
        assert word.meaning and not word.meaning.endswith("."), word
    assert not NEVER & WORDS.keys()


# ---- the search finds what it looks for --------------------------------------------------------------------------------

HEADER = "from jaxtyping import Float, Int\nfrom einops import rearrange, einsum\nimport jaxtyping, einops\n"
GOOD = (PACKAGE / "layers" / "attention" / "reference.py").read_text()


def test_a_typo_in_a_real_source_is_found_wherever_it_stands() -> None:
    """Each occurrence of a word in turn is misspelt: signatures, results, locals, patterns and axis sizes."""
    assert unknown_words(GOOD) == []
    places = list(re.finditer(r"\bnum_kv_heads\b", GOOD))
    mutants = [f"{GOOD[: place.start()]}num_kv_haeds{GOOD[place.end() :]}" for place in places]
    variables = [node for node in ast.walk(ast.parse(GOOD)) if isinstance(node, ast.Name) and node.id == "num_kv_heads"]
    caught = [mutant for mutant in mutants if unknown_words(mutant) == ["num_kv_haeds"]]
    assert len(caught) == len(places) - len(variables) > 10  # a Python variable of that name is no annotation


@pytest.mark.parametrize(
    ("search", "text", "found"),
    [
        (unknown_words, 'def f(x: Float[Tensor, "num_tokens hidden_sise"]): ...', ["hidden_sise"]),
        (unknown_words, 'def f() -> tuple[Int[Tensor, " tokens"], int]: ...', ["tokens"]),
        (unknown_words, 'def f(x: Float[Tensor, "num_tokens width"] | None = None): ...', ["width"]),
        (unknown_words, 'class A:\n    x: Float[Tensor, "num_reqs rows"]', ["rows"]),
        (unknown_words, 'def f():\n    x: Float[Tensor, "num_reqs rows"] = y', ["rows"]),
        (unknown_words, 'X = jaxtyping.Float[Tensor, "num_reqs rows"]', ["rows"]),
        (unknown_words, 'def f(x: Float[Tensor, "num_reqs 3"]): ...', ["3"]),
        (unknown_words, 'def f(x: Float[Tensor, "num_reqs num_reqs+2"]): ...', ["num_reqs+2"]),
        (unknown_words, 'def f(x: Float[Tensor, "... hidden_size"]): ...', ["..."]),
        (unknown_words, "def f(x: Float[Tensor, DIMS]): ...", ["DIMS: no literal string"]),
        (unknown_words, 'rearrange(x, "num_tokens (h head_dim) -> num_tokens h head_dim")', ["h"]),
        (unknown_words, 'rearrange(x, "num_tokens q_size -> q_size num_tokens", q=3)', ["q"]),
        (unknown_words, 'einops.einsum(x, y, "num_tokens i, i -> num_tokens")', ["i"]),
        (unknown_words, "einsum(x, y, pattern)", ["einsum(x, y, pattern): no literal pattern"]),
        (unknown_words, 'def f(x: Float[Tensor, "num_reqs 1"], y: Int[Tensor, " num_reqs+1"]): ...', []),
        (without_leading_space, 'def f(x: Float[Tensor, "num_tokens"]): ...', ["num_tokens"]),
        (without_leading_space, 'def f(x: Float[Tensor, " num_tokens"], y: Float[Tensor, "num_tokens 1"]): ...', []),
        (forbidden_names, "batch_size = 3", ["batch_size"]),
        (forbidden_names, "def f(n_rep): return self.head_size", ["head_size", "n_rep"]),
        (forbidden_names, "f(d_model=3)\nfrom x import page_size", ["d_model", "page_size"]),
        (forbidden_names, 'x = "batch_size"', []),
    ],
)
def test_each_search_finds_what_it_looks_for(search: Callable[[str], list[str]], text: str, found: list[str]) -> None:
    assert search(HEADER + text) == found


def comments_and_docstrings(source: str) -> list[str]:
    """What a file says in prose: doctests, whose output a run has checked, left out."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts.append(re.sub(r"^\s*>>>.*?(?:\n\s*\n|\Z)", "", ast.get_docstring(node) or "", flags=re.M | re.S))
    return texts


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("tinyllm")])
def test_no_shape_is_typed_by_hand(name: str, typed_shape: re.Pattern[str]) -> None:
    found = [match[0] for text in comments_and_docstrings(SOURCES[name]) for match in typed_shape.finditer(text)]
    assert found == [], "a shape is a checked annotation or text that the tracer wrote"


def test_the_readme_types_no_shape_outside_its_generated_blocks(typed_shape: re.Pattern[str]) -> None:
    prose = re.sub(r"^```.*?^```$", "", (PACKAGE.parent / "README.md").read_text(), flags=re.M | re.S)
    assert typed_shape.findall(prose) == []


def test_a_typed_shape_in_a_docstring_is_found(typed_shape: re.Pattern[str]) -> None:
    source = '"""Rows of [num_tokens hidden_size]."""\nx = 1  # [13, 576]\n'
    found = [match[0] for text in comments_and_docstrings(source) for match in typed_shape.finditer(text)]
    assert found == ["[13, 576]", "[num_tokens hidden_size]"]
