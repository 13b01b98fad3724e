"""Bound ≤ optimum ≤ answer, on random problems of many shapes, whichever way they are solved."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import low_treewidth as low
from autopar.solver.bounds import core
from autopar.solver.deadline import NEVER
from autopar.solver.elimination import bucket_elimination as buckets
from autopar.solver.elimination.bucket_elimination import narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.low_treewidth import EXACT, Tolerances
from autopar.solver.memory_rows import several_rows
from autopar.solver.memory_rows.priced_rows import Rows
from autopar.solver.memory_rows.several_rows import solve_rows
from autopar.solver.prepared import Prepared
from autopar.solver.presolve.contraction import contract_each
from autopar.solver.presolve.reduction import prune_each, reduce_problem, with_fixed
from autopar.solver.problem import Problem
from autopar.solver.remaining import labels
from autopar.solver.remaining.labels import best_labels
from autopar.solver.remaining.remaining_choices import RemainingProblem
from autopar.solver.solve import bound_at, solve
from tests.solver.random_problems import SHAPES, random_rows, reference, without_limit

CLOSE = 1e-7  # of the seconds: the reference counts in rounded units
seeds, shapes = st.integers(0, 2**31 - 1), st.sampled_from(SHAPES)
prices, budgets = st.sampled_from([0.003, 0.02]), st.sampled_from([1.001, 1.1, 3.0])
lefts = st.sampled_from([0, 100, 10**9])  # entries of an elimination that is made of what is left
ends = st.sampled_from([EXACT, Tolerances(0.05, 0.05), Tolerances(cutoff=1.0), Tolerances(0.01, 0.01, wide_gap=0.2)])
enoughs = st.sampled_from([EXACT, Tolerances(0.1, 0.1), Tolerances(0.05, math.inf)])


@settings(deadline=None, max_examples=30)
@given(seed=seeds, shape=shapes, tolerances=enoughs)
def test_a_bound_is_no_more_and_an_answer_no_less_than_the_optimum(
    seed: int, shape: str, tolerances: Tolerances
) -> None:
    (problem,) = random_rows(seed, shape, 1)
    best, free = reference([problem]), reference([without_limit(problem)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if free == math.inf or best == math.inf:
            with pytest.raises(InfeasibleError):
                solve(problem)
            return
        found = solve(problem, tolerances=tolerances)
    assert found.bound <= best * (1 + CLOSE) and best <= found.seconds * (1 + CLOSE)
    assert problem.fits(problem.bytes_of(found.choices))
    if tolerances == EXACT:
        assert found.gap == 0


@settings(deadline=None, max_examples=30)
@given(
    seed=seeds,
    shape=shapes,
    num_rows=st.integers(1, 3),
    tolerances=enoughs,
    is_expensive=st.booleans(),
    room=st.none() | budgets,
)
def test_with_several_rows_too(
    seed: int, shape: str, num_rows: int, tolerances: Tolerances, is_expensive: bool, room: float | None
) -> None:
    problems = random_rows(seed, shape, num_rows)
    best = reference(problems)
    if reference([without_limit(problems[0])]) == math.inf:
        return
    limit = math.inf if room is None or best == math.inf else room * best - 0.05
    visited = (
        [solve(without_limit(problems[0])).choices, (0,) * 8, (1,) * 8] if is_expensive else []
    )  # some may be forbidden
    with pytest.MonkeyPatch.context() as patch:
        if is_expensive:
            patch.setattr(several_rows, "CHEAP_WORK", 0)
        found = solve_rows(
            problems, [0.01] * num_rows, math.inf, 60.0, tolerances=tolerances, visited=visited, limit=limit
        )
    assert found is not None and found.bound <= best * (1 + CLOSE)
    if found.choices is not None:
        assert all(each.fits(each.bytes_of(found.choices)) for each in problems)
        assert best <= problems[0].seconds_of(found.choices) * (1 + CLOSE)
    elif tolerances == EXACT and limit < math.inf:
        assert found.bound >= min(limit, best) * (1 - CLOSE), "all below the limit was looked at"


@settings(deadline=None, max_examples=20)
@given(
    seed=seeds,
    shape=shapes,
    num_rows=st.integers(1, 3),
    price=prices,
    is_known=st.booleans(),
    left=lefts,
    tolerances=ends,
)
def test_nor_where_the_graph_is_wide(
    seed: int, shape: str, num_rows: int, price: float, is_known: bool, left: int, tolerances: Tolerances
) -> None:
    problems = random_rows(seed, shape, num_rows)
    best = reference(problems)
    if reference([without_limit(problems[0])]) == math.inf:
        return
    incumbent = [solve(without_limit(problems[0])).choices, (0,) * 8, (1,) * 8]  # these may be forbidden, or fit
    visited = incumbent if is_known else []
    start = [0.0 if is_known else price] * num_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(several_rows, "LEFT_WORK", left)
        patch.setattr(several_rows, "FIXED_BAG", 9)
        patch.setattr(several_rows, "FIXED_ENTRIES", 0)
        patch.setattr(core, "MAX_BAG", 9)
        one, other = (
            solve_rows(problems, start, math.inf, 60.0, tolerances=tolerances, visited=visited, is_wide=True)
            for _ in range(2)
        )
    assert one == other and one.bound <= best * (1 + CLOSE)
    if one.choices is not None:
        assert all(each.fits(each.bytes_of(one.choices)) for each in problems)
        assert best <= problems[0].seconds_of(one.choices) * (1 + CLOSE)


@pytest.mark.parametrize("share", [math.inf, 1.01, 0.99])
def test_prices_of_what_is_left_prove_the_rest_of_a_wide_graph(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = random_rows(14, "hub", 2)
    best, visited = reference(problems), [solve(without_limit(problems[0])).choices]
    monkeypatch.setattr(core, "MAX_BAG", 9)
    found = solve_rows(problems, [0.0, 0.0], math.inf, 60.0, visited=visited, is_wide=True, limit=share * best)
    assert min(share, 1.0) * best * (1 - CLOSE) <= found.bound <= best * (1 + CLOSE)
    if share > 1:
        assert found.choices is not None and problems[0].seconds_of(found.choices) == pytest.approx(best, rel=CLOSE)


@settings(deadline=None, max_examples=50)
@given(seed=seeds, shape=shapes, num_rows=st.integers(1, 3), few=st.booleans(), price=prices, room=budgets)
@example(seed=530, shape="tree", num_rows=1, few=False, price=0.003, room=1.001)  # all of it is forbidden
def test_what_labels_prove_is_no_more_than_the_optimum(
    seed: int, shape: str, num_rows: int, few: bool, price: float, room: float
) -> None:
    problems = random_rows(seed, shape, num_rows)
    best = reference(problems)
    limit = room * best if best < math.inf else 10.0
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(labels, "PER_GROUP", 2)
            patch.setattr(labels, "PER_WHOLE", 3)
            patch.setattr(labels, "PER_STEP", 20)
            patch.setattr(labels, "MAX_JOINED", 60)
        found = best_labels(RemainingProblem(problems, [price] * num_rows, limit, math.inf))
    assert found.bound <= min(best, limit) * (1 + CLOSE)
    if found.choices is not None:
        assert all(each.fits(each.bytes_of(found.choices)) for each in problems)
        seconds = problems[0].seconds_of(found.choices)
        assert best <= seconds * (1 + CLOSE)
        assert not found.is_proven or seconds == pytest.approx(best, rel=CLOSE)
    if num_rows == 1 and not few:  # then nothing is left out
        assert found.is_proven and (found.choices is None) == (best == math.inf)


def test_a_smaller_limit_leaves_the_choices_of_a_problem_that_is_made_with_it() -> None:
    problems = random_rows(3, "skips", 1)
    high, narrower = (RemainingProblem(problems, [0.01], limit, math.inf) for limit in (20.0, 3.0))
    left = high.below(3.0)
    assert [each.tolist() for each, _ in left.choices] == [each.tolist() for each, _ in narrower.choices]
    assert sum(len(each) for each, _ in left.choices) < sum(len(each) for each, _ in high.choices)
    assert left.margin == pytest.approx(narrower.margin) and high.is_small


def test_what_is_left_is_counted_only_where_that_is_soon_done(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = random_rows(5, "repeated", 1, 12)
    monkeypatch.setattr(labels, "PER_WHOLE", 1)
    monkeypatch.setattr("autopar.solver.remaining.remaining_choices.FEW", 0)
    counted: list[object] = []
    monkeypatch.setattr(low, "best_counts", lambda *requested: counted.append(requested))
    found = solve(problem, tolerances=Tolerances(counted=1.0))
    assert not counted and found.bound <= reference([problem]) * (1 + CLOSE)


def test_a_graph_whose_messages_would_not_fit_into_memory_is_bounded_by_a_relaxed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (problem,) = random_rows(7, "hub", 1)
    tables = Tables(problem)
    whole = narrow_elimination(problem, tables)
    assert whole is not None and whole.num_bytes == 8 * sum(math.prod(step.sizes[1:]) for step in whole.steps)
    best = reference([problem])
    monkeypatch.setattr(buckets, "MAX_BYTES", 0)
    assert narrow_elimination(problem, tables) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = solve(problem)
    assert found.bound <= best * (1 + CLOSE) and best <= found.seconds * (1 + CLOSE)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, shape=shapes, price=prices)
def test_one_evaluation_at_any_price_proves_no_more_than_the_best_takes(seed: int, shape: str, price: float) -> None:
    (problem,) = random_rows(seed, shape, 1)
    best = reference([problem])
    try:
        bound = bound_at(Prepared.of(problem, NEVER), price, NEVER)
    except InfeasibleError:
        assert math.isinf(best)
        return
    assert bound <= best * (1 + CLOSE)
    assert bound > -math.inf and bound_at(Prepared.of(replace(problem, budget=None), NEVER), price, NEVER) == -math.inf


@settings(deadline=None, max_examples=30)
@given(seed=seeds, shape=shapes, share=st.floats(0.0, 1.0))
def test_what_is_made_of_a_sound_problem_is_sound(seed: int, shape: str, share: float) -> None:
    """It is not looked at when it is made, as all of it is taken from what was looked at."""
    problems = random_rows(seed, shape, 2)
    pruned = prune_each(problems)
    contracted = contract_each([each.problem for each in pruned])
    rows = Rows.of([each.problem for each in contracted], NEVER, math.inf)
    assert rows is not None
    left = rows.within((0.01, 0.01), share)
    row_bytes = with_fixed(problems[0], {0: 0})
    made = [*(each.problem for each in (*pruned, *contracted, *left)), row_bytes, row_bytes.in_bytes()]
    for each in (*made, reduce_problem(problems[0]).problem):
        Problem(each.nodes, each.edges, each.budget)
