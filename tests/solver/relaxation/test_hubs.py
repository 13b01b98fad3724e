"""Problems whose graph is wide for its hubs: loosened they bound the optimum, and the solver finds it with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import solve as solving
from autopar.solver.elimination import Tables, evaluate, narrow_elimination, optimum
from autopar.solver.min_marginals import excesses
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.relaxation import hubs, levelling
from autopar.solver.relaxation.hubs import MANY, hubs_apart
from autopar.solver.relaxation.levelling import lower_bound
from autopar.solver.relaxation.loosened import Loosened
from autopar.solver.solve import solve

seeds = st.integers(0, 2**31 - 1)


def _with_hubs(seed: int, num_layers: int, num_hubs: int, k: int, budget: float | None) -> Problem:
    """A chain of layers, every one of which hangs on every hub; `budget` lies between the least bytes and the most."""
    rng = np.random.default_rng(seed)
    chain, into = rng.random((k, k)), [rng.random((k, k)) for _ in range(num_hubs)]
    odd = rng.random(k)
    held = rng.integers(0, 9, (k, k))
    nodes = [Node(f"hub{i}", num_layers * 0.2 * rng.random(k), rng.integers(0, 50, k)) for i in range(num_hubs)]
    edges = []
    for layer in range(num_layers):
        seconds = rng.random(k) if layer == num_layers // 2 else odd
        nodes.append(Node(f"layer{layer}", np.where(rng.random(k) < 0.1, np.inf, seconds), rng.integers(1, 20, k)))
        here = len(nodes) - 1
        edges += [Edge((hub, here), table, held) for hub, table in enumerate(into)]
        if layer:
            edges.append(Edge((here - 1, here), chain))
    if any(not np.isfinite(node.seconds).any() for node in nodes):
        nodes = [
            Node(node.name, np.where(np.isfinite(node.seconds), node.seconds, 1.0), node.num_bytes) for node in nodes
        ]
    problem = Problem(tuple(nodes), tuple(edges))
    if budget is None:
        return problem
    least, most = solving.smallest_bytes(problem), solve(problem).num_bytes
    return Problem(problem.nodes, problem.edges, int(least + budget * (most - least)))


def _bound(loose: Loosened, price: float) -> float:
    """What the loosened problem proves at a price of memory."""
    tables = Tables(loose.problem)
    elimination = narrow_elimination(loose.problem, tables)
    assert elimination is not None
    return optimum(elimination, evaluate(elimination, tables.weighted(price))) - price * (loose.problem.budget or 0)


def _levelled(loose: Loosened) -> Loosened:
    tables = Tables(loose.problem)
    elimination = narrow_elimination(loose.problem, tables)
    assert elimination is not None
    return loose.levelled(excesses(loose.problem, elimination, evaluate(elimination, tables.weighted(0.0))), 1e-9)


@settings(deadline=None, max_examples=15)
@given(seed=seeds, num_hubs=st.integers(1, 3), price=st.sampled_from([0.0, 0.003, 0.1]))
def test_shares_add_up_and_what_they_prove_is_no_more_than_the_optimum(seed: int, num_hubs: int, price: float) -> None:
    problem = _with_hubs(seed, 9, num_hubs, 4, 0.5)
    best = solve(problem, solver="ilp").seconds
    loose = hubs_apart(problem)
    assert loose is not None and len(loose.copies) == num_hubs
    for _ in range(3):
        for hub, copies in loose.copies.items():
            assert copies[0] == hub and len(copies) == 9
            together = sum(loose.problem.nodes[copy].seconds for copy in copies)
            assert together == pytest.approx(problem.nodes[hub].seconds)
            assert (
                sum(loose.problem.nodes[copy].num_bytes.sum() for copy in copies) == problem.nodes[hub].num_bytes.sum()
            )
        assert _bound(loose, price) <= best + 1e-9
        loose = _levelled(loose)
    assert lower_bound(problem, price) <= best + 1e-9


@settings(deadline=None, max_examples=20)
@given(
    seed=seeds, num_hubs=st.integers(1, 3), budget=st.one_of(st.none(), st.floats(0.0, 1.0)), cheap=st.integers(0, 800)
)
def test_the_optimum_is_found_with_hubs(seed: int, num_hubs: int, budget: float | None, cheap: int) -> None:
    problem = _with_hubs(seed, MANY + 1, num_hubs, 4, budget)
    expected = solve(problem, solver="ilp").seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "DEAR_WORK", cheap)
        patch.setattr(levelling, "DEAR_WORK", cheap)
        found = solve(problem)
        assert found.seconds == pytest.approx(expected, rel=1e-7) and problem.fits(found.num_bytes)
        assert found.gap == 0 and problem.seconds_of(found.choices) == pytest.approx(found.seconds)
        # Levelled until nothing more is gained, which takes long where a gap is left; that it is a bound, see above.
        proven = lower_bound(problem, found.multiplier) if found.solver == "relaxation" else expected
    assert proven == pytest.approx(expected, rel=1e-7)


def test_copies_that_want_different_things_are_levelled(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _with_hubs(0, 16, 2, 4, None)
    best, loose = solve(problem).seconds, hubs_apart(problem)
    assert loose is not None
    apart, level = _bound(loose, 0.0), _bound(_levelled(loose), 0.0)
    assert apart < best * (1 - 1e-4) and apart < level <= best * (1 + 1e-12)
    monkeypatch.setattr(solving, "DEAR_WORK", 1000)
    found = solve(problem)
    assert found.solver.startswith("relaxation") and found.seconds == pytest.approx(best)


def test_a_graph_without_hubs_has_nothing_to_loosen() -> None:
    problem = _with_hubs(0, MANY, 1, 4, None)
    assert hubs_apart(problem) is None


def test_with_hubs_a_limit_below_the_least_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _with_hubs(1, 12, 2, 4, 0.0)
    assert problem.budget is not None
    tighter = Problem(problem.nodes, problem.edges, problem.budget - 1)
    monkeypatch.setattr(solving, "DEAR_WORK", 100)
    assert solve(problem).num_bytes == problem.budget
    with pytest.raises(InfeasibleError, match=str(problem.budget)):
        solve(tighter)


def test_a_bound_is_proven_at_its_price_alone_as_after_other_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "DEAR_WORK", 0)
    monkeypatch.setattr(levelling, "DEAR_WORK", 0)
    monkeypatch.setattr(hubs, "FEW", 0)
    problem = _with_hubs(91808757, 10, 3, 3, 0.0)
    found = solve(problem)
    assert found.solver == "relaxation" and found.multiplier > 0
    assert lower_bound(problem, found.multiplier) == pytest.approx(found.seconds, rel=1e-7)
