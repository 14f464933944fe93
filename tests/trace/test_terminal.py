"""The text: within its width, ASCII, nothing lost between the rows and the totals."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from tinyllm import LLM, SamplingParams
from tinyllm.shapes import evaluate
from tinyllm.trace.record import AnswerRecord, RunRecord, Stats, sum_up
from tinyllm.trace.session import trace_steps
from tinyllm.trace.terminal import (
    WIDTH,
    Options,
    near_stages,
    render_completions,
    render_header,
    render_next,
    render_prompts,
    render_run,
    render_step,
    render_totals,
    stage_names,
)
from tinyllm.trace.terminal.rows import sum_costs
from tinyllm.trace.terminal.stage_view import is_stage
from tinyllm.trace.terminal.text import (
    cut_to,
    elide,
    fold_words,
    show_decimal,
    show_list,
    show_number,
    show_runs,
    strip_annotation,
    with_symbols,
)

WIDTHS = [60, 79, 80, 99, 100, 120, 138, 140, 160, 200]
VIEWS = [{}, {"full": True}, {"layers": (1,)}, {"layers": (0, 1)}, {"layers": (0, 1), "full": True}, {"step": 1},
         {"op": "attend"}, {"op": "rms_norm", "layers": (0, 1), "ridge": 8.2}, {"ridge": 1.0}]  # fmt: skip


def render(steps, **options) -> list[list[str]]:
    pairs = zip(steps, [None, *steps[:-1]], strict=True)
    return [list(render_step(step, previous, Options(**options))) for step, previous in pairs]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS)
def test_lines_are_ascii_and_fit(traced, view, width):
    llm, steps = traced
    options = Options(**view, width=width)
    lines = [line for step in render(steps, **view, width=width) for line in step]
    lines += render_header(["title"], {**llm.loaded.config.dims(), **llm.engine.cache_config.dims()}, options)
    lines += [*render_totals(sum_up(steps), options), *render_next(["--full", "--op attend"] * 9, options)]
    for line in lines:
        assert len(line) <= width and line.isascii() and line == line.rstrip(), line


@pytest.mark.parametrize("width", WIDTHS)
def test_a_width_loses_no_row_and_cuts_no_dimension(traced, width):
    """Narrower rows say less, but the same rows are there, with the same FLOPs and bytes; no shape ends in dots."""
    _, steps = traced
    for lines, usual in zip(render(steps, width=width), render(steps), strict=True):
        kinds, usual_kinds = (
            [line[:17].split()[:3] for line in text if line[0] in "PMERGWV=" and line[:11] != "P positions"]
            for text in (lines, usual)
        )  # the positions stand with the ids where there is room for both
        assert kinds[1:] == usual_kinds[1:]
        assert not [line for line in lines if re.search(r"\[[^\]]*\.\.\.", line) and line[0] in "MERGWV"]
        if 80 <= width <= 100:
            ends = [line.split()[-3:] for line in lines if line[0] in "MERGW"]
            assert ends == [line.split()[-3:] for line in usual if line[0] in "MERGW"]


def test_below_80_columns_a_row_has_symbols_alone_and_from_139_its_source(traced):
    _, steps = traced
    rows = {
        width: next(line for line in render(steps, width=width)[0] if "| qkv_proj" in line)
        for width in (79, 80, 139, 200)
    }
    assert "[T,H]@[H,qkv]" in rows[79] and "[4,64]" not in rows[79]
    assert "[T,H]@[H,qkv]" in rows[80] and "[4,64]" in rows[80]
    assert re.search(r"  layers/linear\.py:\d+$", rows[139])
    assert re.search(r"  layers/linear\.py:\d+ +Multiply each row by the weight$", rows[200])


def test_a_prefill_shows_one_layer_in_full_and_folds_the_others(traced):
    _, steps = traced
    lines = render(steps)[0]
    text = "\n".join(lines)
    assert "\n= layer 0 of 2 " in text and "layer 1" in text and "layer 1 of 2" not in text
    for row in ("qkv_proj", "rope q", "rope k", "write_kv", "gather_kv A", "attend A", "o_proj", "gate_up_proj",
                "silu_and_mul", "down_proj", "gather_rows", "lm_head", "sample", "cu_seqlens_q", "block_table"):  # fmt: skip
        assert sum(row in line for line in lines) >= 1, row
    assert re.search(r"^M \| qkv_proj +\[T,H\]@\[H,qkv\] -> \[T,qkv\] +\[4,64\]@\[64,128\]->\[4,128\] ", text, re.M)


def test_the_six_steps_of_attention_are_named(traced):
    llm, steps = traced
    names = ["grouped_q", "scores", "scaled", "masked", "weights", "out"]
    if llm.loaded.attention == "reference":
        text = "\n".join(render(steps, full=True)[0]).partition("R sample")[0]
        assert [name for name in re.findall(r"\|\. (\w+)", text) if name in names] == names
        lines = render(steps)[0]
        inside = lines[next(i for i, line in enumerate(lines) if "|. inside" in line) :][:3]
        assert [line[17:].split(maxsplit=2) for line in inside] == [
            ["[s,nk,g,d]", "[4,2,2,16]", "grouped_q, out"],
            ["[nk,g,s,S]", "[2,2,4,4]", "scores, scaled, masked, weights"],
            ["[s,S]", "[4,4]", "is_hidden"],
        ]


def test_a_decode_step_shows_what_differs_and_counts_the_rest(traced):
    _, steps = traced
    decode = render(steps)[3]
    assert len(decode) < len(render(steps, full=True)[3]) / 2
    text = "\n".join(decode)
    assert "attend A" in text and "attend B" in text and "as before" in text
    assert not re.search(r"^M \| qkv_proj", text, re.M)


def test_of_many_requests_two_are_shown_and_the_others_summed(tiny_llm):
    """The two are of both phases where a step has both; nothing is folded in a step that is asked for."""
    llm = tiny_llm(max_num_batched_tokens=8)
    requests = llm.make_requests(
        [[1, 2], [3], [4], [5], [6, 7, 8, 9, 10, 11]], SamplingParams(max_tokens=3, ignore_eos=True)
    )
    steps = list(trace_steps(llm, requests))
    assert [step.phase for step in steps[:3]] == ["prefill", "mixed", "decode"]
    shown = {0: "AB", 1: "AE", 2: "AB"}
    for index, labels in shown.items():
        lines = render(steps)[index]
        assert re.findall(r"attend ([A-E]) ", "\n".join(lines)) == list(labels)
        (row,) = [line for line in lines if " alike " in line]
        others = [request.label for request in steps[index].requests if request.label not in labels]
        assert f"{2 * len(others)} alike " in row and f"gather_kv, attend of {', '.join(others)} " in row
        rows = [row for row in steps[index].layer(0) if row.request in others]
        assert row.split()[-3:-1] == [
            show_number(sum(r.flops for r in rows)),
            show_number(sum(r.num_bytes for r in rows)),
        ]
        whole = render(steps, step=index)[index]
        assert "alike" not in "\n".join(whole) and sum("| attend" in line for line in whole) == len(labels) + len(
            others
        )


def test_the_usual_view_is_short(smollm2):
    """A prefill and a decode step of one prompt, with their totals: what a screen or a slide holds."""
    llm = LLM(smollm2, block_size=4, num_blocks=9, max_model_len=32)
    requests = llm.make_requests(["The capital of France is"], SamplingParams(max_tokens=2))
    steps = list(trace_steps(llm, requests, residual=True))
    assert [len(lines) for lines in render(steps)] == [41, 19]


def test_full_shows_every_row_of_every_step(traced):
    _, steps = traced
    for step, lines in zip(steps, render(steps, full=True, layers=(0, 1)), strict=True):
        rows = [line for line in lines if re.match(r"[MERGWV] ", line)]
        assert len(rows) == len(step.operations)
        assert "as before" not in "\n".join(lines)


def test_nothing_is_lost_between_the_rows_and_the_total(traced):
    """The FLOPs printed row by row and by fold add up to the step's total, to the three digits shown."""
    _, steps = traced
    for step, lines in zip(steps, render(steps), strict=True):
        counts = [
            line[79:86].strip()
            for line in lines
            if re.match(r"[MERGWV] |  (\| )?\d+ (as before|alike)|    layers? ", line)
        ]
        assert sum(map(parse_si, counts)) == pytest.approx(step.flops, rel=0.01)


