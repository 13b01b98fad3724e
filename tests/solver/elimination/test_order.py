"""Orders of elimination are those of what each bucket would be at that time, nodes with many neighbours included."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.solver.elimination import order
from autopar.solver.elimination.order import elimination_order
from autopar.solver.problem import Edge, Node, Problem
from tests.solver.random_problems import SHAPES, random_rows


def with_center(problem: Problem) -> Problem:
    """The problem with one more node, next to all others."""
    last, candidates = len(problem.nodes), np.zeros(3)
    sizes = [node.num_strategies for node in problem.nodes]
    center = Node("hub", candidates, candidates.astype(np.int64))
    edges = (Edge((last, node), np.zeros((3, size))) for node, size in enumerate(sizes))
    return Problem((*problem.nodes, center), (*problem.edges, *edges))


def by_growth_anew(problem: Problem) -> list[int]:
    """Each time the node whose elimination enlarges the tables least, by definition."""
    sizes = [node.num_strategies for node in problem.nodes]
    around: dict[int, set[int]] = {node: set() for node in range(len(sizes))}
    for edge in problem.edges:
        for one, other in itertools.permutations(edge.ends, 2):
            around[one].add(other)
    depth, found = [0] * len(sizes), []

    def priority(node: int) -> tuple[float, ...]:
        message = math.prod(sizes[other] for other in around[node])
        growth = message - sum(sizes[node] * sizes[other] for other in around[node])
        return (growth if len(around[node]) > 1 else -math.inf, sizes[node] * message, depth[node], node)

    while around:
        node = min(around, key=priority)
        neighbours = around.pop(node)
        found.append(node)
        for one in neighbours:
            around[one] = (around[one] | neighbours) - {one, node}
            depth[one] = max(depth[one], depth[node] + 1)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_an_order_by_growth_takes_what_grows_least(shape: str) -> None:
    for seed in range(5):
        (problem,) = random_rows(seed, shape, 1, num_nodes=14)
        assert elimination_order(with_center(problem), False, by_growth=True) == by_growth_anew(with_center(problem))


def test_an_order_is_broken_off_at_the_first_bucket_that_is_too_large() -> None:
    """The center's own bucket is never the first: all others have at most two other neighbours."""
    (problem,) = random_rows(0, "repeated", 1, num_nodes=14)
    assert elimination_order(with_center(problem), True, most=27) is not None
    assert elimination_order(with_center(problem), True, most=26) is None


def test_the_order_of_a_graph_does_not_depend_on_what_its_candidates_cost() -> None:
    """And is looked for once: the problem with other rows has the same."""
    one, other = random_rows(0, "repeated", 2, num_nodes=14)
    first, before = elimination_order(one, True), order._order.cache_info()
    assert first is not None
    first.reverse()
    second = elimination_order(other, True)
    assert second == first[::-1] and order._order.cache_info().hits == before.hits + 1
    assert elimination_order(with_center(other), True) != second
