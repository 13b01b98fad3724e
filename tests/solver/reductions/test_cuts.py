"""What a price of one row leaves of a problem has all choices within the limit, whatever rows are added."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.deadline import NEVER
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.reductions.cuts import Cuts
from autopar.solver.reductions.prepared import Prepared


def _problem(rng: np.random.Generator) -> Problem:
    """A chain of five nodes of three strategies, of which some pairs are forbidden."""
    nodes = tuple(Node(str(n), rng.random(3), rng.integers(0, 30, 3)) for n in range(5))
    edges = []
    for one in range(4):
        seconds = np.where(rng.random((3, 3)) < 0.2, np.inf, rng.random((3, 3)))
        seconds[0] = rng.random(3)
        edges.append(Edge((one, one + 1), seconds, rng.integers(0, 9, (3, 3))))
    return Problem(nodes, tuple(edges), int(rng.integers(40, 110)))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31 - 1), price=st.sampled_from([0.0, 0.01, 0.05]), share=st.sampled_from([0.01, 0.2]))
def test_no_choices_within_limit_and_budget_are_cut(seed: int, price: float, share: float) -> None:
    problem = _problem(np.random.default_rng(seed))
    cuts = Cuts(Prepared.of(problem, NEVER), price)
    cut = cuts.within(share)
    (left,) = cut.of([problem])
    for choices in itertools.product(range(3), repeat=5):
        seconds, held = problem.cost_of(choices)
        if problem.fits(held):
            assert seconds >= cuts.bound * (1 - 1e-9)
            assert left.seconds_of(choices) == seconds or seconds > cut.limit


def test_a_cut_leaves_out_what_costs_more() -> None:
    problem = Problem((Node("a", np.array([1.0, 1.05, 2.0]), np.array([9, 1, 0])),), (), 10)
    (left,) = Cuts(Prepared.of(problem, NEVER), 0.0).within(0.1).of([problem])
    assert np.isfinite(left.nodes[0].seconds).tolist() == [True, True, False]
