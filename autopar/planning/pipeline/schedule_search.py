"""Schedule and number of micro-batches, where the user leaves them open: the blocks are planned for the largest and the
smallest micro-batch, and what they take at sizes between follows on straight lines.

Every schedule that may run is then cut and simulated with those seconds (`schedules.choice`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.errors import CutOffError, InfeasibleError, PipelineError, StrategyError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.planned_blocks import PlannedBlocks, planned_blocks
from autopar.planning.pipeline.planner import plan_pipeline
from autopar.planning.pipeline.request import PipelineRequest
from autopar.planning.pipeline.schedules.choice import MICROBATCHES_PER_STAGE, RECOMMENDED, Option, chunks_of, recommend
from autopar.planning.pipeline.schedules.schedule import HALVING, Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds
from autopar.planning.pipeline.stages.cuts import BlockCost, CutProblem, best_cuts
from autopar.planning.pipeline.stages.refinement import stages_of_blocks
from autopar.planning.request import PlanRequest
from autopar.solver.deadline import after, seconds_until

TRIED = 6
"""Schedules that are planned within a memory limit, the fastest first, until one fits."""
RequestOf = Callable[[Schedule], PipelineRequest]
"""Schedule → the planning request for the program of one of its micro-batches."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Schedule options that the user specified; None leaves an option open."""

    name: str | None = None
    num_microbatches: int | None = None
    chunks: int | None = None
    among: tuple[str, ...] = RECOMMENDED
    """Names of schedules to choose among if none is requested."""

    @classmethod
    def of(cls, request: PlanRequest) -> Wish:
        """Return the user-specified options; with offloaded activations, no schedule of `HALVING` is chosen.

        Such a schedule halves backwards, and between the halves keeps the activations that were fetched back.
        """
        offloads, specified = request.memory.offloads_activations, request.pipeline
        among = tuple(each for each in RECOMMENDED if not (offloads and each in HALVING))
        return cls(specified.schedule, request.microbatches, specified.stages_per_rank, among)

    def schedule(self, num_ranks: int) -> Schedule | None:
        """Return the schedule, where nothing is left open that matters."""
        if self.name is None or self.num_microbatches is None:
            return None
        return Schedule(self.name, num_ranks, self.num_microbatches, chunks_of(self.name, self.chunks))


def recommended(wish: Wish, batch_size: int, num_ranks: int, request_of: RequestOf) -> tuple[Option, ...]:
    """Return the schedules that fit a wish and the user-specified stages, best first.

    Raises PipelineError where none can run.
    """
    most = 2 * MICROBATCHES_PER_STAGE * num_ranks
    if wish.name is not None:
        Schedule(wish.name, num_ranks, most, chunks_of(wish.name, wish.chunks))  # is there such a one?
    requested = wish.num_microbatches
    counts = (
        [n for n in range(1, min(batch_size, most) + 1) if batch_size % n == 0] if requested is None else [requested]
    )
    measured: dict[int, tuple[list[BlockCost], list[float]]] = {}
    refused: list[PipelineError] = []
    planned: PlannedBlocks | None = None

    def measure(count: int) -> None:
        nonlocal planned
        # For its costs alone: a schedule that any number of micro-batches fits.
        request = request_of(Schedule("gpipe", num_ranks, count))
        planned = planned_blocks(request, num_ranks * max(wish.chunks or 1, 1))
        measured[count] = list(planned.costs), list(planned.cut_seconds)

    measure(counts[0])
    while counts[-1] not in measured:
        try:
            measure(counts[-1])
        except StrategyError:  # its micro-batches have too few samples for the axes of a preset
            counts.pop()
            batch_size = counts[-1]
    ends = sorted(measured)
    num_blocks = len(measured[ends[0]][0])
    if any(len(costs) != num_blocks for costs, _ in measured.values()):
        raise PipelineError(
            f"the model has other layers with {ends[0]} micro-batches than with {ends[-1]}; say how many are wanted, "
            "as in microbatches=8."
        )

    def seconds_of(count: int, chunks: int) -> Sequence[StageSeconds] | None:
        costs, sent = _interpolated(measured, count)
        schedule = Schedule("gpipe", num_ranks, count) if chunks == 1 else _interleaved(num_ranks, count, chunks)
        if schedule is None:
            return None
        assert planned is not None
        try:
            places = replace(planned, request=replace(planned.request, schedule=schedule)).places()
        except PipelineError as error:  # user-specified stages do not fit so many stages
            refused.append(error)
            return None
        cuts = best_cuts(CutProblem(tuple(costs), tuple(sent), schedule, places))
        return stages_of_blocks(costs, sent, cuts.starts)

    schedules = wish.among if wish.name is None else (wish.name,)
    try:
        return recommend(num_ranks, batch_size, num_blocks, seconds_of, schedules, requested, wish.chunks)
    except PipelineError:
        if refused:
            raise refused[0] from None
        raise


