"""Every word of the trace is explained, with the numbers of the step that is asked about."""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from tinyllm import ConfigError, SamplingParams
from tinyllm.shapes import WORDS, evaluate
from tinyllm.trace import explain as explain_module
from tinyllm.trace import notes
from tinyllm.trace.costs import KIND_LETTERS, STAGES
from tinyllm.trace.dims import field_words, function_specs
from tinyllm.trace.explain import PACKAGE, batch_fields, explain, explainable, tensor_files, tensor_functions
from tinyllm.trace.record import StepRecord, to_symbol
from tinyllm.trace.session import trace_steps

SPECS = tensor_functions()
LOCALS = [(spec, name) for spec in SPECS for name in spec.locals]


@pytest.fixture(scope="module")
def pair(tiny_llm) -> list[StepRecord]:
    """A prefill of five and three tokens and its decodes, in blocks of four."""
    llm = tiny_llm("llama_gqa", block_size=4, num_blocks=9, max_model_len=32)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return list(trace_steps(llm, llm.make_requests([[5, 6, 7, 8, 9], [40, 41, 42]], params)))


def meanings(word: str, step: StepRecord | None = None) -> list[dict[str, list[str]]]:
    """The parts of each meaning by label, the title under ""; wrapped lines are joined."""
    found: list[dict[str, list[str]]] = []
    label = ""
    for line in explain(word, step):
        if line.startswith("Not to be confused"):
            break
        if line and not line.startswith("  "):
            found.append({"": [line]})
        elif line.startswith("    ") and not line.startswith(" " * 10):
            raise AssertionError(f"an odd indentation: {line!r}")
        elif line.startswith(" " * 10):
            found[-1][label].append(line.strip())
        elif line:
            label, text = line[2:10].strip(), line[10:]
            found[-1][label] = [text]
    return found


def one(word: str, title: str, step: StepRecord | None = None) -> dict[str, list[str]]:
    """The only meaning whose title starts so."""
    fitting = [meaning for meaning in meanings(word, step) if meaning[""][0].startswith(title)]
    assert len(fitting) == 1, [meaning[""] for meaning in meanings(word, step)]
    return fitting[0]


def has_parts(meaning: dict[str, list[str]], *labels: str) -> bool:
    return all("".join(meaning.get(label, [])).strip() for label in labels)


# --- everything has an explanation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_every_dimension(word, pair):
    for name in (word.name, word.symbol):
        meaning = one(name, f"{word.symbol}: {word.name}", pair[0])
        assert has_parts(meaning, "is", "why", "here", "names", "axis of", "code")
    assert not word.why.endswith("."), "as a meaning, it is no sentence"
    line = int(meaning["code"][0].rpartition(":")[2])
    assert f'Word("{word.name}"' in (PACKAGE / "shapes.py").read_text().splitlines()[line - 1]


@pytest.mark.parametrize(("class_name", "name"), batch_fields())
def test_every_tensor_of_the_batch(class_name, name, pair):
    symbols = ",".join(map(to_symbol, field_words(PACKAGE / "batch.py", class_name)[name]))
    meaning = one(name, f"{name} [{symbols}]: a tensor of {class_name}", pair[0])
    assert has_parts(meaning, "is", "why", "here", "names", "code")
    line = int(meaning["code"][0].rpartition(":")[2])
    assert f"{name}:" in (PACKAGE / "batch.py").read_text().splitlines()[line - 1]


@pytest.mark.parametrize("name", STAGES)
def test_every_stage(name, pair):
    letter, kind = KIND_LETTERS[STAGES[name].kind], STAGES[name].kind
    meaning = one(name, f"{name}: a stage, kind {letter} ({kind})", pair[0])
    assert has_parts(meaning, "is", "why", "shapes", "here", "costs", "names", "code")
    assert meaning["here"] != ["no row of this step"] or name not in {o.function for o in pair[0].operations}
    places = {f"tinyllm/{s.file.relative_to(PACKAGE).as_posix()}:{s.first_line}" for s in SPECS if s.qualname == name}
    assert meaning["code"][0] in places


