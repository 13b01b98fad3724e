"""Estimates of steps on many meshes, each with a number of micro-batches and a schedule, the likeliest ones first.

A candidate is a mesh and a number of micro-batches. From a few for each length of a pipeline the search goes on to
neighbours of the best: one prime factor moves from an axis to another, or into or out of the number of micro-batches.
It ends where the best EXPANDED candidates have no neighbour that is not estimated, or when its time is over: later
(`last`) as long as no candidate has an estimate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.console.progress import counter
from autopar.console.units import format_seconds
from autopar.errors import AutoparError
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_estimates.block_use import BlockUse
from autopar.planning.mesh_estimates.composed import Composed, InOnePiece, InStages, schedules_of
from autopar.planning.mesh_estimates.inner import FEW_AXES, Inner, Level
from autopar.planning.mesh_estimates.narrowed import Choices
from autopar.planning.mesh_estimates.shortened import Shortened
from autopar.planning.pipeline.request import stage_mesh
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.request import PlanRequest
from autopar.solver.deadline import is_over

EXPANDED = 6
"""Best candidates whose neighbours are all estimated."""
LATER = 1
"""Places in the order of the best by which neighbours of many axes come later than others."""
ENOUGH = 1e-3
"""Relative to the step without a limit: what is so near to it is not looked at with less memory."""
NEAR = 1.25
"""Times the best estimate: candidates whose step without a limit is longer are not estimated within it."""
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
    """Plans of the blocks, of which it is mixed."""
    shares: tuple[float, ...] = field(default=(), repr=False)
    """Shares of these in all blocks, if there is no pipeline: the plan that takes most memory is the last."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and meshes to arrange it on, and how the caller makes programs of it."""

    request: PlanRequest
    meshes: Sequence[Mesh]
    axis: str | None
    """Mesh axis of the pipeline; None without a pipeline."""
    schedules: Sequence[str]
    samples: Callable[[Mesh], int]
    """Number of samples of a whole batch, given the mesh of one stage's devices."""
    short: Callable[[int, Mesh], Iterator[tuple[Shortened, Mapping[str, Layout]]]]
    """Shorter programs of one of so many micro-batches on the devices of a stage, and layouts of their inputs.

    The first is as the user asks; another, with the loss in tiles, is there where it may take clearly less of a limit.
    """
    limit: Callable[[Mesh], float]
    """Bytes of tensors on a device of a mesh."""
    at_least: Callable[[Mesh, int], float]
    """Seconds that no step on a mesh, of so many micro-batches, is below."""
    num_blocks: int
    keeps_batch: bool
    """True if a batch is split into micro-batches only where a pipeline needs them."""


