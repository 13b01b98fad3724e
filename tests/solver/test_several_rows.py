"""Answers with several memory rows equal brute force; choices left out of a problem are in no better answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import TimeLimitError
from autopar.solver.bounds import prices
from autopar.solver.bounds.prices import BestPrices, best_prices, filled
from autopar.solver.deadline import NEVER
from autopar.solver.elimination.bucket_elimination import compile_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate
from autopar.solver.elimination.min_marginals import cheapest, reduced_costs, shared_reduced_costs
from autopar.solver.elimination.order import separators
from autopar.solver.low_treewidth import Tolerances
from autopar.solver.memory_rows import priced_rows as rows
from autopar.solver.memory_rows import several_rows
from autopar.solver.memory_rows.priced_rows import Rows, WideRows
from autopar.solver.memory_rows.several_rows import solve_rows
from autopar.solver.presolve.reduced_cost_fixing import remaining, remaining_of_each
from autopar.solver.problem import Edge, Node, Problem
from autopar.solver.remaining import remaining_choices as remaining_problem

seeds = st.integers(0, 2**31 - 1)


def _rows(seed: int, num_layers: int, count: int) -> list[Problem]:
    """Layers of two nodes in a chain, equal but for their bytes, which rows count in other layers each."""
    rng = np.random.default_rng(seed)
    candidate_lists, across, into = rng.random((2, 3)), rng.random((3, 3)), rng.random((3, 3))
    row_bytes, moved = rng.integers(1, 30, (count, 2, 3)), rng.integers(0, 9, (3, 3))
    nothing = np.zeros(3, dtype=np.int64)
    problems = []
    for row in range(count):
        nodes = [
            Node(f"{layer}.{i}", candidate_lists[i], row_bytes[row, i] if (layer + row) % 3 else nothing)
            for layer in range(num_layers)
            for i in range(2)
        ]
        edges = [Edge((2 * layer, 2 * layer + 1), into, moved) for layer in range(num_layers)]
        edges += [Edge((2 * layer - 1, 2 * layer), across) for layer in range(1, num_layers)]
        most = sum(int(node.num_bytes.max()) for node in nodes)
        problems.append(Problem(tuple(nodes), tuple(edges), int(most * rng.uniform(0.4, 0.9))))
    return problems


def _brute_force(problems: list[Problem]) -> float:
    every = itertools.product(*(range(node.num_strategies) for node in problems[0].nodes))
    fitting = (x for x in every if all(each.fits(each.bytes_of(x)) for each in problems))
    return min((problems[0].seconds_of(x) for x in fitting), default=math.inf)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, count=st.integers(1, 3), price=st.sampled_from([0.0, 0.01, 0.1]))
def test_with_several_rows_the_answer_is_that_of_brute_force(seed: int, count: int, price: float) -> None:
    problems = _rows(seed, 3, count)
    best = _brute_force(problems)
    incumbent = best * 1.5 if best < math.inf else math.inf
    found = solve_rows(problems, [price] * count, incumbent, 60.0)
    assert found is not None and found.bound <= best * (1 + 1e-9)
    if best < math.inf:
        assert found.choices is not None and all(each.fits(each.bytes_of(found.choices)) for each in problems)
        assert problems[0].seconds_of(found.choices) == pytest.approx(best) == pytest.approx(found.bound)
    else:
        assert found.choices is None


def test_no_answer_is_given_that_is_no_better_than_a_known_one() -> None:
    problems = _rows(3, 3, 2)
    best = _brute_force(problems)
    assert best < math.inf
    found = solve_rows(problems, [0.0, 0.0], 0.999 * best, 60.0)
    assert found is not None and found.choices is None and found.bound >= 0.999 * best * (1 - 1e-9)


def test_where_every_pair_is_forbidden_nothing_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = tuple(Node(name, np.zeros(2), np.ones(2, dtype=np.int64)) for name in "ab")
    found = solve_rows([Problem(nodes, (Edge((0, 1), np.full((2, 2), np.inf)),), 5)] * 2, [0.1, 0.0], math.inf, 60.0)
    assert found.choices is None and found.bound == math.inf
    assert not capfd.readouterr().err  # no linear program without an answer


def test_budgets_that_contradict_each_other_are_told_by_prices_that_prove_more_than_all_choices_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prices of such rows have no end: what they prove grows until no linear program takes their numbers."""
    rounds, best_below = [], several_rows.best_below
    monkeypatch.setattr(several_rows, "best_below", lambda *requested: rounds.append(1) or best_below(*requested))
    nodes = [Node(name, np.array([0.1, 0.2, 0.3]), np.array([10, 0, 5])) for name in "abcdef"]
    others = [Node(each.name, each.seconds, np.array([0, 10, 5])) for each in nodes]
    edges = tuple(Edge((n, n + 1), 0.01 * np.eye(3)) for n in range(5))
    problems = [Problem(tuple(each), edges, 29) for each in (nodes, others)]
    assert all(_brute_force([each]) < math.inf for each in problems) and _brute_force(problems) == math.inf
    found = solve_rows(problems, [0.0, 0.0], math.inf, 60.0)
    assert found.choices is None and found.bound == math.inf and len(rounds) < 4
    assert problems[0].largest_seconds == pytest.approx(6 * 0.3 + 5 * 0.01)


