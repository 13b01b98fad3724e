"""Choices of a core are read off without what they rule out, where much is forbidden."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.solver.bounds.domains import Domains, consistent
from autopar.solver.oracles import MessageOracle
from autopar.solver.problem import Edge, Node, Problem

seeds = st.integers(0, 2**31 - 1)


def _forbidding(rng: np.random.Generator, ends: list[tuple[int, int]], count: int, k: int, share: float) -> Problem:
    """Nodes of k strategies, and edges that forbid a share of their pairs."""
    nodes = tuple(Node(str(number), rng.random(k), np.zeros(k, dtype=np.int64)) for number in range(count))
    tables = (np.where(rng.random((k, k)) < share, np.inf, rng.random((k, k))) for _ in ends)
    return Problem(nodes, tuple(map(Edge, ends, tables)))


def _taken(problem: Problem, order: list[int]) -> list[int | None]:
    own = {number: node.seconds for number, node in enumerate(problem.nodes)}
    domains = Domains(own, [edge.ends for edge in problem.edges], [edge.seconds for edge in problem.edges])
    found: dict[int, int | None] = {node: domains.take(node, problem.nodes[node].seconds) for node in order}
    return [found[number] for number in range(len(problem.nodes))]


@given(seeds)
def test_in_a_tree_nodes_take_allowed_strategies_in_any_order_where_there_are_any(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends = [(int(rng.integers(0, node)), node) for node in range(1, 7)]
    problem = _forbidding(rng, ends, 7, 3, 0.5)
    taken = _taken(problem, rng.permutation(7).tolist())
    if consistent([problem]) is not None:  # in a tree there are choices then (Freuder 1982)
        assert None not in taken and problem.seconds_of(taken) < np.inf  # type: ignore[arg-type]


@given(seeds)
def test_the_first_node_takes_the_least_strategy_that_leaves_all_others_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = _forbidding(rng, list(itertools.combinations(range(4), 2)), 4, 3, 0.3)
    allowed = {choices[0] for choices in itertools.product(range(3), repeat=4) if problem.seconds_of(choices) < np.inf}
    first = _taken(problem, [0, 1, 2, 3])[0]
    if allowed:
        candidates = problem.nodes[0].seconds
        assert first is not None and candidates[first] <= min(candidates[choice] for choice in allowed)


def test_messages_find_choices_where_what_is_best_next_to_others_leads_nowhere() -> None:
    """Nodes that all hang together, of whose pairs a quarter is forbidden, but for those of one choice of each."""
    found = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = _forbidding(rng, list(itertools.combinations(range(10), 2)), 10, 6, 0.25)
        some, edges = rng.integers(0, 6, 10), []
        for edge in problem.edges:
            table = edge.seconds.copy()
            table[tuple(some[list(edge.ends)])] = 1.0
            edges.append(Edge(edge.ends, table))
        problem = Problem(problem.nodes, tuple(edges))
        bound, best = MessageOracle([problem]).least((0.0,))
        assert best is None or bound <= problem.seconds_of(best) < np.inf
        found += best is not None
    assert found == 20
