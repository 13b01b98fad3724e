"""Nodes that are joined leave the problem what it was."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.presolve import contraction
from autopar.solver.presolve.contraction import contract
from autopar.solver.problem import Edge, Node, Problem


def _random(rng: np.random.Generator) -> Problem:
    """Up to five nodes with edges that forbid most pairs, parallel ones, loops and edges of three ends too."""
    sizes = [int(k) for k in rng.integers(1, 5, rng.integers(1, 6))]

    def costs(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < 0.6, np.inf, rng.random(shape))

    nodes = tuple(Node(f"n{i}", rng.random(k), rng.integers(0, 20, k)) for i, k in enumerate(sizes))
    edges = []
    for _ in range(rng.integers(0, 9)):
        count = 3 if len(sizes) > 2 and rng.random() < 0.3 else 2
        ends = tuple(map(int, rng.choice(len(sizes), count, replace=count == 2)))
        shape = tuple(sizes[end] for end in ends)
        edges.append(Edge(ends, costs(*shape), rng.integers(0, 9, shape) if rng.random() < 0.4 else None))
    return Problem(nodes, tuple(edges), 40 if rng.random() < 0.5 else None)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_every_choice_that_is_left_costs_what_it_cost(seed: int) -> None:
    problem = _random(np.random.default_rng(seed))
    with mock.patch.multiple(contraction, GROWTH=4, SMALL=0):
        smaller = contract(problem)
    allowed = {
        choices: problem.cost_of(choices)
        for choices in np.ndindex(*(node.num_strategies for node in problem.nodes))
        if problem.seconds_of(choices) < np.inf
    }
    found = {
        smaller.extend(choices): smaller.problem.cost_of(choices)
        for choices in np.ndindex(*(node.num_strategies for node in smaller.problem.nodes))
        if smaller.problem.seconds_of(choices) < np.inf
    }
    assert found.keys() == allowed.keys()
    for choices, (seconds, num_bytes) in allowed.items():
        assert np.isclose(found[choices][0], seconds)
        assert found[choices][1] == num_bytes
        assert smaller.extend(smaller.restrict(choices)) == choices


def test_two_nodes_that_must_agree_become_one() -> None:
    k = 100
    agree = np.full((k, k), np.inf)
    np.fill_diagonal(agree, 0.0)
    nodes = tuple(Node(f"n{i}", np.arange(k, dtype=float), np.zeros(k, dtype=np.int64)) for i in range(3))
    free = np.random.default_rng(0).random((k, k))
    smaller = contract(Problem(nodes, (Edge((0, 1), agree), Edge((1, 2), free), Edge((2, 0), free))))
    assert [node.num_strategies for node in smaller.problem.nodes] == [k, k]
    assert smaller.extend((7, 3)) == (7, 7, 3)


def test_nodes_that_leave_each_other_a_choice_stay() -> None:
    k = 100
    nodes = tuple(Node(f"n{i}", np.zeros(k), np.zeros(k, dtype=np.int64)) for i in range(2))
    problem = Problem(nodes, (Edge((0, 1), np.random.default_rng(0).random((k, k))),))
    assert len(contract(problem).problem.nodes) == 2
