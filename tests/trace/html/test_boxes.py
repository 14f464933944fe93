"""The pictures of heads and of tensors have the sizes of the record."""

from math import prod

from tinyllm.trace.html.boxes import LONGEST


def test_query_heads_point_to_their_kv_head(run, page, picture):
    size = run.dims["group_size"]
    groups = picture(page, "Which query heads read which key/value head").with_data("kv-head")
    shown = {int(head): int(part.data("kv-head")) for part in groups for head in part.data("heads").split()}
    assert shown == {head: head // size for head in range(run.dims["num_heads"])}
    assert sum(len(part.find("line", "link")) for part in groups) == run.dims["num_heads"]


def test_boxes_have_the_sizes_of_the_tensors(run, page, picture):
    for step in run.steps:
        boxes = picture(page, f"Tensors of step {step.index} in scale").with_data("tensor")
        shapes = {tensor.shape for op in step.operations if op.stage.kind == "matmul" for tensor in op.tensors.values()}
        scales = []
        for box in boxes:
            shape = tuple(map(int, box.data("shape").split(",")))
            assert shape in shapes
            [rect] = box.find("rect")
            if 2 < rect.number("width") < LONGEST and 2 < rect.number("height") < LONGEST / 2:
                scales.append(rect.number("width") * rect.number("height") / prod(shape) ** 0.5)
        assert len(scales) > 8 and max(scales) < 1.1 * min(scales)
