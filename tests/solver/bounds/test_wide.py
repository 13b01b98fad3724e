"""Problems of high treewidth, by few nodes or all over: messages bound the optimum; the solver finds it with them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.solver import oracles
from autopar.solver.bounds import core
from autopar.solver.bounds.core import core_of
from autopar.solver.bounds.domains import consistent
from autopar.solver.bounds.message_passing import MessagePassing
from autopar.solver.deadline import NEVER, after
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.oracles import EliminationOracle, MessageOracle, lower_bound
from autopar.solver.presolve.reduced_cost_fixing import remaining_of_each
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.solve import solve
from tests.solver.random_problems import least_bytes

seeds = st.integers(0, 2**31 - 1)
CLOSE = 1e-7  # of the seconds: the reference counts in rounded units
kinds = st.sampled_from(["hubs", "cliques", "crowd"])
shrinks = st.sampled_from([0, 9, 27, 2_000_000])  # entries of a bag that is eliminated beforehand


def _make_wide(patch: pytest.MonkeyPatch, shrinks: int = 0) -> None:
    """No elimination is cheap, and bags of so many entries are small."""
    patch.setattr(oracles, "EXPENSIVE_WORK", 0)
    patch.setattr(core, "MAX_BAG", shrinks)


def _table(rng: np.random.Generator, *shape: int) -> np.ndarray:
    found = rng.random(shape)
    return np.where(rng.random(shape) < 0.1, np.inf, found) if len(shape) == 2 else found


def _with_centers(rng: np.random.Generator, num_layers: int, k: int) -> Problem:
    """Return a chain of layers, each connected to two shared reshards."""
    chain, into, candidates = _table(rng, k, k), [_table(rng, k, k) for _ in range(2)], rng.random(k)
    nodes = [Node(f"hub{i}", rng.random(k), rng.integers(0, 50, k)) for i in range(2)]
    edges = []
    for layer in range(num_layers):
        odd = rng.random(k) if layer == num_layers // 2 else candidates
        nodes.append(Node(f"layer{layer}", odd, rng.integers(1, 20, k)))
        here = len(nodes) - 1
        edges += [Edge((center, here), table, rng.integers(0, 9, (k, k))) for center, table in enumerate(into)]
        if layer:
            edges.append(Edge((here - 1, here), chain))
    return Problem(tuple(nodes), tuple(edges))


def _in_cliques(rng: np.random.Generator, num_layers: int, k: int) -> Problem:
    """Equal layers of five nodes that all hang together, in a chain, with edges of one and of three ends."""
    pairs = [(a, b) for a in range(5) for b in range(a + 1, 5)]
    tables, candidate_lists, chain, triple = (
        [_table(rng, k, k) for _ in pairs],
        [_table(rng, k) for _ in range(5)],
        _table(rng, k, k),
        _table(rng, k, k, k),
    )
    row_bytes, of_pairs = [rng.integers(0, 20, k) for _ in range(5)], rng.integers(0, 5, (k, k))
    nodes: list[Node] = []
    edges: list[Edge] = []
    for layer in range(num_layers):
        first = len(nodes)
        nodes += [Node(f"{layer}.{i}", candidate_lists[i], row_bytes[i]) for i in range(5)]
        edges += [Edge((first + a, first + b), each, of_pairs) for (a, b), each in zip(pairs, tables, strict=True)]
        edges.append(Edge((first, first + 2, first + 4), triple))
        edges.append(Edge((first + 1, first + 1), np.where(np.eye(k) > 0, 0.1, np.inf)))
        if layer:
            edges.append(Edge((first - 1, first), chain))
    return Problem(tuple(nodes), tuple(edges))


def _in_a_crowd(rng: np.random.Generator, num_more: int, k: int) -> Problem:
    """Six nodes that all hang together, and some that hang on four of them each."""
    ends = list(itertools.combinations(range(6), 2))
    for more in range(6, 6 + num_more):
        ends += [(int(node), more) for node in rng.permutation(6)[:4]]
    nodes = tuple(Node(str(i), rng.random(k), rng.integers(0, 20, k)) for i in range(6 + num_more))
    return Problem(nodes, tuple(Edge(each, _table(rng, k, k), rng.integers(0, 5, (k, k))) for each in ends))


def _problem(seed: int, kind: str, budget: float | None = None, num_layers: int = 2) -> Problem | None:
    """None where everything is forbidden; `budget` lies between the least bytes and those of the best."""
    rng = np.random.default_rng(seed)
    made = {"hubs": _with_centers, "cliques": _in_cliques, "crowd": _in_a_crowd}[kind]
    problem = made(rng, 3 * num_layers if kind == "hubs" else num_layers, 2 if kind == "crowd" else 3)
    try:
        least, most = least_bytes(problem), solve(problem).num_bytes
    except InfeasibleError:
        return None
    room = None if budget is None else int(least + budget * max(most - least, 0))
    return Problem(problem.nodes, problem.edges, room)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, kind=kinds, price=st.sampled_from([0.0, 0.01, 0.1]), shrinks=shrinks)
def test_a_bound_never_falls_and_is_no_more_than_the_optimum(seed: int, kind: str, price: float, shrinks: int) -> None:
    problem = _problem(seed, kind, 0.5)
    if problem is None:
        return
    best, paid = solve(problem, solver="ilp").seconds, price * (problem.budget or 0)
    with pytest.MonkeyPatch.context() as patch:
        _make_wide(patch, shrinks)
        (pruned,) = consistent([problem]) or [None]
        assert pruned is not None
        messages, before = MessagePassing([pruned.problem]), -np.inf
        for each in (price / 2, price):  # messages of another price are a start
            messages.at(each)
        for _ in range(4):
            messages.sweep()
            assert messages.bound >= before - 1e-12 and messages.bound - paid <= best + 1e-9
            assert messages.cost >= messages.bound - 1e-9
            if messages.cost < np.inf:  # else no allowed choices were visited
                seconds, num_bytes = pruned.problem.cost_of(messages.choices())
                assert seconds + price * num_bytes == pytest.approx(messages.cost)
            before = messages.bound
        assert lower_bound(problem, price) <= best + 1e-9


@settings(deadline=None, max_examples=15)
@given(seed=seeds, kind=kinds, above=st.floats(0.0, 0.3), shrinks=shrinks)
def test_no_choices_below_the_limit_lose_a_strategy(seed: int, kind: str, above: float, shrinks: int) -> None:
    problem = _problem(seed, kind, num_layers=1)
    if problem is None:
        return
    most = solve(problem).seconds * (1 + above) + 1e-9
    with pytest.MonkeyPatch.context() as patch:
        _make_wide(patch, shrinks)
        oracle = MessageOracle([problem])
        left = remaining_of_each((problem,), oracle.reduced_costs((0.0,), most - oracle.least((0.0,))[0]), 0.0)[0]
    shape = [node.num_strategies for node in problem.nodes]
    near = [choices for choices in np.ndindex(*shape) if problem.seconds_of(choices) <= most]
    assert near and all(choice in left.kept[node] for choices in near for node, choice in enumerate(choices))


@settings(deadline=None, max_examples=15)
@given(seed=seeds, kind=kinds, budget=st.one_of(st.none(), st.floats(0.0, 1.0)), shrinks=shrinks)
@example(seed=0, kind="crowd", budget=None, shrinks=2_000_000)  # joints forbid a strategy that no pair forbids
def test_the_optimum_is_found_where_the_graph_is_wide(seed: int, kind: str, budget: float | None, shrinks: int) -> None:
    problem = _problem(seed, kind, budget)
    if problem is None:
        return
    expected = solve(problem, solver="ilp").seconds
    with pytest.MonkeyPatch.context() as patch:
        _make_wide(patch, shrinks)
        found = solve(problem)
    assert found.seconds == pytest.approx(expected, rel=CLOSE) and problem.fits(found.num_bytes)
    assert found.gap <= CLOSE and problem.seconds_of(found.choices) == pytest.approx(found.seconds)


def test_without_circles_the_first_sweep_proves_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    _make_wide(monkeypatch)
    rng = np.random.default_rng(0)
    nodes = tuple(Node(str(i), rng.random(4), np.zeros(4, dtype=np.int64)) for i in range(12))
    edges = tuple(Edge((int(rng.integers(0, i)), i), rng.random((4, 4))) for i in range(1, 12))
    problem = Problem(nodes, edges)
    messages = MessagePassing([problem])
    messages.at(0.0)
    messages.sweep()
    assert problem.seconds_of(messages.choices()) == pytest.approx(messages.bound)
    assert messages.bound == pytest.approx(solve(problem, solver="ilp").seconds)


def test_what_four_nodes_have_in_common_is_one_where_that_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    crowd = _in_a_crowd(rng, 3, 2)
    monkeypatch.setattr(core, "MAX_ENDS", 4)
    found = core_of(crowd, Tables(crowd))
    assert set(found.nodes) == set(range(6)) and {len(joint.ends) for joint in found.joints} >= {4}
    large = _in_a_crowd(rng, 3, 22)  # 22**4 entries are too many
    assert {len(joint.ends) for joint in core_of(large, Tables(large)).joints} == {2}


def test_ends_come_in_order_of_their_sizes_and_the_longest_rows_lie_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_BAG", 0)
    rng, sizes, ends = np.random.default_rng(0), (4, 5, 2), (1, 0, 2)
    nodes = tuple(Node(str(size), rng.random(size), np.zeros(size, dtype=np.int64)) for size in sizes)
    table = rng.random([sizes[end] for end in ends])
    problem = Problem(nodes, (Edge(ends, table), Edge((1, 2), rng.random((5, 2)))))
    (joint,) = core_of(problem, Tables(problem)).joints
    assert joint.ends == (2, 0, 1)
    bound, found = MessageOracle([problem]).least((0.0,))
    assert found is not None
    seconds = problem.seconds_of(found)
    assert bound <= seconds == pytest.approx(solve(problem, solver="ilp").seconds)


def _counting_sweeps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of sweeps of messages from now on, as the one element of a list."""
    swept, sweep = [0], MessagePassing.sweep

    def counted(messages: MessagePassing) -> None:
        swept[0] += 1
        sweep(messages)

    monkeypatch.setattr(MessagePassing, "sweep", counted)
    return swept


