"""Gradients reach stored parameters as autograd would bring them: added up, watched, requested, or left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.costs.hardware.load import load
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.fake_mesh import fake_mesh

WIDTH = 8


class Sum(nn.Module):
    """A product with the sum of two weights, whose gradients are one tensor, and one with another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ (self.one + self.other)) @ self.last).square().mean()


def _model() -> Sum:
    torch.manual_seed(0)
    return Sum()


def _inputs(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(each.grad) for name, each in model.named_parameters()}


def _every_way(model: nn.Module) -> dict[str, Any]:
    """Return the gradients, by each way to request them of a backward."""
    one, _, last = parameters = list(model.parameters())
    found: dict[str, Any] = {}
    for step in range(3):
        model(_inputs(step)).backward()
    found["added up"] = _gradients(model)
    torch.nn.utils.clip_grad_norm_(parameters, 0.01)
    found["clipped"] = _gradients(model)
    model.zero_grad()
    model(_inputs(3)).backward(inputs=[last])
    found["of one alone"] = _gradients(model)
    found["returned"] = [whole(each) for each in torch.autograd.grad(model(_inputs(4)), parameters)]
    found["not added to"] = _gradients(model)
    seen: list[Tensor | None] = []
    handles = [one.register_hook(lambda grad: seen.append(whole(grad)) or 2 * grad)]
    handles.append(last.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad))))
    model(_inputs(5)).backward()
    found["doubled"], found["seen"] = _gradients(model), sorted(float(each.norm()) for each in seen if each is not None)
    return found


def _on_ranks(strategy: str) -> dict[str, Any]:
    devices = mesh((2,), ("dp",))
    model = autopar.compile(_model(), devices, (_inputs(0),), strategy=strategy, hardware=SLOW_DEVICES)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    return _every_way(model)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_gradients_are_added_and_watched_as_on_one_process(strategy: str, ranks: Ranks) -> None:
    expected = _every_way(_model())
    for found in ranks.run(_on_ranks, strategy):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("strategy", "axes", "outermost"),
    [
        ("zero3", {"dp": 2}, "_GatherParametersBackward"),
        ("hsdp", {"dp": 2, "fsdp": 2}, "_ReduceGradientsBackward"),
    ],
)
def test_the_node_of_stored_parts_waits_for_every_reduction(
    strategy: str, axes: dict[str, int], outermost: str
) -> None:
    with fake_mesh(axes) as devices:
        model = autopar.compile(_model(), devices, (_inputs(0),), strategy=strategy, hardware=load("h100"))
        visited: dict[str, list[Any]] = {}
        left = [model(_inputs(0)).grad_fn]
        while left:
            node = left.pop()
            if node is not None and node not in visited.setdefault(node.name(), []):
                visited[node.name()].append(node)
                left += [before for before, _ in node.next_functions]
    (stored,) = visited["_LocalPartsBackward"]
    assert "WaitBackward" not in visited and visited[outermost]
    assert all(each.pending is stored.reductions for each in visited[outermost])
    if inner := {each.reductions for each in visited.get("_ReduceGradientsBackward", ())}:
        assert inner == {each.pending for each in visited["_GatherParametersBackward"]}
