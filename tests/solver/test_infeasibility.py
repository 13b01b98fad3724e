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
from autopar.solver.infeasibility import Conflict, MemoryLimitError, describe_conflict, find_conflict, freed
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


def test_the_pin_that_takes_the_room_is_named_with_what_dropping_it_gives() -> None:
    problem = Problem((_pinned("up", 0), _pinned("down", None), _pinned("gate", 1)), (), 8 * GB)
    with pytest.raises(InfeasibleError) as caught:
        solve(problem)
    assert str(caught.value) == (
        "the memory limit is 8.00 GB (8000000000 bytes) per device, but every choice needs at least 11.00 GB "
        "(11000000000 bytes): without the pin on 'up' the least is 3.00 GB. "
        "Raise the limit, use more devices, or loosen one of these pins."
    )


def test_a_limit_that_is_too_low_without_any_pin_says_so() -> None:
    with pytest.raises(MemoryLimitError, match=r"at least 2.00 GB .* whatever is pinned. Raise the limit"):
        solve(Problem((_pinned("up", None), _pinned("down", 1)), (), GB))


def test_pins_beyond_the_named_ones_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infeasibility, "MAX_NAMED", 1)
    with pytest.raises(MemoryLimitError, match=r"the pin on 'a' the least is 10.00 GB \(1 more pins take part\)"):
        solve(Problem((_pinned("a", 0), _pinned("b", 0)), (), 17 * GB))


def test_the_reason_is_worked_out_only_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Problem] = []

    def noted(problem: Problem, deadline: float) -> Conflict:
        requested.append(problem)
        return find_conflict(problem, deadline)

    monkeypatch.setattr(infeasibility, "find_conflict", noted)
    with pytest.raises(MemoryLimitError) as caught:
        solve(Problem((_pinned("up", 0),), (), GB))
    assert not requested
    assert str(caught.value) == str(caught.value)
    assert len(requested) == 1 and caught.value.conflict.nodes == (0,)


@settings(deadline=None, max_examples=60)
@given(seed=seeds, budget=st.integers(0, 60))
def test_a_shortage_is_minimal_and_its_numbers_equal_brute_force(seed: int, budget: int) -> None:
    problem = _random_problem(np.random.default_rng(seed), 4, budget)
    least = _least(problem)
    if least <= budget:
        return
    found = find_conflict(problem)
    pinned = {i for i, node in enumerate(problem.nodes) if not np.isfinite(node.seconds).all()}
    assert (found.needs_memory, found.least_bytes, found.is_minimal) == (True, least, True)
    assert _least(freed(problem, found.nodes)) > budget
    for node in found.nodes:
        assert _least(freed(problem, sorted(set(found.nodes) - {node}))) <= budget
        assert found.least_without[node] == _least(freed(problem, sorted(pinned - {node})))
    assert set(found.frees(budget)) == {n for n, b in found.least_without.items() if b is not None and b <= budget}


def test_with_few_questions_the_set_still_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infeasibility, "MAX_QUESTIONS", 1)
    found = find_conflict(Problem(tuple(_pinned(name, int(name != "b")) for name in "abcd"), (), 9 * GB))
    assert not found.is_minimal and found.nodes == (0, 1, 2, 3)


def test_pins_that_contradict_each_other_need_no_memory() -> None:
    same = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    found = find_conflict(Problem((_pinned("a", 0), _pinned("b", 1)), (Edge((0, 1), same),)))
    assert (found.nodes, found.needs_memory, found.least_bytes) == ((0, 1), False, None)
    assert found.least_without == {0: 2 * GB, 1: 18 * GB} and found.frees(3 * GB) == (0,)


def test_of_many_pins_that_may_conflict_the_first_are_named() -> None:
    same = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    nodes = tuple(_pinned(f"n{i}", i % 2) for i in range(1200))
    problem = Problem(nodes, tuple(Edge((i, i + 1), same) for i in range(1199)))
    assert "'n4', 'n5' and 1,194 more exclude each other, or some of them do" in describe_conflict(problem, -math.inf)


def test_a_graph_too_wide_for_elimination_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MAX_BYTES", -1)
    with pytest.raises(MemoryLimitError, match=r"without the pin on 'up' the least is 3.00 GB"):
        solve(Problem((_pinned("up", 0), _pinned("down", None), _pinned("gate", 1)), (), 8 * GB))


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
