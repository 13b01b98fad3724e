"""A method of a model that calls a submodule is right on a compiled module, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import autopar
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

X = torch.arange(32.0).reshape(4, 8) / 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)).square().mean()

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def _compiled(strategy: str, inputs: Any = "whole") -> Any:
    line = mesh((2,), ("dp",))
    return autopar.compile(Model(), line, (X,), strategy=strategy, inputs=inputs, hardware=SLOW_DEVICES)


def _called() -> None:
    alone, whole, parts = Model(), _compiled("data_parallel"), _compiled("data_parallel", "local")
    expected = alone.encode(X)
    for model in (alone, whole):
        model.encode(X).square().mean().backward()
    torch.testing.assert_close(whole.encoder[0].weight.grad, alone.encoder[0].weight.grad)
    torch.testing.assert_close(whole.encode(X), expected)
    with torch.no_grad():
        torch.testing.assert_close(parts.encode(X), expected)
    with pytest.raises(autopar.InputError, match=r"^encoder is called by itself on this rank's samples.*no_grad"):
        parts.encode(X)
    parts.encoder.requires_grad_(False)
    torch.testing.assert_close(parts.encode(X), expected)

    split = _compiled("zero3")
    with pytest.raises(autopar.InputError, match=r"^encoder is called by itself with a plain tensor.*DTensors"):
        split.encode(X)
    found = split.encode(DTensor.from_local(X, split.mesh, [Replicate()]))
    torch.testing.assert_close(found.full_tensor(), expected)
    for model in (whole, split):
        torch.testing.assert_close(model(X), alone(X))


def test_submodules_called_by_themselves_are_right_or_refused(ranks: Ranks) -> None:
    ranks.run(_called)
