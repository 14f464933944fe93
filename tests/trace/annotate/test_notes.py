"""What stands below single lines: shapes side by side, and what did not run."""

import pytest

from tinyllm import SamplingParams
from tinyllm.trace.annotate import MARK, Run, annotate, record_calls


def below(lines: list[str], start: str) -> list[str]:
    """The notes below the first line that starts so."""
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(start))
    while not lines[at + 1].lstrip().startswith(MARK):
        at += 1
    found = []
    for line in lines[at + 1 :]:
        if not line.lstrip().startswith(MARK):
            return found
        found.append(" ".join(line.split()))
    return found


def test_attention_side_by_side(plain):
    lines = annotate("tinyllm/layers/attention/reference.py", plain)
    assert below(lines, "scores:") == ["#| scores [nk,g,s,S] prefill [2,2,5,5] decode [2,2,1,6]"]
    assert below(lines, "is_hidden:") == ["#| is_hidden [s,S] prefill [5,5] decode [1,6]"]
    assert below(lines, "def attend(")[:3] == [
        "#| call layers.1.self_attn, for A: one of 4 calls, 2 had other shapes",
        "#| q [s,nq,d] prefill [5,4,16] decode [1,4,16]",
        "#| k [S,nk,d] prefill [5,2,16] decode [6,2,16]",
    ]
    assert lines[2:4] == ["#| prefill  step 0: A computes 5 of 5 tokens, B computes 3 of 3 tokens",
                          "#| decode   step 1: A computes 1 of 6 tokens, B computes 1 of 4 tokens"]  # fmt: skip
    assert "#|   S      seq_len       tokens of one request in total, this step included: its key axis" in lines


def test_columns_stand_below_each_other(plain):
    lines = annotate("layers/attention/reference.py", plain)
    rows = [line for line in lines if line.startswith("    #|") and "decode [" in line and "[nk,g,s,S]" in line]
    assert len(rows) > 3 and len({line.index("decode") for line in rows}) == 1


def test_the_layer_is_the_reader_s_choice(plain):
    """Layer 0 has no residual yet; layer 1 has."""
    assert "#| residual [T,H] prefill [8,64] decode [2,64]" in below(annotate("layers/norm.py", plain), "def forward")
    first = below(annotate("layers/norm.py", plain, layer=0), "def forward")
    assert "#| residual [T,H] prefill no tensor decode no tensor" in first
    assert first[0] == "#| call layers.0.input_layernorm: one of 5 calls, 4 had other shapes"


def test_a_name_that_a_loop_carries_is_noted_at_both_places(plain):
    lines = annotate("model.py", plain)
    assert below(lines, "x: Float") == ["#| x [T,H] prefill [8,64] decode [2,64]"]
    assert below(lines, "x, residual = layer(")[0] == "#| x [T,H] prefill [8,64] decode [2,64]"


def test_fields_of_the_batch(plain):
    lines = annotate("batch.py", plain)
    assert below(lines, "cu_seqlens_q: Int") == ["#| cu_seqlens_q [R+1] prefill [3] decode [3]"]
    assert below(lines, "block_table: Int") == ["#| block_table [R,MB] prefill [2,2] decode [2,2]"]


def test_what_is_returned_stands_below_the_return(plain):
    """And a dataclass's fields below the call that makes it."""
    lines = annotate("layers/attention/gqa.py", plain)
    assert below(lines, "return rearrange(x,") == ["#| result [T,nq*d] prefill [8,64] decode [2,64]"]
    assert below(lines, "return q, k, v")[0] == "#| result[0] [T,nq,d] prefill [8,4,16] decode [2,4,16]"
    batch = annotate("batch.py", plain)
    assert "#| cu_seqlens_q [R+1] prefill [3] decode [3]" in below(batch, "return FlatBatch(")
    assert "#| logits_indices [N] prefill [2] decode [2]" in below(batch, "return FlatBatch(")