@pytest.mark.parametrize(("spec", "name"), LOCALS, ids=[f"{spec.qualname}-{name}" for spec, name in LOCALS])
def test_every_annotated_local(spec, name, pair):
    symbols = f"[{','.join(map(to_symbol, spec.locals[name]))}]"
    fitting = [meaning for meaning in meanings(name, pair[0]) if meaning[""][0].startswith(f"{name} {symbols}")]
    assert len(fitting) == 1
    assert has_parts(fitting[0], "is", "why", "code")


@pytest.mark.parametrize(("kind", "letter"), KIND_LETTERS.items())
def test_every_kind(kind, letter, pair):
    for name in (kind, letter):
        meaning = one(name, f"{letter}: a kind of row, {kind}", pair[0])
        assert has_parts(meaning, "is", "why", "here", "rows", "code")


def test_every_axis_of_every_annotation():
    annotated = (
        words for spec in SPECS for words in chain(spec.arguments.values(), spec.locals.values(), spec.results)
    )
    fields = (field_words(PACKAGE / "batch.py", class_name)[name] for class_name, name in batch_fields())
    axes = {word for words in chain(annotated, fields) for word in words or ()}
    assert axes <= set(explainable()) and len(axes) > 20


def test_the_notes_name_what_there_is():
    qualnames = {spec.qualname for spec in SPECS}
    arguments = [(spec.qualname, name) for spec in SPECS for name, words in spec.arguments.items() if words]
    assert notes.FIELDS.keys() == set(batch_fields())
    assert STAGES.keys() <= notes.FUNCTIONS.keys() <= qualnames
    assert notes.MODULES.keys() == {module.name for module in explain_module._modules()}
    assert notes.LOCALS.keys() <= {*((spec.qualname, name) for spec, name in LOCALS), *arguments}
    assert notes.CARE.keys() <= WORDS.keys()
    assert notes.KINDS.keys() == KIND_LETTERS.keys()


def test_no_shape_is_typed_into_a_reason(typed_shape):
    texts = [word.why for word in WORDS.values()]
    for module in (explain_module, notes):
        tree = ast.parse(Path(module.__file__ or "").read_text())
        texts += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert [text for text in texts if typed_shape.search(text)] == []


# --- the numbers ------------------------------------------------------------------------------------------------------


def sizes_said(lines: list[str]) -> Iterator[tuple[str, int]]:
    """(word, size) of every ``T = 8: num_tokens, ...`` and ``q_size = num_heads*head_dim = 4*16 = 64``."""
    for line in lines:
        if match := re.match(r" *(?:why +)?(\S+) = (\d+): ([\w+]+),", line):
            assert to_symbol(match[3]) == match[1]
            yield match[3], int(match[2])
        for match in re.finditer(r"\b([a-z_]+) = .* = (\d+)$", line):
            if match[1] in WORDS:
                yield match[1], int(match[2])


def test_numbers_are_those_of_the_step(traced):
    _, steps = traced
    said = [
        (word, size, step) for step in steps for name in explainable() for word, size in sizes_said(explain(name, step))
    ]
    assert {word for word, _, _ in said} >= {
        "num_tokens",
        "num_reqs+1",
        "q_size",
        "qkv_size",
        "vocab_size",
        "max_blocks",
    }
    assert [(word, size) for word, size, step in said if evaluate(word, step.dims) != size] == []


def test_each_request_s_numbers(traced):
    _, steps = traced
    for step in steps:
        for name, attribute in (("query_len", "query_len"), ("seq_len", "seq_len")):
            expected = [f"{to_symbol(name)} = {getattr(r, attribute)} for {r.label}" for r in step.requests]
            assert [line.partition(":")[0] for line in meanings(name, step)[0]["here"]] == expected


