"""The problem as an integer linear program of Alpa's form, for CP-SAT: reference, and fallback without structure.

    min  Σ c_vi s_vi + Σ C_uvij e_uvij                                               (Alpa, Zheng et al., OSDI 2022)
    Σ_i s_vi = 1;   Σ_j e_uvij = s_ui;   Σ_i e_uvij = s_vj;   Σ m_vi s_vi + Σ M_uvij e_uvij ≤ budget;   s, e in {0, 1}

Forbidden strategies and pairs have no variable. CP-SAT counts in whole numbers, so costs are divided by a unit and
rounded down: the bound it proves then holds for the true costs too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from ortools.sat.python import cp_model

from autopar.errors import TimeLimitError
from autopar.solver.deadline import NEVER, after, is_interruptible, is_over, nothing_found, seconds_until
from autopar.solver.problem import Edge, Problem

COST_BITS = 40  # the largest cost is 2**40 units: sums over thousands of nodes stay far below 2**62
LOOK = 0.05  # seconds between two looks at whether CP-SAT is to stop
MAX_VARIABLES = 5_000_000  # a model of more takes over 4 GB to build
BUILT_PER_S = 30_000  # variables of a model that are built per second of the time limit
SMALL_ILP = 300_000  # variables: an ILP with more, and with several rows, takes minutes

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class IlpResult:
    """Result of CP-SAT: choices (None without a solution), a lower bound in seconds, and how it ended."""

    choices: tuple[int, ...] | None
    bound: float
    status: str
    """"optimal", "infeasible" or "timeout"."""


@dataclass(slots=True)
class _Model:
    """A model under construction: its variables, and its objective in seconds."""

    cp: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    strategies: list[dict[int, cp_model.IntVar]] = field(default_factory=list)
    terms: list[tuple[float, cp_model.IntVar]] = field(default_factory=list)
    constant: float = 0.0
    byte_terms: dict[int, list[tuple[int, cp_model.IntVar]]] = field(default_factory=lambda: defaultdict(list))
    """Memory row → bytes of edges above the least of each, with the variables that bring them."""
    constant_bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def solve_ilp(
    problem: Problem,
    time_limit: float,
    hint: Sequence[int] | None = None,
    tolerance: float = 0.0,
    rows: Sequence[Problem] = (),
    repeatable: bool = False,
) -> IlpResult:
    """Solve with CP-SAT: one worker and a fixed seed, so that the answer is the same every time.

    `hint` is a known solution to start from; `tolerance` is in seconds and ends the search early. `rows` are the same
    problem with other bytes and budgets, whose memory rows hold as well. With `repeatable` the time limit counts work,
    in what are about seconds of a quiet machine, so that the search ends at the same place on any.
    """
    num_pairs = sum(int(np.count_nonzero(np.isfinite(edge.seconds))) for edge in problem.edges)
    most = MAX_VARIABLES if repeatable else min(MAX_VARIABLES, BUILT_PER_S * time_limit)
    if time_limit <= 0 or num_pairs > most:
        return IlpResult(None, -math.inf, "timeout")
    deadline = NEVER if repeatable else after(time_limit)
    model = _Model()
    _choose_one_strategy(model, problem)
    limited = tuple(each for each in (problem, *rows) if each.budget is not None)
    try:
        _tie_pairs_to_strategies(model, problem, limited, deadline)
    except TimeLimitError:
        return IlpResult(None, -math.inf, "timeout")
    for number, each in enumerate(limited):
        _limit_memory(model, each, number)
    unit = _minimise(model)
    for node, choice in enumerate(hint or ()):
        for strategy, variable in model.strategies[node].items():
            model.cp.add_hint(variable, strategy == choice)
    solver = repeatable_solver(max(0.999, tolerance / unit))
    if repeatable:
        solver.parameters.max_deterministic_time = time_limit
    else:
        solver.parameters.max_time_in_seconds = seconds_until(deadline)
    status = solved(solver, model.cp)
    if status == cp_model.INFEASIBLE:
        return IlpResult(None, math.inf, "infeasible")
    assert status != cp_model.MODEL_INVALID, model.cp.validate()
    bound = model.constant + solver.best_objective_bound * unit
    if status == cp_model.UNKNOWN:
        return IlpResult(None, -math.inf, "timeout")
    choices = tuple(next(i for i, s in node.items() if solver.boolean_value(s)) for node in model.strategies)
    return IlpResult(choices, bound, "optimal" if status == cp_model.OPTIMAL else "timeout")


def repeatable_solver(gap: float) -> cp_model.CpSolver:
    """Return a solver that finds the same every time, within a gap in units of the objective."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    solver.parameters.random_seed = 0
    solver.parameters.relative_gap_limit, solver.parameters.absolute_gap_limit = 0.0, gap
    return solver


def solved(solver: cp_model.CpSolver, model: cp_model.CpModel) -> Any:
    """Return the status of a model that was solved; inside an `interruptible` block Ctrl-C ends that with what was
    found.
    """
    solver.parameters.catch_sigint_signal = False  # else CP-SAT leaves it to end the process ever after
    return until_interrupted(lambda: solver.solve(model), solver.stop_search)