def parse_si(text: str) -> float:
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1)
    return float(text.rstrip("kMGT")) * scale


def test_a_chunk_says_that_its_token_is_thrown_away(traced):
    _, steps = traced
    first = "\n".join(render(steps)[0])
    assert "A new +4 " in first and "4 of the 5 tokens left" in first and "thrown away" in first
    assert "0 tokens out" in first


# --- views ----------------------------------------------------------------------------------------------------------------


def test_full_shows_the_statement_that_made_each_local_and_the_formulas(traced):
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


def test_one_step_is_shown_whole_and_the_others_in_one_line(traced):
    _, steps = traced
    views = render(steps, step=2)
    assert [len(view) == 1 for view in views] == [index != 2 for index in range(len(steps))]
    assert views[0][0].startswith("= step 0 ") and "4 tokens in, 0 out" in views[0][0]
    assert "as before" not in "\n".join(views[2]) and any("| qkv_proj" in line for line in views[2])


def test_a_stage_is_shown_with_its_formulas_source_summary_and_tensors(traced):
    _, steps = traced
    lines = render(steps, op="qkv_proj", ridge=8.2)[0]
    facts = {line[5:18].strip(): line[18:] for line in lines if line.startswith("  |. ")}
    assert list(facts) == ["what", "source", "FLOPs", "reads", "writes", "intensity", "x", "weight", "result"]
    assert facts["what"].startswith("Multiply each row by the weight")
    assert re.fullmatch(r"tinyllm/layers/linear\.py:\d+", facts["source"])
    assert facts["FLOPs"] == "2*num_tokens*in_size*out_size = 2*4*64*128 = 65536 (exact)"
    assert facts["reads"] == "e*(num_tokens*in_size+in_size*out_size) = 4*(4*64+64*128) = 33792"
    assert facts["weight"] == "[qkv,H]=[128,64] float32  32.8kB weight  = self.weight"
    assert facts["intensity"] == "1.83 FLOPs per byte < ridge 8.2: memory-bound"
    assert sum(line.startswith("M 0 qkv_proj ") and line.endswith(" m") for line in lines) == 1


