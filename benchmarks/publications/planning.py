"""A row's plan, by autopar's planner, of few layers that stand for all of them (`depths`), or of the whole model.

A step of several micro-batches is as many as that, the last of them with what is done once. Of a pipeline each kind of
stage (the first, those between, the last) is planned as pipelines are, in a model that is as deep as that needs, and
the schedule is simulated with all stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from autopar.capture.export import skeleton, trace
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.microbatches import Microbatches
from autopar.costs.plans.decision_rows import SAVED
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.costs.steps.sends import Send
from autopar.costs.steps.step import forward_and_backward
from autopar.costs.timeline.simulation import simulate
from autopar.ir.program.program import Program
from autopar.planning.best_plan import best_plan
from autopar.planning.options.groups import Memory, Pipeline
from autopar.planning.pipeline.planned_blocks import planned_blocks
from autopar.planning.pipeline.planner import messages, plan_pipeline
from autopar.planning.pipeline.request import PipelineRequest
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.schedules.simulation import StageSeconds
from autopar.planning.pipeline.schedules.simulation import simulate as simulate_stages
from autopar.planning.pipeline.stage_search import StageSearch
from autopar.planning.pipeline.stage_seconds import step_parts, timed, weight_seconds
from autopar.planning.pipeline.stages.stage_bytes import TRANSIENT, running_bytes
from autopar.planning.planner import draft_of
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings, context_of
from autopar.planning.step_seconds import reduction_seconds
from autopar.solver.deadline import NEVER
from benchmarks.publications.depths import FEWEST, FEWEST_GATHERED, Depths
from benchmarks.publications.models import decoder
from benchmarks.publications.repeated import NotRepeated
from benchmarks.publications.rows import Shape
from benchmarks.publications.strategies import PRECISIONS, Pinned, starts

INPUTS = "buffers and inputs"
"""The part of a plan's memory for what is no parameter, and given to a step."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of a device of a rank of the pipeline: at the peak, and between steps."""

    peak: int
    standing: int
    inputs: int = 0
    """Bytes of buffers and inputs, included in `standing`."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step, and bytes of each rank of the pipeline."""

    first_seconds: float
    """Seconds of a step of one micro-batch, or of the whole step of a pipeline."""
    further_seconds: float
    """Seconds of each further micro-batch; 0 on a pipeline."""
    ranks: tuple[RankBytes, ...]
    derived: bool
    """True if the prediction is extrapolated from plans of few layers."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest rank."""
        return max(rank.peak for rank in self.ranks)

    @property
    def standing_bytes(self) -> int:
        """Bytes between steps of the rank that has the most."""
        return max(rank.standing for rank in self.ranks)

    def seconds(self, accumulation: int) -> float:
        """Return the seconds of a step with this number of micro-batches."""
        return self.first_seconds + (accumulation - 1) * self.further_seconds


def predicted(requested: Pinned, counts: Sequence[int], hardware: Hardware, whole: bool = False) -> Predicted:
    """Predict the step and memory of a pinned strategy.

    `counts` are the layers of each stage. `whole` plans all of them; otherwise plans of few layers are extrapolated
    where that is possible. Raises the errors of autopar's planner.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a strategy repeats, or leaves whole, the source's does, too
        on_pipeline = requested.pipeline > 1
        if not whole:
            try:
                return _in_stages(requested, counts, hardware) if on_pipeline else _alone(requested, hardware)
            except NotRepeated:
                pass
        return _whole_pipeline(requested, counts, hardware) if on_pipeline else _alone(requested, hardware, whole=True)


def request_of(requested: Pinned, hardware: Hardware) -> PlanRequest:
    """Build autopar's planning request for a pinned strategy."""
    recompute: Any = requested.recompute  # a word of a table
    return PlanRequest(
        annotations=requested.annotations,
        strategy=requested.strategy,
        settings=Settings(Memory(recompute=recompute, conventions=MemoryConventions.of(requested.conventions))),
        hardware=hardware,
        microbatches=requested.accumulation,
        precision=PRECISIONS[requested.precision],
        pipeline=Pipeline(schedule=requested.schedule or None),
    )


