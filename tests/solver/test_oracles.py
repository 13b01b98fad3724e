"""Reduced costs at prices of several rows, and what is left within a margin of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import oracles
from autopar.solver.deadline import NEVER
from autopar.solver.oracles import EliminationOracle
from autopar.solver.presolve.reduced_cost_fixing import remaining_of_each
from tests.solver.random_problems import brute_force, layered_rows

seeds = st.integers(0, 2**31 - 1)


@settings(deadline=None, max_examples=20)
@given(seed=seeds, margin=st.floats(0.0, 0.5))
def test_of_several_rows_is_left_what_is_left_of_each(seed: int, margin: float) -> None:
    problems = layered_rows(seed, 3, 3)
    whole = EliminationOracle.of(problems, NEVER, math.inf)
    assert whole is not None
    near = whole.reduced_costs((0.02, 0.0, 0.01), margin)
    for together, problem in zip(remaining_of_each(problems, near, margin), problems, strict=True):
        alone = remaining_of_each((problem,), near, margin)[0]
        assert (together.constant, together.undecided) == (alone.constant, alone.undecided)
        for one, other in zip(alone.problem.edges, together.problem.edges, strict=True):
            assert one.ends == other.ends and np.array_equal(one.seconds, other.seconds)
        choices = [int(node.seconds.argmin()) for node in alone.problem.nodes]
        assert together.problem.cost_of(choices) == alone.problem.cost_of(choices)
        assert together.problem.budget == alone.problem.budget
        if alone.constant < math.inf:
            whole_cost, row_bytes = problem.cost_of(alone.extend(choices))
            seconds, left = alone.problem.cost_of(choices)
            assert seconds == math.inf or seconds + alone.constant == pytest.approx(whole_cost)
            assert row_bytes - left == (problem.budget or 0) - (alone.problem.budget or 0)


@settings(deadline=None, max_examples=8)
@given(seed=seeds, share=st.sampled_from([1.01, 1.1, 1.5]))
def test_what_is_left_has_the_best_below_a_limit(seed: int, share: float) -> None:
    problems, prices = layered_rows(seed, 3, 2), (0.01, 0.02)
    whole = EliminationOracle.of(problems, math.inf, math.inf)
    assert whole is not None
    reached, _ = whole.at(prices)
    limit, best = share * max(reached, 0.1), brute_force(problems)
    found = whole.counted(prices, limit, limit - reached, 1e-9)
    assert found is not None and found.is_proven and found.bound == pytest.approx(min(best, limit))
    if best <= limit:
        assert found.choices is not None and problems[0].seconds_of(found.choices) == pytest.approx(best)


def test_only_the_tables_at_one_price_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EliminationOracle.of(layered_rows(3, 3, 2), math.inf, math.inf)
    assert whole is not None
    evaluate, kept = oracles.evaluate, list[int]()
    monkeypatch.setattr(oracles, "evaluate", lambda *given: kept.append(len(whole._last[1])) or evaluate(*given))
    for price in (0.0, 1.0, 2.0):
        whole.at((price, price))
    assert kept == [0, 0, 0]
