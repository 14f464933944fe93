"""The page around the steps: what ran, how to read it, the prompts, the comparison of the steps."""

from collections.abc import Iterator

from tinyllm.shapes import WORDS, Word
from tinyllm.trace.costs import KIND_LETTERS
from tinyllm.trace.fold import fold_layers
from tinyllm.trace.html.boxes import heads_figure
from tinyllm.trace.html.markup import Html, code, disclosure, element, exact, join, table
from tinyllm.trace.html.roofline import Cost, sum_stages
from tinyllm.trace.html.step import render_step, step_title
from tinyllm.trace.html.words import colour_class, read_tokens, show_dims, show_token, with_unit
from tinyllm.trace.record import Operation, PromptRecord, RunRecord, StepRecord, to_symbol
from tinyllm.trace.shape_text import KV_WORDS, show_shape
from tinyllm.trace.text import show_count, show_number

KIND_MEANINGS = {
    "matmul": "a matrix product", "elementwise": "each value by itself", "reduce": "sums or maxima over an axis",
    "gather": "copies chosen rows", "cache write": "writes keys and values into the pool",
    "view": "the same bytes with other axes", "host": "plain Python, no tensor work",
}  # fmt: skip


def render_body(run: RunRecord, ridge: float | None) -> Html:
    """All parts of the page, in reading order."""
    parts = [
        ("run", "What ran", _run(run)),
        ("prompts", "From text to tokens, and the answers", _prompts(run)),
        ("read", "How to read this page", _how_to_read(run)),
        ("heads", "Who reads which head", heads_figure(run.dims)),
        ("compare", "The steps compared", _comparison(run, ridge)),
        ("steps", "Step by step", join(render_steps(run, ridge))),
    ]
    links = (element("li", element("a", title, href=f"#{name}")) for name, title, _ in parts)
    return join([
        element("a", "Skip to the steps", href="#steps", class_="skip"),
        element("header", element("h1", "One run of a language model, step by step"), element("p", _subtitle(run)),
                element("nav", element("ul", *links), aria_label="Parts of this page")),
        element("main", *(_section(*part) for part in parts)),
        element("footer", element("p", "Written by tinyllm from the run itself: no number on this page was typed by hand.")),
    ])  # fmt: skip


def render_steps(run: RunRecord, ridge: float | None) -> Iterator[Html]:
    """Every step; the first one is open."""
    tokens = read_tokens(run)
    for i, step in enumerate(run.steps):
        yield render_step(step, run.steps[i - 1] if i else None, tokens, ridge, is_open=i == 0)


def _section(name: str, title: str, content: Html) -> Html:
    return element("section", element("h2", title, id=name), content, aria_labelledby=name)


def _subtitle(run: RunRecord) -> str:
    num_reqs, num_steps = len({request.label for step in run.steps for request in step.requests}), len(run.steps)
    return f"{run.model}: {show_count(num_reqs, 'request')}, {show_count(num_steps, 'step')}"


def _run(run: RunRecord) -> Html:
    flops, num_bytes = sum(step.flops for step in run.steps), sum(step.num_bytes for step in run.steps)
    facts = [
        ("model", run.model),
        ("numbers", run.dtype),
        ("attention", run.attention),
        ("prefix caching", "on" if run.prefix_caching else "off"),
        ("key/value pool", f"{show_shape(KV_WORDS, run.kv_shape)}, {with_unit(run.kv_bytes, 'B')}"),
        ("all steps", f"{with_unit(flops, 'FLOP')}, {with_unit(num_bytes, 'B')}"),
    ]
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in facts))


# ---- prompts and answers -----------------------------------------------------------------------------------------------


def _prompts(run: RunRecord) -> Html:
    if not run.prompts:
        return element("p", "This run had no texts: its requests are lengths alone.")
    answers = {answer.label: answer for answer in run.answers}
    items: list[Html] = []
    for prompt in run.prompts:
        answer = answers.get(prompt.label)
        items.append(element("div", _badge(prompt.label), _pieces(prompt), class_="prompt"))
        if answer is not None:
            count = len(answer.token_ids)
            text = f"{show_count(count, 'token')}, ended by {answer.finish_reason}"
            items.append(element("p", "answer: ", element("q", show_token(answer.text)), f" ({text})", class_="answer"))
    note = "A box is a token, a gap the border of a word; ␣ stands for a space, which belongs to the token behind it."
    return join([element("p", note), *items])


def _badge(label: str) -> Html:
    return element("strong", label, class_=f"badge {colour_class(label)}")


def _pieces(prompt: PromptRecord) -> Html:
    words = (
        element("span", *(element("span", show_token(piece), class_="piece") for piece in word), class_="word")
        for word in prompt.words
    )
    counts = {
        "byte": len(prompt.text.encode(errors="replace")),
        "word": len(prompt.words),
        "token": sum(map(len, prompt.words)),
    }
    size = ", ".join(f"{show_count(count, noun)}" for noun, count in counts.items())
    return element("div", element("div", *words, class_="words"), element("small", size))


# ---- how to read -------------------------------------------------------------------------------------------------------


def _how_to_read(run: RunRecord) -> Html:
    kinds = join(
        (
            element("li", element("span", letter, class_=f"kind k{letter}"), f" {kind}: {KIND_MEANINGS[kind]}")
            for kind, letter in KIND_LETTERS.items()
            if kind != "host"
        )
    )
    return join([
        element("p", "A row of a stage's table says what a function did to the dimensions of its tensors: first in "
                "symbols, then in the numbers of that step. Open a row to read why: what the function does, how its FLOPs "
                "and bytes are counted, and the named values inside it."),
        _example(run),
        element("p", "FLOP: a multiply-add counts 2. Bytes: each operand moved once. FLOP/B: what the row computes for "
                "each byte that it moves. Attention counts only the pairs that the causal mask keeps. In "
                "the formulas, e is the size of one value in bytes."),
        element("ul", kinds, class_="kinds"),
        disclosure("The dimension symbols", _legend(run), is_open=True),
    ])  # fmt: skip


