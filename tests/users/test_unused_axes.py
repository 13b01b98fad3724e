"""A plan that uses a mesh axis for nothing says so, and warnings point to the user's line and are issued once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.costs.plans.plan import Plan
from autopar.errors import warn_user
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_search.search import Candidate, Turn, best_mesh
from tests.support.options import by_flag


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 32, batch_first=True)

    def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
        return self.gru(x_BSF)[0].square().mean()


@torch.library.custom_op("unused_axes::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


scaled.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[-1]))
scaled.register_autograd(
    lambda context, grad: (grad @ context.saved_tensors[1].mT, context.saved_tensors[0].mT @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Unruled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return scaled(x_BF, self.weight).square().mean()


class Odd(nn.Module):
    """Nothing but the batch could be split, and that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(129, 257)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.layer(x_BF).square().mean()


def planned(
    model: nn.Module, mesh: Mesh | str, *shape: int, **options: object
) -> tuple[Plan, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as specified:
        warnings.simplefilter("always")
        plan = autopar.plan(model, mesh, (torch.ones(shape),), **by_flag(**options))  # type: ignore[arg-type]
    return plan, specified


@pytest.mark.parametrize(
    ("model", "shape", "size", "why"),
    [
        (Recurrent, (8, 5, 16), 4, "splitting costs more than it saves. Use fewer devices, or a larger batch"),
        (Unruled, (8, 16), 4, "has no rule. Give the operation one by autopar.register_rule, or use one device"),
        (Odd, (3, 129), 2, "the batch of 3 does not divide into 2. Use a batch of 4, or fewer devices"),
    ],
)
def test_an_axis_that_nothing_can_use_is_named_with_the_reason(
    model: type[nn.Module], shape: tuple[int, ...], size: int, why: str
) -> None:
    plan, specified = planned(model(), Mesh({"dp": size}, "cpu"), *shape)
    (note,) = [each for each in plan.notes if each.startswith("axis dp splits nothing")]
    assert why in note
    (warning,) = specified
    assert note in str(warning.message) and f"mesh dp={size}" in str(warning.message)
    assert Path(warning.filename) == Path(__file__)


def test_a_batch_that_the_message_asks_for_uses_the_axis() -> None:
    plan, specified = planned(Odd(), Mesh({"dp": 2}, "cpu"), 4 * 1024, 129)
    assert not specified and not any("splits nothing" in note for note in plan.notes)


def test_meshes_that_are_compared_warn_once_and_of_the_one_that_is_taken() -> None:
    plan, specified = planned(Recurrent(), "auto", 8, 5, 16, devices=4, hardware="cpu")
    (text,) = {str(each.message) for each in specified}
    assert len(specified) == 1 and f"mesh {plan.mesh}" in text
    assert Path(specified[0].filename) == Path(__file__)


def test_a_warning_of_a_mesh_that_is_not_taken_is_left_out_and_another_names_its_mesh() -> None:
    slow, fast = Mesh({"dp": 4}), Mesh({"dp": 2, "tp": 2})

    def make(mesh: Mesh, turn: Turn) -> Candidate[Plan]:
        warn_user(f"something about {mesh.ndim} axes")
        plan, _ = planned(Odd(), Mesh({"dp": 1}, "cpu"), 4, 129)
        return Candidate(plan, 1.0 if mesh == fast else 2.0, 0.0)

    with pytest.warns(UserWarning) as specified:
        best_mesh(make, (slow, fast))
    assert [str(each.message) for each in specified] == [f"mesh {fast}: something about 2 axes"]