def test_the_formulas_with_numbers_give_the_costs(traced):
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


def test_a_module_is_asked_for_by_its_parameters_name(traced):
    _, steps = traced
    for module, labels in {
        "mlp": ["gate_up_proj", "silu_and_mul", "down_proj"], "input_layernorm": ["add_residual", "rms_norm"],
        "post_attention_layernorm": ["add_residual", "rms_norm"], "norm": ["add_residual", "rms_norm"],
    }.items():  # fmt: skip
        lines = render(steps, op=module, layers=(1,))[0]
        assert [line[2:17].split()[-1] for line in lines if re.match("[MERGWV] ", line)] == labels
        assert near_stages(module) == []
    assert "attend" in "".join(render(steps, op="self_attn")[0])


def test_an_equal_layer_refers_to_the_first_one(traced):
    _, steps = traced
    lines = render(steps, op="down_proj", layers=(0, 1))[0]
    assert [line[:13].strip() for line in lines if line.startswith("M ")] == ["M 0 down_proj", "M 1 down_proj"]
    assert lines[-1].strip() == "all as in layer 0"
    assert sum("|. weight" in line for line in lines) == 1


def test_every_row_has_a_name_that_op_takes(traced):
    _, steps = traced
    for operation in (operation for step in steps for operation in step.operations):
        assert near_stages(operation.label) == [], operation.label
        assert is_stage(operation, operation.label) and is_stage(operation, operation.function)
    assert near_stages("Attend A") == near_stages("ROPE q") == near_stages("Linear") == []
    assert near_stages("atend")[0] == "attend" and near_stages("qkv")[0] == "qkv_proj"
    assert near_stages("???") == stage_names()


def test_a_stage_that_a_step_has_not_is_said(traced):
    _, steps = traced
    assert render(steps, op="apply_min_p")[0][-1].strip() == "no row apply_min_p in this step and these layers"


# --- sums -----------------------------------------------------------------------------------------------------------------


def test_the_run_s_totals_are_the_sums_of_its_steps(traced):
    _, steps = traced
    totals = sum_up(steps)
    lines = list(render_totals(totals, Options()))
    flops, num_bytes = sum(step.flops for step in steps), sum(step.num_bytes for step in steps)
    tokens = sum(step.dims["num_tokens"] for step in steps)
    assert lines[0].startswith(f"= run total      {len(steps)} steps: {tokens} tokens in, 6 out ")
    assert lines[0].split()[-3:] == [show_number(flops), show_number(num_bytes), f"{flops / num_bytes:.1f}"]
    assert f"ledger: {sum(step.num_compared for step in steps)} sizes agree" in lines[0]
    rows = [line.split() for line in lines[3:-1]]
    assert [row[0] for row in rows] == list(dict.fromkeys(step.phase for step in steps)) == ["prefill", "decode"]
    assert sum(int(row[1]) for row in rows) == len(steps) and sum(int(row[2]) for row in rows) == tokens
    assert all(98 <= sum(int(share.strip("<%")) for share in row[-3:]) <= 102 for row in rows)
    assert lines[-1].startswith("! a token of decode moves ")


