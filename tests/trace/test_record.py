"""The record: symbols evaluate to sizes, sums are sums, and the JSON keeps its published schema."""

import json
from pathlib import Path

import jsonschema
import pytest

import tinyllm.trace
from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace.record import to_symbol
from tinyllm.trace.session import request_label
from tinyllm.trace.to_json import step_to_json

SCHEMA = json.loads((Path(tinyllm.trace.__file__).parent / "schema.json").read_text())


def test_json_follows_the_schema(traced):
    _, steps = traced
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for step in steps:
        record = json.loads(json.dumps(step_to_json(step)))
        jsonschema.validate(record, SCHEMA)


def test_every_symbol_evaluates_to_its_size(traced):
    _, steps = traced
    num_checked = 0
    for step in steps:
        record = step_to_json(step)
        requests = {r["id"]: r for r in record["requests"]}
        for operation in record["ops"]:
            sizes = dict(record["dims"])
            if operation["request"]:
                request = requests[operation["request"]]
                sizes |= {"s": request["num_new"], "S": request["kv_len"], "nb": -(-request["kv_len"] // sizes["bs"])}
            for tensor in operation["in"] + operation["out"]:
                assert [evaluate(symbol, sizes) for symbol in tensor["sym"]] == tensor["shape"], (
                    operation["path"],
                    tensor,
                )
                num_checked += len(tensor["shape"])
    assert num_checked > 200


def test_a_helper_s_words_are_told_in_the_model_s(traced):
    _, steps = traced
    words = {
        word for o in steps[0].operations for t in o.tensors.values() for word in t.words if o.function != "split_heads"
    }
    assert not words & {"in_size", "out_size", "heads"}
    by_label = {o.label: o for o in steps[0].layer(0)}
    assert by_label["qkv_proj"].tensors["weight"].words == ("qkv_size", "hidden_size")
    assert by_label["o_proj"].tensors["x"].words == ("num_tokens", "q_size")
    assert by_label["down_proj"].tensors["result"].words == ("num_tokens", "hidden_size")
    assert by_label["rope k"].tensors["x"].words == ("num_tokens", "num_kv_heads", "head_dim")


def test_totals_are_the_sums_of_the_rows(traced):
    _, steps = traced
    for step in steps:
        record = step_to_json(step)
        assert record["totals"]["flops"] == sum(o["flops"]["value"] for o in record["ops"])
        assert record["totals"]["bytes"] == sum(o["bytes"]["read"] + o["bytes"]["write"] for o in record["ops"])
        by_layer = [sum(o.flops or 0 for o in step.layer(i)) for i in (None, 0, 1)]
        assert sum(by_layer) == step.flops


def test_the_batch_s_invariants(traced):
    llm, steps = traced
    block_size = llm.engine.cache_config.block_size
    for step in steps:
        record = step_to_json(step)
        batch = record["batch"]
        assert batch["cu_seqlens_q"][-1] == record["dims"]["T"] == len(batch["slot_mapping"])
        assert [r["num_computed"] + r["num_new"] for r in record["requests"]] == batch["seq_lens"]
        owners = [i for i, r in enumerate(record["requests"]) for _ in range(r["num_new"])]
        assert batch["slot_mapping"] == [
            batch["block_table"][i][position // block_size] * block_size + position % block_size
            for i, position in zip(owners, batch["positions"], strict=True)
        ]
        assert batch["logits_indices"] == [end - 1 for end in batch["cu_seqlens_q"][1:]]


def test_equal_layers_refer_to_the_first_and_nothing_else_does(traced):
    _, steps = traced
    for step in steps:
        operations = step_to_json(step)["ops"]
        names = [" ".join(filter(None, (o["path"], o["op"], o["request"]))) for o in operations]
        assert len(set(names)) == len(names), "a row has a name of its own"
        for name, operation in zip(names, operations, strict=True):
            if operation["layer"] == 1 and "input_layernorm.add_residual" not in name:
                assert operation["same_as"] == name.replace("layers.1.", "layers.0.")
                assert not operation["in"] and not operation["out"]
            else:
                assert operation["same_as"] is None and operation["in"] + operation["out"], name


def test_the_json_of_requests_blocks_and_samples(traced):
    _, steps = traced
    records = [step_to_json(step) for step in steps]
    # Block size 2: five tokens of A and then three of B; each block is named by the step that takes it.
    assert [record["kv"]["allocated"] for record in records] == [
        {"A": [1, 2]}, {"A": [3], "B": [4, 5]}, {}, {"A": [6], "B": [7]}]  # fmt: skip
    assert [record["kv"]["blocks_used"] for record in records] == [2, 5, 5, 7]
    assert [[s["kept"] for s in record["sampling"]] for record in records] == [[False], *[[True, True]] * 3]
    chunk = records[0]["sampling"][0]
    assert (chunk["chosen"], chunk["text"]) == (None, None) and chunk["candidates"]
    assert [r["state"] for r in records[2]["requests"]] == ["running"] * 2
    assert [r["state"] for r in records[3]["requests"]] == ["finished"] * 2
    assert [s["finish_reason"] for s in records[3]["sampling"]] == ["length"] * 2


def test_phases_name_what_the_requests_do(traced):
    _, steps = traced
    # Five and three prompt tokens, a budget of four: 4 of A; 1 of A and B whole; both decode.
    assert [step.phase for step in steps] == ["prefill", "prefill", "decode", "decode"]
    assert [[r.query_len for r in step.requests] for step in steps] == [[4], [1, 3], [1, 1], [1, 1]]
    assert [[r.samples for r in step.requests] for step in steps] == [[False], [True, True], [True, True], [True, True]]


def test_views_are_said_only_within_one_frame(traced):
    llm, steps = traced
    operations = {o.label: o for o in steps[0].layer(0)}
    assert operations["split_heads"].tensors["result[0]"].view_of == "qkv"
    assert operations["write_kv"].tensors["k_slots"].view_of == "layer_kv"
    assert operations["rope q"].tensors["result"].view_of is None
    if llm.loaded.attention == "sdpa":
        attend = operations["attend"].tensors
        assert (attend["shared_k"].view_of, attend["shared_v"].view_of) == ("k", "v")


@pytest.mark.parametrize(
    ("word", "symbol"), [("num_tokens", "T"), ("num_reqs+1", "R+1"), ("2", "2"), ("q_size", "nq*d")]
)
def test_symbols(word, symbol):
    assert to_symbol(word) == symbol


def test_a_symbol_is_an_expression_over_symbols():
    """2*I, nq*d and d/2 need no entry of their own in a record's dims."""
    simple = {word.symbol: 6 for word in WORDS.values() if word.symbol.isidentifier()}
    assert all(evaluate(word.symbol, simple) is not None for word in WORDS.values())


@pytest.mark.parametrize(("index", "label"), [(0, "A"), (25, "Z"), (26, "AA"), (27, "AB"), (701, "ZZ"), (702, "AAA")])
def test_request_labels(index, label):
    assert request_label(index) == label
