"""Searches that stop near the bound if more work is expensive: proofs hold, and smaller choices are returned."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import low_treewidth as low
from autopar.solver.lagrangian import mixtures, point
from autopar.solver.low_treewidth import Tolerances
from autopar.solver.memory_rows.several_rows import solve_rows
from autopar.solver.problem import Node, Problem
from autopar.solver.remaining.remaining_choices import Counted
from autopar.solver.solve import solve
from tests.solver.test_several_rows import _brute_force, _rows
from tests.solver.test_solve import _layered_problem, _limited

seeds = st.integers(0, 2**31 - 1)
SHARE = 0.2


@settings(deadline=None, max_examples=25)
@given(seed=seeds, tolerances=st.sampled_from([Tolerances(), Tolerances(SHARE, SHARE), Tolerances(SHARE, math.inf)]))
def test_what_is_near_enough_is_no_further_from_the_best_than_it_says(seed: int, tolerances: Tolerances) -> None:
    problem = _rows(seed, 3, 1)[0]
    best = _brute_force([problem])
    if best == math.inf:
        return
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(low, "CHEAP_WORK", 0)  # all of it is expensive
        patch.setattr(low, "EFFORT", 1e-9)  # and no count has the time to prove anything
        found = solve(problem, tolerances=tolerances)
    assert found.bound <= best * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
    assert problem.fits(problem.bytes_of(found.choices))
    for choices in found.smaller:
        assert problem.fits(problem.bytes_of(choices)) and problem.seconds_of(choices) >= best * (1 - 1e-9)
    if tolerances == Tolerances():
        assert found.seconds == pytest.approx(best) and found.gap <= 1e-9
    elif tolerances.counted == SHARE:
        assert found.gap <= SHARE


def test_counts_that_take_long_are_broken_off_where_a_solution_is_near_enough() -> None:
    problem = _limited(_layered_problem(seed=1, num_layers=6, k=6, distinct=True), 0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low, "EFFORT", 1e-9)
        patch.setattr(low, "best_labels", lambda remaining_problem: Counted(None, -math.inf, False))
        roughly, best = solve(problem, tolerances=Tolerances(counted=1.0)), solve(problem)
    assert best.gap == 0 < roughly.gap and roughly.seconds >= best.seconds >= roughly.bound


@settings(deadline=None, max_examples=15)
@given(seed=seeds, count=st.integers(1, 3))
def test_with_several_rows_what_is_near_enough_is_no_further_from_the_best_than_it_says(seed: int, count: int) -> None:
    problems = _rows(seed, 3, count)
    best = _brute_force(problems)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low, "EFFORT", 1e-9)
        found = solve_rows(problems, [0.01] * count, math.inf, 60.0, tolerances=Tolerances(SHARE, math.inf))
    assert found is not None and found.bound <= best * (1 + 1e-9)
    if found.choices is not None:
        assert all(each.fits(each.bytes_of(found.choices)) for each in problems)
        assert problems[0].seconds_of(found.choices) >= best * (1 - 1e-9)


def test_mixtures_take_less_memory_from_one_to_the_next() -> None:
    node = Node("a", np.array([0.0, 1.0]), np.array([10, 0]))
    problem = Problem((node,) * 8, (), 60)
    large, small = point(problem, (0,) * 8), point(problem, (1,) * 8)
    assert [each.num_bytes for each in mixtures(problem, large, small)] == [60, 50, 40, 20, 0]
    found = solve(problem)
    assert [problem.bytes_of(each) for each in found.smaller] == [50, 40, 20, 0] and found.num_bytes == 60


@pytest.mark.parametrize(("budget", "evaluations"), [(40, 0), (5, 1)])
def test_fewest_bytes_are_requested_where_no_expensive_price_fits(
    budget: int, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's three strategies: without a limit, at a price, and of the fewest bytes that no price is worth."""
    node = Node("a", np.array([1.0, 1.5, 50.0]), np.array([100, 30, 5]))
    monkeypatch.setattr(low, "CHEAP_WORK", 0)
    requested, smallest = [], low.LeastByElimination.smallest
    monkeypatch.setattr(low.LeastByElimination, "smallest", lambda self: requested.append(self) or smallest(self))
    found = solve(Problem((node,), (), budget))
    assert found.choices == ((1,) if budget == 40 else (2,)) and len(requested) == evaluations
