"""The best of the estimated candidates, planned exactly one after the other until none that is left can be better.

order    by estimate; after a plan without a pipeline one with, where it is about as good, and the other way round
error    how far plans were from their estimates so far, at least LEAST_ERROR: what is left is worth planning if its
         estimate, less by that, beats the best plan
time     a candidate has a half of what is left; a mesh whose candidate does not fit has its next one
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.arranging.estimates import Estimate, Estimates
from autopar.errors import AnnotationError, CutOffError, InfeasibleError, PipelineError, TimeLimitError
from autopar.planning.meshes.search import (
    EQUAL_BYTES,
    NOT_TRIED,
    Candidate,
    Searched,
    Tried,
    Turn,
    cutoff_of,
    merged,
    mesh_table,
    no_better,
)
from autopar.progress import progress
from autopar.sharding.mesh import Mesh
from autopar.solver.deadline import is_over, seconds_until, why_over
from autopar.units import format_bytes, format_seconds, format_share

LEAST_ERROR = 0.01
"""Relative to the step: what an estimate may be off by, where plans so far were closer."""
ABOUT_AS_GOOD = 1.1
SAME_SECONDS = 2e-3
"""Relative: estimates of plans that split the same tensors over other axes differ by less."""
SHARE = 0.5
"""Of the time that is left, for each candidate."""
SHOWN = 20
"""Candidates that were not planned and are lines of the table."""
Exact = Callable[[Estimate, Turn], Candidate[Any]]


@dataclass(slots=True)
class Planned:
    """What came of candidates that were planned exactly."""

    estimates: Estimates
    exact: Exact
    deadline: float
    tried: dict[Mesh, Tried[Any]] = field(default_factory=dict)
    error: float = 0.0
    """The most that a plan was apart from its estimate, relative to that."""
    num_planned: int = 0
    num_left: int = 0
    """Candidates that may be better and were not planned, as time was over."""
    answers: list[Estimate] = field(default_factory=list)
    """Estimates of candidates that have a plan."""

    def best(self) -> Searched[Any] | None:
        """Plan the likeliest until no other can be better; None if no candidate has a plan."""
        queue, later = self.estimates.best(), Counter[Mesh]()
        last: Estimate | None = None
        steps = progress(tuple(queue), "candidates, planned exactly")
        while queue and not is_over(self.deadline):
            best = min((each.found.seconds for each in self.tried.values() if each.found), default=float("inf"))
            worth = best / (1 - max(self.error, LEAST_ERROR))
            if queue[0].seconds >= worth:
                break
            chosen = self._next(queue, last, worth)
            queue.remove(chosen)
            next(steps, None)
            if (same := self._same_as(chosen)) is not None:
                self.tried[chosen.mesh] = Tried(chosen.mesh, None, f"the same as on {same}; {described(chosen)}")
                continue
            tried = self._try(chosen)
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
            last = chosen
        best = min((each.found.seconds for each in self.tried.values() if each.found), default=float("inf"))
        worth = best / (1 - max(self.error, LEAST_ERROR))
        self.num_left = sum(each.seconds < worth and self._same_as(each) is None for each in queue)
        lines = merged(tuple(self.tried.values()))
        if not lines:
            return None
        without = [each for each in self.tried.values() if each.found is None]
        left = [each for each in self.estimates.best() if each.mesh not in self.tried]
        without += [Tried(each.mesh, None, described(each)) for each in left[:SHOWN]]
        return Searched(lines[0][0].mesh.num_devices, lines, tuple(without))

    def note(self, searched: Searched[Any]) -> str:
        """Return the table for the notes of the best plan, behind a count of what was estimated and planned."""
        found = self.estimates.found
        estimated = sum(each is not None for each in found.values())
        late = f"; {why_over()} before {self.num_left} more that may be better" if self.num_left else ""
        return (
            f"the best of {len(self.estimates.subject.meshes)} meshes of {searched.devices} devices: {len(found)} "
            f"candidates (a mesh and its micro-batches) were looked at, of which {self.estimates.num_bounded} are no "
            f"better by a bound, and {len(found) - estimated - self.estimates.num_bounded} have no room; "
            f"{estimated} were estimated and {self.num_planned} planned exactly, at most {format_share(self.error)} "
            f"apart{late}:\n{mesh_table(searched)}"
        )

    def _next(self, queue: list[Estimate], last: Estimate | None, worth: float) -> Estimate:
        """Return the first of the queue, or the first of the other kind than the last, if that is about as good."""
        axis, most = self.estimates.subject.axis, min(worth, ABOUT_AS_GOOD * queue[0].seconds)
        if last is None:
            return queue[0]
        others = (each for each in queue if (axis in each.mesh.axes) != (axis in last.mesh.axes))
        other = next(others, queue[0])
        return other if other.seconds < most else queue[0]

    def _same_as(self, estimate: Estimate) -> Mesh | None:
        """Return the mesh of no more axes whose plan has the same estimate: the same plan, with axes joined."""
        for each in self.answers:
            equal = math.isclose(each.seconds, estimate.seconds, rel_tol=SAME_SECONDS)
            equal = equal and math.isclose(each.num_bytes, estimate.num_bytes, rel_tol=EQUAL_BYTES)
            runs = (each.microbatches, each.schedule) == (estimate.microbatches, estimate.schedule)
            if equal and runs and each.mesh.ndim <= estimate.mesh.ndim:
                return each.mesh
        return None

    def _try(self, estimate: Estimate) -> Tried[Any]:
        mesh = estimate.mesh
        known = [each for each in self.tried.values() if each.mesh != mesh]
        turn = Turn(SHARE * seconds_until(self.deadline), cutoff_of(mesh, known))
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = self.exact(estimate, turn)
        except CutOffError as error:
            self.num_planned += 1
            return Tried(mesh, None, no_better(error.seconds))
        except TimeLimitError:
            return Tried(mesh, None, f"{NOT_TRIED}{why_over()} before a plan was found; {described(estimate)}")
        except InfeasibleError as error:
            self.num_planned += 1
            return Tried(mesh, None, str(error), error.least_bytes)
        except (AnnotationError, PipelineError) as error:
            return Tried(mesh, None, str(error))
        self.num_planned += 1
        self.error = max(self.error, abs(found.seconds / estimate.seconds - 1))
        return replace(Tried(mesh, found), said=tuple(said))


def described(estimate: Estimate) -> str:
    """Return an estimate in words, marked as one.

    Example: "estimated: 6.9 s, 70.1 GB, interleaved_1f1b, 8 stages a rank, 16 micro-batches"
    """
    schedule = estimate.schedule
    runs = [] if schedule is None else [schedule.name]
    runs += [f"{schedule.chunks} stages a rank"] if schedule is not None and schedule.chunks > 1 else []
    runs += [f"{estimate.microbatches} micro-batches"] if estimate.microbatches > 1 else []
    return ", ".join([f"estimated: {format_seconds(estimate.seconds)}", format_bytes(round(estimate.num_bytes)), *runs])
