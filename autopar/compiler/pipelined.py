"""`compile` on a mesh with a pipeline axis: capture a micro-batch, plan and cut, rewrite and run this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.tiles.requested_tiles import Tiles
from autopar.capture.tiles.tiled_losses import Fitting
from autopar.compiler.arguments import (
    Run,
    check_buckets,
    check_hooks,
    check_not_deterministic,
    check_stages,
    on_device,
)
from autopar.compiler.batch_statistics import warn_of_batch_statistics
from autopar.compiler.garbage_collection import uncollected
from autopar.compiler.tiles import pipeline_as_memory_asks, tiles_of_pipeline
from autopar.compiler.whole import ModuleCompiler
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError, MeshError, PipelineError, PlanError
from autopar.ir.program.effects import is_random
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout, replicated
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.planner import stage_space, stored_layouts
from autopar.planning.pipeline.request import ONE_DEVICE, PipelineRequest
from autopar.planning.pipeline.schedule_search import Wish, best_schedule
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.planning.pipeline.stages.blocks import blocks_of
from autopar.planning.pipeline.stages.splitting import split
from autopar.planning.request import PlanRequest, axes_of_parts
from autopar.runtime.collectives.mesh_axes import gathering_groups, join_axes
from autopar.runtime.lengths.varying import Varying
from autopar.runtime.module.batches import batch_size, split_batch
from autopar.runtime.module.executable import Executable, gathering_axes
from autopar.runtime.module.inputs import Arguments, layouts_of
from autopar.runtime.module.local_batch import Given
from autopar.runtime.module.parameters import Storage
from autopar.runtime.outputs.sums import axes_of_sums
from autopar.runtime.pipeline.executable import Pipeline
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from autopar.runtime.ranks.agreement import from_first_rank, on_all_ranks
from autopar.runtime.recompute.random_state import RandomState
from autopar.runtime.rewrite.per_rank_graph import rewrite
from autopar.runtime.step_graphs.refusals import graph_is_required
from autopar.solver.deadline import Allowance


def compile_pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    axis: str,
    request: PlanRequest,
    run: Run,
    made: Plan | PipelinePlan | None = None,
) -> PipelineModule:
    """Parallelize `model` over `mesh` with the pipeline `axis`, by a plan made before, or on its first inputs."""
    plan = pipeline_plan_of(made)
    check_wish(Wish.of(request), plan)
    check_not_deterministic(run)
    schedule = request.pipeline.schedule if plan is None else plan.schedule.name
    required = graph_is_required(run.cuda_graph, mesh, request.training, schedule)
    _check_mesh_of(plan, Mesh.of(mesh), axis)
    check_stages(request)
    return _Compiler(model, mesh, axis, request, plan, run, required).compiled()


class _Compiler(ModuleCompiler[PipelineModule]):
    """Makes the stages of one module on this rank: once for each kind of inputs, mode and set of frozen parameters."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        axis: str,
        request: PlanRequest,
        plan: PipelinePlan | None,
        run: Run,
        graph_is_required: bool | None,
    ) -> None:
        """`graph_is_required`: whether steps must be CUDA graphs or may be; None if they are not to be."""
        super().__init__(model, mesh, request, plan, run)
        self.graph_is_required = graph_is_required
        self.plan, self.axis, self.stage_devices = plan, axis, stage_devices(mesh, axis)
        self.owners: dict[str, tuple[int, ...]] = {}
        """Parameter or buffer → the stages that hold it, since the first plan."""
        self.schedule = None if plan is None else plan.schedule
        self.tiles = request.tiles
        """Tiles in which the model is captured: the requested ones, then those of the first plan."""
        self.allowance: Allowance | None = None
        """Time that the choice of a schedule has left of the limit, for the first plan."""

    def make_module(self, random_state: RandomState) -> PipelineModule:
        inner = Mesh.of(self.stage_devices)
        axes = axes_of_parts(self.request.inputs, inner)
        self.module = PipelineModule(
            self.tree,
            self.mesh,
            self.axis,
            self.stage_devices,
            self.prepare,
            self.capture,
            num_microbatches=self.num_microbatches,
            returned=self.request.returned(inner),
            random_state=random_state,
            given=Given(axes, self.run.check_inputs),
        )
        self.module.duplicate = self.duplicate
        if self.graph_is_required is not None:
            self.module.capture_steps(self.graph_is_required)
        if (sizes := self.run.sizes) is not None:
            check_buckets(sizes, None)
            self.module.varying = Varying(sizes, inner, axes)
        return self.module

    def num_microbatches(self, arguments: Arguments, training: bool) -> int:
        """Return the number of micro-batches of a batch; the first batch decides it, together with the schedule."""

        def request_of(schedule: Schedule, tiles: Tiles | None = None) -> PipelineRequest:
            part = split_batch(arguments, schedule.num_microbatches)[0]
            return self._requested(self.capture(part, training, None, tiles), part, schedule)

        def choice() -> dict[str, Any]:
            size, limited = batch_size(arguments), self.request.settings.limit is not None
            wish, seconds = Wish.of(self.request), self.request.settings.search.time_limit

            def best(tiles: Tiles) -> Schedule:
                requested = partial(request_of, tiles=tiles)
                return best_schedule(wish, size, Mesh.of(self.mesh), self.axis, requested, limited, seconds).schedule

            with allowance.searching():
                try:
                    return asdict(best(self.tiles))
                except (InfeasibleError, PipelineError):
                    if not limited or self.request.tiles.loss is not None:
                        raise
                    with suppress(InfeasibleError, PipelineError):
                        return asdict(best(self._fitting))
                    raise

        if self.schedule is None:
            self.count_copies(arguments, 1)
            self.allowance = allowance = Allowance.from_now(self.request.settings.search.time_limit)
            self.schedule = Schedule(**from_first_rank(choice, self.mesh))
        return self.schedule.num_microbatches

    def prepare(self, arguments: Arguments, training: bool, frozen: frozenset[str] | None) -> Pipeline:
        """Capture, plan and cut, rewrite this rank's stages, for micro-batches such as these; what is returned runs."""
        allowance, self.allowance = self.allowance or Allowance.from_now(self.request.settings.search.time_limit), None
        varying = self.module.varying
        counted = None if varying is None else self.counting.of(arguments, training, varying.buckets)

        def captured() -> Program:
            return on_all_ranks(
                lambda: self.capture(arguments, training, frozen), lambda found: found.summary, self.mesh, Program.lines
            )

        assert self.schedule is not None, "the schedule is chosen for the first batch"
        self.count_copies(arguments, self.schedule.num_microbatches)
        request = self._requested(captured(), arguments, self.schedule)

        def in_tiles(tiles: Tiles) -> PipelineRequest:
            return self._requested(self.capture(arguments, training, frozen, tiles), arguments, request.schedule)

        plan = self._plan(request, in_tiles, allowance)
        tiles = tiles_of_pipeline(plan, request.program, self.tiles, Mesh.of(self.stage_devices))
        if tiles != self.tiles:
            self.tiles = tiles
            request = self._requested(captured(), arguments, request.schedule)
        self.request = self.request.without_auto(plan.offloads_optimizer)  # one optimizer steps, whatever the inputs
        pipeline = _realised(request, plan, self.stage_devices, self.mesh.get_local_rank(self.axis))
        self._lay_out(pipeline)
        if varying is not None and counted is not None:
            varying.counted[pipeline] = counted
        return pipeline

    @uncollected()
    def capture(
        self, arguments: Arguments, training: bool, frozen: frozenset[str] | None, tiles: Tiles | None = None
    ) -> Program:
        """Return the program of the whole model for micro-batches such as these."""
        program = self.traced(arguments, training, frozen).program(tiles or self.tiles)
        return check_hooks(program, 1 if self.schedule is None else self.schedule.num_microbatches)

    def _requested(self, program: Program, arguments: Arguments, schedule: Schedule) -> PipelineRequest:
        """Build the planning request of a pipeline for micro-batches such as these.

        Once parameters are laid out, they keep their layouts, and no memory limit applies.
        """
        settings = self.request.settings if self.original is not None else self.request.settings.limited(None)
        return PipelineRequest.of(
            replace(self.request, settings=settings),
            program,
            Mesh.of(self.mesh),
            self.axis,
            schedule,
            layouts_of(program, arguments, self.stage_devices),
            self.storage,
            self.owners,
        )

    @property
    def _fitting(self) -> Tiles:
        """Losses in as many tiles as a limit asks for."""
        return self.tiles._replace(loss=Fitting(Mesh.of(self.stage_devices).num_devices))

    def _plan(
        self, request: PipelineRequest, in_tiles: Callable[[Tiles], PipelineRequest], allowance: Allowance
    ) -> PipelinePlan:
        """Return the plan that was given, for the first inputs, or that of the first rank."""

        num_devices = Mesh.of(self.stage_devices).num_devices

        def planned(tiles: Tiles) -> PipelinePlan:
            return self.cache.pipeline_plan(request if tiles == request.wanted.tiles else in_tiles(tiles))

        def tileable() -> bool:
            return request.program.tileable

        @uncollected()
        def solved() -> str:
            count = request.num_microbatches
            self.warned = self.warned or warn_of_batch_statistics(request.program, count)
            if self.plan is not None and self.original is not None:
                return self.plan.to_json()
            with allowance.searching():
                return pipeline_as_memory_asks(request.wanted, planned, tileable, num_devices).to_json()

        agreed = PipelinePlan.from_json(from_first_rank(solved, self.mesh))
        return replace(agreed, workload=on_device(agreed.workload, self.mesh))

    def _lay_out(self, pipeline: Pipeline) -> None:
        """Store the parameters and buffers of this rank's stages as the first plan says."""
        if self.original is None:
            return
        whole = replicated(self.stage_devices.ndim)
        self.owners.update(_owners(pipeline.programs, [slot.name for slot in self.tree.buffers]))
        mine = {name for name, stages in self.owners.items() if not pipeline.executables.keys().isdisjoint(stages)}
        self.storage.update(dict.fromkeys(self.tree.first_names, whole))
        self.storage.update(_layouts(pipeline))  # layouts of all ranks: the first rank plans for all
        original, self.original = self.original, None
        storage = Storage(
            self.stage_devices,
            self.storage,
            whole,
            lambda name: name not in self.owners or name in mine,
            lambda tensor: _of_first_rank(tensor, self.mesh, self.axis),
            self.request.precision.stores,
        )
        self.module.lay_out(storage, original)


