"""The picture of the block pool: who holds which block, how full it is, and what changed since the step before."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinyllm.trace.html.markup import Html, element, figure, group, label, line, outlines, picture, rect
from tinyllm.trace.html.words import colour_class, with_unit
from tinyllm.trace.record import BlockSpan, StepRecord
from tinyllm.trace.text import show_count, show_runs, show_span

MAX_BLOCKS = 64  # a larger pool is drawn as one cell a span
MAX_SLOTS = 16
WIDTH, HEIGHT, GAP = 74, 54, 8

Slots = Mapping[int, tuple[int, int]]  # by block: filled slots after the step, and how many of them are new


@dataclass(frozen=True)
class Block:
    """One cell of the picture: a block, or in a large pool a span of equal ones."""

    first: int
    last: int
    state: str
    holders: tuple[str, ...]
    is_cached: bool
    change: str  # "+" held now and not before, "−" free again, "±" other holders, "" as before


def blocks_figure(step: StepRecord, previous: StepRecord | None) -> Html:
    """The whole pool while the step computes."""
    blocks = find_blocks(step, previous)
    columns = 8 if len(blocks) <= MAX_BLOCKS else 12
    slots, block_size = count_slots(step), step.dims["block_size"]
    cells = (
        _cell(block, GAP + i % columns * (WIDTH + GAP), GAP + i // columns * (HEIGHT + GAP), slots, block_size)
        for i, block in enumerate(blocks)
    )
    num_rows = -(-len(blocks) // columns)
    svg = picture(
        GAP + min(columns, len(blocks)) * (WIDTH + GAP), GAP + num_rows * (HEIGHT + GAP),
        f"Block pool in step {step.index}", _describe(step.schedule.block_map), *cells,
    )  # fmt: skip
    return figure(svg, f"block pool in step {step.index}", _caption(step, blocks, previous))


def find_blocks(step: StepRecord, previous: StepRecord | None) -> list[Block]:
    """The cells, each with its change; without a step before, all blocks were free."""
    before = _states(previous.schedule.block_map) if previous else {}
    is_large = step.schedule.num_blocks > MAX_BLOCKS
    blocks: list[Block] = []
    for span in step.schedule.block_map:
        for first in [span.first] if is_large else range(span.first, span.last + 1):
            change = _change(span, before.get(first, ()))
            last = span.last if is_large else first
            blocks.append(Block(first, last, span.state, span.holders, span.is_cached, change))
    return blocks


def _states(spans: Sequence[BlockSpan]) -> dict[int, tuple[str, ...]]:
    return {block_id: span.holders for span in spans for block_id in range(span.first, span.last + 1)}


def _change(span: BlockSpan, before: tuple[str, ...]) -> str:
    if set(span.holders) == set(before):
        return ""
    if not before:
        return "+"
    return "±" if span.holders else "−"


def count_slots(step: StepRecord) -> dict[int, tuple[int, int]]:
    """By block id: how many slots hold a token after the step, and how many of them it writes."""
    block_size = step.dims["block_size"]
    written = Counter(slot // block_size for slot in step.batch_values["slot_mapping"])
    filled: dict[int, int] = {}
    for request in step.requests:
        for i, block_id in enumerate(request.block_ids):
            count = min(block_size, max(0, request.seq_len - i * block_size))
            filled[block_id] = max(filled.get(block_id, 0), count)
    return {block_id: (count, written[block_id]) for block_id, count in filled.items()}


def _cell(block: Block, x: float, y: float, slots: Slots, block_size: int) -> Html:
    name = {"null": "null", "free": "free"}.get(block.state, "+".join(block.holders))
    on = {0: "quiet", 1: "on"}.get(len(block.holders), "")
    span = show_span(block.first, block.last + 1)
    is_shared = len(block.holders) > 1
    number, sign = (f"{span} {block.change}", "") if is_shared else (span, block.change)
    filled, written = slots.get(block.first, (block_size, 0))
    has_slots = block.first == block.last and (block.state == "held" or block.is_cached)
    shapes = [
        *_paint(block, x, y),
        *(_slots(x + 7, y + 27, block_size, filled, written) if has_slots else ()),
        rect(x + 0.5, y + 0.5, WIDTH - 1, HEIGHT - 1, "changed", rx=5) if block.change else None,
    ]
    return group(
        outlines(*shapes),
        label(x + 7, y + 18, number, f"{on} number"),
        label(x + WIDTH - 7, y + (18 if block.first == block.last else 36), name, f"{on} strong", "end"),
        label(x + WIDTH - 5, y + HEIGHT - 4, sign, f"{on} strong", "end") if sign else None,
        class_=colour_class(block.holders[0]) if block.holders else block.state,
        data_block=span, data_state=block.state, data_holders=" ".join(block.holders), data_change=block.change or None,
    )  # fmt: skip


def _paint(block: Block, x: float, y: float) -> list[Html]:
    """The ground: one stripe a holder; a cached block that nobody holds is dashed, the null block crossed out."""
    if not block.holders:
        ground = rect(x, y, WIDTH, HEIGHT, "cached" if block.is_cached else "empty", rx=5)
        return [ground, line(x + 5, y + HEIGHT - 5, x + WIDTH - 5, y + 24)] if block.state == "null" else [ground]
    if len(block.holders) == 1:
        return [rect(x, y, WIDTH, HEIGHT, "cell", rx=5)]
    shown = block.holders[:4]
    width = WIDTH / len(shown)
    stripes = (
        group(rect(x + i * width, y + 23, width, HEIGHT - 23, "cell"), class_=colour_class(holder))
        for i, holder in enumerate(shown)
    )
    return [rect(x, y, WIDTH, HEIGHT, "box", rx=5), *stripes]


def _slots(x: float, y: float, block_size: int, filled: int, written: int) -> list[Html | None]:
    """The block's slots: full, written in this step, empty; of a large block, a bar."""
    width = WIDTH - 24
    if block_size > MAX_SLOTS:
        part = width * filled / block_size
        new = width * written / block_size
        return [
            rect(x, y, width, 8, "slot"),
            rect(x, y, part, 8, "slot full"),
            rect(x + part - new, y + 3, new, 2, "new"),
        ]
    columns = block_size if block_size <= 8 else -(-block_size // 2)
    pitch = min(12, width // columns)
    return [
        _dashes(x, y, range(0, filled), columns, pitch, pitch - 2, "slot full"),
        _dashes(x, y, range(filled, block_size), columns, pitch, pitch - 2, "slot"),
        _dashes(x, y, range(filled - written, filled), columns, pitch, 2, "new"),
    ]


def _dashes(x: float, y: float, slots: range, columns: int, pitch: int, size: int, class_: str) -> Html | None:
    """One dash a slot, in lines of so many columns: one path however many slots there are."""
    parts: list[str] = []
    for row in range(slots.start // columns, -(-slots.stop // columns)):
        first, end = max(slots.start, row * columns), min(slots.stop, (row + 1) * columns)
        left = x + (first - row * columns) * pitch + (pitch - 2 - size) / 2
        parts.append(f"M{left:g} {y + row * 10 + 4:g}h{(end - first) * pitch}")
    if not slots:
        return None
    return element("path", d="".join(parts), class_=class_, stroke_dasharray=f"{size} {pitch - size}")


def _describe(spans: Sequence[BlockSpan]) -> str:
    texts = (
        f"{show_span(span.first, span.last + 1)} {'held by ' + ' and '.join(span.holders) if span.holders else span.state}"
        + (", cached" if span.is_cached and not span.holders else "")
        for span in spans
    )
    return "Blocks: " + "; ".join(texts) + "."


def _caption(step: StepRecord, blocks: Sequence[Block], previous: StepRecord | None) -> str:
    size, num_bytes = step.dims["block_size"], with_unit(step.kv_bytes_per_token, "B")
    parts = [
        _changes(blocks, previous),
        f"Each block has {show_count(size, 'slot')} of {num_bytes}, one token's keys and values in all layers (dark: "
        "holds a token, with a dot: written in this step, light: empty).",
        "Block 0 is never used: padding points to it.",
    ]
    if any(block.first != block.last for block in blocks):
        parts.append(f"A pool of more than {MAX_BLOCKS} blocks is drawn span by span.")
    if any(block.is_cached and not block.holders for block in blocks):
        parts.append("Dashed: free, but a prompt that begins with the same tokens can still find it.")
    return " ".join(parts)


def _changes(blocks: Sequence[Block], previous: StepRecord | None) -> str:
    names = {"+": "newly held", "−": "free again", "±": "other holders"}
    parts = []
    for sign, name in names.items():
        ids = [i for block in blocks if block.change == sign for i in range(block.first, block.last + 1)]
        if ids:
            parts.append(f"{sign} {name}: {show_runs(ids)}")
    since = f"Since step {previous.index}" if previous else "At the start"
    return f"{since}: {'; '.join(parts)}." if parts else f"{since}: the same holders."