def test_a_bound_that_is_known_takes_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(0, "cliques", 0.5)
    assert problem is not None
    _make_wide(monkeypatch)
    search, swept = MessageOracle([problem]), _counting_sweeps(monkeypatch)
    search.at((0.01,))
    taken = swept[0]
    search.reduced_costs((0.01,), 0.1)
    assert taken and swept[0] == taken
    MessageOracle([problem]).reduced_costs((0.01,), 0.1)
    assert swept[0] == 2 * taken


def _with_another_row(seed: int, problem: Problem) -> list[Problem]:
    rng = np.random.default_rng(seed)
    nodes = tuple(replace(each, num_bytes=rng.integers(0, 50, each.num_strategies)) for each in problem.nodes)
    edges = tuple(replace(each, num_bytes=None) for each in problem.edges)
    return [problem, replace(problem, nodes=nodes, edges=edges)]


def test_where_a_row_is_added_messages_go_on_from_those_of_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(0, "cliques", 0.5)
    assert problem is not None
    _make_wide(monkeypatch)
    rows = _with_another_row(0, problem)
    known = MessageOracle(rows[:1])
    before, _ = known.least((0.01,))
    monkeypatch.setattr(oracles, "MAX_SWEEPS", 1)
    begun, anew = (MessageOracle(rows, known=each).least((0.01, 0.0))[0] for each in (known, None))
    assert anew < before - CLOSE and begun >= before - CLOSE


