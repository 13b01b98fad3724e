"""A weight that is used in two ways moves to both, over joined axes too: penalties on weights, tied and shared ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.simulation.simulate import from_ranks, local_values, simulate
from tests.support.simulation.training import planning_alone

X_BD = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


class Penalized(nn.Module):
    """Two layers and a scale, with a penalty on some of the weights."""

    def __init__(self, penalty: Callable[[Penalized, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.w = nn.Parameter(torch.randn(16))
        self.penalty = penalty

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x_BD * self.w))).square().mean() + self.penalty(self, x_BD)


PENALTIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "squares": lambda m, x: 1e-3 * m.a.weight.square().sum(),
    "norm": lambda m, x: 1e-3 * m.a.weight.norm(),
    "orthogonality": lambda m, x: 1e-3 * (m.a.weight.T @ m.a.weight - torch.eye(16)).square().sum(),
    "sum and product": lambda m, x: m.w.sum() + (x * m.w).sum(),
}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@pytest.mark.sample(4)
@pytest.mark.parametrize("strategy", ["data_parallel", "zero2", "zero3", None])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalized_weight_trains_as_on_one_process(penalty: str, strategy: str | None) -> None:
    alone = Penalized(PENALTIES[penalty])
    expected = alone(X_BD)
    expected.backward()
    with simulate(4) as mode, planning_alone(mode):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        specified: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
        compiled = autopar.compile(
            Penalized(PENALTIES[penalty]), mesh, (X_BD,), hardware=SLOW_DEVICES, **by_flag(**specified)
        )
        assert any("dp_tp" in axis for _, axis in compiled.plan.traffic) or strategy is None
        loss = whole(compiled(from_ranks([X_BD] * 4)))
        loss.backward()
        losses = local_values(loss)
        gradients = {name: local_values(whole(p.grad)) for name, p in compiled.named_parameters()}
    for each in losses:
        torch.testing.assert_close(each, expected.detach())
    for name, parameter in alone.named_parameters():
        for each in gradients[name]:
            torch.testing.assert_close(each, parameter.grad, msg=lambda m, n=name: f"{n}: {m}")