def check_wish(wish: Wish, plan: PipelinePlan | None) -> None:
    """Raise PipelineError where a wish and a plan do not go together."""
    if plan is None:
        return
    specified = (wish.name, wish.num_microbatches, wish.chunks)
    found = (plan.schedule.name, plan.schedule.num_microbatches, plan.schedule.chunks)
    if any(a is not None and a != f for a, f in zip(specified, found, strict=True)):
        raise PipelineError(
            f"the plan is for schedule, microbatches and stages_per_rank {found}; found {specified}. "
            "Leave them out, or plan again."
        )


def pipeline_plan_of(plan: object) -> PipelinePlan | None:
    """Return the plan, which must be one of a pipeline; PipelineError where it is not."""
    if plan is None or isinstance(plan, PipelinePlan):
        return plan
    raise PipelineError(
        f"the mesh has a pipeline axis, and the plan is a {type(plan).__name__} without stages; plan again with "
        "autopar.plan on this mesh."
    )


def stage_devices(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return the devices of this rank's stages: the other axes of the mesh, or one device."""
    names = mesh.mesh_dim_names
    assert names is not None
    others = tuple(name for name in names if name != axis)
    if others:
        return mesh[others]
    if mesh.device_type not in ("cpu", "cuda"):
        raise MeshError(f"a pipeline runs on cpu or cuda devices; found {mesh.device_type}.")
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, 1), mesh_dim_names=(axis, ONE_DEVICE))[ONE_DEVICE]


