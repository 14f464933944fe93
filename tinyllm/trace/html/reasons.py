"""What a row says when it is opened: its meaning, its formulas, its source, its named values, each request's share."""

import re
from collections.abc import Iterator, Mapping, Sequence

from tinyllm.shapes import WORDS
from tinyllm.trace.html.markup import Html, code, element, join
from tinyllm.trace.html.words import show_dims
from tinyllm.trace.record import Operation, TensorRecord, to_symbol
from tinyllm.trace.shape_text import fill_numbers, show_tensor
from tinyllm.trace.text import show_number

Operations = Sequence[Operation]  # one, or of a folded row one a request


def reasons(operations: Operations, twins: Operations) -> Html:
    """All that stands behind a row; twins are the same rows of the step before."""
    first, numbers = operations[0], show_dims(operations, False)
    was = show_dims(twins, False) if twins else numbers
    items = [
        *_formulas(operations),
        element("li", "in the step before: ", code(was)) if was != numbers else None,
        element("li", "source: ", code(f"tinyllm/{first.source}")),
    ]
    shares = _shares(operations) if len(operations) > 1 else None
    return join([element("p", *_prose(first.summary)), element("ul", *items), *_named(operations), shares])


def _prose(text: str) -> Iterator[Html | str]:
    """A docstring's sentence; what stands between backticks is code."""
    parts = re.split("`+", text)
    for i, part in enumerate(parts if len(parts) % 2 else [text]):
        yield code(part) if i % 2 else part


def pairs(operations: Operations) -> str:
    """The pairs of a query and a key that the causal mask keeps, of all; "" outside attention."""
    counts = [op.pairs for op in operations if op.pairs]
    return f"{sum(kept for kept, _ in counts)}/{sum(dense for _, dense in counts)}" if counts else ""


def total_flops(operations: Operations) -> int | None:
    """The sum; None where one of them is unknown."""
    flops = [op.flops for op in operations]
    return None if None in flops else sum(value or 0 for value in flops)


def _formulas(operations: Operations) -> Iterator[Html]:
    first = operations[0]
    flops, dense = total_flops(operations), sum(op.dense_flops or 0 for op in operations)
    if first.stage.flops is None:
        yield element("li", "FLOP: not known as a formula")
    elif flops:
        yield _formula("FLOP", first.stage.flops, operations, [op.flops or 0 for op in operations])
    if dense and dense != flops:
        yield element("li", f"without the causal mask it would be {dense:,} FLOP")
    if any(op.bytes_read for op in operations):
        yield _formula("bytes read", first.stage.read, operations, [op.bytes_read for op in operations])
    if any(op.bytes_written for op in operations):
        yield _formula("bytes written", first.stage.write, operations, [op.bytes_written for op in operations])
    if not any(op.num_bytes for op in operations):
        yield element("li", "a view: no byte moves")


def _formula(name: str, formula: str, operations: Operations, values: Sequence[int]) -> Html:
    """The formula and its value; of a folded row the first request's value and the sum."""
    numbers = code(fill_numbers(formula, operations[0].sizes).replace("*", "·"))
    if len(operations) == 1:
        return element("li", f"{name}: ", code(formula), " = ", numbers, f" = {values[0]:,}")
    who = f"; for {operations[0].request} "
    return element("li", f"{name}: ", code(formula), who, numbers, f" = {values[0]:,}; together {sum(values):,}")


def _named(operations: Operations) -> Iterator[Html]:
    """The values with names inside the function, in attention its six steps."""
    first = operations[0]
    if first.locals:
        whose = f", of {first.request}" if len(operations) > 1 else ""
        yield element("p", f"Inside, by name{whose}:")
        yield element("ol", *(_value(first.tensors[name]) for name in first.locals))


def _value(tensor: TensorRecord) -> Html:
    view = f" view of {tensor.view_of}" if tensor.view_of else ""
    return element("li", code(show_tensor(tensor)), view or None)


# ---- each request's share ----------------------------------------------------------------------------------------------


def _shares(operations: Operations) -> Html:
    """A line for each request of a folded row: its own sizes and costs."""
    columns = _columns(operations)
    heads = (element("th", name, scope="col") for name in ("request", *columns))
    rows = (
        element("tr", element("th", op.request, scope="row"), *(element("td", cells[i]) for cells in columns.values()))
        for i, op in enumerate(operations)
    )
    caption = element("caption", f"{operations[0].label}, each request's share")
    return element("table", caption, element("thead", element("tr", *heads)), element("tbody", *rows), class_="shares")


def _columns(operations: Operations) -> Mapping[str, list[str]]:
    first = operations[0]
    words = [word for word in first.sizes if word in WORDS and WORDS[word].scope == "request"]
    columns = {to_symbol(word): [str(op.sizes[word]) for op in operations] for word in words}
    if pairs(operations):
        columns["pairs"] = [pairs([op]) for op in operations]
    if total_flops(operations) != 0:
        columns["FLOP"] = ["?" if op.flops is None else show_number(op.flops) for op in operations]
    return {**columns, "bytes": [show_number(op.num_bytes) for op in operations]}