def test_names_without_an_annotation_have_the_words_under_which_they_are_returned(plain):
    lines = annotate("layers/attention/gqa.py", plain)
    assert below(lines, "q, k, v = heads.split(")[1] == "#| k [T,nk,d] prefill [8,2,16] decode [2,2,16]"


def test_a_list_shows_each_request_s_tensor(plain):
    lines = annotate("layers/attention/per_request.py", plain)
    assert below(lines, "outputs = [") == ["#| outputs [s,nq,d] prefill [5,4,16] [3,4,16] decode [1,4,16] [1,4,16]"]


def test_a_list_that_is_handed_in_shows_its_items(plain):
    lines = annotate("layers/attention/per_request.py", plain)
    assert "#| pieces [s,nq,d] prefill [5,4,16] [3,4,16] decode [1,4,16] [1,4,16]" in below(lines, "def lay_flat(")


def test_a_call_inside_an_expression_is_not_taken_for_its_value(tiny_llm):
    """``x = (x ^ shift(x, 30)) * y``: the shape of shift's result need not be that of x."""
    llm = tiny_llm("llama_gqa", max_model_len=32)
    runs = record_calls(
        llm, [[5, 6, 7, 8, 9], [40, 41, 42]], SamplingParams(temperature=0.8, seed=1, max_tokens=2, ignore_eos=True)
    )
    lines = annotate("sampler/noise.py", runs)
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("x = (x ^ _shift_right(x, 30))"))
    assert MARK not in lines[at + 1]
    assert below(lines, "return x ^ _shift_right(x, 31)") == ["#| result prefill [2] decode [2]"]


# --- what did not run -------------------------------------------------------------------------------------------------


def test_what_did_not_run_is_marked_once(plain):
    lines = annotate("layers/rope.py", plain)
    body = lines[next(i for i, line in enumerate(lines) if "def rope_divisors" in line) :]
    body = body[: next(i for i, line in enumerate(body) if line.startswith("class "))]
    assert sum("not run here" in line for line in body) == 1
    at = next(i for i, line in enumerate(body) if "not run here" in line)
    assert body[at + 1] == '    if scaling.rope_type == "factors":'
    assert below(annotate("sampler/noise.py", plain), "def mix(") == ["#| not run here"]


def test_a_function_that_one_step_alone_reached(plain):
    """A line that no step reached is told from one that the decode did not reach."""
    prefill, decode = plain
    ran = {key: frozenset() for key in decode.lines}
    half = Run(decode.label, decode.title, decode.model, decode.calls, ran, decode.requests)
    assert any("not run here in decode" in line for line in annotate("layers/mlp.py", (prefill, half)))
    without = Run(decode.label, decode.title, decode.model, (), {}, ())
    lines = annotate("layers/mlp.py", (prefill, without))
    assert below(lines, "activated: Float") == ["#| activated [T,I] prefill [8,112] decode -"]


def test_only_the_return_that_was_reached_has_a_result(plain):
    lines = annotate("layers/rope.py", plain)
    assert below(lines, "return ones") == ["#| result [d/2] prefill [8] decode [8]", "#| not run here"]
    at = next(i for i, line in enumerate(lines) if "return torch.tensor(scaling.factors" in line)
    assert MARK not in lines[at + 1]
    other = Run("decode", "step 1", "model", plain[1].calls, {key: frozenset() for key in plain[1].lines}, ("A", "B"))
    lines = annotate("layers/attention/gqa.py", (plain[0], other))
    assert below(lines, "return rearrange(x,") == ["#| result [T,nq*d] prefill [8,64] decode -"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("sampler/noise.py", "#| No line of it made a tensor. Greedy requests need none of it; add --temperature 0.8."),
        (
            "layers/attention/sdpa.py",
            "#| No line of it made a tensor. This run has another attention body; add --attention sdpa.",
        ),
        ("layers/__init__.py", "#| No line of it made a tensor."),
    ],
)
def test_a_file_that_did_not_run_says_how_it_would(plain, path, said):
    assert said in annotate(path, plain)
    assert not any("No line of it" in line for line in annotate("layers/mlp.py", plain))
