"""A stage's rows and costs, a weight's two shapes, and what a kind of row has of the step."""

from tinyllm.trace.costs import KIND_LETTERS


def test_the_rows_of_a_stage_and_its_costs(pair, meanings):
    attend = meanings("attend", pair[0])
    rows = [operation for operation in pair[0].operations if operation.function == "attend"]
    assert attend[0]["here"][0] == f"attend A [5,4,16].[5,2,16] -> [5,4,16], {len(rows) // 2} times"
    numbers = f"4*4*16*(5*5-5*(5-1)/2) = {rows[0].flops:,} for attend A"
    assert attend[0]["costs"][0].startswith("FLOP 4*num_heads*head_dim*pairs, where pairs = ")
    assert f"= {numbers}" in attend[0]["costs"]
    assert attend[1]["here"] == ["this run used the other body"]


def test_a_stored_weight_stands_beside_the_one_in_use(pair, one):
    meaning = one("down_proj", "down_proj", pair[0])
    weight = next(o for o in pair[0].operations if o.label == "down_proj").tensors["weight"].shape
    assert meaning["weight"][0].startswith(f"stored as [H,I]=[{weight[0]},{weight[1]}]")
    assert f"@[{weight[1]},{weight[0]}]" in meaning["here"][0]
    assert meaning["shapes"] == ["[T,I]@[I,H] -> [T,H]"]


def test_every_row_s_own_name_stands_with_its_kind(traced, pair, one):
    """As the trace prints it: qkv_proj and rope q, not Linear.forward and apply_rope."""
    for step in (*traced[1], pair[0]):
        assert len(step.operations) > 20
        for operation in step.operations:
            assert operation.label in one(operation.stage.kind, KIND_LETTERS[operation.stage.kind])["rows"][0].split(
                ", "
            )
    rows = " ".join(one("M", "M: a kind")["rows"])
    assert rows == "qkv_proj, o_proj, gate_up_proj, down_proj, attend, lm_head"


def test_a_kind_s_part_of_the_step(pair, one):
    rows = [operation for operation in pair[0].operations if operation.stage.kind == "matmul"]
    flops, num_bytes = sum(row.flops for row in rows), sum(row.num_bytes for row in rows)
    text = " ".join(one("M", "M: a kind", pair[0])["here"])
    assert text.startswith(f"{len(rows)} of {len(pair[0].operations)} rows in all layers: {flops:,} FLOP (")
    assert f"{num_bytes:,} BYTE ({100 * num_bytes / pair[0].num_bytes:.1f} % of the step's)" in text
