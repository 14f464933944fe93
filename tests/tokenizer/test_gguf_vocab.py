from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tinyllm.errors import TokenizerError
from tinyllm.tokenizer import Tokenizer, tokenizer_from_gguf

KEYS = ["model", "pre", "tokens", "merges", "token_type"]


def metadata(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["<end>", "a", "b", "ab", "Ġ", "Ġab", "<think>", "<unk>", "[PAD]", "Ċ"],
        "merges": ["a b", "Ġ ab"],
        "token_type": [3, 1, 1, 1, 1, 1, 4, 2, 5, 6],
    }
    return {f"tokenizer.ggml.{name}": value for name, value in {**fields, **changes}.items()}


def error_of(values: dict[str, Any]) -> str:
    with pytest.raises(TokenizerError) as error:
        tokenizer_from_gguf(values)
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 250
    return message


def test_token_types():
    tokenizer = tokenizer_from_gguf(metadata())
    assert tokenizer.special_tokens == {"<end>": 0, "<unk>": 7}
    assert tokenizer.added_tokens == {"<think>": 6}
    assert tokenizer.encode("ab ab<end><think>\n", parse_special=True) == [3, 5, 0, 6, 9]
    assert tokenizer.decode([3, 5, 0, 6, 8, 9]) == "ab ab<end><think>[PAD]\n"


def test_other_keys_do_not_matter():
    assert tokenizer_from_gguf({**metadata(), "general.name": 3, "tokenizer.ggml.scores": None}).encode("ab") == [3]


def test_the_default_model(smollm2_metadata: dict[str, Any], smollm2_tokenizer: Tokenizer):
    tokenizer = tokenizer_from_gguf(smollm2_metadata)
    assert tokenizer.vocab_size == smollm2_tokenizer.vocab_size == 49152
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]


@pytest.mark.parametrize(("pre_tokenizer", "ids"), [("llama-bpe", [2]), ("qwen2", [0, 1]), ("gpt-2", [0, 1])])
def test_llama_bpe_looks_for_whole_words_first(pre_tokenizer: str, ids: list[int]):
    values = metadata(pre=pre_tokenizer, tokens=["a", "b", "ab"], merges=[], token_type=[1, 1, 1])
    assert tokenizer_from_gguf(values).encode("ab") == ids


def test_invalid_utf8_in_the_file_stays_bytes():
    # A reader hands on a byte that is not UTF-8 as a surrogate escape.
    tokenizer = tokenizer_from_gguf(metadata(tokens=["\udcff", "a\udc80", "b"], merges=[], token_type=[1, 3, 1]))
    assert tokenizer.decode_bytes([0, 1, 2]) == b"\xffa\x80b"
    assert tokenizer.token_text(0) == r"\xff"


def test_an_empty_vocabulary_encodes_nothing():
    tokenizer = tokenizer_from_gguf(metadata(tokens=[], merges=[], token_type=[]))
    assert tokenizer.encode("text") == []


@pytest.mark.parametrize("key", KEYS)
def test_missing_key(key: str):
    values = metadata()
    del values[f"tokenizer.ggml.{key}"]
    assert error_of(values).startswith(f"the file has no tokenizer.ggml.{key}; expected")


