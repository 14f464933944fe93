"""The frame reader sees what the layers hold, keeps none of it, and leaves everything as it was."""

import gc
import sys
import threading
import weakref
from dataclasses import replace

import jaxtyping
import pytest
import torch

from tinyllm import SamplingParams
from tinyllm.bench.__main__ import count_visited_frames
from tinyllm.layers.attention import reference
from tinyllm.layers.norm import RMSNorm, rms_norm
from tinyllm.model import Decoder
from tinyllm.trace import Recorder
from tinyllm.trace.recorder import TENSOR_MODULES, Call, TraceError, _inherited_words, self_test


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


def test_an_argument_is_read_before_its_name_means_something_else(monkeypatch, tmp_path):
    scope = write_module(tmp_path, monkeypatch, """
def turn(x: Float[Tensor, "num_tokens hidden_size"]) -> Float[Tensor, "hidden_size num_tokens"]:
    x = x.T
    return x
""")  # fmt: skip
    with Recorder() as recorder:
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


def write_module(tmp_path, monkeypatch, body: str) -> dict:
    """A module that the recorder takes for tinyllm/batch.py."""
    source = tmp_path / "batch.py"
    source.write_text("import torch\nfrom jaxtyping import Float\nfrom torch import Tensor\n" + body)
    monkeypatch.setattr("tinyllm.trace.recorder.PACKAGE", tmp_path)
    scope: dict = {}
    exec(compile(source.read_text(), str(source), "exec"), scope)
    return scope


def test_a_name_takes_a_call_s_words_only_where_it_is_that_call_s_result(tmp_path, monkeypatch):
    """The memory of a dead result is given to the next tensor: the same identity, another thing."""
    scope = write_module(tmp_path, monkeypatch, """
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
        with Recorder() as recorder:
            scope["g"](torch.zeros(3, 3))
        words = {value.name: value.words for value in recorder.calls[0].values}
        assert (words["h"], words["z"], words["w"]) == (None, None, None)


def test_generators_have_no_rows(tmp_path, monkeypatch):
    scope = write_module(tmp_path, monkeypatch, "def rows(x):\n    for row in x:\n        yield row\n")
    with Recorder() as recorder:
        list(scope["rows"](torch.zeros(2, 3)))
    assert recorder.calls == []


def test_a_batch_is_not_kept_alive_by_its_trace(tiny_llm):
    llm = tiny_llm("llama_gqa")
    llm.engine.add_request(llm.make_requests([[9, 8, 7]])[0])
    with Recorder() as recorder:
        batch = weakref.ref(llm.engine.step().batch)
    gc.collect()
    assert batch() is None and recorder.calls


def test_an_argument_s_dead_tensor_lends_its_words_to_nobody(tmp_path, monkeypatch):
    """``a, b = f(g(y))``: both calls stand on the line, and g's result may have had the identity that b has now."""
    scope = write_module(tmp_path, monkeypatch, """
def g(y: Float[Tensor, "num_tokens hidden_size"]) -> Float[Tensor, "2 num_tokens"]:
    return y.T[:2]


def f(z: Float[Tensor, "2 num_tokens"]) -> tuple[Float[Tensor, " num_tokens"], Float[Tensor, " num_tokens"]]:
    return z[0] + 1, z[1] + 1


def h(y: Float[Tensor, "num_tokens hidden_size"]) -> None:
    a, b = f(g(y))
""")  # fmt: skip
    with Recorder() as recorder:
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
    assert _inherited_words(call, call.spec.call_lines["b"], value) == ("num_tokens",)


def test_equal_code_of_another_file_is_not_taken_for_a_layer_s(tmp_path, monkeypatch):
    """Code objects of equal text are equal, so nothing may be looked up by them alone."""
    scope = write_module(tmp_path, monkeypatch, "def f(x):\n    return x + 1\n")
    foreign: dict = {}
    exec(compile((tmp_path / "batch.py").read_text(), str(tmp_path / "elsewhere.py"), "exec"), foreign)
    assert foreign["f"].__code__ == scope["f"].__code__
    with Recorder() as recorder:
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
def test_the_tensors_of_a_list_are_values_of_their_own(tmp_path, monkeypatch, kind):
    scope = write_module(tmp_path, monkeypatch, LISTS)
    with Recorder() as recorder:
        scope["join"](kind([torch.zeros(5, 4), torch.zeros(8, 4)]), [torch.zeros(9)])
    facts = [(v.name, v.item, v.role, v.words, v.sizes) for v in recorder.calls[0].values]
    words = ("query_len", "head_dim")
    assert facts == [
        ("pieces[0]", 0, "argument", words, (5, 4)),
        ("pieces[1]", 1, "argument", words, (8, 4)),
        ("kept[0]", 0, "local", words, (8, 4)),
        ("result", None, "result", ("num_tokens", "head_dim"), (21, 4)),
    ], "others has no words, and so no rows"


def test_the_tensors_of_a_result_that_is_a_list_too(tmp_path, monkeypatch):
    scope = write_module(tmp_path, monkeypatch, LISTS)
    with Recorder() as recorder:
        scope["cut"](torch.zeros(3, 4))
    results = [(v.name, v.item, v.sizes) for v in recorder.calls[0].values if v.role == "result"]
    assert results == [("result[0]", 0, (1, 4)), ("result[1]", 1, (2, 4))]


def test_no_tensor_of_a_list_outlives_the_block(tmp_path, monkeypatch):
    scope = write_module(tmp_path, monkeypatch, LISTS)
    pieces = [torch.zeros(5, 4)]
    reference_to_piece = weakref.ref(pieces[0])
    with Recorder() as recorder:
        scope["join"](pieces, [])
    del pieces
    gc.collect()
    assert reference_to_piece() is None and recorder.calls[0].value("pieces[0]")
