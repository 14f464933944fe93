"""The glossary's formulas, the run-time switch, and the text of the error that a student reads."""

import dataclasses
import importlib
import sys

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import AnnotationError, Bool, Float, Int, jaxtyped
from torch import Tensor

from tinyllm.batch import FlatBatch, build_batch
from tinyllm.config import CacheConfig, ModelConfig
from tinyllm.layers.attention.reference import attend
from tinyllm.layers.norm import RMSNorm, rms_norm
from tinyllm.sampler.sample import sample
from tinyllm.shapes import WORDS, ShapeError, checking, evaluate, typechecker

SMOLLM2 = ModelConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_positions=8192,
    tie_word_embeddings=True,
)
SMOLLM2_DERIVED = {
    "group_size": 3,
    "half_dim": 32,
    "q_size": 576,
    "kv_size": 192,
    "qkv_size": 960,
    "gate_up_size": 3072,
}
CONFIG_WORDS = [word for word in WORDS.values() if word.scope == "config"]
MARKER = 1234.5  # a value that no message may show

checked = jaxtyped(typechecker=typechecker)


@checked
def split(
    x: Float[Tensor, "num_tokens hidden_size"], shift: int = 0
) -> tuple[Float[Tensor, "num_tokens half_dim"], Int[Tensor, " num_tokens"]]:
    """Results chosen by `shift`: 0 is right, 1 a wrong size, 2 a wrong dtype, 3 a wrong rank, 4 one item, 5 no tuple."""
    half, ids = x[:, ::2], torch.zeros(len(x), dtype=torch.int64)
    wrong = {
        0: (half, ids),
        1: (half, ids[:-1]),
        2: (half, ids.float()),
        3: (half, ids[:, None]),
        4: (half,),
        5: half,
    }
    return wrong[shift]  # pyright: ignore[reportReturnType]


@checked
def half(x: Float[Tensor, "num_tokens hidden_size"]) -> Float[Tensor, "num_tokens hidden_size"]:
    return x[:, ::2]


@checked
def mark(is_set: Bool[Tensor, " num_reqs"], starts: Int[Tensor, " num_reqs+1"], *, scale: float = 1.0) -> None:
    return None


def full(*shape: int) -> Tensor:
    return torch.full(shape, MARKER)


def error_of(function, *args, **kwargs) -> str:
    """The message of the ShapeError: always one line, without any value of a tensor and without a chained traceback."""
    with pytest.raises(ShapeError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and "1234" not in message and "tensor(" not in message
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert isinstance(caught.value, AnnotationError) and isinstance(caught.value, TypeError)
    return message


# ---- the text of the error ---------------------------------------------------------------------------------------------


def test_a_plain_argument() -> None:
    assert error_of(attend, full(3, 8, 8), full(5, 2, 8), full(5, 2, 4)) == (
        "tinyllm.layers.attention.reference.attend: v is (5, 2, 4) float32, expected [seq_len num_kv_heads head_dim]: "
        "the size of dimension head_dim is 4 which does not equal the existing value of 8. "
        "Bound before: query_len=3, num_heads=8, head_dim=8, seq_len=5, num_kv_heads=2"
    )


def test_a_wrong_rank() -> None:
    assert error_of(attend, full(3, 8, 8), full(5, 16), full(5, 2, 8)) == (
        "tinyllm.layers.attention.reference.attend: k is (5, 16) float32, expected [seq_len num_kv_heads head_dim]: "
        "it has 2 axes, not 3. Bound before: query_len=3, num_heads=8, head_dim=8"
    )


def test_a_wrong_dtype() -> None:
    assert error_of(attend, full(3, 8, 8).int(), full(5, 2, 8), full(5, 2, 8)) == (
        "tinyllm.layers.attention.reference.attend: q is (3, 8, 8) int32, expected [query_len num_heads head_dim]: "
        "dtype int32 is not Float. Bound before: nothing"
    )
    assert error_of(mark, full(2), full(3).long()) == (
        f"{__name__}.mark: is_set is (2,) float32, expected [num_reqs]: dtype float32 is not Bool. Bound before: nothing"
    )


def test_an_optional_argument_of_a_method() -> None:
    norm = RMSNorm(4, 1e-5)
    assert error_of(norm, full(2, 4), full(2, 5)) == (
        "tinyllm.layers.norm.RMSNorm.forward: residual is (2, 5) float32, expected [num_tokens hidden_size]: "
        "the size of dimension hidden_size is 5 which does not equal the existing value of 4. "
        "Bound before: num_tokens=2, hidden_size=4"
    )
    assert error_of(norm, full(2, 4), "no") == (
        "tinyllm.layers.norm.RMSNorm.forward: residual is a str, expected [num_tokens hidden_size]: "
        "it is no tensor. Bound before: num_tokens=2, hidden_size=4"
    )


def test_a_tuple_result() -> None:
    assert len(split(full(4, 6))) == 2
    bound = "Bound before: num_tokens=4, hidden_size=6, half_dim=3"
    assert error_of(split, full(4, 6), 1) == (
        f"{__name__}.split: the result[1] is (3,) int64, expected [num_tokens]: "
        f"the size of dimension num_tokens is 3 which does not equal the existing value of 4. {bound}"
    )
    assert error_of(split, full(4, 6), shift=2) == (
        f"{__name__}.split: the result[1] is (4,) float32, expected [num_tokens]: dtype float32 is not Int. {bound}"
    )
    assert error_of(split, full(4, 6), 3) == (
        f"{__name__}.split: the result[1] is (4, 1) int64, expected [num_tokens]: it has 2 axes, not 1. {bound}"
    )


def test_a_result_of_another_kind() -> None:
    for shift, shown in ((4, "a tuple of 1"), (5, "(4, 3) float32")):
        message = error_of(split, full(4, 6), shift)
        assert message.startswith(f"{__name__}.split: the result is {shown}, expected tuple[jaxtyping.Float[Tensor, ")


def test_a_plain_result() -> None:
    assert error_of(half, x=full(4, 6)) == (
        f"{__name__}.half: the result is (4, 3) float32, expected [num_tokens hidden_size]: "
        "the size of dimension hidden_size is 3 which does not equal the existing value of 6. "
        "Bound before: num_tokens=4, hidden_size=6"
    )


def test_an_expression() -> None:
    mark(torch.ones(2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), scale=2.0)
    assert error_of(mark, torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)) == (
        f"{__name__}.mark: starts is (2,) int64, expected [num_reqs+1]: "
        "the size of dimension num_reqs+1 is 2 which does not equal the existing value of 3. Bound before: num_reqs=2"
    )