def test_nothing_at_all():
    assert "tokenizer.ggml.model" in error_of({})


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [None, 5, 0.5, True, b"gpt2", {"a": 1}, ("a",)], ids=repr)
def test_wrong_type(key: str, value: Any):
    message = error_of(metadata(**{key: value}))
    assert message.startswith(f"tokenizer.ggml.{key} is a {type(value).__name__}; expected a")


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
@pytest.mark.parametrize("item", [None, 0.5, True, b"a", ["a"], {}], ids=repr)
def test_wrong_item_type(key: str, item: Any):
    assert error_of(metadata(**{key: [*metadata()[f"tokenizer.ggml.{key}"], item]})).startswith(
        f"tokenizer.ggml.{key} holds a {type(item).__name__}; expected"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer model 'llama' is not supported; expected 'gpt2' (byte-level BPE)"),
        ({"merges": ["  b" + "x" * 99]}, "tokenizer.ggml.merges holds '  bxxx"),
        ({"model": "gpt2\n" + "x" * 9999}, "is not supported"),
        ({"pre": "default"}, "pre-tokenizer 'default' is not supported; expected smollm"),
        ({"pre": "smollm\n" + "\udcff" * 9999}, "is not supported; expected smollm"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries; expected 10, one a token"),
        ({"token_type": [3] * 11}, "tokenizer.ggml.token_type has 11 entries; expected 10, one a token"),
        ({"token_type": [0] * 10}, "tokenizer.ggml.token_type holds 0; expected 1 to 6"),
        ({"token_type": [*[1] * 9, 7]}, "tokenizer.ggml.token_type holds 7; expected 1 to 6"),
        ({"token_type": [*[1] * 9, -(2**31)]}, "holds -2147483648; expected 1 to 6"),
        ({"tokens": ["a", "b", "a"], "token_type": [1] * 3}, "token 'a' is listed twice, as 0 and 2"),
        ({"tokens": ["a", "b", "ab", ""], "token_type": [1, 1, 1, 3], "merges": []}, "'' is empty"),
        ({"tokens": ["a\ud800"], "token_type": [1], "merges": []}, r"token 'a\ud800' holds a surrogate"),
        ({"merges": ["a b", "a"]}, "tokenizer.ggml.merges holds 'a'; expected two tokens and a blank between"),
        ({"merges": [""]}, "holds ''; expected two tokens"),
        ({"merges": [" "]}, "holds ' '; expected two tokens"),
        ({"merges": ["a "]}, "holds 'a '; expected two tokens"),
        ({"merges": [" b"]}, "holds ' b'; expected two tokens"),
        ({"merges": ["a b b"]}, "merge 0 ('a' + 'b b') needs 'b b', which is no ordinary token"),
        ({"merges": ["a b", "b a"]}, "merge 1 ('b' + 'a') needs 'ba', which is no ordinary token"),
        ({"merges": ["x y"]}, "merge 0 ('x' + 'y') needs 'x', which is no ordinary token"),
        ({"merges": ["a " + "b" * 9999]}, "which is no ordinary token"),
        (
            {"tokens": ["a", "b", "ab"], "token_type": [1, 1, 3]},
            "merge 0 ('a' + 'b') needs 'ab', which is no ordinary token",
        ),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str):
    assert message in error_of(metadata(**changes))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=6,
)


@st.composite
def odd_metadata(draw: st.DrawFn) -> dict[str, Any]:
    """A small vocabulary, mostly sound; sometimes one of its values is something else altogether."""
    tokens = draw(st.lists(st.text(st.sampled_from("abĠé \n\udcff"), max_size=3), max_size=8, unique=True))
    whole = st.sampled_from([token for token in tokens if len(token) > 1] or ["ab"])
    values = metadata(
        tokens=tokens,
        merges=draw(st.lists(whole.map(lambda token: f"{token[0]} {token[1:]}"), max_size=3)),
        token_type=draw(
            st.lists(st.sampled_from([1, 1, 1, 2, 3, 4, 5, 6]), min_size=len(tokens), max_size=len(tokens))
        ),
    )
    if draw(st.integers(0, 3)) == 0:
        values[draw(st.sampled_from(sorted(values)))] = draw(JUNK)
    return values


@settings(max_examples=300)
@given(odd_metadata(), st.text(alphabet="ab é\n\xff"))
def test_any_vocabulary_works_or_is_refused(values: dict[str, Any], text: str):
    try:
        tokenizer = tokenizer_from_gguf(values)
    except TokenizerError as error:
        assert str(error).isprintable()
        event("refused")
        return
    event("works")
    text_bytes = iter(text.encode())
    encoded = tokenizer.decode_bytes(tokenizer.encode(text, parse_special=True))
    assert all(byte in text_bytes for byte in encoded)  # the text's bytes in their order, some dropped
    assert not set(tokenizer.encode(text)) & set(tokenizer.special_tokens.values())
    assert all(tokenizer.token_text(token_id).isprintable() for token_id in range(tokenizer.vocab_size))


def test_a_vocabulary_of_nothing_but_special_tokens_is_refused_fast():
    tokens = [f"<{i}>" for i in range(2**16 + 1)]
    with pytest.raises(TokenizerError, match="has 65537 special tokens; expected at most 65536"):
        tokenizer_from_gguf(metadata(tokens=tokens, merges=[], token_type=[3] * len(tokens)))
