"""A dry run is a real step without its values: the same rows, sizes and costs, for every config that is supported."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import tinyllm.trace
from tinyllm import ConfigError, ModelFileError, SamplingParams
from tinyllm.config import PRESETS, ModelConfig
from tinyllm.planner import count_parameters, decode_flops, kv_bytes_per_token, step_flops
from tinyllm.trace.dry_run import MAX_REQUESTS, dry_run, parse_lens, read_config
from tinyllm.trace.record import StepRecord, to_symbol
from tinyllm.trace.session import trace_steps
from tinyllm.trace.terminal import WIDTH, Options, render_step
from tinyllm.trace.to_json import step_to_json

DATA = Path(__file__).parent.parent / "data"
TINY = sorted(path.parent for path in (DATA / "tiny").glob("*/config.json"))
GGUF = sorted((DATA / "gguf").glob("llama_*.gguf"))
SCHEMA = json.loads((Path(tinyllm.trace.__file__).parent / "schema.json").read_text("utf-8"))
LLAMA3 = PRESETS["llama-3-8b"]

# --- the table that everyone should be able to draw -----------------------------------------------------------------------

# Six tokens of three requests through Llama-3-8B: by row, the named tensors of layer 1, which has a residual.
LAYER_ROWS = {
    "qkv_proj": [("x", "T,H", (6, 4096)), ("weight", "qkv,H", (6144, 4096)), ("result", "T,qkv", (6, 6144))],
    "split_heads": [("result[0]", "T,nq,d", (6, 32, 128)), ("result[1]", "T,nk,d", (6, 8, 128))],
    "rope q": [("x", "T,nq,d", (6, 32, 128)), ("result", "T,nq,d", (6, 32, 128))],
    "rope k": [("x", "T,nk,d", (6, 8, 128)), ("result", "T,nk,d", (6, 8, 128))],
    "write_kv": [("k", "T,nk,d", (6, 8, 128)), ("v", "T,nk,d", (6, 8, 128)), ("slot_mapping", "T", (6,)),
                 ("layer_kv", "2,NB,bs,nk,d", (2, 4, 16, 8, 128))],
    "merge_heads": [("x", "T,nq,d", (6, 32, 128)), ("result", "T,nq*d", (6, 4096))],
    "o_proj": [("x", "T,nq*d", (6, 4096)), ("weight", "H,nq*d", (4096, 4096)), ("result", "T,H", (6, 4096))],
    "add_residual": [("x", "T,H", (6, 4096)), ("residual", "T,H", (6, 4096)), ("result", "T,H", (6, 4096))],
    "gate_up_proj": [("weight", "2*I,H", (28672, 4096)), ("result", "T,2*I", (6, 28672))],
    "silu_and_mul": [("gate_up", "T,2*I", (6, 28672)), ("result", "T,I", (6, 14336))],
    "down_proj": [("weight", "H,I", (4096, 14336)), ("result", "T,H", (6, 4096))],
}  # fmt: skip
OTHER_ROWS = {
    "embed_tokens": [("token_ids", "T", (6,)), ("weight", "V,H", (128256, 4096)), ("result", "T,H", (6, 4096))],
    "gather_rows": [("hidden", "T,H", (6, 4096)), ("logits_indices", "N", (3,)), ("result", "N,H", (3, 4096))],
    "lm_head": [("weight", "V,H", (128256, 4096)), ("result", "N,V", (3, 128256))],
    "sample": [("logits", "N,V", (3, 128256)), ("result[0]", "N", (3,))],
}


@pytest.fixture(scope="module")
def llama3() -> StepRecord:
    (step,) = dry_run(LLAMA3, *parse_lens("4,1@7,1@12")).steps
    return step


@pytest.mark.parametrize(("layer", "rows"), [(1, LAYER_ROWS), (None, OTHER_ROWS)])
def test_the_shapes_of_llama_3_8b(llama3, layer, rows):
    by_label = {operation.label: operation for operation in llama3.layer(layer)}
    for label, tensors in rows.items():
        for name, symbols, shape in tensors:
            tensor = by_label[label].tensors[name]
            assert (",".join(tensor.symbols), tensor.shape) == (symbols, shape), (label, name)


def test_attention_of_each_request_alone(llama3):
    attends = [operation for operation in llama3.layer(0) if operation.function == "attend"]
    assert [(o.request, *(o.tensors[name].shape for name in "qk")) for o in attends] == [
        ("A", (4, 32, 128), (4, 8, 128)),
        ("B", (1, 32, 128), (7, 8, 128)),
        ("C", (1, 32, 128), (12, 8, 128)),
    ]
    assert attends[0].tensors["scores"].shape == (8, 4, 4, 4)


def test_the_batch_has_the_values_that_follow_from_the_lengths(llama3):
    assert llama3.batch_values == {
        "token_ids": [None] * 6,
        "positions": [0, 1, 2, 3, 6, 11],
        "cu_seqlens_q": [0, 4, 5, 6],
        "seq_lens": [4, 7, 12],
        "block_table": [[1], [2], [3]],
        "slot_mapping": [16, 17, 18, 19, 38, 59],
        "logits_indices": [3, 4, 5],
    }
    assert {name: tensor.shape for name, tensor in llama3.batch.items()}["cu_seqlens_q"] == (4,)
    assert llama3.phase == "mixed" and [request.is_decode for request in llama3.requests] == [False, True, True]


def test_it_prints_like_any_step(llama3):
    lines = list(render_step(llama3, None, Options()))
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    for row in (
        "== STEP 0  MIXED  R=3 requests  T=6 tokens ",
        "[6,4096]@[4096,6144]->[6,6144]",
        "[6,4096]@[4096,4096]->[6,4096]",
        "[6,4096]->[6,28672]",
        "[6,28672]->[6,14336]",
        "[6,4096]->[3,4096]",
        "[3,4096]->[3,128256]",
    ):
        assert row in text, row
    assert all(symbol in text for symbol in map(to_symbol, ("query_len", "seq_len", "qkv_size")))
    assert "6 tokens in, 0 tokens out" in text


def test_its_json_follows_the_schema(llama3):
    jsonschema.validate(json.loads(json.dumps(step_to_json(llama3))), SCHEMA)


# --- a dry run and a real run ---------------------------------------------------------------------------------------------


def rows_of(step: StepRecord) -> list[tuple]:
    """Everything that two steps' rows must share; how a kernel lays its result out in memory is the device's business."""
    laid_out = {"is_contiguous": True, "view_of": None}
    return [
        replace(
            operation, tensors={name: replace(tensor, **laid_out) for name, tensor in operation.tensors.items()}
        ).shape_key()
        for operation in step.operations
    ]


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_the_steps_of_a_real_run_have_the_same_rows(attention, tiny_llm):
    """A prefill of 5 and 3 tokens, then two decode steps."""
    llm = tiny_llm("llama_gqa", attention, num_blocks=3, max_model_len=16, enable_prefix_caching=False)
    requests = llm.make_requests([[5, 6, 7, 8, 9], [40, 41, 42]], SamplingParams(max_tokens=3, ignore_eos=True))
    real_steps = list(trace_steps(llm, requests))
    for real, lens in zip(real_steps, ["5,3", "1@6,1@4", "1@7,1@5"], strict=True):
        run = dry_run(llm.loaded.config, *parse_lens(lens), dtype="float32", attention=attention)
        (dry,) = run.steps
        assert rows_of(dry) == rows_of(real)
        assert (dry.flops, dry.num_bytes, dry.num_compared) == (real.flops, real.num_bytes, real.num_compared)
        assert (dry.dims, dry.batch, dry.phase) == (real.dims, real.batch, real.phase)
        assert dry.kv_bytes_per_token == real.kv_bytes_per_token
        assert dry.batch_values | {"token_ids": None} == {**real.batch_values, "token_ids": None}
        assert replace(dry.schedule, token_budget=real.schedule.token_budget) == real.schedule
        for ours, theirs in zip(dry.requests, real.requests, strict=True):
            for name in ("label", "query_len", "seq_len", "block_ids", "new_block_ids", "started_as", "is_decode"):
                assert getattr(ours, name) == getattr(theirs, name), name
        assert run.kv_shape == tuple(llm.engine.kv_cache.kv.shape)
        assert run.dims == {**llm.loaded.config.dims(), **llm.engine.cache_config.dims()}


# --- every supported config -----------------------------------------------------------------------------------------------


def check_config(config: ModelConfig) -> None:
    """A prompt, a decode and a last chunk: every layer has its rows, and the FLOPs are those of a plan."""
    query_lens, seq_lens = (3, 1, 2), (3, 7, 5)
    run = dry_run(config, query_lens, seq_lens, block_size=4)
    (step,) = run.steps
    assert run.dims.items() >= config.dims().items()
    assert {operation.layer for operation in step.operations} == {None, *range(config.num_layers)}
    pairs = sum(s * S - s * (s - 1) // 2 for s, S in zip(query_lens, seq_lens, strict=True))
    plan, count = step_flops(config, 6, pairs, 3), count_parameters(config)
    flops = {"linears": 0, "attend": 0, "lm_head": 0}
    weights = {}
    for operation in step.operations:
        part = "linears" if operation.function == "Linear.forward" else operation.function
        flops[part] = flops.get(part, 0) + (operation.flops or 0)
        weights |= {
            (operation.path, name): tensor.num_bytes
            for name, tensor in operation.tensors.items()
            if tensor.storage == "weight"
        }
    assert flops["linears"] == plan.projections + plan.mlp == 2 * 6 * (count.attention + count.mlp)
    assert (flops["attend"], flops["lm_head"]) == (plan.attend, plan.lm_head)
    tied = count.embedding if config.tie_word_embeddings else 0  # the head's row shows the embedding once more
    assert sum(weights.values()) == 2 * (count.total + tied)
    assert step.kv_bytes_per_token == kv_bytes_per_token(config)


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_every_preset_runs_dry_in_two_layers(config):
    check_config(replace(config, num_layers=2))


@pytest.mark.long
@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
def test_every_preset_runs_dry(config):
    check_config(config)


@pytest.mark.parametrize("path", [*TINY, *GGUF], ids=lambda path: path.name)
def test_every_tiny_model_runs_dry(path):
    check_config(read_config(str(path)))


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh"])
def test_every_activation_runs_dry(hidden_act):
    check_config(replace(read_config(str(TINY[0])), hidden_act=hidden_act))


def test_the_mlp_s_share_of_a_decode_is_the_planner_s():
    (step,) = dry_run(LLAMA3, [1], [2092]).steps
    parts = {"Linear.forward", "attend", "lm_head"}
    total = sum(operation.flops or 0 for operation in step.operations if operation.function in parts)
    mlp = sum(operation.flops or 0 for operation in step.operations if operation.label in ("gate_up_proj", "down_proj"))
    assert mlp / total == decode_flops(LLAMA3, 2092).mlp_share
    assert round(mlp / total, 4) == 0.7


def test_bytes_follow_the_dtype():
    config = read_config(str(TINY[0]))
    low, high = (dry_run(config, [4], dtype=dtype).steps[0] for dtype in ("bfloat16", "float32"))
    assert low.kv_bytes_per_token * 2 == high.kv_bytes_per_token
    linears = [[o.num_bytes for o in s.operations if o.function == "Linear.forward"] for s in (low, high)]
    assert [2 * num_bytes for num_bytes in linears[0]] == linears[1]


def test_many_requests_get_blocks_one_behind_the_other():
    config = replace(read_config(str(TINY[0])), num_layers=1)
    (step,) = dry_run(config, [1] * MAX_REQUESTS, [17] * MAX_REQUESTS).steps
    ids = [block_id for request in step.requests for block_id in request.block_ids]
    assert ids == list(range(1, 2 * MAX_REQUESTS + 1))
    assert {request.new_block_ids for request in step.requests} == {(block_id,) for block_id in ids[1::2]}
    assert step.requests[27].label == "AB"


# --- what the user names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lens"),
    [("4,1,1", ((4, 1, 1), (4, 1, 1))), (" 1@16 , 4@20", ((1, 4), (16, 20))), ("7", ((7,), (7,)))],
)
def test_lens(text, lens):
    assert parse_lens(text) == lens


@pytest.mark.parametrize("text", ["", ",", "4,", "4;1", "x", "-1", "1.5", "4@", "@4", "1@2@3", "4x3", "٣", "1" * 11,
                                  "1," * 9000])  # fmt: skip
def test_nonsense_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=r"expected the tokens that each request computes, such as 4,1,1") as info:
        parse_lens(text)
    assert len(str(info.value)) < 200 and "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("lens", "settings", "message"),
    [
        ([], {}, "lens names 0 requests"),
        ([1] * (MAX_REQUESTS + 1), {}, f"expected 1 to {MAX_REQUESTS}"),
        ([1, 2], {"seq_lens": [1]}, "names 2 requests but seq_lens 1"),
        ([0], {}, "request A has 0 tokens; expected 1 to 8192, the max_positions of llama-3-8b"),
        ([1, -4], {}, "request B has -4 tokens"),
        ([8193], {}, "request A has 8193 tokens"),
        ([1], {"seq_lens": [8193]}, "request A has 8193 tokens"),
        ([10**5000], {}, "request A has"),
        ([1.5], {}, "request A has 1.5 tokens"),
        ([True], {}, "request A has True tokens"),
        ([4], {"seq_lens": [3]}, "request A computes 4 tokens but has 3 in all"),
        ([8192] * 129, {}, "the step computes 1056768 tokens; expected at most 1048576"),
        ([1], {"block_size": 0}, "block_size is 0"),
        ([1], {"dtype": "int8"}, "dtype 'int8' is not supported; expected one of float32, bfloat16"),
        ([1], {"attention": "flash"}, "attention backend 'flash' is unknown"),
    ],
)
def test_impossible_steps_are_refused_in_one_line(lens, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as info:
        dry_run(LLAMA3, lens, **settings)
    assert "\n" not in str(info.value)


def test_configs_by_name_and_by_path():
    folder = DATA / "tiny" / "llama_gqa"
    assert read_config("Llama-3-8B") is LLAMA3
    assert read_config(str(folder)) == read_config(str(folder / "config.json"))
    assert read_config(str(folder / "config.json")).name == "llama_gqa"
    assert read_config(str(folder / "config_v4.json")).name == "config_v4"
    assert read_config(str(DATA / "gguf" / "llama_f32.gguf")).num_layers == 2
    assert read_config().dims() == PRESETS["smollm2-135m"].dims()


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("llama-3-8", ConfigError, "there is no such file or folder, and 'llama-3-8' is no preset; did you mean llama-3-8b"),
        ("owner/llama-3-8b-instruct", ConfigError, "did you mean llama-3-8b"),  # nothing is fetched
        ("", ConfigError, "'' is no preset; expected one of llama-2-7b"),
        ("no/such/config.json", ModelFileError, "no/such/config.json"),
        ("no-such.gguf", ModelFileError, "no-such.gguf: does not exist"),
        (str(DATA / "logits_golden.json"), ConfigError, "logits_golden.json: config.json has no model_type"),
        (str(DATA / "gpt2"), ModelFileError, "config.json"),
    ],
)  # fmt: skip
def test_what_is_no_config_is_refused_in_one_line(source, error, message):
    with pytest.raises(error, match=re.escape(message)) as info:
        read_config(source)
    assert "\n" not in str(info.value)


def test_a_config_that_cannot_be_names_its_file(tmp_path):
    values = json.loads((DATA / "tiny" / "llama_gqa" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"num_key_value_heads": 3}))
    with pytest.raises(ConfigError, match=r"config\.json: num_heads 4 cannot share num_kv_heads 3"):
        read_config(str(path))
