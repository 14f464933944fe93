"""Answers piece by piece, and stop strings: the same text as `generate`, nothing taken back, an engine left clean."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tinyllm import LLM, RequestError, SamplingParams
from tinyllm.llm import Piece
from tinyllm.request import Request, RequestStatus
from tinyllm.tokenizer import Tokenizer

TEN = SamplingParams(max_tokens=10, ignore_eos=True)
FRANCE = "The capital of France is"
ANSWER = " Paris.\n\nThe answer is: 2018-01-22 12:12:53."

# The public reports of this part: which test shows each, or why none does.
REPORTS = {
    "case-022": "tokenizer/test_detokenize.py::test_case_022_and_023_control_tokens_are_parsed_only_where_asked",
    "case-023": "tokenizer/test_detokenize.py::test_case_022_and_023_control_tokens_are_parsed_only_where_asked",
    "case-025": "tokenizer/test_detokenize.py::test_reported_pieces",
    "case-026": "tokenizer/test_detokenize.py::test_reported_pieces",
    "case-028": "tokenizer/test_detokenize.py::test_case_028_the_work_per_token_does_not_grow_with_the_text",
    "case-029": "tokenizer/test_detokenize.py::test_case_029_the_text_behind_a_prompt_is_decoded_and_not_sliced",
    "case-030": "tokenizer/test_detokenize.py::test_case_030_a_character_behind_garbage_survives",
    "case-031": "tokenizer/test_detokenize.py::test_reported_pieces",
    "case-033": "test_stream.py::test_case_033_ignore_eos_ignores_every_end_token_but_no_stop_id",
    "case-034": "tokenizer/test_detokenize.py::test_reported_stops",
    "case-035": "tokenizer/test_detokenize.py::test_reported_stops",
    "case-036": "tokenizer/test_detokenize.py::test_reported_stops",
    "case-037": "tokenizer/test_detokenize.py::test_case_037_several_tokens_that_show_the_same_text_all_stop",
    "case-038": "test_stream.py::test_case_038_either_end_token_ends_the_text",
    "case-096": "test_llm.py::test_case_096_and_101_a_hostile_template_runs_nothing",
    "case-032": "test_llm.py::test_case_032_nothing_ends_an_answer_before_min_tokens",
    "case-097": "test_llm.py::test_case_097_a_text_that_starts_with_the_begin_token_gets_another",
    "case-098": "tokenizer/test_chat.py::test_case_098_a_template_may_ignore_the_generation_prompt",
    "case-099": "tokenizer/test_chat.py::test_case_099_no_begin_token_is_added_to_a_rendered_text",
    "case-100": "tokenizer/test_chat.py::test_what_is_no_conversation_is_refused_in_one_line",
    "case-101": "test_llm.py::test_case_096_and_101_a_hostile_template_runs_nothing",
    "case-102": "tokenizer/test_chat.py::test_case_102_the_message_of_a_template_reaches_the_user",
}
ELSEWHERE = {
    "case-024": "cl100k's own ids, with the goldens of the vocabularies that are fetched",
    "case-027": "Mistral's vocabulary is not byte-level BPE; the rule is kept, as ids are never decoded one by one",
}


def is_clean(llm: LLM) -> bool:
    """Nothing is queued, every block is free, and no answer is remembered."""
    scheduler = llm.engine.scheduler
    return not (llm.engine.has_unfinished_requests or scheduler.pool.num_used_blocks or llm._answers)


def joined(pieces: list[Piece]) -> tuple[str, tuple[int, ...], str | None]:
    """Text, ids and reason of the whole answer."""
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    return (
        "".join(piece.text for piece in pieces),
        tuple(token_id for piece in pieces for token_id in piece.token_ids),
        pieces[-1].finish_reason,
    )


@pytest.fixture
def letter_llm(tiny_llm):
    """letter_llm(**settings): a tiny model whose 256 tokens are letters, most of them two, so that its text is readable."""
    letters = [chr(ord("a") + i % 26) + chr(ord("a") + i // 26) for i in range(256)]
    tokenizer = Tokenizer(letters, [], [], "smollm")

    def letter_llm(**settings) -> LLM:
        plain = tiny_llm(**settings)
        return LLM(replace(plain.loaded, tokenizer=tokenizer), **settings)

    return letter_llm


# --- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], "é", [0xC3]])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_pieces_join_to_what_generate_gives(prompt, temperature, tiny_llm):
    llm = tiny_llm(max_num_batched_tokens=2, block_size=2)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, ignore_eos=True)
    pieces = list(llm.stream(prompt, params))
    (answer,) = llm.generate(prompt, params)
    assert joined(pieces) == (answer.text, answer.token_ids, answer.finish_reason)
    assert [len(piece.token_ids) for piece in pieces] == [1] * 30, "a chunk of the prompt is no piece"
    assert is_clean(llm)


def test_the_default_model_streams_its_answer(smollm2_sdpa):
    pieces = list(LLM(smollm2_sdpa).stream(FRANCE, SamplingParams(max_tokens=40)))
    assert joined(pieces)[::2] == (ANSWER, "stop")
    assert [piece.text for piece in pieces[:2]] == [" Paris", "."]
    assert pieces[-1] == Piece("", (2,), "stop"), "the end token has no text"


def test_an_unfinished_stream_leaves_the_engine_clean(tiny_llm):
    llm = tiny_llm()
    stream = llm.stream("abc", TEN)
    assert is_clean(llm), "nothing is queued before it is read"
    next(stream)
    assert not is_clean(llm)
    stream.close()
    assert is_clean(llm)
    for _ in llm.stream("abc", TEN):
        break
    assert is_clean(llm), "nobody holds it any more"


def test_streams_and_generate_may_be_mixed(tiny_llm):
    llm = tiny_llm()
    alone = [tiny_llm().generate(prompt, TEN)[0] for prompt in ("abc", "xyz", "k")]
    first, second = llm.stream("abc", TEN), llm.stream("xyz", TEN)
    pieces = [next(first)], [next(second)]
    (third,) = llm.generate("k", TEN)
    pieces[1].extend(second)
    pieces[0].extend(first)
    for parts, answer in zip(pieces, alone, strict=False):
        assert joined(parts) == (answer.text, answer.token_ids, "length")
    assert third.token_ids == alone[2].token_ids
    assert is_clean(llm)


def test_streams_of_several_threads(tiny_llm):
    llm = tiny_llm()
    prompts = [[i, i + 1, i + 2] for i in range(8)]
    alone = [tiny_llm().generate(prompt, TEN)[0].token_ids for prompt in prompts]
    barrier = threading.Barrier(4)

    def read(prompt: list[int]) -> tuple[int, ...]:
        barrier.wait()
        return joined(list(llm.stream(prompt, TEN)))[1]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, prompts)) == alone
    assert is_clean(llm)


def test_an_interrupt_in_a_stream_leaves_the_engine_clean(tiny_llm, monkeypatch):
    llm = tiny_llm()
    stream = llm.stream("abc", TEN)
    next(stream)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        next(stream)
    assert is_clean(llm)


@pytest.mark.parametrize("place", ["find_cached_blocks", "allocate_slots", "cache_full_blocks"])
def test_a_stream_that_the_collector_closes_within_a_step_leaves_the_engine_clean(place, tiny_llm, monkeypatch):
    llm = tiny_llm(block_size=2)
    (alone,) = llm.generate("xyz", TEN)
    abandoned = llm.stream("abcdefg", TEN)
    next(abandoned)
    plan = getattr(llm.engine.scheduler.manager, place)

    def collect(*args):
        abandoned.close()
        return plan(*args)

    other = llm.stream("xyz", TEN)
    monkeypatch.setattr(llm.engine.scheduler.manager, place, collect)
    assert joined(list(other))[1] == alone.token_ids
    assert is_clean(llm)


def test_a_run_that_is_refused_gives_up_nobody_else_s_requests(tiny_llm):
    llm = tiny_llm()
    requests = llm.make_requests([[1, 2, 3]], TEN)
    steps = llm.run(requests)
    next(steps)
    with pytest.raises(RequestError, match="was queued before"):
        list(llm.run(requests))
    for junk in ([None], ["x"]):
        with pytest.raises(RequestError, match="is no Request"):
            list(llm.run(junk))
    list(steps)
    assert requests[0].output_token_ids == list(tiny_llm().generate([1, 2, 3], TEN)[0].token_ids)


def test_a_cut_character_does_not_stop_within_min_tokens(tiny_llm):
    """The flush of the last bytes belongs to the last token."""
    for first in range(128, 160):
        (free,) = tiny_llm().generate([[first]], replace(TEN, max_tokens=2))
        params = replace(TEN, max_tokens=2, min_tokens=2, stop="\ufffd")
        assert tiny_llm().generate([[first]], params)[0].text == free.text


@pytest.mark.parametrize("prompt", [None, 5, b"a", [1, "a"]])
def test_a_stream_takes_what_generate_takes(prompt, tiny_llm):
    with pytest.raises(RequestError, match="expected a text"):
        tiny_llm().stream(prompt)


def test_a_stream_of_no_prompt_is_empty(tiny_llm):
    assert list(tiny_llm().stream([])) == tiny_llm().generate([]) == []


def test_several_prompts_and_several_answers_stream_at_once(tiny_llm):
    llm = tiny_llm(max_num_batched_tokens=8, max_num_seqs=4)
    params = [replace(TEN, max_tokens=3), SamplingParams(temperature=1, seed=3, n=2, max_tokens=7), TEN]
    prompts = ["abc", "a long prompt that takes some steps", "xyz"]
    answers = llm.generate(prompts, params)
    pieces = list(llm.stream(prompts, params))
    assert len(answers) == 4
    for index, answer in enumerate(answers):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == answer.text
        assert tuple(token_id for piece in own for token_id in piece.token_ids) == answer.token_ids
        assert [piece.finish_reason for piece in own if piece.finish_reason] == [answer.finish_reason]
    order = [piece.index for piece in pieces]
    assert order != sorted(order), "they come while the others run"
    assert is_clean(llm)


def test_a_stream_refuses_what_cannot_run_at_once(tiny_llm):
    with pytest.raises(RequestError, match="has 20 tokens; expected at most 19"):
        tiny_llm(max_model_len=20).stream("x" * 20)
    with pytest.raises(RequestError, match="the prompt is empty"):
        tiny_llm().stream("")
    with pytest.raises(RequestError, match=r"params is \{\}; expected SamplingParams"):
        tiny_llm().stream("a", {})


# --- stop strings ------------------------------------------------------------------------------------------------------


def test_every_stop_string_cuts_the_text_where_it_first_stands(letter_llm):
    llm = letter_llm(max_model_len=64)
    (free,) = llm.generate([1, 2, 3], TEN)
    assert len(free.text) == 20
    for start in range(0, 20, 3):
        for stop in (free.text[start], free.text[start : start + 3]):
            params = replace(TEN, stop=stop)
            (answer,) = llm.generate([1, 2, 3], params)
            place = free.text.index(stop)
            assert (answer.text, answer.finish_reason) == (free.text[:place], "stop")
            assert len(answer.token_ids) == (place + len(stop) + 1) // 2, "the token that completed it is the last"
            assert joined(list(llm.stream([1, 2, 3], params))) == (answer.text, answer.token_ids, "stop")
            (kept,) = llm.generate([1, 2, 3], replace(params, include_stop_str_in_output=True))
            assert kept.text == free.text[: place + len(stop)]
    assert is_clean(llm)


def test_a_stop_string_that_never_comes_changes_nothing(letter_llm):
    llm = letter_llm()
    (free,) = llm.generate([1, 2, 3], TEN)
    params = replace(TEN, stop=[free.text[-3:] + "!", "something rather long that never comes"])
    assert llm.generate([1, 2, 3], params)[0].text == free.text
    pieces = list(llm.stream([1, 2, 3], params))
    assert joined(pieces)[0] == free.text
    assert pieces[-1].text.endswith(free.text[-3:]), "what was held back comes out at the end"


def test_a_stop_string_in_the_last_token_that_fits_is_reason_stop(letter_llm):
    llm = letter_llm()
    (free,) = llm.generate([1, 2, 3], replace(TEN, max_tokens=3))
    assert free.finish_reason == "length"
    (answer,) = llm.generate([1, 2, 3], replace(TEN, max_tokens=3, stop=free.text[4:6]))
    assert (answer.finish_reason, len(answer.token_ids)) == ("stop", (free.text.index(free.text[4:6]) + 3) // 2)


def test_a_stop_string_in_the_prompt_is_none_in_the_answer(letter_llm):
    llm = letter_llm()
    (free,) = llm.generate([1, 2, 3], TEN)
    prompt = llm.tokenizer.decode([1, 2, 3])
    assert prompt[-1] + free.text[0] not in free.text
    (answer,) = llm.generate([1, 2, 3], replace(TEN, stop=prompt[-1] + free.text[0]))
    assert answer.text == free.text


def test_other_requests_of_the_step_go_on(letter_llm):
    llm = letter_llm()
    first, second = llm.generate([[1, 2, 3], [4, 5]], TEN)
    params = [replace(TEN, stop=first.text[2:4]), TEN]
    stopped, other = llm.generate([[1, 2, 3], [4, 5]], params)
    assert len(stopped.token_ids) < 10
    assert other.token_ids == second.token_ids
    assert is_clean(llm)


def test_the_default_model_stops_across_token_borders(smollm2_sdpa):
    llm = LLM(smollm2_sdpa)
    params = SamplingParams(max_tokens=40, stop=["zzz", "e answ", "is:"])
    (answer,) = llm.generate(FRANCE, params)
    assert (answer.text, answer.finish_reason) == (" Paris.\n\nTh", "stop")
    assert joined(list(llm.stream(FRANCE, params)))[0] == answer.text


def test_a_cut_character_comes_out_once_at_the_end(tiny_llm):
    """case-031: max_tokens ends the answer inside a character."""
    llm = tiny_llm()
    (free,) = llm.generate("abc", replace(TEN, max_tokens=14))
    for count in range(1, 14):
        pieces = list(llm.stream("abc", replace(TEN, max_tokens=count)))
        assert joined(pieces)[0] == llm.tokenizer.decode(free.token_ids[:count])


def test_case_033_ignore_eos_ignores_every_end_token_but_no_stop_id(tiny_llm):
    plain = tiny_llm()
    (free,) = plain.generate("abc", TEN)
    llm = LLM(replace(plain.loaded, config=replace(plain.loaded.config, eos_token_ids=free.token_ids[:2])))
    assert llm.generate("abc", TEN)[0].token_ids == free.token_ids
    (answer,) = llm.generate("abc", replace(TEN, stop_token_ids=[free.token_ids[1]]))
    assert (answer.token_ids, answer.finish_reason) == (
        free.token_ids[: free.token_ids.index(free.token_ids[1]) + 1],
        "stop",
    )


def test_case_038_either_end_token_ends_the_text(tiny_llm):
    plain = tiny_llm()
    (free,) = plain.generate("abc", TEN)
    for end in free.token_ids[2:4]:
        llm = LLM(replace(plain.loaded, config=replace(plain.loaded.config, eos_token_ids=(250, end))))
        cut = free.token_ids.index(end) + 1
        assert llm.generate("abc", replace(TEN, ignore_eos=False))[0].token_ids == free.token_ids[:cut]


def test_the_scheduler_ends_a_request_with_the_status_that_it_is_given(tiny_llm):
    scheduler = tiny_llm().engine.scheduler
    request = Request("0", [1, 2], TEN)
    scheduler.add_request(request)
    scheduler.schedule()
    scheduler.abort(request, RequestStatus.STOPPED)
    assert (request.finish_reason, scheduler.pool.num_used_blocks) == ("stop", 0)


def test_every_report_of_this_part_has_its_test():
    cases = {f"case-{number:03}" for number in (*range(22, 39), *range(96, 103))}
    assert REPORTS.keys() | ELSEWHERE.keys() == cases
    for place in REPORTS.values():
        path, _, name = place.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / path).read_text()
