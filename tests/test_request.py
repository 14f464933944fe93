"""Sampling parameters and the life of one request."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm import RequestError, SamplingParams
from tinyllm.request import MIN_TEMPERATURE, Request, RequestStatus

FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids")
BAD_VALUES = [
    *[("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, -math.inf, "1", None, True)],
    *[("top_k", value) for value in (-2, 1.5, None, True)],
    *[("top_p", value) for value in (0, -0.5, 1.01, math.nan, None)],
    *[("min_p", value) for value in (-0.01, 1.5, math.nan, "0")],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 1.0, "7")],
    *[("max_tokens", value) for value in (0, -1, 1.5, True, "16")],
    *[("stop_token_ids", value) for value in (7, "7", [1.5], [-1], [None], None)],
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
        request = Request("0", [1], SamplingParams(), status=status)
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
