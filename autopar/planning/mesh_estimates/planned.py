"""The best of the estimated candidates, planned exactly one after the other until none that is left can be better.

order    by estimate; after a plan without a pipeline one with, where it is about as good, and the other way round
error    how far plans were from their estimates so far, at least LEAST_ERROR: what is left is worth planning if its
         estimate, less by that, beats the best plan
time     a candidate has a half of what is left. It has all of it if no other is worth planning, or if it is a pipeline,
         which has no plan before its end, and there is an answer. A mesh whose candidate does not fit has its next one
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.console.progress import counter
from autopar.console.units import format_seconds
from autopar.costs.plans.comparison import Comparison, Contender
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_estimates.compared import are_same, compared, distinct, of_estimate
from autopar.planning.mesh_estimates.estimates import Estimate, Estimates
from autopar.planning.mesh_search.search import (
    NOT_TRIED,
    Candidate,
    Searched,
    Tried,
    Turn,
    cutoff_of,
    merged,
    no_better,
    tried_on,
)
from autopar.solver.deadline import is_over, seconds_until

LEAST_ERROR = 0.01
"""Relative to the step: what an estimate may be off by, where plans so far were closer."""
ABOUT_AS_GOOD = 1.1
SHARE = 0.5
"""Share of the remaining time that a candidate may take while others wait."""
Exact = Callable[[Estimate, Turn], Candidate[Any]]


@dataclass(slots=True)
class Planned:
    """Candidates that were planned exactly, each with its plan or the reason why it has none."""

    estimates: Estimates
    exact: Exact
    deadline: float
    tried: dict[Mesh, Tried[Any]] = field(default_factory=dict)
    error: float = 0.0
    """The most that a plan was apart from its estimate, relative to that."""
    quickest: float = 0.0
    """Seconds of the quickest exact plan of a pipeline; no other begins with less time left."""
    num_left: int = 0
    """Candidates that may be better and were not planned, as time was over."""
    answers: list[Estimate] = field(default_factory=list)
    """Estimates of candidates that have a plan."""
    same: defaultdict[Mesh, list[Estimate]] = field(default_factory=lambda: defaultdict(list))
    """Mesh with a plan → estimates that are of the same plan."""
    failed: dict[tuple[Mesh, int], Contender] = field(default_factory=dict)
    """Mesh and micro-batches → the candidate that has no plan, with the reason."""

    def best(self) -> Searched[Any] | None:
        """Plan the likeliest until no other can be better; None if no candidate has a plan."""
        queue, later = self.estimates.best(), Counter[Mesh]()
        last: Estimate | None = None
        say = counter("exact plans of candidates")
        while queue and not is_over(self.deadline):
            worth = self._seconds_worth_planning
            if queue[0].seconds >= worth:
                break
            chosen = self._next_estimate(queue, last, worth)
            if self._is_pipeline(chosen) and seconds_until(self.deadline) < self.quickest:
                break
            queue.remove(chosen)
            num_others = sum(each.seconds < worth for each in queue)
            say(self._progress(num_others))
            if (same := self._same_as(chosen)) is not None:
                self.same[same].append(chosen)
                continue
            has_all = not num_others or (self.answers and self._is_pipeline(chosen))
            tried = self._try(chosen, 1.0 if has_all else SHARE)
            if tried.found is None and not tried.reason.startswith(NOT_TRIED) and chosen.mesh not in self.tried:
                later[chosen.mesh] += 1
                further = self.estimates.of(chosen.mesh)[later[chosen.mesh] :]
                queue = sorted([*queue, *further[:1]], key=lambda each: each.seconds)
                if not further or is_over(self.deadline):
                    self.tried[chosen.mesh] = tried
            else:
                self.tried[chosen.mesh] = tried
            if tried.found is not None:
                self.answers.append(chosen)
            else:
                self.failed[chosen.mesh, chosen.microbatches] = of_estimate(chosen, tried.excluded, tried.reason)
            last = chosen
        self.num_left = sum(
            each.seconds < self._seconds_worth_planning and self._same_as(each) is None for each in queue
        )
        lines = merged(tuple(self.tried.values()))
        if not lines:
            return None
        without = [each for each in self.tried.values() if each.found is None]
        return Searched(lines[0][0].mesh.num_devices, lines, tuple(without))

    def _is_pipeline(self, estimate: Estimate) -> bool:
        return self.estimates.subject.axis in estimate.mesh.axes

    @property
    def _best_seconds(self) -> float:
        return min((each.found.seconds for each in self.tried.values() if each.found), default=math.inf)

    @property
    def _seconds_worth_planning(self) -> float:
        """Seconds by estimate below which a candidate may be better than the best plan."""
        return self._best_seconds / (1 - max(self.error, LEAST_ERROR))

    def _progress(self, left: int) -> str:
        """Return how far the search is, in words."""
        best = self._best_seconds
        without = len(self.failed) + sum(map(len, self.same.values()))
        words = f"{len(self.answers)} done, {without} excluded, at most {left} left"
        return words if math.isinf(best) else f"{words}, best step {format_seconds(best)}"

    def comparison(self, searched: Searched[Any]) -> Comparison:
        """Return all candidates: planned, estimated and excluded ones."""
        answered = {each.mesh: each.seconds for each in self.answers}
        planned = [
            replace(each, same_on=(*each.same_on, *self._joined((each.mesh, *each.same_on))))
            for each in compared(searched, answered).planned
        ]
        done = {(each.mesh, each.microbatches) for each in (*self.answers, *itertools.chain(*self.same.values()))}
        done |= set(self.failed)
        found = self.estimates.found
        left = [each for each in found.values() if each and (each.mesh, each.microbatches) not in done]
        without = [self._excluded(*each) for each, estimate in found.items() if estimate is None]
        return Comparison((*planned,), self.num_left).with_contenders(*distinct(left), *self.failed.values(), *without)

    def _joined(self, meshes: Iterable[Mesh]) -> Iterator[Mesh]:
        """Yield meshes whose plans were not made, as they are those of these meshes."""
        return (each.mesh for mesh in meshes for each in self.same.get(mesh, ()))

    def _excluded(self, mesh: Mesh, microbatches: int) -> Contender:
        """Return a candidate that has no estimate, with the reason."""
        subject, best = self.estimates.subject, min(each.seconds for each in self.answers)
        if (least := subject.at_least(mesh, microbatches)) > best:
            return Contender(mesh, microbatches, excluded="bound", reason=no_better(least))
        if (slower := self.estimates.slower_at(mesh, microbatches)) is not None:
            reason = f"clearly slower by an estimate: a step takes about {format_seconds(slower)}"
            return Contender(mesh, microbatches, excluded="estimate", reason=reason)
        if math.isfinite(subject.limit(mesh)):
            return Contender(mesh, microbatches, excluded="memory", reason="not known to fit within the memory limit")
        return Contender(mesh, microbatches, excluded="error", reason="no schedule or strategy fits it")

    def _next_estimate(self, queue: list[Estimate], last: Estimate | None, worth: float) -> Estimate:
        """Return the first of the queue, or the first of the other kind than the last, if that is about as good."""
        axis, most = self.estimates.subject.axis, min(worth, ABOUT_AS_GOOD * queue[0].seconds)
        if last is None:
            return queue[0]
        others = (each for each in queue if (axis in each.mesh.axes) != (axis in last.mesh.axes))
        other = next(others, queue[0])
        return other if other.seconds < most else queue[0]

    def _same_as(self, estimate: Estimate) -> Mesh | None:
        """Return the mesh of no more axes whose plan has the same estimate: the same plan, with axes joined."""
        known = (
            each.mesh for each in self.answers if are_same(each, estimate) and each.mesh.ndim <= estimate.mesh.ndim
        )
        return next(known, None)

    def _try(self, estimate: Estimate, share: float) -> Tried[Any]:
        mesh = estimate.mesh
        known = [each for each in self.tried.values() if each.mesh != mesh]
        turn = Turn(share * seconds_until(self.deadline), cutoff_of(mesh, known))
        begin = time.monotonic()
        tried = tried_on(lambda _, own: self.exact(estimate, own), mesh, turn)
        if tried.found is not None and self._is_pipeline(estimate):
            took = time.monotonic() - begin
            self.quickest = min(took, self.quickest or took)
        if tried.found is not None:
            self.error = max(self.error, abs(tried.found.seconds / estimate.seconds - 1))
        return tried
