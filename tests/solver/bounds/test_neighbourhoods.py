"""The search for a good solution at high treewidth: fixed nodes leave a rest of low treewidth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.solver.bounds import neighbourhoods
from autopar.solver.bounds.neighbourhoods import good_solution, separators
from autopar.solver.elimination.bucket_elimination import compile_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.lagrangian import Point, point
from autopar.solver.presolve.reduction import prune, with_fixed
from autopar.solver.problem import Edge, Node, Problem


def _complete(num_nodes: int, num_strategies: int = 4) -> Problem:
    """Return a complete graph; the first node leaves few choices."""
    rng = np.random.default_rng(0)
    sizes = [neighbourhoods.FEW, *[num_strategies] * (num_nodes - 1)]
    nodes = tuple(Node(f"n{i}", rng.random(k), np.zeros(k, dtype=np.int64)) for i, k in enumerate(sizes))
    pairs = itertools.combinations(range(num_nodes), 2)
    return Problem(nodes, tuple(Edge((a, b), rng.random((sizes[a], sizes[b]))) for a, b in pairs))


def test_what_is_held_leaves_the_rest_narrow() -> None:
    problem = _complete(9)
    row_bytes = separators(problem, 3 * 4**3)
    assert len(row_bytes) == 5 and 0 not in row_bytes
    pruned = prune(with_fixed(problem, dict.fromkeys(row_bytes, -1))).problem
    assert compile_elimination(pruned, Tables(pruned), balanced=False).largest <= 3 * 4**3
    assert separators(problem, 4**9) == ()


def test_one_after_the_other_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, requested = _complete(5), []
    monkeypatch.setattr(neighbourhoods, "NARROW", 16)

    def first_choices(part: Problem, deadline: float) -> Point | None:
        requested.append(sum(int(np.isfinite(node.seconds).sum()) == 1 for node in part.nodes))
        return point(part, tuple(int(np.argmin(node.seconds)) for node in part.nodes))

    assert good_solution(problem, first_choices, np.inf) is not None
    count = len(separators(problem, 16))
    assert requested[0] == count and set(requested[1:]) == {count - 1}
