"""SCIP finds what trying all values finds, checks it in whole numbers, and ends in time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from autopar.solver import ilp
from autopar.solver.deadline import NEVER, after, is_over
from autopar.solver.ilp import IlpResult
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.remaining import counting_ilp
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.remaining_choices import RemainingProblem
from autopar.solver.remaining.scip import TOLERANCE, solve_by_scip

Row = tuple[list[int], int]


def _model(costs: list[int], rows: list[Row], most: int) -> cp_model.CpModel:
    model = cp_model.CpModel()
    variables = [model.new_int_var(0, most, "") for _ in costs]
    for weights, budget in rows:
        model.add(cp_model.LinearExpr.weighted_sum(variables, weights) <= budget)
    model.minimize(cp_model.LinearExpr.weighted_sum(variables, costs))
    return model


@given(
    costs=st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=4),
    data=st.data(),
    scale=st.sampled_from([1, 1000, 10**9]),
)
def test_it_finds_what_trying_all_values_finds(costs: list[int], data: st.DataObject, scale: int) -> None:
    weights = st.lists(st.integers(-9, 9), min_size=len(costs), max_size=len(costs))
    drawn = data.draw(st.lists(st.tuples(weights, st.integers(-5, 20)), max_size=3))
    rows = [([scale * each for each in row], scale * budget) for row, budget in drawn]
    valid = [
        sum(map(int.__mul__, costs, values))
        for values in itertools.product(range(3), repeat=len(costs))
        if all(sum(map(int.__mul__, row, values)) <= budget for row, budget in rows)
    ]
    found = solve_by_scip(_model(costs, rows, 2), 0.5, NEVER)
    assert found.status != "timeout"
    if not valid:
        assert found == IlpResult(None, math.inf, "infeasible")
        return
    assert found.choices is not None and sum(map(int.__mul__, costs, found.choices)) == min(valid)
    assert min(valid) - 2 * TOLERANCE * abs(min(valid)) - 0.5 <= found.bound <= min(valid)


def test_values_that_exceed_a_row_by_less_than_the_tolerance_are_none() -> None:
    found = solve_by_scip(_model([-1, -1], [([10**12, 10**12 + 1], 2 * 10**12)], 1), 0.5, NEVER)
    assert found.choices is None and found.status == "timeout" and found.bound <= -1


def _market_split() -> cp_model.CpModel:
    """Return a model of equations that hardly any values satisfy (Cornuéjols & Dawande 1998), with slack as the
    objective.
    """
    weights = np.random.default_rng(0).integers(0, 100, (5, 40))
    model = cp_model.CpModel()
    variables = [model.new_bool_var("") for _ in range(40)]
    slack = [model.new_int_var(0, 4000, "") for _ in range(10)]
    for number, row in enumerate(weights):
        total = cp_model.LinearExpr.weighted_sum(variables, row.tolist())
        model.add(total + slack[2 * number] - slack[2 * number + 1] == int(row.sum()) // 2)
    model.minimize(cp_model.LinearExpr.sum(slack))
    return model


def test_it_ends_when_its_time_is_over_with_what_it_has() -> None:
    found = solve_by_scip(_market_split(), 0.5, after(0.3))
    assert found.status == "timeout" and found.bound <= 1
    assert solve_by_scip(_market_split(), 0.5, after(1e-4)) == IlpResult(None, -math.inf, "timeout")  # not even built


def test_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ilp, "is_interruptible", lambda: True)  # also where another thread has the signals
    monkeypatch.setattr(ilp, "is_over", lambda deadline: True)
    until = after(60)
    assert solve_by_scip(_market_split(), 0.5, until).status == "timeout" and not is_over(until)


def _problem() -> Problem:
    rng = np.random.default_rng(3)
    nodes = tuple(Node(str(i), rng.random(4), rng.integers(0, 9, 4)) for i in range(5))
    return Problem(nodes, tuple(Edge((i, i + 1), rng.random((4, 4))) for i in range(4)), 20)


@pytest.mark.parametrize("goes_on", [False, True])
def test_counts_that_a_little_effort_leaves_undecided_go_on_if_they_are_to(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = _problem()
    monkeypatch.setattr(counting_ilp, "EFFORT", 1e-9)
    found = best_counts(RemainingProblem((problem,), (0.05,), 9.0, math.inf), 1e-9, until=math.inf if goes_on else 0.0)
    assert found.is_proven is goes_on
    if found.is_proven:
        every = itertools.product(range(4), repeat=5)
        best = min(problem.seconds_of(x) for x in every if problem.fits(problem.bytes_of(x)))
        assert found.choices is not None and problem.seconds_of(found.choices) == pytest.approx(best, rel=1e-12)
        assert best * (1 - 1e-5) <= found.bound <= best
