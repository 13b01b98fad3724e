"""The solver equals brute force on small problems, the plain ILP on larger ones, and explains what has no solution."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, PlanError
from autopar.solver import search as searching
from autopar.solver.elimination import bucket_elimination as buckets
from autopar.solver.elimination import evaluation
from autopar.solver.elimination.bucket_elimination import compile_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate, optimum
from autopar.solver.elimination.min_marginals import reduced_costs
from autopar.solver.infeasibility import conflicting_edges, conflicting_nodes
from autopar.solver.presolve.pruning import prune_each
from autopar.solver.presolve.reduced_cost_fixing import remaining_of_each
from autopar.solver.problem import Edge, Node, Parts, Problem
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.remaining_choices import Counted, RemainingProblem
from autopar.solver.solve import solve
from tests.solver.random_problems import limited

CLOSE = 1e-7  # of the seconds


def _feasible(problem: Problem) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every choice that is allowed and fits, with its seconds."""
    for choices in itertools.product(*(range(node.num_strategies) for node in problem.nodes)):
        seconds = problem.seconds_of(choices)
        if seconds < np.inf and problem.fits(problem.bytes_of(choices)):
            yield seconds, choices


def _random_problem(rng: np.random.Generator, forbidden: float, budget: int | None) -> Problem:
    """Up to six nodes, up to nine edges anywhere (parallel ones and loops too), ties half of the time."""
    whole = rng.random() < 0.5

    def costs(*shape: int) -> np.ndarray:
        values = rng.integers(-2, 6, shape).astype(np.float64) if whole else rng.random(shape)
        return np.where(rng.random(shape) < forbidden, np.inf, values)

    sizes = [int(k) for k in rng.integers(1, 5, rng.integers(1, 7))]
    nodes = tuple(Node(f"n{i}", costs(k), rng.integers(0, 20, k)) for i, k in enumerate(sizes))
    edges = []
    for _ in range(rng.integers(0, 10)):
        count = 3 if len(sizes) > 2 and rng.random() < 0.3 else 2
        ends = tuple(map(int, rng.choice(len(sizes), count, replace=count == 2)))
        shape = tuple(sizes[end] for end in ends)
        row_bytes = rng.integers(0, 9, shape) if rng.random() < 0.4 else None
        edges.append(Edge(ends, costs(*shape), row_bytes))
    return Problem(nodes, tuple(edges), budget)


def _layered_problem(seed: int, num_layers: int, k: int, distinct: bool = False) -> Problem:
    """Return a chain of blocks with skips over them and a parameter next to every block."""
    rng = np.random.default_rng(seed)
    skip, into, across, load = (rng.random((k, k)) for _ in range(4))
    candidates, parameter = rng.random(k), 0.5 * rng.random(k)
    num_bytes = rng.integers(1, 50, k)
    nodes, edges = [Node("input", rng.random(k), np.zeros(k, dtype=np.int64))], []
    for layer in range(num_layers):
        first = len(nodes)
        noise = 0.1 * rng.random(k) if distinct else np.zeros(k)
        nodes += [
            Node(f"{layer}.weight", parameter + noise, num_bytes * 1000),
            Node(f"{layer}.op", candidates, num_bytes),
            Node(f"{layer}.add", candidates, np.zeros(k, dtype=np.int64)),
        ]
        edges += [
            Edge((first, first + 1), load),
            Edge((first - 1, first + 1), into),
            Edge((first + 1, first + 2), across),
            Edge((first + 2, first - 1), skip),
        ]
    return Problem(tuple(nodes), tuple(edges))


def _check_against_brute_force(problem: Problem, solver: str) -> None:
    best = min(_feasible(problem), default=None)
    if best is None:
        with pytest.raises(InfeasibleError):
            solve(problem, solver=solver)  # type: ignore[arg-type]
        return
    solution = solve(problem, solver=solver)  # type: ignore[arg-type]
    assert solution.seconds == pytest.approx(best[0], rel=CLOSE, abs=CLOSE)
    assert solution.seconds == problem.seconds_of(solution.choices)
    assert solution.num_bytes == problem.bytes_of(solution.choices) and problem.fits(solution.num_bytes)
    assert solution.seconds - CLOSE * max(1, abs(solution.seconds)) <= solution.bound <= solution.seconds


