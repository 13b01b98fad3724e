"""Query heads are split where heads of keys and values do not divide: a rank takes those that its queries share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.export import capture
from autopar.costs.memory.model import MemoryModel
from autopar.costs.space.space import Space
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.request import PlanRequest
from autopar.runtime.collectives.mesh_axes import record_traffic
from tests.support.simulation.training import SLOW_DEVICES, Steps, fault_of, train_alone, train_on_ranks
from tests.support.slow_cases import slow_where

WORDS, POSITIONS, FEATURES = 32, 16, 4
ATTENTION = "scaled_dot_product_attention_default"


class Model(nn.Module):
    """Words through one attention, in which several heads share one of keys, and the loss of their successors."""

    def __init__(self, heads: int, key_heads: int, **attention: Any) -> None:
        super().__init__()
        self.heads, self.key_heads, self.attention = heads, key_heads, attention
        width = heads * FEATURES
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, key_heads * FEATURES), nn.Linear(width, key_heads * FEATURES)
        # One for each head is learned, with which attention keeps its probabilities and is one call.
        self.bias = nn.Parameter(torch.randn(heads, POSITIONS, POSITIONS)) if attention.pop("learned", False) else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q = self.q(x).unflatten(-1, (self.heads, FEATURES)).transpose(1, 2)
        k, v = (each(x).unflatten(-1, (self.key_heads, FEATURES)).transpose(1, 2) for each in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, self.bias, enable_gqa=True, **self.attention)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def built(heads: int, key_heads: int, **attention: Any) -> Model:
    torch.manual_seed(0)
    return Model(heads, key_heads, **attention)


def batches(count: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"ids": torch.randint(WORDS, (2, POSITIONS))} for _ in range(count)]


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int]
    mesh: dict[str, int]
    choice: tuple[str, ...]
    """Factors of attention that the axes shard, given as an annotation."""
    attention: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.heads[0]}-of-{self.heads[1]}-{'-'.join(self.choice)}-{''.join(self.attention)}"


CASES = (
    Case((4, 2), {"a": 4}, ("q",), {"is_causal": True}),
    Case((6, 3), {"a": 2}, ("q",)),  # parts of two groups
    Case((4, 2), {"a": 4}, ("q",), {"learned": True}),
    Case((4, 2), {"a": 2, "b": 2}, ("h", "q"), {"is_causal": True}),
    Case((6, 3), {"a": 2, "b": 2}, ("s+t", "q"), {"is_causal": True}),
    Case((6, 3), {"a": 2, "b": 2}, ("q", "s+t"), {"is_causal": True}),
    Case((6, 3), {"a": 2, "b": 2}, ("q", "s"), {"is_causal": True}),
)


def specified_of(case: Case) -> Model:
    specified: dict[str, Any] = {axis: f"factor:{each}" for axis, each in zip(case.mesh, case.choice, strict=True)}
    return autopar.annotate(built(*case.heads, **case.attention), f"%{ATTENTION}", **specified)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", slow_where(CASES, "4-of-2-q-is_causal", "6-of-3-q-s+t-is_causal"))
def test_ranks_train_as_one(case: Case) -> None:
    steps = Steps(batches(2))
    expected = train_alone(built(*case.heads, **case.attention), steps)
    with record_traffic() as traffic:
        found = train_on_ranks(specified_of(case), steps, case.mesh, {"hardware": SLOW_DEVICES})
    assert not fault_of(found, expected, relative=1e-5, absolute=1e-6)
    assert found.plan is not None and tuple(found.plan.choices[ATTENTION].split()) == case.choice
    counted = {key: number // 2 for key, number in traffic.num_bytes.items() if number}
    assert counted == {key: number for key, number in found.plan.traffic.items() if number}


DROPPING = Case((6, 3), {"a": 2, "b": 2}, ("q", "s+t"), {"is_causal": True, "dropout_p": 0.1})


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[5], DROPPING], ids=str)
def test_formulas_at_the_sizes_of_the_plan_are_its_numbers(case: Case) -> None:
    ids = batches(1)[0]["ids"]
    plan = autopar.plan(specified_of(case), Mesh(case.mesh, "cpu"), (ids,), hardware=SLOW_DEVICES)
    again = plan.reprice()
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert again.traffic == {key: number for key, number in plan.traffic.items() if number}
    assert again.memory["memory"] == plan.peak_bytes


def test_of_keys_and_values_the_backward_keeps_the_heads_that_are_taken() -> None:
    space = space_of(2, a=4)
    memory, number = MemoryModel(space), space.index[ATTENTION]
    at = {str(each): place for place, each in enumerate(space.decisions[number].candidates.strategies)}
    size = 2 * POSITIONS * FEATURES * 4
    for position in (1, 2):
        modes = memory.saved.edge(space.inbound[number, position])
        assert modes is not None and not modes[0][:, at["q"]].any() and modes[0][0, at["-"]] == 2 * size
    own = memory.saved.own(number)
    lse = 2 * POSITIONS * 4
    assert own is not None and own[0][at["q"]] == size + lse + 2 * size, "the result, and one head of each"


def space_of(key_heads: int, **axes: int) -> Space:
    program = capture(built(4, key_heads, is_causal=True), (batches(1)[0]["ids"],), {}, training=True)
    return PlanRequest().space(program, Mesh(dict(axes), "cpu"))


def strategies(key_heads: int, **axes: int) -> set[str]:
    space = space_of(key_heads, **axes)
    return {str(each) for each in space.decisions[space.index[ATTENTION]].candidates.strategies}


def test_query_heads_are_split_alone_where_heads_of_keys_do_not_divide_and_inside_of_those_that_do() -> None:
    assert "q" not in strategies(2, a=2) and "h" in strategies(2, a=2)
    assert "q" in strategies(2, a=4) and "h" not in strategies(2, a=4)
    assert not {"q", "h"} & strategies(2, a=8), "there are four"
    of_two = strategies(2, a=2, b=2)
    assert "h q" in of_two and not {"q h", "q q", "h h", "q -"} & of_two
    assert not {"q", "r"} & strategies(4, a=4), "none is shared"