def _of_first_rank(tensor: torch.Tensor, mesh: DeviceMesh, axis: str) -> torch.Tensor:
    """Return the values that the first rank of the pipeline has; a tensor without values as it is."""
    if tensor.is_meta:
        return tensor
    values = tensor.detach().to(mesh.device_type, copy=True).contiguous()
    dist.broadcast(values, group=mesh.get_group(axis), group_src=0)
    return values


def _realised(request: PipelineRequest, plan: PipelinePlan, inner: DeviceMesh, rank: int) -> Pipeline:
    blocks = blocks_of(request.program, plan.schedule.num_stages)
    named, planned = [block.name for block in blocks], [name for stage in plan.stages for name in stage.blocks]
    if named != planned:
        raise PlanError(
            f"the plan is for a model with the blocks {', '.join(planned)}; this one has {', '.join(named)}. Plan "
            "again, or load the plan that was made for this model."
        )
    programs = split(request.program, blocks, plan.starts)
    last, results = programs[-1], plan.stages[-1].plan
    result_layouts = tuple(
        results.layout_of(f"output:{number}") if isinstance(value, torch.fx.Node) else None
        for number, value in enumerate(last.output[: last.num_outputs])
    )
    summed = axes_of_sums(result_layouts, inner.mesh_dim_names or (), inner.shape)
    executables: dict[int, Executable] = {}
    for each in plan.stages:  # all ranks make the groups of all stages, as NCCL splits off a group with all of them
        join_axes(inner, sorted({axis for _, axis in each.plan.traffic} | summed))
        gathering_groups(inner, gathering_axes(each.plan))
    for stage in plan.schedule.stages_of(rank):
        program, stage_plan = programs[stage], plan.stages[stage].plan
        space, choices = stage_space(request, program, stage_plan)
        drawn = sum(is_random(node) for before in programs[:stage] for node in before.graph.nodes)
        local = rewrite(space, choices, stage_plan.recompute, drawn)
        executables[stage] = Executable.of(program, stage_plan, local, inner)
    return Pipeline(plan, programs, executables, result_layouts)