@dataclass
class Estimates:
    """Candidates that were looked at, each with its estimate or none."""

    subject: Subject
    deadline: float
    last: float = math.inf
    """Time at which a search ends that has no estimate by its deadline."""
    found: dict[Candidate, Estimate | None] = field(default_factory=dict)
    slower: dict[Candidate, float] = field(default_factory=dict)
    """Candidates left out as clearly slower, and seconds of their steps: within their limit, or without one."""
    _known: Choices = field(default_factory=Choices)

    def search(self) -> None:
        """Estimate candidates until the best have no better neighbours, or time is over."""
        say = counter("estimates of candidates")
        first = list(dict.fromkeys(self._first_candidates()))
        while waiting := first or self._next_candidates():
            if self.is_over:
                return
            say(self._progress(len(waiting)))
            self._try(waiting.pop(0))

    @property
    def is_over(self) -> bool:
        """True if no time is left for further estimates."""
        return is_over(self._deadline_now)

    @property
    def _deadline_now(self) -> float:
        return self.deadline if any(self.found.values()) else max(self.deadline, self.last)

    def _next_candidates(self) -> list[Candidate]:
        """Return the neighbours of the best candidates that are not estimated, the likeliest first.

        Those whose first axis does not divide a micro-batch come last, unless it is within a host. Neighbours of the
        best come first, with its own mesh before others. One of many axes takes as long as several of few: it comes
        with those of the candidate that is LATER places behind.
        """
        found: dict[Candidate, tuple[bool, int, bool]] = {}
        for place, best in enumerate(self._leading()):
            for each in self._neighbours(best):
                if each not in self.found:
                    later = LATER * (self._stage(each.mesh).ndim > FEW_AXES)
                    order = not self._divides(each), place + later, each.mesh != best.mesh
                    found[each] = min(order, found.get(each, order))
        return sorted(found, key=lambda each: (found[each], str(each)))

    def _divides(self, candidate: Candidate) -> bool:
        """Return whether the first axis of a stage's devices divides the samples of a micro-batch.

        If a stage is on one host, tensor parallelism may divide its layers instead.
        """
        inner = self._stage(candidate.mesh)
        if self._is_pipeline(candidate.mesh) and inner.num_devices <= NODE:
            return True
        return self.subject.samples(inner) % (candidate.microbatches * math.prod(inner.sizes[:1])) == 0

    def _leading(self) -> list[Candidate]:
        """Return the candidates whose neighbours are to be estimated, the best first; all where none has room."""
        best = sorted((each for each in self.found.values() if each), key=lambda each: (each.seconds, str(each.mesh)))
        return [Candidate(each.mesh, each.microbatches) for each in best[:EXPANDED]] or list(self.found)

    def _try(self, candidate: Candidate) -> None:
        if candidate in self.found:
            return
        least = self._best_seconds()
        is_out = self.subject.at_least(*candidate) > least
        self.found[candidate] = None if is_out else self.estimate(candidate, NEAR * least)

    def _progress(self, waiting: int) -> str:
        """Return how far the search is, in words."""
        done, best = len(self.found), self._best_seconds()
        without = sum(each is None for each in self.found.values())
        words = f"{done - without} done, {without} excluded, at least {waiting} left"
        return words if math.isinf(best) else f"{words}, best step ≈ {format_seconds(best)}"

    def slower_at(self, mesh: Mesh, microbatches: int) -> float | None:
        """Return the seconds of a step of a candidate that is left out for them; None of others."""
        return self.slower.get(Candidate(mesh, microbatches))

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
        requested, samples = self.subject.request.microbatches, self.subject.samples(self._stage(mesh))
        if requested is not None:
            return [requested] if samples % requested == 0 else []
        if not self._is_pipeline(mesh) and (self.subject.keeps_batch or self.subject.request.static_argnames):
            return [1]
        return [each for each in range(1, samples + 1) if samples % each == 0]

    def _first_candidates(self) -> Iterator[Candidate]:
        """Yield, for every length of a pipeline, data parallelism alone and with tensor parallelism inside hosts.

        Data parallelism divides the samples of a micro-batch, where such meshes are known. Pipelines with too few
        samples for that have a third axis.
        """
        found = list(self._of_few_samples())
        for mesh in self.subject.meshes:
            inner = self._stage(mesh)
            if inner.ndim > 2 or (inner.ndim == 2 and inner.sizes[1] != NODE):
                continue
            counts = self.counts(mesh)
            wanted = self.subject.samples(inner) // inner.sizes[0]
            # A sample for each device of the first axis, and of all; without a pipeline the whole batch at once, too.
            most = [wanted // math.prod(inner.sizes[1:]), wanted] + [1] * (not self._is_pipeline(mesh))
            if self._is_pipeline(mesh) and inner.sizes == (NODE,):  # tensor parallelism alone: a sample for all
                most.append(self.subject.samples(inner))
            for limit in most if counts else ():
                found.append(Candidate(mesh, max((each for each in counts if each <= limit), default=counts[0])))
        yield from list(filter(self._divides, found)) or found

    def _of_few_samples(self) -> Iterator[Candidate]:
        """Yield pipelines with as many micro-batches as ranks where data parallelism over all hosts leaves fewer.

        The axis between data and tensor parallelism is for their positions: as many devices as samples do not need.
        """
        for mesh in self.subject.meshes:
            inner = self._stage(mesh)
            if not self._is_pipeline(mesh) or inner.ndim != FEW_AXES + 1 or inner.sizes[-1] != NODE:
                continue
            length, samples = mesh.size(str(self.subject.axis)), self.subject.samples(inner)
            if samples * NODE < length * inner.num_devices and samples == length * inner.sizes[0]:
                yield from (Candidate(mesh, each) for each in self.counts(mesh) if each == length)

    def _neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield what one prime factor elsewhere makes of a candidate."""
        mesh, count = candidate
        counts = self.counts(mesh)
        if count in counts:
            place = counts.index(count)
            yield from (Candidate(mesh, each) for each in counts[max(place - 1, 0) : place + 2])
        pipeline = mesh.size(str(self.subject.axis)) if self._is_pipeline(mesh) else 1
        inner = [size for size in self._stage(mesh).sizes if size > 1]
        for sizes, factor in _moved((pipeline, *inner)):
            other = self._by_sizes.get((sizes[0], tuple(size for size in sizes[1:] if size > 1)))
            if other is not None:
                offered = self.counts(other)
                near = (count, round(count * factor))
                yield from (Candidate(other, each) for each in dict.fromkeys(near) if each in offered)

    @functools.cached_property
    def _by_sizes(self) -> dict[tuple[int, tuple[int, ...]], Mesh]:
        """The length of a pipeline and the sizes of further axes → the mesh."""
        found: dict[tuple[int, tuple[int, ...]], Mesh] = {}
        for mesh in self.subject.meshes:
            length = mesh.size(str(self.subject.axis)) if self._is_pipeline(mesh) else 1
            found.setdefault((length, tuple(size for size in self._stage(mesh).sizes if size > 1)), mesh)
        return found

    def _is_pipeline(self, mesh: Mesh) -> bool:
        return self.subject.axis in mesh.axes

    def _stage(self, mesh: Mesh) -> Mesh:
        return stage_mesh(mesh, str(self.subject.axis)) if self._is_pipeline(mesh) else mesh

    def estimate(self, candidate: Candidate, below: float = math.inf) -> Estimate | None:
        """Return the best estimate of a candidate below so many seconds; None if no plan of it is known to fit."""
        limit = self.subject.limit(candidate.mesh)
        fastest = _Fastest(limit, below)
        try:
            for steps, levels in self._prices(candidate, limit):
                if not fastest.takes(steps, levels):
                    break
        except AutoparError:  # the exact plan of the mesh has the reason
            pass
        best = fastest.best
        if best is None or best.seconds >= below:
            slower = fastest.within if fastest.alone < below else fastest.alone
            if math.isfinite(slower):
                self.slower[candidate] = slower
            return None
        return Estimate(*candidate, best.seconds, best.num_bytes, best.schedule, best.uses, best.shares)

    def _prices(self, candidate: Candidate, limit: float) -> Iterator[tuple[InOnePiece | InStages, Iterator[Level]]]:
        """Yield plans at ever higher prices of memory, and what composes steps of them.

        Behind the first they are of the program that takes less memory, if there is one.
        """
        programs = self._programs(candidate)
        steps, prices = self._steps(candidate), next(programs).levels(limit)
        yield steps, next(prices)
        if (other := next(programs, None)) is not None:
            steps, prices = self._steps(candidate), other.levels(limit)
        for levels in prices:
            yield steps, levels

    def _programs(self, candidate: Candidate) -> Iterator[Inner]:
        mesh, count = candidate
        inner = self._stage(mesh)
        request, first = self.subject.request.on(mesh), None
        for short, arriving in self.subject.short(count, inner):
            requested = request, short, inner, mesh.num_devices, count, arriving, self._deadline_now, self._known
            found = Inner(*requested, like=first)
            first = first or found
            yield found

    def _steps(self, candidate: Candidate) -> InOnePiece | InStages:
        """Return what composes steps of a candidate."""
        mesh, count = candidate
        if not self._is_pipeline(mesh):
            return InOnePiece(count)
        request, axis = self.subject.request, str(self.subject.axis)
        names, num_blocks = self.subject.schedules, self.subject.num_blocks
        schedules = schedules_of(names, mesh.size(axis), count, num_blocks, request.pipeline.stages_per_rank)
        return InStages(schedules, mesh, axis, request.hardware_of(mesh))


@dataclass(slots=True)
class _Fastest:
    """The fastest step within a limit, of the plans so far."""

    limit: float
    below: float
    """Seconds; what takes as long is not looked at."""
    best: Composed | None = None
    alone: float = math.inf
    """Seconds of the fastest plan without a limit."""
    within: float = math.inf
    """Seconds of the fastest plan within the limit, however slow."""

    def takes(self, steps: InOnePiece | InStages, levels: Iterator[Level]) -> bool:
        """Take the plans of a price into account; False if those of higher prices are no better."""
        for number, level in enumerate(levels):
            alone = steps.alone(level.use(level.modes[0]))
            self.alone = min(self.alone, alone)
            if alone < self._seconds:
                self._recompute(steps, level)
            elif number == 0:
                return False
        return self.best is None or self.best.seconds > self.alone * (1 + ENOUGH)

    def _recompute(self, steps: InOnePiece | InStages, level: Level) -> None:
        """Take a plan into account with nothing recomputed, then with all, then with what lies between."""
        for mode in dict.fromkeys((level.modes[0], level.modes[-1], *level.modes)):
            steps.add(level.use(mode))
            found = steps.best(self.limit)
            self.within = min(self.within, math.inf if found is None else found.seconds)
            if found is not None and found.seconds < self._seconds:
                self.best = found
            no_faster = mode == level.modes[0] and found is not None
            no_smaller = mode == level.modes[-1] and found is None
            if no_faster or no_smaller:
                return

    @property
    def _seconds(self) -> float:
        return self.below if self.best is None else min(self.below, self.best.seconds)


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
