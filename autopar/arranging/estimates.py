"""Estimates of steps on many meshes, each with a number of micro-batches and a schedule, the likeliest ones first.

A candidate is a mesh and a number of micro-batches. From a few for each length of a pipeline the search goes on to
neighbours of the best: one prime factor moves from an axis to another, or into or out of the number of micro-batches.
It ends where the best EXPANDED candidates have no neighbour that is not estimated, or when its time is over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.arranging.block_use import BlockUse
from autopar.arranging.composed import Composed, in_one_piece, in_stages, schedules_of
from autopar.arranging.inner import Inner
from autopar.arranging.shortened import Shortened
from autopar.errors import AutoparError
from autopar.pipeline.request import stage_mesh
from autopar.pipeline.schedules.schedule import NAMES, Schedule
from autopar.planning.request import PlanRequest
from autopar.progress import counter
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh
from autopar.solver.deadline import is_over
from autopar.units import format_seconds

EXPANDED = 6
"""Best candidates whose neighbours are all estimated."""
ENOUGH = 1e-3
"""Relative to the step without a limit: what is so near to it is not looked at with less memory."""
SIMPLER = 5e-3
"""Relative to the step: of schedules that differ by less, that of the fewest stages is taken."""
SIMULATED = 4
"""Schedules of a candidate, the best by the formula, that are simulated."""
NODE = 8
"""Devices of a usual host: with tensor parallelism over so many, and with none, the search begins."""


class Candidate(NamedTuple):
    mesh: Mesh
    microbatches: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The best estimate of a candidate."""

    mesh: Mesh
    microbatches: int
    seconds: float
    num_bytes: float
    schedule: Schedule | None
    uses: tuple[BlockUse, ...] = field(default=(), repr=False)
    """Plans of the blocks of a pipeline."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is arranged, and how the caller makes programs of it."""

    request: PlanRequest
    meshes: Sequence[Mesh]
    axis: str | None
    """Of a pipeline."""
    schedules: Sequence[str]
    samples: Callable[[Mesh], int]
    """Of a whole batch, for the devices of one stage."""
    short: Callable[[int, Mesh], Iterator[tuple[Shortened, Mapping[str, Layout]]]]
    """Shorter programs of one of so many micro-batches on the devices of a stage, and layouts of their inputs.

    The first is as the user asks; others take less memory, as with the loss in tiles, and count under a limit.
    """
    limit: Callable[[Mesh], float]
    """Bytes of tensors on a device of a mesh."""
    at_least: Callable[[Mesh], float]
    """Seconds that no step on a mesh is below."""
    keeps_batch: bool
    """True if a batch is split into micro-batches only where a pipeline needs them."""


