"""A dimension word: its meaning, formula, size in a step, and the tensors that have it as an axis."""

import re
from pathlib import Path

from tinyllm.shapes import WORDS, Word, evaluate
from tinyllm.trace.dims import field_words
from tinyllm.trace.explain.notes.note import POOL, STORED, SUM
from tinyllm.trace.explain.sizes import sizes_here, spaced
from tinyllm.trace.explain.sources import (
    BATCH,
    batch_fields,
    line_of,
    named_tensors,
    show_place,
    source_lines,
    tensor_files,
)
from tinyllm.trace.explain.texts import Meaning, first_few, others_names
from tinyllm.trace.record import StepRecord, to_symbol
from tinyllm.trace.recorder import PACKAGE
from tinyllm.trace.shape_text import fill_numbers

GLOSSARY = PACKAGE / "shapes.py"
SCOPES = {
    "config": "a dimension of the checkpoint",
    "cache": "a dimension of the KV pool",
    "step": "a dimension of one step",
    "request": "a dimension of one request in one step",
    "call": "a dimension of one call, of a function that serves several tensors",
}

CARE: dict[str, str] = {  # by dimension word
    "num_tokens": "it is no sequence length: it counts all requests' tokens; in a decode it is the number of requests",
    "num_logits": "it is no batch size by law: drafts or prompt scores would need more rows for one request",
    "query_len": SUM,
    "seq_len": SUM,
    "block_size": "it counts tokens, not bytes, and it is not the context length; " + POOL,
    "num_blocks": POOL,
    "num_slots": POOL,
    "num_kv_heads": "the KV cache is as wide as these, not as the query heads",
    "q_size": "it equals hidden_size in many models, but not by law: only o_proj leads from the one to the other",
    "in_size": STORED,
    "out_size": STORED,
    "heads": "the axis is next to head_dim, behind the tokens: nothing in this model is stored heads first",
}


def explain_dimension(word: Word, step: StepRecord | None) -> Meaning:
    """A word of the glossary."""
    return Meaning(f"{word.symbol}: {word.name}, {SCOPES[word.scope]}", (
        ("is", word.meaning),
        ("why", word.why + _formula(word)),
        ("here", "\n".join(sizes_here(word, step)) if step else ""),
        ("care", CARE.get(word.name, "")),
        ("names", others_names(word.vllm, word.huggingface)),
        ("axis of", _carriers(word.name)),
        ("code", show_place(GLOSSARY, line_of(GLOSSARY, f'Word("{word.name}"'))),
    ))  # fmt: skip


def _formula(word: Word) -> str:
    whole = " in whole numbers" if word.scope == "request" else ""
    return f"; {word.name} = {spaced(word.formula)}{whole}" if word.formula else ""


def _carriers(word: str) -> str:
    """The named tensors that have this dimension, each once."""
    fields = [field for class_name, field in batch_fields() if word in field_words(BATCH, class_name)[field]]
    names = [name for name, groups in named_tensors().items() if any(word in words for words in groups)]
    found = list(dict.fromkeys([*fields, *names]))
    return first_few(found, 12) or "no named tensor; but of formulas, or of the KV pool"


# --- axes that are no words -------------------------------------------------------------------------------------------

AXES = {
    "1": ("an axis that was kept so that the tensor fits beside a wider one",
          "what is the same for a whole row or for all heads is stored once, and spread over the other axis"),
    "2": ("keys and values, side by side", "index 0 is K, index 1 is V; one tensor is handed on, not two"),
    "num_reqs+1": ("the borders between the requests, both ends included",
                   "as many pieces need one border more: each request's end is the next one's begin, and the first "
                   "begins at 0"),
}  # fmt: skip
"""Axes of annotations that are no words: what such an axis is, and why."""


def explain_axis(axis: str, step: StepRecord | None) -> Meaning:
    """A literal size, or an expression over words."""
    what, why = AXES[axis]
    size = evaluate(axis, step.dims) if step else None
    here = f"{to_symbol(axis)} = {size}: {fill_numbers(axis, step.dims).replace('+', ' + ')}" if step else ""
    return Meaning(f"{to_symbol(axis)}: {'an axis of that size' if axis.isdigit() else axis}", (
        ("is", what), ("why", why), ("here", "" if axis.isdigit() else here), ("axis of", _carriers(axis)),
        ("code", show_place(*_first_use(axis))),
    ))  # fmt: skip


def _first_use(axis: str) -> tuple[Path, int]:
    """Where an annotation first has this axis."""
    for file in tensor_files():
        for i, line in enumerate(source_lines(file), 1):
            if any(axis in string.split() for string in re.findall(r'Tensor, "([^"]*)"', line)):
                return file, i
    raise KeyError(axis)


def meaning_of_axis(word: str) -> str:
    """What any axis of an annotation counts: a word's, a literal's or an expression's."""
    return WORDS[word].meaning if word in WORDS else AXES[word][0]
