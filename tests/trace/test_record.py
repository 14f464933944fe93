"""The record: symbols evaluate to sizes, sums are sums, and the JSON keeps its published schema."""

import importlib.metadata
import io
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

import tinyllm.trace
from tinyllm import SamplingParams
from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace import collect
from tinyllm.trace.outputs import JsonOutput
from tinyllm.trace.record import StepRecord, to_symbol
from tinyllm.trace.session import request_label, start_run, trace_steps
from tinyllm.trace.sums import RunSums
from tinyllm.trace.to_json import run_to_json, step_to_json

SCHEMA = json.loads((Path(tinyllm.trace.__file__).parent / "schema.json").read_text())
TINY = Path(__file__).parent.parent / "data" / "tiny"


def test_json_follows_the_schema(traced):
    _, steps = traced
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert len(steps) == 4
    for step in steps:
        record = json.loads(json.dumps(step_to_json(step)))
        jsonschema.validate(record, SCHEMA)


def whole_rows(record: dict) -> list[dict]:
    """The rows of a step with all that a reader knows of them: what one leaves out stands in the row that it names."""
    named = {" ".join(filter(None, (row["path"], row["op"], row["request"]))): row for row in record["ops"]}
    rows = []
    for row in record["ops"]:
        first = named[row["same_as"]] if row["same_as"] else {}
        parts = {name: {**first.get(name, {}), **row[name]} for name in ("flops", "bytes")}
        rows.append({**first, **row, **parts})
    return rows


def sizes_of(record: dict, operation: dict) -> dict[str, int]:
    """What a reader of the JSON has: the step's dims and the row's own."""
    assert not record["dims"].keys() & operation.get("dims", {}).keys(), "each size stands in one place"
    return {**record["dims"], **operation.get("dims", {})}


def check_all_symbols(steps: Sequence[StepRecord]) -> set[str]:
    """Every symbol of every tensor of every row evaluates to its size, and every FLOP formula to its value."""
    symbols: set[str] = set()
    for record in map(step_to_json, steps):
        for operation in whole_rows(record):
            sizes = sizes_of(record, operation)
            for tensor in (*operation["in"], *operation["out"], *operation.get("locals", ())):
                assert [evaluate(symbol, sizes) for symbol in tensor["sym"]] == tensor["shape"], (operation, tensor)
                symbols |= {*tensor["sym"]}
            words = {name: evaluate(word.symbol, sizes) for name, word in WORDS.items()}
            known = {name: size for name, size in words.items() if size is not None}
            if operation["flops"]["value"] is not None:
                assert evaluate(operation["flops"]["formula"], known) == operation["flops"]["value"], operation
    return symbols


@pytest.mark.parametrize("asked", [{}, {"values": "*"}])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("name", sorted(file.parent.name for file in TINY.glob("*/model.safetensors")))
def test_every_symbol_of_every_row_evaluates_to_its_size(tiny_llm, name, attention, asked):
    """A chunked prefill of two requests, and decodes; one of them drawn, so that all of the sampler runs."""
    llm = tiny_llm(name, attention, block_size=2, max_model_len=32, max_num_batched_tokens=4, max_num_seqs=4)
    drawn = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=1, min_tokens=2, max_tokens=3)
    params = [SamplingParams(max_tokens=3, ignore_eos=True), drawn]
    steps = list(trace_steps(llm, llm.make_requests([[5, 6, 7, 8, 9], [40, 41, 42]], params), **asked))
    assert [step.phase for step in steps][:3] == ["prefill", "prefill", "decode"]
    symbols = check_all_symbols(steps)
    assert symbols >= {"T", "N", "V", "H", "s", "S", "nb", "s0", "s1", "NB", "nq*d", "2*I", "2"}
    assert ("h" in symbols) == bool(asked), "split_heads lays q, k and v heads in one row, which only the locals show"


def test_a_linear_that_nobody_names_has_its_words_in_its_row(tiny_llm, monkeypatch):
    """Where the caller has no word for a helper's, the helper's own stays, and the row says its size."""
    monkeypatch.setattr(collect, "_unify", lambda *arguments: {})
    llm = tiny_llm(max_model_len=32)
    steps = list(trace_steps(llm, llm.make_requests([[1, 2, 3], [4]], SamplingParams(max_tokens=2))))
    assert check_all_symbols(steps) >= {"Hin", "Hout", "h"}
    rows = {operation["op"]: operation for operation in whole_rows(step_to_json(steps[0]))}
    assert rows["o_proj"]["dims"] == {"Hin": 64, "Hout": 64} and rows["rope k"]["dims"] == {"h": 2}


