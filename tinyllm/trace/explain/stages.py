"""A stage, or another function of the model: shapes and costs as formulas, and its rows in a step."""

from collections.abc import Iterator, Mapping, Sequence

from tinyllm.shapes import WORDS
from tinyllm.trace.costs import KIND_LETTERS, PAIRS, STAGES, Stage
from tinyllm.trace.dims import FunctionSpec, Words
from tinyllm.trace.explain.notes.functions import FUNCTIONS, MODULES
from tinyllm.trace.explain.notes.note import Note
from tinyllm.trace.explain.sources import Module, place_of, show_place, spec_of, tensor_functions
from tinyllm.trace.explain.texts import Meaning, few_lines, others_names
from tinyllm.trace.record import Operation, StepRecord
from tinyllm.trace.shape_text import (
    all_shapes,
    fill_numbers,
    fill_template,
    in_numbers,
    in_symbols,
    show_shape,
    with_slots,
)


def explain_function(spec: FunctionSpec, step: StepRecord | None) -> Meaning:
    """A function of the tensor modules, with the bodies that stand at the same seam."""
    note, stage = FUNCTIONS.get(spec.qualname, Note()), STAGES.get(spec.qualname)
    rows = [operation for operation in step.operations if spec_of(operation) is spec] if step else []
    main = _main_body(spec, step)
    if spec is not main:
        here = "this run used the other body" if step else ""
        same = f"shapes, costs and pitfalls are those of {main.qualname} at {place_of(main)}"
        parts = (("is", spec.summary), ("why", same), ("here", here), ("code", place_of(spec)))
        return Meaning(f"{spec.qualname}: another body of the same stage", parts)
    kind = f"a stage, kind {KIND_LETTERS[stage.kind]} ({stage.kind})" if stage else "a function around or inside stages"
    return Meaning(f"{spec.qualname}: {kind}", (
        ("is", spec.summary or "a helper without a contract of its own"),
        ("why", note.why),
        ("shapes", _stage_shapes(stage, spec, rows) if stage else _signature(spec)),
        ("here", _rows_here(rows) if step and stage else ""),
        ("costs", "\n".join(_costs(stage, rows)) if stage else ""),
        ("care", note.care),
        ("names", others_names(note.vllm, note.huggingface) if stage or note.vllm or note.huggingface else ""),
        ("code", place_of(spec)),
    ))  # fmt: skip


def _main_body(spec: FunctionSpec, step: StepRecord | None) -> FunctionSpec:
    """Of several bodies at one seam the one that ran, or the first."""
    bodies = [body for body in tensor_functions() if body.qualname == spec.qualname]
    ran = {id(spec_of(operation)) for operation in step.operations} if step else set()
    return next((body for body in bodies if id(body) in ran), bodies[0])


def _signature(spec: FunctionSpec) -> str:
    """Arguments and results of a function that has no row, as symbols."""
    given = [
        f"{name} {in_symbols(words)}" if words else name
        for name, words in spec.arguments.items()
        if words or name in WORDS
    ]
    made = [in_symbols(words) for words in spec.results if words]
    return f"{', '.join(given)} -> {', '.join(made) or 'no tensor'}" if given or made else "none in its signature"


def explain_module(module: Module, step: StepRecord | None) -> Meaning:
    """A named part of the model: its class's function, in the part's own words."""
    spec = next(spec for spec in tensor_functions() if spec.qualname == f"{module.class_name}.forward")
    note, stage = MODULES.get(module.name, Note()), STAGES.get(spec.qualname)
    words = _words_in(spec, module.words)
    rows = [operation for operation in step.operations if operation.label == module.name] if step else []
    rows = [operation for operation in rows if spec_of(operation) is spec]
    stage = stage if module.is_called else None
    return Meaning(f"{module.name}: the {module.class_name} of {module.owner}", (
        ("is", spec.summary if stage or "weight" not in words else "a weight that some stage reads"),
        ("why", note.why),
        ("shapes", fill_template(stage.template, words, in_symbols) if stage else "" if "weight" in words else _signature(spec)),
        ("here", _rows_here(rows) if step and stage else ""),
        ("weight", _weight(words["weight"], rows) if "weight" in words else ""),
        ("costs", "\n".join(_costs(stage, rows)) if stage else ""),
        ("care", note.care or FUNCTIONS.get(spec.qualname, Note()).care),
        ("names", others_names(note.vllm, note.huggingface)),
        ("code", f"{show_place(module.file, module.line)}, and {module.class_name} at {place_of(spec)}"),
    ))  # fmt: skip


def _weight(words: Words, rows: Sequence[Operation]) -> str:
    """How the weight is stored; with a row of the step, its sizes too."""
    shape = show_shape(words, rows[0].tensors["weight"].shape) if rows else in_symbols(words)
    return f"stored as {shape}, one row for each output"


def _words_in(spec: FunctionSpec, own_words: Mapping[str, str]) -> dict[str, Words]:
    """name -> words of everything that a template may name, the class's words replaced by the module's own."""
    named = {name: words for name, words in [*spec.arguments.items(), *spec.locals.items()] if words}
    results = {
        "result" if len(spec.results) == 1 else f"result[{i}]": words for i, words in enumerate(spec.results) if words
    }
    return {name: tuple(own_words.get(word, word) for word in words) for name, words in {**named, **results}.items()}


def _stage_shapes(stage: Stage, spec: FunctionSpec, rows: Sequence[Operation]) -> str:
    """How the stage's rows read in symbols."""
    words = _words_in(spec, {}) | _words_of_items(rows)
    return fill_template(stage.symbolic or stage.template, words, in_symbols, lambda name: name.partition("[")[0])


def _words_of_items(rows: Sequence[Operation]) -> dict[str, Words]:
    """The words of a list's items, such as ``pieces[0]``: only a row can tell."""
    return {name: tensor.words for row in rows[:1] for name, tensor in row.tensors.items() if name in row.inputs}


def _rows_here(rows: Sequence[Operation]) -> str:
    """The step's rows with their numbers; equal ones once, with their count."""
    if not rows:
        return "no row of this step"
    counts: dict[str, int] = {}
    for operation in rows:
        template = with_slots(operation, operation.stage.template)
        text = f"{operation.title} {fill_template(template, all_shapes(operation), in_numbers)}"
        counts[text] = counts.get(text, 0) + 1
    return "\n".join(few_lines([text + (f", {count} times" if count > 1 else "") for text, count in counts.items()]))


def _costs(stage: Stage, rows: Sequence[Operation]) -> Iterator[str]:
    """The formulas, and what they give for the first row."""
    shown = rows[0] if rows else None
    pairs = f", where pairs = {PAIRS[1:-1]}: the keys that the causal mask leaves, over all queries"
    flops = "? (it depends on the values)" if stage.flops is None else stage.flops.replace(PAIRS, "pairs")
    yield f"FLOP {flops}{pairs if PAIRS in (stage.flops or '') else ''}"
    if shown and shown.flops and stage.flops:
        yield f"= {fill_numbers(stage.flops, shown.sizes)} = {shown.flops:,} for {shown.title}"
    if stage.read == stage.write == "0":
        yield "BYTE 0: nothing moves, the same storage is read in another way"
        return
    unit = ", where e is the size of one value" if "e*" in stage.read else ""
    yield f"BYTE read {stage.read}, write {stage.write}{unit}"
    if shown:
        yield f"= {shown.bytes_read:,} read and {shown.bytes_written:,} written by {shown.title}"
