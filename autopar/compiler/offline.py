"""`plan`: capture and plan without running, on a mesh, on every mesh of so many devices, or on one with a pipeline."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.export import Traced, skeleton, trace
from autopar.capture.tiles.asked import Tiles
from autopar.compiler.arguments import (
    ExampleInputs,
    check_hooks,
    check_no_pipeline,
    check_tiles_of_stages,
    example_arguments,
)
from autopar.compiler.arranging import of_pipeline, of_plan
from autopar.compiler.batch_statistics import warn_of_batch_statistics
from autopar.compiler.garbage_collection import uncollected
from autopar.compiler.options import check_planned_mesh
from autopar.compiler.plan_cache import PlanCache
from autopar.compiler.tiles import tiles_asked
from autopar.errors import InfeasibleError, PipelineError
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.request import PipelineRequest, pipeline_axis, stage_mesh
from autopar.pipeline.schedule_search import Wish, best_schedule
from autopar.pipeline.schedules.schedule import Schedule
from autopar.planning.mesh_search import Candidate, best_mesh, meshes_of
from autopar.planning.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.program.program import Program
from autopar.progress import stages as progress
from autopar.runtime.module.batches import batch_size, split_batch
from autopar.runtime.module.inputs import call_signature, canonical_arguments
from autopar.runtime.module.parts import axes_of_parts, layouts_of_parts, whole_batch
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Mesh
from autopar.solver.deadline import after, interruptible, is_over, seconds_until
from autopar.space.space import Space


def plan_offline(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    example_inputs: ExampleInputs,
    request: PlanRequest,
    devices: int | None,
    max_axes: int,
    cache: PlanCache,
) -> Plan | PipelinePlan:
    """The best plan on the mesh; on "auto", on the best mesh of `devices` in up to `max_axes` axes."""
    check_planned_mesh(mesh, devices)
    # Meshes that are compared share their time, so that a plan of one is not what would be made of it alone.
    planner = _Planner(model, example_inputs, request, PlanCache() if isinstance(mesh, str) else cache)
    if isinstance(mesh, str):
        meshes = meshes_of(mesh, devices, request.hardware, max_axes, request.pipeline)
        if request.pipeline is None:
            try:
                check_no_pipeline(request, meshes[0])
            except PipelineError as error:
                raise PipelineError(f'{error} With mesh="auto", give pipeline="pp".') from None
        with interruptible():
            searched = best_mesh(planner.candidate, meshes, request.settings.time_limit)
        return replace(searched.best, notes=(*searched.best.notes, searched.note))
    abstract = Mesh.of(mesh)
    axis = pipeline_axis(abstract, request.pipeline)
    return planner.on(abstract) if axis is None else planner.in_stages(abstract, axis)


class _Planner:
    """Plans one model on one mesh after another; it is captured once for each number of micro-batches."""

    def __init__(self, model: nn.Module, example_inputs: ExampleInputs, request: PlanRequest, cache: PlanCache) -> None:
        self.model, self.request, self.cache = model, request, cache
        self.batch = canonical_arguments(call_signature(model), *example_arguments(example_inputs))
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
                    skeleton(self.model, self.request.precision),
                    *part,
                    training=self.model.training,
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

    def candidate(self, mesh: Mesh, time_limit: float) -> Candidate[Plan | PipelinePlan]:
        """The best plan on one of the meshes that are compared.

        Where a pipeline has no part in it and the whole batch does not fit, it is halved until its micro-batches do.
        """
        hurried = replace(self.request.settings, time_limit=time_limit)
        request, deadline = replace(self.request, settings=hurried), after(time_limit)
        if request.pipeline is not None and request.pipeline in mesh.axes:
            return of_pipeline(self.in_stages(mesh, request.pipeline, request))
        count = request.microbatches or 1
        while True:
            left = replace(request.settings, time_limit=seconds_until(deadline))
            try:
                plan = self.on(mesh, replace(request, microbatches=count, settings=left))
            except InfeasibleError as error:
                if request.microbatches or request.settings.memory is None:
                    raise
                if batch_size(self.batch) % (2 * count) or is_over(deadline):
                    raise InfeasibleError(f"also in {count} micro-batches: {error}") from error
                count *= 2
            else:
                return of_plan(plan if count == 1 else _saying(plan, count), count)

    def on(self, mesh: Mesh, request: PlanRequest | None = None) -> Plan:
        """The best plan on a mesh without a pipeline, as it is asked for, or as `request` asks for it."""
        request = request or self.request
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
            with interruptible():
                return self.cache.plan(request, space, space_of)

    @uncollected()
    def in_stages(self, mesh: Mesh, axis: str, request: PlanRequest | None = None) -> PipelinePlan:
        """The best plan on a mesh with a pipeline, as it is asked for, or as `request` asks for it."""
        request = (request or self.request).on(mesh)
        check_tiles_of_stages(request)
        inner = stage_mesh(mesh, axis)

        def requested(schedule: Schedule) -> PipelineRequest:
            program, arriving = self.arriving(schedule.num_microbatches, inner, tiles_asked(request))
            return PipelineRequest.of(request, program, mesh, axis, schedule, arriving)

        limited = request.settings.memory is not None
        size = batch_size(self.batch) * math.prod(map(inner.size, axes_of_parts(request.inputs, inner)))
        with interruptible():
            chosen = best_schedule(Wish.of(request), size, mesh, axis, requested, limited)
            asked = requested(chosen.schedule)
            warn_of_batch_statistics(asked.program, chosen.schedule.num_microbatches)
            return chosen.plan or self.cache.pipeline_plan(asked)


def _saying(plan: Plan, count: int) -> Plan:
    """The plan, with what it has to be asked for: of one micro-batch it does not say how many there are."""
    note = f"the batch fits in {count} micro-batches: give microbatches={count}, and train with model.train_step"
    return replace(plan, notes=(*plan.notes, note))
