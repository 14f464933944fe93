"""The whole loop: what a request gets depends on nothing but the request."""

import itertools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tinyllm.engine
from tinyllm import RequestError, SamplingParams, ShapeError
from tinyllm.layers.norm import add_residual
from tinyllm.request import Request
from tinyllm.shapes import checking
from tinyllm.weights.load import build_decoder

MAX_MODEL_LEN = 24
GREEDY = SamplingParams(max_tokens=6)
SAMPLED = [SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=seed, max_tokens=9) for seed in range(4)]
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [19]]


@dataclass(frozen=True)
class Workload:
    """Prompts with their parameters, and an engine that may be small in every way."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    block_size: int
    budget: int
    max_num_seqs: int
    num_blocks: int
    body: str
    enable_prefix_caching: bool


@st.composite
def workloads(draw, min_requests=1):
    sampled = st.builds(
        SamplingParams,
        temperature=st.floats(0.1, 2),
        top_k=st.sampled_from([0, 1, 20]),
        top_p=st.sampled_from([0.5, 1.0]),
        min_p=st.sampled_from([0.0, 0.1]),
        seed=st.integers(-(2**63), 2**63 - 1),
        max_tokens=st.integers(1, 8),
    )
    params = st.one_of(st.builds(SamplingParams, max_tokens=st.integers(1, 8)), sampled)
    prompt = st.lists(st.integers(0, 255), min_size=1, max_size=14)
    requests = draw(st.lists(st.tuples(prompt, params), min_size=min_requests, max_size=4))
    block_size, budget = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    smallest_pool = 1 + -(-MAX_MODEL_LEN // block_size)
    return Workload(
        [p for p, _ in requests],
        [s for _, s in requests],
        block_size,
        budget,
        draw(st.integers(1, min(4, budget))),
        smallest_pool + draw(st.integers(0, 12)),
        draw(st.sampled_from(["reference", "sdpa"])),
        draw(st.booleans()),
    )


def assert_same(run, expected) -> None:
    """The same tokens, chosen from the same logits up to float32's rounding."""
    assert run.token_ids == expected.token_ids
    torch.testing.assert_close(run.logits, expected.logits, atol=1e-4, rtol=0)


@pytest.fixture(scope="session")
def run_alone(tiny_model, make_engine, run_engine, make_requests):
    """run_alone(prompt, params): a request in an ample engine of its own, whole prefill, reference attention."""

    def run_alone(prompt, params):
        engine = make_engine(tiny_model(), max_model_len=MAX_MODEL_LEN, check_shapes=False)
        return run_engine(engine, make_requests([prompt], params))[0]

    return run_alone


@pytest.fixture(scope="session")
def small_engine(tiny_model, make_engine):
    """small_engine(workload): the engine that a workload asks for."""

    def small_engine(w: Workload):
        decoder = tiny_model(attention=w.body)
        return make_engine(
            decoder, w.block_size, w.budget, MAX_MODEL_LEN, w.max_num_seqs, w.num_blocks, False, w.enable_prefix_caching
        )

    return small_engine


@settings(max_examples=80)
@given(workloads())
def test_together_in_blocks_and_chunks_equals_alone(run_alone, small_engine, run_engine, make_requests, workload):
    runs = run_engine(small_engine(workload), make_requests(workload.prompts, workload.params))
    for run, prompt, params in zip(runs, workload.prompts, workload.params, strict=True):
        assert_same(run, run_alone(prompt, params))


