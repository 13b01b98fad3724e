"""mesh="auto": the best arrangement of a number of devices in axes, found by planning on those that may be the best.

This is the search for models without repeated layers; of others all arrangements are estimated first (`arranging`).

An arrangement is an ordered factorization of the number. The order is the assignment of axes to the topology: the last
axis lies on neighbouring devices, the first one across nodes. Where a pipeline is offered, its axis is the outermost.

bounds    meshes are tried by what a step takes at least on them (`at_least`), of equals the simplest first; one that
          takes as long as the best plan so far is not tried, and one whose search proves as much ends there
          (`cutoff`); of meshes that are no simpler than that of the best plan, one that gains too little to be a line
          of its own is no better either
axes      of meshes of as many, those come first that split an axis of the best so far
time      all share a part of the time limit; what is left is for those that may find more in longer turns, the least
          proven first; each has half of it, at least twice as much as before: until any plan is found all of it
pipelines the fastest few (MOST_PIPELINES) by their bound are planned, as each takes long

The clock decides nothing but what is not tried, and how far a plan is proven, when the time limit passes. Meshes
without a plan are listed with the reason.

Two arrangements whose plans take the same time and memory are one plan, whose mesh has two forms (data
parallelism over dp=64 and over dp=2 × tp=32): they are one line of the table, and the simplest mesh stands for them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from autopar.console.progress import progress
from autopar.console.units import format_bytes, format_seconds
from autopar.costs.plans.comparison import Excluded
from autopar.errors import AnnotationError, CutOffError, InfeasibleError, PipelineError, TimeLimitError, warn_user
from autopar.ir.sharding.mesh import Mesh
from autopar.solver.deadline import NEVER, after, is_over, seconds_until, why_over

EQUAL_SECONDS, EQUAL_BYTES = 1e-3, 1e-2
"""Relative: what plans of two meshes may differ by and count as one. Joined axes differ from one axis by latency."""
NOT_TRIED = "not tried: "
FIRST_ROUND = 0.6
"""Share of the time limit in which meshes have their first turns."""
TOGETHER = 8
"""Meshes that share what is left of it, at most: of many, those that come last may have none."""
MUCH_SHORTER = 0.8
"""Share of the longest unsuccessful turn below which a further turn is not started.

Only turns without a plan on meshes with as many axes count: a much shorter turn would find no plan either.
"""
MOST_PIPELINES = 4
"""Largest number of pipelines that are planned; each takes as long as many meshes without a pipeline."""


class Ranked(Protocol):
    """The plan of a mesh, with or without a pipeline."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def peak_bytes(self) -> int: ...


P = TypeVar("P", bound=Ranked)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[P]):
    """A plan with what the table says of it."""

    plan: P
    seconds: float
    """Seconds of a step of all its micro-batches."""
    gap: float | None
    """Relative gap of its step to the best on its mesh; None if nothing is proven, as for pipelines."""
    microbatches: int = 1
    schedule: str = ""
    """Name of the pipeline's schedule; "" without a pipeline."""
    chunks: int = 1
    """Stages on each rank of the pipeline."""
    stored_bytes: int = 0
    """Bytes of parameters on the device that has the most."""
    again: str = ""
    """Description of what is recomputed."""
    axes: str = ""
    """Description of what each axis splits."""

    @property
    def runs(self) -> tuple[int, str, int]:
        return self.microbatches, self.schedule, self.chunks


@dataclass(frozen=True, slots=True)
class Turn:
    """Budget for planning on a mesh: seconds of search, and the step that the plan has to beat."""

    time_limit: float
    cutoff: float = math.inf


Make = Callable[[Mesh, Turn], Candidate[P]]
"""The plan of a mesh; CutOffError where none is faster than the cut-off."""


@dataclass(frozen=True, slots=True)
class Tried(Generic[P]):
    """One mesh, with its plan or the reason why it has none."""

    mesh: Mesh
    found: Candidate[P] | None
    reason: str = ""
    excluded: Excluded = ""
    """The kind of reason."""
    least_bytes: int | None = None
    """Least peak in bytes that a plan was found to take; None unless no plan is within the memory limit."""
    is_cut_short: bool = False
    """True if its turn ended before its plan was proven as far as others are."""
    warned: tuple[warnings.WarningMessage, ...] = ()
    """Warnings of its plan, which are issued if the mesh is taken."""


@dataclass(frozen=True, slots=True)
class Searched(Generic[P]):
    """Result of a search.

    `lines` are groups of equal plans, best first, with the simplest mesh of each first. `without` are the meshes
    without a plan.
    """

    devices: int
    lines: tuple[tuple[Tried[P], ...], ...]
    without: tuple[Tried[P], ...]

    @property
    def best(self) -> P:
        """The plan that is taken."""
        return _candidate(self.lines[0][0]).plan


