"""Products in chunks that take one input are one call in the graph of a rank, behind all that it takes."""

from __future__ import annotations

import autopar
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.record import choices_of
from autopar.planning.settings import context_of
from autopar.runtime.implementations.products.chunked import linear, linears
from autopar.runtime.rewrite.per_rank_graph import rewrite
from autopar.strategies.rules.products.chunked import NAME
from tests.strategies.test_chunked_products import Layer, batch
from tests.support.simulation.training import SLOW_DEVICES


def test_projections_of_one_input_are_one_call() -> None:
    plan = autopar.plan(Layer(), Mesh({"tp": 2}), batch(), strategy=NAME, hardware=SLOW_DEVICES)
    space = context_of(plan).space
    graph = rewrite(space, choices_of(plan, space)).module.graph
    (shared,) = (node for node in graph.nodes if node.target is linears)
    assert len(shared.args) == 1 + 3 * 2 and len(shared.users) == 3
    alone = [node.name for node in graph.nodes if node.target is linear]
    assert alone == ["linear_default_3", "linear_default_4"]
