"""Hooks that a forward registers on its tensors see the whole gradient on every rank, as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from autopar.errors import CaptureError, InputError
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, assert_same_gradients, whole
from tests.support.ranks import Ranks, mesh


class Layer(nn.Module):
    """Two linear layers; what comes back between them is scaled to a norm, which no part of a gradient knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.norm = 0.5
        self.seen: list[float] = []

    def forward(self, x_BD: Tensor) -> Tensor:
        hidden_BD = self.up(x_BD)
        hidden_BD.register_hook(self.limited)
        return self.down(hidden_BD.relu())

    def limited(self, gradient_BD: Tensor) -> Tensor:
        self.seen.append(gradient_BD.norm().item())
        return gradient_BD * (self.norm / gradient_BD.norm())


class Normalizing(nn.Module):
    """Layers with hooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD.square().mean()


def _trained(shape: tuple[int, ...], axes: tuple[str, ...], options: dict[str, Any]) -> None:
    eager: Any = Normalizing()
    compiled: Any = autopar.compile(
        copy.deepcopy(eager), mesh(shape, axes), hardware=SLOW_DEVICES, **by_flag(**options)
    )
    optimizers = None
    for step in range(3):
        x_BD = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        losses = [model(x_BD) for model in (compiled, eager)]
        optimizers = optimizers or [torch.optim.SGD(model.parameters(), 0.1) for model in (compiled, eager)]
        assert_close(whole(losses[0]), losses[1])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_same_gradients(compiled, eager)
        compiled.layers[1].norm = eager.layers[1].norm = 0.5 + step  # read in the backward, by the hook alone
    for layer, other in zip(compiled.layers, eager.layers, strict=True):
        assert_close(layer.seen, other.seen, rtol=1e-4, atol=1e-6)
    assert bool(compiled.plan.recompute) == ("recompute" in options)
    assert sum(map(len, compiled._known.values())) == 1


@pytest.mark.parametrize(
    ("shape", "axes", "options"),
    [
        ((2,), ("dp",), {"strategy": "zero3"}),
        ((2,), ("tp",), {"recompute": "full"}),
    ],
    ids=["zero3", "recompute"],
)
def test_a_hook_sees_the_whole_gradient(
    ranks: Ranks, shape: tuple[int, ...], axes: tuple[str, ...], options: dict[str, Any]
) -> None:
    ranks.run(_trained, shape, axes, options, world_size=2)


def test_a_hook_would_see_gradients_of_micro_batches() -> None:
    with pytest.raises(CaptureError, match=r"each of 2 micro-batches.*microbatches=1"):
        autopar.plan(Normalizing(), autopar.Mesh({"dp": 2}), (torch.ones(4, 8),), microbatches=2)


def _compiled_again() -> None:
    compiled = autopar.compile(Normalizing(), mesh((1,), ("dp",)), hardware=SLOW_DEVICES)
    with pytest.raises(InputError, match=r"torch.compile runs a model whose forward registers gradient hooks"):
        torch.compile(compiled, backend="eager")(torch.ones(4, 8))


def test_torch_compile_would_freeze_a_hook(ranks: Ranks) -> None:
    ranks.run(_compiled_again, world_size=1)
