"""What is alike is shown once: equal layers, and in a layer the rows of many requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tinyllm.trace.record import Operation, StepRecord

MAX_APART = 2  # so many requests have rows of their own


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers whose rows are equal, or the rows outside all layers (then layers is empty)."""

    layers: tuple[int, ...]
    operations: tuple[Operation, ...]  # of one of them

    @property
    def count(self) -> int:
        """How many times the rows ran."""
        return max(1, len(self.layers))

    @property
    def flops(self) -> int:
        """Of one layer."""
        return sum(operation.flops or 0 for operation in self.operations)

    @property
    def num_bytes(self) -> int:
        """Of one layer."""
        return sum(operation.num_bytes for operation in self.operations)


def fold_layers(step: StepRecord) -> list[LayerRun]:
    """The step's rows in order, neighbouring equal layers once."""
    sections: list[list[Operation]] = []
    for operation in step.operations:
        if sections and sections[-1][0].layer == operation.layer:
            sections[-1].append(operation)
        else:
            sections.append([operation])
    runs: list[LayerRun] = []
    for section in sections:
        layer = section[0].layer
        if runs and runs[-1].layers and layer is not None and _keys(runs[-1].operations) == _keys(section):
            runs[-1] = LayerRun((*runs[-1].layers, layer), runs[-1].operations)
        else:
            runs.append(LayerRun(() if layer is None else (layer,), tuple(section)))
    return runs


def fold_requests(operations: Sequence[Operation]) -> list[tuple[Operation, ...]]:
    """One entry a row: an operation, or where more than two requests have it, that of all of them."""
    rows: list[tuple[Operation, ...]] = []
    for _, part in groupby(operations, key=lambda op: op.request is not None):
        members = list(part)
        labels = dict.fromkeys((op.label, op.place) for op in members)
        if members[0].request is not None and len({op.request for op in members}) > MAX_APART:
            rows += [tuple(op for op in members if (op.label, op.place) == label) for label in labels]
        else:
            rows += [(op,) for op in members]
    return rows


def _keys(operations: Sequence[Operation]) -> list[tuple]:
    return [operation.shape_key() for operation in operations]