def test_a_run_of_one_phase_is_compared_with_nothing(traced):
    _, steps = traced
    assert len(list(render_totals(sum_up(steps[:1]), Options()))) == 1
    assert list(render_totals(sum_up([]), Options())) == []


def test_the_bytes_of_a_row_are_told_by_what_is_moved(traced):
    _, steps = traced
    shares = {operation.label: operation.bytes_by_storage for operation in steps[0].operations}
    for operation in (operation for step in steps for operation in step.operations):
        assert sum(operation.bytes_by_storage.values()) == operation.num_bytes
        assert min(operation.bytes_by_storage.values()) >= 0
    assert shares["qkv_proj"]["weights"] == 4 * 64 * 128, "the whole matrix"
    assert shares["embed_tokens"]["weights"] == 4 * 4 * 64, "four rows of the table"
    assert shares["write_kv"]["KV"] == 2 * 4 * 4 * 32 and shares["write_kv"]["weights"] == 0
    assert shares["gather_kv"]["KV"] > 0 == shares["attend"]["KV"], "attention reads the gathered copies"


def test_a_ridge_says_what_the_time_goes_into(traced):
    _, steps = traced
    (low,), (high,) = (
        [line for line in render(steps, ridge=ridge)[0] if "step 0 total" in line] for ridge in (9.5, 0.1)
    )
    assert re.search(r" memory-bound \(1\.\d < ridge 9\.5\) ", low)
    assert re.search(r" compute-bound \(1\.\d > ridge 0\.1\) ", high)
    assert sum_costs([steps[0]]).bound_us(2.0, 1e6) == max(steps[0].num_bytes, steps[0].flops / 2)


def test_kv_bytes_are_per_token_of_this_step_and_of_all_blocks(traced):
    llm, steps = traced
    each = llm.engine.kv_cache.num_bytes // llm.engine.cache_config.num_slots
    assert not any(line.startswith("P kv bytes") for line in render(steps)[0])
    (row,) = [line for line in render(steps, full=True)[0] if line.startswith("P kv bytes")]
    numbers = [
        each,
        4 * each,
        2 * each * steps[0].schedule.num_used_blocks,
        2 * each * (steps[0].schedule.num_blocks - 1),
    ]
    assert re.findall(r"([\d.]+[kMG]?)B\b", row) == [show_number(number) for number in numbers]


# --- what a recorder may add ----------------------------------------------------------------------------------------------


def test_the_residual_stream_is_one_line_whatever_the_width(traced, monkeypatch):
    _, steps = traced
    assert not any("residual rms" in line for line in render(steps)[0])
    grown = [replace(step, residual_rms=tuple(2.0 + 13 * i for i in range(30))) for step in steps]
    for width in WIDTHS:
        (row,) = [line for line in render(grown, width=width)[0] if "residual rms" in line]
        numbers = row.split("places")[1].split()
        assert len(row) <= width and numbers[0] == "2" and numbers[-1] == "379"
        assert ("..." not in numbers) == (len(numbers) == 30) == (width == 200)


def test_measured_times_stand_beside_the_least_that_is_possible(traced):
    _, steps = traced
    timed = [replace(steps[0], operations=tuple(replace(o, time_us=10.0) for o in steps[0].operations))]
    count = len(steps[0].operations)
    assert render(timed)[0] == render(steps[:1])[0], "only with has_time"
    for width in WIDTHS:
        (lines,) = render(timed, has_time=True, ridge=2.0, bandwidth=1e9, width=width)
        total = next(line for line in lines if "step 0 total" in line).split()
        assert re.search(r" T=4 tokens +(=+ )?\d+ ms(, traced)? ==$", lines[0]) and len(lines[0]) == width
        assert all(len(line) <= width for line in lines)
        if width < 80:
            assert total[-1] == show_number(10 * count)
        else:
            assert total[-2] == show_number(10 * count)
            assert total[-1] == show_number(1e-3 * max(steps[0].num_bytes, steps[0].flops / 2))


def test_values_are_told_of_each_tensor_where_they_are_known(traced):
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
    assert "|. torch        aten.mm -> [2,3]; aten.t;" in texts
    for width in WIDTHS:
        assert all(len(line) <= width for line in render([step], op="attend", has_values=True, width=width)[0])


