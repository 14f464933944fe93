"""Which call of a function stands for all of a step, and what a name was in it."""

import ast
from dataclasses import dataclass

from tinyllm.trace.annotate.runs import Run
from tinyllm.trace.calls import Call, Value
from tinyllm.trace.dims import FunctionSpec

NOT_RUN = "not run here"


@dataclass(frozen=True)
class Shown:
    """The call of a function that stands for all its calls in a run; None where the run has none."""

    run: Run
    call: Call | None
    num_calls: int
    num_others: int  # calls with other shapes

    def reached(self, lines: range) -> bool:
        """Whether the call came to any of these lines."""
        return self.call is not None and not self.run.lines[id(self.call)].isdisjoint(lines)

    def where(self) -> str:
        """Which call is shown, and what became of the others."""
        if self.call is None:
            return NOT_RUN
        request = _request_of(self.call, self.run)
        place = ", ".join(part for part in (_module_of(self.call), request and f"for {request}") if part)
        if self.num_calls == 1:
            return f"{place}: the only call" if place else "the only call"
        others = f"{self.num_others} had other shapes" if self.num_others else "all had these shapes"
        return f"{f'{place}: one' if place else 'the first'} of {self.num_calls} calls, {others}"


def show(run: Run, spec: FunctionSpec, layer: int) -> Shown:
    """The first call in the layer, where there is one, or the first of all."""
    every = (call for root in run.calls for call in root.walk())
    calls = [call for call in every if (call.spec.file, call.spec.first_line) == (spec.file, spec.first_line)]
    if not calls:
        return Shown(run, None, 0, 0)
    prefix = f"layers.{layer}"
    shown = next((call for call in calls if f"{call.path}.".startswith(f"{prefix}.")), calls[0])
    return Shown(run, shown, len(calls), sum(_border(call) != _border(shown) for call in calls))


def _module_of(call: Call | None) -> str:
    """The module around a call, as the model names it; "" where there is none."""
    while call is not None and not call.name.endswith(".forward"):
        call = call.parent
    return "" if call is None else call.path or "the model"


def _border(call: Call) -> list[tuple]:
    """The shapes of arguments and results."""
    return [(value.name, value.sizes) for value in call.values if value.role in ("argument", "result")]


def _request_of(call: Call | None, run: Run) -> str:
    """The request that a call serves alone; "" where it serves all."""
    while call is not None:
        if call.name == "attend_request":
            return run.requests[call.index]
        call = call.parent
    return ""


# --- what a name was --------------------------------------------------------------------------------------------------


def found_in(call: Call, name: str, role: str) -> Value | tuple[Value, ...] | int | None:
    """What a name of that role was in a call: a tensor, a list of them, or a number whose name is a word."""
    items = tuple(value for value in call.values if value.role == role and value.name.startswith(f"{name}["))
    if items:
        return items
    value = next((value for value in call.values if value.name == name and value.role == role), None)
    return call.ints.get(name) if value is None else value


def made_in(
    call: Call, name: str, index: int, lines: range, statement: ast.stmt
) -> Value | tuple[Value, ...] | int | None:
    """What a statement made of a name. Where a later one made it anew, the result of the call that it is set to."""
    if call.spec.assigned_lines.get(name) in lines:
        return found_in(call, name, "local")
    children = [child for child in call.children if child.line in lines]
    if not children or not isinstance(getattr(statement, "value", None), ast.Call):
        return None
    results = [value for value in children[-1].values if value.role == "result"]  # arguments were called before it
    return next((value for value in results if value.name in ("result", f"result[{index}]")), None)


def made_in_turn(call: Call, lines: range) -> tuple[Value, ...] | None:
    """The results of the calls in these lines, one for each item of a list."""
    children = [child for child in call.children if child.line in lines]
    return tuple(value for child in children for value in child.values if value.name == "result") or None