@settings(deadline=None, max_examples=20)
@given(seed=seeds, kind=kinds)
def test_messages_of_fewer_rows_bound_the_optimum_at_any_prices(seed: int, kind: str) -> None:
    problem = _problem(seed, kind, 0.5)
    if problem is None:
        return
    rows = _with_another_row(seed, problem)
    exact = EliminationOracle.of(rows, NEVER, math.inf)
    assert exact is not None
    with pytest.MonkeyPatch.context() as patch:
        _make_wide(patch)
        known = MessageOracle(rows[:1])
        known.least((0.01,))
        more = MessageOracle(rows, known=known)
        for prices in ((0.01, 0.0), (0.0, 0.02), (0.03, 0.01)):
            assert more.least(prices)[0] <= exact.least(prices)[0] * (1 + CLOSE) + CLOSE


def test_choices_that_are_near_enough_take_fewer_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(0, "cliques", 0.5)
    assert problem is not None
    _make_wide(monkeypatch)
    swept = _counting_sweeps(monkeypatch)
    exact, _ = MessageOracle([problem]).least((0.01,))
    whole, swept[0] = swept[0], 0
    least, choices = MessageOracle([problem]).least((0.01,), near=0.1)
    assert 0 < swept[0] < whole and choices is not None
    cost = problem.seconds_of(choices) + 0.01 * problem.bytes_of(choices)
    assert least <= exact <= cost * (1 + CLOSE) and cost - least <= 0.1 * cost