@dataclass(slots=True)
class Estimates:
    """What was found: the best estimate of each mesh, and counts for the note."""

    subject: Subject
    deadline: float
    found: dict[Candidate, Estimate | None] = field(default_factory=dict)
    num_bounded: int = 0
    """Candidates that were left out by a bound."""
    _inner: dict[tuple[tuple[tuple[str, int], ...], int], list[Inner]] = field(default_factory=dict)

    def search(self) -> None:
        """Estimate candidates until the best have no better neighbours, or time is over."""
        known = dict.fromkeys(self.subject.meshes)
        waiting = list(self._first(known))
        expanded = set[Candidate]()
        say = counter("estimates of candidates")
        while True:
            for each in waiting:
                if each in self.found:
                    continue
                if is_over(self.deadline) and any(self.found.values()):
                    return
                say(self._progress(len(waiting)))
                if self.subject.at_least(each.mesh) > self._best_seconds():
                    self.num_bounded += 1
                    self.found[each] = None
                else:
                    self.found[each] = self.estimate(each)
            best = sorted((e for e in self.found.values() if e), key=lambda each: (each.seconds, str(each.mesh)))
            left = [Candidate(each.mesh, each.microbatches) for each in best[:EXPANDED]]
            left = [each for each in left if each not in expanded]
            if not best:
                left = [each for each in self.found if each not in expanded]
            if not left or is_over(self.deadline):
                return
            expanded.add(left[0])
            waiting = sorted(set(self._neighbours(left[0], known)), key=str)

    def _progress(self, waiting: int) -> str:
        """Return how far the search is, in words."""
        done, best = len(self.found), self._best_seconds()
        without = sum(each is None for each in self.found.values())
        words = f"{done - without} done, {without} excluded, up to {waiting} left in this round"
        return words if math.isinf(best) else f"{words}, best step ≈ {format_seconds(best)}"

    def best(self) -> list[Estimate]:
        """Return the best estimate of every mesh that has one, the fastest first."""
        of_mesh: dict[Mesh, Estimate] = {}
        for each in self.found.values():
            if each is not None and (each.mesh not in of_mesh or each.seconds < of_mesh[each.mesh].seconds):
                of_mesh[each.mesh] = each
        return sorted(of_mesh.values(), key=lambda each: (each.seconds, each.mesh.ndim, str(each.mesh)))

    def of(self, mesh: Mesh) -> list[Estimate]:
        """Return the estimates of a mesh, the fastest first."""
        return sorted((e for e in self.found.values() if e and e.mesh == mesh), key=lambda each: each.seconds)

    def _best_seconds(self) -> float:
        return min((each.seconds for each in self.found.values() if each), default=math.inf)

    def counts(self, mesh: Mesh) -> list[int]:
        """Return the numbers of micro-batches that go with a mesh, ascending."""
        asked, samples = self.subject.request.microbatches, self.subject.samples(self._stage(mesh))
        if asked is not None:
            return [asked] if samples % asked == 0 else []
        if not self._is_pipeline(mesh) and (self.subject.keeps_batch or self.subject.request.static_argnames):
            return [1]
        return [each for each in range(1, samples + 1) if samples % each == 0]

    def _first(self, known: Mapping[Mesh, None]) -> Iterator[Candidate]:
        """Yield for every length of a pipeline data parallelism alone, and beside tensor parallelism in hosts."""
        for mesh in known:
            inner = self._stage(mesh)
            if inner.ndim > 2 or (inner.ndim == 2 and inner.sizes[1] != NODE):
                continue
            counts = self.counts(mesh)
            samples, wanted = self.subject.samples(inner), self.subject.samples(inner) // inner.sizes[0]
            if counts:
                yield Candidate(mesh, max((each for each in counts if each <= max(wanted, 1)), default=counts[0]))
                if not self._is_pipeline(mesh) and samples != counts[0]:
                    yield Candidate(mesh, counts[0])

    def _neighbours(self, candidate: Candidate, known: Mapping[Mesh, None]) -> Iterator[Candidate]:
        """Yield what one prime factor elsewhere makes of a candidate."""
        mesh, count = candidate
        counts = self.counts(mesh)
        if count in counts:
            place = counts.index(count)
            yield from (Candidate(mesh, each) for each in counts[max(place - 1, 0) : place + 2])
        pipeline = mesh.size(str(self.subject.axis)) if self._is_pipeline(mesh) else 1
        inner = [size for size in self._stage(mesh).sizes if size > 1]
        for sizes, factor in _moved((pipeline, *inner)):
            other = self._mesh(sizes, known)
            if other is not None:
                offered = self.counts(other)
                near = (count, round(count * factor))
                yield from (Candidate(other, each) for each in dict.fromkeys(near) if each in offered)

    def _mesh(self, sizes: Sequence[int], known: Mapping[Mesh, None]) -> Mesh | None:
        """Return the known mesh of a pipeline's length and further axes."""
        inner = tuple(size for size in sizes[1:] if size > 1)
        for mesh in known:
            if self._is_pipeline(mesh) != (sizes[0] > 1) or mesh.num_devices != math.prod(sizes):
                continue
            if tuple(size for size in self._stage(mesh).sizes if size > 1) == inner:
                return mesh
        return None

    def _is_pipeline(self, mesh: Mesh) -> bool:
        return self.subject.axis in mesh.axes

    def _stage(self, mesh: Mesh) -> Mesh:
        return stage_mesh(mesh, str(self.subject.axis)) if self._is_pipeline(mesh) else mesh

    def estimate(self, candidate: Candidate) -> Estimate | None:
        """Return the best estimate of a candidate; None if no plan of it is known to fit."""
        limit = self.subject.limit(candidate.mesh)
        limited = math.isfinite(limit)
        best: Composed | None = None
        free = math.inf
        try:
            for number, plans in enumerate(self._plans(candidate, limited)):
                uses: list[BlockUse] = []
                for further in plans.uses(limit):
                    uses += further
                    if number == 0 and len(uses) == len(further):
                        unlimited = self._composed(candidate, uses[:1], math.inf)
                        free = unlimited.seconds if unlimited else math.inf
                    own = self._composed(candidate, uses, limit)
                    best = min((each for each in (best, own) if each), key=lambda each: each.seconds, default=None)
                    if best is not None and best.seconds <= free * (1 + ENOUGH):
                        return _estimate_of(candidate, best)
        except AutoparError:  # the exact plan of the mesh has the reason
            pass
        return None if best is None else _estimate_of(candidate, best)

    def _plans(self, candidate: Candidate, limited: bool) -> Iterator[Inner]:
        """Yield the plans of the shorter programs of a candidate."""
        mesh, count = candidate
        inner = self._stage(mesh)
        key = tuple(inner.axes.items()), count
        known = self._inner.setdefault(key, [])
        yield from known
        request = self.subject.request.on(mesh)
        programs = itertools.islice(self.subject.short(count, inner), len(known), None if limited else 1)
        for short, arriving in programs:
            known.append(Inner(request, short, inner, mesh.num_devices, count, arriving, self.deadline))
            yield known[-1]

    def _composed(self, candidate: Candidate, uses: Sequence[BlockUse], limit: float) -> Composed | None:
        mesh, count = candidate
        if not self._is_pipeline(mesh):
            return in_one_piece(uses, count, limit)
        request, axis = self.subject.request, str(self.subject.axis)
        hardware, num_blocks = request.hardware_of(mesh), len(uses[0].forward)
        schedules = schedules_of(self.subject.schedules, mesh.size(axis), count, num_blocks, request.chunks)
        every = [in_stages(uses, schedule, mesh, axis, hardware, limit) for schedule in schedules]
        found = sorted((each for each in every if each is not None), key=lambda each: each.seconds)
        found = [each.simulated() for each in found[:SIMULATED]]
        least = min((each.seconds for each in found), default=math.inf)
        return min((each for each in found if each.seconds <= (1 + SIMPLER) * least), key=_complexity, default=None)