@settings(max_examples=25)
@given(workloads(min_requests=2), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(small_engine, run_engine, make_requests, workload, random):
    order = list(range(len(workload.prompts)))
    random.shuffle(order)
    runs = run_engine(small_engine(workload), make_requests(workload.prompts, workload.params))
    prompts, params = [workload.prompts[i] for i in order], [workload.params[i] for i in order]
    shuffled_runs = run_engine(small_engine(workload), make_requests(prompts, params))
    for i, run in zip(order, shuffled_runs, strict=True):
        assert_same(run, runs[i])


@settings(max_examples=25)
@given(workloads(min_requests=2), st.integers(0, 255))
def test_a_request_never_sees_its_neighbours_tokens(small_engine, run_engine, make_requests, workload, token_id):
    workload = replace(workload, enable_prefix_caching=False)  # a shared block changes what is computed together
    params = [SamplingParams(max_tokens=4)] * len(workload.prompts)
    first, *others = run_engine(small_engine(workload), make_requests(workload.prompts, params))
    changed_prompts = [workload.prompts[0], *([token_id] * len(prompt) for prompt in workload.prompts[1:])]
    again, *changed = run_engine(small_engine(workload), make_requests(changed_prompts, params))
    assert torch.equal(first.logits, again.logits), "not one bit of it"
    for before, after, old, new in zip(others, changed, workload.prompts[1:], changed_prompts[1:], strict=True):
        assert old == new or not torch.equal(before.logits, after.logits), "the change itself did show"


def test_a_step_may_mix_prefill_and_decode(tiny_model, make_engine, run_alone):
    engine = make_engine(tiny_model(), block_size=4)
    requests = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    engine.add_request(requests[0])
    engine.step()
    for request in requests[1:]:
        engine.add_request(request)
    assert engine.step().batch.query_lens_cpu == (1, 2, 9, 1)
    while engine.has_unfinished_requests:
        engine.step()
    for request in requests:
        assert request.output_token_ids == run_alone(list(request.prompt_token_ids), GREEDY).token_ids


@pytest.mark.parametrize("budget", [4, 100])
def test_preemption_changes_no_output(budget, tiny_model, make_engine, run_engine, make_requests, run_alone):
    engine = make_engine(tiny_model(), 2, budget, MAX_MODEL_LEN, num_blocks=13, check_shapes=False)
    runs = run_engine(engine, make_requests(PROMPTS, SAMPLED))
    assert sum(run.num_preemptions for run in runs) > 0, "the pool is so small that requests push each other out"
    for run, prompt, params in zip(runs, PROMPTS, SAMPLED, strict=True):
        assert_same(run, run_alone(prompt, params))


def test_a_preempted_request_that_had_just_sampled_loses_no_token(tiny_model, make_engine, run_engine, make_requests):
    params = SamplingParams(max_tokens=8)
    prompts = [[3, 4, 5], [6, 7, 8, 9]]  # the second one's next token needs a block when there is none
    small, ample = (make_engine(tiny_model(), 4, 64, 12, num_blocks=n) for n in (4, 40))
    runs, expected = (run_engine(engine, make_requests(prompts, params)) for engine in (small, ample))
    assert [run.num_preemptions for run in expected] == [0, 0]
    assert sum(run.num_preemptions for run in runs) > 0
    for run, other in zip(runs, expected, strict=True):
        assert_same(run, other)
        assert len(run.token_ids) == 8


def test_every_decode_step_equals_a_prefill_of_all_its_tokens(run_alone):
    prompt = PROMPTS[0]
    cached = run_alone(prompt, SamplingParams(max_tokens=12))
    for count, row in enumerate(cached.logits):
        uncached = run_alone([*prompt, *cached.token_ids[:count]], SamplingParams(max_tokens=1))
        torch.testing.assert_close(uncached.logits[0], row, atol=1e-4, rtol=0)
        assert uncached.token_ids == [cached.token_ids[count]]


def test_equal_requests_in_one_batch_get_equal_outputs(tiny_model, make_engine, run_engine, make_requests):
    first, second, third = run_engine(make_engine(tiny_model(), 4), make_requests([PROMPTS[2]] * 3, SAMPLED[0]))
    assert first.token_ids == second.token_ids == third.token_ids
    torch.testing.assert_close(first.logits, second.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(first.logits, third.logits, atol=1e-5, rtol=0)


def test_different_seeds_draw_different_tokens(tiny_model, make_engine, run_engine, make_requests):
    params = [SamplingParams(temperature=2, seed=seed, max_tokens=12) for seed in range(4)]
    runs = run_engine(make_engine(tiny_model()), make_requests([PROMPTS[0]] * 4, params))
    assert len({tuple(run.token_ids) for run in runs}) == 4


def test_blocks_that_held_nan_harm_no_later_request(tiny_model, make_engine, run_engine, make_requests, run_alone):
    parameters = dict(tiny_model().state_dict())
    parameters["embed_tokens.weight"] = parameters["embed_tokens.weight"].clone()
    parameters["embed_tokens.weight"][200] = torch.nan
    engine = make_engine(build_decoder(tiny_model().config, parameters), 4, max_model_len=MAX_MODEL_LEN, num_blocks=7)
    broken = Request("broken", [200] * 20, GREEDY)
    engine.add_request(broken)
    engine.step()
    assert (broken.finish_reason, broken.output_token_ids) == ("error", [])
    assert engine.kv_cache.kv.isnan().any()
    (run,) = run_engine(engine, make_requests([PROMPTS[0]], GREEDY))
    assert_same(run, run_alone(PROMPTS[0], GREEDY))


def test_scheduler_and_cache_count_the_same_blocks(tiny_model, make_engine):
    engine = make_engine(tiny_model(), block_size=8, num_blocks=33)
    assert engine.kv_cache.kv.shape[2:4] == (33, 8)
    assert (engine.scheduler.pool.num_blocks, engine.scheduler.block_size) == (33, 8)


def test_a_step_reports_what_it_did(tiny_model, make_engine):
    engine = make_engine(tiny_model(), block_size=4, budget=7)
    requests = [Request(str(i), prompt, SamplingParams(max_tokens=1)) for i, prompt in enumerate(PROMPTS[:2])]
    for request in requests:
        engine.add_request(request)
    output = engine.step()
    assert output.schedule.num_tokens == len(output.batch.token_ids) == 7
    assert output.logits.shape == (2, 256)
    assert output.sampled_token_ids == tuple(output.logits.argmax(-1).tolist())
    assert output.finished == tuple(requests)
    with pytest.raises(RequestError, match="no request waits or runs; expected add_request before step"):
        engine.step()


def test_a_request_that_can_never_run_is_refused(tiny_model, make_engine):
    engine = make_engine(tiny_model(), max_model_len=MAX_MODEL_LEN)
    with pytest.raises(RequestError, match="expected at most 23"):
        engine.add_request(Request("0", [1] * MAX_MODEL_LEN, GREEDY))
    assert not engine.has_unfinished_requests


# --- the switch of the shape checks ------------------------------------------------------------------------------------


def are_checks_off() -> bool:
    return jaxtyping.config.jaxtyping_disable


@contextmanager
def hook(decoder, function):
    """Call `function` whenever the decoder starts a forward pass."""
    handle = decoder.register_forward_pre_hook(lambda *_: function())
    try:
        yield
    finally:
        handle.remove()


def test_a_fast_and_a_checked_engine_run_side_by_side(tiny_model, make_engine):
    fast, checked = tiny_model(attention="sdpa"), tiny_model(attention="reference")
    engines = [make_engine(fast, check_shapes=False), make_engine(checked, check_shapes=True)]
    requests = [Request(str(i), PROMPTS[0], GREEDY) for i in range(2)]
    seen: list[tuple[str, bool]] = []
    with hook(fast, lambda: seen.append(("fast", are_checks_off()))), \
         hook(checked, lambda: seen.append(("checked", are_checks_off()))):  # fmt: skip
        for engine, request in zip(engines, requests, strict=True):
            engine.add_request(request)
        while any(engine.has_unfinished_requests for engine in engines):
            for engine in engines:
                engine.step()
                assert not are_checks_off(), "restored after every step"
    assert seen == [("fast", True), ("checked", False)] * 6
    assert requests[0].output_token_ids == requests[1].output_token_ids
    with pytest.raises(ShapeError):
        add_residual(torch.ones(2, 3), torch.ones(2, 4))


def test_the_switch_is_restored_after_an_exception(tiny_model, make_engine):
    decoder = tiny_model(attention="sdpa")
    engine = make_engine(decoder, check_shapes=False)
    engine.add_request(Request("0", PROMPTS[0], GREEDY))
    seen = []

    def fail():
        seen.append(are_checks_off())
        raise KeyboardInterrupt

    with hook(decoder, fail), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert seen == [True]
    assert not are_checks_off()


def test_checks_that_the_caller_switched_off_stay_off(tiny_model, make_engine):
    for check_shapes in (True, False):
        engine = make_engine(tiny_model(), check_shapes=check_shapes)
        engine.add_request(Request("0", PROMPTS[0], GREEDY))
        with checking(False):
            engine.step()
            assert are_checks_off()
    assert not are_checks_off()


def test_a_checked_engine_notices_a_wrong_shape(tiny_model, make_engine):
    decoder = tiny_model()
    other = make_engine(tiny_model("llama_mqa"))  # another number of key/value heads in its cache
    engine = make_engine(decoder)
    engine.kv_cache = other.kv_cache
    engine.add_request(Request("0", PROMPTS[0], GREEDY))
    with pytest.raises(ShapeError, match="num_kv_heads"):
        engine.step()


def test_a_batch_holds_tensors_and_tuples_of_int_only(tiny_model, make_engine):
    engine = make_engine(tiny_model())
    engine.add_request(Request("0", PROMPTS[0], GREEDY))
    batch = engine.step().batch
    for field in fields(batch):
        value = getattr(batch, field.name)
        is_int_tuple = isinstance(value, tuple) and all(isinstance(item, int) for item in value)
        assert isinstance(value, torch.Tensor) or is_int_tuple, field.name


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at_step", [0, 1, 2, 4])
def test_a_failed_step_is_done_again(error, at_step, tiny_model, make_engine, run_alone, monkeypatch):
    """Nothing of it counts as computed: bystanders lose no token, whatever they were doing."""
    engine = make_engine(tiny_model(), block_size=2, budget=4, max_model_len=MAX_MODEL_LEN)
    requests = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add_request(request)
    for _ in range(at_step):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(tinyllm.engine, "sample", raising(error))
        with pytest.raises(error):
            engine.step()
    while engine.has_unfinished_requests:
        engine.step()
    for request in requests:
        assert request.output_token_ids == run_alone(request.prompt_token_ids, GREEDY).token_ids
    assert engine.scheduler.pool.num_used_blocks == 0


def raising(error: type[BaseException]):
    def fail(*_):
        raise error("in the middle of a step")

    return fail


@pytest.mark.parametrize("body", ["reference", "sdpa"])
def test_an_engine_in_bfloat16_keeps_its_cache_in_bfloat16(body, tiny_model, make_engine, run_engine, make_requests):
    """And its logits stay as near to float32's as bfloat16 allows (0.15, the bound that the golden data state)."""
    decoder = tiny_model("llama_bf16", body, torch.bfloat16)
    engine = make_engine(decoder, max_model_len=MAX_MODEL_LEN)
    assert engine.kv_cache.kv.dtype is torch.bfloat16
    one = SamplingParams(max_tokens=1)
    runs = run_engine(engine, make_requests(PROMPTS, one))
    exact = make_engine(tiny_model("llama_bf16", body, torch.float32), max_model_len=MAX_MODEL_LEN)
    for run, expected in zip(runs, run_engine(exact, make_requests(PROMPTS, one)), strict=True):
        assert run.logits.dtype is torch.bfloat16
        torch.testing.assert_close(run.logits.float(), expected.logits, atol=0.15, rtol=0)


def test_requests_arrive_and_leave_while_others_run(tiny_model, make_engine, run_alone):
    engine = make_engine(tiny_model(), block_size=2, budget=6)
    first = Request("first", PROMPTS[0], GREEDY)
    engine.add_request(first)
    engine.step()
    late, gone = Request("late", PROMPTS[1], GREEDY), Request("gone", PROMPTS[2], GREEDY)
    engine.add_request(late)
    engine.add_request(gone)
    engine.step()
    assert engine.abort("gone")
    for request_id in ("gone", "never", "gone"):
        assert not engine.abort(request_id), "an id that nobody has changes nothing"
    again = Request("gone", PROMPTS[3], GREEDY)
    engine.add_request(again)
    with pytest.raises(RequestError, match="request id gone is taken by one that still runs"):
        engine.add_request(Request("gone", [1], GREEDY))
    while engine.has_unfinished_requests:
        engine.step()
    for request in (first, late, again):
        assert request.output_token_ids == run_alone(list(request.prompt_token_ids), GREEDY).token_ids
    assert gone.finish_reason == "abort"
    assert engine.scheduler.pool.num_used_blocks == 0


def test_a_failed_step_leaves_nothing_to_be_found(tiny_model, make_engine, run_alone, monkeypatch):
    """Blocks can be found from the moment they are planned; where the plan fails, nobody may find them."""
    engine = make_engine(tiny_model(), block_size=2)
    first = Request("0", PROMPTS[2], GREEDY)
    engine.add_request(first)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(tinyllm.engine, "build_batch", raising(RuntimeError))
        engine.step()
    assert engine.scheduler.pool.num_cached_blocks == 0
    engine.abort("0")
    second = Request("1", PROMPTS[2], GREEDY)
    engine.add_request(second)
    while engine.has_unfinished_requests:
        engine.step()
    assert second.output_token_ids == run_alone(PROMPTS[2], GREEDY).token_ids


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([10**6], "prompt token id 1000000 is outside the vocabulary of 256"),
        ([-1], "prompt token id is -1; expected a whole number of at least 0"),
        (["a"], "prompt token id is 'a'; expected a whole number"),
        ([True], "prompt token id is True"),
        ("abc", "prompt token id is 'a'"),
    ],
)
def test_a_bad_prompt_is_refused_and_stops_nobody_else(token_ids, message, tiny_model, make_engine, run_alone):
    engine = make_engine(tiny_model())
    good = Request("good", PROMPTS[0], GREEDY)
    engine.add_request(good)
    with pytest.raises(RequestError, match=message):
        engine.add_request(Request("bad", token_ids, GREEDY))
    while engine.has_unfinished_requests:
        engine.step()
    assert good.output_token_ids == run_alone(PROMPTS[0], GREEDY).token_ids


