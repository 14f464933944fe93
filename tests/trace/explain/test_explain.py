"""How a word is asked for: as the trace prints it, misspelt, or by another project's name; and how the answer reads."""

import pytest

from tinyllm import ConfigError
from tinyllm.shapes import WORDS
from tinyllm.trace.explain import explain, explainable
from tinyllm.trace.explain.aliases import ALIASES, PARTS, alias_names


def test_lines_fit_and_never_end_in_blanks(pair):
    assert len(explainable()) > 200
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


def test_all_meanings_are_listed_and_cases_are_told_apart(meanings):
    assert [meaning[""][0].partition(":")[0] for meaning in meanings("R")] == ["R", "R"]
    assert len(meanings("positions")) == 2
    assert explain("s")[-1] == "Not to be confused with S, which --explain also knows."
    assert explain("S")[0].startswith("S: seq_len")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("num_token", "did you mean num_tokens"),
        ("query_start_loq", "did you mean query_start_loc"),
        ("e*T*nq*d+8*T", "did you mean e or T or nq or d"),
        ("atend", "did you mean attend"),
        ("zzzzzz", "expected what the trace prints"),
        ("", "expected what the trace prints"),
    ],
)
def test_an_unknown_word_names_its_neighbours(asked, hint):
    with pytest.raises(ConfigError) as error:
        explain(asked)
    assert hint in str(error.value) and "\n" not in str(error.value)


# --- other projects' names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said", "title"),
    [
        ("query_start_loc", "query_start_loc is vLLM's name of cu_seqlens_q.", "cu_seqlens_q [R+1]"),
        ("Query_Start_Loc", "query_start_loc is vLLM's name of cu_seqlens_q.", "cu_seqlens_q [R+1]"),
        ("num_actual_tokens", "num_actual_tokens is vLLM's name of num_tokens.", "T: num_tokens"),
        ("max_num_blocks_per_req", "max_num_blocks_per_req is vLLM's name of max_blocks.", "MB: max_blocks"),
        ("num_attention_heads", "num_attention_heads is Hugging Face's name of num_heads.", "nq: num_heads"),
        ("num_key_value_heads", "num_key_value_heads is Hugging Face's name of num_kv_heads.", "nk: num_kv_heads"),
        ("input_ids", "input_ids is vLLM's and Hugging Face's name of token_ids.", "token_ids [T]"),
        ("attn_weights", "attn_weights is Hugging Face's name of scores and weights.", "scores [nk,g,s,S]"),
        ("q_proj", "q_proj is Hugging Face's name; its part is played here by qkv_proj.", "qkv_proj: the Linear"),
        ("model.layers.3.mlp.up_proj", "up_proj is Hugging Face's name; its part is", "gate_up_proj: the Linear"),
        ("wq", "wq is Llama's own name; its part is played here by qkv_proj.", "qkv_proj: the Linear"),
        ("wk", "wk is Llama's own name; its part is played here by qkv_proj.", "qkv_proj: the Linear"),
        (
            "layers.0.attention.wv",
            "wv is Llama's own name; its part is played here by qkv_proj.",
            "qkv_proj: the Linear",
        ),
        ("wo", "wo is Llama's own name; its part is played here by o_proj.", "o_proj: the Linear"),
        ("w1", "w1 is Llama's own name; its part is played here by gate_up_proj.", "gate_up_proj: the Linear"),
        ("W3", "w3 is Llama's own name; its part is played here by gate_up_proj.", "gate_up_proj: the Linear"),
        ("w2", "w2 is Llama's own name; its part is played here by down_proj.", "down_proj: the Linear"),
        ("c_attn", "c_attn is GPT-2's name; its part is played here by qkv_proj.", "qkv_proj: the Linear"),
        ("c_fc", "c_fc is GPT-2's name; its part is played here by gate_up_proj.", "gate_up_proj: the Linear"),
        ("c_proj", "c_proj is GPT-2's name of o_proj; its MLP has a c_proj as well, which is down_proj", "o_proj: the"),
        ("page_size", "page_size is Hugging Face's name of block_size;", "bs: block_size"),
        ("hidden_dim", "hidden_dim is others' name of hidden_size;", "H: hidden_size"),
        ("batch_size", "batch_size is others' name of num_reqs;", "R: num_reqs"),
        ("context_len", "context_len is others' name of seq_len;", "S: seq_len"),
    ],
)
def test_another_project_s_name_leads_to_ours(asked, said, title):
    lines = explain(asked)
    assert lines[0].startswith(said)
    assert lines[lines.index("") + 1].startswith(title)


NEVER = {"batch_size", "d_model", "dim", "d_ff", "n_layer", "n_local_heads", "n_rep", "d_k", "head_size", "context_len",
         "page_size", "n_head", "n_heads", "n_layers"}  # fmt: skip


def test_every_name_that_we_avoid_or_note_leads_to_one_of_ours():
    """Those that the design forbids, and each synonym of the glossary."""
    synonyms = {name for word in WORDS.values() for name in (word.vllm, word.huggingface) if name.isidentifier()}
    for name in NEVER | synonyms:
        assert explain(name), name
    assert all(word.name in explain(word.vllm)[0] for word in WORDS.values() if word.vllm.isidentifier())
    assert all(ours in explainable() and ours not in NEVER for ours, *_ in (*ALIASES.values(), *PARTS.values()))
    assert not {*ALIASES, *PARTS} & set(explainable()), "a word of our own needs no alias"
    assert not ALIASES.keys() & PARTS.keys()


def test_a_line_about_a_foreign_name_fits():
    assert len(alias_names()) > 80
    assert all(len(line) <= 100 for name in alias_names() for line in explain(name))
