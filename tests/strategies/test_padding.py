"""Padding is followed from parameters through a program, up to what does not bear it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.export import capture
from autopar.strategies.padding import Padding
from autopar.strategies.roles import RoledProgram
from tests.fuzz.case import Case
from tests.fuzz.program import Program
from tests.fuzz.trial import judge


class Rooted(nn.Module):
    """Features, a root of them, and another function of that."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.up(x_BD).abs().sqrt().relu().sum()


def test_padding_goes_from_a_weight_to_its_features_and_ends_at_a_root() -> None:
    program = capture(Rooted(), (torch.ones(4, 5),), {})
    dims = Padding.of(RoledProgram.of(program)).dims
    found = {name: set(each) for (name, _), each in dims.items()}
    assert found == {
        "p_up_weight": {0, 1},
        "p_up_bias": {0},
        "x_bd": set(),
        "linear_default": {1},
        "abs_default": {1},
        "sqrt_default": set(),
        "relu_default": set(),
        "sum_default": set(),
    }


LINES = ("v0 = F.linear(x0, w0)", "loss = F.linear(v0, w1).abs().sqrt().sum()")
COLUMNS: dict[str, Any] = {"annotations": (("layers.0.linear", {"dp": "column"}),)}


@pytest.mark.parametrize(
    ("batch", "mesh", "specified"), [(3, (2,), COLUMNS), (4, (2, 2), {"options": {"strategy": "tensor_2d"}})]
)
def test_the_root_of_features_that_do_not_divide_leaves_gradients_that_are_numbers(
    batch: int, mesh: tuple[int, ...], specified: dict[str, Any]
) -> None:
    program = Program((LINES,), {"x0": (batch, 5)}, {"w0": (5, 5), "w1": (7, 5)})
    outcome = judge(Case(program, mesh, **specified))
    assert outcome.kind == "equal", outcome.text