def test_which_dims_a_row_has_of_its_own(traced):
    _, steps = traced
    record = step_to_json(steps[1])  # one more token of A, and B whole
    rows = {(operation["op"], operation["request"]): operation for operation in record["ops"][:20]}
    assert rows["qkv_proj", None]["dims"] == {"Hin": 64, "Hout": 128}
    assert rows["attend", "A"]["dims"] == {"s": 1, "S": 5}
    assert rows["attend", "B"]["dims"] == {"s": 3, "S": 3}
    assert rows["lay_flat", None]["dims"] == {"s0": 1, "s1": 3}
    assert [tensor["sym"] for tensor in rows["lay_flat", None]["in"]] == [["s0", "nq", "d"], ["s1", "nq", "d"]]
    assert all("dims" not in rows[name, None] for name in ("embed_tokens", "rms_norm", "write_kv"))


def test_a_cache_write_says_which_slots_of_the_pool_it_wrote(traced):
    _, steps = traced
    assert len(steps) == 4
    for record in map(step_to_json, steps):
        rows = [row for row in record["ops"] if row["kind"] == "cache write" and not row["same_as"]]
        (row,) = rows  # equal layers refer to the first
        (pool,) = row["out"]
        assert (pool["name"], pool["storage"], pool["sym"]) == ("layer_kv", "kv_pool", ["2", "NB", "bs", "nk", "d"])
        where, name = pool["written_at"].split(".")
        slots = record[where][name]
        values_written = 2 * len(slots) * pool["shape"][3] * pool["shape"][4]
        assert row["bytes"]["write"] == 4 * values_written and max(slots) < pool["shape"][1] * pool["shape"][2]
        others = [tensor for o in whole_rows(record) for tensor in (*o["in"], *o["out"]) if tensor != pool]
        assert not any("written_at" in tensor for tensor in others)


def test_every_row_has_an_input_and_an_output(traced):
    _, steps = traced
    operations = [operation for step in steps for operation in step.operations]
    assert len(operations) > 160
    for operation in operations:
        assert operation.inputs and operation.outputs, operation.path


# --- header and footer --------------------------------------------------------------------------------------------------


def records_of(llm, steps: Sequence[StepRecord], **facts) -> list[dict]:
    """A run's records, each of which the schema allows."""
    run = replace(start_run(llm.engine, llm, []), steps=tuple(steps), **facts)
    records = json.loads(json.dumps(run_to_json(run)))
    for record in records:
        jsonschema.validate(record, SCHEMA)
    return records