def test_parameters_and_chains_are_no_part_of_the_core_and_equal_layers_share_their_steps() -> None:
    rng = np.random.default_rng(0)
    layered = _in_cliques(rng, 6, 3)
    count, candidates, stored = (
        len(layered.nodes),
        Node("p", rng.random(4), np.zeros(4, dtype=np.int64)),
        rng.random((4, 3)),
    )
    edges = (*layered.edges, *(Edge((count + node, node), stored) for node in range(count)))
    with_parameters = Problem((*layered.nodes, *[candidates] * count), edges)
    found = core_of(with_parameters, Tables(with_parameters))
    assert set(found.nodes) == set(range(count)) and len(found.elimination.steps) == 1
    chain = Problem(layered.nodes[:5], tuple(Edge((i, i + 1), rng.random((3, 3))) for i in range(4)))
    assert core_of(chain, Tables(chain)).nodes == ()


def test_strategies_that_leave_a_neighbour_no_choice_are_left_out() -> None:
    blocked = np.array([[np.inf, 0.0], [np.inf, np.inf]])
    nodes = tuple(Node(str(i), np.zeros(2), np.zeros(2, dtype=np.int64)) for i in range(3))
    joined = Edge((1, 2), np.where(np.eye(2) > 0, 0.0, np.inf))
    found = consistent([Problem(nodes, (Edge((0, 1), blocked), joined), budget) for budget in (None, 3)])
    assert found is not None and [each.problem.budget for each in found] == [None, 3]
    assert all([kept.tolist() for kept in each.kept] == [[0], [1], [1]] for each in found)
    assert consistent([Problem(nodes, (Edge((0, 1), blocked), Edge((1, 0), blocked)))]) is None


def test_a_limit_below_the_least_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(1, "hubs", 0.0, 4)
    assert problem is not None and problem.budget is not None
    _make_wide(monkeypatch)
    assert solve(problem).num_bytes == problem.budget
    with pytest.raises(InfeasibleError, match=f"needs at least .* .{problem.budget} bytes"):
        solve(Problem(problem.nodes, problem.edges, problem.budget - 1))


def test_a_search_whose_time_is_over_says_so_or_shows_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(1, "cliques")
    assert problem is not None
    _make_wide(monkeypatch)
    with pytest.raises(TimeLimitError):
        MessageOracle([problem], after(-2.0)).least((0.0,))
    begun = MessageOracle([problem], after(-0.1))
    bound, found = begun.least((0.0,))
    assert found is not None and bound <= problem.seconds_of(found)
