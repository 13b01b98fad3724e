"""A per-rank graph with a call for each layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from autopar.runtime.collectives.gathering import start_gather
from autopar.runtime.collectives.gradient_buckets import gather_parameters, reduce_gradients
from autopar.runtime.rewrite.layers import in_layers
from autopar.runtime.rewrite.per_rank_graph import rewrite
from autopar.runtime.rewrite.prefetch import fetched_ahead
from tests.support.options import by_flag

WIDTH, LAYERS = 16, 4
MOVES = (gather_parameters, reduce_gradients, start_gather)


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(torch.relu(self.up(F.dropout(x, self.p))), self.p))


class Stack(nn.Module):
    """Blocks, of which the last may be another one."""

    def __init__(self, p: float, last: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(p) for _ in range(LAYERS - 1))
        self.layers.append(Block(last))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def _graph(p: float = 0.0, last: float = 0.0, again: str = "", **options: Any) -> fx.Graph:
    model, inputs = Stack(p, last), (torch.zeros(8, WIDTH),)
    plan = autopar.plan(model, Mesh({"dp": 2}), inputs, strategy="zero3", **by_flag(**options))
    context = context_of(plan)
    recompute = {again: "full"} if again else plan.recompute
    return fetched_ahead(rewrite(context.space, context.choices, recompute).module, plan.prefetch).graph


def _split(graph: fx.Graph) -> tuple[fx.Graph, list[fx.Graph]]:
    """The graph with a call for each layer, and the different layers."""
    found: list[fx.Graph] = []

    def made(layer: fx.Graph) -> fx.GraphModule:
        found.append(layer)
        return fx.GraphModule(nn.Module(), layer)

    return in_layers(graph, made), found


def _name(node: fx.Node) -> str:
    return "layer" if node.name.startswith("layer_") else getattr(node.target, "__name__", "")


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, 3),  # the first block, which divides the input, the others, and the head
        ({"recompute": "full"}, 3),
        ({"precision": "bf16-mixed"}, 3),
        ({"p": 0.1, "last": 0.1}, 3),
        ({"p": 0.1, "last": 0.2}, 4),
        ({"again": "layers.2"}, 4),
    ],
    ids=["plain", "recompute", "mixed", "dropout", "another last layer", "one recomputed"],
)
def test_equal_layers_are_made_once(options: dict[str, Any], kinds: int) -> None:
    graph, made = _split(_graph(**options))
    assert len(made) == kinds
    assert sum(_name(node) == "layer" for node in graph.nodes) == LAYERS + 1


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"precision": "bf16-mixed"}], ids=str)
def test_weights_are_moved_between_layers_and_ahead_of_them(options: dict[str, Any]) -> None:
    before = _graph(**options)
    graph, made = _split(before)
    moved = [node.target for node in before.nodes if node.target in MOVES]
    assert [node.target for node in graph.nodes if node.target in MOVES] == moved
    assert not any(node.target in MOVES for layer in made for node in layer.nodes)
    order = [_name(node) for node in graph.nodes if _name(node) in ("layer", "gather_parameters", "start_gather")]
    assert order[:5] == ["gather_parameters", "start_gather", "layer", "gather_parameters", "start_gather"]


def test_draws_of_a_layer_are_numbered_from_its_first_on() -> None:
    whole = _graph(0.1, 0.1)
    graph, made = _split(whole)
    keys = [node.kwargs["key"] for node in made[0].nodes if "key" in node.kwargs]
    assert keys == [0, 1]
    firsts = [node.target.first_key for node in graph.nodes if hasattr(node.target, "first_key")]
    assert firsts == [0, 2, 4, 6] == [n.kwargs["key"] for n in whole.nodes if "key" in n.kwargs][::2]
