"""Losses of derivatives (forces, physics-informed nets, per-sample gradients) train as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import grad, vmap

import autopar
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, mesh, whole
from tests.support.ranks import Ranks

X_B3 = torch.arange(24.0).reshape(8, 3).sin()
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "planned": ("dp", {}),
    "stored in parts": ("dp", {"strategy": "zero3"}),
    "this rank's samples": ("dp", {"inputs": "local"}),
    "tensor parallel": ("tp", {"strategy": "megatron"}),
    "a pipeline": ("pp", {"microbatches": 2}),
}


class Forces(nn.Module):
    """Energies and forces of a net of positions, a Laplacian, and per-sample slopes of another net by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3))
        self.other = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = self.up(x)
        for layer in self.layers:
            h = layer(h)
        energy = self.down(h)
        (forces,) = torch.autograd.grad(energy, x, torch.ones_like(energy), create_graph=True)
        (second,) = torch.autograd.grad(forces[:, 0].sum(), x, create_graph=True)
        slopes = vmap(grad(lambda row: self.other(row).sum()))(x)
        return energy.square().mean() + (forces - slopes).square().mean() + second.square().mean()


def _trained(model: Any, x: Tensor, pipeline: bool = False) -> tuple[list[float], dict[str, Tensor | None]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        if pipeline:
            losses.append(model.train_step(x).item())
        else:
            loss = model(x)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, {name: whole(parameter) for name, parameter in model.named_parameters()}


def _compiled(name: str) -> tuple[list[float], dict[str, Tensor | None]]:
    axis, options = CASES[name]
    x = X_B3.chunk(2)[dist.get_rank()] if "inputs" in options else X_B3
    model = autopar.compile(Forces(), mesh((2,), (axis,)), (x,), hardware=SLOW_DEVICES, **by_flag(seed=0, **options))
    return _trained(model, x, pipeline=axis == "pp")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_derivatives_in_forward_train_as_on_one_process(ranks: Ranks, name: str) -> None:
    losses, parameters = _trained(Forces(), X_B3)
    found = ranks.run(_compiled, name, world_size=2)
    for of_rank, values in found:
        assert of_rank == pytest.approx(losses, rel=1e-4)
        for path, value in values.items():
            torch.testing.assert_close(value, parameters[path], rtol=1e-3, atol=1e-4, msg=path)
    assert {path for _, values in found for path in values} == set(parameters)
