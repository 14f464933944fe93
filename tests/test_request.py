"""Sampling parameters and the life of one request."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm import RequestError, SamplingParams
from tinyllm.request import MIN_TEMPERATURE, Request, RequestStatus

FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids"),
    *("min_tokens", "n", "skip_reading_prefix_cache"),
)
BAD_VALUES = [
    *[("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, -math.inf, "1", None, True)],
    *[("top_k", value) for value in (-2, 1.5, None, True)],
    *[("top_p", value) for value in (0, -0.5, 1.01, math.nan, None)],
    *[("min_p", value) for value in (-0.01, 1.5, math.nan, "0")],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 1.0, "7")],
    *[("max_tokens", value) for value in (0, -1, 1.5, True, "16")],
    *[("stop_token_ids", value) for value in (7, "7", [1.5], [-1], [None], None)],
    *[("min_tokens", value) for value in (-1, 17, 1.5, True, "1", None)],  # max_tokens is 16 unless given
    *[("n", value) for value in (0, -1, 2, 1025, 1.0, True, None)],  # at temperature 0
    *[("skip_reading_prefix_cache", value) for value in (0, 1, "no", None)],
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is {value!r}; expected ")
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.just(10**400)
)


@given(st.sampled_from(FIELDS), ANYTHING)
def test_any_value_is_taken_or_refused_in_one_line(name, value):
    try:
        params = SamplingParams(**{name: value})
    except RequestError as error:
        assert "\n" not in str(error)
    else:
        hash(params)  # a list of stop ids has become a tuple


@given(
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 2**40),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**40),
    stop_token_ids=st.lists(st.integers(0, 2**31)),
)
def test_every_value_in_range_is_taken(**values):
    params = SamplingParams(**values)
    assert params.is_greedy == (values["temperature"] == 0)
    assert params.is_greedy or params.temperature == max(values["temperature"], MIN_TEMPERATURE)
    assert params.stop_token_ids == tuple(values["stop_token_ids"])


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match=r"^request 7: the prompt is empty; expected at least one token$"):
        Request("7", [], SamplingParams())


def test_a_request_counts_its_tokens():
    prompt = [5, 6, 7]
    request = Request("0", prompt, SamplingParams())
    request.token_ids.append(8)
    assert prompt == [5, 6, 7], "the caller's list stays as it is"
    assert (request.num_prompt_tokens, request.num_tokens, request.output_token_ids) == (3, 4, [8])


def test_the_four_final_states_name_the_reason():
    reasons = {}
    for status in RequestStatus:
        request = Request("0", [1], SamplingParams())
        request.status = status
        if status.is_finished:
            reasons[status] = request.finish_reason
        else:
            assert request.finish_reason is None
    assert reasons == {
        RequestStatus.STOPPED: "stop",
        RequestStatus.LENGTH_CAPPED: "length",
        RequestStatus.FAILED: "error",
        RequestStatus.ABORTED: "abort",
    }


def test_an_unseeded_request_draws_its_own_seed():
    seeds = {Request("0", [1], SamplingParams()).seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds), "a drawn seed can be given back"
    assert Request("0", [1], SamplingParams(seed=-5)).seed == -5


def test_stop_strings_are_one_text_or_several():
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b c"]).stop == ("a", "b c")
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 5, b"a", None, {"a"}])
def test_what_is_no_stop_string_is_refused(stop):
    with pytest.raises(RequestError, match=r"^stop is .*expected a text or a list of texts, none of them empty$"):
        SamplingParams(stop=stop)


def test_include_stop_is_a_truth_value():
    with pytest.raises(RequestError, match="include_stop_str_in_output is 1; expected True or False"):
        SamplingParams(include_stop_str_in_output=1)


def test_min_tokens_goes_up_to_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6
    with pytest.raises(
        RequestError, match=r"^min_tokens is 6; expected a whole number from 0 up to max_tokens, which is 5$"
    ):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_several_answers_need_a_temperature():
    assert SamplingParams(n=1024, temperature=0.7).n == 1024
    with pytest.raises(RequestError, match=r"^n is 2; expected 1 at temperature 0, where all answers are the same$"):
        SamplingParams(n=2)
    with pytest.raises(RequestError, match=r"^n is 1025; expected a whole number from 1 to 1024$"):
        SamplingParams(n=1025, temperature=0.7)


def test_before_min_tokens_nothing_that_ends_a_request_may_be_sampled():
    request = Request("0", [5], SamplingParams(min_tokens=2, stop_token_ids=[8]), eos_token_ids=(2, 7))
    assert request.stop_ids == request.banned_ids == (2, 7, 8)
    request.token_ids.append(9)
    assert request.banned_ids == (2, 7, 8)
    request.token_ids.append(9)
    assert (request.banned_ids, request.stop_ids) == ((), (2, 7, 8))
    ignoring = Request("1", [5], SamplingParams(min_tokens=2, ignore_eos=True), eos_token_ids=(2,))
    assert ignoring.banned_ids == (), "a token that ends nothing needs no ban"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("priority", value) for value in ("high", 0.5, 1.0, True, None, [0])],
        *[("arrival_time", value) for value in ("now", math.nan, math.inf, None, True)],
        *[("cache_salt", value) for value in (5, b"salt", ["salt"])],
    ],
)
def test_a_field_of_a_request_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        Request("7", [1], SamplingParams(), **{field: value})
    assert str(caught.value).startswith(f"request 7: {field} is {value!r}; expected ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("request_id", [7, None, b"7", ("7",)])
def test_an_id_is_a_text(request_id):
    with pytest.raises(RequestError, match=r"^request id .*expected a text$"):
        Request(request_id, [1], SamplingParams())


def test_urgency_is_priority_then_arrival_then_id():
    def urgent(priority: int, arrival_time: float, request_id: str) -> Request:
        return Request(request_id, [1], SamplingParams(), priority=priority, arrival_time=arrival_time)

    requests = [urgent(-1, 9, "d"), urgent(0, 1, "b"), urgent(0, 2, "a"), urgent(0, 2, "c"), urgent(1, 0, "a")]
    mixed = [requests[i] for i in (3, 0, 4, 2, 1)]
    assert sorted(mixed, key=lambda request: request.urgency) == requests
    first, second = (Request("0", [1], SamplingParams()) for _ in range(2))
    assert first.arrival_time <= second.arrival_time, "the time at which it was made, unless given"
