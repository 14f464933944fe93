"""One size per dimension word over a whole step; and a false annotation, anywhere, breaks the ledger."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tinyllm
from tinyllm import SamplingParams, TinyllmError
from tinyllm.kv_cache import gather_kv
from tinyllm.layers.norm import rms_norm
from tinyllm.trace import Call, Ledger, LedgerError, Recorder, dims, reading, recorder
from tinyllm.trace.reading import TENSOR_MODULES, Sources

PACKAGE = Path(tinyllm.__file__).parent
NORM = PACKAGE / "layers" / "norm.py"
# Where a word is swapped for another of a different size in the tiny model, the annotation is false.
SWAPS = {
    "num_tokens": "hidden_size", "hidden_size": "intermediate_size", "num_heads": "num_kv_heads", "num_kv_heads": "num_heads",
    "head_dim": "half_dim", "half_dim": "head_dim", "query_len": "hidden_size", "seq_len": "hidden_size",
    "group_size": "head_dim", "qkv_size": "q_size", "q_size": "qkv_size", "gate_up_size": "intermediate_size",
    "intermediate_size": "gate_up_size", "vocab_size": "hidden_size", "block_size": "num_blocks", "num_blocks": "block_size",
    "num_slots": "num_blocks", "num_reqs": "num_tokens", "num_logits": "num_tokens", "max_blocks": "num_tokens",
    "num_req_blocks": "head_dim", "num_banned": "num_tokens", "num_reqs+1": "num_reqs", "1": "hidden_size", "2": "hidden_size",
}  # fmt: skip
PER_CALL = {"heads", "in_size", "out_size"}  # free within a call: swapping one for another may well stay true


def run_steps(tiny_llm, attention: str = "reference"):
    """(calls, dims) of two steps of a model with scaled rope: a chunked and a random request, so every branch runs."""
    llm = tiny_llm("llama3_rope", attention, block_size=2, max_model_len=32, max_num_batched_tokens=8)
    params = [SamplingParams(), SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=1,
                                               min_tokens=1, stop_token_ids=(5, 6, 7, 8, 9))]  # fmt: skip
    for request in llm.make_requests([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]], params):
        llm.engine.add_request(request)
    steps = []
    for _ in range(2):
        with Recorder() as trace:
            llm.engine.step()
        steps.append(trace.calls)
    return steps, {**llm.loaded.config.dims(), **llm.engine.cache_config.dims()}


def check_all(tiny_llm, attention: str) -> list[Ledger]:
    steps, dims = run_steps(tiny_llm, attention)
    ledgers = [Ledger(dims) for _ in steps]
    for ledger, calls in zip(ledgers, steps, strict=True):
        ledger.check(calls)
    return ledgers


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_a_true_model_balances(tiny_llm, attention):
    first, second = check_all(tiny_llm, attention)
    assert first.num_compared > 500
    words = ("num_tokens", "num_reqs", "num_logits", "max_blocks")
    assert [first.sizes[word] for word in words] == [8, 2, 2, 4]
    assert [second.sizes[word] for word in words] == [3, 2, 2, 4]


def test_another_config_does_not(tiny_llm):
    steps, sizes = run_steps(tiny_llm)
    wrong = Ledger({**sizes, "num_kv_heads": 4})
    with pytest.raises(LedgerError, match="num_kv_heads is 2, but 4 in the config") as error:
        wrong.check(steps[0])
    assert isinstance(error.value, TinyllmError) and "\n" not in str(error.value)


def test_a_word_is_compared_with_its_formula():
    """No annotation is false here, only the sizes: two blocks for three tokens."""
    ledger = Ledger({"block_size": 4, "head_dim": 6, "num_kv_heads": 2})
    with Recorder() as trace:
        gather_kv(torch.zeros(2, 5, 4, 2, 6), torch.tensor([1, 2]), 3)
    with pytest.raises(
        LedgerError, match=r"num_req_blocks is 2, but 1 by its formula \(seq_len\+block_size-1\)/block_size"
    ):
        ledger.check(trace.calls)


def annotations() -> list[tuple[str, int, int, str]]:
    """(file, line, column, words) of every annotation string in the tensor modules, dataclass fields included."""
    found = []
    for module in TENSOR_MODULES:
        path = PACKAGE / module
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Subscript)
                    and (words := dims.words_of(node))
                    and isinstance(node.slice, ast.Tuple)
                ):
                    constant = node.slice.elts[-1]
                    found.append(
                        (file.relative_to(PACKAGE).as_posix(), constant.lineno, constant.col_offset, " ".join(words))
                    )
    return found


ANNOTATIONS = annotations()


def test_a_mutated_annotation_breaks_the_ledger(tiny_llm, monkeypatch):
    """Every annotation of every tensor module, one at a time: swap one word and the step no longer balances."""
    survivors, num_mutants = [], 0
    roots = [
        call for attention in ("reference", "sdpa") for calls in run_steps(tiny_llm, attention)[0] for call in calls
    ]
    executed = {(call.spec.file, call.spec.first_line) for root in roots for call in root.walk()}
    for file, line, column, words in ANNOTATIONS:
        word = next((word for word in words.split() if word not in PER_CALL), None)
        if word is None or not _is_executed(PACKAGE / file, line, executed):
            continue
        num_mutants += 1
        mutant = _mutate(PACKAGE / file, line, column, word)
        with monkeypatch.context() as patch:
            _patch_specs(patch, PACKAGE / file, mutant)
            try:
                for attention in ("reference", "sdpa"):
                    check_all(tiny_llm, attention)
            except LedgerError:
                continue
        survivors.append((file, line, words, word))
    assert num_mutants > 100
    assert survivors == []


def _is_executed(file: Path, line: int, executed: set) -> bool:
    """Whether the annotation stands in a function that a step runs, or in a batch dataclass."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            first_line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return (file, first_line) in executed
    return file.name == "batch.py"