@lru_cache(maxsize=16)
def captured(shape: Shape, sequence: int, batch: int, precision: str) -> Program:
    """The program of a micro-batch of all replicas."""
    specified = PRECISIONS[precision]
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    model = skeleton(decoder(shape, sequence, specified.compute or torch.float32), specified)
    return trace(model, (ids, ids.clone()), {}, training=True, precision=specified).program(Tiles())


def _program(requested: Pinned, layers: int) -> Program:
    return captured(replace(requested.shape, layers=layers), requested.sequence, requested.batch, requested.precision)


def depths_alone(requested: Pinned, hardware: Hardware, whole: bool = False) -> Depths:
    """The plans that stand for a model without a pipeline; `whole` plans all of it."""
    request, mesh = request_of(requested, hardware), requested.mesh(hardware.name)

    def plan(layers: int) -> Plan:
        return best_plan(request, request.space(_program(requested, layers), mesh))

    layers = requested.shape.layers
    return Depths(plan(layers)) if whole else Depths.of(plan, layers, requested.gathered)


def _alone(requested: Pinned, hardware: Hardware, whole: bool = False) -> Predicted:
    depths, share = depths_alone(requested, hardware, whole), hardware.communication_share
    runs = context_of(depths.longer).memory_model.microbatches
    step = simulate(depths.step(), share).seconds
    further = sum(forward_and_backward(depths.microbatch(), share)) if runs.several else 0.0
    rank = RankBytes(*depths.peak_and_standing(runs), inputs=round(depths.part(INPUTS)))
    return Predicted(step, further, (rank,), depths.shorter is not None)


def _whole_pipeline(requested: Pinned, counts: Sequence[int], hardware: Hardware) -> Predicted:
    """The plan of a pipeline that is cut as the row's."""
    wanted, names = request_of(requested, hardware), tuple(f"layers.{start}" for start in starts(counts)[1:])
    wanted = replace(wanted, pipeline=replace(wanted.pipeline, split_points=names))
    schedule = Schedule(requested.schedule, requested.pipeline, requested.accumulation, requested.chunks)
    program = _program(requested, requested.shape.layers)
    request = PipelineRequest.of(wanted, program, requested.mesh(hardware.name), "pp", schedule)
    plan = plan_pipeline(request)
    ranks = _bytes([Depths(each.plan) for each in plan.stages], schedule, _runs(request))
    stages = [waited(each.seconds) if requested.waits else each.seconds for each in plan.stages]
    return Predicted(simulate_stages(schedule, stages).seconds, 0.0, ranks, False)


def _runs(request: PipelineRequest) -> list[Microbatches]:
    """The micro-batches of each stage."""
    return [request.microbatches(stage) for stage in range(request.schedule.num_stages)]


def stage_search(requested: Pinned, hardware: Hardware) -> StageSearch:
    """Build the search that plans a pipeline's stages, without limits, in a model of just enough layers."""
    schedule = Schedule(requested.schedule, requested.pipeline, requested.accumulation, requested.chunks)
    # The first and the last stage may each have as many layers as a longer plan.
    depth = 2 * ((FEWEST_GATHERED if requested.gathered else FEWEST) + 1)
    program, wanted = _program(requested, min(requested.shape.layers, depth)), request_of(requested, hardware)
    request = PipelineRequest.of(wanted, program, requested.mesh(hardware.name), "pp", schedule)
    planned, count = planned_blocks(request, 3), schedule.num_stages
    return StageSearch(planned, NEVER, (None,) * count, (0.0,) * (len(planned.blocks) + 1))


def _in_stages(requested: Pinned, counts: Sequence[int], hardware: Hardware) -> Predicted:
    search = stage_search(requested, hardware)
    schedule = search.planned.request.schedule
    last = schedule.num_stages - 1
    known: dict[tuple[bool, bool, int], tuple[Depths, StageSeconds]] = {}
    stages: list[tuple[Depths, StageSeconds]] = []
    for stage, layers in enumerate(counts):
        kind = stage == 0, stage == last, layers
        if kind not in known:
            depths = Depths.of(partial(plan_of_stage, search, stage, last), layers, requested.gathered)
            sent = messages(search.planned, context_of(depths.longer).space.program)
            seconds = _seconds(depths, sent, hardware.communication_share, schedule.halves_backwards)
            known[kind] = depths, waited(seconds) if requested.waits else seconds
        stages.append(known[kind])
    ranks = _bytes([depths for depths, _ in stages], schedule, _runs(search.planned.request))
    step = simulate_stages(schedule, [each for _, each in stages]).seconds
    derived = any(depths.shorter is not None for depths, _ in stages)
    return Predicted(step, 0.0, ranks, derived)


