"""On small random models, captured and built as any other, plans equal the best of all combinations of strategies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.costs.hardware.load import load
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import memory_use
from autopar.costs.space.space import Space
from autopar.errors import InfeasibleError
from autopar.planning.options.groups import Memory
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings, context_of
from tests.support.planned import SLOW_LINKS, space_of

MOST = 20_000  # combinations, whose memory is worked out one by one
OPERATIONS = ("linear", "scale", "relu", "skip", "double")


class RandomModel(nn.Module):
    """Operations on [batch, features], drawn by name; "skip" adds what was there at the start of the model."""

    def __init__(self, operations: tuple[str, ...], width: int) -> None:
        super().__init__()
        self.operations = operations
        self.weights = nn.ModuleDict(
            {str(i): nn.Linear(width, width, bias=False) for i, each in enumerate(operations) if each == "linear"}
        )
        self.scales = nn.ParameterDict(
            {str(i): nn.Parameter(torch.ones(width)) for i, each in enumerate(operations) if each == "scale"}
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        """[batch, features] → a loss."""
        y_BD = x_BD
        for place, operation in enumerate(self.operations):
            if operation == "linear":
                y_BD = self.weights[str(place)](y_BD)
            elif operation == "scale":
                y_BD = y_BD * self.scales[str(place)]
            elif operation == "relu":
                y_BD = torch.relu(y_BD)
            else:
                y_BD = y_BD + (x_BD if operation == "skip" else y_BD)
        return y_BD.sum()


def _combinations(space: Space, pins: dict[int, np.ndarray]) -> list[tuple[int, ...]]:
    allowed = [
        np.flatnonzero(pins.get(number, np.ones(len(decision.candidates.strategies), dtype=bool))).tolist()
        for number, decision in enumerate(space.decisions)
    ]
    assume(math.prod(map(len, allowed)) <= MOST)
    return list(itertools.product(*allowed))


def _seconds(space: Space, combinations: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Return the seconds of each combination: every operation, and every move between two of them."""
    columns = np.array(combinations).T
    total = np.zeros(len(combinations))
    for each, column in zip(space.decisions, columns, strict=True):
        total = total + each.candidates.seconds[column]
    for edge in space.edges:
        total = total + space.reshard_seconds(edge)[columns[edge.source], columns[edge.target]]
    return dict(zip(combinations, total.tolist(), strict=True))


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=3).map(tuple),
    sizes=st.sampled_from([(4, 8), (6, 4), (16, 2)]),
    links=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
    share=st.one_of(st.none(), st.floats(0.0, 1.0)),
)
@example(operations=("relu", "linear", "linear"), sizes=(16, 2), links=False, seed=1, share=0.0625)  # prices move
def test_a_plan_is_the_best_of_all_combinations(
    operations: tuple[str, ...], sizes: tuple[int, int], links: bool, seed: int, share: float | None
) -> None:
    batch, width = sizes
    hardware = SLOW_LINKS if links else load("cpu")
    space = space_of(RandomModel(operations, width), (torch.ones(batch, width),), hardware)
    rng = np.random.default_rng(seed)
    pins = {
        number: rng.random(len(decision.candidates.strategies)) < 0.7
        for number, decision in enumerate(space.decisions)
        if rng.random() < 0.3
    }
    pins = {number: mask for number, mask in pins.items() if mask.any()}
    combinations = _combinations(space, pins)
    seconds = _seconds(space, combinations)
    model = MemoryModel(space)
    limit = None
    if share is not None:
        peaks = {choices: memory_use(model, choices, {})[0] for choices in combinations}
        least, most = min(peaks.values()), max(peaks.values())
        limit = int(least + share * (most - least))
        seconds = {choices: each for choices, each in seconds.items() if peaks[choices] <= limit}
    best = min(seconds.values())
    if best == math.inf:
        with pytest.raises(InfeasibleError):
            make_plan(space, pins, Settings(Memory(limit, recompute="none")))
        return
    plan, chosen = make_plan(space, pins, Settings(Memory(limit, recompute="none")))
    assert seconds[chosen] == pytest.approx(best, rel=1e-9) and plan.seconds == pytest.approx(best, rel=1e-9)
    assert plan.gap <= 1e-9 and (limit is None or plan.peak_bytes <= limit)
    narrow, _ = make_plan(space.keeping(pins), {}, Settings(Memory(limit, recompute="none")))
    context = context_of(narrow).widened()
    assert narrow.seconds == pytest.approx(best, rel=1e-9) and seconds[context.choices] == pytest.approx(best, rel=1e-9)
    assert context.space is space and {n: each.tolist() for n, each in context.pins.items()} == {
        n: each.tolist() for n, each in pins.items()
    }
