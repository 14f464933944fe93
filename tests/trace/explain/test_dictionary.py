"""Every word of the trace has an explanation."""

from itertools import chain

import pytest

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS, STAGES
from tinyllm.trace.dims import field_words, function_specs
from tinyllm.trace.explain import explain, explainable
from tinyllm.trace.explain.sources import BATCH, batch_fields, tensor_files, tensor_functions
from tinyllm.trace.record import StepRecord, to_symbol
from tinyllm.trace.recorder import PACKAGE

SPECS = tensor_functions()
LOCALS = [(spec, name) for spec in SPECS for name in spec.locals]


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_every_dimension(word, pair, one, has_parts):
    for name in (word.name, word.symbol):
        meaning = one(name, f"{word.symbol}: {word.name}", pair[0])
        assert has_parts(meaning, "is", "why", "here", "names", "axis of", "code")
    assert not word.why.endswith("."), "as a meaning, it is no sentence"
    line = int(meaning["code"][0].rpartition(":")[2])
    assert f'Word("{word.name}"' in (PACKAGE / "shapes.py").read_text().splitlines()[line - 1]


@pytest.mark.parametrize(("class_name", "name"), batch_fields())
def test_every_tensor_of_the_batch(class_name, name, pair, one, has_parts):
    symbols = ",".join(map(to_symbol, field_words(BATCH, class_name)[name]))
    meaning = one(name, f"{name} [{symbols}]: a tensor of {class_name}", pair[0])
    assert has_parts(meaning, "is", "why", "here", "names", "code")
    line = int(meaning["code"][0].rpartition(":")[2])
    assert f"{name}:" in BATCH.read_text().splitlines()[line - 1]


@pytest.mark.parametrize("name", STAGES)
def test_every_stage(name, pair, one, has_parts):
    letter, kind = KIND_LETTERS[STAGES[name].kind], STAGES[name].kind
    meaning = one(name, f"{name}: a stage, kind {letter} ({kind})", pair[0])
    assert has_parts(meaning, "is", "why", "shapes", "here", "costs", "names", "code")
    assert meaning["here"] != ["no row of this step"] or name not in {o.function for o in pair[0].operations}
    places = {f"tinyllm/{s.file.relative_to(PACKAGE).as_posix()}:{s.first_line}" for s in SPECS if s.qualname == name}
    assert meaning["code"][0] in places


@pytest.mark.parametrize(("spec", "name"), LOCALS, ids=[f"{spec.qualname}-{name}" for spec, name in LOCALS])
def test_every_annotated_local(spec, name, pair, meanings, has_parts):
    symbols = f"[{','.join(map(to_symbol, spec.locals[name]))}]"
    fitting = [meaning for meaning in meanings(name, pair[0]) if meaning[""][0].startswith(f"{name} {symbols}")]
    assert len(fitting) == 1
    assert has_parts(fitting[0], "is", "why", "code")


@pytest.mark.parametrize(("kind", "letter"), KIND_LETTERS.items())
def test_every_kind(kind, letter, pair, one, has_parts):
    for name in (kind, letter):
        meaning = one(name, f"{letter}: a kind of row, {kind}", pair[0])
        assert has_parts(meaning, "is", "why", "here", "rows", "code")


def test_every_axis_of_every_annotation():
    annotated = (
        words for spec in SPECS for words in chain(spec.arguments.values(), spec.locals.values(), spec.results)
    )
    fields = (field_words(BATCH, class_name)[name] for class_name, name in batch_fields())
    axes = {word for words in chain(annotated, fields) for word in words or ()}
    assert axes <= set(explainable()) and len(axes) > 20


def test_a_step_without_token_ids_is_explained(pair):
    """A dry run has question marks for them."""
    values = {**pair[0].batch_values, "token_ids": ["?"] * 8}
    step = StepRecord(**{**vars(pair[0]), "batch_values": values})
    assert len(batch_fields()) > 7
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
