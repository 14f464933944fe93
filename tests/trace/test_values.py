"""Values on request: true of the whole tensor, bounded, measured while the tensor is there and never kept."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm import SamplingParams
from tinyllm.layers.attention import reference
from tinyllm.layers.norm import rms_norm
from tinyllm.trace import Recorder, trace, values
from tinyllm.trace.reading import Sources
from tinyllm.trace.record import Stats
from tinyllm.trace.session import trace_steps
from tinyllm.trace.values import MAX_ROW, NUM_LARGEST, measure, name_matcher, stream_rms

TWO = SamplingParams(max_tokens=2, ignore_eos=True)


def steps_of(llm, **asked):
    return list(trace_steps(llm, llm.make_requests([[1, 2, 3], [4, 5]], TWO), **asked))


# --- one tensor ---------------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_a_reader_can_check():
    stats = measure(torch.tensor([[3.0, -4.0], [0.0, 5.0]]))
    assert stats == Stats(-4.0, 5.0, 1.0, math.sqrt(12.5), 0, (((1, 1), 5.0), ((0, 0), 3.0), ((1, 0), 0.0), ((0, 1), -4.0)),
                          (0.0, 5.0))  # fmt: skip


@given(
    st.lists(st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.inf, -math.inf, math.nan]), min_size=1), st.data()
)
def test_they_are_over_the_whole_tensor_however_it_is_cut(numbers, data):
    tensor = torch.tensor(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "PIECE", data.draw(st.integers(1, 7)))
        stats = measure(tensor)
    finite = [float(x) for x in tensor.double() if math.isfinite(x)]
    assert stats and stats.num_not_finite == len(numbers) - len(finite)
    if not finite:
        assert (stats.minimum, stats.maximum, stats.mean, stats.rms, stats.largest) == (None, None, None, None, ())
        return
    assert (stats.minimum, stats.maximum) == (min(finite), max(finite))
    assert stats.mean == pytest.approx(math.fsum(finite) / len(finite), rel=1e-9, abs=1e-6)
    assert stats.rms == pytest.approx(math.sqrt(math.fsum(x * x for x in finite) / len(finite)), rel=1e-9)
    assert [value for _, value in stats.largest] == sorted(finite, reverse=True)[:NUM_LARGEST]
    assert all(float(tensor[index]) == value for index, value in stats.largest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.float64])
def test_any_dtype_is_measured_in_double_precision(dtype):
    tensor = torch.ones(70_000, dtype=dtype)
    stats = measure(tensor)
    assert stats and (stats.mean, stats.rms, stats.largest[0]) == (1.0, 1.0, ((0,), 1.0))


def test_a_transposed_tensor_keeps_its_own_indices():
    tensor = torch.arange(6.0).view(2, 3).T
    stats = measure(tensor)
    assert stats and stats.largest[0] == ((2, 1), 5.0) and stats.row == (2.0, 5.0)


@pytest.mark.parametrize(
    ("shape", "row"),
    [((), (0.0,)), ((3,), (0.0, 1.0, 2.0)), ((2, 3), (3.0, 4.0, 5.0)), ((2, 2, 2, 3), (3.0, 4.0, 5.0))],
)
def test_the_row_is_the_last_of_the_first_head(shape, row):
    stats = measure(torch.arange(math.prod(shape), dtype=torch.float32).view(shape))
    assert stats and stats.row == row


def test_a_long_row_is_cut():
    stats = measure(torch.arange(1000.0).view(2, 500))
    assert stats and len(stats.row) == MAX_ROW and stats.row[0] == 500


@pytest.mark.parametrize("tensor", [torch.empty(2, 3, device="meta"), torch.zeros(0), torch.zeros(0, 5)])
def test_where_nothing_is_there_is_nothing_to_measure(tensor):
    assert measure(tensor) is None


def test_the_streams_rms():
    assert stream_rms((torch.full((2, 3), 1.0), torch.full((2, 3), 3.0))) == pytest.approx(4.0)
    assert stream_rms((torch.empty(2, 3, device="meta"),) * 2) is None
    assert stream_rms(None) is None


# --- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "known", "is_wanted"),
    [
        ("attend", ["attend"], True),
        ("attend", ["attend_batch"], False),
        ("lm_head,attend", ["lm_head"], True),
        (["lm_head", "attend"], ["attend"], True),
        ("*_proj", ["Linear.forward", "Linear", "o_proj"], True),
        ("rope q", ["apply_rope", "rope"], True),
        ("", ["attend"], False),
        ("*", ["attend"], True),
        (lambda names: "x" in names, ["x"], True),
    ],
)
def test_which_names_are_wanted(wanted, known, is_wanted):
    matches = name_matcher(wanted)
    assert matches and matches(known) == is_wanted


@pytest.mark.parametrize(
    ("wanted", "functions", "labels"),
    [
        ("attend", {"attend"}, {"attend"}),
        ("rope", {"apply_rope"}, {"rope q", "rope k"}),
        ("apply_rope", {"apply_rope"}, {"rope q", "rope k"}),
        ("o_proj", {"Linear.forward"}, {"o_proj"}),
        ("Linear", {"Linear.forward"}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("rms_norm,lm_head", {"rms_norm", "lm_head"}, {"rms_norm", "lm_head"}),
        ("nothing", set(), set()),
    ],
)
def test_only_the_wanted_rows_have_stats(tiny_llm, wanted, functions, labels):
    (step, _) = steps_of(tiny_llm(), values=wanted)
    measured = [row for row in step.operations if any(tensor.stats for tensor in row.tensors.values())]
    assert ({row.function for row in measured}, {row.label for row in measured}) == (functions, labels)
    for row in measured:
        assert all(tensor.stats for tensor in row.tensors.values())


# --- a run --------------------------------------------------------------------------------------------------------------


def test_attention_weights_of_a_row_sum_to_one(tiny_llm):
    steps = steps_of(tiny_llm(), values="attend")
    rows = [row for step in steps for row in step.operations if row.function == "attend"]
    assert len(rows) == 2 * 2 * 2, "steps, requests, layers"
    for row in rows:
        weights, masked = row.tensors["weights"].stats, row.tensors["masked"].stats
        assert weights and masked and len(weights.row) == row.sizes["seq_len"]
        assert sum(weights.row) == pytest.approx(1.0, abs=1e-6)
        assert weights.minimum is not None and weights.minimum >= 0 and weights.num_not_finite == 0
        hidden = row.sizes["num_heads"] * (row.sizes["query_len"] * (row.sizes["query_len"] - 1) // 2)
        assert masked.num_not_finite == hidden


def test_they_are_those_of_the_tensors_that_the_run_had(tiny_llm):
    llm = tiny_llm()
    (request,) = llm.make_requests([[1, 2, 3]], TWO)
    llm.engine.add_request(request)
    with trace(values="lm_head") as t:
        output = llm.engine.step()
    (row,) = [row for row in t.steps[0].operations if row.function == "lm_head"]
    stats = row.tensors["result"].stats
    assert stats and stats.row == tuple(output.logits[-1, :MAX_ROW].tolist())
    assert stats.largest[0] == ((0, int(output.logits.argmax())), float(output.logits.max()))
    assert stats.mean == pytest.approx(float(output.logits.double().mean()))


def test_the_streams_growth_is_that_of_the_layers_results(tiny_llm):
    llm = tiny_llm()
    seen = []
    hooks = [
        layer.register_forward_hook(lambda _, __, result: seen.append(result)) for layer in llm.engine.model.layers
    ]
    try:
        steps = steps_of(llm, residual=True)
    finally:
        for hook in hooks:
            hook.remove()
    growth = [rms for step in steps for rms in step.residual_rms]
    assert growth == pytest.approx([float((x + r).square().mean().sqrt()) for x, r in seen])
    assert [len(step.residual_rms) for step in steps] == [llm.loaded.config.num_layers] * 2


def test_nothing_is_measured_unless_asked_for(tiny_llm, monkeypatch):
    def refuse(*_):
        raise AssertionError("measured without being asked")

    monkeypatch.setattr("tinyllm.trace.recorder.measure", refuse)
    monkeypatch.setattr("tinyllm.trace.recorder.stream_rms", refuse)
    steps = steps_of(tiny_llm())
    assert len(steps) == 2 and len(steps[0].operations) > 30
    for step in steps:
        assert step.residual_rms == ()
        assert all(tensor.stats is None for row in step.operations for tensor in row.tensors.values())


def test_values_bring_the_streams_growth_with_them_unless_told_otherwise(tiny_llm):
    def growths(**asked):
        return [len(step.residual_rms) for step in steps_of(tiny_llm(), **asked)]

    assert growths(values="lm_head") == [2, 2], "two layers in each of two steps"
    assert growths(values="lm_head", residual=False) == [0, 0]
    with trace(values="lm_head") as t:
        tiny_llm().generate([1], TWO)
    assert [len(step.residual_rms) for step in t.steps] == [2, 2]


def test_equal_layers_stay_equal_whatever_they_hold(tiny_llm):
    (step, _) = steps_of(tiny_llm(), values="*")
    assert [row.shape_key() for row in step.layer(0)][2:] == [row.shape_key() for row in step.layer(1)][3:]


def test_no_tensor_is_kept_and_no_answer_changes(tiny_llm):
    x = torch.randn(3, 4)
    gone = weakref.ref(x)
    with Recorder(values="*", residual=True) as recorder:
        rms_norm(x, torch.ones(4), 1e-5)
    del x
    gc.collect()
    assert gone() is None and recorder.calls[0].values[0].stats
    params = SamplingParams(temperature=1, seed=4, max_tokens=4)
    with trace(values="*", times=True, kernels=True):
        answers = tiny_llm(max_model_len=32, num_blocks=9).generate("abc", params)
    assert answers == tiny_llm().generate("abc", params)


def test_a_meta_run_has_rows_but_no_values():
    q = torch.zeros(2, 1, 4, device="meta")
    with Recorder(values="*", residual=True, kernels=True) as recorder:
        reference.attend(q, q, q)
    (call,) = recorder.calls
    assert call.kernels and all(value.stats is None for value in call.values)


def test_an_argument_that_the_body_rebinds_is_not_measured_as_something_else(tmp_path):
    source = tmp_path / "batch.py"
    source.write_text("def f(x):\n    x = x + 1\n    return x\n")
    scope: dict = {}
    exec(compile(source.read_text(), str(source), "exec"), scope)
    with Recorder(values="f", sources=Sources(tmp_path)) as recorder:
        scope["f"](torch.zeros(2))
    x, result = recorder.calls[0].value("x"), recorder.calls[0].value("result")
    assert x and x.stats is None
    assert result and result.stats and result.stats.mean == 1


def test_each_tensor_of_a_list_is_measured(tiny_llm):
    (step, _) = steps_of(tiny_llm(), values="lay_flat")
    row = next(operation for operation in step.operations if operation.label == "lay_flat")
    assert [row.tensors[name].shape[0] for name in row.inputs] == [3, 2]
    stats = [row.tensors[name].stats for name in (*row.inputs, *row.outputs)]
    assert all(stats), "each piece, and what they give together"
    assert max(s.maximum or 0 for s in stats[:2] if s) == (stats[2] and stats[2].maximum)
