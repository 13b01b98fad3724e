"""Gathers of weights stand ahead of their layer in the per-rank graph."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.options.groups import Prefetch
from autopar.planning.settings import context_of
from autopar.runtime.collectives.gathering import start_gather
from autopar.runtime.collectives.gradient_buckets import gather_parameters, reduce_gradients
from autopar.runtime.rewrite.hoist import hoist
from autopar.runtime.rewrite.per_rank_graph import rewrite
from autopar.runtime.rewrite.prefetch import fetched_ahead
from autopar.runtime.rewrite.printing import readable_code
from tests.support.options import by_flag

WIDTH, LAYERS = 16, 4
LINEAR = torch.ops.aten.linear.default
HALF = autopar.Precision(parameters=torch.float32, compute=torch.bfloat16, reduce=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, a norm that is gathered with the head, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).square().mean()


def _plan(depth: Prefetch, axes: dict[str, int] | None = None, strategy: str = "zero3", **options: Any) -> Plan:
    inputs = (torch.zeros(8, WIDTH),)
    return autopar.plan(
        Stack(), Mesh(axes or {"dp": 2}), inputs, strategy=strategy, **by_flag(prefetch=depth, **options)
    )


def _graph(plan: Plan) -> fx.GraphModule:
    context = context_of(plan)
    return fetched_ahead(rewrite(context.space, context.choices, plan.recompute).module, plan.prefetch)


def _order(module: fx.GraphModule) -> list[str]:
    """Issues ("issue 1"), waits ("gather 1") and products ("product 1") of the layers in their order."""
    names = {start_gather: "issue", gather_parameters: "gather", LINEAR: "product"}
    found = [(node, names[node.target]) for node in module.graph.nodes if node.target in names]
    return list(dict.fromkeys(f"{name} {node.meta['layer']}" for node, name in found))


ONE_AHEAD = ["gather 0", "issue 1", "product 0", "gather 1", "issue 2", "product 1", "gather 2", "issue 3"]


@pytest.mark.parametrize(
    ("depth", "options", "begins"),
    [
        (0, {}, ["gather 0", "product 0", "gather 1", "product 1", "gather 2"]),
        (1, {}, ONE_AHEAD),
        (2, {}, ["gather 0", "issue 1", "issue 2", "product 0", "gather 1", "issue 3", "product 1", "gather 2"]),
        (1, {"precision": "bf16-mixed"}, ONE_AHEAD),
        (1, {"precision": HALF}, ONE_AHEAD),  # weights are cast by calls of their own
        (1, {"recompute": "full"}, ONE_AHEAD),
        (1, {"axes": {"dp": 2, "tp": 2}, "strategy": "hsdp"}, ONE_AHEAD),  # gradients are reduced over another axis
        (1, {"strategy": "zero2"}, ONE_AHEAD),
    ],
    ids=["0", "1", "2", "mixed", "half", "recompute", "hsdp", "zero2"],
)
def test_a_gather_is_issued_before_the_products_of_the_layers_before_its_own(
    depth: Prefetch, options: dict[str, Any], begins: list[str]
) -> None:
    module = _graph(_plan(depth, **options))
    assert _order(module)[: len(begins)] == begins
    waiting = [node.kwargs.get("in_flight") for node in module.graph.nodes if node.target is gather_parameters]
    assert [each is not None for each in waiting] == [False] + [depth != 0] * LAYERS


def test_the_code_that_is_printed_shows_it() -> None:
    lines = [line.strip() for line in readable_code(_graph(_plan(1)), ("dp",)).splitlines()]
    issued = next(number for number, line in enumerate(lines) if line.startswith("start_gather ="))
    assert "p_layers_1_up_weight" in lines[issued]
    layer = next(number for number, line in enumerate(lines) if line == "# layers.0.up")
    waited = next(number for number, line in enumerate(lines) if line.startswith("gather_parameters_1 ="))
    assert issued < layer < waited
    assert "in_flight=start_gather)" in lines[waited]


def test_what_is_gathered_once_a_step_is_not_issued_ahead() -> None:
    plan = _plan(1, strategy="zero2")
    context = context_of(plan)
    found = hoist(rewrite(context.space, context.choices).module.graph, context.space.program.parameters.values())
    assert not any("issue" in each or "gather" in each for each in _order(fetched_ahead(found.body, 1)))


def test_behind_a_layer_that_is_stored_whole_a_gather_is_issued_before_that_layers_products() -> None:
    graph = fx.Graph()
    weights, x = [graph.placeholder(name) for name in ("first", "third")], graph.placeholder("x")
    for layer in range(3):
        weight = x
        if layer != 1:
            gathered = graph.call_function(gather_parameters, ("dp", (0,), (WIDTH,), weights.pop(0)))
            weight = graph.call_function(operator.getitem, (gathered, 0))
            gathered.meta["layer"] = weight.meta["layer"] = layer
        x = graph.call_function(LINEAR, (x, weight))
        x.meta["layer"] = layer
    graph.output(x)
    ahead = _order(fetched_ahead(fx.GraphModule({}, graph), 1))
    assert ahead == ["gather 0", "product 0", "issue 2", "product 1", "gather 2", "product 2"]


def test_of_gathers_one_after_another_the_first_is_issued_ahead() -> None:
    graph = fx.Graph()
    weights, x = [graph.placeholder(name) for name in ("first", "second")], graph.placeholder("x")
    for layer, weight in enumerate(weights):
        for move, before in (
            (gather_parameters, ("dp", (0,), (WIDTH,))),
            (reduce_gradients, ("pp",)),
            (gather_parameters, ("tp", (1,), (WIDTH,))),
        ):
            moved = graph.call_function(move, (*before, weight))
            weight = graph.call_function(operator.getitem, (moved, 0))
            moved.meta["layer"] = weight.meta["layer"] = layer
        x = graph.call_function(LINEAR, (x, weight))
        x.meta["layer"] = layer
    graph.output(x)
    nodes = [node for node in fetched_ahead(fx.GraphModule({}, graph), 1).graph.nodes if node.target is start_gather]
    assert [node.args for node in nodes] == [("dp", (0,), (WIDTH,), nodes[0].args[3])]
    assert str(nodes[0].args[3]) == "second"
    assert nodes[0].next.target is LINEAR


def test_a_plan_says_how_far_ahead_weights_are_gathered(tmp_path: Path) -> None:
    ahead, two, none = _plan("auto"), _plan(2), _plan(0)
    assert (ahead.prefetch, two.prefetch, none.prefetch) == (1, 2, 0)
    assert "gathered 1 layer ahead of their use" in str(ahead)
    assert "gathered 2 layers ahead of their use" in str(two)
    assert "ahead" not in str(none)
    two.to_html(tmp_path / "plan.html")
    assert "gathered 2 layers ahead of their use" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert _plan(2, strategy="data_parallel").prefetch == 0, "nothing is gathered"
    assert Plan.from_json(two.to_json()).prefetch == 2
    assert ahead.fingerprint == none.fingerprint
