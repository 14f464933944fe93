"""The trace is complete: every operator runs in a traced call, and every tensor that outlives its line has a name with words.

What a step really does is told by torch itself, which hands every operator and what it gave to a dispatch mode, and by
a line tracer, which says between which two statements that was. The recorder's view must cover it. What lives and dies
inside one expression needs no name: ``kernels`` lists it.
"""

import ast
import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllm import SamplingParams
from tinyllm.trace import Call, Recorder
from tinyllm.trace.costs import COMPOSITES, PARTS, STAGES
from tinyllm.trace.dims import FunctionSpec, function_specs
from tinyllm.trace.reading import PACKAGE, TENSOR_MODULES, Sources

WORDLESS = {"_ints", "_floats", "mix", "_shift_right", "Decoder._head_weight"}
"""Helpers of any shape: what they compute is part of the expression that calls them, and named by it."""

Place = tuple[Path, str, int]  # of a function: file, qualified name, first line

TINY = Path(__file__).parent.parent / "data" / "tiny"
PARAMS = {
    "greedy": SamplingParams(max_tokens=3, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, min_tokens=3, max_tokens=3, seed=5),
    "plain draw": SamplingParams(temperature=1.0, max_tokens=3, seed=6, ignore_eos=True),
}
every_body = pytest.mark.parametrize("attention", ["reference", "sdpa"])
every_method = pytest.mark.parametrize("method", PARAMS)


def start(tiny_llm, attention: str, method: str, name: str = "llama_gqa"):
    """An LLM in which two requests wait; the budget cuts the first prompt, so that a chunk stands behind cached keys."""
    llm = tiny_llm(name, attention, block_size=2, max_num_batched_tokens=4, max_num_seqs=4, max_model_len=32)
    for request in llm.make_requests([[5, 6, 7, 8, 9, 10, 11], [40, 41, 42]], PARAMS[method]):
        llm.engine.add_request(request)
    return llm


def run(llm) -> None:
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


# --- the line tracer ----------------------------------------------------------------------------------------------------


@functools.cache
def statements(file: Path) -> dict[int, int]:
    """line -> the first line of the innermost statement around it."""
    found: dict[int, int] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text("utf-8")))
    return found


@dataclasses.dataclass
class Made:
    """A tensor that an operator gave during a statement; reference is None once nobody holds it."""

    operator: str
    reference: weakref.ref
    is_named_result: bool = False  # a recorded call's result, with words of its own

    @property
    def tensor(self) -> Tensor | None:
        return self.reference()


@dataclasses.dataclass
class Running:
    """A function under way, and what was made during the statement that it is at."""

    frame: FrameType
    spec: FunctionSpec
    statement: int = 0
    made: list[Made] = dataclasses.field(default_factory=list)


