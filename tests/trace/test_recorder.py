"""The frame reader sees what the layers hold, keeps none of it, and leaves everything as it was."""

import gc
import sys
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import jaxtyping
import pytest
import torch

from tinyllm import SamplingParams
from tinyllm.batch import build_batch
from tinyllm.bench.__main__ import count_visited_frames
from tinyllm.engine import Engine
from tinyllm.layers.attention import reference
from tinyllm.layers.norm import RMSNorm, rms_norm
from tinyllm.model import Decoder
from tinyllm.trace import Recorder, trace
from tinyllm.trace import recorder as recorder_module
from tinyllm.trace.reading import Sources, inherited_words
from tinyllm.trace.recorder import TENSOR_MODULES, Call, TraceError, self_test


@pytest.fixture
def step(tiny_llm):
    """(llm, recorder) of one prefill of five tokens."""
    llm = tiny_llm("llama_gqa")
    for request in llm.make_requests([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=4)):
        llm.engine.add_request(request)
    with Recorder() as recorder:
        llm.engine.step()
    return llm, recorder


def test_calls_stand_in_order_of_time_below_their_callers(step):
    _, recorder = step
    assert [call.name for call in recorder.calls] == [
        "build_batch",
        "build_sampling_batch",
        "Decoder.forward",
        "sample",
    ]
    layer = next(call for call in recorder.walk() if call.path == "layers.1")
    assert [child.name for child in layer.children] == [
        "RMSNorm.forward", "GroupedQueryAttention.forward", "RMSNorm.forward", "MLP.forward"]  # fmt: skip
    attention = layer.children[1]
    assert [child.name for child in attention.children] == [
        "Linear.forward", "split_heads", "apply_rope", "apply_rope", "write_kv", "attend_batch", "merge_heads",
        "Linear.forward"]  # fmt: skip
    assert attention.children[0].path == "layers.1.self_attn.qkv_proj"
    assert attention.children[2].path == "layers.1.self_attn.apply_rope"


def test_every_annotated_name_is_seen_with_its_words_sizes_and_storage(step):
    llm, recorder = step
    attend = next(call for call in recorder.walk() if call.name == "attend")
    q, scores = attend.value("q"), attend.value("scores")
    assert q and scores
    assert (q.role, q.words, q.sizes) == ("argument", ("query_len", "num_heads", "head_dim"), (5, 4, 16))
    assert (scores.words, scores.sizes) == (("num_kv_heads", "group_size", "query_len", "seq_len"), (2, 2, 5, 5))
    linear = next(call for call in recorder.walk() if call.name == "Linear.forward")
    assert [(v.name, v.storage) for v in linear.values] == [
        ("x", "activation"), ("weight", "weight"), ("result", "activation")]  # fmt: skip
    write = next(call for call in recorder.walk() if call.name == "write_kv")
    assert {v.name: v.storage for v in write.values}["k_slots"] == "kv_pool"
    assert {v.name: v.storage for v in write.values}["slot_mapping"] == "index"
    config = llm.loaded.config
    assert q.num_bytes == 5 * config.q_size * 4


def test_names_unpacked_from_a_call_take_the_words_of_its_results(step):
    _, recorder = step
    layer = next(call for call in recorder.walk() if call.name == "DecoderLayer.forward")
    attn_in = layer.value("attn_in")
    assert attn_in and attn_in.words == ("num_tokens", "hidden_size")


def test_rows_stand_where_a_reader_meets_them(step):
    _, recorder = step
    attention = next(call for call in recorder.walk() if call.name == "GroupedQueryAttention.forward")
    order = [row.name for row in attention.rows() if isinstance(row, Call) or row.role == "local"]
    assert order.index("Linear.forward") < order.index("qkv") < order.index("split_heads") < order.index("q_straight")
    assert order[-1] == "out"


def test_a_dataclass_s_tensors_are_shown_once_a_step(step):
    _, recorder = step
    shown = [
        call.name
        for call in recorder.walk()
        for value in call.values
        if value.name == "slot_mapping" and value.role == "field"
    ]
    assert shown == ["build_batch"]


def test_no_tensor_outlives_the_block_because_of_the_trace():
    x = torch.randn(3, 4)
    reference_to_x = weakref.ref(x)
    with Recorder() as recorder:
        rms_norm(x, torch.ones(4), 1e-5)
    del x
    gc.collect()
    assert reference_to_x() is None
    assert recorder.calls[0].name == "rms_norm"