seeds = st.integers(0, 2**32 - 1)
shares = st.sampled_from([0.0, 0.2, 0.5])


@settings(deadline=None, max_examples=150)
@given(seed=seeds, forbidden=shares)
def test_without_a_limit_it_equals_brute_force(seed: int, forbidden: float) -> None:
    _check_against_brute_force(_random_problem(np.random.default_rng(seed), forbidden, None), "auto")


@settings(deadline=None, max_examples=60)
@given(seed=seeds, forbidden=shares, budget=st.integers(0, 70))
def test_with_a_limit_it_equals_brute_force(seed: int, forbidden: float, budget: int) -> None:
    _check_against_brute_force(_random_problem(np.random.default_rng(seed), forbidden, budget), "auto")


@settings(deadline=None, max_examples=60)
@given(seed=seeds, forbidden=shares, budget=st.none() | st.integers(0, 70))
def test_the_plain_ilp_equals_brute_force(seed: int, forbidden: float, budget: int | None) -> None:
    _check_against_brute_force(_random_problem(np.random.default_rng(seed), forbidden, budget), "ilp")


@contextmanager
def _everything_too_wide() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "MAX_BYTES", -1)
        yield


@settings(deadline=None, max_examples=60)
@given(seed=seeds, forbidden=shares, budget=st.none() | st.integers(0, 70))
@example(seed=20, forbidden=0.0, budget=14)  # all of it is eliminated, to seconds below nothing
def test_a_graph_too_wide_for_elimination_equals_brute_force(seed: int, forbidden: float, budget: int | None) -> None:
    with _everything_too_wide():
        _check_against_brute_force(_random_problem(np.random.default_rng(seed), forbidden, budget), "auto")


@settings(deadline=None, max_examples=60)
@given(seed=seeds, forbidden=shares, balanced=st.booleans())
def test_reduced_costs_equal_brute_force(seed: int, forbidden: float, balanced: bool) -> None:
    problem = _random_problem(np.random.default_rng(seed), forbidden, None)
    found = list(_feasible(problem))
    tables = Tables(problem)
    elimination = compile_elimination(problem, tables, balanced)
    evaluated = evaluate(elimination, tables.weighted(0.0))
    least = min(found, default=(np.inf, ()))[0]
    assert optimum(elimination, evaluated) == pytest.approx(least)
    if not found:
        return
    reduced_cost, kinds = reduced_costs(problem, elimination, tables, evaluated), tables.kinds(problem)
    for i, node in enumerate(problem.nodes):
        for k in range(node.num_strategies):
            alike = [other for other, kind in enumerate(kinds) if kind == kinds[i]]
            exact = min((seconds for seconds, x in found for other in alike if x[other] == k), default=np.inf) - least
            assert reduced_cost.of_node[i][k] == pytest.approx(exact, abs=1e-9)
    for edge, array in zip(problem.edges, reduced_cost.of_edge, strict=True):
        for place, value in np.ndenumerate(array):
            pairs = (seconds for seconds, x in found if tuple(x[end] for end in edge.ends) == place)
            assert value <= min(pairs, default=np.inf) - least + 1e-9


@settings(deadline=None, max_examples=60)
@given(seed=seeds, forbidden=shares)
def test_large_messages_are_never_built_whole(seed: int, forbidden: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "BLOCK", 1)
        _check_against_brute_force(_random_problem(np.random.default_rng(seed), forbidden, None), "auto")


