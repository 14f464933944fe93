"""Why a dimension has its size in a step: a sum over the requests, a formula, a division, or what the caller gave."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from tinyllm.shapes import WORDS, Word, evaluate
from tinyllm.trace.explain.sources import spec_of
from tinyllm.trace.explain.texts import MANY, first_few, join_and
from tinyllm.trace.record import RequestRecord, StepRecord, to_symbol
from tinyllm.trace.shape_text import fill_numbers
from tinyllm.trace.text import plural


def sizes_here(word: Word, step: StepRecord) -> Iterator[str]:
    """The size in this step, and how it comes about."""
    symbol, size = word.symbol, step.dims.get(word.name)
    if word.scope == "request":
        yield from _request_sizes(word, step)
    elif word.scope == "call":
        yield from _call_sizes(word, step)
    elif size is None:
        yield f"{symbol} has no size in this step"
    elif word.formula:
        yield from _formula_sizes(word.name, step.dims)
    else:
        yield f"{symbol} = {size}" + _reason(word.name, step)


def sizes_of(word: str, step: StepRecord) -> list[str]:
    """The bare size; a request's word has one for each request."""
    if word in WORDS and WORDS[word].scope == "request":
        return [f"{request_dims(request)[word]} ({request.label})" for request in step.requests]
    size = evaluate(word, step.dims)
    return [] if size is None else [str(size)]


# --- of the step ------------------------------------------------------------------------------------------------------


def _reason(name: str, step: StepRecord) -> str:
    """Why a word without formula has its size, in the numbers of the step's requests."""
    if name in REASONS:
        return REASONS[name](step)
    return f", as the {'checkpoint says' if WORDS[name].scope == 'config' else 'engine was started'}"


def _why_num_tokens(step: StepRecord) -> str:
    sums = " = " + " + ".join(str(request.query_len) for request in step.requests)
    each = for_each(step.requests, lambda r: r.query_len, "token", "computes")
    return (sums if len(step.requests) > 1 else "") + ": " + each


def _why_num_reqs(step: StepRecord) -> str:
    names = [request.label for request in step.requests]
    waiting = f"; {join_and(step.schedule.waiting)} must wait" if step.schedule.waiting else ""
    return f": {first_few(names)}{waiting}"


def _why_num_logits(step: StepRecord) -> str:
    lasts = [f"{request.label}'s is {end - 1}" for request, _, end in rows_by_request(step)]
    return ": the last row of each request, " + first_few(lasts)


def _why_max_blocks(step: StepRecord) -> str:
    held = for_each(step.requests, lambda r: len(r.block_ids), "block", "holds")
    lens = first_few([str(request.seq_len) for request in step.requests])
    return f": {held}, for {lens} tokens in blocks of {step.dims['block_size']}"


REASONS: dict[str, Callable[[StepRecord], str]] = {
    "num_tokens": _why_num_tokens,
    "num_reqs": _why_num_reqs,
    "num_logits": _why_num_logits,
    "max_blocks": _why_max_blocks,
    "num_blocks": lambda step: f" = {sum_of_blocks(step)}",
    "num_banned": lambda step: f": {'ids' if step.dims['num_banned'] else 'no id'} that min_tokens forbids",
}


def sum_of_blocks(step: StepRecord) -> str:
    """``1 null + 3 held + 5 free``."""
    counts = {
        state: sum(span.num_blocks for span in step.schedule.block_map if span.state == state)
        for state in ("null", "held", "free")
    }
    return " + ".join(f"{count} {state}" for state, count in counts.items())


def for_each(requests: Sequence[RequestRecord], count: Callable[[RequestRecord], int], noun: str, verb: str) -> str:
    """``A computes 5 tokens, B 8``."""
    first, *others = [(request.label, count(request)) for request in requests]
    head = f"{first[0]} {verb} {first[1]} {plural(first[1], noun)}"
    return first_few([head, *(f"{label} {number}" for label, number in others)])


def rows_by_request(step: StepRecord) -> list[tuple[RequestRecord, int, int]]:
    """Each request with its first row and the one behind its last."""
    ends = [0, *accumulate(request.query_len for request in step.requests)]
    return [(r, start, end) for r, (start, end) in zip(step.requests, pairwise(ends), strict=True)]


