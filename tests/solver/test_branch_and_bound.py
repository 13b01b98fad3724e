"""Branch and bound finds what brute force finds, also where prices prove little, and stops when it has to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import TimeLimitError
from autopar.solver import branch_and_bound as branching
from autopar.solver.best_below import BestBelow
from autopar.solver.bounds.prices import best_prices
from autopar.solver.branch_and_bound import Fits, branch_and_bound
from autopar.solver.deadline import NEVER
from autopar.solver.oracles import EliminationOracle
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.remaining import counting_ilp
from autopar.solver.remaining.remaining_choices import Counted
from autopar.solver.search import Stated, search
from autopar.solver.tolerances import EXACT, Tolerances
from tests.solver.random_problems import SHAPES, random_rows

CLOSE = 1e-9


def best_of(problems: Sequence[Problem]) -> float:
    """Return the least seconds of all choices within all budgets."""
    every = itertools.product(*(range(node.num_strategies) for node in problems[0].nodes))
    within = (x for x in every if all(each.fits(each.bytes_of(x)) for each in problems))
    return min(map(problems[0].seconds_of, within), default=math.inf)


def branched(
    problems: Sequence[Problem],
    most: float = math.inf,
    fits: Fits = lambda _: True,
    deadline: float = NEVER,
    gap: float = 0.0,
) -> tuple[Counted, float]:
    """Return what branch and bound finds, and what prices alone prove."""
    rows = EliminationOracle.of(problems, NEVER, math.inf)
    assert rows is not None
    priced = best_prices(rows, (0.01,) * len(problems), 1.0, 0.0, 0.0, NEVER)
    most = min(most, sum(float(n.seconds.max()) for n in problems[0].nodes) + len(problems[0].edges) + 1)
    return branch_and_bound(rows, priced, 0.0, most, gap, deadline, fits), priced.bound


def large_tensors(count: int = 12) -> Problem:
    """A knapsack of a few large tensors that are stored whole, or in parts at a price: no mixture is near an answer."""
    rng = np.random.default_rng(1)
    num_bytes = rng.integers(60, 100, count)
    nodes = tuple(
        Node(str(i), np.array([0.0, 1 + rng.random()]), np.array([each, 0])) for i, each in enumerate(num_bytes)
    )
    edges = tuple(Edge((i, i + 1), rng.random((2, 2)) / 10) for i in range(count - 1))
    return Problem(nodes, edges, int(num_bytes.sum()) // 2 - 7)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES), count=st.integers(1, 3))
def test_it_finds_what_brute_force_finds(seed: int, shape: str, count: int) -> None:
    problems = random_rows(seed, shape, count, 6)
    best, (found, _) = best_of(problems), branched(problems)
    assert found.is_proven and (found.choices is None) == math.isinf(best)
    if found.choices is not None:
        assert all(each.fits(each.bytes_of(found.choices)) for each in problems)
        assert problems[0].seconds_of(found.choices) == pytest.approx(best, rel=CLOSE)
        assert best - 2 * CLOSE <= found.bound <= best + CLOSE


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES), gap=st.sampled_from([0.01, 0.1, 0.5]))
def test_what_is_near_enough_has_a_bound_that_holds(seed: int, shape: str, gap: float) -> None:
    problems = random_rows(seed, shape, 2, 6)
    best, (found, _) = best_of(problems), branched(problems, gap=gap)
    assert found.is_proven and found.bound <= best + CLOSE
    if found.choices is not None:
        seconds = problems[0].seconds_of(found.choices)
        assert seconds - found.bound <= gap * seconds + CLOSE


def test_it_closes_the_gap_of_prices_where_large_tensors_fill_the_memory() -> None:
    problem = large_tensors()
    best, (found, priced) = best_of([problem]), branched([problem])
    assert priced < 0.99 * best, "the case has lost its subject"
    assert found.is_proven and found.bound == pytest.approx(best, rel=1e-8)


def test_it_divides_few_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    priced, halves = branching._Search._priced, list[object]()
    monkeypatch.setattr(branching._Search, "_priced", lambda *args: halves.append(args) or priced(*args))
    found, _ = branched([large_tensors()])
    assert found.is_proven and len(halves) < 200, "of 4096 choices"


def test_nothing_better_than_what_is_known_is_proven_too() -> None:
    problem = large_tensors()
    best = best_of([problem])
    found, _ = branched([problem], most=best)
    assert found.choices is None and found.is_proven and found.bound == pytest.approx(best, rel=1e-8)


def test_choices_that_do_not_fit_elsewhere_end_it() -> None:
    seen = list[tuple[int, ...]]()
    found, priced = branched([large_tensors()], fits=lambda choices: bool(seen.append(choices)))
    assert len(seen) == 1 and seen[0] == found.choices and not found.is_proven and found.bound >= priced


def test_the_bound_holds_where_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = large_tensors()
    found, priced = branched([problem], deadline=-1.0)
    assert not found.is_proven and found.choices is None and found.bound == priced
    halves, price = list[object](), branching._Search._priced

    def late(*args: Any) -> Any:
        halves.append(args)
        if len(halves) > 8:
            raise TimeLimitError("the time is over")
        return price(*args)

    monkeypatch.setattr(branching._Search, "_priced", late)
    found, _ = branched([problem])
    assert not found.is_proven and priced <= found.bound <= best_of([problem])


@pytest.mark.parametrize("tolerances", [EXACT, Tolerances(counted=math.inf), Tolerances(branches=False)])
def test_what_counts_leave_undecided_is_branched_unless_that_is_enough(
    tolerances: Tolerances, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = large_tensors()
    rows = EliminationOracle.of([problem], NEVER, math.inf)
    monkeypatch.setattr(counting_ilp, "EFFORT", 1e-9)
    assert rows is not None
    rest = BestBelow(rows, 0.0, (0.01,), -math.inf, 30.0, NEVER, 0.0, tolerances, math.inf)
    found = rest.search(lambda _: False, lambda choices: True)
    assert found.is_searched is (tolerances == EXACT)
    if found.is_searched:
        assert found.choices is not None
        assert problem.seconds_of(found.choices) == pytest.approx(best_of([problem]), rel=1e-8)


def test_a_search_branches_again_with_the_rows_that_its_choices_exceed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting_ilp, "EFFORT", 1e-9)
    first = large_tensors(8)
    nodes = [Node(node.name, node.seconds, node.num_bytes[::-1].copy()) for node in first.nodes]
    other = Problem(tuple(nodes), first.edges, first.budget)

    class Source(Stated):
        def problems(self) -> Sequence[Problem]:
            return self.rows if seen else self.rows[:1]

        def fits(self, choices: tuple[int, ...]) -> bool:
            is_within = super().fits(choices)
            if not is_within:
                seen.append(choices)
            return is_within

    seen = list[tuple[int, ...]]()
    found = search(Source((first, other)), NEVER)
    best = best_of([first, other])
    assert seen and (found.choices is None) == math.isinf(best)
    if found.choices is not None:
        assert found.seconds == pytest.approx(best, rel=1e-8)