@settings(deadline=None, max_examples=60)
@given(seed=seeds, forbidden=shares, budget=st.integers(20, 120), share=st.sampled_from([0.1, 0.3, 0.6]))
def test_every_choice_below_the_limit_remains_with_its_cost(
    seed: int, forbidden: float, budget: int, share: float
) -> None:
    problem = _random_problem(np.random.default_rng(seed), forbidden, None)
    assume(problem.forbidden_node is None)
    pruned = prune_each((problem,))[0].problem
    costs = [seconds for seconds, _ in _feasible(pruned)]
    assume(costs)
    tables = Tables(pruned)
    elimination = compile_elimination(pruned, tables, balanced=True)
    limit = share * (max(costs) - min(costs)) + CLOSE
    evaluated = evaluate(elimination, tables.weighted(0.0))
    found = reduced_costs(pruned, elimination, tables, evaluated, limit)
    limited = Problem(pruned.nodes, pruned.edges, budget)
    left = remaining_of_each((limited,), found, limit)[0]
    good = {choices for seconds, choices in _feasible(limited) if seconds <= min(costs) + limit - CLOSE / 2}
    if left.constant == np.inf:
        assert not good
        return
    kept = {left.extend(choices): seconds for seconds, choices in _feasible(left.problem)}
    assert good <= kept.keys()
    for choices, seconds in kept.items():
        assert left.constant + seconds == pytest.approx(limited.seconds_of(choices))
        assert limited.fits(limited.bytes_of(choices))
        in_it = tuple(int(np.flatnonzero(left.kept[n] == choices[n])[0]) for n in left.undecided)
        assert left.problem.bytes_of(in_it) - (left.problem.budget or 0) == limited.bytes_of(choices) - budget
    assert all(len(left.kept[node]) > 1 for node in left.undecided)


@settings(deadline=None, max_examples=100)
@given(seed=seeds, which=st.integers(0, 63))
def test_costs_among_some_nodes_and_at_the_others_are_those_of_all(seed: int, which: int) -> None:
    rng = np.random.default_rng(seed)
    problem = _random_problem(rng, 0.0, None)
    choices = [int(rng.integers(node.num_strategies)) for node in problem.nodes]
    some = np.array([bool(which >> number & 1) for number in range(len(problem.nodes))])
    twice = replace(problem, nodes=tuple(replace(n, num_bytes=2 * n.num_bytes) for n in problem.nodes))
    parts = Parts((problem, twice))
    (found, (row_bytes, more)), at = parts.cost_of(choices, among=some), set(parts.edges_at(~some))
    expected = [part for part, wanted in zip(problem.nodes, some, strict=True) if wanted], problem.edges
    seconds = sum(n.seconds[c] for n, c, wanted in zip(problem.nodes, choices, some, strict=True) if wanted)
    num_bytes = sum(n.num_bytes[c] for n, c, wanted in zip(problem.nodes, choices, some, strict=True) if wanted)
    for number, edge in enumerate(expected[1]):
        assert (number in at) is not all(some[end] for end in edge.ends)
        if number not in at:
            index = tuple(choices[end] for end in edge.ends)
            seconds += edge.seconds[index]
            num_bytes += 0 if edge.num_bytes is None else edge.num_bytes[index]
    assert (found, row_bytes) == (pytest.approx(seconds), num_bytes)
    of_nodes = sum(n.num_bytes[c] for n, c, wanted in zip(problem.nodes, choices, some, strict=True) if wanted)
    assert more == num_bytes + of_nodes
    assert parts.cost_of(choices) == (problem.seconds_of(choices), [problem.bytes_of(choices), twice.bytes_of(choices)])


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("share", [None, 0.0, 0.1, 0.6])
def test_on_layers_with_skips_it_equals_the_plain_ilp(distinct: bool, share: float | None) -> None:
    problem = _layered_problem(seed=3, num_layers=5, k=5, distinct=distinct)
    if share is not None:
        problem = limited(problem, share)
    fast, plain = solve(problem), solve(problem, solver="ilp")
    assert fast.seconds == pytest.approx(plain.seconds, rel=CLOSE)
    assert fast.gap < CLOSE and plain.gap < CLOSE
    assert max(fast.bound, plain.bound) <= min(fast.seconds, plain.seconds) * (1 + 1e-12)