def test_a_step_that_failed_shows_what_came_before_it(traced):
    _, steps = traced
    failed = replace(steps[0], failure="layers.1.mlp (mlp.py:20): RuntimeError: no\nmemory", batch_values={}, batch={},
                     operations=steps[0].operations[:5])  # fmt: skip
    text = "\n".join(render([failed])[0])
    assert "! the step ended here: layers.1.mlp (mlp.py:20): RuntimeError: no\\nmemory" in text
    assert "token_ids" not in text and "sampled" not in text


# --- other signs ----------------------------------------------------------------------------------------------------------


def test_unicode_changes_signs_and_nothing_else(traced):
    _, steps = traced
    for ascii_lines, lines in zip(render(steps), render(steps, is_unicode=True), strict=True):
        assert any("\N{RIGHTWARDS ARROW}" in line for line in lines) and "->" not in "".join(lines)
        plain = [line.translate({0x2502: "|", 0x2550: "=", 0x251C: "|"}) for line in lines]
        assert [len(line) <= WIDTH for line in plain] == [True] * len(ascii_lines)
        assert [line.split()[-1] for line in plain] == [line.split()[-1] for line in ascii_lines]


def test_a_whole_run_is_its_parts(traced):
    llm, steps = traced
    run = RunRecord("tiny", "float32", "", (2, 2, 8, 2, 4, 8), 123456, llm.loaded.config.dims(), (), tuple(steps),
                    (AnswerRecord("A", "text", (1,), "stop", 0),), prefix_caching=False)  # fmt: skip
    text = "\n".join(render_run(run))
    assert text.startswith(
        "tiny  float32\npool   KV cache [L,2,NB,bs,nk,d]=[2,2,8,2,4,8] 0.1MB, 7.72kB a token; no prefix caching\n"
    )
    assert all("\n".join(step) in text for step in render(steps))
    assert "; no prefix caching\n" in text and text.endswith("\nA stop: 'text'")


def test_tokens_cannot_move_the_cursor_and_wide_ones_are_measured():
    text = "\x1b[2J\n\t日本語" * 20
    (line,) = render_prompts([("A", text, [["\x1b[2J", "\n", "\t日本語" * 20]])])
    assert line.isprintable() and "\\x1b[2J" in line
    assert sum(2 if ord(char) > 0x2E80 else 1 for char in line) <= WIDTH


def test_an_answer_stays_on_its_line_within_the_width():
    lines = list(render_completions([("A", "length", "word " * 100), ("B", "stop", "\x9b31m\u202eab")]))
    assert [len(line) for line in lines] == [WIDTH, len("B stop: '\\x9b31m\\u202eab'")]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (14_400_000, "14.4M"),
        (999_499, "999k"),
        (999_500, "1.00M"),
        (5e15, "5000T"),
    ],
)
def test_numbers_keep_three_digits(value, text):
    assert show_number(value) == text


def test_lists_andshow_runs():
    assert show_list([1, 2]) == "[1,2]"
    assert show_list(range(20)) == "[0,1,2,3,4,...,18,19]"
    assert show_runs([4, 5, 6, 12, 20, 21]) == "4..6,12,20..21"
    assert cut_to("abcdefgh", 6) == "abc..."


def test_texts_fold_between_words_and_lists_leave_out_their_middle():
    assert list(fold_words("dims   ", ["a=1 b", "c=2 d", "e" * 30], 20)) == [
        "dims   a=1 b  c=2 d",
        "       eeeeeeeeee...",
    ]
    assert elide(list("abcdefghij"), 11, " ") == "a b ... i j"
    assert elide(list("abcd"), 7, " ") == "a b c d"
    widths = [len(show_list(range(1000), width)) for width in range(30, 60)]
    assert all(size <= width for size, width in zip(widths, range(30, 60), strict=True))
    assert all(0 <= later - size <= 5 for size, later in pairwise(widths))


def test_statements_and_formulas_in_symbols():
    assert strip_annotation('y: Float[Tensor, "num_tokens 1"] = f( x, dim=-1, )', "y") == "= f(x, dim=-1)"
    assert strip_annotation("q, k, v = heads.split([1, 2])", "k") == "= heads.split([1, 2])"
    assert strip_annotation("del x", "x") == "del x"
    assert with_symbols("2*num_tokens*q_size+e") == "2*T*nq*d+e"
    assert [show_decimal(v) for v in (0, 0.01234, -2.06, 42.3, 423.4, 1e9)] == [
        "0",
        "0.012",
        "-2.1",
        "42",
        "423",
        "1e+09",
    ]