def waited(seconds: StageSeconds) -> StageSeconds:
    """A stage of a rank that waits for its messages: a forward and a backward for those of both, which go together.

    That is half of each message for each of the two; the other half is the way to the next stage, as of any message
    (Megatron-LM, `send_forward_backward_recv_forward_backward` of its interleaved schedule).
    """
    forth, back = seconds.send_forward / 2, seconds.send_backward / 2
    return replace(
        seconds,
        forward=seconds.forward + forth,
        backward_input=seconds.backward_input + back,
        send_forward=forth,
        send_backward=back,
    )


def _bytes(stages: Sequence[Depths], schedule: Schedule, runs: Sequence[Microbatches]) -> tuple[RankBytes, ...]:
    """The bytes of each rank, whose stages share a device as in `PipelinePlan.rank_bytes`."""
    known: dict[tuple[int, Microbatches], tuple[int, int]] = {}

    def of_stage(stage: int) -> tuple[int, int]:
        key = id(stages[stage]), runs[stage]
        if key not in known:
            known[key] = stages[stage].peak_and_standing(runs[stage])
        return known[key]

    return tuple(
        _rank_bytes(stages, schedule, schedule.stages_of(rank), of_stage) for rank in range(schedule.num_ranks)
    )


def _rank_bytes(
    stages: Sequence[Depths], schedule: Schedule, own: Sequence[int], of_stage: Callable[[int], tuple[int, int]]
) -> RankBytes:
    kept = {stage: stages[stage].line(lambda plan: sum(row.saved_bytes for row in plan.rows)) for stage in own}
    parts = [{each: round(stages[stage].part(each)) for each in (*TRANSIENT, *SAVED)} for stage in own]
    running = [
        running_bytes(of_peak, round(kept[stage]), stages[stage].in_flight)
        for stage, of_peak in zip(own, parts, strict=True)
    ]
    waiting = sum(schedule.in_flight(stage) * kept[stage] for stage in own)
    peaks = sum(of_stage(stage)[0] for stage in own)
    lasting = peaks - sum(beyond for beyond, _ in running) - waiting
    most = schedule.most_waiting(schedule.rank_of(own[0]), {stage: round(each) for stage, each in kept.items()})
    inputs, standing = sum(stages[n].part(INPUTS) for n in own), sum(of_stage(n)[1] for n in own)
    return RankBytes(min(round(lasting + max(map(max, running)) + most), peaks), standing, round(inputs))


def plan_of_stage(search: StageSearch, stage: int, last: int, layers: int) -> Plan:
    """The plan of a stage with so many layers, cut out of the model that there is."""
    blocks = search.planned.blocks
    places = [number for number, block in enumerate(blocks) if block.name.startswith("layers.")]
    assert places, f"no layers among {[block.name for block in blocks]}"
    if stage == 0:
        first, end = 0, places[0] + layers
    elif stage == last:
        first, end = places[-1] + 1 - layers, len(blocks)
    else:
        first, end = places[1], places[1] + layers
    return draft_of(search.solve(search.splitter.between(first, end), stage, {})).written()


def _seconds(depths: Depths, sent: tuple[Send, Send], share: float, halves: bool) -> StageSeconds:
    """Return the seconds of a stage with all its layers, computed as by autopar's `stage_seconds`."""
    weight = depths.line(lambda plan: weight_seconds(context_of(plan).memory_model, context_of(plan).choices))
    once = depths.line(lambda plan: step_parts(plan).once)
    reduced = depths.line(lambda plan: reduction_seconds(context_of(plan).memory_model, context_of(plan).choices))
    each = depths.microbatch(), depths.last_microbatch()
    return timed(*each, share, sent, weight, max(0.0, once - reduced), halves)
