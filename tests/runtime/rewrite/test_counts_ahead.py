"""A mean over rows of several ranks counts them at the start of the forward, if its targets are there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from autopar.runtime.implementations import loss
from autopar.runtime.rewrite.per_rank_graph import rewrite

FEATURES, CLASSES = 8, 6
X, TARGET = torch.zeros(4, 3, FEATURES), torch.zeros(4, 3, dtype=torch.int64)


class Head(nn.Module):
    """A loss of a linear layer's outputs."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("weights", torch.ones(CLASSES))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x).flatten(0, 1), target.flatten())


class OfItself(Head):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(x)
        return F.cross_entropy(logits.flatten(0, 1), logits.argmax(-1).flatten())


class Weighted(Head):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x).flatten(0, 1), target.flatten(), self.weights)


class Summed(Head):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x).flatten(0, 1), target.flatten(), reduction="sum")


def _graph(model: nn.Module, axes: dict[str, int]) -> fx.Graph:
    plan = autopar.plan(model, Mesh(axes), (X, TARGET), hardware="h100", strategy="data_parallel")
    context = context_of(plan)
    return rewrite(context.space, context.choices).module.graph


def _calls(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_targets_among_the_inputs_are_counted_before_anything_is_computed(axes: dict[str, int]) -> None:
    graph = _graph(Head(), axes)
    calls = _calls(graph)
    before = calls[: calls.index(loss.start_count)]
    assert torch.ops.aten.linear.default in calls and torch.ops.aten.linear.default not in before
    (taking,) = (node for node in graph.nodes if "divisor" in node.kwargs)
    assert taking.kwargs["divisor"].target is loss.start_count


def test_targets_that_weights_make_are_counted_where_the_loss_is() -> None:
    calls = _calls(_graph(OfItself(), {"dp": 2}))
    assert calls.index(loss.start_count) > calls.index(torch.ops.aten.linear.default)


@pytest.mark.parametrize("model", [Weighted, Summed])
def test_sums_and_means_with_weights_of_classes_count_nothing_ahead(model: type[Head]) -> None:
    assert loss.start_count not in _calls(_graph(model(), {"dp": 2}))


def test_one_rank_counts_nothing() -> None:
    assert loss.start_count not in _calls(_graph(Head(), {"dp": 1}))
