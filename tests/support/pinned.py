"""A small model with two blocks, its space, and what annotations leave of that: for tests of pins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.costs.hardware.load import load
from autopar.costs.space.build import build_space
from autopar.costs.space.space import Space
from autopar.errors import AnnotationError
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotations_of, pins_of
from autopar.planning.annotations.pins import Mode


class Block(nn.Module):
    """A norm and two linear layers, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.down(torch.relu(self.up(self.norm(x_BSD))))


class Net(nn.Module):
    """Embedded tokens through two blocks; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD * self.scale).square().mean()


IDS_BS = torch.zeros(4, 4, dtype=torch.long)
X_BD = torch.ones(4, 8)


def space_of(model: nn.Module, inputs: tuple[Any, ...] = (IDS_BS,), **axes: int) -> Space:
    """The space of a model on a mesh of these axes, by default dp=2 and tp=2."""
    program = capture(model, inputs, {})
    return build_space(program, Mesh(axes or {"dp": 2, "tp": 2}), load("cpu"))


def pins(space: Space, model: nn.Module, mode: Mode = "semi_auto", **storage: Layout) -> dict[int, np.ndarray]:
    return pins_of(annotations_of(model), space, mode, {name.replace("__", "."): at for name, at in storage.items()})


def left(space: Space, pins: dict[int, np.ndarray]) -> dict[str, set[str]]:
    """Return the remaining options of each pinned decision: roles on all axes, or the layouts of a parameter."""
    found = {}
    for number, mask in pins.items():
        decision = space.decisions[number]
        parameter = decision.kind == "parameter"
        name = decision.name if parameter else f"{decision.node.meta['module']}:{decision.node.target.__name__}"  # type: ignore[union-attr]
        found[name.removesuffix(".default")] = {
            str(decision.candidates.strategies[i].outputs[0])
            if parameter
            else "/".join(decision.role(int(i), axis) for axis in range(space.mesh.ndim))
            for i in mask.nonzero()[0]
        }
    return found


def on_axis(roles: set[str], axis: int) -> set[str]:
    return {each.split("/")[axis] for each in roles}


def refused(space: Space, model: nn.Module, mode: Mode = "semi_auto") -> str:
    with pytest.raises(AnnotationError) as caught:
        pins(space, model, mode)
    return str(caught.value)
