"""What is alike is shown once: equal layers, and in a layer the rows of many requests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from tinyllm.trace.record import Operation, StepRecord

MOST_APART = 3  # so many requests have rows of their own; those of more are folded


@dataclass(frozen=True)
class LayerRun:
    """Neighbouring layers whose rows are equal, or rows outside all layers (then layers is empty)."""

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


def fold_layers(step: StepRecord, apart: Collection[int] = ()) -> list[LayerRun]:
    """The step's rows in order, neighbouring equal layers once; the layers of `apart` stand alone."""
    runs: list[LayerRun] = []
    for layer, rows in groupby(step.operations, key=lambda operation: operation.layer):
        operations, layers = tuple(rows), () if layer is None else (layer,)
        before = runs[-1].layers if runs else ()
        may_join = bool(layers and before) and not {*layers, *before} & set(apart)
        if may_join and _keys(runs[-1].operations) == _keys(operations):
            runs[-1] = LayerRun((*before, *layers), runs[-1].operations)
        else:
            runs.append(LayerRun(layers, operations))
    return runs


def fold_requests(operations: Sequence[Operation]) -> list[tuple[Operation, ...]]:
    """One entry a row: an operation, or where more than `MOST_APART` requests have it, that of all of them."""
    rows: list[tuple[Operation, ...]] = []
    for is_of_requests, part in groupby(operations, key=lambda operation: operation.request is not None):
        members = list(part)
        if is_of_requests and len({operation.request for operation in members}) > MOST_APART:
            names = dict.fromkeys((operation.label, operation.place) for operation in members)
            rows += [tuple(op for op in members if (op.label, op.place) == name) for name in names]
        else:
            rows += [(operation,) for operation in members]
    return rows


def _keys(operations: Sequence[Operation]) -> list[tuple]:
    return [operation.shape_key() for operation in operations]
