"""`plan`: capture and plan without running, on a mesh, on every mesh of so many devices, or on one with a pipeline."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.export import Traced, skeleton_of, trace
from autopar.capture.static.arguments import with_static
from autopar.capture.tiles.asked import Tiles
from autopar.compiler.arguments import (
    ExampleInputs,
    check_hooks,
    check_in_one_piece,
    check_no_pipeline,
    check_stages,
    example_arguments,
)
from autopar.compiler.arranging import of_pipeline, of_plan
from autopar.compiler.batch_statistics import warn_of_batch_statistics
from autopar.compiler.garbage_collection import uncollected
from autopar.compiler.options import check_planned_mesh
from autopar.compiler.plan_cache import PlanCache
from autopar.compiler.tiles import pipeline_as_memory_asks, tiles_asked
from autopar.errors import AutoparError, CutOffError, InfeasibleError, PipelineError, TimeLimitError
from autopar.memory.model import MemoryModel
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.request import PipelineRequest, pipeline_axis, stage_mesh
from autopar.pipeline.schedule_search import Wish, best_schedule, most_microbatches
from autopar.pipeline.schedules.schedule import Schedule
from autopar.pipeline.stages.blocks import blocks_of
from autopar.pipeline.stages.splitting import Splitter
from autopar.planning.limit.least_stored import least_stored
from autopar.planning.meshes.arrangements import meshes_of
from autopar.planning.meshes.search import Candidate, Turn, best_mesh
from autopar.planning.planner import make_plan
from autopar.planning.request import PlanRequest, axes_of_parts
from autopar.plans.plan import Plan
from autopar.program.operators.experts import DISPATCH
from autopar.program.program import Program
from autopar.progress import stages as progress
from autopar.runtime.module.batches import batch_size, split_batch
from autopar.runtime.module.inputs import call_signature, canonical_arguments
from autopar.runtime.module.parts import layouts_of_parts, whole_batch
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh
from autopar.solver.deadline import Allowance, after, interruptible, is_over, seconds_until
from autopar.space.space import Space

USUAL_AXES, MOST_AXES = 2, 3
"""Axes of a mesh that is searched for, beside that of a pipeline."""
USUAL_PIPELINE = "pp"
SHRINKING = 0.9
"""Of what a batch takes beside what is stored, at least, goes down as micro-batches do: half of it for half of them."""
MANY_BLOCKS, FEW_BLOCKS = 64, 3
"""Of a model of so many blocks the first few are planned on every mesh, to see where the whole is worth it first."""
OUTLOOK_AXES = 2
"""Of meshes that are looked at so: with more axes it takes seconds."""
MOST_CHUNKS = 2
"""Stages per rank of the schedules that are chosen among."""


def plan_offline(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    example_inputs: ExampleInputs,
    request: PlanRequest,
    devices: int | None,
    max_axes: int | None,
    cache: PlanCache,
) -> Plan | PipelinePlan:
    """The best plan on the mesh; on "auto", on the best mesh of `devices` in up to `max_axes` axes."""
    check_planned_mesh(mesh, devices)
    # Meshes that are compared share their time, so that a plan of one is not what would be made of it alone.
    planner = _Planner(model, example_inputs, request, PlanCache() if isinstance(mesh, str) else cache)
    if isinstance(mesh, str):
        return _on_the_best(planner, mesh, devices, max_axes)
    abstract = Mesh.of(mesh)
    axis = pipeline_axis(abstract, request.pipeline)
    check_in_one_piece(request, axis)
    return planner.on(abstract) if axis is None else planner.in_stages(abstract, axis)


def _on_the_best(planner: _Planner, mesh: str, devices: int | None, max_axes: int | None) -> Plan | PipelinePlan:
    """The best plan of all meshes; where a memory limit leaves none in one piece, that of the best pipeline."""
    request = planner.request
    meshes = meshes_of(mesh, devices, request.hardware, max_axes or planner.usual_axes(devices), request.pipeline)
    if request.pipeline is None:
        try:
            check_no_pipeline(request, meshes[0])
        except PipelineError as error:
            raise PipelineError(f'{error} With mesh="auto", give pipeline="pp".') from None
    time_limit = request.settings.time_limit
    with interruptible(), planner.allowance.searching():
        try:
            searched = best_mesh(
                planner.candidate, meshes, time_limit, planner.at_least, request.pipeline, planner.outlook
            )
        except InfeasibleError as error:
            every = meshes_of(mesh, devices, request.hardware, max_axes or USUAL_AXES, USUAL_PIPELINE)
            longer = [each for each in every if USUAL_PIPELINE in each.axes]
            limit = planner.limit(longer[0]) if longer else None
            if (
                request.pipeline is not None
                or not request.training
                or request.static_argnames
                or not longer
                or limit is None
                or planner.stored / longer[0].num_devices > limit
            ):
                raise
            staged = planner.in_pipelines()
            try:
                searched = best_mesh(staged.candidate, longer, time_limit, staged.at_least, USUAL_PIPELINE)
            except (InfeasibleError, TimeLimitError) as other:
                raise type(other)(f"{error}\nIn stages of a pipeline: {other}") from None
    return replace(searched.best, notes=(*searched.best.notes, searched.note))


class _Planner:
    """Plans one model on one mesh after another; it is captured once for each number of micro-batches."""

    def __init__(self, model: nn.Module, example_inputs: ExampleInputs, request: PlanRequest, cache: PlanCache) -> None:
        self.model, self.request, self.cache = model, request, cache
        self.allowance = Allowance.from_now(request.settings.time_limit)
        batch = canonical_arguments(call_signature(model), *example_arguments(example_inputs))
        self.batch = with_static(batch, request.static_argnames, model.forward)
        self.traces: dict[tuple[int, int], Traced] = {}
        self.programs: dict[tuple[int, int, Tiles], Program] = {}
        self.warned = False
        """Whether it was said that statistics are those of micro-batches."""

    def captured(self, count: int, num_parts: int, tiles: Tiles) -> Program:
        """The program of one of so many micro-batches, of a batch of so many times the example."""
        if (count, num_parts, tiles) not in self.programs:
            with uncollected():
                program = self.traced(count, num_parts).program(tiles)
            self.programs[count, num_parts, tiles] = check_hooks(program, count)
        return self.programs[count, num_parts, tiles]

    def traced(self, count: int, num_parts: int) -> Traced:
        """The model, of which such programs are made."""
        if (count, num_parts) not in self.traces:
            with progress("planning", 1) as step, uncollected():
                step("capture")
                part = whole_batch(split_batch(self.batch, count)[0], num_parts)
                self.traces[count, num_parts] = trace(
                    skeleton_of(self.model, self.request.precision, self.request.training),
                    *part,
                    training=self.model.training and self.request.training,
                    assume=self.request.assume,
                    capacity_factor=self.request.capacity_factor,
                    precision=self.request.precision,
                )
        return self.traces[count, num_parts]

    def arriving(self, count: int, mesh: Mesh, tiles: Tiles) -> tuple[Program, dict[str, Layout]]:
        """The same program, for the parts of a mesh, and the layouts of inputs that arrive in parts."""
        axes = axes_of_parts(self.request.inputs, mesh)
        program = self.captured(count, math.prod(map(mesh.size, axes)), tiles)
        return program, layouts_of_parts(program, self.batch, mesh, axes)

    @functools.cached_property
    def single(self) -> Space:
        """A micro-batch, or the whole batch where nothing is said of them, on one device."""
        program = self.captured(self.request.microbatches or 1, 1, tiles_asked(self.request))
        return self.request.space(program, self.request.named(Mesh({"dp": 1})))

    def usual_axes(self, devices: int | None) -> int:
        """How many axes a mesh has beside a pipeline's, at most: a third one where the second has two things to do.

        That is where there are experts, and where the batch has too few samples for the devices, so that positions are
        split, too.
        """
        has_experts = any(node.target is DISPATCH for node in self.single.program.graph.nodes)
        is_whole = self.request.inputs == "whole"
        few = is_whole and batch_size(self.batch) // (self.request.microbatches or 1) < (devices or 1)
        return MOST_AXES if has_experts or few else USUAL_AXES

    def limit(self, mesh: Mesh) -> int | None:
        """Return the memory limit in bytes of tensors on a device of a mesh; None if there is none."""
        return self.request.within(mesh).settings.tensor_limit

    def in_pipelines(self) -> _Planner:
        """The same for pipelines, whose axis has its usual name; what is captured serves both."""
        other = copy.copy(self)
        other.request = replace(self.request, pipeline=USUAL_PIPELINE)
        return other

    def samples(self, mesh: Mesh) -> int:
        """Of the whole batch, of which ranks along some axes of a mesh may be given parts."""
        return batch_size(self.batch) * math.prod(map(mesh.size, axes_of_parts(self.request.inputs, mesh)))

    @property
    def stored(self) -> int:
        """Bytes that all devices together store at least."""
        return least_stored(MemoryModel(self._with_least_stored(self.single)))

    def at_least(self, mesh: Mesh) -> float:
        """What a step on a mesh takes at least: all devices compute all the time, but for the bubble of a pipeline.

        Its last rank waits for the first micro-batch, whose forward is a third of its work, through the stages before.
        """
        calls = (each.menu.seconds for each in self.single.decisions if each.kind == "call")
        own = (self.request.microbatches or 1) * sum(float(each.min()) for each in calls) / mesh.num_devices
        axis = self.request.pipeline
        if axis is None or axis not in mesh.axes:
            return own
        num_ranks = mesh.size(axis)
        most = self.request.microbatches or most_microbatches(self.samples(stage_mesh(mesh, axis)), mesh, axis)
        return own * (1 + (num_ranks - 1) / (3 * (self.request.chunks or MOST_CHUNKS) * most))

    @functools.cached_property
    def first_layers(self) -> Program | None:
        """The first blocks of a model of many; None of another, whose meshes are soon planned."""
        program = self.single.program
        blocks = blocks_of(program)
        return Splitter.of(program, blocks).between(0, FEW_BLOCKS) if len(blocks) >= MANY_BLOCKS else None

    def outlook(self, mesh: Mesh) -> float:
        """Seconds of the first layers on a mesh, without a memory limit: not proof, but mostly how meshes compare.

        Infinite where that is not soon known, as for meshes of many axes.
        """
        program = self.first_layers
        if program is None or self.request.pipeline in mesh.axes or mesh.ndim > OUTLOOK_AXES:
            return math.inf
        try:
            space = self.request.space(program, self.request.named(mesh), dealing=mesh.names)
            return make_plan(space, {}, recompute="none")[0].seconds
        except AutoparError:  # pins are for the whole
            return math.inf

    def candidate(self, mesh: Mesh, turn: Turn) -> Candidate[Plan | PipelinePlan]:
        """The best plan on one of the meshes that are compared.

        Where a pipeline has no part in it and the whole batch does not fit, it is halved until its micro-batches do.
        """
        settings, deadline = replace(self.request.settings, time_limit=turn.time_limit), after(turn.time_limit)
        request = replace(self.request, settings=settings)
        if request.pipeline is not None and request.pipeline in mesh.axes:
            return of_pipeline(self.in_stages(mesh, request.pipeline, request, turn.cutoff))
        count = request.microbatches or 1
        while True:
            left = replace(settings, time_limit=seconds_until(deadline), cutoff=turn.cutoff / count)
            try:
                plan = self.on(mesh, replace(request, microbatches=count, settings=left))
            except CutOffError as error:
                if math.isfinite(error.seconds):
                    raise CutOffError(count * error.seconds) from error
                reason = InfeasibleError("nothing is within the memory limit")
            except InfeasibleError as error:
                reason = error
            else:
                return of_plan(plan if count == 1 else _saying(plan, count), count)
            halved = None if is_over(deadline) else self._halved(mesh, count, reason.least_bytes)
            if halved is None:
                said = f"also in {count} micro-batches: {reason}" if count > 1 else str(reason)
                raise InfeasibleError(said, reason.least_bytes) from reason
            count = halved

    def _halved(self, mesh: Mesh, count: int, least: int | None) -> int | None:
        """Into how many micro-batches a batch is to be split next, of which so many take `least` bytes.

        None where nothing is left to split, or what is stored is too much already, and where nobody asked for halves.
        """
        settings, size = self.request.within(mesh).settings, batch_size(self.batch)
        limit = settings.memory
        if self.request.microbatches or limit is None or self.request.static_argnames:
            return None
        stored = settings.reserved.on_device(self.floor(mesh, count))
        halved = 2 * count
        while stored <= limit and size % halved == 0:
            if least is None or stored + SHRINKING * (least - stored) * count / halved <= limit:
                return halved
            halved *= 2  # as many take too much, so that the model need not be captured for them
        return None

    def floor(self, mesh: Mesh, count: int) -> int:
        """Bytes per device that are stored however small micro-batches are."""
        program, arriving = self.arriving(count, mesh, tiles_asked(self.request))
        return least_stored(MemoryModel(self._with_least_stored(self.request.space(program, mesh, arriving))))

    def _with_least_stored(self, space: Space) -> Space:
        """The space with as little on the device as the request allows."""
        if self.request.offload != "auto":
            return space
        return space.with_optimizer(self.request.offloading(space.hardware, space.mesh.num_devices))

    def on(self, mesh: Mesh, request: PlanRequest | None = None) -> Plan:
        """The best plan on a mesh without a pipeline, as it is asked for, or as `request` asks for it."""
        request = (request or self.request).within(mesh)
        check_no_pipeline(request, mesh)
        count, tiles = request.microbatches or 1, tiles_asked(request)
        program, _ = self.arriving(count, mesh, tiles)
        self.warned = self.warned or warn_of_batch_statistics(program, count)

        def space_of(tiles: Tiles) -> Space:
            program, arriving = self.arriving(count, mesh, tiles)
            return request.space(program, mesh, arriving)

        with progress(f"planning on {mesh}", 2) as step, uncollected():
            step("strategies and costs")
            space = space_of(tiles)
            step("solving")
            with interruptible(), self.allowance.searching():
                return self.cache.plan(request, space, space_of)

    @uncollected()
    def in_stages(
        self, mesh: Mesh, axis: str, request: PlanRequest | None = None, cutoff: float = math.inf
    ) -> PipelinePlan:
        """The best plan on a mesh with a pipeline, as it is asked for, or as `request` asks for it.

        CutOffError where every schedule takes longer than the cut-off without a memory limit.
        """
        request = (request or self.request).on(mesh)
        check_stages(request)
        inner = stage_mesh(mesh, axis)

        tileable = set[bool]()

        def planned(tiles: Tiles) -> PipelinePlan:
            def requested(schedule: Schedule) -> PipelineRequest:
                program, arriving = self.arriving(schedule.num_microbatches, inner, tiles)
                tileable.add(program.tileable)
                return PipelineRequest.of(request, program, mesh, axis, schedule, arriving)

            settings, size = request.settings, self.samples(inner)
            limited, seconds = settings.memory is not None, settings.time_limit
            chosen = best_schedule(Wish.of(request), size, mesh, axis, requested, limited, seconds, cutoff)
            asked = requested(chosen.schedule)
            warn_of_batch_statistics(asked.program, chosen.schedule.num_microbatches)
            return chosen.plan or self.cache.pipeline_plan(asked)

        with interruptible(), self.allowance.searching():
            return pipeline_as_memory_asks(request, planned, lambda: True in tileable, inner.num_devices)


def _saying(plan: Plan, count: int) -> Plan:
    """The plan, with what it has to be asked for: of one micro-batch it does not say how many there are."""
    note = f"the batch fits in {count} micro-batches: give microbatches={count}, and train with model.train_step"
    return replace(plan, notes=(*plan.notes, note))
