"""The arrows of the design, read from the source with ast: who may import whom, and what a layer may not do.

Each rule is a function from source text to its violations, so that the last tests can show that it finds them.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinyllm

PACKAGE = Path(tinyllm.__file__).parent
ROOT = Path(__file__).parent.parent

# A module imports from its own line or lines above it, never below.
LEVELS = [
    {"shapes", "config", "errors", "console"},
    {"tokenizer", "request", "block_pool", "grammar", "planner"},
    {"kv_cache_manager", "scheduler", "batch", "kv_cache"},
    {"layers", "sampler"},
    {"model", "compress", "speculative"},
    {"weights", "parallel"},
    {"engine"},
    {"llm", "__init__"},  # the package's own face: public names only
    {"options"},  # of the commands
    {"trace"},
    {"bench", "cli", "walkthrough"},
]
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}

PLAIN = {"tokenizer", "request", "block_pool", "kv_cache_manager", "scheduler", "grammar", "config", "errors", "shapes", "console",
         "planner"}  # fmt: skip
NO_TENSORS = ("torch", "numpy", "einops", "safetensors", "gguf", "jaxtyping", "beartype")
# The parts of the trace that work on any model: they know words and sizes, not engines.
TRACE_PARTS = {
    "recorder",
    "calls",
    "reading",
    "dims",
    "ledger",
    "costs",
    "record",
    "scheduled",
    "sums",
    "collect",
    "to_json",
    "terminal",
    "html",
    "explain",
    "values",
    "kernels",
    "calibrate",
    "text",
    "shape_text",
    "fold",
}
VIEWS = {"terminal", "html", "explain"}  # what they share lies beside them
TRACE_MAY_IMPORT = ("tinyllm.shapes", "tinyllm.config", "tinyllm.errors", "tinyllm.trace.")

# Each needs a tensor's values on the host, which a meta tensor has not and a GPU step should not wait for.
HOST_SYNC = {
    "item",
    "tolist",
    "nonzero",
    "argwhere",
    "unique",
    "unique_consecutive",
    "bincount",
    "masked_select",
    "cpu",
    "numpy",
}
SYNC_FREE = ("layers", "model", "sampler", "kv_cache")
MAX_LINES = 40

# The tracer reads a function's tensors when it returns, so each annotated name must stand for one tensor.
TRACED = ("batch", "kv_cache", "layers", "model", "sampler")
LOOP_CARRIED = {("model", "forward: x")}  # the stream that runs through the layers, the one exception

OTHER_PROJECT = "sky" + "zh"
TEXT_SUFFIXES = {".py", ".md", ".toml", ".json", ".ipynb", ".txt", ".yml", ".yaml", ".cfg", ".sh", ""}


def module_names() -> dict[str, Path]:
    """Dotted name below tinyllm -> file, for the package and, where they exist, the walkthrough's chapters."""
    files = {path.relative_to(PACKAGE): path for path in sorted(PACKAGE.rglob("*.py"))}
    names = {".".join(relative.with_suffix("").parts): path for relative, path in files.items()}
    chapters = {f"walkthrough.{path.stem}": path for path in sorted((ROOT / "walkthrough").glob("*.py"))}
    return {**names, **chapters}


MODULES = module_names()
SOURCES = {name: path.read_text() for name, path in MODULES.items()}
every_module = pytest.mark.parametrize("name", SOURCES)


def unit_of(name: str) -> str:
    """The design's unit: the first part below tinyllm."""
    return name.partition(".")[0]


