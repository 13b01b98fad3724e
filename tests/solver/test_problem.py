"""The values of a planning problem check themselves and can price a choice."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.errors import PlanError
from autopar.solver.problem import Edge, Node, Problem, Solution


def _node(name: str = "a", seconds: object = (1.0, 2.0), num_bytes: object = (3, 4)) -> Node:
    return Node(name, np.array(seconds, dtype=np.float64), np.array(num_bytes))


def _edge(source: int, target: int, seconds: object = ((0.0, 1.0), (1.0, 0.0))) -> Edge:
    return Edge((source, target), np.array(seconds))


def _pair(num_bytes: np.ndarray) -> Problem:
    return Problem((_node("a"), _node("b")), (Edge((0, 1), np.zeros((2, 2)), num_bytes),))


def test_a_choice_costs_its_nodes_and_its_edges() -> None:
    problem = Problem((_node("a"), _node("b")), (_edge(0, 1), _edge(1, 0), _edge(1, 1)))
    assert problem.seconds_of((0, 1)) == 1.0 + 2.0 + 1.0 + 1.0 + 0.0
    assert problem.bytes_of((0, 1)) == 7


def test_a_forbidden_pair_costs_infinity() -> None:
    problem = Problem((_node("a"), _node("b")), (_edge(0, 1, ((0.0, np.inf), (0.0, 0.0))),))
    assert problem.seconds_of((0, 1)) == np.inf


def test_arrays_are_shared_and_not_copied() -> None:
    seconds, num_bytes, pairs = np.ones(2), np.ones(2, dtype=np.int64), np.ones((2, 2))
    node, edge = Node("a", seconds, num_bytes), Edge((0, 0), pairs)
    assert node.seconds is seconds and node.num_bytes is num_bytes and edge.seconds is pairs


def test_a_limit_of_none_fits_anything() -> None:
    assert Problem((_node(),)).fits(1 << 60)
    assert not Problem((_node(),), (), 3).fits(4)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (lambda: _node(seconds=()), "shape (0,); give one number per strategy"),
        (lambda: _node(seconds=((1.0,),)), "shape (1, 1); give one number per strategy"),
        (lambda: Node("a", np.array([1, 2]), np.array([3, 4])), "seconds of type int64; give float64"),
        (lambda: _node(seconds=(1.0, np.nan)), "NaN or -inf"),
        (lambda: _node(seconds=(1.0, -np.inf)), "NaN or -inf"),
        (lambda: _node(num_bytes=(1,)), "has 2 strategies but num_bytes of shape (1,)"),
        (lambda: _node(num_bytes=(1.5, 2.0)), "bytes are whole numbers"),
        (lambda: _node(num_bytes=(1, -5)), "has -5 bytes at strategy 1; the least is 0"),
    ],
)
def test_a_node_that_makes_no_sense_is_refused_by_name(node, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Problem((node(),))
    assert "node 'a'" in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (lambda: Problem((_node(),), (_edge(0, 1),)), "edge 0 → 1 leaves the problem; its nodes are 0 to 0"),
        (lambda: Problem((_node(),), (_edge(0, 0, ((1.0,),)),)), "'a' and 'a' need (2, 2)"),
        (lambda: Problem((_node(),), (_edge(0, 0, (1.0, 2.0)),)), "has seconds of shape (2,); give a dim per end, 2"),
        (lambda: Problem((_node(),), (_edge(0, 0, ((np.nan, 0.0), (0.0, 0.0))),)), "edge 0 → 0 has seconds of NaN"),
        (lambda: Problem((_node(),), (), -1), "the memory limit is -1 bytes"),
        (lambda: Edge((0,), np.zeros(2)), "edge 0 has 1 ends; give two, or three different ones"),
        (lambda: Edge((0, 1, 0), np.zeros((2, 2, 2))), "has 3 ends; give two, or three different ones"),
        (lambda: _pair(np.zeros((2, 1), dtype=np.int64)), "num_bytes of shape (2, 1)"),
        (lambda: _pair(np.full((2, 2), -1)), "has -1 bytes somewhere; the least is 0"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(problem, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        problem()
    assert message in str(caught.value)


def test_the_gap_is_a_share_of_the_seconds() -> None:
    assert Solution((0,), 2.0, 0, 1.5, "ilp").gap == 0.25
    assert Solution((0,), 0.0, 0, 0.0, "ilp").gap == 0.0


def test_a_bound_above_the_solution_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="lies above"):
        Solution((0,), 1.0, 0, 1.5, "ilp")
