"""All that is known of one stage: its statements, formulas, tensors and values."""

import re
from dataclasses import replace

from tinyllm.shapes import evaluate
from tinyllm.trace.record import Stats

WIDTHS = [60, 79, 80, 99, 100, 120, 138, 140, 160, 200]


def test_full_shows_the_statement_that_made_each_local_and_the_formulas(traced, render):
    llm, steps = traced
    text = "\n".join(render(steps, full=True)[0])
    assert re.search(
        r"^  \|\. formula +FLOP 2\*T\*Hin\*Hout  read e\*\(T\*Hin\+Hin\*Hout\)  write e\*T\*Hout$", text, re.M
    )
    assert re.search(
        r"^  \|\. mean_square \[T,1\]=\[4,1\]  = x_float\.pow\(2\)\.mean\(dim=-1, keepdim=True\)$", text, re.M
    )
    assert re.search(r"^  \|\. first +\[T,nq,d/2\].* first, second|= x\.float\(\)\.chunk\(2, dim=-1\)$", text, re.M)
    if llm.loaded.attention == "reference":
        assert '= einsum(grouped_q, k, "s nk g d, S nk d -> nk g s S")' in text


def test_a_stage_is_shown_with_its_formulas_source_summary_and_tensors(traced, render):
    _, steps = traced
    lines = render(steps, op="qkv_proj", ridge=8.2)[0]
    facts = {line[5:18].strip(): line[18:] for line in lines if line.startswith("  |. ")}
    assert list(facts) == ["what", "path", "source", "FLOPs", "reads", "writes", "intensity", "x", "weight", "result"]
    assert facts["what"].startswith("Multiply each row by the weight")
    assert re.fullmatch(r"tinyllm/layers/linear\.py:\d+", facts["source"])
    assert facts["FLOPs"] == "2*num_tokens*in_size*out_size = 2*4*64*128 = 65536 (exact)"
    assert facts["reads"] == "e*(num_tokens*in_size+in_size*out_size) = 4*(4*64+64*128) = 33792"
    assert facts["weight"] == "[qkv,H]=[128,64] float32  32.8kB weight  = self.weight"
    assert facts["intensity"] == "1.83 FLOPs per byte < ridge 8.2: memory-bound"
    assert sum(line.startswith("M 0 qkv_proj ") and line.endswith(" m") for line in lines) == 1


def test_the_formulas_with_numbers_give_the_costs(traced, render):
    _, steps = traced
    names = {operation.label for step in steps for operation in step.operations}
    num_checked = 0
    for name in sorted(names):
        for lines in render(steps, op=name, width=200):
            for line in lines:
                match = re.match(r"  \|\. (?:FLOPs|reads|writes) +\S+ = (\S+) = (\d+)\b", line)
                if match:
                    assert evaluate(match[1], {}) == int(match[2]), line
                    num_checked += 1
    assert num_checked > 100


def test_values_are_told_of_each_tensor_where_they_are_known(traced, render):
    _, steps = traced
    stats = Stats(-1.234, 1234.5, 0.00123, 0.98, 3, (((0, 7), 1234.5), ((1, 2), 5.0)), (0.25,) * 90)
    nothing = Stats(None, None, None, None, 6, (), ())
    operations = []
    for operation in steps[0].operations:
        tensors = {n: replace(t, stats=nothing if n == "x" else stats) for n, t in operation.tensors.items()}
        operations.append(replace(operation, tensors=tensors, kernels=("aten.mm -> [2,3]", "aten.t")))
    step = replace(steps[0], operations=tuple(operations))
    (lines,) = render([step], op="down_proj", has_values=True)
    texts = [line.strip() for line in lines]
    assert texts.count("-1.2..1234  mean 0.0012  rms 0.98  not finite: 3") == 2
    assert texts.count("?..?  mean ?  rms ?  not finite: 6") == 1
    assert texts.count("largest 1234 at [0,7]  5 at [1,2]") == 2
    rows = [text for text in texts if text.startswith("row ")]
    assert len(rows) == 2 and all(re.fullmatch(r"row \[(3|63)\]( 0\.25)+ \.\.\. of (64|112)", row) for row in rows)
    assert "|. torch        aten.mm -> [2,3]; aten.t" in texts
    for width in WIDTHS:
        assert all(len(line) <= width for line in render([step], op="attend", has_values=True, width=width)[0])
