"""The best bound of a loosened problem: rounds of levelling, and choices that the copies agree on.

A round evaluates the loosened problem, which gives a bound, holds the nodes with copies at what these want together,
which leaves a narrow problem and gives choices, and levels the shares. A step that is too long for so many nodes at
once lowers the bound: then the round is taken back, and the next steps are half as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.deadline import NEVER, is_over
from autopar.solver.elimination import (
    Elimination,
    Tables,
    choices_of,
    compile_order,
    evaluate,
    narrow_elimination,
    optimum,
)
from autopar.solver.lagrangian import Point, is_closed, point
from autopar.solver.min_marginals import MAX_CALIBRATED, Excesses, excesses
from autopar.solver.problem import Floats, Node, Problem
from autopar.solver.reductions.contraction import contract
from autopar.solver.reductions.reduction import Pruned, prune, with_fixed
from autopar.solver.relaxation.hubs import hubs_apart
from autopar.solver.relaxation.loosened import Loosened
from autopar.solver.relaxation.splitting import split

DEAR_WORK = 5_000_000_000  # entries: an elimination of more takes longer than one of the loosened graph
MAX_ROUNDS = 40
FIRST_STEP, LEAST_STEP = 0.5, 0.01  # of the way to level
WORTHWHILE = 0.02  # of the rest that is open: a round that closes less is the last
GRID = 1e-7  # of the bound: excesses that differ by less are the same
TOLERANCE = 1e-10  # of the seconds: what rounding leaves between a bound and what attains it


def loosen(problem: Problem) -> Loosened | None:
    """A bound on a wide problem: its hubs apart, or where it is wide without them, too, split all over.

    None where nothing can be split.
    """
    loose = hubs_apart(problem)
    elimination = None if loose is None else narrow_elimination(loose.problem, Tables(loose.problem))
    if loose is None or elimination is None:
        return split(problem)
    apart = replace(loose, order=tuple([bucket.bag[0] for bucket in elimination.buckets]))
    is_light = elimination.work <= DEAR_WORK and elimination.largest <= MAX_CALIBRATED
    return apart if is_light else split(problem) or apart


class Levelling:
    """The least of seconds + price · bytes over a wide problem, at one price after the other.

    Shares that fit one price nearly fit the next, and so do the strategies on which the copies agree.
    """

    def __init__(self, problem: Problem, loose: Loosened, deadline: float = NEVER, near: float = 0.0) -> None:
        self.problem = problem
        self.loose = loose
        self.deadline = deadline
        self.near = near
        """How near to the best choices found, as a share of their seconds, a bound is good enough."""
        self._step = FIRST_STEP
        self._held: dict[int, int] = {}
        self._narrow: tuple[dict[int, int], _Narrow | None] = {}, None
        self._last: tuple[Loosened, float, Elimination, list[Floats]] | None = None

    def least(self, price: float) -> tuple[float, Point | None]:
        """A bound on seconds + price · bytes of any choices, and good ones: the best, where they cost the same.

        What is found by the deadline; TimeLimitError where no round ends by then.
        """
        best, found = self._with_held(price)
        bound, start = -np.inf, None
        try:
            for _ in range(MAX_ROUNDS):
                elimination, weighted = self._evaluated(price)
                reached = optimum(elimination, weighted)
                if not np.isfinite(reached):
                    return reached, None
                gained = reached - bound
                if start is not None and gained <= 0:
                    self._step /= 2
                else:
                    bound = reached
                    if is_closed(best, bound, TOLERANCE):
                        return bound, found
                    start = self.loose, self._excesses(elimination, weighted, bound)
                    agreed = self.loose.agreement(start[1])
                    if agreed != self._held:
                        self._held = agreed
                        best, found = min((best, found), self._with_held(price), key=lambda each: each[0])
                slow = best < np.inf and 0 < gained < WORTHWHILE * (best - bound)
                stuck = self._step < LEAST_STEP or slow or best - bound <= self.near * abs(best) < np.inf
                if is_closed(best, bound, TOLERANCE) or stuck or is_over(self.deadline):
                    break
                self.loose = start[0].levelled(start[1], GRID * abs(bound), self._step)
        except TimeLimitError:
            if start is None:
                raise
        assert start is not None
        self.loose = start[0]
        return bound, found

    def without(self, price: float, most: float) -> Pruned:
        """The problem without the strategies that no choices of at most `most` (seconds + price · bytes) take.

        TimeLimitError where that takes until the deadline.
        """
        elimination, weighted = self._evaluated(price)
        self._last = None  # much memory, which is not needed again
        bound = optimum(elimination, weighted)
        found = self._excesses(elimination, weighted, bound, most - bound)
        nodes = (
            Node(node.name, self._kept(found, number, most - bound), node.num_bytes)
            for number, node in enumerate(self.problem.nodes)
        )
        return prune(Problem(tuple(nodes), self.problem.edges, self.problem.budget))

    def _kept(self, found: Excesses, node: int, margin: float) -> Floats:
        """The seconds of a node's strategies, without those of an excess above the margin."""
        return np.where(self.loose.excess(found, node) > margin, np.inf, self.problem.nodes[node].seconds)

    def _evaluated(self, price: float) -> tuple[Elimination, list[Floats]]:
        if self._last is None or self._last[0] is not self.loose or self._last[1] != price:
            self._last = None
            tables = Tables(self.loose.problem)
            elimination = compile_order(self.loose.problem, tables, self.loose.order)
            weighted = evaluate(elimination, tables.weighted(price), self.deadline)
            self._last = self.loose, price, elimination, weighted
        return self._last[2:]

    def _excesses(
        self, elimination: Elimination, weighted: list[Floats], bound: float, margin: float = np.inf
    ) -> Excesses:
        return excesses(self.loose.problem, elimination, weighted, margin, GRID * abs(bound), self.deadline)

    def _with_held(self, price: float) -> tuple[float, Point | None]:
        """What the best choices cost with copies held where they last agreed, and these; None if none exist."""
        if not self._held:
            return np.inf, None
        if self._narrow[0] != self._held:
            self._narrow = self._held, _Narrow(self.problem, self._held, self.loose.order, self.deadline)
        assert self._narrow[1] is not None
        found = self._narrow[1].best(price)
        if found is None:
            return np.inf, None
        met = point(self.problem, found)
        return met.seconds + price * met.num_bytes, met


