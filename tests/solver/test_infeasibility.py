"""Infeasible problems are explained by the fewest pins, and proofs are checked without a search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, PlanError
from autopar.solver import infeasibility
from autopar.solver.elimination import bucket_elimination as buckets
from autopar.solver.infeasibility import conflict_with_limit, describe_conflict, freed, is_feasible
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.remaining_choices import RemainingProblem
from autopar.solver.solve import solve
from tests.solver.certificate import verify
from tests.solver.random_problems import limited

GB = 10**9


def _pinned(name: str, kept: int | None, sizes: tuple[int, ...] = (9 * GB, GB)) -> Node:
    """A node whose first strategies are fast and large; `kept` pins it to one of them."""
    seconds = [float(i) if kept in (None, i) else np.inf for i in range(len(sizes))]
    return Node(name, np.array(seconds), np.array(sizes))


def _random_problem(rng: np.random.Generator, num_nodes: int, budget: int) -> Problem:
    """A connected graph with pins, edge bytes and sometimes an edge of three ends."""
    sizes = [int(k) for k in rng.integers(2, 4, num_nodes)]
    nodes = []
    for i, k in enumerate(sizes):
        seconds = rng.random(k)
        if rng.random() < 0.6:
            seconds[rng.integers(k)] = np.inf
        nodes.append(Node(f"n{i}", seconds, rng.integers(0, 20, k)))
    pairs: list[tuple[int, ...]] = [(int(rng.integers(i)), i) for i in range(1, num_nodes)]
    if num_nodes > 2:
        pairs += [(0, 1, 2)]
    edges = []
    for ends in pairs:
        shape = tuple(sizes[end] for end in ends)
        edges.append(Edge(ends, rng.random(shape), rng.integers(0, 9, shape) if rng.random() < 0.5 else None))
    return Problem(tuple(nodes), tuple(edges), budget)


def _least(problem: Problem) -> float:
    """The least bytes by trying every choice."""
    every = itertools.product(*(range(node.num_strategies) for node in problem.nodes))
    return min((problem.bytes_of(x) for x in every if problem.seconds_of(x) < np.inf), default=math.inf)


seeds = st.integers(0, 2**32 - 1)


def test_the_pin_that_takes_the_room_is_found() -> None:
    problem = Problem((_pinned("up", 0), _pinned("down", None), _pinned("gate", 1)), (), 8 * GB)
    assert conflict_with_limit(problem) == (0,)
    with pytest.raises(InfeasibleError, match=r"limit is 8.00 GB .* every choice needs at least 11.00 GB"):
        solve(problem)


def test_a_limit_that_is_too_low_conflicts_with_no_pin() -> None:
    assert conflict_with_limit(Problem((_pinned("up", None), _pinned("down", 1)), (), GB)) == ()


@settings(deadline=None, max_examples=60)
@given(seed=seeds, budget=st.integers(0, 60))
def test_a_shortage_is_minimal(seed: int, budget: int) -> None:
    problem = _random_problem(np.random.default_rng(seed), 4, budget)
    if not budget < _least(problem) < math.inf:
        return
    found = conflict_with_limit(problem)
    assert _least(freed(problem, found)) > budget
    for node in found:
        assert _least(freed(problem, sorted(set(found) - {node}))) <= budget


def test_with_few_questions_the_set_still_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infeasibility, "MAX_QUESTIONS", 1)
    problem = Problem(tuple(_pinned(name, int(name != "b")) for name in "abcd"), (), 9 * GB)
    assert conflict_with_limit(problem) == (0, 1, 2, 3)


def test_pins_that_contradict_each_other_are_named_though_there_is_a_limit() -> None:
    same = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    with pytest.raises(InfeasibleError, match="the edge between 'a' and 'b' forbids every pair"):
        solve(Problem((_pinned("a", 0), _pinned("b", 1)), (Edge((0, 1), same),), GB))


def test_of_many_pins_that_may_conflict_the_first_are_named() -> None:
    same = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    nodes = tuple(_pinned(f"n{i}", i % 2) for i in range(1200))
    problem = Problem(nodes, tuple(Edge((i, i + 1), same) for i in range(1199)))
    assert "'n4', 'n5' and 1,194 more exclude each other, or some of them do" in describe_conflict(problem, -math.inf)


def test_a_graph_too_wide_for_elimination_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MAX_BYTES", -1)
    problem = Problem((_pinned("up", 0), _pinned("down", None), _pinned("gate", 1)), (), 8 * GB)
    assert conflict_with_limit(problem) == (0,) and is_feasible(problem)
    same = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    assert not is_feasible(Problem((_pinned("a", 0), _pinned("b", 1)), (Edge((0, 1), same),)))


@settings(deadline=None, max_examples=60)
@given(seed=seeds, share=st.sampled_from([None, 0.0, 0.3, 0.7]))
def test_a_solution_is_verified_by_one_evaluation(seed: int, share: float | None) -> None:
    problem = _random_problem(np.random.default_rng(seed), 5, 10**6)
    if share is not None:
        problem = limited(problem, share)
    solution = solve(problem)
    seconds, bound = verify(problem, solution.choices, solution.multiplier)
    assert seconds == solution.seconds and bound <= seconds + 1e-9
    if solution.solver == "elimination" and share is None:
        assert bound == pytest.approx(solution.bound)


def test_what_does_not_prove_itself_is_refused() -> None:
    problem = Problem((_pinned("a", 1), _pinned("b", None)), (), 9 * GB)
    assert verify(problem, (1, 1), 0.0) == (2.0, 1.0)
    with pytest.raises(PlanError, match="forbidden strategy or pair"):
        verify(problem, (0, 1), 0.0)
    with pytest.raises(PlanError, match="take 10000000000 bytes, the limit is 9000000000"):
        verify(problem, (1, 0), 0.0)
    with pytest.raises(PlanError, match="the price of memory is -1"):
        verify(problem, (1, 1), -1)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, budget=st.integers(0, 60), price=st.sampled_from([0.0, 0.01, 0.1]))
def test_counted_choices_equal_brute_force(seed: int, budget: int, price: float) -> None:
    problem = _random_problem(np.random.default_rng(seed), 4, budget)
    every = itertools.product(*(range(node.num_strategies) for node in problem.nodes))
    best = min((problem.seconds_of(x) for x in every if problem.fits(problem.bytes_of(x))), default=math.inf)
    found = best_counts(RemainingProblem((problem,), (price,), 100.0, math.inf), 1e-9)
    assert found.is_proven and (found.choices is None) == (best == math.inf)
    if found.choices is not None:
        assert problem.seconds_of(found.choices) == pytest.approx(best)
        assert problem.fits(problem.bytes_of(found.choices)) and found.bound == pytest.approx(best)