def streamed(llm, steps: Iterable[StepRecord]) -> list[dict]:
    """The records of a run whose steps nobody keeps."""
    file, run = io.StringIO(), start_run(llm.engine, llm, [])
    output = JsonOutput(file)
    output.start(run)
    for step in steps:
        output.step(step)
    output.end(run)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_the_header_says_what_ran_and_where(traced):
    llm, steps = traced
    header = records_of(llm, steps)[0]
    assert header["versions"] == {
        "tinyllm": importlib.metadata.version("tinyllm-trace"),
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    assert (header["argv"], header["machine"]) == ([], {"ridge": None, "num_threads": torch.get_num_threads()})
    header = records_of(llm, [], argv=("Hi", "--json", "-"), ridge=8.25)[0]
    assert (header["argv"], header["machine"]["ridge"]) == (["Hi", "--json", "-"], 8.25)


def test_versions_and_threads_are_read_and_not_typed(traced, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 7")
    monkeypatch.setattr(torch, "__version__", "8.0")
    monkeypatch.setattr(platform, "python_version", lambda: "9.0")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    header = records_of(traced[0], [])[0]
    assert header["versions"] == {"tinyllm": "tinyllm-trace 7", "torch": "8.0", "python": "9.0"}
    assert header["machine"]["num_threads"] == 1000


def test_a_package_that_is_not_installed_has_no_version(traced, monkeypatch):
    def no_package(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_package)
    assert records_of(traced[0], [])[0]["versions"]["tinyllm"] is None


@pytest.mark.parametrize("write", [records_of, streamed])
def test_the_footer_s_totals_are_the_sums_of_the_steps(traced, write):
    llm, steps = traced
    *_, footer = records = write(llm, steps)
    jsonschema.validate(footer, SCHEMA)
    totals, parts = footer["totals"], [record["totals"] for record in records[1:-1]]
    for name in ("flops", "bytes"):
        assert totals[name] == sum(part[name] for part in parts) > 0
    for name in ("traced_ms", "reading_ms"):
        assert totals[name] == pytest.approx(sum(part[name] for part in parts), abs=0.001 * len(parts))
    assert all(0 < part["reading_ms"] < part["traced_ms"] for part in parts), "the tracer's own time is a part of it"
    assert totals["intensity"] == round(totals["flops"] / totals["bytes"], 4)
    assert totals["tokens_in"] == sum(record["dims"]["T"] for record in records[1:-1]) == 5 + 3 + 2 * 2
    assert totals["tokens_out"] == sum(s["chosen"] is not None for r in records[1:-1] for s in r["sampling"]) == 6
    assert totals["flops_is_lower_bound"] is any(part["flops_is_lower_bound"] for part in parts) is False
    assert totals["steps"] == dict(Counter(record["phase"] for record in records[1:-1])) == {"prefill": 2, "decode": 2}
    assert footer["num_steps"] == sum(totals["steps"].values()) == len(steps)


def test_one_unknown_row_makes_the_run_s_flops_a_lower_bound(tiny_llm):
    llm = tiny_llm()
    params = [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(temperature=1.0, top_k=5, max_tokens=1)]
    steps = list(trace_steps(llm, llm.make_requests([[1, 2], [3]], params)))
    assert [step.has_unknown_flops for step in steps] == [True, False]
    totals = records_of(llm, steps)[-1]["totals"]
    assert totals["flops_is_lower_bound"] and totals["flops"] == sum(step.flops for step in steps)


def test_a_run_without_steps_has_totals_of_nothing(traced):
    llm, _ = traced
    assert records_of(llm, [])[-1]["totals"] == streamed(llm, [])[-1]["totals"] == {
        "flops": 0, "flops_is_lower_bound": False, "bytes": 0, "intensity": None, "tokens_in": 0, "tokens_out": 0,
        "traced_ms": 0.0, "reading_ms": 0.0, "steps": {}}  # fmt: skip


def test_the_sums_of_the_phases_are_those_of_the_run(traced):
    _, steps = traced
    sums = RunSums()
    for step in steps:
        sums.add(step)
    assert list(sums.phases) == ["prefill", "decode"]
    for name in ("num_steps", "num_tokens", "num_chosen", "flops", "num_bytes", "num_compared"):
        assert getattr(sums.total, name) == sum(getattr(part, name) for part in sums.phases.values()) > 0
    assert [part.num_tokens for part in sums.phases.values()] == [8, 4]


def first_row(record: dict) -> dict:
    return next(row for row in record["ops"] if row["same_as"] is None)


def shared_row(record: dict) -> dict:
    return next(row for row in record["ops"] if row["same_as"])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (0, lambda r: r["versions"].pop("torch")),
        (0, lambda r: r["machine"].update(cores=4)),
        (0, lambda r: r.update(argv="Hi")),
        (0, lambda r: r["machine"].update(ridge=0)),
        (-1, lambda r: r["totals"].pop("tokens_out")),
        (-1, lambda r: r["totals"].update(words=1)),
        (-1, lambda r: r["totals"]["steps"].update(warm_up=1)),
        (-1, lambda r: r["totals"].pop("reading_ms")),
        (1, lambda r: r["totals"].pop("reading_ms")),
        (1, lambda r: r["totals"].update(time=1)),
        (1, lambda r: r["ops"][0]["out"][0].update(written_at="batch.positions")),
        (1, lambda r: first_row(r).pop("expr")),
        (1, lambda r: first_row(r).pop("in")),
        (1, lambda r: first_row(r)["flops"].pop("formula")),
        (1, lambda r: first_row(r)["bytes"].pop("formula")),
        (1, lambda r: first_row(r).pop("same_as")),
        (1, lambda r: shared_row(r).update(expr="again")),
        (1, lambda r: shared_row(r).update(dims={"s": 1})),
        (1, lambda r: shared_row(r)["flops"].update(formula="again")),
        (1, lambda r: shared_row(r)["bytes"].update(formula="again")),
        (1, lambda r: shared_row(r)["flops"].pop("value")),
        (1, lambda r: shared_row(r)["bytes"].pop("read")),
    ],
)
def test_the_schema_is_strict(traced, kind, change):
    llm, steps = traced
    record = records_of(llm, steps)[kind]
    change(record)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, SCHEMA)


