"""The best choices within all memory rows: prices, fixing by reduced costs, and counts, in ever wider margins.

    min seconds(x)    subject to    bytes_r(x) ≤ budget_r    for each memory row r, of which there may be none

1. *Presolve*: forbidden strategies go, and pairs of nodes that hardly leave a choice become one (`presolve`).
2. *Price*: L(λ) = min_x [seconds(x) + Σ_r λ_r (bytes_r(x) − budget_r)] bounds every answer (Geoffrion 1974). Cutting
   planes find the λ ≥ 0 that prove most (`bounds.prices`). An oracle evaluates L: elimination exactly, or messages,
   where treewidth is too high (`oracles`). If an evaluation takes seconds, the choices that prices mix make a problem
   of their own, whose best has some layers of each, and whose prices are evaluated next.
3. *Fix*: a strategy whose reduced cost at λ exceeds a margin is in no answer within that margin (`min_marginals`).
4. *Search the rest*: little is left. It has prices of its own, and counts of how many equal layers choose what give its
   best (`remaining`). What they leave undecided is divided by what large tensors take (`branch_and_bound`).
5. *State what is exceeded*: an answer, or what prices mix, may exceed a budget that is no row yet. That becomes one,
   and the rest is searched again.
6. *Widen*: the margin grows to twice what the prices of the rest prove, until the gap is closed or time is over. If a
   margin leaves too much, the widest that does not is searched to the end, and messages sweep on: the nearer they
   converge, the less is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.best_below import WIDER, Best, BestBelow
from autopar.solver.bounds.prices import (
    ROUGHLY,
    WORTHWHILE,
    Evaluation,
    Mixture,
    OverElsewhere,
    best_prices,
)
from autopar.solver.deadline import is_over, seconds_until
from autopar.solver.elimination.bucket_elimination import CHEAP_WORK
from autopar.solver.elimination.min_marginals import ReducedCosts
from autopar.solver.ilp import solve_ilp
from autopar.solver.oracles import EliminationOracle, MessageOracle, constant_of, oracle_of
from autopar.solver.presolve.presolved import Presolved
from autopar.solver.presolve.reduced_cost_fixing import Remaining, only, remaining_of_each
from autopar.solver.problem import Problem
from autopar.solver.tolerances import EXACT, ROUNDING, Tolerances, is_closed

FIRST_MARGIN = 1e-3  # first margin of the search, relative to the bound
PRICED_NEAR = 1e-4  # gain of better prices, relative to the bound, worth an evaluation of an expensive whole


class RowSource(Protocol):
    """Memory rows, some of which are only stated once choices exceed them."""

    def problems(self) -> Sequence[Problem]:
        """Return the problem with each of the rows stated so far, in the order in which they were stated."""
        ...

    def fits(self, choices: tuple[int, ...]) -> bool:
        """Return whether choices are within all budgets; state rows that they exceed, if not."""
        ...

    def exceeds(self, mixture: Mixture) -> bool:
        """State rows that choices exceed on average, by their weights; return whether there are any new ones."""
        ...


@dataclass(frozen=True, slots=True)
class Stated:
    """Rows all of which are stated."""

    rows: tuple[Problem, ...]

    def problems(self) -> Sequence[Problem]:
        return self.rows

    def fits(self, choices: tuple[int, ...]) -> bool:
        return all(each.fits(each.bytes_of(choices)) for each in self.rows)

    def exceeds(self, mixture: Mixture) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Found:
    """The best choices found, the certificate, and the prices of the rows, in seconds per byte."""

    choices: tuple[int, ...] | None
    """None: none are within all budgets, or none were found in time."""
    seconds: float
    bound: float
    """No choices within all budgets take less; infinite if there are none."""
    prices: tuple[float, ...]
    solver: str


def search(
    source: RowSource,
    deadline: float,
    tolerances: Tolerances = EXACT,
    prices: Sequence[float] = (),
    gives_up: float = math.inf,
    known: tuple[int, ...] | None = None,
    at_prices: Evaluation | None = None,
) -> Found:
    """Return the best choices within all budgets of a source, as far as they are found by the deadline.

    `prices` of its rows (in seconds per byte) are near those of the answer, if any are known. The search ends with
    nothing at `gives_up`, a moment before the deadline, if no choices are found by then. `known` are choices that are
    within all budgets, `at_prices` what the prices give, if that is known.
    """
    state = _Search(source, deadline, tolerances, tuple(prices), gives_up, known)
    try:
        state.begin(at_prices)
        while not state.widen():
            if not (state.reprice() or state.sweep_on()):
                state.by_ilp()
                break
    except TimeLimitError:
        pass
    return state.found()


class _Search:
    def __init__(
        self,
        source: RowSource,
        deadline: float,
        tolerances: Tolerances,
        prices: tuple[float, ...],
        gives_up: float,
        known: tuple[int, ...] | None,
    ) -> None:
        self.source, self.deadline, self.tolerances, self.gives_up = source, deadline, tolerances, gives_up
        self.first, *others = source.problems()
        self.prices = (*prices, *[0.0] * (1 + len(others) - len(prices)))
        """Prices of all rows that are stated."""
        self.at = prices or self.prices
        """Prices of the rows of the whole, which may be fewer."""
        self.near = self.prices
        """Prices of all rows that were the best of what was left last."""
        self.is_priced = False
        """True if better prices of the whole were looked for."""
        self.best = known
        self.seconds = math.inf if known is None else self.first.seconds_of(known)
        self.bound = -math.inf
        self.swept = math.inf, -math.inf
        """Seconds and bound when messages were last let converge further."""
        self.solver = "elimination"

    def begin(self, at_prices: Evaluation | None) -> None:
        """Presolve the problem, and find prices; `at_prices` is what the first ones give, if that is known."""
        self.presolved = Presolved.of(self.source.problems())
        self.whole = oracle_of(self.presolved.problems[: len(self.at)], self.deadline)
        self.solver = "elimination" if isinstance(self.whole, EliminationOracle) else "messages"
        self.price(at_prices)

    def found(self) -> Found:
        """Return what is known by now."""
        bound = math.inf if self.bound > -math.inf and self.bound > self.largest_seconds else self.bound
        if self.best is None:
            return Found(None, math.inf, bound, self.prices, self.solver)
        seconds = self.first.seconds_of(self.best)
        is_best = is_closed(self.seconds, bound, ROUNDING)
        return Found(self.best, seconds, seconds if is_best else min(bound, seconds), self.prices, self.solver)

    @cached_property
    def largest_seconds(self) -> float:
        """Seconds that no choices exceed: where a bound does, none are within the budgets."""
        return (1 + ROUNDING) * self.presolved.problems[0].largest_seconds

    @property
    def is_expensive(self) -> bool:
        """True if an evaluation of the whole takes seconds."""
        return isinstance(self.whole, MessageOracle) or self.whole.elimination.work > CHEAP_WORK

    @property
    def gap(self) -> float:
        """Gap at which the search ends."""
        return max(self.tolerances.gap, self.tolerances.expensive if self.is_expensive else 0.0, ROUNDING)

    def is_done(self) -> bool:
        """Return whether the best is near enough, nothing is within the budgets or below the cut-off, or time is
        over.
        """
        is_hopeless = self.bound >= self.tolerances.cutoff or self.bound > self.largest_seconds
        return is_hopeless or is_closed(self.seconds, self.bound, self.gap) or is_over(self.until)

    @property
    def until(self) -> float:
        """Time at which the search ends, if nothing better is found."""
        return self.deadline if self.best is not None else min(self.gives_up, self.deadline)

    def price(self, evaluation: Evaluation | None = None) -> None:
        """Find the prices that prove most of the whole; where evaluations take seconds, those of the first rows.

        `evaluation` is what the first prices give, if that is known; its choices are those of the original problem.
        Where the first ones nearly prove what is known, others are only looked for once what they leave is too wide.
        """
        is_free = all(each.budget is None for each in self.presolved.problems)
        if evaluation is None or evaluation[1] is None:
            evaluation = self.whole.at(self.at, near=self.gap if is_free else PRICED_NEAR)
            self.note(evaluation[1])
        else:
            evaluation = evaluation[0], self.presolved.restrict(evaluation[1])
        self.bound = max(self.bound, evaluation[0])
        is_near = self.is_expensive and is_closed(self.seconds, self.bound, ROUGHLY)
        if is_free or (is_near and not self.is_priced):
            return
        while not self.is_done():
            expensive = self.is_expensive
            found = best_prices(
                self.whole,
                self.at,
                scale=abs(self.bound),
                constant=0.0,
                gap=self.gap,
                deadline=self.deadline if expensive else self.until,
                worthwhile=PRICED_NEAR if expensive else WORTHWHILE,
                cutoff=min(self.tolerances.cutoff, math.nextafter(self.largest_seconds, math.inf)),
                known=None if self.best is None else self.presolved.restrict(self.best),
                at_start=evaluation,
                is_over_elsewhere=(lambda _: False) if expensive else self._exceeds(tuple),
                refine=self.mix if expensive else None,
            )
            evaluation, self.is_priced = None, True
            self.at, self.prices = found.prices, self._of_all_rows(found.prices)
            self.near = self.prices
            self.bound = max(self.bound, found.bound)
            if not found.is_over_elsewhere:
                self.note(found.choices)
            self._restate()
            if self.is_expensive or len(self.at) == len(self.prices):
                return
            self.whole, self.at = oracle_of(self.presolved.problems, self.deadline), self.prices

    def mix(self, mixture: Mixture, bound: float) -> tuple[float, tuple[float, ...]] | None:
        """Note the best choices that take each strategy from some of those that prices mix; return their best prices.

        Equal layers change alike at a price: one solution exceeds the budget with all of them, another takes far less.
        What they take on average is hardly more than an answer that has some layers of each. No prices prove more of
        the whole than of these, and those that do so are near the best of the whole.
        """
        self.bound = max(self.bound, bound)
        if self.is_done():
            return -math.inf, self.at
        if len(mixture) < 2:
            return None
        near = only(self.whole.problems[0], map(np.unique, np.array([choices for choices, _ in mixture]).T))
        left = remaining_of_each(self.whole.problems, near, 0.0)
        if math.isinf(constant := constant_of(left)) or (rows := self._rows_of(left)) is None:
            return None
        found = best_prices(rows, self.at, abs(self.bound), constant, 0.0, self.until)
        if not is_closed(self.seconds, found.bound + constant, ROUGHLY):
            self._search_rest(near, min(self.seconds, self.largest_seconds) - self.bound, self.bound, is_last=False)
        return -math.inf if self.is_done() else found.bound + constant, found.prices

    def reprice(self) -> bool:
        """Find prices of the whole, or those of rows that were stated since; return whether there are any."""
        if self.is_priced:
            if len(self.at) == len(self.prices):
                return False
            self.whole, self.at = oracle_of(self.presolved.problems, self.deadline, self.whole), self.prices
        self.is_priced = True
        self.price()
        return True

    def sweep_on(self) -> bool:
        """Let messages converge further, in twice as many slow sweeps; False if that proved and found nothing more."""
        (seconds, bound), self.swept = self.swept, (self.seconds, self.bound)
        if not isinstance(self.whole, MessageOracle):
            return False
        self.whole.patience *= 2
        return self.seconds < seconds or self.bound - bound > PRICED_NEAR * abs(self.bound)

    def widen(self) -> bool:
        """Search within ever wider margins of what prices prove of the whole; False if what is left stays too wide."""
        if self.is_done():
            return True
        exactly = is_closed(self.seconds, self.bound, PRICED_NEAR)
        sufficient = (1 - self.gap) * self.seconds
        reached, choices = self.whole.at(self.at, sufficient=sufficient, near=ROUNDING if exactly else PRICED_NEAR)
        self.bound = max(self.bound, reached)
        if choices is not None and Stated(self.presolved.problems).fits(choices):
            self.note(choices)
        scale = abs(reached) or self.largest_seconds or 1.0
        searched, share, too_wide = 0.0, FIRST_MARGIN, math.inf
        while not self.is_done() and share - searched > PRICED_NEAR:
            self.solver = "prices + counts"
            widest = (share + ROUNDING) * scale
            most = min(self.seconds, self.largest_seconds) - reached
            is_last = widest >= most
            margin = min(widest, most + ROUNDING * scale)
            near = self.whole.reduced_costs(self.at, margin)
            found = self._search_rest(near, margin, reached, is_last or too_wide < math.inf)
            if found is None:
                too_wide = margin / scale
                share = (searched + too_wide) / 2 if searched else too_wide / WIDER
                continue
            self.bound = max(self.bound, min(found.bound, reached + margin, self.seconds))
            is_stopped = not found.is_searched and not self.tolerances.go_on(self.seconds, self.bound)
            if is_last or is_stopped or self.is_done():
                return True
            proven = found.reached - reached
            wider = min(WIDER * share, 2 * proven / scale) if proven > margin else WIDER * share
            searched, share = share, wider if wider < too_wide else (share + too_wide) / 2
        return self.is_done()

    def by_ilp(self) -> None:
        """Look for better choices by the plain ILP, where nothing else ends before the deadline."""
        while not self.is_done():
            problems = self.presolved.problems
            hint = None if self.best is None else self.presolved.restrict(self.best)
            left, tolerance = seconds_until(self.deadline), self.gap * max(self.bound, 0.0)
            found = solve_ilp(problems[0], left, hint, tolerance=tolerance, rows=problems[1:])
            self.solver = "ilp"
            if found.status == "infeasible":
                self.bound = math.inf
            self.bound = max(self.bound, min(found.bound, self.seconds))
            fits = self.note(found.choices)
            if fits or not self._restate():
                return

    def note(self, choices: tuple[int, ...] | None) -> bool:
        """Note choices of the presolved problem that are faster, if they are within all budgets; whether they are."""
        if choices is None:
            return False
        extended = self.presolved.extend(choices)
        if not self.source.fits(extended):
            return False
        seconds = self.presolved.problems[0].seconds_of(choices)
        if seconds < self.seconds:
            self.best, self.seconds = extended, seconds
        return True

    def _search_rest(self, near: ReducedCosts, margin: float, reached: float, is_last: bool) -> Best | None:
        """Return the best of what is left within a margin of what is reached, stating rows that it exceeds.

        None if the treewidth of what is left is too high.
        """
        tolerances = self.tolerances if is_last else replace(self.tolerances, branches=False)
        while True:
            left = remaining_of_each(self.presolved.problems, near, margin)
            constant = constant_of(left)
            if math.isinf(constant):
                return Best(None, math.inf, self.near)
            if (rows := self._rows_of(left)) is None:
                return None
            below = min(reached + margin, self.seconds)
            extend = left[0].extend
            exceeds, fits = self._exceeds(extend), lambda choices, extend=extend: self.note(extend(choices))
            rest = BestBelow(
                rows, constant, self.near, self.bound, below, self.until, self.gap, tolerances, self.seconds
            )
            found = rest.search(exceeds, fits)
            self.near = found.prices
            if found.choices is not None:
                fits(found.choices)
            if not self._restate() or self.is_done():
                return found

    def _rows_of(self, left: Sequence[Remaining]) -> EliminationOracle | None:
        """Return the oracle of what is left of each problem; None if its treewidth is too high."""
        problems = [each.problem for each in left]
        if isinstance(self.whole, MessageOracle):
            return EliminationOracle.of(problems, self.deadline, CHEAP_WORK)
        return EliminationOracle.of(problems, self.deadline, math.inf, self.whole.order_of(left[0]))

    def _exceeds(self, extend: Callable[[Sequence[int]], tuple[int, ...]]) -> OverElsewhere:
        """Return the question to the source about mixtures of choices that `extend` makes those of the presolved."""
        whole = self.presolved.extend
        return lambda mixture: self.source.exceeds(tuple([(whole(extend(each)), weight) for each, weight in mixture]))

    def _restate(self) -> bool:
        """Presolve the rows of the source where it has more than before; return whether it has."""
        problems = self.source.problems()
        if len(problems) == len(self.presolved.problems):
            return False
        self.presolved = Presolved.of(problems)
        self.prices, self.near = self._of_all_rows(self.prices), self._of_all_rows(self.near)
        return True

    def _of_all_rows(self, prices: Sequence[float]) -> tuple[float, ...]:
        """Return prices, and none for rows that were stated since."""
        return (*prices, *[0.0] * (len(self.presolved.problems) - len(prices)))