# --- of one request ---------------------------------------------------------------------------------------------------


def request_dims(request: RequestRecord) -> dict[str, int]:
    """The sizes that one request has for itself, by word."""
    sizes = {"query_len": request.query_len, "seq_len": request.seq_len, "block_size": request.block_size}
    num_blocks = evaluate(WORDS["num_req_blocks"].formula, sizes)
    assert num_blocks is not None
    return {**sizes, "num_req_blocks": num_blocks}


def _request_sizes(word: Word, step: StepRecord) -> Iterator[str]:
    for request in step.requests[:MANY]:
        why = REQUEST_REASONS[word.name](request)
        yield f"{word.symbol} = {request_dims(request)[word.name]} for {request.label}: {why}"
    if len(step.requests) > MANY:
        yield f"and so on for {len(step.requests) - MANY} more"


def _why_query_len(request: RequestRecord) -> str:
    """How many tokens were left to compute, and why not all of them are in this step."""
    old = request.num_computed_tokens
    if request.is_decode:
        return f"the token that it sampled last, behind {old} computed before"
    if not old and request.num_left == request.num_prompt_tokens and not request.cut_by:
        return f"all {request.num_left} tokens of its prompt" if request.num_left > 1 else "its prompt is one token"
    if request.cut_by:
        part = f"{request.query_len} of {request.num_left} left to compute, cut by the {request.cut_by}"
    else:
        part = f"all {request.num_left} left to compute"
    return f"{part}, {_known(request)}" if old else f"{part}; none was computed before"


def _known(request: RequestRecord) -> str:
    """The tokens that this step need not compute."""
    hit = request.hit.num_tokens if request.hit else 0
    old = request.num_computed_tokens - hit
    return " and ".join([f"behind {old} computed before"] * bool(old) + [f"{hit} found in the cache"] * bool(hit))


def _why_seq_len(request: RequestRecord) -> str:
    hit = request.hit.num_tokens if request.hit else 0
    found = f"{hit} found in the cache + " if hit else ""
    return f"{found}{request.num_computed_tokens - hit} computed before + {request.query_len} in this step"


def _why_blocks(request: RequestRecord) -> str:
    """The division that gives the number of blocks, and which they are."""
    blocks = first_few(list(map(str, request.block_ids)))
    return f"{request.seq_len} tokens / {request.block_size} slots, rounded up; its blocks are {blocks}"


REQUEST_REASONS: dict[str, Callable[[RequestRecord], str]] = {
    "query_len": _why_query_len,
    "seq_len": _why_seq_len,
    "num_req_blocks": _why_blocks,
}


# --- of one call, and by a formula ------------------------------------------------------------------------------------


def _call_sizes(word: Word, step: StepRecord) -> Iterator[str]:
    """One line for each row whose function uses the word: its size, and the caller's word for it."""
    found: dict[str, None] = {}
    for operation in step.operations:
        spec = spec_of(operation)
        named = {**(spec.arguments if spec else {}), **(spec.locals if spec else {})}
        for name, words in named.items():
            tensor = operation.tensors.get(name)
            if tensor and words and word.name in words:
                axis = words.index(word.name)
                theirs = "" if tensor.words[axis] == word.name else f", the caller's {tensor.words[axis]}"
                found[f"{word.symbol} = {tensor.shape[axis]} in {operation.label}{theirs}"] = None
    yield from found or ["no row of this step uses it"]


def _formula_sizes(name: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """``qkv_size = q_size+2*kv_size = 576+2*192 = 960``, then the same for the words in it."""
    yield f"{to_symbol(name)} = {sizes[name]}: {_calculation(name, sizes)}"
    for inner in dict.fromkeys(re.findall(r"[a-z_]+", WORDS[name].formula)):
        if WORDS[inner].formula:
            yield f"with {_calculation(inner, sizes)}"


def _calculation(name: str, sizes: Mapping[str, int]) -> str:
    formula = WORDS[name].formula
    return f"{name} = {spaced(formula)} = {spaced(fill_numbers(formula, sizes))} = {sizes[name]}"


def spaced(formula: str) -> str:
    """The formula with blanks around its sums, differences and quotients."""
    return re.sub(r"([+/-])", r" \1 ", formula)