def _example(run: RunRecord) -> Html | None:
    """The first product with a weight, read aloud."""
    rows = (op for step in run.steps for op in step.operations if "{weight.T}" in op.stage.template)
    row = next(rows, None)
    if row is None:
        return None
    return element("p", "For example ", code(f"{row.label} {show_dims([row], True)}"), " = ", code(show_dims([row], False)),
                   f" reads: {_read_aloud(row)}")  # fmt: skip


def _read_aloud(row: Operation) -> str:
    num_rows, in_size = row.tensors[row.inputs[0]].shape
    out_size = row.tensors[row.outputs[0]].shape[-1]
    return (
        f"{num_rows} rows of width {in_size} meet a matrix of {in_size} by {out_size}; {num_rows} rows of width {out_size} "
        "come out. The inner size must be the same on both sides of @."
    )


def _legend(run: RunRecord) -> Html:
    fixed = [(WORDS[word], str(size)) for word, size in run.dims.items() if word in WORDS]
    varying = [(word, "by step") for word in WORDS.values() if word.scope in ("step", "request")]
    heads = ("symbol", "word", "size", "meaning", "elsewhere")
    return table("dimensions", heads, (_legend_row(word, size) for word, size in (*fixed, *varying)))


def _legend_row(word: Word, size: str) -> Html:
    formula = f" = {word.formula}" if word.formula else ""
    names = [f"vLLM {word.vllm}" if word.vllm else "", f"HF {word.huggingface}" if word.huggingface else ""]
    return element(
        "tr", element("th", code(to_symbol(word.name)), scope="row"), element("td", code(word.name)),
        element("td", size, class_="n"), element("td", word.meaning + formula, class_="say"), element("td", ", ".join(filter(None, names))),
    )  # fmt: skip


# ---- comparison --------------------------------------------------------------------------------------------------------


def _comparison(run: RunRecord, ridge: float | None) -> Html:
    heads = ("step", "phase", "requests", "tokens", "FLOP", "bytes", "FLOP/B", "FLOP a token")
    parts: list[Html | None] = [table("all steps", heads, map(_step_row, run.steps))]
    prefill = next((step for step in run.steps if step.phase == "prefill"), None)
    decode = next((step for step in run.steps if step.phase == "decode"), None)
    if prefill is not None and decode is not None:
        parts += [element("p", _contrast(prefill, decode)), _stage_table(prefill, decode)]
    if ridge is not None:
        parts.append(
            element("p", f"This machine's ridge: {ridge:.3g} FLOPs for each byte. Below it, memory sets the pace.")
        )
    return join(parts)


def _step_row(step: StepRecord) -> Html:
    num_tokens = step.dims["num_tokens"]
    numbers = [
        exact(step.flops, show_number(step.flops)), exact(step.num_bytes, show_number(step.num_bytes)),
        f"{step.flops / step.num_bytes:.2f}" if step.num_bytes else "",
        show_number(step.flops / num_tokens) if num_tokens else "",
    ]  # fmt: skip
    counts = (element("td", str(count), class_="n") for count in (len(step.requests), num_tokens))
    return element(
        "tr", element("th", str(step.index), scope="row"), element("td", step.phase), *counts,
        *(element("td", number, class_="n") for number in numbers),
    )  # fmt: skip


def _contrast(prefill: StepRecord, decode: StepRecord) -> str:
    """What makes a decode step slow for what it does."""
    if not (prefill.flops and prefill.num_bytes and decode.num_bytes):
        return f"{step_title(prefill)}; {step_title(decode)}."
    if decode.dims["num_tokens"] >= prefill.dims["num_tokens"]:
        return f"{step_title(prefill)}; {step_title(decode)}: as many tokens, so much the same work."
    flops, num_bytes = decode.flops / prefill.flops, decode.num_bytes / prefill.num_bytes
    return (
        f"Prefill (step {prefill.index}) computes {prefill.dims['num_tokens']} tokens at once, decode (step {decode.index}) "
        f"{decode.dims['num_tokens']}. Decode does {flops:.2f} times the FLOPs, yet moves {num_bytes:.2f} times the bytes: the "
        f"weights are read for each step, however few tokens it has."
    )


def _stage_table(prefill: StepRecord, decode: StepRecord) -> Html:
    later = {cost.name: cost for cost in sum_stages(decode)}
    heads = (
        "stage, all layers",
        "prefill FLOP",
        "decode FLOP",
        "prefill bytes",
        "decode bytes",
        "prefill FLOP/B",
        "decode FLOP/B",
    )
    rows = (_stage_row(cost, later[cost.name]) for cost in sum_stages(prefill) if cost.name in later and cost.num_bytes)
    return disclosure("Prefill and decode, stage by stage", table("prefill and decode", heads, rows))


def _stage_row(first: Cost, second: Cost) -> Html:
    cells = [
        *(show_number(cost.flops) if cost.is_known else "?" for cost in (first, second)),
        *(show_number(cost.num_bytes) for cost in (first, second)),
        *(f"{cost.intensity:.2f}" for cost in (first, second)),
    ]
    return element("tr", element("th", first.name, scope="row"), *(element("td", cell, class_="n") for cell in cells))


def summary_line(run: RunRecord) -> str:
    """One line on the run's layers, for a fragment's head."""
    runs = fold_layers(run.steps[0]) if run.steps else []
    rows = sum(len(run.operations) * run.count for run in runs)
    return f"{_subtitle(run)}, {run.dtype}, {run.attention} attention; {rows} rows in the first step."