def until_interrupted(solve: Callable[[], S], stop: Callable[[], object]) -> S:
    """Return what a solver's search in C++ returns; inside an `interruptible` block Ctrl-C stops it."""
    if not is_interruptible():
        return solve()
    with ThreadPoolExecutor(1) as thread:  # Python hears of signals between calls of its main thread alone
        status = thread.submit(solve)
        try:
            while not wait([status], timeout=LOOK).done:
                if is_over(NEVER):
                    stop()
        except BaseException:
            stop()
            raise
        return status.result()


def _choose_one_strategy(model: _Model, problem: Problem) -> None:
    """State Σ_i s_vi = 1."""
    for node in problem.nodes:
        allowed = np.flatnonzero(np.isfinite(node.seconds))
        variables = {int(i): model.cp.new_bool_var("") for i in allowed}
        model.strategies.append(variables)
        model.cp.add_exactly_one(variables.values())
        seconds = node.seconds
        least = float(seconds[allowed].min()) if len(allowed) else 0.0
        model.constant += least
        model.terms += [(float(seconds[i]) - least, s) for i, s in variables.items() if seconds[i] > least]


def _tie_pairs_to_strategies(model: _Model, problem: Problem, limited: Sequence[Problem], deadline: float) -> None:
    """State Σ_j e_uvij = s_ui and Σ_i e_uvij = s_vj, likewise for three ends; `limited` have memory rows.

    TimeLimitError where that takes until the deadline.
    """
    for number, edge in enumerate(problem.edges):
        costs = edge.seconds
        byte_terms = [_bytes_of(each.edges[number]) for each in limited]
        if edge.is_loop:
            _price_loop(
                model, model.strategies[edge.ends[0]], costs.diagonal(), [each.diagonal() for each in byte_terms]
            )
            continue
        allowed = [list(model.strategies[end]) for end in edge.ends]
        block = costs[np.ix_(*allowed)]
        if not block.size:
            continue
        blocks = [each[np.ix_(*allowed)] for each in byte_terms]
        least, least_bytes = float(block.min()), [int(each.min()) for each in blocks]
        model.constant += least if math.isfinite(least) else 0.0
        for row, num_bytes in enumerate(least_bytes):
            model.constant_bytes[row] += num_bytes
        if least == block.max() < np.inf and all(each.min() == each.max() for each in blocks):
            continue
        by_end: list[dict[int, list[cp_model.IntVar]]] = [defaultdict(list) for _ in edge.ends]
        for place in zip(*np.nonzero(np.isfinite(block)), strict=True):
            if is_over(deadline):
                raise TimeLimitError(nothing_found())
            e = model.cp.new_bool_var("")
            for end, (index, strategies) in enumerate(zip(place, allowed, strict=True)):
                by_end[end][strategies[index]].append(e)
            if block[place] > least:
                model.terms.append((float(block[place]) - least, e))
            for row, each in enumerate(blocks):
                if each[place] > least_bytes[row]:
                    model.byte_terms[row].append((int(each[place]) - least_bytes[row], e))
        for end, node in enumerate(edge.ends):
            for i, s in model.strategies[node].items():
                model.cp.add(cp_model.LinearExpr.sum(by_end[end][i]) == s)


def _bytes_of(edge: Edge) -> np.ndarray:
    return np.zeros(edge.seconds.shape, dtype=np.int64) if edge.num_bytes is None else edge.num_bytes


def _price_loop(
    model: _Model, strategies: dict[int, cp_model.IntVar], costs: np.ndarray, byte_terms: Sequence[np.ndarray]
) -> None:
    """State e_ii = s_i for an edge from a node to itself."""
    for i, s in strategies.items():
        if costs[i] == np.inf:
            model.cp.add(s == 0)
        else:
            model.terms.append((float(costs[i]), s))
            for row, num_bytes in enumerate(byte_terms):
                model.byte_terms[row].append((int(num_bytes[i]), s))


def _limit_memory(model: _Model, problem: Problem, row: int) -> None:
    """State Σ m s + Σ M e ≤ budget, without the least bytes everywhere, divided by their common divisor."""
    assert problem.budget is not None
    budget = problem.budget - model.constant_bytes[row]
    terms = [(num_bytes, e) for num_bytes, e in model.byte_terms[row] if num_bytes]
    for node, variables in zip(problem.nodes, model.strategies, strict=True):
        least = min((int(node.num_bytes[i]) for i in variables), default=0)
        budget -= least
        terms += [(int(node.num_bytes[i]) - least, s) for i, s in variables.items() if node.num_bytes[i] > least]
    unit = math.gcd(*(num_bytes for num_bytes, _ in terms)) or 1
    small = []
    for num_bytes, s in terms:
        if num_bytes > budget:
            # It alone breaks the limit; without it the row's coefficients stay small.
            model.cp.add(s == 0)
        else:
            small.append((num_bytes // unit, s))
    weights, variables_ = [num_bytes for num_bytes, _ in small], [s for _, s in small]
    model.cp.add(cp_model.LinearExpr.weighted_sum(variables_, weights) <= budget // unit)


def _minimise(model: _Model) -> float:
    """Set the objective in whole units; returns the unit, in seconds."""
    largest = max((abs(cost) for cost, _ in model.terms), default=0.0)
    unit = largest / 2**COST_BITS or 1.0
    weights = [math.floor(cost / unit) for cost, _ in model.terms]
    model.cp.minimize(cp_model.LinearExpr.weighted_sum([variable for _, variable in model.terms], weights))
    return unit