# --- rows ---------------------------------------------------------------------------------------------------------------


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
    assert len(steps) == 4
    for step in steps:
        record = step_to_json(step)
        assert len(record["ops"]) > 30
        assert record["totals"]["flops"] == sum(o["flops"]["value"] for o in record["ops"])
        assert record["totals"]["bytes"] == sum(o["bytes"]["read"] + o["bytes"]["write"] for o in record["ops"])
        by_layer = [sum(o.flops or 0 for o in step.layer(i)) for i in (None, 0, 1)]
        assert sum(by_layer) == step.flops


def test_the_batch_s_invariants(traced):
    llm, steps = traced
    block_size = llm.engine.cache_config.block_size
    assert len(steps) == 4
    for step in steps:
        record = step_to_json(step)
        batch = record["batch"]
        assert batch["cu_seqlens_q"][-1] == record["dims"]["T"] == len(batch["slot_mapping"])
        assert [r["num_computed"] + r["num_new"] for r in record["requests"]] == batch["seq_lens"]
        phases = {r["phase"] for r in record["requests"]}
        assert record["phase"] == ("mixed" if len(phases) == 2 else phases.pop())
        owners = [i for i, r in enumerate(record["requests"]) for _ in range(r["num_new"])]
        assert batch["slot_mapping"] == [
            batch["block_table"][i][position // block_size] * block_size + position % block_size
            for i, position in zip(owners, batch["positions"], strict=True)
        ]
        assert batch["logits_indices"] == [end - 1 for end in batch["cu_seqlens_q"][1:]]


def test_equal_layers_refer_to_the_first_and_nothing_else_does(traced):
    _, steps = traced
    assert len(steps) == 4
    for step in steps:
        operations = step_to_json(step)["ops"]
        names = [" ".join(filter(None, (o["path"], o["op"], o["request"]))) for o in operations]
        assert len(set(names)) == len(names), "a row has a name of its own"
        num_shared = 0
        for name, operation in zip(names, operations, strict=True):
            if operation["layer"] == 1 and "input_layernorm.add_residual" not in name:
                assert operation["same_as"] == name.replace("layers.1.", "layers.0.")
                num_shared += 1
            else:
                assert operation["same_as"] is None and operation["in"] + operation["out"], name
        assert num_shared > 10


def test_a_row_that_refers_to_another_says_only_what_its_place_and_sums_need(traced):
    _, steps = traced
    own = {"seq", "path", "op", "kind", "layer", "request", "flops", "bytes", "same_as"}
    assert len(steps) == 4
    for record in map(step_to_json, steps):
        shared = [row for row in record["ops"] if row["same_as"]]
        assert len(shared) > 10
        for row in shared:
            assert row.keys() == own
            assert (row["flops"].keys(), row["bytes"].keys()) == ({"value"}, {"read", "write"})


@pytest.mark.parametrize("asked", [{}, {"times": True, "kernels": True}])
def test_what_it_leaves_out_is_what_it_would_say_alone(traced, asked):
    """A layer's rows, written as if no layer were before it, but for where each stands."""
    llm, steps = traced
    if asked:
        steps = list(trace_steps(llm, llm.make_requests([[1, 2, 3]], SamplingParams(max_tokens=2)), **asked))
    assert len(steps) >= 2
    for step in steps:
        alone = replace(step, operations=tuple(step.layer(1)))
        rows = [row for row in whole_rows(step_to_json(step)) if row["layer"] == 1]
        assert len(rows) > 10 and any(row["same_as"] for row in rows)
        for row, expected in zip(rows, step_to_json(alone)["ops"], strict=True):
            assert expected["same_as"] is None
            assert {**row, "seq": expected["seq"], "same_as": None} == expected


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
    assert 20 < len(simple) < len(WORDS)
    assert all(evaluate(word.symbol, simple) is not None for word in WORDS.values())


@pytest.mark.parametrize(("index", "label"), [(0, "A"), (25, "Z"), (26, "AA"), (27, "AB"), (701, "ZZ"), (702, "AAA")])
def test_request_labels(index, label):
    assert request_label(index) == label
