"""Problems whose graph is wide all over: split into small bags they bound the optimum, and the solver finds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import solve as solving
from autopar.solver.elimination import Tables, compile_order, evaluate, optimum
from autopar.solver.min_marginals import excesses
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.relaxation import levelling, splitting
from autopar.solver.relaxation.levelling import Levelling, lower_bound
from autopar.solver.relaxation.splitting import split
from autopar.solver.solve import solve

seeds = st.integers(0, 2**31 - 1)


@pytest.fixture
def small_bags(monkeypatch: pytest.MonkeyPatch) -> None:
    """No elimination is cheap, and no bag of three nodes is small."""
    _make_small(monkeypatch)


def _make_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(solving, "DEAR_WORK", 100)
    patch.setattr(levelling, "DEAR_WORK", 100)
    patch.setattr(splitting, "MAX_BAG", 9)


def _wide(seed: int, num_layers: int, k: int = 3, budget: float | None = None) -> Problem:
    """Equal layers of five nodes that all hang together, in a chain; some pairs and strategies are forbidden."""
    rng = np.random.default_rng(seed)

    def table(*shape: int) -> np.ndarray:
        found = rng.random(shape)
        return np.where(rng.random(shape) < 0.1, np.inf, found) if len(shape) == 2 else found

    pairs = [(a, b) for a in range(5) for b in range(a + 1, 5)]
    tables, menus, chain, wide = [table(k, k) for _ in pairs], [table(k) for _ in range(5)], table(k, k), table(k, k, k)
    held, of_pairs = [rng.integers(0, 20, k) for _ in range(5)], rng.integers(0, 5, (k, k))
    nodes, edges = [], []
    for layer in range(num_layers):
        first = len(nodes)
        nodes += [Node(f"{layer}.{i}", menus[i], held[i]) for i in range(5)]
        edges += [Edge((first + a, first + b), each, of_pairs) for (a, b), each in zip(pairs, tables, strict=True)]
        edges.append(Edge((first, first + 2, first + 4), wide))
        edges.append(Edge((first + 1, first + 1), np.where(np.eye(k) > 0, 0.1, np.inf)))
        if layer:
            edges.append(Edge((first - 1, first), chain))
    problem = Problem(tuple(nodes), tuple(edges))
    if budget is None:
        return problem
    least, most = solving.smallest_bytes(problem), solve(problem).num_bytes
    return Problem(problem.nodes, problem.edges, int(least + budget * max(most - least, 0)))


def _feasible(seed: int, *given: float) -> Problem | None:
    """The problem, unless everything is forbidden."""
    try:
        problem = _wide(seed, *given)  # type: ignore[arg-type]
        solving.smallest_bytes(problem)
    except InfeasibleError:
        return None
    return problem


@settings(deadline=None, max_examples=6)
@given(seed=seeds, price=st.sampled_from([0.0, 0.01]))
def test_what_a_split_problem_proves_is_no_more_than_the_optimum(seed: int, price: float) -> None:
    problem = _feasible(seed, 2, 3, 0.5)
    if problem is None:
        return
    best = solve(problem, solver="ilp").seconds
    with pytest.MonkeyPatch.context() as patch:
        _make_small(patch)
        loose = split(problem)
    assert loose is not None
    for _ in range(4):
        for node, copies in loose.copies.items():
            assert copies[0] == node
            together = np.sum([loose.problem.nodes[copy].seconds for copy in copies], axis=0)
            possible = np.isfinite(together)  # a copy may prove that some choices have no others beside them
            np.testing.assert_allclose(together[possible], problem.nodes[node].seconds[possible], atol=1e-12)
            num_bytes = np.sum([loose.problem.nodes[copy].num_bytes for copy in copies], axis=0)
            assert num_bytes.tolist() == problem.nodes[node].num_bytes.tolist()
        tables = Tables(loose.problem)
        elimination = compile_order(loose.problem, tables, loose.order)
        assert elimination.largest <= 3**3, "an edge of three nodes is the largest bag"
        weighted = evaluate(elimination, tables.weighted(price))
        assert optimum(elimination, weighted) - price * (problem.budget or 0) <= best + 1e-9
        loose = loose.levelled(excesses(loose.problem, elimination, weighted), 1e-9, 0.25)


@settings(deadline=None, max_examples=5)
@given(
    seed=seeds,
    num_layers=st.integers(1, 2),
    budget=st.one_of(st.none(), st.floats(0.0, 1.0)),
    near=st.sampled_from([0.0, solving.NEAR, 0.5]),
)
def test_the_optimum_is_found_where_the_graph_is_wide(
    seed: int, num_layers: int, budget: float | None, near: float
) -> None:
    problem = _feasible(seed, num_layers, 3, budget) if budget is not None else _feasible(seed, num_layers)
    if problem is None:
        return
    expected = solve(problem, solver="ilp").seconds
    with pytest.MonkeyPatch.context() as patch:
        _make_small(patch)
        patch.setattr(solving, "NEAR", near)
        found = solve(problem)
        assert lower_bound(problem, found.multiplier) <= expected + 1e-9
    assert found.seconds == pytest.approx(expected, rel=1e-7) and problem.fits(found.num_bytes)
    assert found.gap <= solving.ILP_ROUNDING and problem.seconds_of(found.choices) == pytest.approx(found.seconds)


@settings(deadline=None, max_examples=6)
@given(seed=seeds, above=st.floats(0.0, 0.3))
def test_no_choices_below_the_limit_lose_a_strategy(seed: int, above: float) -> None:
    problem = _feasible(seed, 1)
    if problem is None:
        return
    most = solve(problem).seconds * (1 + above) + 1e-9
    with pytest.MonkeyPatch.context() as patch:
        _make_small(patch)
        loose = split(problem)
    assert loose is not None
    search = Levelling(problem, loose)
    search.least(0.0)
    kept = search.without(0.0, most).kept
    shape = [node.num_strategies for node in problem.nodes]
    near = [choices for choices in np.ndindex(*shape) if problem.seconds_of(choices) <= most]
    assert near and all(choice in kept[node] for choices in near for node, choice in enumerate(choices))


def test_equal_layers_are_split_alike(small_bags: None) -> None:
    loose = split(_wide(3, 6))
    assert loose is not None
    per_layer = [tuple(len(loose.copies.get(5 * layer + i, (0,))) for i in range(5)) for layer in range(6)]
    assert len(set(per_layer[1:-1])) == 1 and max(per_layer[2]) > 1


def test_a_narrow_graph_is_not_split() -> None:
    assert split(_wide(3, 2)) is None
