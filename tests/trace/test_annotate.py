"""An annotated file is its source and, between the lines, what the recorder saw."""

import ast
import html
import itertools
import re
import sys
from html.parser import HTMLParser

import pytest

from tinyllm import ConfigError, RequestError, SamplingParams
from tinyllm.trace.annotate import (
    MARK,
    PACKAGE,
    Run,
    annotatable,
    annotate,
    annotate_html,
    find_source,
    record_calls,
    without_notes,
)
from tinyllm.trace.dims import function_specs
from tinyllm.trace.explain import tensor_files

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42]]
FILES = [file.relative_to(PACKAGE.parent).as_posix() for file in tensor_files()]
every_file = pytest.mark.parametrize("path", FILES)


@pytest.fixture(scope="module", params=["reference", "sdpa"])
def runs(request, tiny_llm) -> tuple[Run, ...]:
    """A prefill and a decode; with the second body, of a sampled request, so that the sampler's own files run, too."""
    llm = tiny_llm("llama_gqa", request.param, block_size=4, max_model_len=32)
    random = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, max_tokens=2,
                            min_tokens=2, stop_token_ids=(7,))  # fmt: skip
    return record_calls(llm, PROMPTS, random if request.param == "sdpa" else None)


@pytest.fixture(scope="module")
def plain(tiny_llm) -> tuple[Run, ...]:
    return record_calls(tiny_llm("llama_gqa", block_size=4, max_model_len=32), PROMPTS)


def notes_in(lines: list[str]) -> list[tuple[str, str, list[str]]]:
    """(name, symbols, shape in each run) of every note that has shapes."""
    found = []
    for line in lines:
        columns = re.split(r" {2,}", line.strip().removeprefix(f"{MARK} "))
        shapes = [column.partition(" ")[2].strip() for column in columns if column.startswith(("prefill ", "decode "))]
        if len(shapes) == 2 and line.lstrip().startswith(MARK) and "computes" not in line and columns[0] != "call":
            found.append((columns[0], columns[1] if len(columns) == 4 else "", shapes))
    return found


def calls_of(run: Run, path: str) -> dict[tuple[str, int], list]:
    """The run's calls of a file's functions, by qualified name and first line."""
    found: dict[tuple[str, int], list] = {}
    for root in run.calls:
        for call in root.walk():
            if call.spec.file == find_source(path):
                found.setdefault((call.spec.qualname, call.spec.first_line), []).append(call)
    return found


def functions_in(text: str) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                found[prefix + child.name] = child
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(text), "")
    return found


# --- for every tensor module ------------------------------------------------------------------------------------------


@every_file
def test_the_source_stands_in_it_word_for_word(runs, path):
    lines = annotate(path, runs)
    source = (PACKAGE.parent / path).read_text().splitlines()
    assert without_notes(lines) == source
    assert not any(MARK in line for line in source), "a source with the mark in it could not be told from a note"
    ast.parse("\n".join(lines))
    assert all(line == line.rstrip() for line in lines if MARK in line)
    assert max((len(line) for line in lines if MARK in line), default=0) <= 120


@every_file
def test_every_annotated_local_of_what_ran_has_a_note(runs, path):
    lines = annotate(path, runs)
    functions = functions_in("\n".join(lines))
    for spec in function_specs(find_source(path)).values():
        node = functions[spec.qualname]
        own = lines[node.lineno - 1 : node.end_lineno]
        calls = [call for run in runs for call in calls_of(run, path).get((spec.qualname, spec.first_line), [])]
        names = {name for name, _, _ in notes_in(own)}
        if not calls:
            assert any("not run here" in line for line in own) and not names
            continue
        seen = {value.name for call in calls for value in call.values if value.role in ("argument", "result")}
        seen |= {value.name for call in calls for value in call.values if value.name in spec.locals}
        assert seen - {"_"} <= names, spec.qualname