def _mutate(file: Path, line: int, column: int, word: str) -> str:
    lines = file.read_text().splitlines(keepends=True)
    head, tail = lines[line - 1][:column], lines[line - 1][column:]
    lines[line - 1] = head + tail.replace(word, SWAPS[word], 1)
    return "".join(lines)


def _patch_specs(patch: pytest.MonkeyPatch, file: Path, mutant: str) -> None:
    """Let the recorder read the mutant instead of the file; the code that runs stays the same."""
    mutant_lines = tuple(mutant.splitlines())
    tree = ast.parse(mutant)
    specs = {
        (qualname, first_line): dims._read_function(qualname, first_line, node, file, mutant_lines)
        for qualname, first_line, node in dims._functions(tree)
    }
    fields = {
        node.name: dims._annotated_names(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    true_specs, true_fields = dims.function_specs, dims.field_words
    patch.setattr(reading, "function_specs", lambda f: specs if f == file else true_specs(f))
    patch.setattr(recorder, "field_words", lambda f, name: fields[name] if f == file else true_fields(f, name))


# --- what it says --------------------------------------------------------------------------------------------------------


def fault_of(calls, sizes) -> str:
    with pytest.raises(LedgerError) as error:
        Ledger(sizes).check(calls)
    return str(error.value)


def test_a_contradiction_is_one_line_with_all_that_is_needed_to_mend_it():
    """Function, file and line, the tensor in words and numbers, both sizes, what was bound before, and the remedy."""
    with Recorder() as trace:
        rms_norm(torch.full((3, 4), 0.123), torch.ones(4), 1e-5)
    line = rms_norm_line()
    assert fault_of(trace.calls, {"hidden_size": 8}) == (
        f"rms_norm (tinyllm/layers/norm.py:{line}): x [num_tokens,hidden_size]=[3,4]: hidden_size is 4, but 8 in the config. "
        "Bound before: num_tokens=3. Correct the annotation, or the code that makes the tensor"
    )


def rms_norm_line() -> int:
    return next(spec.first_line for (name, _), spec in dims.function_specs(NORM).items() if name == "rms_norm")


def with_sizes(call: Call, name: str, sizes: tuple[int, ...]) -> Call:
    """The call, had one of its values other sizes."""
    return replace(call, values=[replace(v, sizes=sizes) if v.name == name else v for v in call.values])


def test_it_names_the_value_that_came_first_with_another_size_and_the_first_word_of_all():
    with Recorder() as trace:
        rms_norm(torch.zeros(3, 4), torch.ones(4), 1e-5)
    (call,) = trace.calls
    assert (
        "weight [hidden_size]=[5]: hidden_size is 5, but 4 in rms_norm's x. Bound before: num_tokens=3, hidden_size=4."
        in (fault_of([with_sizes(call, "weight", (5,))], {}))
    )
    assert "x [num_tokens,hidden_size]=[7]: the tensor has 1 axes, but the annotation 2. Bound before: nothing." in (
        fault_of([with_sizes(call, "x", (7,))], {})
    )
    assert "mean_square [num_tokens,1]=[3,2]: its axis 1 has size 2, expected 1. Bound before: num_tokens=3, " in (
        fault_of([with_sizes(call, "mean_square", (3, 2))], {})
    )


def test_of_a_formula_it_names_the_tensor_and_of_a_plain_number_its_name():
    with Recorder() as trace:
        gather_kv(torch.zeros(2, 5, 4, 2, 6), torch.tensor([1, 2]), 3)
    said = fault_of(trace.calls, {"block_size": 4, "head_dim": 6, "num_kv_heads": 2})
    assert ": block_ids [num_req_blocks]=[2]: num_req_blocks is 2, but 1 by its formula" in said
    assert "Bound before: seq_len=3, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=6." in said
    with Recorder() as trace:
        gather_kv(torch.zeros(2, 5, 4, 2, 6), torch.tensor([1]), 3)
    (call,) = trace.calls
    call.ints["num_blocks"] = 9  # as if it were an argument
    assert ": num_blocks=9: num_blocks is 9, but 5 in the config. Bound before: seq_len=3. " in (
        fault_of([call], {"num_blocks": 5})
    )


def test_no_value_is_ever_said():
    with Recorder(values="*") as trace:
        rms_norm(torch.full((3, 4), 0.123), torch.ones(4), 1e-5)
    assert "0.12" not in fault_of(trace.calls, {"hidden_size": 8})


def test_the_longest_line_is_not_cut(tiny_llm):
    """The command cuts a line behind 1000 characters."""
    steps, sizes = run_steps(tiny_llm)
    words = sorted({word for root in steps[0] for call in root.walk() for v in call.values for word in v.words or ()})
    faults = [fault_of(steps[0], {**sizes, word: 12345}) for word in words if word in sizes]
    assert len(faults) > 10
    assert max(map(len, faults)) < 600


# --- lists --------------------------------------------------------------------------------------------------------------

JOIN = """
import torch
from collections.abc import Sequence
from jaxtyping import Float
from torch import Tensor


def join(
    pieces: Sequence[Float[Tensor, "_query_len head_dim heads"]], first: Float[Tensor, "query_len head_dim heads"]
) -> Float[Tensor, "num_tokens head_dim heads"]:
    return torch.cat([*pieces, first])


def keep(pieces: list[Float[Tensor, "_query_len head_dim heads"]]) -> None:
    pass


def count(pieces: list[Float[Tensor, "_seq_len _num_req_blocks"]]) -> None:
    pass


def square(pieces: list[Float[Tensor, "_query_len _query_len"]]) -> None:
    pass
"""


@pytest.fixture
def balance(tmp_path):
    """balance(name, *arguments): a function of JOIN, which the recorder takes for a layer's, checked by a ledger."""
    file = tmp_path / "batch.py"
    file.write_text(JOIN)
    scope: dict = {}
    exec(compile(JOIN, str(file), "exec"), scope)
    sources = Sources(tmp_path)

    def balance(name: str, *arguments) -> tuple[Ledger, Call]:
        ledger = Ledger({"head_dim": 4, "block_size": 2})
        with Recorder(sources=sources) as trace:
            scope[name](*arguments)
        ledger.check(trace.calls)
        return ledger, trace.calls[0]

    return balance


def piece(query_len: int, head_dim: int = 4, heads: int = 3) -> torch.Tensor:
    return torch.zeros(query_len, head_dim, heads)


def test_each_item_of_a_list_has_its_request_s_words_for_itself(balance):
    ledger, call = balance("join", [piece(5), piece(8), piece(1)], piece(2))
    assert (ledger.sizes["num_tokens"], ledger.sizes_of(call)["query_len"]) == (16, 2)
    assert ledger.num_compared == 3 * 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            piece(8, head_dim=6),
            r"keep \(batch.py:\d+\): pieces\[1\] \[.*\]=\[8,6,3\]: head_dim is 6, but 4 in the config",
        ),
        (piece(8, heads=2), r"pieces\[1\] .*: heads is 2, but 3 in keep's pieces\[0\]"),
        (
            torch.zeros(8, 4),
            r"pieces\[1\] \[query_len,head_dim,heads\]=\[8,4\]: the tensor has 2 axes, but the annotation 3",
        ),
    ],
)
def test_all_other_words_hold_for_the_items_too(balance, wrong, message):
    balance("keep", [piece(5), piece(8)])
    with pytest.raises(LedgerError, match=message):
        balance("keep", [piece(5), wrong])


def test_an_item_s_words_are_compared_with_their_formula(balance):
    balance("count", [torch.zeros(3, 2), torch.zeros(5, 3)])
    with pytest.raises(LedgerError, match="num_req_blocks is 2, but 3 by its formula"):
        balance("count", [torch.zeros(3, 2), torch.zeros(5, 2)])


def test_an_item_that_says_a_word_twice_says_one_size(balance):
    balance("square", [torch.zeros(3, 3), torch.zeros(5, 5)])
    with pytest.raises(LedgerError, match=r"pieces\[1\] .*: query_len is 4, but 5"):
        balance("square", [torch.zeros(3, 3), torch.zeros(5, 4)])


def test_two_tensors_of_equal_words_and_sizes_are_no_list(balance):
    """What the ledger knows of a call that it has checked says nothing of one without a list."""
    ledger, call = balance("keep", [piece(5), piece(8)])
    with pytest.raises(LedgerError, match="query_len is 8, but 5 in keep's"):
        ledger.check([replace(call, values=[replace(value, item=None) for value in call.values])])