def imported(text: str, inside_functions: bool = False) -> Iterator[str]:
    """Every imported name, dotted; ``from a import b`` gives a.b, since b may be a module. A relative one starts with '.'."""
    tree = ast.parse(text)
    scopes = (
        [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        if inside_functions
        else [tree]
    )
    for node in (node for scope in scopes for node in ast.walk(scope)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def target_unit(dotted: str) -> str | None:
    """The unit that an import reaches, None where it leaves the package. ``import tinyllm`` reaches its face."""
    parts = dotted.split(".")
    if parts[0] == "walkthrough":
        return "walkthrough"
    if parts[0] != "tinyllm":
        return None
    return parts[1] if len(parts) > 1 and is_module(parts[1]) else "__init__"


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir() or name in LEVEL_OF


# ---- the rules ---------------------------------------------------------------------------------------------------------


def wrong_arrows(name: str, text: str) -> list[str]:
    unit = unit_of(name)
    if unit not in LEVEL_OF:
        return [f"{unit} has no level"]
    found = [f"relative import {target}: write it absolute" for target in imported(text) if target.startswith(".")]
    for target in imported(text):
        reached = target_unit(target)
        if reached is not None and reached not in LEVEL_OF:
            found.append(f"{reached} has no level")
        elif reached is not None and LEVEL_OF[reached] > LEVEL_OF[unit]:
            found.append(f"{unit} (level {LEVEL_OF[unit]}) imports {reached} (level {LEVEL_OF[reached]})")
    return found


def lazy_imports(text: str) -> list[str]:
    found = [target for target in imported(text, inside_functions=True) if target.startswith(("tinyllm", "."))]
    names = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(text)))
    return found + [name for name in names if name in ("import_module", "__import__")]


def tensor_imports(name: str, text: str) -> list[str]:
    """What a plain-Python module imports that brings tensors in; shapes is the home of jaxtyping and beartype."""
    banned = [library for library in NO_TENSORS if name != "shapes" or library not in ("jaxtyping", "beartype")]
    outside = [target for target in imported(text) if target.split(".")[0] in banned]
    inside = [target for target in imported(text) if target_unit(target) not in {None, *PLAIN}]
    return outside + inside


def view_of(dotted: str) -> str | None:
    """The view of the trace that a module of it belongs to: terminal, html or explain."""
    parts = dotted.split(".")
    return parts[2] if parts[:2] == ["tinyllm", "trace"] and len(parts) > 2 and parts[2] in VIEWS else None


def foreign_views(name: str, text: str) -> list[str]:
    """What one view of the trace imports from another one."""
    return [target for target in imported(text) if view_of(target) not in (None, view_of(f"tinyllm.{name}"))]


def host_syncs(text: str) -> list[str]:
    tree = ast.parse(text)
    found = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in HOST_SYNC]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return found + ["where with one argument" for call in calls if call.func.attr == "where" and len(call.args) == 1]


def long_functions(text: str) -> list[str]:
    """Functions of more than 40 lines, without their docstring and decorators."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            if lines > MAX_LINES:
                found.append(f"{node.name} has {lines} lines")
    return found


def own_nodes(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes of a function's body without its inner functions, each with whether it stands in a loop."""
    pending = [(node, False) for node in function.body]
    while pending:
        node, in_loop = pending.pop()
        yield node, in_loop
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            is_loop = isinstance(node, ast.For | ast.While)
            pending += [(child, in_loop or is_loop) for child in ast.iter_child_nodes(node)]


