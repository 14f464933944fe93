"""Other projects' names: those of a list, and those that the glossary and the notes put beside ours."""

import functools
import re
from collections.abc import Iterable, Iterator

from tinyllm.shapes import WORDS
from tinyllm.trace.explain.dictionary import meanings_by_word
from tinyllm.trace.explain.notes.fields import FIELDS
from tinyllm.trace.explain.notes.functions import FUNCTIONS, LOCALS, MODULES
from tinyllm.trace.explain.texts import join_and

VLLM, HUGGING_FACE = "vLLM's", "Hugging Face's"

ALIASES: dict[str, tuple[str, str, str]] = {  # name -> our word, whose name it is, what to bear in mind
    # Names that stand in no note of ours, or that would lead to two words.
    "attention": ("attend", "the usual", ""),
    "hidden_states": ("hidden", "vLLM's and Hugging Face's", "and of x, out and normed: all rows between two blocks"),
    "total_num_scheduled_tokens": ("num_tokens", VLLM, ""),
    "num_scheduled_tokens": ("query_len", VLLM, "it has one number for each request"),
    "num_queries_per_kv": ("group_size", VLLM, ""),
    "head_size": ("head_dim", VLLM, ""),
    "context_len": ("seq_len", "others'", "vLLM's context_len is seq_len - query_len: what was computed before"),
    "max_seq_len": ("seq_len", VLLM, "it is the longest of a step"),
    "max_query_len": ("query_len", VLLM, "it is the longest of a step"),
    "repeat_kv": ("grouped_q", HUGGING_FACE, "it copies keys and values for each query head; this view copies nothing"),
    "n_rep": ("group_size", HUGGING_FACE, "repeat_kv copies keys and values that often; here nothing is copied"),
    "page_size": ("block_size", HUGGING_FACE, "its continuous batching calls a block a page"),
    "block_tables": ("block_table", VLLM, "one row for each request"),
    "max_num_batched_tokens": ("token budget", VLLM, "the setting; the row shows how much of it a step uses"),
    "page_table": ("block_table", "some attention kernels'", ""),
    "max_blocks_per_request": ("max_blocks", HUGGING_FACE, ""),
    "past_key_values": ("KV", HUGGING_FACE, "transformers 5 calls it cache"),
    "kv_cache": ("KV", VLLM, ""),
    "cu_seqlens": ("cu_seqlens_q", "flash-attn's", "cu_seqlens_q counts queries; cu_seqlens_k would count keys"),
    "cu_seqlens_k": ("seq_lens", "flash-attn's", "it holds their sums; a paged kernel takes the lengths themselves"),
    "seqused_k": ("seq_lens", "flash-attn's", ""),
    "batch_size": ("num_reqs", "others'", "in an engine it changes from step to step"),
    "bsz": ("num_reqs", "others'", ""),
    "hidden_dim": ("hidden_size", "others'", "Llama's own code calls the MLP's width so: intermediate_size"),
    "d_model": ("hidden_size", "the Transformer paper's", ""),
    "dim": ("hidden_size", "Llama's own", ""),
    "n_embd": ("hidden_size", "GPT-2's", ""),
    "d_ff": ("intermediate_size", "the Transformer paper's", ""),
    "ffn_dim": ("intermediate_size", "others'", ""),
    "n_layer": ("num_layers", "GPT-2's", ""),
    "n_layers": ("num_layers", "Llama's own", ""),
    "n_head": ("num_heads", "GPT-2's", ""),
    "n_heads": ("num_heads", "Llama's own", ""),
    "n_kv_heads": ("num_kv_heads", "Llama's own", ""),
    "n_local_heads": ("num_kv_heads", "gpt-fast's", "in Llama's own code it counts query heads"),
    "n_local_kv_heads": ("num_kv_heads", "Llama's own", ""),
    "d_k": ("head_dim", "the Transformer paper's", ""),
    "d_head": ("head_dim", "others'", ""),
    "n_vocab": ("vocab_size", "others'", ""),
    "num_sched_tokens": ("num_tokens", "others'", ""),
    "attn_output": ("out", HUGGING_FACE, ""),
    "c_proj": ("o_proj", "GPT-2's", "its MLP has a c_proj as well, which is down_proj here"),
}

PARTS: dict[str, tuple[str, str]] = {  # name -> our word for what holds or does the same, whose name it is
    **dict.fromkeys(("wq", "wk", "wv"), ("qkv_proj", "Llama's own")),
    "wo": ("o_proj", "Llama's own"),
    **dict.fromkeys(("w1", "w3"), ("gate_up_proj", "Llama's own")),
    "w2": ("down_proj", "Llama's own"),
    "c_attn": ("qkv_proj", "GPT-2's"),
    "c_fc": ("gate_up_proj", "GPT-2's"),
}


@functools.cache
def aliases() -> dict[str, tuple[str, list[str]]]:
    """Another project's name in lower case -> the line that says so, and our words."""
    found: dict[str, tuple[str, list[str]]] = {}
    for name, (ours, whose, remark) in ALIASES.items():
        found[name.lower()] = f"{name} is {whose} name of {ours}" + (f"; {remark}" if remark else "") + ".", [ours]
    for group in (_parts(), *_names_of_others()):
        for name, (owners, ours, is_whole) in group.items():
            said = "name of" if is_whole else "name; its part is played here by"
            found.setdefault(name.lower(), (f"{name} is {join_and(owners)} {said} {join_and(ours)}.", ours))
    known = {key.lower() for key in meanings_by_word()}
    return {name: alias for name, alias in found.items() if name not in known}


@functools.cache
def alias_names() -> list[str]:
    """Every such name as its project spells it."""
    return [*ALIASES, *PARTS, *(name for group in _names_of_others() for name in group)]


def _parts() -> dict[str, tuple[list[str], list[str], bool]]:
    """The list of parts in the form of `_names_of_others`."""
    return {name: ([whose], [ours], False) for name, (ours, whose) in PARTS.items()}


def _names_of_others() -> Iterator[dict[str, tuple[list[str], list[str], bool]]]:
    """name -> whose it is, our words, and whether it means the same; from the notes, dimensions first."""
    yield _group((word.name, word.vllm, word.huggingface) for word in WORDS.values())
    yield _group((name, note.vllm, note.huggingface) for name, note in MODULES.items())
    yield _group((name.removesuffix(".forward"), note.vllm, note.huggingface) for name, note in FUNCTIONS.items())
    yield _group((name, note.vllm, note.huggingface) for (_, name), note in FIELDS.items())
    yield _group((name, note.vllm, note.huggingface) for (_, name), note in LOCALS.items())


def _group(named: Iterable[tuple[str, str, str]]) -> dict[str, tuple[list[str], list[str], bool]]:
    """The names in texts such as ``qkv_proj (QKVParallelLinear)``: what has an underscore, or is written LikeThis."""
    found: dict[str, tuple[list[str], list[str], bool]] = {}
    for ours, *texts in named:
        for whose, text in zip((VLLM, HUGGING_FACE), texts, strict=True):
            for name in re.findall(r"\b[A-Za-z]\w*\b(?!\.)", "" if text.startswith("none") else text):
                if re.search(r"_|[a-z][A-Z]", name):
                    owners, words, is_whole = found.get(name, ([], [], True))
                    found[name] = (_with(owners, whose), _with(words, ours), is_whole and name == text)
    return found


def _with(items: list[str], item: str) -> list[str]:
    return items if item in items else [*items, item]
