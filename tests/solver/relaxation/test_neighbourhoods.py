"""The search for a good solution of a wide graph: it looks rarely at the width of what is left, and in time."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from autopar.solver.lagrangian import Point, point
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.relaxation import neighbourhoods
from autopar.solver.relaxation.neighbourhoods import good_solution

NUM_NODES = 60


def _complete(num_nodes: int) -> Problem:
    """Every node beside every other."""
    rng = np.random.default_rng(0)
    nodes = tuple(Node(f"n{i}", rng.random(2), np.zeros(2, dtype=np.int64)) for i in range(num_nodes))
    pairs = itertools.combinations(range(num_nodes), 2)
    return Problem(nodes, tuple(Edge(ends, rng.random((2, 2))) for ends in pairs), None)


@pytest.mark.parametrize("seconds", [-1.0, math.inf])
def test_the_width_is_looked_for_ever_more_rarely_and_not_after_the_deadline(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, looks = _complete(NUM_NODES), []

    def width(problem: Problem, held: list[int]) -> int:
        looks.append(len(held))
        return neighbourhoods.NARROW + (len(held) < NUM_NODES - 10)

    def first_choices(problem: Problem, deadline: float) -> Point | None:
        return point(problem, tuple(int(np.argmin(node.seconds)) for node in problem.nodes))

    monkeypatch.setattr(neighbourhoods, "_width", width)
    found = good_solution(problem, first_choices, time.monotonic() + seconds if math.isfinite(seconds) else math.inf)
    assert found is not None and np.isfinite(problem.seconds_of(found.choices))
    assert len(looks) <= (1 if seconds < 0 else 10), "one for each four nodes were 13"