class _Narrow:
    """A problem whose nodes with copies are held, ready to be evaluated in the order of the loosened one."""

    def __init__(self, problem: Problem, held: dict[int, int], order: Sequence[int], deadline: float) -> None:
        self.deadline = deadline
        self.pruned: Pruned = prune(with_fixed(problem, held))
        self.tables = Tables(self.pruned.problem)
        order = [node for node in order if node < len(problem.nodes)]
        self.elimination = compile_order(self.pruned.problem, self.tables, order)

    def best(self, price: float) -> tuple[int, ...] | None:
        """The choices of least seconds + price · bytes in the problem before it was pruned; None: all are forbidden."""
        weighted = evaluate(self.elimination, self.tables.weighted(price), self.deadline)
        if optimum(self.elimination, weighted) == np.inf:
            return None
        return self.pruned.extend(choices_of(self.elimination, weighted))


def lower_bound(problem: Problem, multiplier: float, deadline: float = NEVER) -> float:
    """L(λ): a bound on the seconds of every choice within the budget; -inf where the graph is too wide for it.

    TimeLimitError where that takes until the deadline.
    """
    smaller = contract(prune(problem).problem).problem
    price = 0.0 if problem.budget is None else multiplier
    free = price * (problem.budget or 0)
    tables = Tables(smaller)
    elimination = narrow_elimination(smaller, tables)
    loose = loosen(smaller) if elimination is None or elimination.work > DEAR_WORK else None
    if loose is not None:
        return _levelled_bound(Levelling(smaller, loose, deadline), price) - free
    if elimination is None:
        return -np.inf
    return optimum(elimination, evaluate(elimination, tables.weighted(price), deadline)) - free


def _levelled_bound(levelling: Levelling, price: float) -> float:
    """The bound at a price alone, to which a search has come from other prices: again from the shares so far."""
    bound, again = -np.inf, levelling.least(price)[0]
    while np.isfinite(again) and not is_closed(again, bound, TOLERANCE) and not is_over(levelling.deadline):
        bound, again = again, max(again, levelling.least(price)[0])
    return again
