"""What users call: `compile` reads top-down: capture, plan, rewrite, run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.annotations.annotate import Annotation, annotations_of, pins_of
from autopar.capture.export import capture, skeleton
from autopar.capture.normalize import rehome
from autopar.compiler.garbage_collection import uncollected
from autopar.compiler.pipelined import PipelineOptions, compile_pipeline, pipeline_plan
from autopar.cost.optimizer import Optimizer
from autopar.errors import InputError, MeshError, PipelineError
from autopar.hardware.profile import Hardware, load
from autopar.memory.microbatches import Microbatches
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.planner import plan_pipeline
from autopar.pipeline.request import PipelineRequest, pipeline_axis, stage_mesh
from autopar.pipeline.schedule_search import Wish, best_schedule
from autopar.pipeline.schedules.schedule import Schedule
from autopar.planning.mesh_search import best_mesh
from autopar.planning.planner import PlanContext, Settings, choices_of, make_plan
from autopar.plans.plan import Plan
from autopar.program.program import Program
from autopar.progress import stages as progress
from autopar.runtime.module.batches import batch_size, split_batch
from autopar.runtime.module.executable import Executable
from autopar.runtime.module.inputs import Arguments, canonical_arguments, layouts_of, without_placements
from autopar.runtime.module.module import ParallelModule
from autopar.runtime.module.parameters import attach
from autopar.runtime.pipeline.module import PipelineModule
from autopar.runtime.ranks.agreement import from_first_rank, on_all_ranks
from autopar.runtime.rewrite.rewrite import rewrite
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.mesh import Mesh
from autopar.space.build import build_space
from autopar.space.space import Space
from autopar.strategies.presets import annotations_for
from autopar.units import parse_bytes

Mode = Literal["auto", "semi_auto", "manual"]
Recompute = Literal["auto", "none", "selective", "full"]
ExampleInputs = tuple[Any, ...] | Mapping[str, Any]


def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    mode: Mode = "auto",
    strategy: str | None = None,
    plan: Plan | PipelinePlan | None = None,
    memory: str | int | None = None,
    recompute: Recompute = "auto",
    optimizer: str = "adamw",
    master_copies: bool = False,
    outputs: Literal["dtensor", "full"] = "dtensor",
    hardware: str | Hardware | None = None,
    solver: Literal["auto", "ilp"] = "auto",
    deterministic: bool = False,
    seed: int | None = None,
    microbatches: int | None = None,
    pipeline: str | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    stages: Sequence[str] | None = None,
) -> ParallelModule | Any:  # a PipelineModule where the mesh has a pipeline; Any spares all others a check
    """Parallelize `model` over `mesh`: capture it, plan a layout for every operation, rewrite it, and run it there.

    Parameters keep their names. They are plain tensors where the first plan (on a pipeline, of all stages) stores every
    one of them whole on each rank, and DTensors, all of them, where it splits one; later plans keep to that storage.

    Args:
        model: any module that `torch.export` can trace; its parameters may be on the meta device.
        mesh: a DeviceMesh with axis names, over ranks of an initialised process group.
        example_inputs: positional inputs (a tuple) or keyword inputs (a dict) of the global batch; only shapes and
            dtypes count. Without them the model is planned on its first call.
        mode: "auto" (the solver decides; pins hold), "semi_auto" (the same, and every annotation must match
            something), "manual" (what is not annotated is data parallel).
        strategy: name of a preset, as "zero3" or "megatron" (autopar/strategies/presets): its annotations are added to
            the model's own, before which they give way.
        plan: a plan made before; nothing is solved.
        memory: hard limit per device at every moment of a step, in bytes or as text ("8GB").
        recompute: "auto" (layers are computed again in the backward where the limit asks for it), or one of "none",
            "selective" (all but contractions) and "full" for every layer.
        optimizer: whose state and step are planned for: "adamw", "sgd", "adamw-8bit" or "none".
        master_copies: plan for float32 copies of parameters of lower precision.
        outputs: "dtensor" or "full": how tensors that are no scalars come back.
        hardware: name or path of a hardware profile, or a `Hardware`.
        solver: "auto" or "ilp" (the plain reference ILP).
        deterministic: dropout equal to one device's, at the price of drawing whole masks.
        seed: of dropout; by default rank 0's `torch.initial_seed()`.
        microbatches: into how many parts `train_step` splits a batch; the plan is for one of them. By default one, or
            as many as suit a pipeline.
        pipeline: the mesh axis whose ranks run stages of the model one after the other; an axis called "pp" is taken by
            itself.
        schedule: of the pipeline: "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev" or
            "pipedream"; by default the one with the shortest predicted step.
        chunks: stages per rank; by default as few as the schedule takes.
        stages: modules with which the second and later stages begin; by default the cuts of the shortest step.

    Raises:
        CaptureError, AnnotationError, MeshError, PlanError, InfeasibleError, InputError: see their messages.
    """
    _check_mesh(mesh)
    _check_options(mode, outputs, solver)
    if plan is not None and strategy is not None:
        raise InputError(f"strategy={strategy!r} beside a plan, which has decided everything; give one of them.")
    abstract = Mesh.of(mesh)
    profile = profile_of(hardware, abstract)
    limit = None if memory is None else parse_bytes(memory)
    trained_by = Optimizer(optimizer, master_copies)
    annotations = annotations_of(model)
    axis, count = pipeline_axis(abstract, pipeline), microbatches or 1
    if axis is not None:
        return _on_pipeline(
            model,
            mesh,
            example_inputs,
            PipelineOptions(
                axis,
                Wish(schedule, microbatches, chunks),
                None if stages is None else tuple(stages),
                lambda program, inner: _with_preset(annotations, strategy, program, inner),
                mode,
                Settings(limit, recompute, solver),
                trained_by,
                profile,
                outputs,
                deterministic,
                seed,
                pipeline_plan(plan),
            ),
        )
    _check_no_pipeline(schedule, chunks, stages, annotations, abstract)
    if isinstance(plan, PipelinePlan):
        raise PipelineError(f"the plan is for the mesh {plan.mesh}, with a pipeline; this mesh is {abstract}.")
    traced = skeleton(model)
    signature = inspect.signature(model.forward)
    training = model.training
    storage: dict[str, Layout] = {}
    originals = [model]

    def prepare(arguments: Arguments, training: bool, frozen: frozenset[str] | None) -> Executable:
        if frozen is not None:
            for name, parameter in traced.named_parameters():
                parameter.requires_grad_(name not in frozen)

        @uncollected()
        def captured() -> Space:
            program = capture(traced, *without_placements(arguments), training=training)
            rehome(program.graph, torch.device(mesh.device_type))
            layouts = layouts_of(program, arguments, mesh)
            return build_space(program, abstract, profile, outputs == "full", layouts, trained_by)

        space = on_all_ranks(captured, lambda space: space.program.summary, mesh)

        contexts: list[PlanContext] = []

        @uncollected()
        def solved() -> str:
            if plan is not None and originals:
                return plan.to_json()
            said = _with_preset(annotations, strategy, space.program, abstract)
            pins = pins_of(said, space, mode, storage)
            made, _ = make_plan(space, pins, limit, solver, recompute=recompute, microbatches=Microbatches(count))
            contexts.append(replace(made.context, annotations=said, mode=mode))
            return made.to_json()

        agreed = Plan.from_json(from_first_rank(solved, mesh))
        if contexts:  # the rank that solved can explain the plan
            agreed = replace(agreed, context=contexts[0])
        local = rewrite(space, choices_of(agreed, space), agreed.recompute)
        if originals:
            whole = replicated(abstract.ndim)
            storage.update({name: whole for name, _ in traced.named_parameters()})
            storage.update({name: local.layouts[node] for name, node in space.program.parameters.items()})
            # The original is let go, so that its memory is free when the caller drops it.
            attach(module, originals.pop(), storage, mesh, whole)
        return Executable.of(space.program, agreed, local, mesh)

    module = ParallelModule(
        signature,
        mesh,
        prepare,
        whole_outputs=outputs == "full",
        deterministic=deterministic,
        seed=from_first_rank(lambda: torch.initial_seed() if seed is None else seed, mesh),
        num_microbatches=count,
    )
    module.train(training)
    if example_inputs is not None:
        args, kwargs = example_arguments(example_inputs)
        module.prepare(args, kwargs)
    return module


def _on_pipeline(
    model: nn.Module, mesh: DeviceMesh, example_inputs: ExampleInputs | None, options: PipelineOptions
) -> PipelineModule:
    module = compile_pipeline(model, mesh, options)
    if example_inputs is not None:
        module.prepare(*example_arguments(example_inputs))
    return module


def _check_no_pipeline(
    schedule: str | None,
    chunks: int | None,
    stages: Sequence[str] | None,
    annotations: tuple[Annotation, ...],
    mesh: Mesh,
) -> None:
    """Raise PipelineError for what is said about a pipeline on a mesh without one."""
    said = {"schedule": schedule, "chunks": chunks, "stages": stages}
    said["annotate(stage=…)"] = next((each for each in annotations if each.stage is not None), None)
    for name, value in said.items():
        if value is not None:
            raise PipelineError(
                f"{name} is given ({value}), but no axis of the mesh {mesh} is a pipeline; name one, as in "
                f'pipeline="{mesh.names[0]}", or call an axis "pp".'
            )


def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | Literal["auto"],
    example_inputs: ExampleInputs,
    *,
    devices: int | None = None,
    max_axes: int = 2,
    mode: Mode = "auto",
    strategy: str | None = None,
    memory: str | int | None = None,
    recompute: Recompute = "auto",
    optimizer: str = "adamw",
    master_copies: bool = False,
    outputs: Literal["dtensor", "full"] = "dtensor",
    hardware: str | Hardware | None = None,
    solver: Literal["auto", "ilp"] = "auto",
    time_limit: float = 120.0,
    gap: float = 0.0,
    microbatches: int | None = None,
    pipeline: str | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    stages: Sequence[str] | None = None,
) -> Plan | Any:  # a PipelinePlan where the mesh has a pipeline; Any spares all others a check
    """Plan without running: needs no process group and no devices; see `compile` for the other arguments.

    With mesh="auto" every way to arrange `devices` in up to `max_axes` axes is planned, and the best plan returned.
    The plan is the best there is; under a memory limit, and where the graph is too wide for elimination, one that is
    within `gap` of the best (a share of its step) will do. After `time_limit` seconds the solver returns what it has,
    with its bound and a warning. On a mesh with a pipeline axis the plan is a `PipelinePlan`.

    >>> plan(model, Mesh({"dp": 8, "tp": 8}, hardware="h100"), (ids, labels))  # doctest: +SKIP
    >>> plan(model, "auto", (ids, labels), devices=64, hardware="h100", memory="80GB")  # doctest: +SKIP
    >>> plan(model, Mesh({"pp": 4, "tp": 8}, hardware="h100"), (ids, labels), microbatches=16)  # doctest: +SKIP
    """
    _check_options(mode, outputs, solver)
    settings = Settings(None if memory is None else parse_bytes(memory), recompute, solver, time_limit, gap)
    trained_by = Optimizer(optimizer, master_copies)
    annotations = annotations_of(model)
    batch = canonical_arguments(inspect.signature(model.forward), *example_arguments(example_inputs))
    programs: dict[int, Program] = {}

    def captured(count: int) -> Program:
        """The program of one of so many micro-batches."""
        if count not in programs:
            with progress("planning", 1) as step, uncollected():
                step("capture")
                part = split_batch(batch, count)[0]
                programs[count] = capture(skeleton(model), *part, training=model.training)
        return programs[count]

    def on(mesh: Mesh) -> Plan:
        _check_no_pipeline(schedule, chunks, stages, annotations, mesh)
        program = captured(microbatches or 1)
        with progress(f"planning on {mesh}", 2) as step:
            step("strategies and costs")
            return solved(program, mesh, step)

    @uncollected()
    def solved(program: Program, mesh: Mesh, step: Callable[[str], None]) -> Plan:
        space = build_space(program, mesh, profile_of(hardware, mesh), outputs == "full", optimizer=trained_by)
        said = _with_preset(annotations, strategy, program, mesh)
        pins = pins_of(said, space, mode, {})
        step("solving")
        runs = Microbatches(microbatches or 1)
        found, _ = make_plan(space, pins, settings.memory, solver, time_limit, recompute, gap, runs)
        return replace(found, context=replace(found.context, annotations=said, mode=mode))

    def requested(mesh: Mesh, axis: str, schedule: Schedule) -> PipelineRequest:
        program = captured(schedule.num_microbatches)
        return PipelineRequest(
            program,
            mesh,
            axis,
            profile_of(hardware, mesh),
            schedule,
            _with_preset(annotations, strategy, program, stage_mesh(mesh, axis)),
            mode,
            None if stages is None else tuple(stages),
            settings,
            trained_by,
            outputs == "full",
        )

    @uncollected()
    def in_stages(mesh: Mesh, axis: str) -> PipelinePlan:
        wish, size = Wish(schedule, microbatches, chunks), batch_size(batch)
        limited = settings.memory is not None
        chosen = best_schedule(wish, size, mesh, axis, lambda each: requested(mesh, axis, each), limited)
        return plan_pipeline(requested(mesh, axis, chosen))

    if isinstance(mesh, str):
        if pipeline is not None:
            raise PipelineError(
                f'mesh="{mesh}" arranges devices for plans without a pipeline, and pipeline="{pipeline}" is given; '
                f'give the mesh, as in Mesh({{"{pipeline}": 4, "tp": 8}}).'
            )
        return best_mesh(on, mesh, devices, hardware, max_axes)
    abstract = Mesh.of(mesh)
    axis = pipeline_axis(abstract, pipeline)
    return on(abstract) if axis is None else in_stages(abstract, axis)


def _with_preset(
    annotations: tuple[Annotation, ...], strategy: str | None, program: Program, mesh: Mesh
) -> tuple[Annotation, ...]:
    """What the user says, and what a preset adds to it."""
    return annotations if strategy is None else (*annotations, *annotations_for(strategy, program, mesh))


def profile_of(hardware: str | Hardware | None, mesh: Mesh) -> Hardware:
    return hardware if isinstance(hardware, Hardware) else load(hardware or mesh.hardware)


def _check_options(mode: str, outputs: str, solver: str) -> None:
    if mode not in ("auto", "semi_auto", "manual"):
        raise InputError(f'mode={mode!r}; modes are "auto", "semi_auto" and "manual".')
    if outputs not in ("dtensor", "full"):
        raise InputError(f'outputs={outputs!r}; outputs are "dtensor" or "full".')
    if solver not in ("auto", "ilp"):
        raise InputError(f'solver={solver!r}; solvers are "auto" and "ilp".')


def _check_mesh(mesh: object) -> None:
    if isinstance(mesh, str):
        raise MeshError(
            f'compile needs a DeviceMesh, found mesh={mesh!r}; find one with plan = autopar.plan(model, "auto", …), '
            "make it with init_device_mesh(device_type, plan.mesh.sizes, mesh_dim_names=plan.mesh.names), and compile "
            "with both: compile(model, mesh, …, plan=plan)."
        )
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"compile needs a DeviceMesh over ranks of a process group, found {type(mesh).__name__}; "
            'make one with init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).'
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the mesh, whose ranks are {mesh.mesh.flatten().tolist()}; the process "
            f"group has {dist.get_world_size()} ranks. Make a mesh of all of them, or compile on the mesh's ranks only."
        )


def example_arguments(example_inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    raise InputError(
        f"example_inputs is a {type(example_inputs).__name__}; give a tuple of positional inputs, (x,), "
        "or a dict of keyword inputs."
    )
