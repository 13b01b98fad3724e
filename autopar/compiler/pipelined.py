"""`compile` on a mesh with a pipeline axis: capture a micro-batch, plan and cut, rewrite and run this rank's stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.annotations.pins import Mode
from autopar.capture.export import capture, skeleton
from autopar.capture.normalize import rehome
from autopar.compiler.garbage_collection import uncollected
from autopar.cost.optimizer import Optimizer
from autopar.errors import MeshError, PipelineError, PlanError
from autopar.hardware.profile import Hardware
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.planner import plan_pipeline, stage_space, stored_layouts
from autopar.pipeline.request import ONE_DEVICE, PipelineRequest
from autopar.pipeline.schedule_search import Wish, best_schedule
from autopar.pipeline.schedules.schedule import Schedule
from autopar.pipeline.stages.blocks import blocks_of, is_random
from autopar.pipeline.stages.splitting import split
from autopar.planning.planner import Settings
from autopar.program.program import Program
from autopar.runtime.collectives.axes import join_axes
from autopar.runtime.module.batches import batch_size, split_batch
from autopar.runtime.module.executable import Executable
from autopar.runtime.module.inputs import Arguments, layouts_of, without_placements
from autopar.runtime.module.parameters import attach
from autopar.runtime.pipeline.executable import Pipeline
from autopar.runtime.pipeline.module import PipelineModule
from autopar.runtime.ranks.agreement import from_first_rank, on_all_ranks
from autopar.runtime.rewrite.rewrite import rewrite
from autopar.sharding.annotation import Annotation
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.mesh import Mesh

Annotate = Callable[[Program, Mesh], tuple[Annotation, ...]]
"""What is said about a program on the mesh of a stage."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What `compile` was told, for a mesh with a pipeline axis."""

    axis: str
    wish: Wish
    stages: tuple[str, ...] | None
    annotate: Annotate
    mode: Mode
    settings: Settings
    optimizer: Optimizer
    hardware: Hardware
    outputs: Literal["dtensor", "full"]
    deterministic: bool
    seed: int | None
    plan: PipelinePlan | None

    def __post_init__(self) -> None:
        check_wish(self.wish, self.plan)
        if self.deterministic:
            raise PipelineError(
                "deterministic=True draws dropout masks in the order of one device, which the stages of a pipeline do "
                "not run in; leave it out. The masks of a pipeline are equal in every run with the same seed."
            )


def compile_pipeline(model: nn.Module, mesh: DeviceMesh, options: PipelineOptions) -> PipelineModule:
    """Parallelize `model` over `mesh`, of which one axis is the pipeline; planned when the first inputs are given."""
    abstract = Mesh.of(mesh)
    _check_mesh_of(options.plan, abstract, options.axis)
    inner = stage_devices(mesh, options.axis)
    rank = mesh.get_local_rank(options.axis)
    traced = skeleton(model)
    originals = [model]
    storage: dict[str, Layout] = {}
    owners: dict[str, tuple[int, ...]] = {}
    chosen: list[Schedule] = [] if options.plan is None else [options.plan.schedule]

    @uncollected()
    def captured(arguments: Arguments, training: bool) -> Program:
        program = capture(traced, *without_placements(arguments), training=training)
        rehome(program.graph, torch.device(mesh.device_type))
        return program

    def requested(program: Program, arguments: Arguments, schedule: Schedule) -> PipelineRequest:
        return PipelineRequest(
            program,
            abstract,
            options.axis,
            options.hardware,
            schedule,
            options.annotate(program, Mesh.of(inner)),
            options.mode,
            options.stages,
            options.settings if originals else replace(options.settings, memory=None),
            options.optimizer,
            options.outputs == "full",
            layouts_of(program, arguments, inner),
            storage,
            owners,
        )

    def num_microbatches(arguments: Arguments, training: bool) -> int:
        """Of a batch; schedule and micro-batches are chosen for the first one."""

        def request_of(schedule: Schedule) -> PipelineRequest:
            part = split_batch(arguments, schedule.num_microbatches)[0]
            return requested(captured(part, training), part, schedule)

        def choice() -> dict[str, Any]:
            size, limited = batch_size(arguments), options.settings.memory is not None
            return asdict(best_schedule(options.wish, size, abstract, options.axis, request_of, limited))

        if not chosen:
            chosen.append(Schedule(**from_first_rank(choice, mesh)))
        return chosen[0].num_microbatches

    def prepare(arguments: Arguments, training: bool, frozen: frozenset[str] | None) -> Pipeline:
        if frozen is not None:
            for name, parameter in traced.named_parameters():
                parameter.requires_grad_(name not in frozen)

        program = on_all_ranks(lambda: captured(arguments, training), lambda program: program.summary, mesh)
        request = requested(program, arguments, chosen[0])

        @uncollected()
        def solved() -> str:
            if options.plan is not None and originals:
                return options.plan.to_json()
            return plan_pipeline(request).to_json()

        plan = PipelinePlan.from_json(from_first_rank(solved, mesh))
        pipeline = _realised(request, plan, inner, rank)
        if originals:
            whole = replicated(inner.ndim)
            owners.update(_owners(pipeline.programs, [name for name, _ in traced.named_buffers()]))
            mine = {name for name, stages in owners.items() if not pipeline.executables.keys().isdisjoint(stages)}
            storage.update({name: whole for name, _ in traced.named_parameters()})
            storage.update(_layouts(pipeline))  # of all ranks: the first one plans for all
            attach(
                module,
                originals.pop(),
                storage,
                inner,
                whole,
                lambda name: name not in owners or name in mine,
                lambda tensor: _of_first_rank(tensor, mesh, options.axis),
            )
        return pipeline

    module = PipelineModule(
        inspect.signature(model.forward),
        mesh,
        options.axis,
        prepare,
        num_microbatches=num_microbatches,
        whole_outputs=options.outputs == "full",
        seed=from_first_rank(lambda: torch.initial_seed() if options.seed is None else options.seed, mesh),
    )
    module.train(model.training)
    return module


