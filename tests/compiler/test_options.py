"""A wrong argument is refused at once, with what was found and what is needed, whoever it was given to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.compiler.options import check_model
from autopar.errors import AutoparError, InputError, MeshError
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.module.stored import StoredModule
from tests.support.options import by_flag

MESH, X = Mesh({"dp": 2}), (torch.ones(4, 8),)
ODD: tuple[Any, ...] = (
    *(0, -1, 1.5, True, "", "lots", b"x", [], {}, (1,), object(), int, math.nan, math.inf, 10**30),
    *(np.array([1, 2]), torch.ones(2), lambda: 1),
)
FITTING: dict[str, tuple[Any, ...]] = {
    "memory": (10**30,),
    "master_copies": (True,),
    "time_limit": (0, 1.5, math.inf, 10**30),
    "gap": (0,),
    "prefetch": (0,),
    "imbalance": (1.5, 10**30),
    "split_points": ([],),
    "assume": ([],),
    "static_argnames": ([],),
    "capacity_factor": (1.5, 10**30),
}
CALLS = [
    (name, value)
    for name in (
        *(
            "mode",
            "strategy",
            "memory",
            "recompute",
            "optimizer",
            "master_copies",
            "outputs",
            "hardware",
            "solver",
            "inputs",
            "assume",
        ),
        *(
            "time_limit",
            "gap",
            "microbatches",
            "pipeline",
            "schedule",
            "stages_per_rank",
            "split_points",
            "capacity_factor",
        ),
        *("imbalance", "loss_tiles", "mlp_tiles", "prefetch", "static_argnames"),
    )
    for value in ODD
    if not any(type(value) is type(fitting) and value == fitting for fitting in FITTING.get(name, ()))
]


FIELDS = {
    **{"memory": "limit|is no size", "pipeline": "axis"},
    "plan_cache": "cache",
}
"""Option by itself → the name that messages have, where it is another one."""


@pytest.mark.parametrize(("name", "value"), CALLS, ids=lambda value: repr(value)[:20])
def test_an_option_that_is_none_is_refused_before_anything_is_captured(name: str, value: Any) -> None:
    with pytest.raises(AutoparError, match=FIELDS.get(name, name)):
        autopar.plan(nn.Linear(8, 8), MESH, X, **by_flag(**{name: value}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches=0; give a whole number of at least 1, or None"),
        ({"microbatches": True}, "microbatches=True; give a whole number of at least 1, or None"),
        (
            {"hardware": 3},
            r'hardware=3; give the name of a hardware profile \("h100"\), the path of one, or a Hardware',
        ),
        ({"master_copies": 1}, r"Optimizer\(master_copies=1\); give True or False"),
        ({"mode": None}, "mode=None; give a text"),
    ],
)
def test_the_message_says_what_was_found_and_what_is_needed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        autopar.plan(nn.Linear(8, 8), MESH, X, **by_flag(**options))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear, MESH, X), InputError, r"model is the class Linear; give an nn.Module; call it, Linear\(…\)"),
        ((None, MESH, X), InputError, "model is a NoneType; give an nn.Module"),
        ((nn.Linear(8, 8), None, X), MeshError, "mesh is a NoneType; give an autopar.Mesh"),
        ((nn.Linear(8, 8), (2, 2), X), MeshError, "mesh is a tuple; give an autopar.Mesh"),
        ((nn.Linear(8, 8), "all", X), MeshError, "mesh='all'; give a DeviceMesh, an autopar.Mesh"),
        ((nn.Linear(8, 8), MESH, X[0]), InputError, r"example_inputs is a Tensor; give a tuple .* \(x,\)"),
        ((nn.Linear(8, 8), MESH, None), InputError, "example_inputs is a NoneType"),
        ((nn.Linear(8, 8), MESH, {1: X[0]}), InputError, "example_inputs has the key 1; keyword inputs have the names"),
    ],
)
def test_what_is_planned_is_a_module_on_a_mesh_with_inputs(arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        autopar.plan(*arguments)


def test_devices_are_for_meshes_that_are_to_be_found() -> None:
    with pytest.raises(MeshError, match=r'devices=5 with a mesh of 2; leave it out, or give mesh="auto"'):
        autopar.plan(nn.Linear(8, 8), MESH, X, devices=5)
    with pytest.raises(MeshError, match="at most 1000000"):
        autopar.plan(nn.Linear(8, 8), "auto", X, devices=10**30, hardware="cpu")


def test_a_compiled_module_is_not_compiled_again() -> None:
    with pytest.raises(InputError, match="the model is a StoredModule, which was compiled already"):
        check_model(object.__new__(StoredModule))


@pytest.mark.parametrize("value", [value for value in ODD if not isinstance(value, str)], ids=lambda v: repr(v)[:20])
def test_every_other_call_refuses_what_makes_no_sense(value: Any) -> None:
    model, plan = nn.Sequential(nn.Linear(8, 8)), autopar.plan(nn.Linear(8, 8), MESH, X)
    calls: list[Any] = [
        lambda: autopar.annotate(value, "*", dp="data"),
        lambda: autopar.annotate(model, value, dp="data"),
        lambda: autopar.annotate(model, "*", slices=value),
        lambda: autopar.annotate_plan(model, value),
        lambda: autopar.annotate_plan(model, {"0": value}),
        lambda: autopar.annotate_plan(model, {"0": "colwise"}, axis=value),
        lambda: autopar.constrain(X[0], dp=value),
        lambda: Mesh({value: 2} if value.__hash__ else value),
        lambda: Mesh({"dp": 2}, value),
        lambda: autopar.Plan.load(value),
        lambda: autopar.Plan.from_json(value),
        lambda: autopar.PipelinePlan.load(value),
        lambda: plan.explain(value),
        lambda: plan.diff(value),
        lambda: plan.formula(value),
        lambda: plan.what_if(value),
        lambda: plan.attach(value, X),
        lambda: plan.attach(nn.Linear(8, 8), value),
        lambda: plan.save(value),
    ]
    fitting: tuple[int, ...] = (3,) if isinstance(value, dict) else ()  # a plan of no patterns
    if type(value) is int and value in (0, -1):
        fitting = (6,)
    for call in (call for number, call in enumerate(calls) if number not in fitting):
        with pytest.raises(AutoparError):
            call()


def test_attach_names_the_options_that_there_are() -> None:
    plan = autopar.plan(nn.Linear(8, 8), MESH, X)
    with pytest.raises(InputError, match="devices is no option here; options are mode, strategy, memory"):
        plan.attach(nn.Linear(8, 8), X, devices=2)
    with pytest.raises(InputError, match=r"Search\(gap='x'\); give a share of the step"):
        plan.attach(nn.Linear(8, 8), X, **by_flag(gap="x"))


def test_a_path_of_a_profile_may_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"the hardware profile '.*none\.json' does not exist"):
        autopar.plan(nn.Linear(8, 8), MESH, X, hardware=tmp_path / "none.json")  # type: ignore[arg-type]
