"""Long computations check the clock step by step, and stop shortly after the deadline."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from autopar.errors import TimeLimitError
from autopar.solver import deadline
from autopar.solver.deadline import (
    ENDING,
    GRACE,
    LEAST,
    NEVER,
    Allowance,
    after,
    check,
    grace,
    is_over,
    lasting,
    moment_in,
    seconds_until,
    whole_is_over,
)
from autopar.solver.elimination.bucket_elimination import compile_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate
from autopar.solver.elimination.min_marginals import reduced_costs
from autopar.solver.oracles import lower_bound
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


def test_what_comes_before_a_search_is_on_its_clock_but_leaves_it_something(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _clock(monkeypatch, 0.0)
    allowance = Allowance.from_now(100.0)
    for before, until in ((20.0, 100.0 * ENDING), (300.0, 300.0 + 100.0 * LEAST)):
        shown[0] = before
        with allowance.searching():
            assert after(100.0) == until


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