def best_mesh(
    make: Make[P],
    meshes: Sequence[Mesh],
    time_limit: float = NEVER,
    at_least: Callable[[Mesh], float] | None = None,
    pipeline: str | None = None,
) -> Searched[P]:
    """Return the best plan on any of the meshes, in at most so many seconds; `at_least` bounds a step on a mesh from
    below.

    Warns where the time did not suffice for all. Raises InfeasibleError where no mesh has a plan, with what came
    nearest, and TimeLimitError where none was found in time.
    """
    tried = try_meshes(make, meshes, time_limit, at_least, pipeline)
    late = sum(each.reason.startswith(NOT_TRIED) for each in tried)
    searched = Searched(meshes[0].num_devices, merged(tried), tuple(each for each in tried if each.found is None))
    if not searched.lines:
        reasons = "\n".join(f"  {each.mesh}: {each.reason}" for each in tried)
        error = TimeLimitError if late else InfeasibleError
        raise error(f"no mesh of {searched.devices} devices has a plan; on each of them:\n{reasons}{_nearest(tried)}")
    if late:
        why = why_over(f"the time limit of {time_limit:g} s passed")
        warn_user(
            f"{why} when {len(tried) - late} of {len(tried)} meshes had been tried; the best of these is taken, and "
            "nothing is known of the others. Give it longer to try them.",
        )
    warn_of_best(searched)
    return searched


def warn_of_best(searched: Searched[Any]) -> None:
    """Issue the warnings of the best plan, with its mesh."""
    best = searched.lines[0][0]
    for text, category in dict.fromkeys((str(each.message), each.category) for each in best.warned):
        warn_user(text if str(best.mesh) in text else f"mesh {best.mesh}: {text}", category)


def _nearest(tried: Sequence[Tried[Any]]) -> str:
    """Describe the mesh that came nearest to a memory limit if no mesh has a plan within it."""
    known = [(each.least_bytes, each.mesh) for each in tried if each.least_bytes is not None]
    if not known:
        return ""
    least, mesh = min(known, key=lambda each: each[0])
    return (
        f"\nWhat came nearest is {mesh}, with {format_bytes(least)} per device: memory={least} would do. "
        "Raise the limit to that, or use more devices."
    )


def try_meshes(
    make: Make[P],
    meshes: Sequence[Mesh],
    time_limit: float = NEVER,
    at_least: Callable[[Mesh], float] | None = None,
    pipeline: str | None = None,
) -> tuple[Tried[P], ...]:
    """Plan on each mesh; one where the pins, the limit or the schedules leave nothing keeps the reason."""
    deadline = after(time_limit)
    first = after(FIRST_ROUND * seconds_until(deadline)) if len(meshes) > 1 else deadline
    bounds = {mesh: at_least(mesh) if at_least else 0.0 for mesh in meshes}
    waiting, found, late = list(meshes), dict[Mesh, Tried[P]](), dict[Mesh, float]()

    def plan(mesh: Mesh, until: float, share: float) -> Tried[P]:
        """Plan on a mesh in a share of the time that is left; record turns that were too short in `late`."""
        if found and is_over(until):
            late[mesh] = 0.0
            return Tried(mesh, None, NOT_TRIED + why_over(), "time")
        known = [each for other, each in found.items() if other != mesh]
        if bounds[mesh] > min(map(_seconds, known), default=math.inf):
            return Tried(mesh, None, no_better(bounds[mesh]), "bound")
        if pipeline in mesh.axes and _pipelines(found, pipeline) >= MOST_PIPELINES:
            left_out = f"left out: {MOST_PIPELINES} pipelines that may be faster were planned"
            return Tried(mesh, None, left_out, "bound")
        turn = Turn(share * seconds_until(until), cutoff_of(mesh, known))
        short = (late[each] for each in late if each.ndim == mesh.ndim and not found[each].found)
        if turn.time_limit < MUCH_SHORTER * max(short, default=0.0):
            late[mesh] = late.get(mesh, 0.0)
            return Tried(mesh, None, f"{NOT_TRIED}what was left of the time was too little", "time")
        end = after(turn.time_limit)
        tried = tried_on(make, mesh, turn)
        if seconds_until(end) < turn.time_limit / 2 and _is_open(tried):
            late[mesh] = turn.time_limit
            return replace(tried, is_cut_short=tried.found is not None)
        return tried

    for _ in progress(meshes, "meshes"):
        mesh = min(waiting, key=lambda each: (bounds[each], each.ndim, _joined(each, found, pipeline)))
        waiting.remove(mesh)
        found[mesh] = plan(mesh, first, 1 / min(1 + len(waiting), TOGETHER))
    again = dict(late)
    for _ in progress(tuple(late), "meshes, for longer"):
        mesh = min(again, key=lambda each: (max(_least(found[each]), bounds[each]), _joined(each, found, pipeline)))
        best, left, before = min(map(_seconds, found.values())), seconds_until(deadline), again.pop(mesh)
        if left > before and _least(found[mesh]) < best:
            share = 1.0 if math.isinf(best) else max(0.5, min(2 * before / left, 1.0))
            found[mesh] = _better_of(found[mesh], plan(mesh, deadline, share))
    return tuple(found[mesh] for mesh in meshes)


