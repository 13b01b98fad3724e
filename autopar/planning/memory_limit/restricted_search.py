"""Choices within the limit at every moment, recombined from choices that are not, or that cost more.

While the backward of a layer runs, that layer takes most: where layers fill a device, each of them has a moment that is
over the limit. A row for each makes all layers different, and a search with all rows takes long. On a restricted master
problem (`solver.remaining.restricted_master`) it takes little, and moments get their row once a solution exceeds the
limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.costs.memory.moments import MemoryRow
from autopar.planning.memory_limit.answers import Answer, Found, choices_of_nodes, full, in_each_mode
from autopar.planning.memory_limit.refusal import LimitQuestions, Modes
from autopar.solver.deadline import is_over, seconds_until
from autopar.solver.problem import Solution
from autopar.solver.remaining.restricted_master import RestrictedMaster

MAX_MOMENTS = 120  # that have a row: a layer has four, and stating the problem with one more takes a tenth of a second
STATED = 6  # moments whose rows are stated between two looks at the clock
AT_ONCE = 24  # moments that get a row on account of one answer
APART = 2e-3  # of all moments lie between two of them: less than there are in a layer
NEAR_LIMIT = 0.995  # of the limit: where one answer takes so much, the next is soon over it
EFFORT = 2.0  # CP-SAT's deterministic seconds of each search: with a quarter of them it finds nothing


@dataclass(frozen=True, slots=True)
class RestrictedSearch(LimitQuestions):
    """A search that recombines visited choices by a restricted master problem."""

    def by_restricted_master(self, found: Found, limit: int, modes: Modes | None, tolerance: float) -> list[Answer]:
        """Return an answer that fits, recombined from known ones; [] if none is found that is faster.

        Answers that are faster by less than a tolerance (in seconds) are not looked for.
        """
        fitting = sorted(found.fitting, key=lambda each: each.seconds)
        visited = [choices_of_nodes(each.choices, each.modes.values()) for each in fitting]
        start = visited[0] if visited else None
        visited += in_each_mode(found.first, modes or {}, self.formulation.memory.lifetimes.modes)
        visited = list(dict.fromkeys((*visited, *found.near)))
        made = self._made_of(
            visited, start, {*found.moments, *_full(self._bytes_of(found.first), limit)}, limit, modes, tolerance
        )
        if made is None:
            return []
        problem = self._problem(None, limit, modes)
        seconds, num_bytes = problem.cost_of(made)
        bound = min(found.proof.bound, seconds)
        return [self._answer(problem, Solution(made, seconds, num_bytes, bound, "restricted_master"), modes)]

    def _made_of(
        self,
        visited: list[tuple[int, ...]],
        start: tuple[int, ...] | None,
        moments: set[int],
        limit: int,
        modes: Modes | None,
        tolerance: float,
    ) -> tuple[int, ...] | None:
        """Return the fastest choices of decisions and modes, with a row of each of the moments and of those that need
        one.

        `start` are those of the known choices that fit, if any do.
        """
        columns, stated = None, set[int]()
        while (new := sorted(moments - stated)) and len(moments) <= MAX_MOMENTS:
            for first in range(0, len(new), STATED):
                if is_over(self.deadline):
                    return None
                rows = [MemoryRow(((moment, 1),)) for moment in new[first : first + STATED]]
                problems = self.formulation.problems(self.pins, rows, limit, modes)
                columns = columns or RestrictedMaster(problems[0], visited)
                columns.add(problems)
            assert columns is not None, "some moments are new"
            stated.update(new)
            found = columns.best(min(EFFORT, seconds_until(self.deadline)), tolerance, start)
            if found is None:
                break
            taken = self._taken(found, modes)
            if taken.max() <= limit:
                return found
            moments = moments | _full(taken, limit)
        return None


def _full(taken: np.ndarray, limit: int) -> set[int]:
    """Moments at which so many bytes, by moment, are over the limit, or nearly."""
    return full(taken, int(NEAR_LIMIT * limit), AT_ONCE, APART)
