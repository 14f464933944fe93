"""The trace as text: fixed-width rows of at most 100 columns, ASCII but for the user's own tokens.

A row reads: kind letter, name, symbolic in -> out, numeric in -> out, FLOPs, bytes, FLOPs per byte. Nothing is ever
wrapped; a text too long for its column is said more briefly, and what the JSON record holds stays whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len, set_cell_size

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.record import Operation, RequestRecord, StepRecord, TensorRecord, to_symbol

WIDTH = 100
NAME, SYMBOLIC, NUMERIC = 15, 30, 32  # with the kind letter 79 columns; FLOP, BYTE and F/B take the last 21
STEP_WORDS = frozenset(word.name for word in WORDS.values() if word.scope == "step")


@dataclass(frozen=True)
class Options:
    """What to print. layers lists the decoder layers shown row by row; full shows every row and every named tensor."""

    layers: tuple[int, ...] = (0,)
    full: bool = False


def render_header(titles: Sequence[str], dims: Mapping[str, int]) -> Iterator[str]:
    """The first lines: the model and its pool, the legend of dimensions, columns and kinds."""
    for title in titles:
        yield _cut(_printable(title), WIDTH)
    legend = [f"{to_symbol(word)}={size} {word}" for word, size in dims.items() if to_symbol(word).isidentifier()]
    yield from _flow("dims   ", legend)
    step_words = [f"{word.symbol} {word.name}" for word in WORDS.values() if word.scope in ("step", "request")]
    yield from _flow("steps  ", step_words)
    yield "cols   FLOP: multiply-add = 2   BYTE: each operand moved once   F/B: FLOPs per byte"
    kinds = "  ".join(f"{letter} {kind}" for kind, letter in KIND_LETTERS.items())
    yield f"kind   {kinds.replace('host', 'plain Python')}"


def render_step(step: StepRecord, previous: StepRecord | None, options: Options) -> Iterator[str]:
    """All lines of one step; after another step only the rows that differ from it, unless options.full."""
    head = f"== STEP {step.index}  {step.phase.upper()}  R={len(step.requests)} " + _plural(
        len(step.requests), "request"
    )
    yield f"{head}  T={step.dims['num_tokens']} {_plural(step.dims['num_tokens'], 'token')} ".ljust(WIDTH, "=")
    yield from _host_rows(step)
    yield f"{'':{WIDTH - 21}}{'FLOP':>7}{'BYTE':>7}{'F/B':>7}"
    is_difference = previous is not None and not options.full
    known = _rows_by_place(previous) if is_difference and previous else {}
    for section in _sections(step):
        yield from _render_section(section, step, known, options)
    yield from _sampling_rows(step)
    yield _row(
        "=",
        f"step {step.index} total",
        _tokens_in_out(step),
        _compared(step),
        step.flops,
        step.num_bytes,
        step.has_unknown_flops,
    )
    if previous is not None:
        yield f"{'':{NAME + 2}}! {_ratio(step, previous)}"


# --- plain-Python rows -------------------------------------------------------------------------------------------------


def render_prompts(prompts: Iterable[tuple[str, str, Sequence[Sequence[str]]]]) -> Iterator[str]:
    """One row a prompt (label, text, its words' token pieces): bytes -> words -> ids."""
    for label, text, words in prompts:
        pieces = [piece for word in words for piece in word]
        num_bytes, num_words = len(text.encode()), len(words)
        counts = f"{num_words} {_plural(num_words, 'word')} -> [{len(pieces)}]"
        forms = (f"{num_bytes} {_plural(num_bytes, 'byte')} -> {counts}", f"{num_bytes}B -> {counts}", counts)
        yield _host(f"bpe {label}", _first_that_fits(forms, SYMBOLIC - 1), _show_pieces(pieces))


def render_completions(completions: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """One line a request: (label, finish reason, text)."""
    for label, finish_reason, text in completions:
        yield _cut(f"{label} {finish_reason}: {_quote(text)}", WIDTH)


def _host_rows(step: StepRecord) -> Iterator[str]:
    requests = step.requests
    moved = ", ".join(f"{r.label} {_what(r)}" for r in requests)
    budget = f"token budget {step.dims['num_tokens']}/{step.token_budget}, blocks used {step.num_used_blocks}/{step.num_blocks - 1}"
    yield _host("schedule", moved, budget + (f", {step.num_waiting} waiting" if step.num_waiting else ""))
    for label in step.preempted:
        yield _host("preempt", label, "all its blocks freed; it is recomputed later")
    lens = ["+".join(f"[{r.query_len}]" for r in requests), f"{len(requests)} requests"]
    spans = "  ".join(f"{r.label} {_span(r.num_computed_tokens, r.seq_len)}" for r in requests)
    yield _tensor_row(step, "token_ids", _list(step.batch_values["token_ids"]), [f"{form} -> " for form in lens])
    yield _tensor_row(step, "positions", spans)
    yield _tensor_row(step, "cu_seqlens_q", _list(step.batch_values["cu_seqlens_q"]) + "  rows of each request")
    yield _tensor_row(step, "seq_lens", _list(step.batch_values["seq_lens"]) + "  keys each request may read")
    rows = zip(requests, step.batch_values["block_table"], strict=True)
    table = "  ".join(f"{r.label} {_list(row)}{_new_blocks(r)}" for r, row in rows)
    yield _tensor_row(step, "block_table", table)
    slots = "  ".join(f"{r.label} {_runs(slots)}" for r, slots in zip(requests, _slots_by_request(step), strict=True))
    yield _tensor_row(step, "slot_mapping", slots + "  block*bs+pos%bs")
    yield _tensor_row(step, "logits_indices", _list(step.batch_values["logits_indices"]) + "  each request's last row")


def _what(request: RequestRecord) -> str:
    if request.is_decode:
        return f"+{request.query_len}"
    return f"{request.query_len} new" + ("" if request.samples else " (a chunk)")


def _new_blocks(request: RequestRecord) -> str:
    is_new = request.new_block_ids and request.num_computed_tokens
    return f" new {_list(request.new_block_ids)}" if is_new else ""


def _slots_by_request(step: StepRecord) -> list[list[int]]:
    ends, slots = step.batch_values["cu_seqlens_q"], step.batch_values["slot_mapping"]
    return [slots[start:end] for start, end in pairwise(ends)]


def _tensor_row(step: StepRecord, name: str, text: str, prefixes: Sequence[str] = ()) -> str:
    tensor = step.batch[name]
    forms = [f"{prefix}{_symbols(tensor)}={_numbers(tensor)}" for prefix in (*prefixes, "")]
    return _host(name, _first_that_fits(forms, SYMBOLIC - 1), text)


def _host(name: str, what: str, text: str) -> str:
    left = f"P {name:{NAME}}{_cut(what, SYMBOLIC - 1):{SYMBOLIC}}"
    return left + _cut(text, WIDTH - len(left))


# --- tensor rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """Rows that stand together: those before, in one layer, or after the layers."""

    layer: int | None
    operations: tuple[Operation, ...]


def _sections(step: StepRecord) -> list[Section]:
    """Cut the step into runs of one layer; the sampler's rows come with the candidates."""
    sections: list[Section] = []
    for operation in step.operations:
        if sections and sections[-1].layer == operation.layer:
            sections[-1] = Section(operation.layer, (*sections[-1].operations, operation))
        else:
            sections.append(Section(operation.layer, (operation,)))
    return sections


def _render_section(
    section: Section, step: StepRecord, known: Mapping[tuple, Operation], options: Options
) -> Iterator[str]:
    num_layers = step.dims["num_layers"]
    layer = section.layer
    if layer is None:
        yield from _rows(section.operations, known, options)
        return
    if layer not in options.layers:
        folded = [i for i in range(num_layers) if i not in options.layers]
        if layer == folded[0]:
            yield from _folded_layers(step, folded)
        return
    yield f"layer {layer} of {num_layers}"
    yield from _rows(section.operations, known, options)
    flops, num_bytes = _sums(section.operations)
    yield _row("=", f"layer {layer}", f"{len(section.operations)} rows", "", flops, num_bytes, False)


def _rows(operations: Sequence[Operation], known: Mapping[tuple, Operation], options: Options) -> Iterator[str]:
    """The rows that differ from the step before in more than the number of rows; the rest in one line."""
    unchanged = [operation for operation in operations if _only_rows_differ(operation, known)]
    as_before = _unchanged_row(unchanged) if unchanged else ""
    first_attend = next((operation for operation in operations if operation.function == "attend"), None)
    for operation in operations:
        if operation in unchanged:
            if operation is unchanged[0]:
                yield as_before
            continue
        yield _operation_row(operation)
        if operation.function == "gather_rows":
            yield from _gather_note(operations)
        if options.full or (operation is first_attend and not known):
            yield from _named_rows(operation)


def _unchanged_row(unchanged: Sequence[Operation]) -> str:
    flops, num_bytes = _sums(unchanged)
    names = ", ".join(dict.fromkeys(operation.label for operation in unchanged))
    tree = "| " if unchanged[0].layer is not None else ""
    count = f"{tree}{len(unchanged)} as before"
    return _row(" ", count, _cut(names, SYMBOLIC + NUMERIC), "", flops, num_bytes, False)


def _only_rows_differ(operation: Operation, known: Mapping[tuple, Operation]) -> bool:
    """Whether the step before had this row, equal but for the sizes of the step words."""
    twin = known.get(_place(operation))
    if twin is None or operation.stage.kind == "cache write" or operation.function == "sample":
        return False  # new slots, new tokens: never "as before"
    names = (*operation.inputs, *operation.outputs)
    if names != (*twin.inputs, *twin.outputs):
        return False
    return all(_fixed_sizes(operation.tensors[name]) == _fixed_sizes(twin.tensors[name]) for name in names)


def _fixed_sizes(tensor: TensorRecord) -> list[tuple[str, int]]:
    return [(word, size) for word, size in zip(tensor.words, tensor.shape, strict=True) if word not in STEP_WORDS]


def _rows_by_place(step: StepRecord) -> dict[tuple, Operation]:
    return {_place(operation): operation for operation in step.operations}


def _place(operation: Operation) -> tuple:
    return operation.path, operation.label, operation.request


def _folded_layers(step: StepRecord, folded: Sequence[int]) -> Iterator[str]:
    """One line for each run of layers whose rows are equal."""
    runs: list[list[int]] = []
    for layer in folded:
        is_next = runs and runs[-1][-1] == layer - 1
        if is_next and _fold_key(step, layer) == _fold_key(step, runs[-1][0]):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    for run in runs:
        operations = [operation for layer in run for operation in step.layer(layer)]
        flops, num_bytes = _sums(operations)
        names = f"layers {run[0]}..{run[-1]}" if len(run) > 1 else f"layer {run[0]}"
        each, each_bytes = _sums(step.layer(run[0]))
        per_layer = f"a layer: {_si(each)}FLOP {_si(each_bytes)}B"
        count = f"{len(step.layer(run[0]))} rows"
        note = f"the same {len(run)} times, {count}" if len(run) > 1 else f"folded, {count}"
        yield _row(" ", f"  {names}", note, per_layer, flops, num_bytes, False)
    if 0 not in folded and folded[0] == 1:
        yield f"{'':{NAME + 2}}(one add_residual more than layer 0, which has no residual yet; --layers all)"


def _fold_key(step: StepRecord, layer: int) -> list[tuple]:
    return [operation.shape_key() for operation in step.layer(layer)]


def _operation_row(operation: Operation) -> str:
    stage = operation.stage
    tree = "| " if operation.layer is not None else ""
    name = operation.label + (f" {operation.request}" if operation.request else "")
    symbolic = _first_that_fits(_forms(stage.template, operation, _symbols), SYMBOLIC - 1)
    numeric = _first_that_fits(_forms(stage.template.replace(" -> ", "->"), operation, _numbers), NUMERIC - 1)
    if operation.dense_flops is not None and operation.flops:
        pairs = f" pairs {_causal_pairs(operation)}/{operation.sizes['query_len'] * operation.sizes['seq_len']}"
        short = _fill(stage.template.split(" -> ")[0], operation, _numbers)
        numeric = _cut(short + pairs, NUMERIC - 1)
    letter = KIND_LETTERS[stage.kind]
    return _row(letter, tree + name, symbolic, numeric, operation.flops, operation.num_bytes, operation.flops is None)


def _gather_note(operations: Sequence[Operation]) -> Iterator[str]:
    """What the LM head would have cost on every row."""
    head = next((operation for operation in operations if operation.function == "lm_head"), None)
    if head and head.flops and head.sizes["num_tokens"] > head.sizes["num_logits"]:
        dense = head.flops // head.sizes["num_logits"] * head.sizes["num_tokens"]
        yield f"{'':{NAME + 2}}! saves {_si(dense - head.flops)}FLOP: the LM head on all T rows would cost {_si(dense)}"


def _causal_pairs(operation: Operation) -> int:
    query_len, seq_len = operation.sizes["query_len"], operation.sizes["seq_len"]
    return query_len * seq_len - query_len * (query_len - 1) // 2


def _named_rows(operation: Operation) -> Iterator[str]:
    """The locals of a stage, each with its own words: in attention these are the six steps."""
    for name in operation.locals:
        tensor = operation.tensors[name]
        view = f"  view of {tensor.view_of}" if tensor.view_of else ""
        left = f"  {_cut('|. ' + name, NAME - 1):{NAME}}"
        yield _cut(f"{left}{_symbols(tensor):{SYMBOLIC}}{_numbers(tensor)}{view}", WIDTH)


Show = Callable[[TensorRecord], str]


def _forms(template: str, operation: Operation, show: Show) -> Iterator[str]:
    """The template filled, then shorter versions: without the weight, then the result alone."""
    yield _fill(template, operation, show)
    yield _fill(template.replace(" -> ", "->"), operation, show)
    without_weight = re.sub(r"@\{weight\.T\}| of \{weight\}", "", template)
    yield _fill(without_weight, operation, show)
    yield _fill("->" + template.rpartition("->")[2], operation, show)


def _fill(template: str, operation: Operation, show: Show) -> str:
    """Put each named tensor's dimensions where the template names it; ``.T`` turns them as the product uses them."""

    def insert(match: re.Match[str]) -> str:
        name, transposed = match[1], match[2]
        tensor = operation.tensors.get(name)
        if tensor is None:
            return "?"
        return show(_transposed(tensor) if transposed else tensor)

    return re.sub(r"\{([\w\[\]]+)(\.T)?\}", insert, template)


def _transposed(tensor: TensorRecord) -> TensorRecord:
    return TensorRecord(tensor.name, tensor.words[::-1], tensor.shape[::-1], tensor.dtype, 0, tensor.storage, False)


def _symbols(tensor: TensorRecord) -> str:
    return f"[{','.join(tensor.symbols)}]"


def _numbers(tensor: TensorRecord) -> str:
    return f"[{','.join(map(str, tensor.shape))}]"


# --- sampling and totals -----------------------------------------------------------------------------------------------


def _sampling_rows(step: StepRecord) -> Iterator[str]:
    for request in step.requests:
        if not request.samples:
            yield _host(
                f"sampled {request.label}", "a chunk of a prefill", "its token is thrown away: the prompt goes on"
            )
        elif request.chosen is None:
            yield _host(f"sampled {request.label}", request.method, "no token: the logits are NaN or all -inf")
        else:
            others = [c for c in request.candidates if c.token_id != request.chosen.token_id]
            ending = f"  ({request.finish_reason})" if request.finish_reason else ""
            tokens = [f"{_quote(c.text)} {_probability(c.probability)}" for c in [request.chosen, *others]]
            shown = _as_many_as_fit(tokens, WIDTH - NAME - SYMBOLIC - 2 - len(ending))
            yield _host(f"sampled {request.label}", request.method, shown + ending)


def _as_many_as_fit(texts: Sequence[str], width: int) -> str:
    line = texts[0]
    for text in texts[1:]:
        if cell_len(line) + 2 + cell_len(text) > width:
            break
        line += "  " + text
    return line


def _quote(text: str) -> str:
    return "'" + _printable(text) + "'"


def _probability(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def _tokens_in_out(step: StepRecord) -> str:
    out = sum(request.chosen is not None for request in step.requests)
    num_tokens = step.dims["num_tokens"]
    return f"{num_tokens} {_plural(num_tokens, 'token')} in, {out} {_plural(out, 'token')} out"


def _compared(step: StepRecord) -> str:
    return f"ledger: {step.num_compared} sizes agree"


def _ratio(step: StepRecord, previous: StepRecord) -> str:
    if not (step.flops and step.num_bytes and previous.flops and previous.num_bytes):
        return "no comparison with the step before"
    flops, num_bytes = step.flops / previous.flops, step.num_bytes / previous.num_bytes
    return f"{flops:.2f}x the FLOPs of step {previous.index}, {num_bytes:.2f}x its bytes"


def _sums(operations: Sequence[Operation]) -> tuple[int, int]:
    return sum(operation.flops or 0 for operation in operations), sum(operation.num_bytes for operation in operations)


# --- text --------------------------------------------------------------------------------------------------------------


def _row(
    letter: str, name: str, symbolic: str, numeric: str, flops: int | None, num_bytes: int, is_unknown: bool
) -> str:
    count = "?" if flops is None else (">" if is_unknown else "") + _si(flops)
    intensity = f"{flops / num_bytes:.1f}" if flops is not None and num_bytes else ""
    left = f"{letter} {_cut(name, NAME - 1):{NAME}}{symbolic:{SYMBOLIC}}{numeric}"
    return f"{_cut(left, WIDTH - 21):{WIDTH - 21}}{count:>7}{_si(num_bytes):>7}{intensity:>7}".rstrip()


def _si(value: float) -> str:
    """Three digits and a letter, decimal: 14400000 -> 14.4M."""
    letters = iter("kMGT")
    letter = ""
    while value >= 999.5 and letter != "T":
        value, letter = value / 1000, next(letters)
    decimals = 0 if not letter or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f}{letter}"


def _first_that_fits(forms: Iterable[str], width: int) -> str:
    text = ""
    for text in forms:
        if len(text) <= width:
            return text
    return _cut(text, width)


def _cut(text: str, width: int) -> str:
    """The text within so many columns of a terminal, where some characters take two."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 3)).rstrip() + "..."


def _list(values: Sequence[int]) -> str:
    """All numbers, or both ends of a long list."""
    texts = list(map(str, values))
    if len(texts) > 8:
        texts = [*texts[:5], "...", *texts[-2:]]
    return f"[{','.join(texts)}]"


def _span(start: int, end: int) -> str:
    return str(start) if end - start == 1 else f"{start}..{end - 1}"


def _runs(slots: Sequence[int]) -> str:
    """Slots as runs of neighbours: 4..8, 12..15."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1][1] = slot + 1
        else:
            runs.append([slot, slot + 1])
    texts = [_span(start, end) for start, end in runs]
    return ",".join(texts if len(texts) <= 4 else [*texts[:3], "...", texts[-1]])


def _show_pieces(pieces: Sequence[str]) -> str:
    return "|".join(_printable(piece) for piece in pieces)


def _printable(text: str) -> str:
    """Text on one line: control characters as escapes, so that no token moves the cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else noun + "s"


def _flow(prefix: str, words: Sequence[str]) -> Iterator[str]:
    """Lines of words, as many as fit, the first behind the prefix."""
    line = prefix
    for word in words:
        if len(line) + len(word) + 2 > WIDTH and line.strip():
            yield line.rstrip()
            line = " " * len(prefix)
        line += word + "  "
    yield line.rstrip()