class Watch(TorchDispatchMode):
    """Finds tensors that outlive the statement that made them without a name that has words.

    named says which names of a function the recorder gives words. faults tells the findings, strays the operators that
    ran in no function of the watched files.
    """

    def __init__(self, folder: Path, named: dict[Place, set[str]]):
        super().__init__()
        self.folder, self.named = folder, named
        self.stack: list[Running] = []
        self.faults: dict[str, None] = {}
        self.strays: list[str] = []
        self.places: set[str] = set()  # functions in which an operator ran
        self.num_operators = 0
        self._specs: dict[int, tuple[object, FunctionSpec | None]] = {}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The dispatch mode inside its own handler; the line tracer is on all the while."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __enter__(self):
        super().__enter__()
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self.again():
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:  # torch composed it of operators that were seen
            return result
        result = func(*args, **(kwargs or {}))
        self.num_operators += 1
        if self.stack:
            self.places.add(self.stack[-1].spec.qualname)
            self.stack[-1].made += [Made(str(func), weakref.ref(tensor)) for tensor in tensors_of([result])]
        else:
            self.strays.append(str(func))
        return result

    def _on_call(self, frame, event, _):
        code = frame.f_code
        if id(code) not in self._specs:
            file = Path(code.co_filename)
            is_ours = file.is_relative_to(self.folder) and file.relative_to(self.folder).parts[0] in TENSOR_MODULES
            specs = function_specs(file) if is_ours else {}
            self._specs[id(code)] = code, specs.get((code.co_qualname, code.co_firstlineno))
        spec = self._specs[id(code)][1]
        if spec is None or spec.qualname in WORDLESS:
            return None
        self.stack.append(Running(frame, spec, statements(spec.file).get(frame.f_lineno, 0)))
        return self._on_event

    def _on_event(self, frame, event, result):
        running = self.stack[-1]
        if event == "line":
            here = statements(running.spec.file)[frame.f_lineno]
            if here != running.statement:
                self._check(running, {})
                running.statement = here
        elif event == "return":
            self.stack.pop()
            self._check_signature(running, frame.f_locals, result)
            self._check(running, {"result": result})
            if self.stack:  # what it returns is made by the caller's statement
                has_words = all(running.spec.results) or not any(isinstance(r, Tensor) for r in items_of(result))
                handed = [Made(running.spec.qualname, weakref.ref(t), has_words) for t in tensors_of([result])]
                self.stack[-1].made += handed
        return self._on_event

    def _check_signature(self, running: Running, values: dict, result: object) -> None:
        spec = running.spec
        unsaid = [n for n, words in spec.arguments.items() if words is None and isinstance(values.get(n), Tensor)]
        if any(isinstance(item, Tensor) for item in items_of(result)) and not all(spec.results):
            unsaid.append("the result")
        for name in unsaid:
            self.faults[f"{spec.qualname} ({spec.file.name}:{spec.first_line}): {name} has no words"] = None

    def _check(self, running: Running, results: dict) -> None:
        """Everything made in the statement that is alive must be named with words, or share a named one's memory."""
        spec, made = running.spec, [made for made in running.made if made.tensor is not None]
        running.made.clear()
        if not made:
            return
        values = {**running.frame.f_locals, **results}
        words = self.named.get((spec.file, spec.qualname, spec.first_line), set()) | results.keys()
        bound = {id(value): name for name, value in values.items() if isinstance(value, Tensor)}
        named = [value for name, value in values.items() if name in words or not isinstance(value, Tensor)]
        known = {id(tensor) for tensor in tensors_of(named, with_lists=False)}
        storages = {tensor.untyped_storage()._cdata for tensor in tensors_of(named, with_lists=False)}
        for one in made:
            tensor = one.tensor
            if tensor is None or id(tensor) in known:
                continue
            is_memory_of_named = tensor.untyped_storage()._cdata in storages
            if id(tensor) in bound or not (one.is_named_result or is_memory_of_named):
                name = bound.get(id(tensor), "without a name")
                place = f"{spec.file.name}:{running.statement} {spec.qualname}"
                self.faults[f"{place}: {name} of {one.operator}, {list(tensor.shape)}, has no words"] = None


def items_of(value: object) -> Iterable[object]:
    return value if isinstance(value, tuple) else (value,)


def tensors_of(values: Iterable[object], with_lists: bool = True) -> Iterator[Tensor]:
    """The tensors among the values, and in the dataclasses, tuples and lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list) and with_lists:
            yield from tensors_of(value)
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Tensor))
        elif dataclasses.is_dataclass(value):
            yield from tensors_of([getattr(value, item.name) for item in dataclasses.fields(value)])


def named_in(calls: Iterable[Call]) -> dict[Place, set[str]]:
    """The names of each function to which the recorder gave words; one that is a worded result counts."""
    found: dict[Place, set[str]] = {}
    for call in (call for root in calls for call in root.walk()):
        worded = {value.identity for value in call.values if value.words is not None and value.role == "result"}
        names = {value.name for value in call.values if value.words is not None or value.identity in worded}
        found.setdefault((call.spec.file, call.spec.qualname, call.spec.first_line), set()).update(names)
    return found


# --- a step of the engine -----------------------------------------------------------------------------------------------


@every_body
@every_method
def test_every_operator_runs_in_a_traced_call(tiny_llm, attention, method):
    llm = start(tiny_llm, attention, method)
    with Recorder(kernels=True) as trace:
        run(llm)
    assert trace.stray_kernels == []
    kernels = sorted(kernel for call in trace.walk() for kernel in call.kernels or ())
    assert [number for number, _ in kernels] == list(range(len(kernels))) and len(kernels) > 500
    stages = {call.name for call in trace.walk() if call.kernels}
    assert stages <= STAGES.keys() | COMPOSITES | PARTS
    assert stages >= {"attend", "Linear.forward", "sample", "lm_head", "map_slots", "write_kv"}


@every_body
@every_method
def test_the_recorder_sees_as_many_operators_as_torch_runs(tiny_llm, attention, method):
    watch = Watch(PACKAGE, {})
    llm = start(tiny_llm, attention, method)
    with watch:
        run(llm)
    llm = start(tiny_llm, attention, method)
    with Recorder(kernels=True) as trace:
        run(llm)
    assert sum(len(call.kernels or ()) for call in trace.walk()) == watch.num_operators


def watch_engine(tiny_llm, *setting: str) -> Watch:
    """What a run does that the recorder, in the same run before, gave no words."""
    llm = start(tiny_llm, *setting)
    with Recorder() as trace:
        run(llm)
    watch = Watch(PACKAGE, named_in(trace.walk()))
    llm = start(tiny_llm, *setting)
    with watch:
        run(llm)
    return watch


@every_body
@every_method
def test_every_tensor_that_outlives_its_line_is_a_named_value_with_words(tiny_llm, attention, method):
    watch = watch_engine(tiny_llm, attention, method)
    assert list(watch.faults) == []
    assert watch.strays == []
    assert watch.places >= {"attend", "causal_mask", "rms_norm", "sample", "gather_kv", "build_batch"}
    if method == "sampled":
        assert watch.places >= {"ban_ids", "apply_min_p", "apply_top_k_top_p", "add_noise"}


@pytest.mark.parametrize("name", sorted(file.parent.name for file in TINY.glob("*/model.safetensors")))
def test_so_it_is_in_every_model(tiny_llm, name):
    assert list(watch_engine(tiny_llm, "reference", "greedy", name).faults) == []


# --- a copy of a layer, to which somebody adds something ------------------------------------------------------------------


def faults_of(tmp_path, text: str, function: str, *arguments: Tensor) -> list[str]:
    """What the check says of a function of a module that the recorder takes for a layer's."""
    file = tmp_path / "layers" / "norm.py"
    file.parent.mkdir()
    file.write_text(text)
    scope: dict = {"__name__": "layers.norm"}
    exec(compile(text, str(file), "exec"), scope)
    with Recorder(sources=Sources(tmp_path)) as trace, torch.inference_mode():
        scope[function](*arguments)
    watch = Watch(tmp_path, named_in(trace.walk()))
    with watch, torch.inference_mode():
        scope[function](*arguments)
    return list(watch.faults)


