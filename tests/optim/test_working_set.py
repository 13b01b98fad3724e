"""Working set of Muon and GaLore besides what they update: predicted by a plan, and measured on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.costs.memory.moments import MemoryRow
from autopar.costs.memory.peak import STEPPING, bytes_by_moment
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError
from autopar.optim import GaLoreAdamW, Muon
from autopar.planning.formulation import Formulation
from autopar.planning.settings import context_of
from autopar.tools.benchmarking.meters import LiveBytes, held_in_training
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh

WIDTH, SAMPLES, RANK = 96, 8, 8
WORKED_ON = {
    "muon": 10 * WIDTH**2,  # three times whole and two squares, in bfloat16
    "galore": 12 * WIDTH**2,  # a renewal: the gradient whole and two factors, in float32
}
"""Bytes, of a square matrix."""


def squares(device: str = "cpu") -> nn.Module:
    """Linear layers of which each is a matrix."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, False, device) for _ in range(4)))


def requested(kind: str, **options: Any) -> dict[str, Any]:
    rank = {"rank": RANK} if kind == "galore" else {}
    return {"optimizer": autopar.Optimizer(kind, **rank, **options), "strategy": "data_parallel", "outputs": "full"}


def planned(kind: str, memory: int | None = None, in_backward: bool = False) -> Plan:
    on, inputs = autopar.Mesh({"dp": 2}, hardware="h100"), (torch.zeros(SAMPLES, WIDTH),)
    specified = {**requested(kind, in_backward=in_backward), "memory": memory, "memory_conventions": "tensors"}
    found = autopar.plan(squares("meta"), on, inputs, **by_flag(**specified))
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("kind", WORKED_ON)
def test_the_largest_matrix_of_a_step_is_in_the_peak(kind: str) -> None:
    plan = planned(kind)
    assert plan.memory is not None
    assert plan.memory.parts["working set"] == WORKED_ON[kind] and "activations" not in plan.memory.parts
    (stepping,) = [each for each in plan.memory.timeline if each.name == STEPPING]
    assert stepping.num_bytes == plan.peak_bytes == plan.reprice().memory["memory"] and plan.verify().ok


@pytest.mark.parametrize("kind", WORKED_ON)
def test_a_limit_holds_while_the_optimizer_steps(kind: str) -> None:
    plan = planned(kind)
    assert planned(kind, memory=plan.peak_bytes).peak_bytes <= plan.peak_bytes
    with pytest.raises(InfeasibleError, match="the memory limit is"):
        planned(kind, memory=WORKED_ON[kind])


@pytest.mark.parametrize("kind", WORKED_ON)
def test_each_matrix_is_worked_on_in_the_backward_that_steps(kind: str) -> None:
    """Check the peak of plans whose optimizer steps in the backward.

    Besides stored tensors it has the matrix's working set, its gradient, and perhaps the gradient of its input.
    """
    plan, behind = planned(kind, in_backward=True), planned(kind)
    assert plan.memory is not None and all(each.name != STEPPING for each in plan.memory.timeline)
    handed_on = SAMPLES // 2 * WIDTH * 4
    assert plan.memory.parts["working set"] in (WORKED_ON[kind], WORKED_ON[kind] + handed_on)
    assert plan.memory.parts["gradients"] == 4 * WIDTH**2
    assert plan.peak_bytes == plan.reprice().memory["memory"] < behind.peak_bytes and plan.verify().ok
    assert planned(kind, plan.peak_bytes, in_backward=True).peak_bytes <= plan.peak_bytes
    with pytest.raises(InfeasibleError, match="the memory limit is"):
        planned(kind, plan.peak_bytes - WORKED_ON[kind] // 2, in_backward=True)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", WORKED_ON)
def test_the_problem_has_the_bytes_of_that_moment(kind: str, in_backward: bool) -> None:
    context = context_of(planned(kind, in_backward=in_backward))
    memory, modes = context.memory_model, dict.fromkeys(context.memory_model.lifetimes.segments, "none")
    taken = bytes_by_moment(memory, context.choices, modes)
    moment = int(taken.argmax())
    problem = Formulation(context.space, memory).problem({}, MemoryRow(((moment, 1),)))
    assert problem.cost_of(context.choices)[1] == taken[moment]


def measured(kind: str, strategy: str, in_backward: bool) -> tuple[int, int]:
    """Bytes at the highest moment of an optimizer's step that renews a basis, and those of the plan.

    With `in_backward` it is the highest of forward and backward.
    """
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    model = autopar.compile(
        *(squares(), mesh((2,), ("dp",)), (x,)),
        **by_flag(
            **dict[str, Any]({"hardware": "h100", **requested(kind, in_backward=in_backward), "strategy": strategy})
        ),
    )
    named = list(model.named_parameters())
    optimizer = Muon(named) if kind == "muon" else GaLoreAdamW(named, rank=RANK, update_proj_gap=1)

    if in_backward:
        optimizer.step_in_backward()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if not in_backward:
        model(x).square().mean().backward()
    live = LiveBytes([*held_in_training(model, optimizer), x])
    live.look()
    with live:
        if in_backward:
            model(x).square().mean().backward()
        else:
            optimizer.step()
    if in_backward:
        return live.highest, model.plan.peak_bytes
    (stepping,) = [each for each in model.plan.memory.timeline if each.name == STEPPING]  # type: ignore[union-attr]
    return live.highest, stepping.num_bytes


@pytest.mark.parametrize(
    ("kind", "strategy", "in_backward"),
    [
        ("muon", "zero3", False),
        ("muon", "zero3", True),
        pytest.param("muon", "data_parallel", False, marks=pytest.mark.slow),
        pytest.param("galore", "zero3", False, marks=pytest.mark.slow),
        pytest.param("galore", "zero3", True, marks=pytest.mark.slow),
    ],
)
def test_ranks_hold_what_the_plan_predicts_while_they_step(
    ranks: Ranks, kind: str, strategy: str, in_backward: bool
) -> None:
    for found, predicted in ranks.run(measured, kind, strategy, in_backward, timeout=120):
        assert predicted == pytest.approx(found, rel=0.1)
