"""Searches within several memory rows keep the best plan when restricted to the choices that one row leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autopar.capture.export import capture, skeleton
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.errors import TimeLimitError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.planning.memory_limit import memory_limit, narrowed
from autopar.planning.options.groups import Memory
from autopar.planning.planner import make_plan
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from autopar.solver.deadline import NEVER
from autopar.solver.low_treewidth import EXACT, Tolerances
from autopar.solver.memory_rows.fixings import Fixings, FixingSearch
from autopar.solver.memory_rows.several_rows import Best, solve_rows
from autopar.solver.problem import Node, Problem


@pytest.fixture(scope="module")
def space() -> Space:
    model, inputs = built_in("tiny-gpt2", 8, 32)
    program = capture(skeleton(model), inputs, {}, training=True)
    return PlanRequest().space(program, Mesh({"dp": 2}, hardware="h100"))


@pytest.fixture(scope="module")
def best(space: Space) -> Plan:
    """The best plan within a limit that several moments exceed without it."""
    return make_plan(space, {}, Settings(Memory(int(0.8 * make_plan(space, {})[0].peak_bytes))))[0]


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(1e-3, 4e-3), (0.2, 0.5)], ids=["near", "wide"])
def test_what_is_left_of_one_row_has_the_best_plan(
    space: Space, best: Plan, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    within = FixingSearch.within
    monkeypatch.setattr(memory_limit, "CHEAP_WORK", 0)
    monkeypatch.setattr(narrowed, "SHARES", shares)
    monkeypatch.setattr(
        FixingSearch, "within", lambda fixings_of, share, known: tried.append(share) or within(fixings_of, share, known)
    )
    found = make_plan(space, {}, Settings(Memory(best.memory_limit)))[0]
    assert best.memory_limit is not None and found.peak_bytes <= best.memory_limit
    assert found.bound <= best.seconds * (1 + 1e-9)
    assert best.bound <= found.seconds * (1 + 1e-9) and found.verify().ok
    assert found.seconds <= best.seconds * (1 + 1e-3)
    assert tried, "the limit was not met at several moments: the test says nothing"


class _NoTime(FixingSearch):
    """Cuts for which there is no time."""

    def __init__(self) -> None:
        pass

    def within(self, share: float, incumbent: float = math.inf) -> Fixings:
        raise TimeLimitError


def test_where_there_is_no_time_for_a_cut_nothing_is_found() -> None:
    fixings_of = narrowed.Narrowed(_NoTime)
    assert fixings_of.best([], [2.0], 1.0, NEVER, 0.0, EXACT) == Best(None, -math.inf, (2.0,), is_searched=False)
    assert not fixings_of.may_be_further(1.0)


class _Line(FixingSearch):
    """Cuts of a problem with one node, whose strategies take 1, 1.5, 2 and 4 seconds."""

    def __init__(self) -> None:
        self.bound = 1.0
        self.tried: list[float] = []

    def within(self, share: float, incumbent: float = math.inf) -> Fixings:
        limit = min(1 + share, incumbent)
        self.tried.append(limit)
        return Fixings((limit >= SECONDS,), limit)


SECONDS = np.array([1.0, 1.5, 2.0, 4.0])


def _problem(budget: int) -> Problem:
    return Problem((Node("x", SECONDS, np.array([9, 8, 7, 1])),), (), budget)


@pytest.mark.parametrize(
    ("budget", "known", "choice", "bound", "tried"),
    [
        (8, math.inf, 1, 1.5, [1.6]),  # in the narrowest cut
        (7, math.inf, 2, 2.0, [1.6, 3.0]),  # in a wider one
        (7, 2.5, 2, 2.0, [1.6, 2.5]),  # which is no wider than what is known
        (1, math.inf, None, 3.0, [1.6, 3.0]),  # beyond the widest
        (1, 2.5, None, 2.5, [1.6, 2.5]),  # nothing is better than what is known
    ],
)
def test_the_narrowest_cut_with_something_better_is_searched(
    budget: int, known: float, choice: int | None, bound: float, tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrowed, "SHARES", (0.6, 2.0))
    fixings_of = _Line()
    searched = narrowed.Narrowed(lambda: fixings_of)
    found = searched.best([_problem(budget)], [0.0], known, NEVER, 0.0, Tolerances(1.0, 0.0))
    assert found.choices == (None if choice is None else (choice,))
    assert found.bound == pytest.approx(bound) and fixings_of.tried == tried
    assert choice is not None or searched.may_be_further(known) == (known == math.inf)


def test_choices_that_were_visited_go_on_where_the_cut_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Sequence[Sequence[int]]] = []

    def searched(*arguments: Any, **options: Any) -> Best:
        given.append(arguments[6])
        return solve_rows(*arguments, **options)

    monkeypatch.setattr(narrowed, "SHARES", (0.6,))
    monkeypatch.setattr(narrowed, "solve_rows", searched)
    fixings_of = narrowed.Narrowed(_Line)
    fixings_of.best([_problem(8)], [0.0], math.inf, NEVER, 0.0, Tolerances(1.0, 0.0), [(1,), (3,)])
    assert given == [[(1,)]]