def untraceable_names(text: str) -> list[str]:
    """Annotated tensors that a function annotates twice, assigns twice or assigns in a loop."""
    found = []
    for function in [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]:
        nodes = list(own_nodes(function))
        declared = [
            node.target.id for node, _ in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        stores = [(n.id, loop) for n, loop in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        bare = [
            n.target.id
            for n, _ in nodes
            if isinstance(n, ast.AnnAssign) and n.value is None and isinstance(n.target, ast.Name)
        ]
        for name in sorted(set(declared)):
            assigned = [loop for store, loop in stores if store == name]
            if declared.count(name) > 1 or len(assigned) - bare.count(name) > 1 or any(assigned):
                found.append(f"{function.name}: {name}")
    return found


def without_docstring(text: str) -> list[str]:
    """The module, its public classes and functions, and the public methods of public classes that lack one."""
    tree = ast.parse(text)
    public = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    for owner in [node for node in public if isinstance(node, ast.ClassDef)]:
        public += [node for node in owner.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    missing = [node.name for node in public if not ast.get_docstring(node)]
    return missing if not tree.body or ast.get_docstring(tree) else ["the module", *missing]


# ---- the package keeps them --------------------------------------------------------------------------------------------


@every_module
def test_arrows_point_up_the_list(name: str) -> None:
    assert wrong_arrows(name, SOURCES[name]) == []


@every_module
def test_no_import_of_ours_hides_in_a_function(name: str) -> None:
    assert lazy_imports(SOURCES[name]) == []


@pytest.mark.parametrize("name", [name for name in SOURCES if unit_of(name) in PLAIN])
def test_plain_python_modules_hold_no_tensors(name: str) -> None:
    assert tensor_imports(name, SOURCES[name]) == []


@pytest.mark.parametrize(
    "name", [name for name in SOURCES if unit_of(name) == "trace" and name.split(".")[1] in TRACE_PARTS]
)
def test_the_parts_of_the_trace_know_no_engine(name: str) -> None:
    ours = [target for target in imported(SOURCES[name]) if target_unit(target) is not None]
    assert [target for target in ours if not target.startswith(TRACE_MAY_IMPORT)] == []
    drivers = {module.split(".")[1] for module in SOURCES if unit_of(module) == "trace"} - TRACE_PARTS
    assert [target for target in ours if target.startswith("tinyllm.trace.") and target.split(".")[2] in drivers] == []


@pytest.mark.parametrize("name", [name for name in SOURCES if view_of(f"tinyllm.{name}")])
def test_no_view_of_the_trace_knows_another(name: str) -> None:
    assert foreign_views(name, SOURCES[name]) == []


@pytest.mark.parametrize("name", [name for name in SOURCES if unit_of(name) in SYNC_FREE])
def test_layers_model_and_sampler_never_ask_the_device_for_a_value(name: str) -> None:
    assert host_syncs(SOURCES[name]) == []


@every_module
def test_functions_fit_on_a_screen(name: str) -> None:
    assert long_functions(SOURCES[name]) == []


@pytest.mark.parametrize("name", [name for name in SOURCES if unit_of(name) in TRACED])
def test_an_annotated_name_is_one_tensor(name: str) -> None:
    found = set(untraceable_names(SOURCES[name]))
    assert found == {place for module, place in LOOP_CARRIED if module == name}


@pytest.mark.parametrize("name", [name for name in SOURCES if unit_of(name) != "walkthrough"])
def test_public_names_have_docstrings(name: str) -> None:
    assert without_docstring(SOURCES[name]) == []


def test_levels_name_each_unit_once() -> None:
    assert sum(map(len, LEVELS)) == len(LEVEL_OF)
    assert {unit_of(name) for name in SOURCES} <= LEVEL_OF.keys()
    assert len(SOURCES) > 30 and LEVEL_OF.keys() >= PLAIN


def test_only_the_readme_speaks_of_the_project_with_a_similar_name() -> None:
    folders = ["tinyllm", "tests", "walkthrough", "notebooks", "examples", "docs", ".ci", ".github"]
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path for path in files if path.suffix in TEXT_SUFFIXES and path.stat().st_size < 2**22]
    mentions = [path for path in texts if OTHER_PROJECT in path.read_text(errors="replace").lower()]
    assert len(texts) > 40
    assert [path for path in mentions if path.name != "README.md"] == []


# ---- the rules find what they look for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("layers.norm", "from tinyllm.model import Decoder", ["layers (level 3) imports model (level 4)"]),
        ("layers.norm", "import tinyllm.engine", ["layers (level 3) imports engine (level 6)"]),
        ("layers.norm", "from tinyllm import scheduler, llm", ["layers (level 3) imports llm (level 7)"]),
        ("layers.norm", "def f():\n    from tinyllm.llm import LLM", ["layers (level 3) imports llm (level 7)"]),
        ("layers.norm", "if x:\n    import tinyllm.trace", ["layers (level 3) imports trace (level 9)"]),
        ("batch", "from tinyllm import LLM", ["batch (level 2) imports __init__ (level 7)"]),
        ("batch", "import tinyllm", ["batch (level 2) imports __init__ (level 7)"]),
        ("batch", "from .scheduler import Schedule", ["relative import .scheduler.Schedule: write it absolute"]),
        ("novelty", "import os", ["novelty has no level"]),
        ("batch", "from tinyllm.scheduler import Schedule\nfrom tinyllm.request import Request\nimport torch", []),
        ("cli", "from tinyllm import LLM\nimport tinyllm.trace.recorder", []),
    ],
)
def test_wrong_arrows_are_found(name: str, text: str, found: list[str]) -> None:
    assert wrong_arrows(name, text) == found