def _seconds(tried: Tried[Any]) -> float:
    return tried.found.seconds if tried.found else math.inf


def _least(tried: Tried[Any]) -> float:
    """Return the lower bound on a step that is proven with a mesh's plan; 0 if there is no plan."""
    return (1 - (tried.found.gap or 0)) * tried.found.seconds if tried.found else 0.0


def _is_open(tried: Tried[Any]) -> bool:
    """Return whether more time may find a plan, or a plan that is faster by more than equal plans differ."""
    if tried.found is None:
        return tried.reason.startswith(NOT_TRIED)
    return tried.found.gap is not None and tried.found.gap > EQUAL_SECONDS


def _better_of(before: Tried[P], again: Tried[P]) -> Tried[P]:
    """Return the result with more time, unless it is no better than the one before."""
    if before.found is None:
        return again
    return again if (_seconds(again), -_least(again)) < (_seconds(before), -_least(before)) else before


def _joined(mesh: Mesh, found: Mapping[Mesh, Tried[Any]], pipeline: str | None) -> float:
    """Return the least step that is known of meshes that two neighbouring axes of this one are one axis of."""
    outer, sizes = int(pipeline in mesh.axes), mesh.sizes
    joined = ((*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]) for at in range(outer, mesh.ndim - 1))
    others = (Mesh(dict(zip(mesh.names, each, strict=False)), mesh.hardware) for each in joined)
    return min((_seconds(found[other]) for other in others if other in found), default=math.inf)


def cutoff_of(mesh: Mesh, found: Iterable[Tried[Any]]) -> float:
    """Return the step that a plan on a mesh has to beat: where the mesh is no simpler, by more than equal plans differ
    by.
    """
    known = [(each.found.seconds, each.mesh.ndim) for each in found if each.found]
    seconds, ndim = min(known, default=(math.inf, 0))
    return seconds if mesh.ndim < ndim else (1 - EQUAL_SECONDS) * seconds


def _pipelines(found: Mapping[Mesh, Tried[Any]], pipeline: str | None) -> int:
    return sum(pipeline in mesh.axes and each.found is not None for mesh, each in found.items())


def tried_on(make: Make[P], mesh: Mesh, turn: Turn) -> Tried[P]:
    """Return the plan of a mesh with what was warned of, or the reason why it has none."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = make(mesh, turn)
        return Tried(mesh, found, warned=tuple(warned))
    except CutOffError as error:
        return Tried(mesh, None, no_better(error.seconds), "bound")
    except TimeLimitError:
        return Tried(mesh, None, f"{NOT_TRIED}{why_over()} before a plan was found", "time")
    except InfeasibleError as error:
        return Tried(mesh, None, str(error), "memory", error.least_bytes)
    except (AnnotationError, PipelineError) as error:
        return Tried(mesh, None, str(error), "error")


def no_better(seconds: float) -> str:
    return f"no better: a step takes at least {format_seconds(seconds)}"


def merged(tried: Sequence[Tried[P]]) -> tuple[tuple[Tried[P], ...], ...]:
    """Join meshes with equal plans: the fastest decides a group's rank, and its simplest mesh comes first.

    Pipelines are equal to none but those of the same length, schedule and micro-batches.
    """
    left = sorted((each for each in tried if each.found is not None), key=lambda each: _candidate(each).seconds)
    lines: list[list[Tried[P]]] = []
    for each in left:
        line = next((line for line in lines if _are_equal(line[0], each)), None)
        if line is None:
            lines.append([each])
        else:
            line.append(each)
    return tuple(tuple(sorted(line, key=lambda each: each.mesh.ndim)) for line in lines)


def _are_equal(one: Tried[Any], other: Tried[Any]) -> bool:
    first, second = _candidate(one), _candidate(other)
    return (
        first.runs == second.runs
        and math.isclose(first.seconds, second.seconds, rel_tol=EQUAL_SECONDS)
        and math.isclose(first.plan.peak_bytes, second.plan.peak_bytes, rel_tol=EQUAL_BYTES)
    )


def _candidate(tried: Tried[P]) -> Candidate[P]:
    assert tried.found is not None
    return tried.found
