"""Fixings from the price of one row keep all choices within the limit, whatever rows are added."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.deadline import NEVER
from autopar.solver.elimination import evaluation
from autopar.solver.memory_rows import fixings as cutting
from autopar.solver.memory_rows.fixings import FixingSearch
from autopar.solver.prepared import Prepared
from autopar.solver.problem import Edge, Floats, Node, Problem
from autopar.solver.solve import solve_narrow, solve_prepared


def _problem(rng: np.random.Generator) -> Problem:
    """A chain of five nodes of three strategies, of which some pairs are forbidden."""
    nodes = tuple(Node(str(n), rng.random(3), rng.integers(0, 30, 3)) for n in range(5))
    edges = []
    for one in range(4):
        seconds = np.where(rng.random((3, 3)) < 0.2, np.inf, rng.random((3, 3)))
        seconds[0] = rng.random(3)
        edges.append(Edge((one, one + 1), seconds, rng.integers(0, 9, (3, 3))))
    return Problem(nodes, tuple(edges), int(rng.integers(40, 110)))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31 - 1), price=st.sampled_from([0.0, 0.01, 0.05]), share=st.sampled_from([0.01, 0.2]))
def test_no_choices_within_limit_and_budget_are_cut(seed: int, price: float, share: float) -> None:
    problem = _problem(np.random.default_rng(seed))
    cuts = FixingSearch(Prepared.of(problem, NEVER), price)
    cut = cuts.within(share)
    (left,) = cut.of([problem])
    for choices in itertools.product(range(3), repeat=5):
        seconds, row_bytes = problem.cost_of(choices)
        if problem.fits(row_bytes):
            assert seconds >= cuts.bound * (1 - 1e-9)
            assert left.seconds_of(choices) == seconds or seconds > cut.limit


def test_a_cut_leaves_out_what_costs_more() -> None:
    problem = Problem((Node("a", np.array([1.0, 1.05, 2.0]), np.array([9, 1, 0])),), (), 10)
    (left,) = FixingSearch(Prepared.of(problem, NEVER), 0.0).within(0.1).of([problem])
    assert np.isfinite(left.nodes[0].seconds).tolist() == [True, True, False]


def _price(prepared: Prepared) -> float:
    """The price that a search ends with."""
    found = solve_narrow(prepared, gap=1.0)
    assert found is not None
    return found.multiplier


def test_the_evaluation_that_a_search_ended_with_is_taken_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[bool] = []

    def counted(*arguments: Any) -> list[Floats]:
        evaluated.append(True)
        return evaluation.evaluate(*arguments)

    monkeypatch.setattr(cutting, "evaluate", counted)
    problem = Problem((Node("a", np.array([1.0, 2.0]), np.array([9, 1])),), (), 5)
    prepared = Prepared.of(problem, NEVER)
    price = _price(prepared)
    taken = FixingSearch(prepared, price)
    assert not evaluated
    anew = FixingSearch(prepared, price)
    assert len(evaluated) == 1
    other = FixingSearch(Prepared.of(problem, NEVER), price + 1.0)
    assert taken.bound == anew.bound != other.bound
    for one, same in zip(taken.within(2.0).kept, anew.within(2.0).kept, strict=True):
        assert one.tolist() == same.tolist()


def test_the_evaluation_of_another_price_is_not_taken_over() -> None:
    problem = Problem((Node("a", np.array([1.0, 2.0]), np.array([9, 1])),), (), 5)
    prepared = Prepared.of(problem, NEVER)
    price = _price(prepared)
    assert FixingSearch(prepared, 2 * price).bound == FixingSearch(Prepared.of(problem, NEVER), 2 * price).bound


def test_a_search_from_which_nothing_goes_on_keeps_no_tables() -> None:
    problem = Problem((Node("a", np.array([1.0, 2.0]), np.array([9, 1])),), (), 5)
    prepared = Prepared.of(problem, NEVER)
    solve_prepared(prepared, gap=1.0)
    assert prepared.visited.points
    assert not prepared.visited.evaluated
