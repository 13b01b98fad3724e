"""Several memory rows of one problem are pruned and joined together as each of them is alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.presolve.contraction import contract, contract_each
from autopar.solver.presolve.pruning import prune_each
from autopar.solver.problem import Edge, Node, Problem


def _problems(seed: int) -> list[Problem]:
    """Nodes with forbidden strategies, some of them decided, and an edge from a node to itself; two rows of bytes."""
    rng = np.random.default_rng(seed)
    candidate_lists = rng.random((5, 4))
    for candidates in candidate_lists:
        candidates[rng.permutation(4)[: rng.integers(0, 4)]] = np.inf
    ends = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 0), (0, 2, 4), (1, 3, 4)]
    seconds = [rng.random((4,) * len(each)) for each in ends]
    problems = []
    for budget in (90, 110):
        nodes = tuple(Node(str(i), candidates, rng.integers(0, 9, 4)) for i, candidates in enumerate(candidate_lists))
        row_bytes = [rng.integers(0, 9, (4,) * len(each)) if rng.random() < 0.7 else None for each in ends]
        problems.append(Problem(nodes, tuple(map(Edge, ends, seconds, row_bytes)), budget))
    return problems


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31 - 1))
def test_rows_that_are_pruned_together_keep_what_each_keeps_alone(seed: int) -> None:
    problems = _problems(seed)
    rng = np.random.default_rng(seed)
    for together, problem in zip(prune_each(problems), problems, strict=True):
        (alone,) = prune_each((problem,))
        assert [each.tolist() for each in together.kept] == [each.tolist() for each in alone.kept]
        assert [each.ends for each in together.problem.edges] == [each.ends for each in alone.problem.edges]
        choices = [int(rng.integers(node.num_strategies)) for node in together.problem.nodes]
        whole = problem.cost_of(together.extend(choices))
        assert together.problem.cost_of(choices) == (pytest.approx(whole[0]), whole[1])
        assert together.problem.budget == problem.budget


@pytest.mark.parametrize("joins", [False, True])
def test_rows_that_are_joined_together_are_as_each_is_alone(joins: bool) -> None:
    same = np.where(np.eye(80, dtype=bool), 0.0, np.inf if joins else 1.0)
    rows = []
    for weight in (1, 3):
        nodes = tuple(Node(name, np.arange(80.0), weight * np.arange(80)) for name in "ab")
        rows.append(Problem(nodes, (Edge((0, 1), same),), 100 * weight))
    for together, alone in zip(contract_each(rows), map(contract, rows), strict=True):
        assert len(together.problem.nodes) == (1 if joins else 2)
        choices = together.restrict((7, 7))
        assert choices == alone.restrict((7, 7)) and together.extend(choices) == (7, 7)
        assert together.problem.cost_of(choices) == alone.problem.cost_of(choices)
        assert together.problem.budget == alone.problem.budget