def check_wish(wish: Wish, plan: PipelinePlan | None) -> None:
    """Raise PipelineError where a wish and a plan do not go together."""
    if plan is None:
        return
    asked = (wish.name, wish.num_microbatches, wish.chunks)
    found = (plan.schedule.name, plan.schedule.num_microbatches, plan.schedule.chunks)
    if any(a is not None and a != f for a, f in zip(asked, found, strict=True)):
        raise PipelineError(
            f"the plan is for schedule, microbatches and chunks {found}; found {asked} beside it. "
            "Leave them out, or plan again."
        )


def pipeline_plan(plan: object) -> PipelinePlan | None:
    """The plan, which must be one of a pipeline; PipelineError where it is not."""
    if plan is None or isinstance(plan, PipelinePlan):
        return plan
    raise PipelineError(
        f"the mesh has a pipeline axis, and the plan is a {type(plan).__name__} without stages; plan again with "
        "autopar.plan on this mesh."
    )


def stage_devices(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The devices of this rank's stages: the other axes of the mesh, or one device."""
    names = mesh.mesh_dim_names
    assert names is not None
    others = tuple(name for name in names if name != axis)
    if others:
        return mesh[others]
    if mesh.device_type not in ("cpu", "cuda"):
        raise MeshError(f"a pipeline runs on cpu or cuda devices; found {mesh.device_type}.")
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, 1), mesh_dim_names=(axis, ONE_DEVICE))[ONE_DEVICE]


def _of_first_rank(tensor: torch.Tensor, mesh: DeviceMesh, axis: str) -> torch.Tensor:
    """The values that the first rank of the pipeline has; a tensor without values as it is."""
    if tensor.is_meta:
        return tensor
    values = tensor.detach().to(mesh.device_type, copy=True).contiguous()
    dist.broadcast(values, group=mesh.get_group(axis), group_src=0)
    return values


def _realised(request: PipelineRequest, plan: PipelinePlan, inner: DeviceMesh, rank: int) -> Pipeline:
    """This rank's stages of a plan."""
    blocks = blocks_of(request.program, plan.schedule.num_stages)
    named, planned = [block.name for block in blocks], [name for stage in plan.stages for name in stage.blocks]
    if named != planned:
        raise PlanError(
            f"the plan is for a model with the blocks {', '.join(planned)}; this one has {', '.join(named)}. Plan "
            "again, or load the plan that was made for this model."
        )
    programs = split(request.program, blocks, plan.starts)
    executables: dict[int, Executable] = {}
    for each in plan.stages:  # all ranks make the groups of all stages, as NCCL splits off a group with all of them
        join_axes(inner, sorted({axis for _, axis in each.plan.traffic}))
    for stage in plan.schedule.stages_of(rank):
        program, stage_plan = programs[stage], plan.stages[stage].plan
        space, choices = stage_space(request, program, stage_plan)
        drawn = sum(is_random(node) for before in programs[:stage] for node in before.graph.nodes)
        local = rewrite(space, choices, stage_plan.recompute, drawn)
        executables[stage] = Executable.of(program, stage_plan, local, inner)
    last, results = programs[-1], plan.stages[-1].plan
    result_layouts = tuple(
        Layout.parse(results.choices[f"output:{number}"]) if isinstance(value, torch.fx.Node) else None
        for number, value in enumerate(last.output[: last.num_outputs])
    )
    return Pipeline(plan, programs, executables, result_layouts)


def _check_mesh_of(plan: PipelinePlan | None, mesh: Mesh, axis: str) -> None:
    """Raise PlanError where a plan is for another mesh or another axis of it."""
    if plan is not None and (dict(plan.mesh.axes), plan.axis) != (dict(mesh.axes), axis):
        raise PlanError(
            f"the plan is for the mesh {plan.mesh} with the pipeline {plan.axis}, this mesh is {mesh} with the "
            f"pipeline {axis}; plan again, or load the plan that was made for this mesh."
        )


def _layouts(pipeline: Pipeline) -> dict[str, Layout]:
    """Parameter → the layout in which it is stored, on whichever stage it is."""
    found: dict[str, Layout] = {}
    for program, stage in zip(pipeline.programs, pipeline.plan.stages, strict=True):
        for name, layout in stored_layouts(program, stage.plan).items():
            found.setdefault(name, layout)
    return found


def _owners(programs: tuple[Program, ...], buffers: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Parameter or buffer → the stages that use it.

    A buffer that no stage uses yet, as the counter of a batch norm in evaluation, belongs to those of its module.
    """
    found: dict[str, tuple[int, ...]] = {}
    for stage, program in enumerate(programs):
        for name in (*program.parameters, *program.buffers):
            found[name] = (*found.get(name, ()), stage)
    of_module = {name.rpartition(".")[0]: stages for name, stages in found.items()}
    unused = {name: of_module.get(name.rpartition(".")[0]) for name in buffers if name not in found}
    return found | {name: stages for name, stages in unused.items() if stages is not None}