def test_planes_that_no_linear_program_takes_prove_nothing_more() -> None:
    planes = prices._Planes(np.array([1.0, 8e10]), 80.0, math.inf)
    bound, where = planes.after((), 1.0, np.array([1e18, -1e9]))
    assert bound == -math.inf and where.tolist() == [0.0, 0.0]


def test_at_the_edge_of_their_radius_prices_mix_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    planes = prices._Planes(np.array([10.0]), 1.0, 0.01)
    bound, _ = planes.after((0,), 1.0, np.array([5.0]))
    assert bound == pytest.approx(1.005) and planes.mixture() == ()
    bound, _ = planes.after((1,), 1.02, np.array([-5.0]))
    assert bound == pytest.approx(1.01)
    assert [(choices, pytest.approx(0.5)) for choices in ((0,), (1,))] == list(planes.mixture())
    assert not capfd.readouterr().err  # of a program that changed since it was solved


def test_a_narrow_graph_with_too_many_rows_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = _rows(3, 3, 2)
    monkeypatch.setattr(several_rows, "MAX_WORK", 0)
    left = solve_rows(problems, [0.0, 0.0], math.inf, 60.0, is_wide=False)
    assert left.choices is None and left.bound == -math.inf and not left.is_searched
    assert solve_rows(problems, [0.0, 0.0], math.inf, 60.0).bound > 0


def test_choices_take_those_parts_of_others_that_make_them_faster_within_all_budgets() -> None:
    node, nothing = Node("a", np.array([0.0, 1.0]), np.array([10, 0])), np.array([0, 0])
    other = Node("a", node.seconds, nothing)
    problems = [Problem((node,) * 8, (), 60), Problem((*(other,) * 4, *(node,) * 4), (), 20)]
    best = BestPrices((0.1, 0.2), 0.0, (1,) * 8, 8.0)
    priced = WideRows(problems, NEVER)
    found = filled(priced, best, (0,) * 8)
    assert found.choices is not None and found.seconds == 2.0
    assert [each.bytes_of(found.choices) for each in problems] == [60, 20]
    assert filled(priced, found, (1,) * 8) == found


@settings(deadline=None, max_examples=15)
@given(seed=seeds, count=st.integers(1, 3))
def test_what_the_best_prices_mix_is_within_all_budgets_and_costs_what_they_prove(seed: int, count: int) -> None:
    problems = _rows(seed, 3, count)
    whole = Rows.of(problems, NEVER, math.inf)
    assert whole is not None
    found = best_prices(whole, (0.05,) * count, 1.0, 0.0, 0.0, NEVER, worthwhile=1e-9)
    if _brute_force(problems) == math.inf:
        return  # there are no best prices
    assert sum(weight for _, weight in found.mixture) == pytest.approx(1.0)
    seconds = sum(weight * problems[0].seconds_of(choices) for choices, weight in found.mixture)
    assert seconds == pytest.approx(found.bound, rel=1e-6)
    for each in problems:
        row_bytes = sum(weight * each.bytes_of(choices) for choices, weight in found.mixture)
        assert row_bytes <= (each.budget or 0) * (1 + 1e-6)


