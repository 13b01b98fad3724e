"""Every expert on all tokens, in one list that repeats them, is captured with experts and tokens apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.capture.passes.traced_graph import aten
from autopar.ir.program.program import Program
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.best_plan import best_plan
from autopar.planning.record import choices_of
from autopar.planning.request import PlanRequest
from autopar.runtime.rewrite.per_rank_graph import rewrite
from tests.support.eager import assert_as_eager

E, T, D = 4, 6, 8


class AllTokens(nn.Module):
    """Gate and up in one matrix, and down, of each expert."""

    def __init__(self, again: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.again, self.twice = again, twice
        self.router = nn.Linear(D, E)
        self.gate_up, self.down = (nn.Parameter(torch.randn(E, D, features)) for features in (2 * D, D))

    def forward(self, x_TD: Tensor) -> Tensor:
        gates_ET = self.router(x_TD).sigmoid().transpose(0, 1)
        listed = x_TD.repeat(E, 2 if self.twice else 1)[:, :D] * gates_ET.reshape(-1, 1)
        gate, up = torch.bmm(listed.view(E, T, D), self.gate_up).chunk(2, -1)
        made = torch.bmm(gate.tanh() * up, self.down).view(-1, D)
        y_TD = made.reshape(E, T, D).sum(0)
        return (y_TD + listed[:T] if self.again else y_TD).square().mean()


def captured(model: nn.Module) -> Program:
    return capture(model, (torch.randn(T, D, dtype=torch.float64),), {}, training=True)


def targets(program: Program) -> list[object]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def test_tokens_are_expanded_over_experts_and_no_list_is_made() -> None:
    model = AllTokens().double()
    found = targets(captured(model))
    assert aten.expand.default in found
    assert not {aten.repeat.default, aten.view.default, aten.reshape.default} & set(found)
    assert_as_eager(model, (torch.randn(T, D, dtype=torch.float64),))


@pytest.mark.parametrize("changed", [{"again": True}, {"twice": True}], ids=str)
def test_a_list_that_something_else_reads_or_that_repeats_features_stays(changed: dict[str, bool]) -> None:
    model = AllTokens(**changed).double()
    assert aten.repeat.default in targets(captured(model))
    assert_as_eager(model, (torch.randn(T, D, dtype=torch.float64),))


def test_gate_and_up_are_one_product_where_no_piece_is_split() -> None:
    program, request = captured(AllTokens().double()), PlanRequest(strategy="data_parallel")
    space = request.space(program, Mesh({"dp": 2}, "cpu"))
    graph = rewrite(space, choices_of(best_plan(request, space), space)).module.graph
    assert targets(program).count(aten.bmm.default) == 3
    assert sum(node.target is aten.bmm.default for node in graph.nodes) == 2
