"""The glossary: one word per dimension, from the config through annotations, einops patterns and errors to the trace.

``WORDS`` is the single list. Annotations such as ``Float[Tensor, "num_tokens hidden_size"]`` may use only these words
(tests/test_glossary.py), the trace prints their symbols, and `typechecker` names them when a shape is wrong.
"""

import contextlib
import functools
import inspect
import re
import threading
import types
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.door import is_bearable
from beartype.roar import BeartypeCallHintReturnViolation, BeartypeCallHintViolation
from jaxtyping import AnnotationError

Scope = Literal["config", "cache", "step", "request", "call"]


@dataclass(frozen=True)
class Word:
    """One dimension.

    scope says how long its size holds: ``config`` and ``cache`` for a whole run, ``step`` for one engine step,
    ``request`` for one request in one step, ``call`` for one call of a function that serves several tensors.
    """

    name: str
    symbol: str
    meaning: str
    scope: Scope
    formula: str = ""  # over other words, where the size follows from them
    vllm: str = ""
    huggingface: str = ""
    why: str = ""  # where the size comes from


# fmt: off
_WORD_LIST = [
    Word("num_tokens", "T", "rows of the flat batch: the tokens scheduled in this step, all requests", "step",
         vllm="num_actual_tokens",
         why="requests lie behind each other without padding: each row is one token, and the requests' counts add up"),
    Word("num_reqs", "R", "requests in this step", "step", vllm="num_reqs",
         why="one for each request that the scheduler gave tokens, whether it computes a prompt or one token more"),
    Word("num_logits", "N", "rows gathered for the LM head", "step", vllm="num_logits_indices",
         why="one row a request, its last: only behind that row does a next token start, all others are known"),
    Word("num_banned", "ban", "pairs of a row and a token id that it may not draw", "step",
         why="one pair for each token id that a request's min_tokens forbids it to end with; mostly there are none"),
    Word("max_blocks", "MB", "columns of the block table: the longest row of this step", "step",
         vllm="max_num_blocks_per_req", huggingface="max_blocks_per_request",
         why="the request that holds most blocks sets the width; shorter rows are padded with 0, the null block"),
    Word("query_len", "s", "tokens of one request computed in this step", "request", vllm="query_len",
         why="its tokens not computed yet, cut by the token budget: a prompt, a chunk of it, or one new token"),
    Word("seq_len", "S", "tokens of one request in total, this step included: its key axis", "request", vllm="seq_len",
         why="the tokens whose keys and values are in the cache already, and those that this step adds"),
    Word("num_req_blocks", "nb", "KV blocks that one request holds", "request", "(seq_len+block_size-1)/block_size",
         why="blocks are given whole: seq_len / block_size, rounded up, so the last one may be partly empty"),
    Word("hidden_size", "H", "width of the residual stream", "config", vllm="hidden_size", huggingface="hidden_size",
         why="the checkpoint's: every block reads such a row and adds one to it, so all layers have the same width"),
    Word("intermediate_size", "I", "width of the MLP", "config",
         vllm="intermediate_size", huggingface="intermediate_size",
         why="the checkpoint's: the MLP widens each row to it, gates it, and narrows it again"),
    Word("num_layers", "L", "decoder layers", "config", vllm="num_hidden_layers", huggingface="num_hidden_layers",
         why="the checkpoint's: layers of equal shape, each with weights and a part of the KV pool of its own"),
    Word("num_heads", "nq", "query heads", "config", vllm="num_heads", huggingface="num_attention_heads",
         why="the checkpoint's: every head compares queries and keys on its own"),
    Word("num_kv_heads", "nk", "key/value heads", "config", vllm="num_kv_heads", huggingface="num_key_value_heads",
         why="the checkpoint's: as many as query heads in MHA, fewer in GQA, one in MQA; the KV cache grows with them"),
    Word("group_size", "g", "query heads that share one key/value head", "config", "num_heads/num_kv_heads",
         vllm="num_queries_per_kv", huggingface="num_key_value_groups",
         why="the query heads divide evenly among the key/value heads; nothing is copied for it"),
    Word("head_dim", "d", "size of one head", "config", vllm="head_dim", huggingface="head_dim",
         why="the checkpoint's: often hidden_size / num_heads, but free to differ"),
    Word("half_dim", "d/2", "rotary pairs of one head", "config", "head_dim/2", vllm="rotary_dim // 2",
         why="a rotation turns two values at once, so a head has half as many angles as values"),
    Word("q_size", "nq*d", "all query heads side by side", "config", "num_heads*head_dim", vllm="q_size",
         why="one row holds the queries of all heads; it may be wider or narrower than the residual stream"),
    Word("kv_size", "nk*d", "all key (or value) heads side by side", "config", "num_kv_heads*head_dim", vllm="kv_size",
         why="one row holds the keys of all key/value heads: what a token leaves in the cache, once for K, once for V"),
    Word("qkv_size", "qkv", "fused query, key and value projection", "config", "q_size+2*kv_size",
         why="one matrix product makes query, key and value at once: they lie side by side in each row"),
    Word("gate_up_size", "2*I", "fused gate and up projection", "config", "2*intermediate_size",
         why="one matrix product makes gate and up at once: they lie side by side in each row"),
    Word("vocab_size", "V", "token ids", "config", vllm="vocab_size", huggingface="vocab_size",
         why="the checkpoint's: one row of the embedding table and one logit for each id, unused ones included"),
    Word("block_size", "bs", "token slots in one KV block", "cache", vllm="block_size", huggingface="page_size",
         why="your choice: small blocks leave fewer slots empty at a request's end, large ones make shorter tables"),
    Word("num_blocks", "NB", "physical KV blocks, the null block 0 included", "cache", vllm="num_gpu_blocks",
         huggingface="num_blocks",
         why="set when the engine starts, for all requests together (the tracer makes just as many as its prompts and "
             "their answers can need, and the null block); where they run short, a request is preempted"),
    Word("num_slots", "NS", "token slots of the whole pool", "cache", "num_blocks*block_size",
         why="every block has a slot for each of its tokens; slots of the null block are never written"),
    Word("heads", "h", "query or key heads, whichever a call serves", "call",
         why="rotary embedding turns query and key heads alike; split_heads sees q, k and v heads in one row"),
    Word("in_size", "Hin", "input width of a linear layer", "call", vllm="input_size", huggingface="in_features",
         why="one class serves every projection; who calls it decides"),
    Word("out_size", "Hout", "output width of a linear layer", "call", vllm="output_size", huggingface="out_features",
         why="one class serves every projection; who calls it decides"),
]
# fmt: on
WORDS: dict[str, Word] = {word.name: word for word in _WORD_LIST}


