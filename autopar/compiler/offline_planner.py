"""Plans of one model on one mesh after another, which share what was captured of it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from autopar.capture.export import Traced, skeleton_of
from autopar.capture.layers.fewer import without_layers
from autopar.capture.static.arguments import with_static
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.capture.tiles.tiled_losses import Fitting
from autopar.compiler.arguments import ExampleInputs, check_hooks, check_no_pipeline, check_stages, example_arguments
from autopar.compiler.batch_statistics import warn_of_batch_statistics
from autopar.compiler.garbage_collection import uncollected
from autopar.compiler.plan_cache import PlanCache
from autopar.compiler.tiles import may_save, pipeline_as_memory_asks
from autopar.console.progress import stages as progress
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.errors import CutOffError, InfeasibleError
from autopar.ir.program.operators.expert_operators import DISPATCH
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.matching import Catalog
from autopar.planning.memory_limit.least_stored import least_stored
from autopar.planning.mesh_estimates.block_use import strategies_of
from autopar.planning.mesh_estimates.estimates import Estimate
from autopar.planning.mesh_estimates.shortened import Shortened, is_alike, shortened
from autopar.planning.mesh_estimates.warm_start import warm_start
from autopar.planning.mesh_search.candidates import of_pipeline, of_plan, saying
from autopar.planning.mesh_search.search import Candidate, Turn
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.request import PipelineRequest, stage_mesh
from autopar.planning.pipeline.schedule_search import Wish, best_schedule, most_microbatches
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.stages.blocks import Block, blocks_of
from autopar.planning.request import PlanRequest, axes_of_parts
from autopar.runtime.module.batches import batch_size, split_batch
from autopar.runtime.module.inputs import call_signature, canonical_arguments
from autopar.runtime.module.local_batch import layouts_of_parts, whole_batch
from autopar.solver.deadline import Allowance, after, interruptible, is_over, lasting, moment_in, seconds_until

USUAL_AXES, MOST_AXES = 2, 3
"""Axes of a searched mesh, that of a pipeline excluded."""
USUAL_PIPELINE = "pp"
SHRINKING = 0.9
"""Share of a batch's bytes, stored state aside, that shrinks at least in proportion to the micro-batch size."""