def test_a_field_of_a_dataclass() -> None:
    batch = build_batch([[7, 8, 9], [5]], [0, 6], [[1], [3, 2]], block_size=4)
    assert error_of(dataclasses.replace, batch, seq_lens=torch.zeros(3, dtype=torch.int64)) == (
        "tinyllm.batch.FlatBatch.__init__: seq_lens is (3,) int64, expected [num_reqs]: "
        "the size of dimension num_reqs is 3 which does not equal the existing value of 2. "
        "Bound before: num_tokens=4, num_reqs=2, max_blocks=2"
    )


def test_arguments_that_are_no_tensors() -> None:
    """Here beartype's own text would print the argument, with every number in it."""
    batch = build_batch([[1]], [0], [[1]], block_size=4)
    assert (
        error_of(rms_norm, full(2, 4), full(4), "1e-5") == "tinyllm.layers.norm.rms_norm: eps is a str, expected float"
    )
    assert error_of(sample, full(1, 4), batch) == (
        "tinyllm.sampler.sample.sample: sampling is a FlatBatch, expected SamplingBatch"
    )
    assert error_of(dataclasses.replace, batch, query_lens_cpu=[1, 2]) == (
        "tinyllm.batch.FlatBatch.__init__: query_lens_cpu is a list of 2, expected tuple[int, ...]"
    )
    assert error_of(rms_norm, [[1.0]], full(4), 1e-5) == (
        "tinyllm.layers.norm.rms_norm: x is a list of 1, expected [num_tokens hidden_size]: it is no tensor. "
        "Bound before: nothing"
    )


def test_an_int_is_a_fine_float() -> None:
    """PEP 484; beartype alone refuses it, and temperature=1 would be a shape error."""
    x = full(2, 4)
    assert torch.equal(rms_norm(x, x[0], 1), rms_norm(x, x[0], 1.0))


def test_a_checked_class_stays_a_class() -> None:
    assert isinstance(FlatBatch, type)
    assert typechecker(FlatBatch) is FlatBatch


def test_other_exceptions_pass_unchanged() -> None:
    @checked
    def fail(x: Float[Tensor, " num_tokens"]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail(full(2))


# ---- the switch --------------------------------------------------------------------------------------------------------


def test_checking_false_really_skips() -> None:
    wrong = full(4, 6)
    with checking(False):
        assert half(wrong).shape == (4, 3)
        with checking(True), pytest.raises(ShapeError):
            half(wrong)
        assert half(wrong).shape == (4, 3), "the inner block put back what it found"
    with pytest.raises(ShapeError):
        half(wrong)


def test_checking_restores_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), checking(False):
        raise ZeroDivisionError
    assert jaxtyping.config.jaxtyping_disable is False
    with pytest.raises(ShapeError):
        half(full(4, 6))


# ---- formulas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", CONFIG_WORDS, ids=lambda word: word.name)
def test_config_words_and_their_formulas_equal_the_properties(word) -> None:
    dims = SMOLLM2.dims()
    assert dims[word.name] == getattr(SMOLLM2, word.name)
    if word.formula:
        assert evaluate(word.formula, dims) == dims[word.name] == SMOLLM2_DERIVED[word.name]