class ShapeError(AnnotationError, TypeError):
    """A tensor's shape or dtype contradicts the annotation of a public layer; one line that names the axis."""


_CONF = BeartypeConf(is_color=False, is_pep484_tower=True)  # the tower: an int is a fine float, as PEP 484 has it
_beartype = beartype(conf=_CONF)


def typechecker(function: Any) -> Any:
    """Wrap beartype so that a violation becomes one readable line (`ShapeError`), and compare words with their formulas.

    `tinyllm/__init__.py` hands this to jaxtyping's import hook, which calls it with a stand-in that has the checked
    function's signature (and, for results, the result as one more parameter). jaxtyping knows nothing of formulas such
    as half_dim = head_dim/2; where a signature holds all words of one, it is checked here.
    """
    checked = _beartype(function)
    if isinstance(function, type):
        return checked
    formulas = _formulas_of(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            result = checked(*args, **kwargs)
        except BeartypeCallHintViolation as violation:
            message = _describe(function, args, kwargs, violation)
        else:
            message = _broken_formula(function, args, kwargs, formulas) if formulas else ""
            if not message:
                return result
        raise ShapeError(message) from None

    return wrapper


@dataclass(frozen=True)
class _Formula:
    """A word of a signature that follows from others of it, and where their sizes stand."""

    word: str
    text: str
    places: dict[str, tuple[str, int | None, int | None]]  # word -> (parameter, item of a tuple, axis; None: an int)


def _formulas_of(function: Any) -> list[_Formula]:
    """The formulas of the glossary whose words all stand in the signature, as axes or as ints."""
    places = _places_of(function)
    expanded = {word: _expand(WORDS[word].formula, places) for word in places if WORDS[word].formula}
    needed = {word: [word, *_compile_expression(text)[1]] for word, text in expanded.items()}
    return [
        _Formula(word, text, {name: places[name] for name in needed[word]})
        for word, text in expanded.items()
        if all(name in places for name in needed[word])
    ]


def _places_of(function: Any) -> dict[str, tuple[str, int | None, int | None]]:
    """Where each glossary word of a stand-in's signature first stands; its last parameter is the result, if any."""
    signature = inspect.signature(function)
    hints = [(name, parameter.annotation) for name, parameter in signature.parameters.items()]
    if hints and hints[-1][1] is Any:
        hints[-1] = (hints[-1][0], signature.return_annotation)
    places: dict[str, tuple[str, int | None, int | None]] = {}
    for name, hint in hints:
        if hint is int and name in WORDS:
            places.setdefault(name, (name, None, None))
        items = get_args(hint) if get_origin(hint) is tuple else [hint]
        for item, tensor in enumerate(items):
            for axis, word in enumerate(getattr(tensor, "dim_str", "").split()):
                if word in WORDS:
                    places.setdefault(word, (name, item if len(items) > 1 else None, axis))
    return places


def _expand(formula: str, known: Container[str]) -> str:
    """The formula with each word that is not known replaced by its own formula."""

    def replace(match: re.Match[str]) -> str:
        word = match[0]
        return f"({_expand(WORDS[word].formula, known)})" if word not in known and WORDS[word].formula else word

    return re.sub(r"[a-zA-Z_]\w*", replace, formula)


def _broken_formula(function: Any, args: tuple, kwargs: dict, formulas: list[_Formula]) -> str:
    """The first word whose size is not what its formula gives, as a message; "" where all agree."""
    given = dict(zip(function.__code__.co_varnames, args, strict=False)) | kwargs
    for formula in formulas:
        if any(name not in given for name, _, _ in formula.places.values()):
            continue  # an int that was left to its default
        sizes = {word: _size_at(given, place) for word, place in formula.places.items()}
        expected = evaluate(formula.text, sizes)
        if expected != sizes[formula.word]:
            others = ", ".join(f"{word}={size}" for word, size in sizes.items() if word != formula.word)
            name = f"{function.__module__}.{function.__qualname__}"
            return (
                f"{name}: {formula.word} is {sizes[formula.word]}, expected {formula.text} = {expected}, where {others}"
            )
    return ""


def _size_at(given: Mapping[str, Any], place: tuple[str, int | None, int | None]) -> int:
    name, item, axis = place
    value = given[name] if item is None else given[name][item]
    return value if axis is None else value.shape[axis]


def _describe(function: Any, args: tuple, kwargs: dict, violation: BeartypeCallHintViolation) -> str:
    """Name the tensor and the axis: bind the words in signature order and stop at the first contradiction."""
    signature = inspect.signature(function)
    given = signature.bind(*args, **kwargs).arguments
    claims = [(name, value, signature.parameters[name].annotation) for name, value in given.items()]
    if isinstance(violation, BeartypeCallHintReturnViolation):
        claims.append(("the result", [*kwargs.values()][-1], signature.return_annotation))
    name = f"{function.__module__}.{function.__qualname__}"
    words: dict[str, int] = {}
    for label, value, hint in (tensor for claim in claims for tensor in _tensors(*claim)):
        fault = _fault(value, hint, words)
        if fault:
            before = ", ".join(f"{word}={size}" for word, size in words.items()) or "nothing"
            return f"{name}: {label} is {_show(value)}, expected [{hint.dim_str}]: {fault}. Bound before: {before}"
    # No tensor is at fault, so a plain argument is; beartype's own text would print its value, tensors and all.
    for label, value, hint in claims:
        if hint is not inspect.Parameter.empty and not is_bearable(value, hint, conf=_CONF):
            expected = hint.__name__ if isinstance(hint, type) else str(hint)
            return f"{name}: {label} is {_show(value)}, expected {expected}"
    return f"{name}: a type hint is violated"


def _tensors(label: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    """The (label, value, jaxtyping hint) triples inside an argument: plain, ``| None``, or a tuple of tensors."""
    if hasattr(hint, "dim_str"):
        yield label, value, hint
    elif get_origin(hint) is tuple and isinstance(value, tuple):
        for i, (item, item_hint) in enumerate(zip(value, get_args(hint), strict=False)):
            yield from _tensors(f"{label}[{i}]", item, item_hint)
    elif get_origin(hint) in (Union, types.UnionType) and value is not None:
        for member in get_args(hint):
            if hasattr(member, "dim_str"):
                yield label, value, member


def _fault(value: Any, hint: Any, words: dict[str, int]) -> str:
    """What contradicts the hint, or "" after binding its new words."""
    if not hasattr(value, "shape"):
        return "it is no tensor"
    dtype, dims = _dtype(value), hint.dim_str.split()
    if dtype not in hint.dtypes:
        return f"dtype {dtype} is not {hint.__name__.split('[')[0]}"
    if len(dims) != value.ndim:
        return f"it has {value.ndim} axes, not {len(dims)}"
    for dim, size in zip(dims, value.shape, strict=True):
        expected = evaluate(dim, words)
        if expected is None:
            words[dim] = size
        elif expected != size:
            return f"the size of dimension {dim} is {size} which does not equal the existing value of {expected}"
    return ""


def evaluate(expression: str, words: Mapping[str, int]) -> int | None:
    """The size of a dimension word, a literal or a formula such as ``num_reqs+1``; None where a word is unknown.

    >>> evaluate("q_size+2*kv_size", {"q_size": 576, "kv_size": 192})
    960
    """
    code, names = _compile_expression(expression)
    if any(name not in words for name in names):
        return None
    return int(eval(code, {"__builtins__": {}}, dict(words)))


@functools.cache
def _compile_expression(expression: str) -> tuple[CodeType, tuple[str, ...]]:
    """The expression as code, its division as whole division, and the words it needs."""
    if not re.fullmatch(r"[\w+*/() -]+", expression):
        raise ValueError(f"{expression!r} is no dimension expression: use words, numbers, + - * / and brackets")
    names = re.findall(r"[a-zA-Z_]\w*", expression)
    return compile(re.sub("/+", "//", expression.strip()), "<dimension>", "eval"), tuple(names)


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _show(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{tuple(value.shape)} {_dtype(value)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


@contextlib.contextmanager
def checking(enabled: bool) -> Iterator[None]:
    """Switch the shape checks on or off for a block, through jaxtyping's own flag.

    The flag belongs to the whole process. Of several blocks that are open at once, in any threads, the one opened last
    decides; when all are closed, the flag is what it was before the first.
    """
    switch = _Switch(enabled)
    with _switch_lock:
        if not _open_switches:
            _Switch.outside = not jaxtyping.config.jaxtyping_disable
        _open_switches.append(switch)
        _set_flag()
    try:
        yield
    finally:
        with _switch_lock:
            _open_switches.remove(switch)
            _set_flag()


@dataclass(eq=False)
class _Switch:
    """One open `checking` block."""

    enabled: bool
    outside: ClassVar[bool] = True  # whether checks are on outside all blocks


_open_switches: list[_Switch] = []
_switch_lock = threading.Lock()


def _set_flag() -> None:
    enabled = _open_switches[-1].enabled if _open_switches else _Switch.outside
    jaxtyping.config.update("jaxtyping_disable", not enabled)
