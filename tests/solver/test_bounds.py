"""Bound ≤ optimum ≤ answer, on random problems of many shapes, whichever way they are solved."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver.deadline import NEVER
from autopar.solver.elimination import bucket_elimination as buckets
from autopar.solver.elimination.bucket_elimination import narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.oracles import EliminationOracle, lower_bound
from autopar.solver.presolve.contraction import contract_each
from autopar.solver.presolve.pruning import prune_each
from autopar.solver.presolve.reduced_cost_fixing import remaining_of_each
from autopar.solver.problem import Problem
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.remaining_choices import RemainingProblem
from autopar.solver.solve import solve
from tests.solver.random_problems import SHAPES, random_rows, reference

CLOSE = 1e-7  # of the seconds: the reference counts in rounded units
seeds, shapes = st.integers(0, 2**31 - 1), st.sampled_from(SHAPES)
prices, budgets = st.sampled_from([0.003, 0.02]), st.sampled_from([1.001, 1.1, 3.0])


@settings(deadline=None, max_examples=30)
@given(seed=seeds, shape=shapes, gap=st.sampled_from([0.0, 0.05]))
def test_a_bound_is_no_more_and_an_answer_no_less_than_the_optimum(seed: int, shape: str, gap: float) -> None:
    (problem,) = random_rows(seed, shape, 1)
    best = reference([problem])
    if best == math.inf:
        with pytest.raises(InfeasibleError):
            solve(problem, gap=gap)
        return
    found = solve(problem, gap=gap)
    assert found.bound <= best * (1 + CLOSE) and best <= found.seconds * (1 + CLOSE)
    assert problem.fits(problem.bytes_of(found.choices)) and found.gap <= gap


@settings(deadline=None, max_examples=50)
@given(seed=seeds, shape=shapes, num_rows=st.integers(1, 3), price=prices, room=budgets)
@example(seed=530, shape="tree", num_rows=1, price=0.003, room=1.001)  # all of it is forbidden
def test_counts_prove_the_optimum_below_a_limit(
    seed: int, shape: str, num_rows: int, price: float, room: float
) -> None:
    problems = random_rows(seed, shape, num_rows)
    best = reference(problems)
    limit = room * best if best < math.inf else 10.0
    found = best_counts(RemainingProblem(problems, [price] * num_rows, limit, math.inf), 1e-9)
    assert found.is_proven and found.bound == pytest.approx(min(best, limit), rel=1e-6)
    assert (found.choices is None) == (best > limit)
    if found.choices is not None:
        assert all(each.fits(each.bytes_of(found.choices)) for each in problems)
        assert problems[0].seconds_of(found.choices) == pytest.approx(best, rel=CLOSE)


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
    if problem.forbidden_node is None:
        assert -math.inf < lower_bound(problem, price) <= best * (1 + CLOSE)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, shape=shapes, share=st.floats(0.0, 1.0))
def test_what_is_made_of_a_sound_problem_is_sound(seed: int, shape: str, share: float) -> None:
    """It is not looked at when it is made, as all of it is taken from what was looked at."""
    problems = random_rows(seed, shape, 2)
    pruned = prune_each(problems)
    contracted = contract_each([each.problem for each in pruned])
    rows = EliminationOracle.of([each.problem for each in contracted], NEVER, math.inf)
    assert rows is not None
    left = remaining_of_each(rows.problems, rows.reduced_costs((0.01, 0.01), share), share)
    made = [*(each.problem for each in (*pruned, *contracted, *left)), problems[0].in_bytes()]
    for each in made:
        Problem(each.nodes, each.edges, each.budget)