def test_every_config_and_cache_word_has_a_size() -> None:
    cache = CacheConfig(block_size=16, num_blocks=513)
    assert SMOLLM2.dims().keys() == {word.name for word in CONFIG_WORDS}
    assert SMOLLM2_DERIVED.keys() == {word.name for word in CONFIG_WORDS if word.formula}
    assert cache.dims().keys() == {word.name for word in WORDS.values() if word.scope == "cache"}
    assert evaluate(WORDS["num_slots"].formula, cache.dims()) == cache.num_slots == cache.dims()["num_slots"] == 8208


@pytest.mark.parametrize(("seq_len", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_the_blocks_of_a_request_are_rounded_up(seq_len: int, blocks: int) -> None:
    assert evaluate(WORDS["num_req_blocks"].formula, {"seq_len": seq_len, "block_size": 16}) == blocks


def test_a_formula_uses_words_only() -> None:
    for word in WORDS.values():
        assert not word.formula or evaluate(word.formula, dict.fromkeys(WORDS, 64)) is not None, word.name


@given(a=st.integers(0, 10**6), b=st.integers(1, 10**6))
def test_evaluate_is_whole_number_arithmetic(a: int, b: int) -> None:
    sizes = {"a": a, "b": b}
    assert evaluate("a+2*b", sizes) == a + 2 * b
    assert evaluate("(a-b)*3", sizes) == (a - b) * 3
    assert evaluate("a/b", sizes) == a // b
    assert evaluate(str(b), sizes) == b
    assert evaluate("a+c", sizes) is None, "c is unknown"
    assert sizes == {"a": a, "b": b}


@pytest.mark.parametrize("text", ["a;b", "a.b", "a[0]", "'x'", "a, b", "...", "a=3", "{a}", ""])
def test_evaluate_refuses_what_is_no_dimension_expression(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no dimension expression: use words, numbers, \+ - \* / and brackets"):
        evaluate(text, {"a": 1, "b": 2, "x": 3})


FORMULA_MODULE = """
from jaxtyping import Float
from torch import Tensor


def halve(x: Float[Tensor, "num_tokens head_dim"]) -> Float[Tensor, "num_tokens half_dim"]:
    return x[:, 1:]


def fuse(q: Float[Tensor, "num_tokens q_size"], num_kv_heads: int, head_dim: int) -> Float[Tensor, "num_tokens qkv_size"]:
    return q


def plain(x: Float[Tensor, "num_tokens half_dim"], n: int = 3) -> Float[Tensor, "num_tokens half_dim"]:
    return x


def default(x: Float[Tensor, "num_tokens half_dim"], head_dim: int = 3) -> Float[Tensor, "num_tokens half_dim"]:
    return x
"""


@pytest.fixture
def checked_module(tmp_path, monkeypatch):
    """A module of functions whose words have formulas, under the real import hook."""
    (tmp_path / "formula_module.py").write_text(FORMULA_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with jaxtyping.install_import_hook("formula_module", "tinyllm.shapes.typechecker"):
        module = importlib.import_module("formula_module")
    yield module
    del sys.modules["formula_module"]


def test_a_word_is_compared_with_its_formula_at_each_call(checked_module) -> None:
    with pytest.raises(ShapeError) as error:
        checked_module.halve(torch.zeros(2, 6))
    assert str(error.value) == "formula_module.halve: half_dim is 5, expected head_dim/2 = 3, where head_dim=6"
    assert checked_module.halve(torch.zeros(2, 2)).shape == (2, 1)


def test_formulas_reach_through_words_that_are_not_there_and_ints_count_as_words(checked_module) -> None:
    """kv_size stands nowhere in the signature, but its own formula's words do."""
    with pytest.raises(ShapeError) as error:
        checked_module.fuse(torch.zeros(2, 8), 1, 4)
    assert "qkv_size is 8, expected q_size+2*(num_kv_heads*head_dim) = 16" in str(error.value)
    assert "where q_size=8, num_kv_heads=1, head_dim=4" in str(error.value)


def test_a_formula_of_absent_or_defaulted_words_checks_nothing(checked_module) -> None:
    assert checked_module.plain(torch.zeros(2, 5)).shape == (2, 5)
    assert checked_module.default(torch.zeros(2, 5)).shape == (2, 5)


def test_of_blocks_open_at_once_in_several_threads_the_last_opened_decides() -> None:
    """A thread that leaves first must not leave the others' flag behind, nor take it from them."""
    first, second = checking(False), checking(False)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert jaxtyping.config.jaxtyping_disable
    with checking(True):
        assert not jaxtyping.config.jaxtyping_disable
    assert jaxtyping.config.jaxtyping_disable
    second.__exit__(None, None, None)
    assert not jaxtyping.config.jaxtyping_disable


def test_words_are_keyed_by_their_name() -> None:
    assert all(name == word.name for name, word in WORDS.items())