def test_an_argument_is_read_before_its_name_means_something_else(tmp_path):
    scope = write_module(tmp_path, """
def turn(x: Float[Tensor, "num_tokens hidden_size"]) -> Float[Tensor, "hidden_size num_tokens"]:
    x = x.T
    return x
""")  # fmt: skip
    with Recorder(sources=Sources(tmp_path)) as recorder:
        scope["turn"](torch.zeros(2, 5))
    x = recorder.calls[0].value("x")
    assert x and x.sizes == (2, 5)


@pytest.mark.filterwarnings("ignore:a debugger or coverage tool")
def test_the_trace_function_and_the_checks_come_back(step):
    def debugger(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        with Recorder():
            assert jaxtyping.config.jaxtyping_disable
            assert sys.gettrace() is not debugger
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert not jaxtyping.config.jaxtyping_disable


def test_an_exception_keeps_what_happened_and_marks_where():
    norm = RMSNorm(4, 1e-5)
    with pytest.raises(RuntimeError), Recorder() as recorder:
        norm(torch.zeros(2, 3), torch.zeros(2, 3))
    failed = [call.name for call in recorder.walk() if call.has_failed]
    assert failed == ["RMSNorm.forward", "rms_norm"]
    assert not recorder._stack and not jaxtyping.config.jaxtyping_disable


def test_another_thread_has_no_rows():
    q = torch.zeros(1, 1, 2)
    with Recorder() as recorder:
        thread = threading.Thread(target=reference.attend, args=(q, q, q))
        thread.start()
        thread.join()
    assert recorder.calls == []


def test_off_no_frame_is_visited(tiny_llm):
    llm = tiny_llm()
    llm.engine.add_request(llm.make_requests([[9, 8, 7]], SamplingParams(max_tokens=4))[0])
    assert count_visited_frames(llm.engine.step) == 0
    assert sys.gettrace() is None or "tinyllm" not in str(sys.gettrace())


def test_only_tensor_modules_are_traced(step):
    _, recorder = step
    files = {call.spec.file for call in recorder.walk()}
    assert len(files) > 10
    assert all(any(part in TENSOR_MODULES for part in file.parts) for file in files)


def test_results_are_the_same_traced_and_untraced(tiny_llm):
    logits = []
    for is_traced in (False, True):
        llm = tiny_llm("llama_gqa")
        llm.engine.add_request(llm.make_requests([[9, 8, 7]])[0])
        if is_traced:
            with Recorder():
                logits.append(llm.engine.step().logits)
        else:
            logits.append(llm.engine.step().logits)
    assert torch.equal(*logits)


def test_an_interpreter_that_hides_frames_is_refused_in_one_line(monkeypatch):
    self_test()
    monkeypatch.setattr(sys, "settrace", lambda function: None)
    with pytest.raises(TraceError, match=r"does not show a frame's names at its return; use CPython 3\.11") as error:
        self_test()
    assert "\n" not in str(error.value)


def write_module(tmp_path, body: str) -> dict:
    """The names of a module that a recorder of `Sources(tmp_path)` takes for tinyllm/batch.py."""
    source = tmp_path / "batch.py"
    source.write_text("import torch\nfrom jaxtyping import Float\nfrom torch import Tensor\n" + body)
    scope: dict = {}
    exec(compile(source.read_text(), str(source), "exec"), scope)
    return scope


def test_a_name_takes_a_call_s_words_only_where_it_is_that_call_s_result(tmp_path):
    """The memory of a dead result is given to the next tensor: the same identity, another thing."""
    scope = write_module(tmp_path, """
def f(x: Float[Tensor, "num_tokens hidden_size"]) -> Float[Tensor, "num_tokens hidden_size"]:
    return x + 1


def g(x: Float[Tensor, "num_tokens hidden_size"]) -> None:
    same = f(x)
    h = f(x).T.contiguous() * 2
    z = h + 1
    w = z + 1
    del same
""")  # fmt: skip
    for _ in range(20):
        with Recorder(sources=Sources(tmp_path)) as recorder:
            scope["g"](torch.zeros(3, 3))
        words = {value.name: value.words for value in recorder.calls[0].values}
        assert (words["h"], words["z"], words["w"]) == (None, None, None)


def test_generators_have_no_rows(tmp_path):
    scope = write_module(tmp_path, "def rows(x):\n    for row in x:\n        yield row\n")
    with Recorder(sources=Sources(tmp_path)) as recorder:
        list(scope["rows"](torch.zeros(2, 3)))
    assert recorder.calls == []


def test_a_batch_is_not_kept_alive_by_its_trace(tiny_llm):
    llm = tiny_llm("llama_gqa")
    llm.engine.add_request(llm.make_requests([[9, 8, 7]])[0])
    with Recorder() as recorder:
        batch = weakref.ref(llm.engine.step().batch)
    gc.collect()
    assert batch() is None and recorder.calls


def test_an_argument_s_dead_tensor_lends_its_words_to_nobody(tmp_path):
    """``a, b = f(g(y))``: both calls stand on the line, and g's result may have had the identity that b has now."""
    scope = write_module(tmp_path, """
def g(y: Float[Tensor, "num_tokens hidden_size"]) -> Float[Tensor, "2 num_tokens"]:
    return y.T[:2]


def f(z: Float[Tensor, "2 num_tokens"]) -> tuple[Float[Tensor, " num_tokens"], Float[Tensor, " num_tokens"]]:
    return z[0] + 1, z[1] + 1


def h(y: Float[Tensor, "num_tokens hidden_size"]) -> None:
    a, b = f(g(y))
""")  # fmt: skip
    with Recorder(sources=Sources(tmp_path)) as recorder:
        scope["h"](torch.zeros(3, 4))
    (call,) = recorder.calls
    inner, outer = call.children
    assert (inner.name, outer.name) == ("g", "f")
    b = call.value("b")
    assert b and b.words == ("num_tokens",)
    # The dead result of g is made to look like b: b still gets f's words.
    value = torch.zeros(3)
    outer.values[:] = [replace(v, identity=id(value)) if v.name == "result[1]" else v for v in outer.values]
    inner.values[:] = [replace(v, identity=id(value)) for v in inner.values]
    assert inherited_words(call, call.spec.call_lines["b"], value) == ("num_tokens",)


def test_equal_code_of_another_file_is_not_taken_for_a_layer_s(tmp_path):
    """Code objects of equal text are equal, so nothing may be looked up by them alone."""
    scope = write_module(tmp_path, "def f(x):\n    return x + 1\n")
    foreign: dict = {}
    exec(compile((tmp_path / "batch.py").read_text(), str(tmp_path / "elsewhere.py"), "exec"), foreign)
    assert foreign["f"].__code__ == scope["f"].__code__
    with Recorder(sources=Sources(tmp_path)) as recorder:
        foreign["f"](torch.zeros(2))
        scope["f"](torch.zeros(3))
        foreign["f"](torch.zeros(4))
    assert [call.values[0].sizes for call in recorder.calls] == [(3,)]


def test_what_a_call_can_be_asked_for_by(step):
    _, recorder = step
    names = {call.path: call.names for call in recorder.walk() if call.path.startswith("layers.1.self_attn")}
    modules = ("layers", "1", "self_attn")
    assert names["layers.1.self_attn.qkv_proj"] == ("Linear.forward", "Linear", "Linear", *modules, "qkv_proj")
    assert names["layers.1.self_attn.apply_rope"] == ("apply_rope", "apply_rope", "rope", *modules, "apply_rope")


def test_times_nest(step):
    _, recorder = step
    assert sum(1 for _ in recorder.walk()) > 40
    for call in recorder.walk():
        assert call.elapsed_ns > 0
        assert sum(child.elapsed_ns for child in call.children) <= call.elapsed_ns
        assert all(call.started_ns <= child.started_ns <= child.ended_ns <= call.ended_ns for child in call.children)


def test_a_failing_call_leaves_the_operators_watch_as_it_was():
    norm = RMSNorm(4, 1e-5)
    with pytest.raises(RuntimeError), Recorder(kernels=True) as recorder:
        norm(torch.zeros(2, 3), torch.zeros(2, 3))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert [kernel for _, kernel in recorder.calls[0].children[0].kernels or ()] == ["aten.add -> [2,3]"]


def test_a_model_that_is_built_inside_the_block_has_its_paths(tiny_model):
    config = tiny_model().config
    with Recorder() as recorder:
        for _ in range(3):  # the second may get the ids of the first
            RMSNorm(4, 1e-5)
            decoder = Decoder(config)
            decoder.layers[1].mlp(torch.zeros(2, config.hidden_size))
            del decoder
    paths = [call.path for call in recorder.walk() if call.name == "Linear.forward"]
    assert paths == ["gate_up_proj", "down_proj"] * 3, "no call has shown the recorder what the MLP is a part of"


def test_an_engine_that_is_built_inside_the_block_has_its_paths(tiny_llm, tiny_model):
    for _ in range(2):
        with Recorder() as recorder:
            decoder = Decoder(tiny_model().config)
            decoder.load_state_dict(tiny_model().state_dict())
            llm = tiny_llm(decoder)
            llm.engine.add_request(llm.make_requests([[1, 2]], SamplingParams(max_tokens=1))[0])
            llm.engine.step()
        paths = {call.path for call in recorder.walk() if call.name == "Linear.forward"}
        assert {"layers.0.self_attn.qkv_proj", "layers.1.mlp.down_proj"} <= paths


LISTS = """
from collections.abc import Sequence


def join(pieces: Sequence[Float[Tensor, "_query_len head_dim"]], others: list) -> Float[Tensor, "num_tokens head_dim"]:
    kept: list[Float[Tensor, "_query_len head_dim"]] = [pieces[-1] + 1]
    return torch.cat([*pieces, *kept])


def cut(x: Float[Tensor, "num_tokens head_dim"]) -> list[Float[Tensor, "_query_len head_dim"]]:
    return [x[:1], x[1:]]
"""


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_tensors_of_a_list_are_values_of_their_own(tmp_path, kind):
    scope = write_module(tmp_path, LISTS)
    with Recorder(sources=Sources(tmp_path)) as recorder:
        scope["join"](kind([torch.zeros(5, 4), torch.zeros(8, 4)]), [torch.zeros(9)])
    facts = [(v.name, v.item, v.role, v.words, v.sizes) for v in recorder.calls[0].values]
    words = ("query_len", "head_dim")
    assert facts == [
        ("pieces[0]", 0, "argument", words, (5, 4)),
        ("pieces[1]", 1, "argument", words, (8, 4)),
        ("kept[0]", 0, "local", words, (8, 4)),
        ("result", None, "result", ("num_tokens", "head_dim"), (21, 4)),
    ], "others has no words, and so no rows"


def test_the_tensors_of_a_result_that_is_a_list_too(tmp_path):
    scope = write_module(tmp_path, LISTS)
    with Recorder(sources=Sources(tmp_path)) as recorder:
        scope["cut"](torch.zeros(3, 4))
    results = [(v.name, v.item, v.sizes) for v in recorder.calls[0].values if v.role == "result"]
    assert results == [("result[0]", 0, (1, 4)), ("result[1]", 1, (2, 4))]


def test_no_tensor_of_a_list_outlives_the_block(tmp_path):
    scope = write_module(tmp_path, LISTS)
    pieces = [torch.zeros(5, 4)]
    reference_to_piece = weakref.ref(pieces[0])
    with Recorder(sources=Sources(tmp_path)) as recorder:
        scope["join"](pieces, [])
    del pieces
    gc.collect()
    assert reference_to_piece() is None and recorder.calls[0].value("pieces[0]")


def count_live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_a_hundred_steps_inside_a_block_keep_no_tensor(tiny_llm):
    llm = tiny_llm(max_model_len=128)
    counts = []
    with trace() as t:
        for _ in llm.stream([1, 2], SamplingParams(max_tokens=110, ignore_eos=True)):
            counts.append(count_live_tensors() if len(t.steps) in (10, 110) else 0)
    assert len(t.steps) == len(counts) == 110
    assert counts[9] > 0 and counts[9] == counts[109]


def test_calls_outside_all_steps_keep_no_tensor_either():
    with Recorder() as recorder:
        build_batch([[1, 2]], [0], [[1]], 4)
        before = count_live_tensors()
        for _ in range(20):
            build_batch([[1, 2]], [0], [[1]], 4)
        assert count_live_tensors() == before
    shown = [value.name for call in recorder.walk() for value in call.values if value.role == "field"]
    assert shown.count("slot_mapping") == 21


def test_a_batch_that_stands_where_a_dead_one_stood_is_shown(tiny_llm):
    engine = tiny_llm().engine
    batch, dead = build_batch([[9, 8, 7]], [0], [[1]], engine.cache_config.block_size), weakref.ref(torch.zeros(1))
    with Recorder() as recorder:
        recorder._seen_dataclasses[id(batch)] = dead
        engine.model(batch, engine.kv_cache)
    shown = [value.name for call in recorder.walk() for value in call.values if value.role == "field"]
    assert dead() is None and shown.count("slot_mapping") == 1


def test_a_batch_that_two_steps_share_is_shown_in_each(tiny_llm, monkeypatch):
    """Its fields are rows once a step, not once a block."""
    llm = tiny_llm()
    llm.engine.add_request(llm.make_requests([[9, 8, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0])
    batch = build_batch([[9, 8, 7]], [0], [[1]], llm.engine.cache_config.block_size)
    monkeypatch.setattr(Engine, "build_batch", lambda self, schedule: batch)
    shown: list[list[str]] = []

    def on_step(frame, result, calls, *_):
        every = (call for root in calls for call in root.walk())
        shown.append([call.name for call in every for v in call.values if (v.name, v.role) == ("positions", "field")])

    with Recorder(on_step):
        for _ in range(2):
            llm.engine.step()
    assert shown == [["build_sampling_batch", "attend_batch"]] * 2


@pytest.mark.filterwarnings("ignore:this block's trace function was replaced")  # Python drops it with the error
def test_an_error_in_who_is_told_of_a_step_leaves_the_operators_watched(tiny_llm):
    def on_step(*_):
        raise RuntimeError("told")

    llm = tiny_llm()
    llm.engine.add_request(llm.make_requests([[9, 8, 7]])[0])
    recorder = Recorder(on_step, kernels=True)
    with recorder, pytest.raises(RuntimeError, match="told"):
        llm.engine.step()
    assert recorder._kernel_watch and not recorder._kernel_watch.is_paused


def test_code_is_foreign_to_the_files_that_it_is_foreign_to(tmp_path):
    """What one recorder has found to be none of its files is looked at by a recorder of others."""
    scope = write_module(tmp_path, "def f(x):\n    return x + 1\n")
    with Recorder() as ours:
        scope["f"](torch.zeros(2))
    with Recorder(sources=Sources(tmp_path)) as theirs:
        scope["f"](torch.zeros(2))
        rms_norm(torch.zeros(3, 4), torch.ones(4), 1e-5)
    assert ours.calls == [] and [call.name for call in theirs.calls] == ["f"]


# --- times --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless told: clock.ns is what it shows."""
    clock = SimpleNamespace(ns=0)
    still = SimpleNamespace(perf_counter_ns=lambda: clock.ns, perf_counter=lambda: clock.ns / 1e9)
    monkeypatch.setattr("tinyllm.trace.recorder.time", still)
    return clock


NESTED = """
def inner(x):
    spend(30)
    return x


def outer(x):
    spend(5)
    y = inner(inner(x))
    spend(7)
    return y
"""


def test_a_call_s_time_leaves_out_what_the_recorder_read_meanwhile(tmp_path, monkeypatch, clock):
    def describe(*arguments):
        clock.ns += 1000
        return true_describe(*arguments)

    true_describe = recorder_module.describe
    monkeypatch.setattr(recorder_module, "describe", describe)
    scope = write_module(tmp_path, NESTED)
    scope["spend"] = lambda ns: setattr(clock, "ns", clock.ns + ns)
    with Recorder(sources=Sources(tmp_path)) as recorder:
        scope["outer"](torch.zeros(2))
    (outer,) = recorder.calls
    assert [call.elapsed_ns for call in outer.walk()] == [5 + 2 * 30 + 7, 30, 30]
    num_read = sum(len(call.values) for call in outer.walk())
    assert num_read == 7 and outer.reading_ns == 4 * 1000, "its own three values are read behind its end"
    assert recorder.reading_ms == num_read * 1000 / 1e6


def test_finding_out_what_a_frame_is_counts_as_reading(tmp_path, monkeypatch, clock):
    """The first call of a function may parse its file."""

    def find_reader(self, code):
        clock.ns += 1000
        return true_find(self, code)

    true_find = Sources.find_reader
    monkeypatch.setattr(Sources, "find_reader", find_reader)
    scope = write_module(tmp_path, NESTED)
    scope["spend"] = lambda ns: None
    with Recorder(sources=Sources(tmp_path)) as recorder:
        scope["outer"](torch.zeros(2))
        scope["outer"](torch.zeros(2))
    found = {call.name for call in recorder.walk()}
    assert found == {"outer", "inner"}
    assert recorder.reading_ms * 1e6 >= 3 * 1000, "outer, inner and the foreign spend, once each"
    assert [call.elapsed_ns for call in recorder.walk()] == [0] * 6


def test_a_step_s_reading_is_its_own(tiny_llm, monkeypatch, clock):
    """Not that of the steps before it, and less than the step took."""

    def read_locals(self, *arguments):
        clock.ns += 1000
        return true_read(self, *arguments)

    true_read = Recorder._read_locals
    monkeypatch.setattr(Recorder, "_read_locals", read_locals)
    seen = []
    llm = tiny_llm()
    llm.engine.add_request(llm.make_requests([[9, 8, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0])
    with Recorder(lambda frame, result, calls, traced, read: seen.append((calls, traced, read))):
        for _ in range(3):
            llm.engine.step()
    assert len(seen) == 3
    for calls, traced_ms, reading_ms in seen:
        num_calls = sum(1 for root in calls for _ in root.walk())
        assert num_calls > 40 and reading_ms == pytest.approx(num_calls / 1000)
        assert traced_ms == pytest.approx(reading_ms), "nothing else took time"