def _interleaved(num_ranks: int, count: int, chunks: int) -> Schedule | None:
    try:
        return Schedule("interleaved_1f1b", num_ranks, count, chunks)
    except PipelineError:
        return None


def _interpolated(
    measured: dict[int, tuple[list[BlockCost], list[float]]], count: int
) -> tuple[list[BlockCost], list[float]]:
    """Return the costs at a number of micro-batches: on the line, in the size of a micro-batch, through what is
    known.
    """
    if count in measured:
        return measured[count]
    few, many = min(measured), max(measured)
    share = (1 / count - 1 / many) / (1 / few - 1 / many)

    def line(at_many: float, at_few: float) -> float:
        return max(0.0, at_many + share * (at_few - at_many))

    costs = [
        BlockCost(
            line(m.forward, f.forward),
            line(m.backward_input, f.backward_input),
            line(m.backward_weight, f.backward_weight),
            line(m.once, f.once),
            m.name,
        )
        for m, f in zip(measured[many][0], measured[few][0], strict=True)
    ]
    return costs, [line(m, f) for m, f in zip(measured[many][1], measured[few][1], strict=True)]


def most_microbatches(batch_size: int, mesh: Mesh, axis: str) -> int:
    """Return the most micro-batches of a batch: as small as a stage's devices can share, else of one sample each."""
    share = mesh.num_devices // mesh.size(axis)
    return batch_size // share if batch_size % share == 0 else batch_size


class Chosen(NamedTuple):
    """A schedule, and the plan that it was tried with, if it had to be."""

    schedule: Schedule
    plan: PipelinePlan | None = None


def best_schedule(
    wish: Wish,
    batch_size: int,
    mesh: Mesh,
    axis: str,
    request_of: RequestOf,
    limited: bool,
    time_limit: float,
    cutoff: float = math.inf,
) -> Chosen:
    """Return the schedule that is wished for, or the best that goes with the wish; `limited` by memory, it is tried.

    Unless their number is specified, micro-batches stay as large as all devices of a stage can share, if the batch is.

    Raises PipelineError where none can run, or none that is recommended fits into memory, and CutOffError where those
    that may fit take longer than the cut-off even without a limit.
    """
    num_ranks = mesh.size(axis)
    known, deadline = wish.schedule(num_ranks), after(time_limit)
    if known is not None:
        return Chosen(known)
    most = most_microbatches(batch_size, mesh, axis) if wish.num_microbatches is None else batch_size
    options = recommended(wish, most, num_ranks, request_of)
    if not limited:
        if options[0].seconds >= cutoff:
            raise CutOffError(options[0].seconds)
        return Chosen(options[0].schedule)
    reason: Exception | None = None
    for option in options[:TRIED]:
        if option.seconds >= cutoff:
            raise CutOffError(option.seconds)
        request = request_of(option.schedule)
        left = request.wanted.settings.lasting(seconds_until(deadline))
        try:
            within = replace(request, wanted=replace(request.wanted, settings=left))
            return Chosen(option.schedule, plan_pipeline(within))
        except (InfeasibleError, PipelineError) as error:
            reason = error
    assert reason is not None
    raise reason
