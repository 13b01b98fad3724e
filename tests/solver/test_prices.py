"""Elimination is evaluated once at a price, whatever the limit, and not begun where there is no time for it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.solver import deadline, lagrangian, solve
from autopar.solver.low_treewidth import without_warnings
from autopar.solver.prepared import Prepared
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.solve import smallest_bytes, solve_narrow, solve_prepared

LENGTH = 12


def _chain(seed: int) -> Problem:
    """Strategies that take fewer bytes take more seconds, mostly; a limit between the most and the least."""
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(f"n{i}", np.sort(rng.random(4)), rng.integers(0, 50, 4) * 10) for i in range(LENGTH))
    problem = Problem(nodes, tuple(Edge((i, i + 1), rng.random((4, 4))) for i in range(LENGTH - 1)))
    free, least = solve.solve(problem).num_bytes, smallest_bytes(problem)
    return Problem(nodes, problem.edges, (2 * least + free) // 3)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each evaluation on the way to a price."""
    found, evaluate = [], lagrangian.evaluate
    monkeypatch.setattr(lagrangian, "evaluate", lambda *given: found.append(1) or evaluate(*given))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_what_is_known_of_prices_is_not_looked_for_again(seed: int, evaluated: list[int]) -> None:
    problem = _chain(seed)
    assert problem.budget is not None
    prepared = Prepared.of(problem, math.inf)
    first = solve_narrow(prepared, gap=1.0)
    before = len(evaluated)
    assert first is not None and before >= 3
    assert solve_narrow(prepared, gap=1.0) == first
    assert len(evaluated) == before
    for budget in (problem.budget, int(0.98 * problem.budget), int(1.02 * problem.budget)):
        try:
            alone = solve_narrow(Prepared.of(Problem(problem.nodes, problem.edges, budget), math.inf))
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                solve_narrow(prepared.within(budget))
            continue
        assert solve_narrow(prepared.within(budget)) == alone


def test_where_there_is_no_time_for_an_elimination_the_wide_way_finds_something(
    monkeypatch: pytest.MonkeyPatch, evaluated: list[int]
) -> None:
    problem = _chain(0)
    best = solve.solve(problem)
    prepared = Prepared.of(problem, math.inf)
    assert prepared.elimination is not None
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(solve, "CHEAP_WORK", 0)
    monkeypatch.setattr(solve, "FAST_WORK_PER_S", prepared.elimination.work)
    evaluated.clear()
    needed = solve.FIRST_EVALUATIONS - deadline.GRACE  # seconds, at one evaluation each
    assert solve_narrow(prepared, time_limit=0.99 * needed) is None
    assert not evaluated
    with without_warnings():
        found = solve_prepared(prepared, time_limit=0.99 * needed)
    assert problem.budget is not None and found.num_bytes <= problem.budget
    assert found.bound <= best.seconds * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
    with without_warnings():
        assert solve_narrow(prepared, time_limit=needed) is not None
        assert solve_narrow(prepared, time_limit=0.0) is not None, "what is known takes no time"
