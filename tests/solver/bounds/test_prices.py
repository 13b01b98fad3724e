"""Prices of several rows that prove most, and what is visited on the way to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.bounds import prices
from autopar.solver.bounds.prices import BestPrices, best_prices
from autopar.solver.deadline import NEVER
from autopar.solver.oracles import EliminationOracle
from autopar.solver.problem import Node, Problem
from autopar.solver.solve import solve
from tests.solver.random_problems import brute_force, layered_rows

seeds = st.integers(0, 2**31 - 1)


def test_planes_that_no_linear_program_takes_prove_nothing_more() -> None:
    planes = prices._Planes(np.array([1.0, 8e10]), 80.0)
    bound, where = planes.after((), 1.0, np.array([1e18, -1e9]))
    assert bound == -math.inf and where.tolist() == [0.0, 0.0]


@settings(deadline=None, max_examples=15)
@given(seed=seeds, count=st.integers(1, 3))
def test_what_the_best_prices_mix_is_within_all_budgets_and_costs_what_they_prove(seed: int, count: int) -> None:
    problems = layered_rows(seed, 3, count)
    whole = EliminationOracle.of(problems, NEVER, math.inf)
    assert whole is not None
    found = best_prices(whole, (0.05,) * count, 1.0, 0.0, 0.0, NEVER, worthwhile=1e-9)
    if brute_force(problems) == math.inf:
        return  # there are no best prices
    assert sum(weight for _, weight in found.mixture) == pytest.approx(1.0)
    seconds = sum(weight * problems[0].seconds_of(choices) for choices, weight in found.mixture)
    assert seconds == pytest.approx(found.bound, rel=1e-6)
    for each in problems:
        row_bytes = sum(weight * each.bytes_of(choices) for choices, weight in found.mixture)
        assert row_bytes <= (each.budget or 0) * (1 + 1e-6)


def _evaluations(whole: EliminationOracle, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """The prices at which rows are evaluated from here on."""
    requested, at = [], whole.at
    monkeypatch.setattr(whole, "at", lambda *of: requested.append(of[0]) or at(*of))
    return requested


def test_prices_are_no_longer_looked_for_once_what_they_mix_is_over_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = layered_rows(3, 6, 3)
    whole = EliminationOracle.of(problems, NEVER, math.inf)
    assert whole is not None
    evaluated, mixtures = _evaluations(whole, monkeypatch), []

    def found(is_over: bool) -> tuple[BestPrices, int]:
        evaluated.clear()
        asking = lambda mixture: mixtures.append(mixture) or is_over  # noqa: E731
        best = best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER, is_over_elsewhere=asking)
        return best, len(evaluated)

    (settled, all_evaluations), (ended, few) = found(False), found(True)
    assert not settled.is_over_elsewhere and len(mixtures) > 1
    assert ended.is_over_elsewhere and few < all_evaluations and ended.mixture == mixtures[-1] == mixtures[0]
    assert ended.bound <= settled.bound <= ended.bound + 7.0 * prices.ROUGHLY


def test_a_bound_of_prices_as_high_as_the_cutoff_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = layered_rows(3, 6, 3)
    whole = EliminationOracle.of(problems, NEVER, math.inf)
    assert whole is not None
    evaluated = _evaluations(whole, monkeypatch)
    settled = best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER)
    all_evaluations = len(evaluated)
    evaluated.clear()
    ended = best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER, cutoff=0.9 * settled.bound)
    assert 0.9 * settled.bound <= ended.bound <= settled.bound and len(evaluated) < all_evaluations


@settings(deadline=None, max_examples=15)
@given(seed=seeds, count=st.integers(1, 3))
def test_prices_alone_show_that_nothing_fits(seed: int, count: int) -> None:
    problems = layered_rows(seed, 4, count)
    least = round(solve(problems[-1].in_bytes()).seconds)
    short = [*problems[:-1], Problem(problems[-1].nodes, problems[-1].edges, least - 1)]
    whole = EliminationOracle.of(short, NEVER, math.inf)
    assert whole is not None
    most = 2 * short[0].largest_seconds
    assert best_prices(whole, (0.0,) * count, most, 0.0, 0.0, NEVER, cutoff=most).bound >= most


def test_choices_are_as_near_to_the_best_at_some_prices_as_what_is_open_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = EliminationOracle.of(layered_rows(3, 6, 3), NEVER, math.inf)
    assert whole is not None
    near, at = list[float](), whole.at
    monkeypatch.setattr(whole, "at", lambda *given: near.append(given[-1]) or at(*given))
    best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER, worthwhile=1e-4)
    assert near[0] == prices.ROUGHLY and near[-1] < near[1] and all(each >= 1e-4 for each in near), near


def test_prices_that_are_known_to_be_better_come_next(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EliminationOracle.of(layered_rows(3, 6, 3), NEVER, math.inf)
    assert whole is not None
    evaluated = _evaluations(whole, monkeypatch)
    settled = best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER)
    before = len(evaluated)
    refine = lambda _, bound: (settled.bound, settled.prices)  # noqa: E731
    found = best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER, refine=refine)
    assert found.prices == settled.prices and found.bound == settled.bound
    assert before > 2 and len(evaluated) - before == 2


def test_a_start_that_is_known_is_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EliminationOracle.of(layered_rows(3, 6, 1), NEVER, math.inf)
    assert whole is not None
    first = whole.at((0.0,))
    evaluated = _evaluations(whole, monkeypatch)
    known = best_prices(whole, (0.0,), 7.0, 0.0, 0.0, NEVER, at_start=first)
    without = len(evaluated)
    assert best_prices(whole, (0.0,), 7.0, 0.0, 0.0, NEVER) == known
    assert len(evaluated) - without == without + 1


def test_where_the_same_choices_are_visited_again_prices_are_not_halfway_to_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates = np.array([0.0, 1.0, 0.4])
    nodes = tuple(Node(name, candidates, np.array([10, 0, 5]) + more) for more, name in enumerate("abc"))
    whole = EliminationOracle.of([Problem(nodes, (), 13)], NEVER, math.inf)
    assert whole is not None
    requested = _evaluations(whole, monkeypatch)
    found = best_prices(whole, (0.001,), 1.0, 0.0, 0.0, NEVER)
    assert found.bound == pytest.approx(1.8) and found.prices == pytest.approx((0.12,))
    assert len(requested) == 6  # 17 where each halves what is left
