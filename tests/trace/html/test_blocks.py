"""The picture of the pool is the block map."""

import re
from collections import Counter


def test_the_cells_of_the_pool_are_the_block_map(run, page, picture):
    for step in run.steps:
        shown: dict[int, tuple[str, str]] = {}
        for cell in picture(page, f"Block pool in step {step.index}").with_data("block"):
            first, _, last = cell.data("block").partition("..")
            for block_id in range(int(first), int(last or first) + 1):
                shown[block_id] = cell.data("state"), cell.data("holders")
        expected = {
            block_id: (span.state, " ".join(span.holders))
            for span in step.schedule.block_map
            for block_id in range(span.first, span.last + 1)
        }
        assert shown == expected


def count_dashes(cell, class_: str) -> int:
    """How many dashes the paths have: a slot is one."""
    paths = cell.find("path", class_)
    lengths = [sum(map(int, re.findall(r"h(\d+)", path.attributes["d"] or ""))) for path in paths]
    pitches = [sum(map(int, (path.attributes["stroke-dasharray"] or "").split())) for path in paths]
    return sum(length // pitch for length, pitch in zip(lengths, pitches, strict=True))


def test_the_slots_of_a_block_are_those_that_hold_tokens(run, page, picture):
    num_blocks = 0
    for step in run.steps:
        written = Counter(slot // 2 for slot in step.batch_values["slot_mapping"])
        for cell in picture(page, f"Block pool in step {step.index}").with_data("block"):
            holders = [r for r in step.requests if r.label in cell.data("holders").split()]
            if holders and cell.data("block").isdigit():
                block_id = int(cell.data("block"))
                filled = max(min(2, r.seq_len - 2 * r.block_ids.index(block_id)) for r in holders)
                assert count_dashes(cell, "full") == filled
                assert count_dashes(cell, "new") == written[block_id]
                num_blocks += 1
    assert num_blocks >= 5


def test_changes_of_the_pool_are_those_between_the_maps(run, page, picture):
    def holders(index: int) -> dict[int, set[str]]:
        spans = run.steps[index].schedule.block_map if index >= 0 else ()
        return {i: set(span.holders) for span in spans for i in range(span.first, span.last + 1)}

    seen = set()
    for i, step in enumerate(run.steps):
        before, now = holders(i - 1), holders(i)
        for cell in picture(page, f"Block pool in step {step.index}").with_data("block"):
            block_id = int(cell.data("block").partition("..")[0])
            was, held = before.get(block_id, set()), now[block_id]
            expected = None if was == held else "+" if not was else "±" if held else "−"
            assert cell.attributes.get("data-change") == expected
            seen.add(expected)
    assert seen >= {None, "+"}