def _check_mesh_of(plan: PipelinePlan | None, mesh: Mesh, axis: str) -> None:
    """Raise PlanError where a plan is for another mesh or another axis of it."""
    if plan is not None and (dict(plan.mesh.axes), plan.axis) != (dict(mesh.axes), axis):
        raise PlanError(
            f"the plan is for the mesh {plan.mesh} with the pipeline {plan.axis}, this mesh is {mesh} with the "
            f"pipeline {axis}; plan again, or load the plan that was made for this mesh."
        )


def _layouts(pipeline: Pipeline) -> dict[str, Layout]:
    """Map each parameter to the layout in which its stage stores it."""
    found: dict[str, Layout] = {}
    for program, stage in zip(pipeline.programs, pipeline.plan.stages, strict=True):
        for name, layout in stored_layouts(program, stage.plan).items():
            found.setdefault(name, layout)
    return found


def _owners(programs: tuple[Program, ...], buffers: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Map each parameter or buffer to the stages that use it.

    A buffer that no stage uses yet, as the counter of a batch norm in evaluation, belongs to those of its module.
    """
    found: dict[str, tuple[int, ...]] = {}
    for stage, program in enumerate(programs):
        for name in (*program.parameters, *program.buffers):
            found[name] = (*found.get(name, ()), stage)
    of_module = {name.rpartition(".")[0]: stages for name, stages in found.items()}
    unused = {name: of_module.get(name.rpartition(".")[0]) for name in buffers if name not in found}
    return found | {name: stages for name, stages in unused.items() if stages is not None}