@pytest.mark.parametrize(
    ("rule", "text", "count"),
    [
        (lazy_imports, "def f():\n    from tinyllm.llm import LLM", 1),
        (lazy_imports, "class A:\n    def f(self):\n        import tinyllm", 1),
        (lazy_imports, "import importlib\nx = importlib.import_module('tinyllm.llm')", 1),
        (lazy_imports, "import tinyllm\ndef f():\n    import json", 0),
        (host_syncs, "x.sum().item()", 1),
        (host_syncs, "torch.nonzero(x)", 1),
        (host_syncs, "torch.where(x > 0)", 1),
        (host_syncs, "torch.where(x > 0, x, 0)\nlens = batch.seq_lens_cpu", 0),
        (long_functions, "def f():\n" + "    x = 1\n" * 40, 1),
        (long_functions, 'def f():\n    """Doc.\n\n    More."""\n' + "    x = 1\n" * 39, 0),
        (untraceable_names, "def f(x):\n    y: A = x\n    y = y + 1", 1),
        (untraceable_names, "def f(x):\n    y: A = x\n    y: B = x", 1),
        (untraceable_names, "def f(x):\n    if x:\n        y: A = x\n    else:\n        y: B = 2 * x", 1),
        (untraceable_names, "def f(x):\n    y: A\n    for i in x:\n        y = i", 1),
        (untraceable_names, "def f(x):\n    y: A = x\n    y, z = g(y)", 1),
        (untraceable_names, "def f(x):\n    y: A\n    z: B\n    y, z = g(x)\n    def h(): y = 3", 0),
        (
            without_docstring,
            '"""M."""\ndef f(): ...\ndef _g(): ...\nclass A:\n    def b(self): ...\n    def _c(self): ...',
            3,
        ),
        (without_docstring, "x = 1", 1),
        (without_docstring, '"""M."""\ndef f():\n    """Doc."""', 0),
    ],
)
def test_violations_are_found(rule: Callable[[str], list[str]], text: str, count: int) -> None:
    assert len(rule(text)) == count


def test_imports_between_views_are_found() -> None:
    text = (
        "from tinyllm.trace.terminal.rows import cost_row\nfrom tinyllm.trace import html, text\nimport tinyllm.shapes"
    )
    assert foreign_views("trace.terminal.host", text) == ["tinyllm.trace.html"]
    assert foreign_views("trace.explain.sizes", text) == ["tinyllm.trace.terminal.rows.cost_row", "tinyllm.trace.html"]


def test_tensor_imports_are_found() -> None:
    assert tensor_imports("request", "import torch.nn\nfrom tinyllm.batch import FlatBatch\nimport math") == [
        "torch.nn",
        "tinyllm.batch.FlatBatch",
    ]
    assert tensor_imports("shapes", "import jaxtyping\nfrom beartype import beartype") == []
    assert tensor_imports("config", "import jaxtyping") == ["jaxtyping"]
    assert set(NO_TENSORS).isdisjoint(sys.stdlib_module_names)