@every_file
def test_every_shape_was_recorded(runs, path):
    """And with it its symbols: they are those of the annotation that the ledger has checked."""
    recorded: set[tuple[int, str, str]] = set()
    for index, run in enumerate(runs):
        for calls in calls_of(run, path).values():
            for call in calls:
                recorded |= {(index, value.name, f"[{','.join(map(str, value.sizes))}]") for value in call.values}
                recorded |= {(index, name, str(size)) for name, size in call.ints.items()}
    for name, _, shapes in notes_in(annotate(path, runs)):
        for index, shape in enumerate(shapes):
            assert shape in ("-", "no tensor") or (index, name, shape) in recorded, (name, shape)


@every_file
def test_the_page_holds_the_source_too(runs, path):
    """With a number before each line that is the line's anchor, and without a script or anything else from outside."""
    page = annotate_html(path, runs)
    code = page.rpartition("<pre>")[2].partition("</pre>")[0].split("\n")
    numbered = [re.fullmatch(r'<a id="L(\d+)" href="#L(\d+)"> *(\d+)</a>(?:  (.*))?', line) for line in code]
    lines = [match for match in numbered if match]
    source = (PACKAGE.parent / path).read_text().splitlines()
    assert [html.unescape(match[4] or "") for match in lines] == source
    assert [match.groups()[:3] for match in lines] == [(str(n),) * 3 for n in range(1, len(source) + 1)]
    others = [line for line, match in zip(code, numbered, strict=True) if not match]
    assert [html.unescape(line.strip().removeprefix("<b>").removesuffix("</b>")) for line in others] == [
        line.rstrip() for line in annotate(path, runs)[len(head_of(path, runs)) :] if line.lstrip().startswith(MARK)
    ]
    parser = Tags()
    parser.feed(page)
    assert parser.tags <= {"html", "head", "meta", "title", "style", "body", "h1", "pre", "a", "b"}
    assert parser.attributes <= {"id", "href", "lang", "charset", "name", "content"}


def head_of(path: str, runs: tuple[Run, ...]) -> list[str]:
    """The tracer's lines before the source's first."""
    return list(itertools.takewhile(lambda line: line.startswith(MARK), annotate(path, runs)))


class Tags(HTMLParser):
    """Collects the names of tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


# --- single files -----------------------------------------------------------------------------------------------------


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


def test_one_step_is_enough(tiny_llm):
    runs = record_calls(tiny_llm("llama_gqa", max_model_len=32), [1, 2, 3], SamplingParams(max_tokens=1))
    assert [run.label for run in runs] == ["prefill"]
    assert any("scores" in line and "decode" not in line for line in annotate("layers/attention/reference.py", runs))


def test_recording_leaves_everything_as_it_was(tiny_llm):
    llm = tiny_llm("llama_gqa", max_model_len=32)
    before = sys.gettrace()
    record_calls(llm, PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))
    assert sys.gettrace() is before
    assert not llm.engine.has_unfinished_requests and llm.engine.scheduler.pool.num_used_blocks == 0
    with pytest.raises(RequestError):
        record_calls(llm, [list(range(40))])


@pytest.mark.parametrize("path", ["tinyllm/layers/norm.py", "layers/norm.py", str(PACKAGE / "layers" / "norm.py")])
def test_a_file_is_found_from_wherever_it_is_named(path):
    assert find_source(path) == PACKAGE / "layers" / "norm.py"


@pytest.mark.parametrize("path", ["tinyllm/scheduler.py", "norm.py", "nowhere.py", "", "/etc/passwd", "tinyllm/layers"])
def test_another_file_is_refused_in_one_line(path):
    with pytest.raises(ConfigError) as error:
        annotate(path, ())
    message = str(error.value)
    assert "\n" not in message and all(file in message for file in ("tinyllm/batch.py", "tinyllm/layers/norm.py"))
    assert set(annotatable()) == set(FILES)


def test_the_page_escapes_what_the_source_and_the_run_hold(plain):
    hostile = Run("prefill", "<script>alert(1)</script> & so on", "<b>model</b>", plain[0].calls, plain[0].lines,
                  plain[0].requests)  # fmt: skip
    page = annotate_html("layers/attention/reference.py", (hostile, plain[1]))
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; so on" in page
    assert "assert query_len &lt;= seq_len" in page and "-&gt; Float[Tensor" in page
    assert "&lt;b&gt;model&lt;/b&gt;" in page
    assert "prefers-color-scheme: dark" in page and "http" not in page.partition("<pre>")[0]
