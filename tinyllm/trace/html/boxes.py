"""Pictures of sizes: which query heads read which key/value head, and a step's tensors as boxes in scale."""

from collections.abc import Mapping, Sequence
from math import prod, sqrt

from tinyllm.trace.html.markup import Html, figure, group, label, line, outlines, picture, rect, small_figure
from tinyllm.trace.record import Operation, StepRecord, TensorRecord
from tinyllm.trace.shape_text import in_numbers, in_symbols

HEAD, HEAD_GAP = 34, 6
SCALE = 2.4  # pixels for the square root of one element
LONGEST = 350  # no box is wider
LEFT = 116


def heads_figure(dims: Mapping[str, int]) -> Html:
    """Grouped-query attention: the query heads above, the key/value heads below, a line where one reads the other."""
    num_heads, num_kv_heads, size = dims["num_heads"], dims["num_kv_heads"], dims["group_size"]
    pitch = HEAD + HEAD_GAP
    parts: list[Html] = [label(70, 30, "query", "name", "end"), label(70, 118, "key/value", "name", "end")]
    for kv_head in range(num_kv_heads):
        first = kv_head * size
        kv_x = 82 + (first + (size - 1) / 2) * pitch
        readers = range(first, min(first + size, num_heads))
        lines = [line(82 + head * pitch + HEAD / 2, 44, kv_x + HEAD / 2, 96, "link") for head in readers]
        boxes = [_head(82 + head * pitch, 10, head) for head in readers]
        parts.append(
            group(outlines(*lines), *boxes, _head(kv_x, 96, kv_head), class_=f"r{kv_head % 7}", data_kv_head=kv_head,
                  data_heads=" ".join(map(str, readers)))
        )  # fmt: skip
    text = "; ".join(f"query heads {i * size} to {(i + 1) * size - 1} read KV head {i}" for i in range(num_kv_heads))
    svg = picture(92 + num_heads * pitch, 140, "Which query heads read which key/value head", text + ".", *parts)
    saved = f"The cache holds {num_kv_heads} heads instead of {num_heads}: 1/{size} of the bytes." if size > 1 else ""
    head_rule = f"Query head h reads key/value head h // g, with g = {num_heads}/{num_kv_heads} = {size}."
    caption = f"{head_rule} {saved}"
    return small_figure(svg, caption) if num_heads <= 12 else figure(svg, "query heads and key/value heads", caption)


def _head(x: float, y: float, index: int) -> Html:
    return group(
        outlines(rect(x, y, HEAD, HEAD, "cell", rx=5)), label(x + HEAD / 2, y + 22, str(index), "on number", "middle")
    )


# ---- tensors in scale --------------------------------------------------------------------------------------------------


def tensors_figure(step: StepRecord) -> Html | None:
    """The matrix products of the first layer and of the LM head: what goes in, what comes out, both sides in scale."""
    operations = [op for op in step.operations if op.stage.kind == "matmul" and op.layer in (0, None)]
    drawn = [op for op in operations if op.request in (None, operations[0].request, _first_request(operations))]
    if not drawn:
        return None
    parts: list[Html] = []
    y, width = 12.0, 0.0
    for operation in drawn:
        row, row_width, height = _row_of_boxes(operation, y)
        parts.append(row)
        y, width = y + height + 42, max(width, row_width)
    texts = (
        f"{op.label}: " + ", ".join(f"{name} {in_numbers(op.tensors[name].shape)}" for name in _names(op))
        for op in drawn
    )
    svg = picture(width + 8, y, f"Tensors of step {step.index} in scale", "; ".join(texts) + ".", *parts)
    left_out = len({op.request for op in operations if op.request}) - 1
    more = f" Of {left_out + 1} requests only the first one's attention is drawn." if left_out > 0 else ""
    caption = (
        "Both sides of a box are in scale with the square root of its rows and columns (axes behind the first lie side by "
        "side; very long sides are cut and marked with //). Dashed: weights, read anew in each step; plain: "
        f"activations; a product's rows are the step's tokens.{more}"
    )
    return figure(svg, f"tensors of step {step.index} in scale", caption)


def _first_request(operations: Sequence[Operation]) -> str | None:
    return next((op.request for op in operations if op.request), None)


def _names(operation: Operation) -> tuple[str, ...]:
    return (*operation.inputs, *operation.outputs)


def _row_of_boxes(operation: Operation, y: float) -> tuple[Html, float, float]:
    """One product's boxes side by side; with their right end and the highest box's height."""
    turned = "{weight.T}" in operation.stage.template
    sizes = {name: _sides(operation.tensors[name], turned and name == "weight") for name in _names(operation)}
    height = max(26.0, *(side for _, side in sizes.values()))
    shapes: list[Html] = []
    texts = [label(LEFT - 14, y + height / 2 + 4, operation.title, "name", "end")]
    x = float(LEFT)
    for i, (tensor_name, (box_width, box_height)) in enumerate(sizes.items()):
        sign = "" if i == 0 else "→" if i >= len(operation.inputs) else "@" if turned else "·"
        if sign:
            texts.append(label(x + 12, y + height / 2 + 5, sign, None, "middle"))
            x += 24
        tensor = operation.tensors[tensor_name]
        shapes.append(_box(tensor, tensor_name, x, y + (height - box_height) / 2, box_width, box_height))
        order = slice(None, None, -1 if turned and tensor_name == "weight" else 1)
        names = ("" if tensor_name.startswith("result") else f"{tensor_name} ") + in_numbers(tensor.shape[order])
        texts.append(label(x, y + height + 16, names, "small"))
        texts.append(label(x, y + height + 29, in_symbols(tensor.words[order]), "small quiet"))
        if box_width == LONGEST or box_height == LONGEST / 2:
            texts.append(label(x + box_width - 6, y + height / 2 + 4, "//", None, "end"))
        x += max(box_width, 6.2 * len(names) + 6)
    return group(outlines(*shapes), *texts), x, height


def _sides(tensor: TensorRecord, is_turned: bool) -> tuple[float, float]:
    """Width and height: the rows are the first axis, the columns all others."""
    shape = tensor.shape[::-1] if is_turned else tensor.shape
    rows, columns = shape[0], prod(shape[1:])
    return min(LONGEST, max(2.0, SCALE * sqrt(columns))), min(LONGEST / 2, max(2.0, SCALE * sqrt(rows)))


def _box(tensor: TensorRecord, name: str, x: float, y: float, width: float, height: float) -> Html:
    class_ = "weight" if tensor.storage == "weight" else "box"
    shape = ",".join(map(str, tensor.shape))
    return rect(x, y, width, height, class_, data_tensor=name, data_shape=shape)
