"""--op: which rows a name means, and how those of several layers refer to each other."""

import re

from tinyllm.trace.terminal import (
    near_stages,
    stage_names,
)
from tinyllm.trace.terminal.stage_view import is_stage


def test_a_module_is_asked_for_by_its_parameters_name(traced, render):
    _, steps = traced
    for module, labels in {
        "mlp": ["gate_up_proj", "silu_and_mul", "down_proj"], "input_layernorm": ["add_residual", "rms_norm"],
        "post_attention_layernorm": ["add_residual", "rms_norm"], "norm": ["add_residual", "rms_norm"],
    }.items():  # fmt: skip
        lines = render(steps, op=module, layers=(1,))[0]
        assert [line[2:17].split()[-1] for line in lines if re.match("[MERGWV] ", line)] == labels
        assert near_stages(module) == []
    assert "attend" in "".join(render(steps, op="self_attn")[0])


def test_an_equal_layer_refers_to_the_first_one(traced, render):
    _, steps = traced
    lines = render(steps, op="down_proj", layers=(0, 1))[0]
    assert [line[:13].strip() for line in lines if line.startswith("M ")] == ["M 0 down_proj", "M 1 down_proj"]
    assert lines[-1].strip() == "all as in layer 0"
    assert sum("|. weight" in line for line in lines) == 1


def test_every_row_has_a_name_that_op_takes(traced):
    _, steps = traced
    for operation in (operation for step in steps for operation in step.operations):
        assert near_stages(operation.label) == [], operation.label
        assert is_stage(operation, operation.label) and is_stage(operation, operation.function)
    assert near_stages("Attend A") == near_stages("ROPE q") == near_stages("Linear") == []
    assert near_stages("atend")[0] == "attend" and near_stages("qkv")[0] == "qkv_proj"
    assert near_stages("???") == stage_names()


def test_a_stage_that_a_step_has_not_is_said(traced, render):
    _, steps = traced
    assert render(steps, op="apply_min_p")[0][-1].strip() == "no row apply_min_p in this step and these layers"
