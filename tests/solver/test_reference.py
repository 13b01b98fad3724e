"""On random chains of blocks with skips, pins and edge bytes, the solver equals the plain ILP."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.solve import solve
from tests.solver.random_problems import limited

CLOSE = 1e-7  # of the seconds: the ILP counts in rounded units


def _chain_with_skips(rng: np.random.Generator, num_blocks: int, num_axes: int) -> Problem:
    """Blocks that repeat, each with a skip and a node of modes; strategies are places along `num_axes` axes."""
    k = num_axes + 2
    candidate_lists = [(rng.random(k), rng.integers(0, 50, k)) for _ in range(2)]
    along, skip = rng.random((k, k)), rng.random((k, k))
    modes, row_bytes = rng.random((3, k, k)), rng.integers(0, 30, (3, k, k))
    nodes, edges = [Node("input", rng.random(k), np.zeros(k, dtype=np.int64))], []
    for block in range(num_blocks):
        first = len(nodes)
        nodes += [Node(f"{block}.{i}", *candidates) for i, candidates in enumerate(candidate_lists)]
        nodes.append(Node(f"{block}.mode", np.zeros(3), np.zeros(3, dtype=np.int64)))
        edges += [
            Edge((first - 2 if block else 0, first), along),
            Edge((first + 2, first, first + 1), modes, row_bytes),
        ]
        edges.append(Edge((first - 2 if block else 0, first + 1), skip))
    for place in rng.choice(len(nodes), rng.integers(0, 3), replace=False):
        node = nodes[place]
        allowed = rng.random(node.num_strategies) < 0.5
        nodes[place] = Node(node.name, np.where(allowed, node.seconds, np.inf), node.num_bytes)
    return Problem(tuple(nodes), tuple(edges))


def _check(seed: int, num_blocks: int, num_axes: int, share: float | None) -> None:
    problem = _chain_with_skips(np.random.default_rng(seed), num_blocks, num_axes)
    if any(not np.isfinite(node.seconds).any() for node in problem.nodes):
        with pytest.raises(InfeasibleError):
            solve(problem)
        return
    if share is not None:
        problem = limited(problem, share)
    fast, plain = solve(problem), solve(problem, solver="ilp")
    assert fast.seconds == pytest.approx(plain.seconds, rel=CLOSE)
    assert fast.gap < CLOSE and fast.seconds == problem.seconds_of(fast.choices)
    assert problem.fits(fast.num_bytes) and fast.num_bytes == problem.bytes_of(fast.choices)
    assert solve(problem) == fast


shares = st.sampled_from([None, 0.0, 0.05, 0.3, 0.7])


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), num_axes=st.integers(1, 4), share=shares)
def test_on_small_problems_it_equals_the_reference(seed: int, num_axes: int, share: float | None) -> None:
    _check(seed, 2, num_axes, share)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), share=shares)
def test_on_larger_problems_it_equals_the_reference(seed: int, share: float | None) -> None:
    _check(seed, 6, 4, share)
