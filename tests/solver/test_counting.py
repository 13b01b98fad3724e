"""A short count leaves a smaller one, and the best of the two is the best of all."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from autopar.solver.best_below import BestBelow
from autopar.solver.oracles import EliminationOracle
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.remaining import counting_ilp
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.remaining_choices import Counted, RemainingProblem
from autopar.solver.tolerances import EXACT


def _problem(seed: int = 3) -> Problem:
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(str(i), rng.random(4), rng.integers(0, 9, 4)) for i in range(5))
    return Problem(nodes, tuple(Edge((i, i + 1), rng.random((4, 4))) for i in range(4)), 20)


def test_a_bound_as_high_as_the_limit_is_a_proof_though_the_search_has_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, solved = _problem(), counting_ilp.solved
    best = best_counts(RemainingProblem((problem,), (0.05,), 9.0, math.inf), 1e-9)
    assert best.choices is not None
    monkeypatch.setattr(counting_ilp, "solved", lambda *of: solved(*of) and counting_ilp.cp_model.FEASIBLE)
    for limit, is_proven in ((9.0, False), (best.bound - 1e-6, True)):
        found = counting_ilp._Counting(RemainingProblem((problem,), (0.05,), limit, math.inf)).solve(
            1e-9, None, math.inf
        )
        assert found.choices is not None and found.is_proven is is_proven


@pytest.mark.parametrize("place", [0, 1])
def test_a_count_begins_with_known_choices_if_all_of_them_are_left(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem()
    every = itertools.product(range(4), repeat=5)
    known = sorted((problem.seconds_of(x), x) for x in every if problem.fits(problem.bytes_of(x)))[place][1]
    hints, add_hint = [], counting_ilp.cp_model.CpModel.add_hint

    def noted(self: counting_ilp.cp_model.CpModel, variable: object, value: int) -> None:
        hints.append(value)
        add_hint(self, variable, value)  # type: ignore[arg-type]

    monkeypatch.setattr(counting_ilp.cp_model.CpModel, "add_hint", noted)
    whole = RemainingProblem((problem,), (0.05,), 9.0, math.inf)
    found = counting_ilp._Counting(whole).solve(1e-9, known, math.inf)
    assert found.is_proven and sum(hints) == 5  # one choice of each bag
    hints.clear()
    near = RemainingProblem((problem,), (0.05,), problem.seconds_of(known) - 0.5, math.inf)
    counting_ilp._Counting(near).solve(1e-9, known, math.inf)
    assert not hints


def test_nothing_is_counted_below_what_is_proven_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, limits, counted = _problem(0), [], EliminationOracle.counted

    def noted(self: EliminationOracle, prices: tuple[float, ...], limit: float, *args: Any) -> Counted:
        limits.append(limit)
        return counted(self, prices, limit, *args)

    monkeypatch.setattr(EliminationOracle, "counted", noted)
    rows = EliminationOracle.of([problem], math.inf, math.inf)
    assert rows is not None
    best = min(
        problem.seconds_of(x) for x in itertools.product(range(4), repeat=5) if problem.fits(problem.bytes_of(x))
    )
    for above in (-math.inf, best - 1e-6):
        limits.clear()
        rest = BestBelow(rows, 0.0, (0.0,), above, 9.0, math.inf, 0.0, EXACT, math.inf)
        found = rest.search(lambda _: False, lambda _: True)
        assert found.choices is not None and problem.seconds_of(found.choices) == pytest.approx(best, rel=1e-12)
        assert limits and min(limits) >= above and (above > -math.inf or min(limits) < best - 1e-6)
