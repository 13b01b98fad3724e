"""Mistakes that a user can make around `compile`: every message, raised on every rank, so that nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import autopar
from tests.support.families import HIDDEN, MLP
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh


class Branching(nn.Module):
    """Decides on the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.layer(x_BD)
        return y_BD if y_BD.sum() > 0 else -y_BD


class FailsOn(Branching):
    """Cannot be captured on one rank, as when one machine has another version of a package."""

    def __init__(self) -> None:
        super().__init__()
        self.lacks_kernel = dist.get_rank() == 1

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.lacks_kernel:
            raise ValueError("no such kernel")
        return self.layer(x_BD)


def vectors(batch: int = 4) -> Tensor:
    return torch.ones(batch, HIDDEN)


def compiled(model: nn.Module | None = None, example: Any = None, **options: Any) -> Any:
    """An MLP compiled over two ranks, or what the options say."""
    example = (vectors(),) if example is None else example
    on = options.pop("mesh", None) or mesh((2,), ("dp",))
    requested: dict[str, Any] = {"hardware": SLOW_DEVICES, **options}
    return autopar.compile(model or MLP(), on, example, **by_flag(**requested))


def lazy(**options: Any) -> Any:
    """A module that has seen no inputs."""
    return autopar.compile(MLP(), mesh((2,), ("dp",)), hardware=SLOW_DEVICES, **by_flag(**options))


def _plan_of_another_model() -> None:
    compiled(nn.Linear(HIDDEN, 8), plan=compiled().plan)


def _plan_of_another_batch() -> None:
    compiled(plan=compiled(example=(vectors(8),)).plan)


def _plan_of_another_mesh() -> None:
    compiled(plan=autopar.plan(MLP(), autopar.Mesh({"dp": 4}), (vectors(),)))


def _plan_is_wrong_on_first_rank() -> None:
    with mock.patch("autopar.planning.best_plan.best_plan_of", side_effect=AssertionError("broken solver")):
        compiled()


def _other_batch_per_rank() -> None:
    compiled(example=(vectors(4 + dist.get_rank()),))


def _converted() -> None:
    model = compiled()
    model.to(torch.bfloat16)
    model(vectors())


def _input_on_another_mesh() -> None:
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    compiled()(distribute_tensor(vectors(), other, [Shard(0)]))


def _outside_the_mesh() -> None:
    with mock.patch.object(DeviceMesh, "get_coordinate", return_value=None):
        compiled()


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "control flow": (
        lambda: compiled(Branching()),
        r"CaptureError: .*Branching decides on the value of a tensor .* replace the branch by torch\.where",
    ),
    "unknown axis": (
        lambda: compiled(autopar.annotate(MLP(), "up", tp="column")),
        r'AnnotationError: .*"up".* the mesh has no axis "tp"; its axes are dp\.',
    ),
    "nameless mesh": (
        lambda: compiled(mesh=init_device_mesh("cpu", (2,))),
        r"MeshError: the DeviceMesh has no axis names; create it with mesh_dim_names",
    ),
    "abstract mesh": (
        lambda: compiled(mesh=autopar.Mesh({"dp": 2})),
        r"MeshError: compile needs a DeviceMesh over ranks of a process group, found Mesh; .*init_device_mesh",
    ),
    "rank outside the mesh": (
        _outside_the_mesh,
        r"MeshError: rank \d is not in the mesh, whose ranks are \[0, 1\]; .*has 2 ranks",
    ),
    "missing input": (
        lambda: compiled()(),
        r"InputError: the inputs do not fit the model's forward.*missing a required argument: 'x_BD'",
    ),
    "another keyword": (lambda: compiled()(images=vectors()), r"InputError: .*forward.*"),
    "another dtype": (lambda: compiled()(vectors().double()), r"RuntimeError: .*same dtype, but got Double and Float"),
    "another shape": (
        lambda: compiled()(torch.ones(4, 7)),
        r"CaptureError: .*MLP cannot be traced at families.py:\d+.*\[4, 7\]",
    ),
    "lazy parameters": (
        lambda: list(lazy().parameters()),
        r"InputError: .*no parameters and no plan yet; call it once",
    ),
    "lazy buffers": (lambda: list(lazy().buffers()), r"InputError: .*call it once, or give .*example_inputs"),
    "lazy plan": (lambda: lazy().plan, r"InputError: .*call it once, or give .*example_inputs"),
    "lazy state": (lambda: lazy().state_dict(), r"InputError: .*call it once, or give .*example_inputs"),
    "lazy load": (lambda: lazy().load_state_dict({}), r"InputError: .*call it once, or give .*example_inputs"),
    "lazy conversion": (lambda: lazy().to("cpu"), r"InputError: .*call it once, or give .*example_inputs"),
    "too little memory": (
        lambda: compiled(memory="1KB"),
        r"InfeasibleError: .*1000 bytes.* needs at least [1-9]\d*\.\d+ kB .*Raise",
    ),
    "unit of memory": (lambda: compiled(memory="much"), r"InputError: 'much' is no size; write .*\"8GB\""),
    "fraction of memory": (lambda: compiled(memory=0.5), r"InputError: Memory\(limit=0\.5\); give bytes .*\"8GB\""),
    "mode": (lambda: compiled(mode="fast"), r"InputError: mode='fast'; modes are \"auto\", \"semi_auto\" and"),
    "outputs": (
        lambda: compiled(outputs="all"),
        r"InputError: outputs='all'; outputs are \"plain\", \"dtensor\" or",
    ),
    "solver": (lambda: compiled(solver="lp"), r"InputError: Search\(solver='lp'\); give one of 'auto', 'ilp'"),
    "example": (
        lambda: compiled(example=vectors()),
        r"InputError: example_inputs is a Tensor; give a tuple of positional inputs, \(x,\), or a dict",
    ),
    "another model's plan": (
        _plan_of_another_model,
        r"PlanError: .*belongs to another model or other inputs: .*absent",
    ),
    "another batch's plan": (
        _plan_of_another_batch,
        r"PlanError: .*float32\[8, 32\].* in the plan and .*\[4, 32\].* here",
    ),
    "another mesh's plan": (_plan_of_another_mesh, r"PlanError: the plan is for the mesh dp=4, this mesh is dp=2"),
    "converted parameters": (_converted, r"InputError: .* is torch\.bfloat16 now .* before autopar\.compile"),
    "input on another mesh": (
        _input_on_another_mesh,
        r"InputError: .*\(4, 32\) is a DTensor on .*\"?tp.*the model runs on",
    ),
    "other inputs per rank": (
        _other_batch_per_rank,
        r"InputError: the ranks were called differently: rank 0 with x_BD: float32\[4, 32\].*; rank 1 with .*\[5, 32\]",
    ),
    "failure of one rank": (lambda: compiled(FailsOn()), r"CaptureError: .*no such kernel"),
    "failure of the planner": (
        _plan_is_wrong_on_first_rank,
        r"(AssertionError: |PlanError: .*rank 0: .*)broken solver",
    ),
}


def _messages() -> dict[str, str]:
    """Return the error that each case raises on this rank."""
    found = {}
    for name, (call, _) in CASES.items():
        try:
            call()
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def messages(ranks: Ranks) -> list[dict[str, str]]:
    """The messages of all cases, on both ranks."""
    return ranks.run(_messages, timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_stated_on_every_rank(messages: list[dict[str, str]], name: str) -> None:
    for found in messages:
        assert re.match(CASES[name][1], found[name], re.DOTALL), found[name]