def test_shapes_are_those_of_the_rows(traced):
    """Every tensor of every row in a layer's first occurrence is shown under its name with its shape."""
    _, steps = traced
    checked = 0
    for step in steps:
        for operation in step.layer(None) + step.layer(1):
            spec = next(s for s in SPECS if s.qualname == operation.function and str(s.first_line) in operation.source)
            for name, tensor in operation.tensors.items():
                if name in spec.locals:
                    row = operation.label + (f" {operation.request}" if operation.request else "")
                    text = " ".join(explain(name, step))
                    assert f"{row} [{','.join(map(str, tensor.shape))}]" in text
                    checked += 1
    assert checked > 50


def test_batch_tensors_show_their_values(traced):
    _, steps = traced
    for step in steps:
        meaning = one("cu_seqlens_q", "cu_seqlens_q", step)
        ends = ",".join(map(str, step.batch_values["cu_seqlens_q"]))
        assert meaning["here"][0] == f"[R+1] = [{len(step.requests) + 1}] = [{ends}]"
        assert meaning["here"][-1] == f"R+1 = {len(step.requests) + 1}: {len(step.requests)} + 1"


@pytest.mark.parametrize(
    ("word", "index", "said"),
    [
        ("T", 0, ["T = 8 = 5 + 3: A computes 5 tokens, B 3"]),
        ("T", 1, ["T = 2 = 1 + 1: A computes 1 token, B 1"]),
        ("R", 0, ["R = 2: A, B"]),
        ("N", 0, ["N = 2: the last row of A, B"]),
        ("MB", 0, ["MB = 2: A holds 2 blocks, B 1"]),
        ("NB", 0, ["NB = 9 = 1 null + 3 held + 5 free"]),
        ("s", 1, ["s = 1 for A: 1 of 1 left to compute, behind 5 computed before",
                  "s = 1 for B: 1 of 1 left to compute, behind 3 computed before"]),
        ("S", 1, ["S = 6 for A: 5 computed before + 1 in this step",
                  "S = 4 for B: 3 computed before + 1 in this step"]),
        ("nb", 0, ["nb = 2 for A: (5 + 4 - 1) / 4, rounded down; its blocks are 1, 2",
                   "nb = 1 for B: (3 + 4 - 1) / 4, rounded down; its blocks are 3"]),
        ("g", 0, ["g = 2: group_size = num_heads / num_kv_heads = 4 / 2 = 2"]),
        ("qkv", 0, ["qkv = 128: qkv_size = q_size + 2*kv_size = 64 + 2*32 = 128",
                    "with q_size = num_heads*head_dim = 4*16 = 64",
                    "with kv_size = num_kv_heads*head_dim = 2*16 = 32"]),
        ("ban", 0, ["ban = 0"]),
        ("heads", 0, ["h = 8 in split_heads", "h = 4 in rope q, the caller's num_heads",
                      "h = 2 in rope k, the caller's num_kv_heads"]),
        ("scores", 0, ["attend A [2,2,5,5]", "attend B [2,2,3,3]"]),
        ("seq_lens", 1, ["[R] = [2] = [6,4]", "6 + 4 = 10 keys are read by T = 2 rows"]),
        ("pairs", 0, ["A 15 of 25, B 6 of 9"]),
        ("qkv_proj", 0, ["qkv_proj [8,64]@[64,128] -> [8,128], 2 times"]),
    ],
)  # fmt: skip
def test_reasons_in_numbers(pair, word, index, said):
    assert meanings(word, pair[index])[0]["here"] == said


def test_the_rows_of_a_stage_and_its_costs(pair):
    attend = meanings("attend", pair[0])
    rows = [operation for operation in pair[0].operations if operation.function == "attend"]
    assert attend[0]["here"][0] == f"attend A [5,4,16].[5,2,16] -> [5,4,16], {len(rows) // 2} times"
    assert attend[0]["costs"][0] == f"FLOP 4*num_heads*head_dim*pairs = {rows[0].flops:,} for attend A"
    assert attend[1]["here"] == ["this run used the other body"]


def test_a_budget_that_cuts_a_prompt_is_named(traced):
    _, steps = traced
    assert "s = 4 for A: 4 of 5 left to compute, cut by the token budget" in " ".join(explain("s", steps[0]))


