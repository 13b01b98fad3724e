"""Calls of a shared expert follow the dispatch and the combine of the routed ones; all others keep their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.export import capture
from autopar.ir.program.effects import calls_meanwhile
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH, GROUPED_MM
from autopar.ir.program.program import Program
from tests.support.divided_experts import Form, WithExperts, batches, with_experts

NAMES: dict[Any, str] = {
    DISPATCH: "dispatch",
    COMBINE: "combine",
    GROUPED_MM: "routed",
    torch.ops.aten.linear.default: "linear",
}


def captured(model: WithExperts) -> Program:
    (batch,) = batches(1)
    return capture(model, (), batch)


def order(program: Program) -> list[str]:
    """The products of a layer and its exchanges, in their order: the linear layer and the router come first."""
    layer = [node for node in program.graph.nodes if str(node.meta.get("module", "")).startswith("layers.0")]
    found = [NAMES[node.target] for node in layer if node.target in NAMES]
    assert found[:2] == ["linear", "linear"]
    return found[2:]


@pytest.mark.parametrize("called", ["before", "after"])
def test_a_shared_expert_runs_half_behind_the_dispatch_and_half_behind_the_combine(called: Any) -> None:
    program = captured(with_experts(Form(shared=called)))
    found = order(program)
    assert found == ["dispatch", "linear", *["routed"] * found.count("routed"), "combine", "linear"]
    during = {NAMES[node.target]: calls for node, calls in calls_meanwhile(program).items()}
    for name in ("dispatch", "combine"):
        assert sum(call.target is torch.ops.aten.linear.default for call in during[name]) == 1


def test_without_a_shared_expert_nothing_runs_meanwhile() -> None:
    program = captured(with_experts(Form()))
    assert set(order(program)) == {"dispatch", "routed", "combine"}
    assert not calls_meanwhile(program)


def test_a_shared_expert_that_draws_random_numbers_keeps_its_place() -> None:
    model = with_experts(Form(shared="after"))
    layer: Any = model.layers[0]
    layer.shared.insert(1, nn.Dropout(0.5))
    program = captured(model)
    assert order(program)[-3:] == ["combine", "linear", "linear"]


def test_what_a_shared_expert_gives_besides_is_there_where_it_is_used() -> None:
    class Both(nn.Module):
        """The sum of both kinds of experts, next to tokens that only the shared one has seen."""

        def __init__(self) -> None:
            super().__init__()
            self.layers: Any = with_experts(Form(shared="before")).layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (layer,) = self.layers
            shared = layer.shared(x)
            gate = torch.sigmoid(shared.sum(-1, keepdim=True))
            return layer.experts(x * gate) + shared

    program = capture(Both(), (batches(1)[0]["x"],), {})
    program.graph.lint()
    assert not calls_meanwhile(program), "the routed experts need the shared one"
