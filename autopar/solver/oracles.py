"""Oracles: what a problem with memory rows takes at least at prices of its bytes, and what is left within a margin.

    L(λ) = min_x [seconds(x) + Σ_r λ_r (bytes_r(x) − budget_r)]

Elimination gives L(λ) exactly; if the treewidth is too high for that, messages bound it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import TimeLimitError
from autopar.solver.bounds.domains import consistent
from autopar.solver.bounds.message_passing import MessagePassing
from autopar.solver.bounds.prices import PATIENCE, PricedRows
from autopar.solver.deadline import NEVER, after, check, is_over, seconds_until
from autopar.solver.elimination.bucket_elimination import (
    EXPENSIVE_WORK,
    Elimination,
    compile_order,
    narrow_elimination,
)
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import choices_of, evaluate, optimum
from autopar.solver.elimination.min_marginals import ReducedCosts, reduced_costs
from autopar.solver.presolve.presolved import Presolved
from autopar.solver.presolve.reduced_cost_fixing import Remaining, only, remaining_of_each
from autopar.solver.problem import Floats, Problem
from autopar.solver.remaining.counting_ilp import best_counts
from autopar.solver.remaining.remaining_choices import Counted, RemainingProblem, TooManyChoicesError
from autopar.solver.tolerances import ROUNDING

MAX_SWEEPS = 200  # evaluations of messages at one price
WORTHWHILE = 0.02  # share of the open gap: a sweep that closes less is slow
SHARE = 0.25  # largest share of the remaining time for one count


class EliminationOracle(PricedRows):
    """The oracle of low treewidth, exact."""

    def __init__(self, problems: Sequence[Problem], tables: Tables, elimination: Elimination, deadline: float) -> None:
        super().__init__(problems, deadline)
        self.tables, self.elimination = tables, elimination
        self._last: tuple[tuple[float, ...], list[Floats]] = (), []

    @classmethod
    def of(
        cls, problems: Sequence[Problem], deadline: float, most: float, order: Sequence[int] | None = None
    ) -> EliminationOracle | None:
        """Return None if an evaluation takes more than so many entries in every order that is looked for.

        None is looked for where an order is given in which nodes are eliminated.
        """
        tables = Tables(problems[0], problems[1:])
        if order is None:
            elimination = narrow_elimination(problems[0], tables, most)
        else:
            elimination = compile_order(problems[0], tables, order)
        return None if elimination is None else cls(problems, tables, elimination, deadline)

    def least(self, prices: tuple[float, ...], *_: float, **__: float) -> tuple[float, tuple[int, ...]]:
        """Return the least seconds + prices · bytes of any choices, and choices that take it, however little would
        do.
        """
        evaluated = self._evaluated(prices)
        return optimum(self.elimination, evaluated), choices_of(self.elimination, evaluated)

    def reduced_costs(self, prices: tuple[float, ...], margin: float) -> ReducedCosts:
        """Return the reduced costs of strategies above L(λ), where they are below a margin."""
        evaluated = self._evaluated(prices)
        return reduced_costs(self.problems[0], self.elimination, self.tables, evaluated, margin, self.deadline)

    def counted(
        self,
        prices: tuple[float, ...],
        limit: float,
        margin: float,
        tolerance: float,
        known: Sequence[int] | None = None,
        goes_on: bool = False,
    ) -> Counted:
        """Return the best choices of at most `limit` seconds, by counts of what is left within a margin of L(λ).

        `known` are choices to begin with. Nothing is found where too much is left. A count that `goes_on` takes a
        share of the time that is left.
        """
        left = remaining_of_each(self.problems, self.reduced_costs(prices, margin), margin, self.parts)
        constant, problems = constant_of(left), [each.problem for each in left]
        if math.isinf(constant):
            return Counted(None, limit, True)
        start = None if known is None else left[0].restrict(known)
        try:
            soon = after(SHARE * seconds_until(self.deadline))
            rest = RemainingProblem(problems, prices, limit - constant, soon)
            found = best_counts(rest, tolerance, self.deadline, start, soon if goes_on else 0.0)
        except TooManyChoicesError:
            return Counted(None, -math.inf, False)
        except TimeLimitError:
            check(self.deadline)
            return Counted(None, -math.inf, False)
        choices = None if found.choices is None else left[0].extend(found.choices)
        return Counted(choices, min(found.bound + constant, limit), found.is_proven)

    def order_of(self, left: Remaining) -> list[int]:
        """Return the order in which nodes are eliminated, of those that are left."""
        place = {node: number for number, node in enumerate(left.undecided)}
        return [place[bucket.bag[0]] for bucket in self.elimination.buckets if bucket.bag[0] in place]

    def _evaluated(self, prices: tuple[float, ...]) -> list[Floats]:
        if self._last[0] != prices:
            self._last = (), []  # the tables at two prices take twice the memory
            self._last = prices, evaluate(self.elimination, self.tables.weighted(*prices), self.deadline)
        return self._last[1]


class MessageOracle(PricedRows):
    """A problem with several memory rows, of too high treewidth for elimination: messages bound it at prices.

    Messages that fit some prices nearly fit the next. Where every choice is forbidden, bounds are infinite.
    """

    def __init__(
        self, problems: Sequence[Problem], deadline: float = NEVER, known: MessageOracle | None = None
    ) -> None:
        """Begin with the messages of `known`, an oracle of the same problem with fewer rows."""
        super().__init__(problems, deadline)
        allowed = consistent(problems)
        self._pruned = None if allowed is None else allowed[0]
        self._messages = None if allowed is None else MessagePassing([each.problem for each in allowed], deadline)
        self._prices: tuple[float, ...] = ()
        self.patience = PATIENCE
        """Slow sweeps in a row that end an evaluation."""
        if self._messages is not None and known is not None and known._messages is not None:
            self._messages.take_from(known._messages)

    def least(
        self,
        prices: tuple[float, ...],
        known_bound: float = -math.inf,
        sufficient: float = math.inf,
        near: float = ROUNDING,
    ) -> tuple[float, tuple[int, ...] | None]:
        """Return a bound on seconds + prices · bytes of any choices, and good ones: the best, where they cost the same.

        Returns the best found by the deadline; TimeLimitError if no sweep ends by then. The search ends where some
        choices cost no more than is `known_bound`: no bound is above that; at a bound that is `sufficient`; and at
        choices within a relative gap that is `near`.
        """
        messages = self._messages
        if messages is None or self._pruned is None:
            return math.inf, None
        if prices != self._prices:
            messages.at(*prices)
            self._prices = prices
        slow = 0
        for _ in range(MAX_SWEEPS):
            before = messages.bound
            try:
                messages.sweep()
            except TimeLimitError:
                if before == -math.inf:
                    raise
                break
            best, gained = messages.cost, messages.bound - before
            slow = slow + 1 if gained < WORTHWHILE * (best - messages.bound) or best == math.inf else 0
            is_near = best < math.inf and best - messages.bound <= near * abs(best)
            is_done = best <= known_bound or messages.bound >= sufficient or slow >= self.patience
            if is_near or is_done or is_over(self.deadline):
                break
        if messages.cost == math.inf:
            return messages.bound, None
        return min(messages.bound, messages.cost), self._pruned.extend(messages.choices())

    def reduced_costs(self, prices: tuple[float, ...], margin: float) -> ReducedCosts:
        """Return -inf for strategies that choices within a margin of the bound may take, else inf; of pairs nothing is
        known.

        The bound is that of the last evaluation if the prices are the same. Raises TimeLimitError if that takes until
        the deadline.
        """
        if self._messages is None or prices != self._prices:
            self.least(prices)
        assert self._pruned is not None and self._messages is not None, "no choices"
        most = min(self._messages.bound, self._messages.cost) + margin
        reached = self._messages.reached(most)
        return only(
            self.problems[0],
            (kept[least <= most] for kept, least in zip(self._pruned.kept, reached, strict=True)),
        )


def oracle_of(
    problems: Sequence[Problem], deadline: float, known: EliminationOracle | MessageOracle | None = None
) -> EliminationOracle | MessageOracle:
    """Return the oracle of a problem with a memory row each: elimination, unless it takes longer than messages.

    `known` is the oracle of the same problem with fewer rows.
    """
    if isinstance(known, MessageOracle):
        return MessageOracle(problems, deadline, known)
    found = EliminationOracle.of(problems, deadline, EXPENSIVE_WORK)
    return MessageOracle(problems, deadline) if found is None else found


def lower_bound(problem: Problem, multiplier: float, deadline: float = NEVER) -> float:
    """Return L(λ), a lower bound on the seconds of every choice; if elimination is expensive, the bound of messages.

    TimeLimitError where that takes until the deadline.
    """
    price = 0.0 if problem.budget is None else multiplier
    oracle = oracle_of(Presolved.of((problem,)).problems, deadline)
    least, _ = oracle.least((price,))
    return least - price * (problem.budget or 0)


def constant_of(left: Sequence[Remaining]) -> float:
    """Return the seconds of the decided nodes; infinite if these break a limit, or nothing is left."""
    return math.inf if any(math.isinf(each.constant) for each in left) else left[0].constant