@pytest.mark.parametrize("is_expensive", [False, True])
def test_a_row_that_is_missing_is_requested_before_anything_is_searched(
    monkeypatch: pytest.MonkeyPatch, is_expensive: bool
) -> None:
    first, second = _rows(4, 6, 2)
    monkeypatch.setattr(several_rows, "REPORTED_WORK", 0)
    if is_expensive:
        monkeypatch.setattr(several_rows, "CHEAP_WORK", 0)
        monkeypatch.setattr(several_rows, "EXPENSIVE_MARGIN", 0.5)
    requested: list[prices.Mixture] = []

    def is_over(mixture: prices.Mixture) -> bool:
        requested.append(mixture)
        return sum(weight * second.bytes_of(choices) for choices, weight in mixture) > (second.budget or 0)

    best = solve_rows([first, second], [0.0, 0.0], math.inf, 60.0)
    assert best.choices is not None and not best.is_over_elsewhere
    found = solve_rows([first], [0.01], math.inf, 60.0, is_over_elsewhere=is_over)
    assert len(requested) == 1 and len(requested[0][0][0]) == len(first.nodes)
    assert found.is_over_elsewhere and not found.is_searched
    assert 0 < found.bound <= first.seconds_of(best.choices)


def _evaluations(whole: Rows, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """The prices at which rows are evaluated from here on."""
    requested, at = [], whole.at
    monkeypatch.setattr(whole, "at", lambda *of: requested.append(of[0]) or at(*of))
    return requested


def test_prices_are_no_longer_looked_for_once_what_they_mix_is_over_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = _rows(3, 6, 3)
    whole = Rows.of(problems, NEVER, math.inf)
    assert whole is not None
    evaluated, mixtures = _evaluations(whole, monkeypatch), []

    def found(is_over: bool) -> tuple[BestPrices, int]:
        evaluated.clear()
        asking = lambda mixture: mixtures.append(mixture) or is_over  # noqa: E731
        best = best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER, is_over_elsewhere=asking)
        return best, len(evaluated)

    (settled, all_evaluations), (ended, few) = found(False), found(True)
    assert not settled.is_over_elsewhere and len(mixtures) > 1
    assert ended.is_over_elsewhere and few < all_evaluations and ended.mixture == mixtures[-1] == mixtures[0]
    assert ended.bound <= settled.bound <= ended.bound + 7.0 * prices.ROUGHLY


def test_a_bound_of_prices_as_high_as_the_cutoff_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = _rows(3, 6, 3)
    whole = Rows.of(problems, NEVER, math.inf)
    assert whole is not None
    evaluated = _evaluations(whole, monkeypatch)
    settled = best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER)
    all_evaluations = len(evaluated)
    evaluated.clear()
    ended = best_prices(whole, (0.0,) * 3, 7.0, 0.0, 0.0, NEVER, cutoff=0.9 * settled.bound)
    assert 0.9 * settled.bound <= ended.bound <= settled.bound and len(evaluated) < all_evaluations
    cut = solve_rows(problems, [0.0] * 3, math.inf, 60.0, tolerances=Tolerances(cutoff=0.9 * settled.bound))
    assert not cut.is_searched and 0.9 * settled.bound <= cut.bound <= settled.bound


@settings(deadline=None, max_examples=20)
@given(seed=seeds, margin=st.floats(0.0, 0.5))
def test_of_several_rows_is_left_what_is_left_of_each(seed: int, margin: float) -> None:
    problems = _rows(seed, 3, 3)
    whole = Rows.of(problems, NEVER, math.inf)
    assert whole is not None
    near = whole.reduced_costs((0.02, 0.0, 0.01), margin)
    for together, problem in zip(remaining_of_each(problems, near, margin), problems, strict=True):
        alone = remaining(problem, near, margin)
        assert (together.constant, together.undecided) == (alone.constant, alone.undecided)
        for one, other in zip(alone.problem.edges, together.problem.edges, strict=True):
            assert one.ends == other.ends and np.array_equal(one.seconds, other.seconds)
        choices = [int(node.seconds.argmin()) for node in alone.problem.nodes]
        assert together.problem.cost_of(choices) == alone.problem.cost_of(choices)
        assert together.problem.budget == alone.problem.budget
        if alone.constant < math.inf:
            whole_cost, row_bytes = problem.cost_of(alone.extend(choices))
            seconds, left = alone.problem.cost_of(choices)
            assert seconds == math.inf or seconds + alone.constant == pytest.approx(whole_cost)
            assert row_bytes - left == (problem.budget or 0) - (alone.problem.budget or 0)


