"""Side effects of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.ir.program.effects import is_random

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call whose tensors are placeholders, written "x"."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, tuple(x if each == "x" else each for each in args), kwargs)


@pytest.mark.parametrize(
    "node",
    [
        call(aten.randn_like.default, "x"),
        call(aten.dropout.default, "x", 0.5, True),
        call(aten.feature_dropout.default, "x", 0.5, True),  # not tagged by PyTorch, and without a generator
        call(aten.scaled_dot_product_attention.default, "x", "x", "x", dropout_p=0.1),
        call(aten.binomial.default, "x", "x"),
        call(aten.bernoulli.p, "x", 0.0),
        call(aten.rrelu.default, "x", training=True),
    ],
    ids=str,
)
def test_a_call_that_draws_is_random(node: fx.Node) -> None:
    assert is_random(node)


@pytest.mark.parametrize(
    "node",
    [
        call(aten.relu.default, "x"),
        call(aten.dropout.default, "x", 0.5, False),
        call(aten.alpha_dropout.default, "x", 0.0, True),
        call(aten.scaled_dot_product_attention.default, "x", "x", "x"),
        call(aten.rrelu.default, "x"),
        call(torch.add, "x", "x"),
    ],
    ids=str,
)
def test_a_call_with_nothing_to_draw_is_not(node: fx.Node) -> None:
    assert not is_random(node)
