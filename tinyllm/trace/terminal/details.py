"""What is known of one stage: its formulas with numbers filled in, its source, every named tensor. For --full and --op."""

import re
from collections.abc import Iterator, Mapping, Sequence

from tinyllm.trace.costs import bound_by
from tinyllm.trace.record import Operation, Stats, TensorRecord
from tinyllm.trace.shape_text import fill_numbers, in_numbers, in_symbols, show_shape, strip_annotation, with_symbols
from tinyllm.trace.terminal.options import NAME, Options
from tinyllm.trace.text import cut_to, elide, first_that_fits, fold_words, show_decimal, show_number


def grouped_rows(operation: Operation, options: Options) -> Iterator[str]:
    """The locals of a stage in few rows: those of one shape together, in the order in which they are made."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in operation.locals:
        tensor = operation.tensors[name]
        groups.setdefault((in_symbols(tensor.words), in_numbers(tensor.shape)), []).append(name)
    layout, label = options.layout, "inside"
    for (symbols, numbers), names in groups.items():
        left = f"  {options.leaf + label:{NAME}}"
        left += (
            f"{symbols:{layout.symbolic}}{numbers:{layout.numeric // 2}}"
            if layout.numeric
            else f"{symbols}={numbers}  "
        )
        yield cut_to(left + ", ".join(names), options.end)
        label = ""


def named_rows(operation: Operation, options: Options) -> Iterator[str]:
    """The locals of a stage, each with its own words: in attention these are the six steps.

    With --full, and where there is room, also the statement that made each.
    """
    layout = options.layout
    for name in operation.locals:
        tensor = operation.tensors[name]
        symbols, numbers = in_symbols(tensor.words), in_numbers(tensor.shape)
        left = f"  {cut_to(options.leaf + name, NAME):{NAME - 1}} "
        view = f"view of {tensor.view_of}" if tensor.view_of else ""
        made = " ".join(filter(None, (view, strip_annotation(tensor.source, name))))
        if layout.source:
            left += f"{symbols:{layout.symbolic}}{numbers:{layout.numeric // 2}}"
            text = [made, with_symbols(made)]
        elif options.full or not layout.numeric:
            left += f"{show_shape(tensor.words, tensor.shape)}  "
            text = [made, with_symbols(made)] if options.full else [view]
        else:
            left += f"{symbols:{layout.symbolic}}{numbers}  "
            text = [view]
        yield cut_to(left + first_that_fits(text, max(4, options.end - len(left))), options.end).rstrip()


def formula_row(operation: Operation, options: Options) -> Iterator[str]:
    """FLOPs and bytes as formulas over symbols, in one line; nothing for a stage that only views."""
    stage = operation.stage
    if stage.flops == stage.read == stage.write == "0":
        return
    named = [("FLOP", stage.flops or "?"), ("read", stage.read), ("write", stage.write)]
    parts = [f"{name} {with_symbols(formula)}" for name, formula in named if formula != "0"]
    left = f"  {options.leaf + 'formula':{NAME}}"
    yield left + first_that_fits(["  ".join(parts), parts[0]], options.end - len(left))


# --- everything of one stage ----------------------------------------------------------------------------------------------


def detail_rows(operation: Operation, options: Options) -> Iterator[str]:
    """All that is known of a row: what it does, where, what it costs and why, and its tensors."""
    yield from _fact(options, "what", operation.summary.replace("``", "`").split())
    yield from _fact(options, "path", [operation.path])
    yield from _fact(options, "source", [f"tinyllm/{operation.source}"])
    stage, sizes = operation.stage, operation.sizes
    note = stage.counted + ("" if operation.dense_flops is None else f"; without the mask {operation.dense_flops}")
    yield from _formula(options, "FLOPs", stage.flops, operation.flops, sizes, f"({note})")
    yield from _formula(options, "reads", stage.read, operation.bytes_read, sizes)
    yield from _formula(options, "writes", stage.write, operation.bytes_written, sizes)
    yield from _bound(operation, options)
    if operation.kernels:
        *others, last = operation.kernels
        yield from _fact(options, "torch", [*(f"{kernel};" for kernel in others), last])
    yield from tensor_rows(operation, options)


def tensor_rows(operation: Operation, options: Options) -> Iterator[str]:
    """Every named tensor with type and bytes; with --values what it holds."""
    roles = {**dict.fromkeys(operation.locals, "local"), **dict.fromkeys(operation.outputs, "result")}
    for name, tensor in operation.tensors.items():
        role = roles.get(name, tensor.storage if tensor.storage == "weight" else "argument")
        yield from _tensor(tensor, role, options)


def _fact(options: Options, name: str, words: Sequence[str]) -> Iterator[str]:
    return fold_words(f"  {options.leaf + name:{NAME}} ", words, options.width, " ")


def _formula(
    options: Options, name: str, formula: str | None, value: int | None, sizes: Mapping[str, int], note: str = ""
) -> Iterator[str]:
    """The formula in words (in symbols where these do not fit), with numbers, and its value."""
    if formula is None or value is None:
        yield from _fact(options, name, ["?"])
        return
    filled = fill_numbers(formula, sizes)
    room = options.width - NAME - 3
    text = first_that_fits([formula, with_symbols(formula)], room)
    words = [text] if filled == formula == str(value) else [text, f"= {filled}", f"= {value}"]
    yield from _fact(options, name, [*_break(words, room), *([note] if note else [])])


def _break(words: Sequence[str], room: int) -> Iterator[str]:
    """Words that are longer than a line, cut behind an operator."""
    for word in words:
        parts = re.findall(r".+?(?:[*+]|-(?!>)|$)", word) if len(word) > room else [word]
        line = ""
        for part in parts:
            if len(line) + len(part) > room:
                yield line
                line = ""
            line += part
        yield line


def _bound(operation: Operation, options: Options) -> Iterator[str]:
    if operation.intensity is None:
        return
    words = [f"{operation.intensity:.2f} FLOPs per byte"]
    bound = bound_by(operation.flops, operation.num_bytes, options.ridge)
    if bound:
        words.append(f"{'<' if bound == 'memory' else '>'} ridge {options.ridge:.1f}: {bound}-bound")
    yield from _fact(options, "intensity", words)


def _tensor(tensor: TensorRecord, role: str, options: Options) -> Iterator[str]:
    words = [f"{show_shape(tensor.words, tensor.shape)} {tensor.dtype}", f"{show_number(tensor.num_bytes)}B {role}"]
    if tensor.view_of:
        words.append(f"view of {tensor.view_of}")
    if not tensor.is_contiguous:
        words.append("not contiguous")
    if tensor.source:
        made = strip_annotation(tensor.source, tensor.name)
        words.append(first_that_fits([made, with_symbols(made)], options.width - NAME - 3))
    yield from fold_words(f"  {cut_to(options.leaf + tensor.name, NAME):{NAME}} ", words, options.width)
    if options.has_values and tensor.stats is not None:
        yield from value_rows(tensor.stats, tensor.shape, options)


# --- values ---------------------------------------------------------------------------------------------------------------


def value_rows(stats: Stats, shape: Sequence[int], options: Options) -> Iterator[str]:
    """What a tensor held: its range over all values, the begin of a row, and where the largest values stand.

    The row of attention's weights is how the last query of the first head shares itself among the keys; the largest
    values of the logits are the likeliest tokens.
    """
    texts = [show_value(value) for value in (stats.minimum, stats.maximum, stats.mean, stats.rms)]
    words = [f"{texts[0]}..{texts[1]}", f"mean {texts[2]}", f"rms {texts[3]}"]
    if stats.num_not_finite:
        words.append(f"not finite: {stats.num_not_finite}")
    yield from _lines(words, options)
    if stats.row:
        yield from _lines([_show_row(stats.row, shape, options.end - NAME - 3)], options)
    if stats.largest:
        tops = [f"{show_decimal(value)} at {in_numbers(index)}" for index, value in stats.largest]
        yield from _lines(["largest " + tops[0], *tops[1:]], options)


def _show_row(row: Sequence[float], shape: Sequence[int], width: int) -> str:
    """The index of the row in its tensor, then as much of both ends as fits, or of the begin where no more is known."""
    index = [*(0 for _ in shape[:-2]), *(size - 1 for size in shape[-2:-1])]
    left = f"row {in_numbers(index)} " if index else "all "
    texts = [show_decimal(value) for value in row]
    length = shape[-1] if shape else 1
    if len(row) == length:
        return left + elide(texts, width - len(left), " ")
    ending = f" ... of {length}"
    return first_that_fits((left + " ".join(texts[:count]) + ending for count in range(len(texts), 0, -1)), width)


def show_value(value: float | None) -> str:
    """A number, or ``?`` where no value was finite."""
    return "?" if value is None else show_decimal(value)


def _lines(words: Sequence[str], options: Options) -> Iterator[str]:
    return fold_words(" " * (NAME + 3), words, options.end)
