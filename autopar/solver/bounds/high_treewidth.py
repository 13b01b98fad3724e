"""The best bound at high treewidth for a sequence of prices, by messages, with the costs of good choices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.bounds.domains import Domains
from autopar.solver.bounds.message_passing import MessagePassing
from autopar.solver.deadline import NEVER, is_over
from autopar.solver.elimination.bucket_elimination import narrow_elimination
from autopar.solver.elimination.distinct_tables import Tables
from autopar.solver.elimination.evaluation import evaluate, optimum
from autopar.solver.elimination.min_marginals import ReducedCosts
from autopar.solver.presolve.contraction import contract
from autopar.solver.presolve.pruning import Pruned, prune
from autopar.solver.problem import Floats, Integers, Node, Problem

EXPENSIVE_WORK = 5_000_000_000  # entries: an elimination of more takes longer than messages
MAX_SWEEPS = 200
WORTHWHILE = 0.02  # share of the open gap: a sweep that closes less is slow
PATIENCE = 3  # slow sweeps in a row until the search ends
TOLERANCE = 1e-10  # of the seconds: what rounding leaves between a bound and what attains it


class Wide:
    """Lower bounds on seconds + prices · bytes of a problem of high treewidth, for a sequence of prices.

    `rows` are the same problem with other bytes, which have prices of their own. Messages that fit some prices nearly
    fit the next. Where every choice is forbidden, the bound is infinite.
    """

    def __init__(self, problem: Problem, deadline: float = NEVER, rows: Sequence[Problem] = ()) -> None:
        self.problem, self.deadline = problem, deadline
        allowed = consistent((problem, *rows))
        self._pruned = None if allowed is None else allowed[0]
        self._messages = None if allowed is None else MessagePassing([each.problem for each in allowed], deadline)
        self._prices: tuple[float, ...] = ()

    def least(
        self, *prices: float, known_bound: float = -np.inf, sufficient: float = np.inf
    ) -> tuple[float, tuple[int, ...] | None]:
        """Return a bound on seconds + prices · bytes of any choices, and good ones: the best, where they cost the same.

        Returns the best found by the deadline; TimeLimitError if no sweep ends by then. The search ends where some
        choices cost no more than is `known_bound`: no bound is above that; and at a bound that is `sufficient`.
        """
        messages = self._messages
        if messages is None or self._pruned is None:
            return np.inf, None
        if prices != self._prices:
            messages.at(*prices)
            self._prices = prices
        slow = 0
        for _ in range(MAX_SWEEPS):
            before = messages.bound
            try:
                messages.sweep()
            except TimeLimitError:
                if before == -np.inf:
                    raise
                break
            best, gained = messages.cost, messages.bound - before
            slow = slow + 1 if gained < WORTHWHILE * (best - messages.bound) or best == np.inf else 0
            is_near = best < np.inf and best - messages.bound <= TOLERANCE * abs(best)
            is_done = best <= known_bound or messages.bound >= sufficient or slow >= PATIENCE
            if is_near or is_done or is_over(self.deadline):
                break
        if messages.cost == np.inf:
            return messages.bound, None
        # Rounding in the sums must not let the bound pass what it bounds.
        return min(messages.bound, messages.cost), self._pruned.extend(messages.choices())

    def bound(self, *prices: float) -> float:
        """Return the bound at some prices; reuse the last result of `least` if the prices are the same."""
        if self._messages is None or prices != self._prices:
            return self.least(*prices)[0]
        return min(self._messages.bound, self._messages.cost)

    def reduced_costs(self, most: float, *prices: float) -> ReducedCosts:
        """Return -inf for strategies that choices of at most `most` may take, else inf; of pairs nothing is known.

        `most` is in seconds + prices · bytes. Raises TimeLimitError if that takes until the deadline.
        """
        self.bound(*prices)
        assert self._pruned is not None and self._messages is not None, "no choices"
        of_node, alive, every = [], [], dict[int, Integers]()
        masks: dict[bytes, Floats] = {}  # what is left of equal nodes stays equal
        reached = self._messages.reached(most)
        for node, kept, least in zip(self.problem.nodes, self._pruned.kept, reached, strict=True):
            reduced_cost = np.full(node.num_strategies, np.inf)
            reduced_cost[kept[least <= most]] = -np.inf
            of_node.append(masks.setdefault(reduced_cost.tobytes(), reduced_cost))
            alive.append(every.setdefault(node.num_strategies, np.arange(node.num_strategies)))
        shared: dict[tuple[int, ...], Floats] = {}
        of_edge = [
            shared.setdefault(edge.seconds.shape, np.broadcast_to(-np.inf, edge.seconds.shape))
            for edge in self.problem.edges
        ]
        return ReducedCosts(tuple(alive), tuple(of_node), tuple(of_edge))


def consistent(problems: Sequence[Problem]) -> list[Pruned] | None:
    """Problems without strategies that leave a neighbour no choice, and so on (AC-3); None where nothing is left.

    They differ in bytes and budgets.
    """
    problem = problems[0]
    own = dict(enumerate(node.seconds for node in problem.nodes))
    for edge in problem.edges:
        if edge.is_loop:
            own[edge.ends[0]] = own[edge.ends[0]] + np.diagonal(edge.seconds)
    pairs = [edge for edge in problem.edges if not edge.is_loop]
    domains = Domains(own, [edge.ends for edge in pairs], [edge.seconds for edge in pairs])
    if domains.is_empty:
        return None
    shared: dict[tuple[int, bytes], Floats] = {}  # equal candidate lists stay one array
    masked_seconds = []
    for number, node in enumerate(problem.nodes):
        mask = domains.allowed[number]
        key = id(node.seconds), mask.tobytes()
        if key not in shared:
            shared[key] = node.seconds if mask.all() else np.where(mask, node.seconds, np.inf)
        masked_seconds.append(shared[key])
    found = []
    for each in problems:
        nodes = (
            Node(node.name, seconds, node.num_bytes) for node, seconds in zip(each.nodes, masked_seconds, strict=True)
        )
        found.append(prune(Problem(tuple(nodes), each.edges, each.budget, is_sound=True)))
    return found


def lower_bound(problem: Problem, multiplier: float, deadline: float = NEVER) -> float:
    """Return L(λ), a lower bound on the seconds of every choice; if elimination is expensive, the bound of messages.

    TimeLimitError where that takes until the deadline.
    """
    smaller = contract(prune(problem).problem).problem
    price = 0.0 if problem.budget is None else multiplier
    free = price * (problem.budget or 0)
    tables = Tables(smaller)
    elimination = narrow_elimination(smaller, tables)
    if elimination is None or elimination.work > EXPENSIVE_WORK:
        return Wide(smaller, deadline).least(price)[0] - free
    return optimum(elimination, evaluate(elimination, tables.weighted(price), deadline)) - free