class _Roughly:
    """A node of three strategies, evaluated a good deal below the truth; the best is visited at 0.1 s/byte alone."""

    def __init__(self) -> None:
        node = Node("a", np.array([0.0, 1.0, 0.4]), np.array([10, 0, 5]))
        self.problems = (Problem((node,), (), 5),)

    def cost(self, choices: Sequence[int]) -> tuple[float, np.ndarray]:
        seconds, row_bytes = self.problems[0].cost_of(choices)
        return seconds, np.array([row_bytes])

    def at(
        self, prices: tuple[float, ...], known_bound: float = -math.inf, sufficient: float = math.inf
    ) -> tuple[float, tuple[int, ...]]:
        (node,) = self.problems[0].nodes
        least = float((node.seconds + prices[0] * (node.num_bytes - 5)).min()) - 0.2
        return least, (2,) if math.isclose(prices[0], 0.1) else (0,) if prices[0] < 0.1 else (1,)


def test_where_evaluations_are_rough_choices_are_looked_for_next_to_the_best_prices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rough, incumbent = _Roughly(), [(0,), (1,)]
    found = best_prices(rough, (0.0,), 1.0, 0.0, 0.0, NEVER, radius=0.01, visited=incumbent)
    assert found.choices == (2,) and found.bound <= 0.4
    monkeypatch.setattr(prices, "NEARBY", 0)
    assert best_prices(rough, (0.0,), 1.0, 0.0, 0.0, NEVER, radius=0.01, visited=incumbent).choices == (1,)


def test_where_the_same_choices_are_visited_again_prices_are_not_halfway_to_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates = np.array([0.0, 1.0, 0.4])
    nodes = tuple(Node(name, candidates, np.array([10, 0, 5]) + more) for more, name in enumerate("abc"))
    whole = Rows.of([Problem(nodes, (), 13)], NEVER, math.inf)
    assert whole is not None
    requested = _evaluations(whole, monkeypatch)
    found = best_prices(whole, (0.001,), 1.0, 0.0, 0.0, NEVER)
    assert found.bound == pytest.approx(1.8) and found.prices == pytest.approx((0.12,))
    assert len(requested) == 6  # 17 where each halves what is left


def test_known_choices_are_mixed_before_anything_is_evaluated() -> None:
    node = Node("a", np.array([0.0, 1.0]), np.array([10, 0]))

    class Late(_Roughly):
        problems = (Problem((node,) * 8, (), 60),)

        def __init__(self) -> None:
            pass

        def at(
            self, prices: tuple[float, ...], known_bound: float = 0.0, sufficient: float = 0.0
        ) -> tuple[float, tuple[int, ...]]:
            raise TimeLimitError("no time")

    found = best_prices(Late(), (0.0,), 8.0, 0.0, 0.0, NEVER, radius=0.01, visited=[(0,) * 8, (1,) * 8])
    assert found.choices is not None and found.seconds == 2.0


@settings(deadline=None, max_examples=15)
@given(seed=seeds, num_layers=st.integers(1, 6), margin=st.sampled_from([0.1, 0.5, math.inf]))
def test_reduced_costs_of_a_kind_are_no_more_than_those_of_its_nodes(seed: int, num_layers: int, margin: float) -> None:
    problem = _rows(seed, num_layers, 1)[0]
    tables = Tables(problem)
    elimination = compile_elimination(problem, tables, balanced=True)
    evaluated = evaluate(elimination, tables.weighted(0.01))
    exact = reduced_costs(problem, elimination, evaluated)
    shared = shared_reduced_costs(problem, elimination, tables, evaluated, margin)
    kinds = tables.kinds(problem)
    for kind, one, other in zip(kinds, exact.of_node, shared.of_node, strict=True):
        assert other is shared.of_node[kinds.index(kind)] and other.min() == pytest.approx(0.0, abs=1e-9)
        assert (np.where(one <= margin, other, 0.0) <= one + 1e-9).all()
    for one, other in zip(exact.of_edge, shared.of_edge, strict=True):
        assert (np.where(one <= margin, other, 0.0) <= one + 1e-9).all()