def _estimate_of(candidate: Candidate, best: Composed) -> Estimate:
    return Estimate(*candidate, best.seconds, best.num_bytes, best.schedule, best.uses)


def _complexity(composed: Composed) -> tuple[int, int, float]:
    schedule = composed.schedule
    assert schedule is not None, "composed of stages"
    return schedule.chunks, NAMES.index(schedule.name), composed.seconds


def _moved(sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield the sizes of axes with a prime factor moved, and by what the first of the inner axes shrinks."""
    padded = (*sizes, 1)
    for source, size in enumerate(padded):
        for prime in _primes(size):
            for target in range(len(padded)):
                if target == source:
                    continue
                moved = list(padded)
                moved[source] //= prime
                moved[target] *= prime
                factor = prime if source == 1 else 1 / prime if target == 1 else 1
                yield tuple(moved), factor
    for place in range(1, len(padded) - 1):  # neighbours in another order lie on other links
        if padded[place] != padded[place + 1]:
            swapped = list(padded)
            swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
            yield tuple(swapped), padded[place] / max(padded[place + 1], 1) if place == 1 else 1.0


def _primes(number: int) -> Iterable[int]:
    """Return the prime factors of a number, each once."""
    found, rest = [], number
    for each in range(2, number + 1):
        if each * each > rest and rest > 1:
            found.append(rest)
            break
        if rest % each == 0:
            found.append(each)
            while rest % each == 0:
                rest //= each
        if rest == 1:
            break
    return dict.fromkeys(found)