@pytest.mark.parametrize("share", [None, 0.3])
def test_equal_problems_get_equal_solutions(share: float | None) -> None:
    def solved() -> object:
        problem = _layered_problem(seed=1, num_layers=6, k=6)
        return solve(problem if share is None else limited(problem, share))

    assert solved() == solved()


def test_equal_nodes_of_which_some_are_small_fill_the_limit() -> None:
    node = Node("a", np.array([0.0, 1.0]), np.array([10, 0]))
    solution = solve(Problem((node,) * 4, (), 20))
    assert (solution.seconds, solution.bound, solution.num_bytes) == (2.0, 2.0, 20)


def test_the_limit_holds_where_all_bytes_have_a_common_divisor() -> None:
    node = Node("a", np.array([0.0, 1.0]), np.array([10, 0]))
    solution = solve(Problem((node,) * 4, (), 25), solver="ilp")
    assert (solution.seconds, solution.num_bytes) == (2.0, 20)


def test_equal_layers_share_their_steps() -> None:
    problem = _layered_problem(seed=0, num_layers=64, k=3)
    elimination = compile_elimination(problem, Tables(problem), balanced=True)
    assert len(elimination.buckets) == len(problem.nodes)
    assert len(elimination.steps) < len(problem.nodes) / 4


def test_the_first_of_equal_strategies_is_chosen() -> None:
    same = Node("a", np.ones(4), np.zeros(4, dtype=np.int64))
    assert solve(Problem((same, same), (Edge((0, 1), np.zeros((4, 4))),))).choices == (0, 0)


def test_a_problem_without_nodes_has_the_empty_solution() -> None:
    assert solve(Problem(())).choices == ()
    assert solve(Problem(()), solver="ilp").choices == ()


def test_nodes_without_edges_and_without_bytes_are_chosen_alone() -> None:
    nodes = tuple(Node(f"n{i}", np.array([2.0, 1.0]), np.zeros(2, dtype=np.int64)) for i in range(3))
    for solver in ("auto", "ilp"):
        assert solve(Problem(nodes, (), 0), solver=solver).choices == (1, 1, 1)


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(PlanError, match="'magic' is not known; use 'auto' or 'ilp'"):
        solve(Problem(()), solver="magic")  # type: ignore[arg-type]


def test_a_node_with_everything_forbidden_is_named() -> None:
    node = Node("layers.0.up", np.full(3, np.inf), np.zeros(3, dtype=np.int64))
    with pytest.raises(InfeasibleError, match=r"'layers.0.up' has no allowed strategy: all 3 are forbidden"):
        solve(Problem((node,)))


def _chain(pins: dict[int, int], length: int) -> Problem:
    """Nodes of two strategies that must all choose the same one; `pins` fixes some of them."""
    same = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    candidate_lists = [np.zeros(2) for _ in range(length)]
    for node, choice in pins.items():
        candidate_lists[node][1 - choice] = np.inf
    nodes = tuple(Node(f"n{i}", candidates, np.ones(2, dtype=np.int64)) for i, candidates in enumerate(candidate_lists))
    return Problem(nodes, tuple(Edge((i, i + 1), same) for i in range(length - 1)))


@pytest.mark.parametrize("solver", ["auto", "ilp"])
def test_two_pins_that_exclude_each_other_are_named_and_no_others(solver: str) -> None:
    problem = _chain({1: 0, 2: 0, 7: 1}, length=9)
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, solver=solver)  # type: ignore[arg-type]
    named = {f"n{i}" for i in range(9) if f"'n{i}'" in str(caught.value)}
    assert named in ({"n1", "n7"}, {"n2", "n7"})
    assert "exclude each other" in str(caught.value) and "Loosen" in str(caught.value)


def test_two_neighbours_that_exclude_each_other_are_named_with_their_edge() -> None:
    with pytest.raises(InfeasibleError, match="the edge between 'n3' and 'n4' forbids every pair"):
        solve(_chain({3: 0, 4: 1}, length=6))


