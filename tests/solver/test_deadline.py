"""Long computations check the clock step by step, and stop shortly after the deadline."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from ortools.sat.python import cp_model

from autopar.errors import TimeLimitError
from autopar.solver import deadline, ilp
from autopar.solver.deadline import (
    ENDING,
    GRACE,
    LEAST,
    NEVER,
    Allowance,
    after,
    check,
    check_whole,
    grace,
    is_over,
    lasting,
    moment_in,
    seconds_until,
    until,
    whole_is_over,
)
from autopar.solver.elimination.bucket_elimination import compile_elimination, compile_order
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate
from autopar.solver.elimination.min_marginals import reduced_costs
from autopar.solver.elimination.order import elimination_order
from autopar.solver.oracles import lower_bound
from autopar.solver.presolve.contraction import SMALL, contract_each
from autopar.solver.presolve.pruning import prune_each
from autopar.solver.presolve.reduced_cost_fixing import only, remaining_of_each
from autopar.solver.problem import Edge, Node, Problem


def _clock(monkeypatch: pytest.MonkeyPatch, tick: float) -> list[float]:
    """A clock that goes on by `tick` seconds with every look; returns what it shows."""
    shown = [0.0]

    def look() -> float:
        shown[0] += tick
        return shown[0]

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=look))
    return shown


def _chain(length: int) -> Problem:
    rng = np.random.default_rng(0)
    nodes = tuple(Node(f"n{i}", rng.random(3), np.zeros(3, dtype=np.int64)) for i in range(length))
    return Problem(nodes, tuple(Edge((i, i + 1), rng.random((3, 3))) for i in range(length - 1)))


def test_what_has_begun_may_take_a_moment_more(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _clock(monkeypatch, 0.0)
    until = after(2.0)
    assert until == 2.0 and not is_over(until) and seconds_until(until) == 2.0
    shown[0] = 2.0 + GRACE
    assert is_over(until) and seconds_until(until) == 0.0
    check(until)
    shown[0] += 0.1
    with pytest.raises(TimeLimitError, match="the time limit passed before any choice of strategies was found; give"):
        check(until)
    check(NEVER)


def test_no_search_inside_a_block_outlasts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, 0.0)
    with lasting(5.0):
        assert (after(2.0), after(7.0), moment_in(7.0)) == (2.0, 5.0, 7.0)
        with lasting(9.0):
            assert after(7.0) == 5.0
        with pytest.raises(KeyError), lasting(3.0):
            assert after(7.0) == 3.0
            raise KeyError
        assert after(7.0) == 5.0
    assert after(7.0) == 7.0


def test_what_is_found_may_be_written_down_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _clock(monkeypatch, 0.0)
    with lasting(5.0, 1.0):
        shown[0] = 20.0
        with pytest.raises(TimeLimitError):
            check_whole()
        with until(25.0):
            assert after(7.0) == 25.0 and not whole_is_over()
            check_whole()
            shown[0] = 27.0
            with pytest.raises(TimeLimitError):
                check_whole()
        with until(NEVER):
            check_whole()
        assert after(7.0) == 5.0


@pytest.mark.parametrize(("laid_out", "end"), [(2.0, 95.0), (12.0, 75.0), (200.0, 210.0)])
def test_searches_leave_as_much_time_as_a_large_plan_takes_to_be_written_down(
    monkeypatch: pytest.MonkeyPatch, laid_out: float, end: float
) -> None:
    shown = _clock(monkeypatch, 0.0)
    allowance = Allowance.from_now(100.0)
    shown[0] = laid_out
    with allowance.searching(began=0.0):
        assert after(1000.0) == pytest.approx(end)


def test_what_comes_before_a_search_is_on_its_clock_but_leaves_it_something(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _clock(monkeypatch, 0.0)
    allowance = Allowance.from_now(100.0)
    for before, end in ((20.0, 100.0 * ENDING), (300.0, 300.0 + 100.0 * LEAST)):
        shown[0] = before
        with allowance.searching():
            assert after(100.0) == end


@pytest.mark.parametrize("seconds", [4.0, 10.0 * GRACE / (1 - ENDING)])
def test_of_a_short_time_limit_what_has_begun_has_a_share(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _clock(monkeypatch, 0.0)
    more = min(GRACE, (1 - ENDING) * seconds)
    with Allowance.from_now(seconds).searching():
        until = after(seconds)
        assert grace() == more and not whole_is_over()
        shown[0] = until + more
        check(until)
        assert whole_is_over()
        shown[0] += 0.01
        with pytest.raises(TimeLimitError):
            check(until)
        with lasting(NEVER):
            assert grace() == more
    assert grace() == GRACE and not whole_is_over()


def _diagonals(length: int) -> Problem:
    """Nodes each pair of which is to choose alike."""
    size = math.isqrt(SMALL) + 1
    nodes = tuple(Node(f"n{i}", np.full(size, float(i)), np.zeros(size, dtype=np.int64)) for i in range(length))
    alike = np.where(np.eye(size), 0.0, np.inf)
    return Problem(nodes, tuple(Edge((i, i + 1), alike) for i in range(length - 1)))


CHAIN = _chain(34)
TABLES = Tables(CHAIN)


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (lambda problem: prune_each([problem]), _chain(31)),
        (lambda problem: contract_each([problem]), _diagonals(5)),
        (Tables, _chain(32)),
        (lambda problem: elimination_order(problem, balanced=True), _chain(33)),
        (lambda problem: compile_order(problem, TABLES, range(34)), CHAIN),
        (lambda problem: remaining_of_each([problem], only(problem, [np.arange(3)] * 35), 2.0), _chain(35)),
    ],
)
def test_what_comes_before_an_elimination_looks_at_the_clock(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Problem], object], problem: Problem
) -> None:
    shown = _clock(monkeypatch, 1.0)
    with lasting(2.0), pytest.raises(TimeLimitError):
        work(problem)
    assert shown[0] <= 2.0 + GRACE + 1.0


def test_a_model_of_an_ilp_is_built_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def noted(solver: cp_model.CpSolver, model: cp_model.CpModel) -> object:
        limits.append(solver.parameters.max_time_in_seconds)
        return solver.solve(model)

    monkeypatch.setattr(ilp, "solved", noted)
    shown = _clock(monkeypatch, 1.0)
    late = ilp.solve_ilp(_chain(30), 100.0)  # has 261 pairs
    assert late.status == "timeout" and 100.0 < shown[0] <= 102.0 and not limits
    shown[0] = 0.0
    assert ilp.solve_ilp(_chain(30), 400.0).status == "optimal"
    assert 100.0 < limits[0] < 400.0 - 261.0


def test_every_step_of_an_elimination_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _chain(30)
    tables = Tables(problem)
    elimination = compile_elimination(problem, tables, balanced=True)
    evaluated = evaluate(elimination, tables.weighted(0.0))
    shown = _clock(monkeypatch, 1.0)
    for search in (
        lambda until: evaluate(elimination, tables.weighted(0.0), until),
        lambda until: reduced_costs(problem, elimination, tables, evaluated, deadline=until),
        lambda until: lower_bound(problem, 0.0, until),
    ):
        until = shown[0] + 10.0
        with pytest.raises(TimeLimitError):
            search(until)
        assert shown[0] <= until + GRACE + 1.0
