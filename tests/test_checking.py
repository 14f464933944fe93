"""Shape checks are on by default over a written list of modules, off without a trace on request, and never by halves."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
import torch
from torch import Tensor

import tinyllm
from tinyllm import CHECKED_MODULES, ShapeError
from tinyllm.batch import FlatBatch, SamplingBatch
from tinyllm.shapes import WORDS, checking, evaluate

PACKAGE = Path(tinyllm.__file__).parent
# Hooked, these would only be slower: they hold no tensors, or they are what traces and times the others.
NEVER_CHECKED = ("shapes", "config", "errors", "tokenizer", "request", "block_pool", "scheduler", "weights", "engine", "llm",
                 "trace", "cli")  # fmt: skip

# Run in a fresh interpreter: imports every module and says of each function whether jaxtyping wraps it.
REPORT = """
import dataclasses, importlib, inspect, json, os, pkgutil, sys
import tinyllm

def links(function):
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)

def is_wrapped(function):
    return any("jaxtyping" in link.__code__.co_filename for link in links(function) if inspect.isfunction(link))

def functions_of(owner, prefix=""):
    for name, value in vars(owner).items():
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if inspect.isclass(value) and value.__module__ == module.__name__:
            if dataclasses.is_dataclass(value):
                yield f"{name}.__init__", value.__init__
            yield from functions_of(value, f"{name}.")
        elif inspect.isfunction(value) and list(links(value))[-1].__code__.co_filename == module.__file__:
            yield prefix + name, value

report = {}
for info in pkgutil.walk_packages(tinyllm.__path__, "tinyllm."):
    module = importlib.import_module(info.name)
    report[info.name] = {name: is_wrapped(function) for name, function in functions_of(module)}

import torch
from tinyllm.layers.lm_head import gather_rows
from tinyllm.shapes import ShapeError
try:
    gather_rows(torch.zeros(3, 4), torch.zeros(1))
except Exception as error:
    raised = type(error).__name__