def test_what_is_cheap_at_one_of_two_prices_is_kept_and_equal_layers_stay_equal() -> None:
    problem = _rows(5, 24, 1)[0]
    tables = Tables(problem)
    elimination = compile_elimination(problem, tables, balanced=True)
    at = [
        shared_reduced_costs(problem, elimination, tables, evaluate(elimination, tables.weighted(p)))
        for p in (0.0, 0.3)
    ]
    both = cheapest(*at)
    for name in ("of_node", "of_edge"):
        one, other, least = (getattr(each, name) for each in (*at, both))
        assert any((a > b).any() for a, b in zip(one, other, strict=True))
        assert any((a < b).any() for a, b in zip(one, other, strict=True))
        assert all((c == np.minimum(a, b)).all() for a, b, c in zip(one, other, least, strict=True))
        assert len(set(map(id, least))) == len(set(zip(map(id, one), map(id, other), strict=True))) < len(least)


def test_what_joins_two_layers_separates_them() -> None:
    candidates, table, nothing = np.zeros(2), np.zeros((2, 2)), np.zeros(2, dtype=np.int64)
    nodes = tuple(Node(str(i), candidates, nothing) for i in range(25))
    ring = [(first + i, first + i + 1) for first in (0, 8, 16) for i in range(8)]
    edges = tuple(Edge(ends, table) for ends in [*ring, (0, 8), (8, 16), (16, 24)])
    assert separators(Problem(nodes, edges)) == {8, 16}
    assert separators(Problem(nodes[:9], edges[:8])) == frozenset()


@settings(deadline=None, max_examples=8)
@given(seed=seeds, share=st.sampled_from([1.01, 1.1, 1.5]))
def test_whole_or_cut_to_what_is_near_there_is_the_same_to_count(seed: int, share: float) -> None:
    problems, prices = _rows(seed, 3, 2), (0.01, 0.02)
    whole = Rows.of(problems, math.inf, math.inf)
    assert whole is not None and whole.elimination.work <= rows.SMALL_WORK
    reached, _ = whole.at(prices)
    limit = share * max(reached, 0.1)
    best = _brute_force(problems)
    with pytest.MonkeyPatch.context() as patch:
        found = [whole.counted(prices, limit, limit - reached, 1e-9, math.inf)]
        patch.setattr(rows, "SMALL_WORK", 0)
        found.append(whole.counted(prices, limit, limit - reached, 1e-9, math.inf))
    for each in found:
        assert each is not None and each.is_proven and each.bound == pytest.approx(min(best, limit))
        if best <= limit:
            assert each.choices is not None and problems[0].seconds_of(each.choices) == pytest.approx(best)


def test_what_takes_long_to_count_is_not_where_only_few_are_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Rows.of(_rows(3, 3, 2), math.inf, math.inf)
    assert whole is not None
    limit = whole.at((0.0, 0.0))[0] * 1.5
    requested = (0.0, 0.0), limit, limit, 1e-9, math.inf
    assert whole.counted(*requested, only_few=True) is not None
    monkeypatch.setattr(remaining_problem, "FEW", 0)
    assert whole.counted(*requested, only_few=True) is None and whole.counted(*requested) is not None


def test_where_there_is_little_to_count_no_labels_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = _rows(1, 3, 2)
    monkeypatch.setattr(Rows, "labelled", None)
    found = solve_rows(problems, [0.01, 0.01], math.inf, 60.0)
    assert found.choices is not None and problems[0].seconds_of(found.choices) == pytest.approx(_brute_force(problems))
    monkeypatch.setattr(remaining_problem, "FEW", 0)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        solve_rows(problems, [0.01, 0.01], math.inf, 60.0)
