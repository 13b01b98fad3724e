"""The best bound of a wide graph at one price after the other, by messages, and what good choices take there."""

from __future__ import annotations

from collections import deque

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.deadline import NEVER, is_over
from autopar.solver.elimination import Tables, evaluate, narrow_elimination, optimum
from autopar.solver.lagrangian import Point, point
from autopar.solver.problem import Floats, Node, Problem
from autopar.solver.reductions.contraction import contract
from autopar.solver.reductions.reduction import Pruned, prune
from autopar.solver.relaxation.messages import Messages

DEAR_WORK = 5_000_000_000  # entries: an elimination of more takes longer than messages
MAX_SWEEPS = 200
WORTHWHILE = 0.02  # of what is open: a sweep that closes less is slow
PATIENCE = 3  # slow sweeps in a row until the search ends
TOLERANCE = 1e-10  # of the seconds: what rounding leaves between a bound and what attains it


class Wide:
    """The least of seconds + price · bytes over a wide problem, at one price after the other.

    Messages that fit one price nearly fit the next. Where every choice is forbidden, the bound is infinite.
    """

    def __init__(self, problem: Problem, deadline: float = NEVER, near: float = 0.0) -> None:
        self.problem, self.deadline = problem, deadline
        self.near = near
        """How near to the best choices found, as a share of their seconds, a bound is good enough."""
        self._pruned = consistent(problem)
        self._messages = None if self._pruned is None else Messages(self._pruned.problem, deadline)
        self._price = np.nan
        self._best: tuple[int, ...] | None = None

    def least(self, price: float) -> tuple[float, Point | None]:
        """A bound on seconds + price · bytes of any choices, and good ones: the best, where they cost the same.

        What is found by the deadline; TimeLimitError where no sweep ends by then.
        """
        if self._pruned is None or self._messages is None:
            return np.inf, None
        messages, problem = self._messages, self._pruned.problem
        if price != self._price:
            messages.at(price)
            self._price = price
        met = None if self._best is None else point(problem, self._best)
        best = np.inf if met is None else met.seconds + price * met.num_bytes
        slow = 0
        for _ in range(MAX_SWEEPS):
            before = messages.bound
            try:
                choices = messages.sweep()
            except TimeLimitError:
                if before == -np.inf:
                    raise
                break
            found = point(problem, choices)
            if found.seconds + price * found.num_bytes < best:
                met, best = found, found.seconds + price * found.num_bytes
            gained = messages.bound - before
            slow = slow + 1 if gained < WORTHWHILE * (best - messages.bound) or best == np.inf else 0
            is_near = best < np.inf and best - messages.bound <= max(self.near, TOLERANCE) * abs(best)
            if is_near or slow >= PATIENCE or is_over(self.deadline):
                break
        if met is None or best == np.inf:
            return messages.bound, None
        self._best = met.choices
        # Rounding in the sums must not let the bound pass what it bounds.
        return min(messages.bound, best), point(self.problem, self._pruned.extend(met.choices))

    def without(self, price: float, most: float) -> Pruned:
        """The problem without the strategies that no choices of at most `most` (seconds + price · bytes) take.

        TimeLimitError where that takes until the deadline.
        """
        if price != self._price:
            self.least(price)
        assert self._pruned is not None and self._messages is not None, "no choices"
        nodes, found = [], self._messages.reached(most)
        for node, kept, reached in zip(self.problem.nodes, self._pruned.kept, found, strict=True):
            seconds = np.full(node.num_strategies, np.inf)
            near = kept[reached <= most]
            seconds[near] = node.seconds[near]
            nodes.append(Node(node.name, seconds, node.num_bytes))
        return prune(Problem(tuple(nodes), self.problem.edges, self.problem.budget))


def consistent(problem: Problem) -> Pruned | None:
    """The problem without strategies that leave a neighbour no choice, and so on (AC-3); None where nothing is left."""
    allowed = [np.isfinite(node.seconds) for node in problem.nodes]
    finite: dict[int, np.ndarray | None] = {}
    at: list[list[int]] = [[] for _ in problem.nodes]
    waiting: deque[int] = deque()
    for number, edge in enumerate(problem.edges):
        if id(edge.seconds) not in finite:
            mask = np.isfinite(edge.seconds)
            finite[id(edge.seconds)] = None if mask.all() else mask
        if finite[id(edge.seconds)] is not None:
            waiting.append(number)
            for end in edge.ends:
                at[end].append(number)
    queued = set(waiting)
    while waiting:
        number = waiting.popleft()
        queued.discard(number)
        edge, mask = problem.edges[number], finite[id(problem.edges[number].seconds)]
        assert mask is not None
        if edge.is_loop:
            supports = [np.diagonal(mask)] * 2
        else:
            for axis, end in enumerate(edge.ends):
                mask = mask & allowed[end].reshape([-1 if axis == dim else 1 for dim in range(mask.ndim)])
            supports = [mask.any(axis=tuple(d for d in range(mask.ndim) if d != axis)) for axis in range(mask.ndim)]
        for end, support in zip(edge.ends, supports, strict=True):
            if (allowed[end] & ~support).any():
                allowed[end] = allowed[end] & support
                if not allowed[end].any():
                    return None
                new = [other for other in at[end] if other not in queued]
                waiting.extend(new)
                queued.update(new)
    shared: dict[tuple[int, bytes], Floats] = {}  # equal menus stay one array
    nodes = []
    for node, mask in zip(problem.nodes, allowed, strict=True):
        key = id(node.seconds), mask.tobytes()
        if key not in shared:
            shared[key] = node.seconds if mask.all() else np.where(mask, node.seconds, np.inf)
        nodes.append(Node(node.name, shared[key], node.num_bytes))
    return prune(Problem(tuple(nodes), problem.edges, problem.budget))


def lower_bound(problem: Problem, multiplier: float, deadline: float = NEVER) -> float:
    """L(λ), or where elimination would be dear what messages prove of it: a bound on the seconds of every choice.

    TimeLimitError where that takes until the deadline.
    """
    smaller = contract(prune(problem).problem).problem
    price = 0.0 if problem.budget is None else multiplier
    free = price * (problem.budget or 0)
    tables = Tables(smaller)
    elimination = narrow_elimination(smaller, tables)
    if elimination is None or elimination.work > DEAR_WORK:
        return Wide(smaller, deadline).least(price)[0] - free
    return optimum(elimination, evaluate(elimination, tables.weighted(price), deadline)) - free