json.dump({"report": report, "omp": os.environ["OMP_WAIT_POLICY"], "raised": raised}, sys.stdout)
"""


def fresh(**environment: str) -> dict:
    """What REPORT prints in an interpreter whose environment has only these two variables of ours, where given."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("TINYLLM_CHECK", "OMP_WAIT_POLICY")}
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**inherited, "PYTHONPATH": os.pathsep.join(paths), **environment}
    result = subprocess.run(
        [sys.executable, "-c", REPORT], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def by_default() -> dict:
    return fresh()


@pytest.fixture(scope="module")
def switched_off() -> dict:
    return fresh(TINYLLM_CHECK="0", OMP_WAIT_POLICY="active")


def is_checked(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in CHECKED_MODULES)


def sources() -> dict[str, str]:
    """Module name -> source of every file of the package."""
    texts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        texts[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return texts


CHECKED_SOURCES = {name: text for name, text in sources().items() if is_checked(name)}


def declared_functions(text: str) -> set[str]:
    """Functions and methods that a module's own text declares, dataclass constructors included."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
            if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                names.add(f"{node.name}.__init__")
    return names


# ---- the list ----------------------------------------------------------------------------------------------------------


def test_the_written_list() -> None:
    assert CHECKED_MODULES == (
        "tinyllm.batch",
        "tinyllm.kv_cache",
        "tinyllm.layers",
        "tinyllm.model",
        "tinyllm.sampler",
    )
    assert not any(is_checked(f"tinyllm.{name}") for name in NEVER_CHECKED)


def test_checks_are_on_by_default_for_every_function_of_the_list_and_no_other(by_default: dict) -> None:
    for module, functions in by_default["report"].items():
        expected = is_checked(module)
        assert all(is_wrapped == expected for is_wrapped in functions.values()), (module, functions)
    assert by_default["raised"] == "ShapeError"


def test_the_report_has_every_function_of_the_checked_modules(by_default: dict) -> None:
    """A function that the report misses would pass the test above unseen."""
    for module, text in CHECKED_SOURCES.items():
        assert by_default["report"][module].keys() == declared_functions(text), module
    assert sum(len(functions) for name, functions in by_default["report"].items() if is_checked(name)) > 30


def test_0_wraps_nothing(by_default: dict, switched_off: dict) -> None:
    assert not any(any(functions.values()) for functions in switched_off["report"].values())
    assert {name: sorted(functions) for name, functions in switched_off["report"].items()} == {
        name: sorted(functions) for name, functions in by_default["report"].items()
    }
    assert switched_off["raised"] == "IndexError", "torch's own error: a float tensor is no index"


def test_omp_waits_passively_unless_the_user_says_otherwise(by_default: dict, switched_off: dict) -> None:
    assert by_default["omp"] == "passive"
    assert switched_off["omp"] == "active"


# ---- a wrong rank, at every function -----------------------------------------------------------------------------------

NO_SHAPED_ARGUMENT = {
    "batch._floats", "batch._ints", "batch.build_batch", "batch.build_sampling_batch", "batch.FlatBatch.__post_init__",
    "kv_cache.KVCache.__init__", "kv_cache.KVCache.layer", "kv_cache.KVCache.num_bytes",
    "layers.attention.backends.find_backend", "layers.attention.gqa.GroupedQueryAttention.__init__",
    "layers.attention.per_request.lay_flat",  # a list, whose items the ledger compares
    "layers.attention.reference.causal_mask", "layers.decoder.DecoderLayer.__init__", "layers.embedding.Embedding.__init__",
    "layers.linear.Linear.__init__", "layers.mlp.MLP.__init__", "layers.norm.RMSNorm.__init__",
    "layers.rope.RotaryEmbedding.__init__", "layers.rope.RotaryEmbedding.inv_freq", "model.Decoder.__init__",
    "model.Decoder._head_weight", "model.Decoder.forward",
    "sampler.noise._shift_right", "sampler.noise.mix",  # tensors of any shape
}  # fmt: skip
"""What takes no tensor that has dimension words."""


def checked_functions() -> dict[str, Callable]:
    """Every function and method that a checked module declares, by its name below tinyllm."""
    found: dict[str, Callable] = {}
    for name, text in CHECKED_SOURCES.items():
        module = importlib.import_module(name)
        for qualname in declared_functions(text):
            owner, _, last = qualname.rpartition(".")
            value = vars(getattr(module, owner) if owner else module)[last]
            value = getattr(value, "fget", None) or getattr(value, "__func__", value)
            found[f"{name.removeprefix('tinyllm.')}.{qualname}"] = value
    return found


CHECKED_FUNCTIONS = checked_functions()


def shaped(hint: Any) -> Any:
    """The hint of a tensor with dimension words, also of one that may be None; None for any other."""
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next((member for member in members if hasattr(member, "dim_str")), None)


def shaped_arguments() -> list[tuple[str, str]]:
    """(function, argument) of every tensor that a checked function takes."""
    return [
        (name, parameter.name)
        for name, function in CHECKED_FUNCTIONS.items()
        for parameter in inspect.signature(function).parameters.values()
        if shaped(parameter.annotation)
    ]


def tensor_of(hint: Any, extra_axes: int = 0) -> Tensor:
    """A tensor that satisfies the hint together with all others made so, or one that has axes too many."""
    sizes = {word: 2 + i for i, word in enumerate(WORDS)}
    shape = [evaluate(dim, sizes) or 0 for dim in hint.dim_str.split()]
    dtype = next(dtype for dtype in (torch.float32, torch.int64) if str(dtype).removeprefix("torch.") in hint.dtypes)
    return torch.zeros([*shape, *[1] * extra_axes], dtype=dtype)


def value_of(hint: Any) -> Any:
    """Something that satisfies the hint of an argument."""
    if isinstance(hint, UnionType):
        return None
    if shaped(hint):
        return tensor_of(hint)
    if get_origin(hint) is tuple:
        return ()
    if hint in (int, float, bool):
        return hint(1)
    return object.__new__(hint) if isinstance(hint, type) and hint in (FlatBatch, SamplingBatch) else lambda *_: None


@pytest.mark.parametrize(("name", "argument"), sorted(shaped_arguments()))
def test_a_wrong_rank_is_refused_in_one_line_at_every_function(name: str, argument: str) -> None:
    """Which names function and argument, whatever stands before it in the signature."""
    function = CHECKED_FUNCTIONS[name]
    hints = {key: parameter.annotation for key, parameter in inspect.signature(function).parameters.items()}
    arguments = {key: value_of(hint) for key, hint in hints.items()}
    hint = shaped(hints[argument])
    arguments[argument] = tensor_of(hint, extra_axes=1)
    num_axes = len(hint.dim_str.split())
    with checking(True), pytest.raises(ShapeError) as error:
        function(*arguments.values())
    said = str(error.value)
    assert (
        said.startswith(f"tinyllm.{name.removesuffix('.__init__')}")
        and f": {argument} is (" in said
        and "\n" not in said
    )
    assert f"expected [{hint.dim_str}]: it has {num_axes + 1} axes, not {num_axes}. Bound before: " in said


def test_every_function_that_takes_a_shaped_tensor_was_tried() -> None:
    tried = {name for name, _ in shaped_arguments()}
    assert CHECKED_FUNCTIONS.keys() - tried == NO_SHAPED_ARGUMENT
    assert len(tried) >= 30 and len(shaped_arguments()) > 60


# ---- what jaxtyping would leave unchecked, silently --------------------------------------------------------------------


def _is_jaxtyping(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and isinstance(node.slice.elts[-1], ast.Constant)
    )


def unchecked_containers(text: str) -> Iterator[str]:
    """NamedTuples, and tensors inside a list, dict, Sequence or similar: only tuples and dataclasses are checked.

    An item's word with an underscore, ``_query_len``, says that it is free: the trace's ledger compares it, item by item.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name | ast.Attribute | ast.alias) and "NamedTuple" in ast.unparse(node):
            yield "NamedTuple"
        if (
            isinstance(node, ast.Subscript)
            and not _is_jaxtyping(node)
            and ast.unparse(node.value) not in ("tuple", "Callable")
        ):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            hidden = (item for item in items if _is_jaxtyping(item) and not re.search(r"['\s]_\w", ast.unparse(item)))
            yield from (ast.unparse(node) for _ in hidden)


def unchecked_attributes(text: str) -> Iterator[str]:
    """``self.x: Float[...] = ...`` reads like a check and is none."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Attribute)
            and _is_jaxtyping(node.annotation)
        ):
            yield ast.unparse(node)


def checks_disabled(text: str) -> Iterator[str]:
    """Constructs that the hook skips or that make it see strings instead of types."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AsyncFunctionDef):
            yield f"async def {node.name}"
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            yield ast.unparse(node)
        if isinstance(node, ast.Name | ast.Attribute | ast.alias) and "TYPE_CHECKING" in ast.unparse(node):
            yield "TYPE_CHECKING"


@pytest.mark.parametrize("module", CHECKED_SOURCES)
def test_no_checked_module_hides_a_tensor_from_the_checks(module: str) -> None:
    assert [*unchecked_containers(CHECKED_SOURCES[module]), *unchecked_attributes(CHECKED_SOURCES[module])] == []


@pytest.mark.parametrize("module", sources())
def test_no_module_disables_the_checks(module: str) -> None:
    assert list(checks_disabled(sources()[module])) == []


@pytest.mark.parametrize(
    ("find", "text", "found"),
    [
        (unchecked_containers, "class A(NamedTuple):\n    x: int", 1),
        (unchecked_containers, "import typing\nclass A(typing.NamedTuple): ...", 1),
        (unchecked_containers, "def f(x: list[Float[Tensor, 'num_tokens']]): ...", 1),
        (unchecked_containers, "def f(x: list[Float[Tensor, '_query_len head_dim']]): ...", 0),
        (unchecked_containers, "def f(x: dict[str, Int[Tensor, ' num_reqs']]): ...", 1),
        (unchecked_containers, "def f(x: tuple[Float[Tensor, 'num_tokens'], int], y: list[int]): ...", 0),
        (unchecked_attributes, "self.x: Float[Tensor, 'num_tokens'] = y", 1),
        (unchecked_attributes, "x: Float[Tensor, 'num_tokens'] = y", 0),
        (checks_disabled, "async def f(): ...", 1),
        (checks_disabled, "from __future__ import annotations", 1),
        (checks_disabled, "from typing import TYPE_CHECKING", 1),
        (checks_disabled, "import typing\nif typing.TYPE_CHECKING:\n    import x", 1),
        (checks_disabled, "def f(): ...", 0),
    ],
)
def test_the_searches_find_what_they_look_for(find: Callable[[str], Iterator[str]], text: str, found: int) -> None:
    assert len(list(find(text))) == found