# --- how it is asked, and how it reads --------------------------------------------------------------------------------


def test_lines_fit_and_never_end_in_blanks(pair):
    for step in (None, *pair):
        for word in explainable():
            assert all(len(line) <= 100 and line == line.rstrip() for line in explain(word, step)), word


@pytest.mark.parametrize(
    ("asked", "title"),
    [
        ("T", "T: num_tokens"),
        (" num_tokens ", "T: num_tokens"),
        ("[R+1]", "R+1: num_reqs+1"),
        ("num_reqs+1", "R+1: num_reqs+1"),
        ("2", "2: an axis"),
        ("nq*d", "nq*d: q_size"),
        ("rope q", "apply_rope: a stage"),
        ("gather_kv A", "gather_kv: a stage"),
        ("layers.0.self_attn.qkv_proj", "qkv_proj: the Linear of GroupedQueryAttention"),
        ("Linear", "Linear.forward: a stage"),
        ("ATTEND", "attend: a stage"),
        ("Matmul", "M: a kind of row"),
        ("F/B", "F/B: a number"),
        ("causal_mask", "causal_mask: a function"),
        ("mlp", "mlp: the MLP of DecoderLayer"),
    ],
)
def test_a_word_is_found_as_the_trace_prints_it(asked, title):
    assert explain(asked)[0].startswith(title)


def test_all_meanings_are_listed_and_cases_are_told_apart():
    assert [meaning[""][0].partition(":")[0] for meaning in meanings("R")] == ["R", "R"]
    assert len(meanings("positions")) == 2
    assert explain("s")[-1] == "Not to be confused with S, which --explain also knows."
    assert explain("S")[0].startswith("S: seq_len")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("num_token", "did you mean num_tokens"),
        ("cu_seqlens", "did you mean cu_seqlens_q"),
        ("atend", "did you mean attend"),
        ("zzzzzz", "expected what the trace prints"),
        ("", "expected what the trace prints"),
    ],
)
def test_an_unknown_word_names_its_neighbours(asked, hint):
    with pytest.raises(ConfigError) as error:
        explain(asked)
    assert hint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("word", "pitfall"),
    [
        ("cu_seqlens_q", "why the +1"),
        ("split_heads", "why no transpose"),
        ("merge_heads", "why do others transpose"),
        ("Linear", "stored with one row per output"),
        ("qkv_proj", "stored with one row per output"),
        ("num_blocks", "none of its axes is a sequence length"),
        ("block_size", "none of its axes is a sequence length"),
        ("layer_kv", "none of its axes is a sequence length"),
        ("seq_lens", "do not add up to its rows"),
        ("query_len", "do not add up to its rows"),
    ],
)
def test_what_readers_trip_over_is_said(word, pitfall):
    assert pitfall in " ".join(" ".join(explain(word)).split())


def test_a_stored_weight_stands_beside_the_one_in_use(pair):
    meaning = one("down_proj", "down_proj", pair[0])
    weight = next(o for o in pair[0].operations if o.label == "down_proj").tensors["weight"].shape
    assert meaning["weight"][0].startswith(f"stored as [H,I] = [{weight[0]},{weight[1]}]")
    assert f"@[{weight[1]},{weight[0]}]" in meaning["here"][0]
    assert meaning["shapes"] == ["[T,I]@[I,H] -> [T,H]"]


def test_a_failed_step_and_one_without_values_are_explained(pair):
    """A dry run has question marks for token ids; a failed step has no values at all."""
    values = {**pair[0].batch_values, "token_ids": ["?"] * 8}
    for changed in (values, {}):
        step = StepRecord(**{**vars(pair[0]), "batch_values": changed})
        for class_name, name in batch_fields():
            assert explain(name, step), class_name


def test_files_are_those_of_the_recorder():
    assert all(function_specs(file) is not None for file in tensor_files())
    assert {file.name for file in tensor_files()} >= {
        "batch.py",
        "kv_cache.py",
        "reference.py",
        "model.py",
        "sample.py",
    }