def test_parameters_of_another_type_are_refused():
    with pytest.raises(RequestError, match="request a: params is None; expected SamplingParams"):
        Request("a", [1], None)


PLAIN_FILES = ("engine.py", "scheduler.py", "kv_cache_manager.py", "block_pool.py")


def interrupt_at(number: int):
    """A trace function that raises at line `number` of what a step does outside the tensor functions."""
    seen = 0

    def on_line(frame, event, _):
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return on_line

    return lambda frame, event, _: on_line if Path(frame.f_code.co_filename).name in PLAIN_FILES else None


@pytest.mark.parametrize("step", range(3))
def test_a_step_may_be_interrupted_at_any_line(step, tiny_model, make_engine, run_alone):
    """Ctrl-C comes when it likes; whatever it cuts in two, the next steps give every request what it gets alone."""
    expected = [run_alone(prompt, GREEDY).token_ids for prompt in PROMPTS]
    before = sys.gettrace()
    for number in itertools.count(1, 7):
        engine = make_engine(tiny_model(attention="sdpa"), 2, 9, MAX_MODEL_LEN, num_blocks=13, check_shapes=False)
        requests = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
        for request in requests:
            engine.add_request(request)
        for _ in range(step):
            engine.step()
        sys.settrace(interrupt_at(number))
        try:
            engine.step()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        while engine.has_unfinished_requests:
            engine.step()
        assert [request.output_token_ids for request in requests] == expected, number
        assert engine.scheduler.pool.num_used_blocks == 0
    assert number > 200