NORM = (PACKAGE / "layers" / "norm.py").read_text()
LINE = '    normed: Float[Tensor, "num_tokens hidden_size"] = x_float * torch.rsqrt(mean_square + eps)\n'
ADDED = "def spread(x):\n    wide = x * 2\n    return wide + 1\n\n\ndef rms_norm("


def changed(old: str, new: str) -> str:
    assert NORM.count(old) == 1
    return NORM.replace(old, new)


X, WEIGHT = torch.ones(3, 4), torch.ones(4)


def test_the_layer_itself_is_complete(tmp_path):
    assert faults_of(tmp_path, NORM, "rms_norm", X, WEIGHT, 1e-5) == []


def test_an_intermediate_without_annotation_is_found_and_named(tmp_path):
    text = changed(
        LINE,
        "    inverse = torch.rsqrt(mean_square + eps)\n" + LINE.replace("torch.rsqrt(mean_square + eps)", "inverse"),
    )
    (fault,) = faults_of(tmp_path, text, "rms_norm", X, WEIGHT, 1e-5)
    assert fault == "norm.py:20 rms_norm: inverse of aten.rsqrt.default, [3, 1], has no words"


def test_a_view_under_a_name_of_its_own_needs_words_too(tmp_path):
    text = changed(LINE, LINE + "    turned = normed.T\n")
    (fault,) = faults_of(tmp_path, text, "rms_norm", X, WEIGHT, 1e-5)
    assert fault.startswith("norm.py:21 rms_norm: turned of aten.") and fault.endswith("[4, 3], has no words")


def test_a_stage_without_annotations_is_found_and_named(tmp_path):
    text = changed("def rms_norm(", ADDED).replace("x.float()", "spread(x.float())")
    faults = faults_of(tmp_path, text, "rms_norm", X, WEIGHT, 1e-5)
    assert faults == [
        "norm.py:9 spread: wide of aten.mul.Tensor, [3, 4], has no words",
        "spread (norm.py:8): x has no words",
        "spread (norm.py:8): the result has no words",
    ]


def test_a_tensor_kept_in_a_list_is_found(tmp_path):
    text = changed(LINE, "    kept = [mean_square + 1]\n" + LINE)
    (fault,) = faults_of(tmp_path, text, "rms_norm", X, WEIGHT, 1e-5)
    assert fault == "norm.py:20 rms_norm: without a name of aten.add.Tensor, [3, 1], has no words"


def test_what_dies_in_its_expression_needs_no_name(tmp_path):
    text = changed("torch.rsqrt(mean_square + eps)", "torch.rsqrt((mean_square * 2 + eps).abs())")
    assert faults_of(tmp_path, text, "rms_norm", X, WEIGHT, 1e-5) == []


def test_an_operator_outside_every_function_is_a_stray():
    with Recorder(kernels=True) as trace:
        _ = X + 1
    assert trace.stray_kernels == ["aten.add -> [3,4]"]