def test_a_pin_that_leads_nowhere_is_named() -> None:
    blocked = np.array([[np.inf, np.inf], [0.0, 0.0]])
    nodes = _chain({0: 0}, length=2).nodes
    with pytest.raises(InfeasibleError, match="every strategy allowed for node 'n0' leads into a forbidden pair"):
        solve(Problem(nodes, (Edge((0, 1), blocked),)))


def test_edges_that_contradict_each_other_without_any_pin_are_named() -> None:
    problem = _chain({}, length=4)
    differ = np.where(np.eye(2, dtype=bool), np.inf, 0.0)
    problem = Problem(problem.nodes, (*problem.edges, Edge((1, 2), differ)))
    assert conflicting_edges(problem) == (1, 3)
    with pytest.raises(InfeasibleError, match="the forbidden pairs on 'n1' → 'n2', 'n1' → 'n2' leave no choice"):
        solve(problem)


@settings(deadline=None, max_examples=60)
@given(seed=seeds)
def test_a_conflict_is_minimal(seed: int) -> None:
    problem = _random_problem(np.random.default_rng(seed), 0.5, None)
    if next(_feasible(problem), None) is not None:
        return
    nodes = conflicting_nodes(problem)
    if any(not np.isfinite(node.seconds).any() for node in problem.nodes):
        assert not np.isfinite(problem.nodes[nodes[0]].seconds).any()
        return

    def possible(row_bytes: set[int]) -> bool:
        candidate_lists = tuple(
            node if i in row_bytes else Node(node.name, np.zeros(node.num_strategies), node.num_bytes)
            for i, node in enumerate(problem.nodes)
        )
        return next(_feasible(Problem(candidate_lists, problem.edges)), None) is not None

    assert not possible(set(nodes))
    assert all(possible(set(nodes) - {node}) for node in nodes)


@pytest.mark.parametrize("solver", ["auto", "ilp"])
def test_a_limit_below_the_least_memory_is_told_the_least_memory(solver: str) -> None:
    gib = 1 << 30
    node = Node("a", np.array([np.inf, 1.0, 2.0]), np.array([0, 3 * gib, 2 * gib]))
    problem = Problem((node, node), (), 3 * gib)
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, solver=solver)  # type: ignore[arg-type]
    assert "the memory limit is 3.22 GB (3221225472 bytes)" in str(caught.value)
    assert "at least 4.29 GB (4294967296 bytes)" in str(caught.value)
    assert solve(Problem((node, node), (), 4 * gib), solver=solver).choices == (2, 2)  # type: ignore[arg-type]


def test_when_time_runs_out_the_incumbent_comes_with_its_bound_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = limited(_layered_problem(seed=5, num_layers=30, k=8, distinct=True), 0.3)
    best = solve(problem)
    monkeypatch.setattr(searching._Search, "widen", lambda search: setattr(search, "deadline", -math.inf) or False)
    with pytest.warns(RuntimeWarning, match="the time limit passed before the plan was proven best"):
        stopped = solve(problem)
    assert problem.fits(stopped.num_bytes)
    assert stopped.bound <= best.seconds <= stopped.seconds
    assert stopped.gap > 0


def test_when_nothing_is_found_in_time_the_error_says_so() -> None:
    problem = limited(_layered_problem(seed=5, num_layers=30, k=8, distinct=True), 0.05)
    with pytest.raises(PlanError, match="the time limit passed before any choice of strategies was found"):
        solve(problem, solver="ilp", time_limit=0.0)


def test_a_solution_in_time_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(limited(_layered_problem(seed=5, num_layers=4, k=4), 0.3))


def test_where_nothing_is_left_to_count_the_choice_is_empty() -> None:
    assert best_counts(RemainingProblem((Problem((), (), 10),), (0.5,), 1.0, np.inf), 1e-12) == Counted((), 0.0, True)