class OfflinePlanner:
    """Plans one model on one mesh after another; it is captured once for each number of micro-batches."""

    def __init__(self, model: nn.Module, example_inputs: ExampleInputs, request: PlanRequest, cache: PlanCache) -> None:
        self.model, self.request, self.cache = model, request, cache
        self.allowance = Allowance.from_now(request.settings.search.time_limit)
        batch = canonical_arguments(call_signature(model), *example_arguments(example_inputs))
        self.batch = with_static(batch, request.static_argnames, model.forward)
        self.traces: dict[tuple[int, int], Traced] = {}
        self.programs: dict[tuple[int, int, Tiles], Program] = {}
        self.shorter: dict[tuple[int, int, Tiles], Shortened] = {}
        """Shorter forms of `programs`, by the same keys."""
        self.fewer: dict[tuple[int, int], Traced | None] = {}
        """Traces of the model with fewer layers, keyed as `traces`; None if it cannot be traced so."""
        self.warned = False
        """True if the user was warned that batch statistics are those of micro-batches."""
        self.whole = set[tuple[int, int]]()
        """Keys of `traces` of the whole model where one with fewer layers would do, but is not the same."""

    def captured(self, count: int, num_parts: int, tiles: Tiles) -> Program:
        """Return the program of one of so many micro-batches, of a batch of so many times the example."""
        if (count, num_parts, tiles) not in self.programs:
            with uncollected():
                program = self.traced(count, num_parts).program(tiles)
            self.programs[count, num_parts, tiles] = check_hooks(program, count)
        return self.programs[count, num_parts, tiles]

    def traced(self, count: int, num_parts: int) -> Traced:
        """Return the model, of which such programs are made."""
        if (count, num_parts) not in self.traces:
            with progress("planning", 1) as step, uncollected():
                step("capture")
                self.traces[count, num_parts] = self._traced(self._skeleton(), count, num_parts)
        return self.traces[count, num_parts]

    def _skeleton(self) -> nn.Module:
        return skeleton_of(self.model, self.request.precision, self.request.training)

    def _traced(self, model: nn.Module, count: int, num_parts: int) -> Traced:
        training = self.model.training and self.request.training
        part = split_batch(self.batch, count)[0]
        return self.request.traced(model, *whole_batch(part, num_parts), training=training)

    def arriving(self, count: int, mesh: Mesh, tiles: Tiles) -> tuple[Program, dict[str, Layout]]:
        """Return the same program, for the parts of a mesh, and the layouts of inputs that arrive in parts."""
        axes = axes_of_parts(self.request.inputs, mesh)
        program = self.captured(count, math.prod(map(mesh.size, axes)), tiles)
        return program, layouts_of_parts(program, self.batch, mesh, axes)

    @functools.cached_property
    def single(self) -> Space:
        """Space of a micro-batch on one device; of the whole batch if their number is not given."""
        program = self.captured(self.request.microbatches or 1, 1, self.request.tiles)
        return self.request.space(program, self.request.named(Mesh({"dp": 1})))

    def most_axes(self, devices: int | None) -> int:
        """Return the most axes of a searched mesh, besides a pipeline's: by default a third if the second has two uses.

        It serves models with experts, and batches with fewer samples than devices, whose positions are sharded, too.
        """
        if self.request.settings.search.max_axes is not None:
            return self.request.settings.search.max_axes
        has_experts = any(node.target is DISPATCH for node in self.single.program.graph.nodes)
        is_whole = self.request.inputs == "whole"
        few = is_whole and batch_size(self.batch) // (self.request.microbatches or 1) < (devices or 1)
        return MOST_AXES if has_experts or few else USUAL_AXES

    def limit(self, mesh: Mesh) -> int | None:
        """Return the memory limit in bytes of tensors on a device of a mesh; None if there is none."""
        return self.request.within(mesh).settings.tensor_limit

    def in_pipelines(self) -> OfflinePlanner:
        """Return the same for pipelines, whose axis has its usual name; what is captured serves both."""
        other = copy.copy(self)
        pipeline = replace(self.request.pipeline, axis=USUAL_PIPELINE)
        other.request = replace(self.request, pipeline=pipeline)
        return other

    def samples(self, mesh: Mesh) -> int:
        """Return the samples of the whole batch; ranks along some axes of a mesh may each be given a part of it."""
        return batch_size(self.batch) * math.prod(map(mesh.size, axes_of_parts(self.request.inputs, mesh)))

    @property
    def stored(self) -> int:
        """Bytes that all devices together store at least."""
        return least_stored(MemoryModel(self._with_least_stored(self.single)))

    def at_least(self, mesh: Mesh, microbatches: int | None = None) -> float:
        """Return the least seconds of a step: all devices compute all the time, but for the bubble of a pipeline.

        Its last rank waits for the first micro-batch, whose forward is a third of its work, through the stages before.
        Without a number of micro-batches there are as many as leave each device of a stage a sample.
        """
        own = self.least_computing / mesh.num_devices
        axis = self.request.pipeline.axis
        if axis is None or axis not in mesh.axes:
            return own
        num_ranks = mesh.size(axis)
        count = microbatches or self.request.microbatches
        count = count or most_microbatches(self.samples(stage_mesh(mesh, axis)), mesh, axis)
        chunks = self.request.pipeline.stages_per_rank or max(len(self.blocks) // num_ranks, 1)
        return own * (1 + (num_ranks - 1) / (3 * chunks * count))

    @functools.cached_property
    def least_computing(self) -> float:
        """Seconds of all calls of a step on one device, each by its fastest strategy."""
        calls = (each.candidates.seconds for each in self.single.decisions if each.kind == "call")
        return (self.request.microbatches or 1) * sum(float(each.min()) for each in calls)

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Consecutive parts of the model, between which a pipeline may be cut."""
        return blocks_of(self.single.program)

    @functools.cached_property
    def specified(self) -> dict[str, tuple[int, ...]]:
        """Node → the numbers of the user's annotations that name it."""
        found: dict[str, tuple[int, ...]] = {}
        catalog = Catalog(self.single)
        for number, annotation in enumerate(self.request.annotations):
            named = catalog.find(annotation)
            for each in sorted({*named.calls, *named.outputs, *named.parameters}) if named else ():
                name = self.single.decisions[each].name
                found[name] = (*found.get(name, ()), number)
        return found

    def short(self, count: int, mesh: Mesh) -> Iterator[tuple[Shortened, Mapping[str, Layout]]]:
        """Yield shorter forms of a micro-batch's program for the parts of a mesh, and layouts of inputs in parts.

        Behind that of the model as it is, with its loss in tiles where that may save a part of the limit that matters.
        """
        axes, tiles = axes_of_parts(self.request.inputs, mesh), self.request.tiles
        num_parts = math.prod(map(mesh.size, axes))
        found = self.shortened(count, num_parts, tiles)
        yield found, layouts_of_parts(found.program, self.batch, mesh, axes)
        limit = self.request.settings.limit
        if tiles.loss is None and may_save(found.program, mesh.num_devices, limit):
            found = self.shortened(count, num_parts, tiles._replace(loss=Fitting(mesh.num_devices)))
            yield found, layouts_of_parts(found.program, self.batch, mesh, axes)

    def shortened(self, count: int, num_parts: int, tiles: Tiles) -> Shortened:
        """Return the shorter form of a micro-batch's program, captured of a model with fewer layers where that is the
        same.
        """
        key = count, num_parts, tiles
        if key not in self.shorter:
            is_new = (count, num_parts) not in self.traces
            traced = self._traced_shorter(count, num_parts) if is_new else None
            found = None
            if traced is not None:
                with uncollected():
                    program = check_hooks(traced.program(tiles), count)
                blocks = blocks_of(program)
                if is_alike(self.base, program, blocks, same_sizes=False):
                    found = Shortened(program, blocks, self.base.origin)
            if found is None:
                if is_new:
                    self.whole.add((count, num_parts))
                program = self.captured(*key)
                found = shortened(program, blocks_of(program), self.specified)
            self.shorter[key] = found
        return self.shorter[key]

    @functools.cached_property
    def base(self) -> Shortened:
        """The shorter form of the program that is captured first."""
        return shortened(self.single.program, self.blocks, self.specified)

    def _traced_shorter(self, count: int, num_parts: int) -> Traced | None:
        """Return the model with fewer layers, traced; None where it is not the shorter form of the model."""
        if not self.runs_with_fewer_layers:
            return None
        key = count, num_parts
        if key not in self.fewer:
            self.fewer[key] = self._of_fewer_layers(*key)
        return self.fewer[key]

    @functools.cached_property
    def runs_with_fewer_layers(self) -> bool:
        """True if the program of the model with fewer layers is the shorter form of the one that is captured first."""
        traced = self._of_fewer_layers(self.request.microbatches or 1, 1)
        if traced is None:
            return False
        program = traced.program(self.request.tiles)
        return is_alike(self.base, program, blocks_of(program), same_sizes=True)

    @functools.cached_property
    def fewer_layers(self) -> nn.Module | None:
        """The model without the layers that others stand for; None where none can be taken out."""
        model, left = self._skeleton(), {block.name for block in self.base.blocks}
        gone = [block.name for block in self.blocks if block.name not in left]
        return model if gone and not self.specified and without_layers(model, gone) else None

    def _of_fewer_layers(self, count: int, num_parts: int) -> Traced | None:
        """Return the model with fewer layers, traced; None where it cannot do without them."""
        if self.fewer_layers is None:
            return None
        try:
            return self._traced(self.fewer_layers, count, num_parts)
        except Exception:  # for example, if the forward indexes layers: trace the whole model
            return None

    def exact(self, estimate: Estimate, turn: Turn) -> Candidate[Plan | PipelinePlan]:
        """Return the best plan of an estimated candidate, with its schedule, micro-batches and tiles."""
        mesh, count, schedule, uses = estimate.mesh, estimate.microbatches, estimate.schedule, estimate.uses
        stage = mesh if schedule is None else stage_mesh(mesh, str(self.request.pipeline.axis))
        num_parts = math.prod(map(stage.size, axes_of_parts(self.request.inputs, stage)))
        tiles = self.request.tiles
        in_tiles = uses[0].short is not self.shortened(count, num_parts, tiles)
        request = replace(
            self.request,
            microbatches=count,
            settings=self.request.settings.lasting(turn.time_limit),
            chosen_tiles=tiles._replace(loss=Fitting(stage.num_devices) if in_tiles else tiles.loss or False),
        )
        if schedule is not None:
            chunks = schedule.chunks if schedule.chunks > 1 else None
            pipeline = replace(request.pipeline, schedule=schedule.name, stages_per_rank=chunks)
            looked_at = strategies_of(uses, blocks_of(self.captured(count, num_parts, request.tiles)))
            request = replace(request, pipeline=pipeline)
            return of_pipeline(self.in_stages(mesh, str(pipeline.axis), request, turn.cutoff, looked_at))
        settings = replace(request.settings, cutoff=turn.cutoff / count)
        request = replace(request, settings=settings, warm_start=warm_start(uses, estimate.shares))
        try:
            plan = self.on(mesh, request)
        except CutOffError as error:
            raise CutOffError(count * error.seconds) from error
        return of_plan(plan if count == 1 or self.request.microbatches else saying(plan, count), count)

    def candidate(self, mesh: Mesh, turn: Turn) -> Candidate[Plan | PipelinePlan]:
        """Return the best plan on one of the meshes that are compared.

        Where a pipeline has no part in it and the whole batch does not fit, it is halved until its micro-batches do.
        """
        settings, deadline = self.request.settings.lasting(turn.time_limit), after(turn.time_limit)
        request = replace(self.request, settings=settings)
        if request.pipeline.axis is not None and request.pipeline.axis in mesh.axes:
            return of_pipeline(self.in_stages(mesh, request.pipeline.axis, request, turn.cutoff))
        count = request.microbatches or 1
        while True:
            left = replace(settings.lasting(seconds_until(deadline)), cutoff=turn.cutoff / count)
            try:
                plan = self.on(mesh, replace(request, microbatches=count, settings=left))
            except CutOffError as error:
                if math.isfinite(error.seconds):
                    raise CutOffError(count * error.seconds) from error
                reason = InfeasibleError("nothing is within the memory limit")
            except InfeasibleError as error:
                reason = error
            else:
                return of_plan(plan if count == 1 else saying(plan, count), count)
            halved = None if is_over(deadline) else self._halved(mesh, count, reason.least_bytes)
            if halved is None:
                specified = f"also in {count} micro-batches: {reason}" if count > 1 else str(reason)
                raise InfeasibleError(specified, reason.least_bytes) from reason
            count = halved

    def _halved(self, mesh: Mesh, count: int, least: int | None) -> int | None:
        """Return the next number of micro-batches to try, given that this one takes `least` bytes.

        Returns None if nothing is left to split, if stored tensors are too large, or if halving was not requested.
        """
        settings, size = self.request.within(mesh).settings, batch_size(self.batch)
        limit = settings.limit
        if self.request.microbatches or limit is None or self.request.static_argnames:
            return None
        stored = settings.reserved.on_device(self.floor(mesh, count))
        halved = 2 * count
        while stored <= limit and size % halved == 0:
            if least is None or stored + SHRINKING * (least - stored) * count / halved <= limit:
                return halved
            halved *= 2  # too large a batch: no need to capture the model for it
        return None

    def floor(self, mesh: Mesh, count: int) -> int:
        """Return the bytes per device that are stored however small micro-batches are."""
        program, arriving = self.arriving(count, mesh, self.request.tiles)
        return least_stored(MemoryModel(self._with_least_stored(self.request.space(program, mesh, arriving))))

    def _with_least_stored(self, space: Space) -> Space:
        """Return the space with as little on the device as the request allows."""
        if self.request.memory.offload != "auto":
            return space
        return space.with_optimizer(self.request.offloading(space.hardware, space.mesh.num_devices))

    def on(self, mesh: Mesh, request: PlanRequest | None = None) -> Plan:
        """Return the best plan on a mesh without a pipeline, for `request` or else the user's own."""
        request = (request or self.request).within(mesh)
        check_no_pipeline(request, mesh)
        count, tiles = request.microbatches or 1, request.tiles
        program, _ = self.arriving(count, mesh, tiles)
        self.warned = self.warned or warn_of_batch_statistics(program, count)

        def space_of(tiles: Tiles) -> Space:
            program, arriving = self.arriving(count, mesh, tiles)
            return request.space(program, mesh, arriving, zigzag_axes=request.first_zigzag_axes)

        with progress(f"planning on {mesh}", 2) as step, uncollected():
            step("strategies and costs")
            began = moment_in(0.0)
            space = space_of(tiles)
            step("solving")
            with interruptible(), self.allowance.searching(began):
                return self.cache.plan(request, space, space_of)

    @uncollected()
    def in_stages(
        self,
        mesh: Mesh,
        axis: str,
        request: PlanRequest | None = None,
        cutoff: float = math.inf,
        strategies: Mapping[str, frozenset[str]] | None = None,
    ) -> PipelinePlan:
        """Return the best plan on a mesh with a pipeline, for `request` or else the user's own.

        Of some decisions only these `strategies` are looked at, where they are given. CutOffError where every schedule
        takes longer than the cut-off without a memory limit.
        """
        request = (request or self.request).on(mesh)
        check_stages(request)
        inner = stage_mesh(mesh, axis)

        tileable = set[bool]()

        def planned(tiles: Tiles) -> PipelinePlan:
            def requested(schedule: Schedule) -> PipelineRequest:
                program, arriving = self.arriving(schedule.num_microbatches, inner, tiles)
                tileable.add(program.tileable)
                made = PipelineRequest.of(request, program, mesh, axis, schedule, arriving)
                return replace(made, strategies=strategies or {})

            settings, size = request.settings, self.samples(inner)
            limited, seconds = settings.limit is not None, settings.search.time_limit
            chosen = best_schedule(Wish.of(request), size, mesh, axis, requested, limited, seconds, cutoff)
            tiles_requested = requested(chosen.schedule)
            warn_of_batch_statistics(tiles_requested.program, chosen.schedule.num_microbatches)
            return chosen.plan or self.cache.pipeline_plan(tiles_requested)

        turn = lasting(after(request.settings.search.time_limit))  # with the loss in tiles and without, together
        with interruptible(), self.allowance.searching(), turn:
            return pipeline_as_memory_asks(request, planned, lambda: True in tileable, inner.num_devices)
