"""Public functions `compile` and `plan`, which read their options into one request and pass it on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, Unpack, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.api.option_types import (
    ForwardOptions,
    MeshSearchOptions,
    PipelineOptions,
    PipelinePlanOptions,
    PlanOptions,
    TrainingOptions,
)
from autopar.capture.tiles.mlp import MlpTiles
from autopar.capture.tiles.tiled_losses import LossTiles
from autopar.compiler.arguments import (
    ExampleInputs,
    Prefetch,
    Recompute,
    RunOptions,
    Solver,
    check_in_one_piece,
    check_mesh,
    check_one_decides,
    example_arguments,
    plan_request,
)
from autopar.compiler.inference.inference_module import InferenceModule
from autopar.compiler.offline import plan_offline
from autopar.compiler.options import check_options
from autopar.compiler.pipelined import compile_pipeline
from autopar.compiler.plan_cache import PlanCache
from autopar.compiler.whole import compile_whole
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.space.returned import Outputs
from autopar.ir.program.precision import Precision
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.pins import Mode
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.request import pipeline_axis
from autopar.planning.request import Inputs, Offloaded
from autopar.planning.settings import TIME_LIMIT
from autopar.runtime.lengths.length_buckets import Buckets
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from autopar.runtime.ranks.options import agree_on_options


@overload
def compile(
    model: nn.Module, mesh: DeviceMesh, example_inputs: ExampleInputs | None = None, **options: Unpack[PipelineOptions]
) -> PipelineModule: ...
@overload
def compile(
    model: nn.Module, mesh: DeviceMesh, example_inputs: ExampleInputs | None = None, **options: Unpack[ForwardOptions]
) -> InferenceModule: ...
@overload
def compile(
    model: nn.Module, mesh: DeviceMesh, example_inputs: ExampleInputs | None = None, **options: Unpack[TrainingOptions]
) -> ParallelModule: ...
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
    optimizer: str | Optimizer = "adamw",
    master_copies: bool = False,
    inputs: Inputs = "whole",
    outputs: Outputs = "plain",
    hardware: str | Hardware | None = None,
    solver: Solver = "auto",
    time_limit: float = TIME_LIMIT,
    gap: float | None = None,
    deterministic: bool = False,
    seed: int | None = None,
    check_inputs: bool | None = None,
    microbatches: int | None = None,
    pipeline: str | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    stages: Sequence[str] | None = None,
    assume: Sequence[str] | None = None,
    static_argnames: Sequence[str] | None = None,
    capacity_factor: float | None = None,
    loss_tiles: LossTiles = None,
    mlp_tiles: MlpTiles = None,
    weight_tiles: bool = False,
    imbalance: float = 1.0,
    precision: str | Precision | None = None,
    prefetch: Prefetch = "auto",
    offload: Offloaded = "none",
    host_memory: str | int | None = None,
    memory_conventions: str | MemoryConventions = "autopar",
    buckets: Buckets | Literal["auto"] | None = None,
    plan_cache: str | os.PathLike[str] | None = None,
    training: bool = True,
) -> ParallelModule | PipelineModule:
    """Parallelize `model` over `mesh`: capture it, plan a layout for every operation, rewrite it, and run it there.

    Parameters keep their names. They are plain tensors where the first plan (on a pipeline, of all stages) stores every
    one of them whole on each rank, and DTensors, all of them, where it splits one; later plans keep to that storage.

    Args:
        model: any module that `torch.export` can trace; its parameters may be on the meta device.
        mesh: a DeviceMesh with axis names, over ranks of an initialised process group.
        example_inputs: positional inputs (a tuple) or keyword inputs (a dict) of the global batch; only shapes and
            dtypes count. Without them the model is planned on its first call.
        mode: "auto" (the solver decides; pins hold), "semi_auto" (the same, and every annotation must match
            something), "manual" (nothing is searched: what is not annotated follows its input, or
            is data parallel on axes that annotations leave alone).
        strategy: name of a preset, as "zero3" or "megatron" (autopar/strategies/presets), or several, as "fsdp+tp+cp":
            their annotations are added to the model's own, before which they give way.
        plan: a plan made before; nothing is solved.
        memory: hard limit per device at every moment of a step, in bytes or as text ("8GB").
        recompute: "auto" (layers are computed again in the backward where the limit asks for it), or one of "none",
            "selective" (saves products, attention and results of reductions), "full_save_collectives" (saves results
            of collectives alone) and "full" (saves a layer's inputs; its collectives run again) for every layer.
        optimizer: whose state and step are planned for: "adamw", "sgd", "adamw-8bit", "muon", "galore" or "none", or an
            `autopar.Optimizer`, which says GaLore's rank and which parameters are matrices.
        master_copies: plan for float32 copies of parameters of lower precision.
        inputs: what each rank is called with: the "whole" batch, its own part of it ("local", as DistributedSampler
            gives), or the names of the axes over which ranks have different parts; example_inputs are the same.
        outputs: "plain" (plain tensors of the samples that the rank was called with, which a loss outside the module
            takes as on one process; if the model computes the loss, other outputs are moved when first used), "dtensor"
            (DTensors in the layouts of the plan) or "full" (plain tensors of all samples, whatever `inputs` says).
        hardware: name or path of a hardware profile, or a `Hardware`.
        solver: "auto" or "ilp" (the plain reference ILP).
        time_limit: seconds, capture included, after which the best plan found so far is returned, with its bound and a
            warning; TimeLimitError where there is none. All stages of a pipeline have them together, and all meshes of
            "auto".
        gap: relative optimality gap at which the search may stop, under a memory limit or at a treewidth too high for
            elimination. By default 0.1%, and only if the search takes long; 0 continues until the optimum is proven or
            the time is over.
        deterministic: random numbers equal to one device's, at the price of drawing whole tensors.
        check_inputs: compare the values of inputs that ranks must hold alike: in every call (True), never (False), or
            in the first, second, tenth, hundredth … call of a kind.
        seed: of random numbers (dropout and the like); by default rank 0's `torch.initial_seed()`.
        microbatches: into how many parts `train_step` splits a batch; the plan is for one of them. By default one, or
            as many as suit a pipeline.
        pipeline: the mesh axis whose ranks run stages of the model one after the other; an axis called "pp" is taken by
            itself.
        schedule: of the pipeline: "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev",
            "pipedream" or "pipedream_2bw"; by default the one with the shortest predicted step of those that compute
            the gradients of gradient accumulation.
        chunks: stages per rank; by default as few as the schedule takes.
        stages: modules with which the second and later stages begin; by default the cuts of the shortest step.
        assume: branches on the values of tensors that capture need not follow, as a CaptureError names them: a check
            that is taken to pass by its line ("model.py:12"), another with the value it tests ("model.py:88=False").
        static_argnames: arguments of forward whose tensors decide sizes by their values, such as ["image_grid_thw"]:
            the values are constants of the graph, and a call with other values is captured and planned anew
            (docs/training.md).
        capacity_factor: sorted experts take at most so many times the rows of each sample that balanced routing gives
            them, the earliest; further rows are dropped (docs/experts.md). By default no row is.
        loss_tiles: into how many tiles of rows the cross-entropy of a linear layer is taken, so that all logits are
            never there at once (docs/long-sequences.md); "auto": as many as the plan chooses; False: it is not. By
            default it is where `memory` asks for it and the loss alone is read, but not on a mesh with a pipeline.
        mlp_tiles: into how many tiles of rows MLPs are taken, of which nothing hidden is kept then, but computed again
            (docs/long-sequences.md); "auto": where `memory` asks for it, not on a mesh with a pipeline. By default they
            are not.
        weight_tiles: products may gather a weight a tile at a time, forward and backward, so that it is never whole
            (docs/memory.md), where `memory` asks for it.
        imbalance: how many times its share of the rows of experts the busiest device is planned for, where a plan
            divides these by expert; 1.0 for routing that is balanced.
        precision: "bf16-mixed" (parameters and the sums of gradients in float32, compute in bfloat16), "fp16-mixed",
            "bf16", or an `autopar.Precision` (docs/precision.md). By default dtypes are those of the model.
        prefetch: how many layers ahead of their use weights that are stored in parts are gathered, forward and backward
            (docs/memory.md): 0, 1 or 2, whose memory counts; "auto": 1, but 0 where `memory` leaves no room for it.
        offload: "optimizer": plan for AdamW's state and master copies on the host, where it steps, too, by
            `autopar.optim.OffloadedAdamW` (docs/offload.md); "activations": what layers save for their backward is
            copied there and back, where `memory` asks for it, or always; "both"; "auto": either where `memory` asks for
            it. `model.plan.offload` says what was chosen.
        host_memory: hard limit of what is offloaded to one host by all of its devices, in bytes or as text ("512GB");
            by default what the hardware profile says a host has.
        memory_conventions: what counts as memory of a device besides tensors (docs/memory.md): "autopar", what its
            runtime holds there; "tensors", nothing; "megatron" or "deepspeed", for comparisons with these; or an
            `autopar.MemoryConventions`.
        buckets: lengths and batch sizes to which inputs are padded, so that a new one is not planned anew: an
            `autopar.Buckets` (docs/training.md), or "auto" for powers of two and the names that transformers uses. By
            default inputs are taken as they are.
        plan_cache: a folder in which plans are stored, so that a repeated request with equal options is not
            solved again; by default the folder that the environment variable AUTOPAR_PLAN_CACHE names, or none.
        training: False plans and runs the forward alone, in evaluation mode: no gradients, no optimizer, nothing kept
            for a backward. A language model of transformers can `generate` then, with a cache (docs/inference.md).

    Raises:
        PeerError: an option differs between ranks; every rank raises it.
        CaptureError, AnnotationError, MeshError, PlanError, InfeasibleError, InputError: see their messages.
    """
    given = locals()
    check_mesh(mesh)
    agree_on_options(compile, given, mesh)
    check_one_decides(plan, strategy)
    check_options({"buckets": buckets, "plan_cache": plan_cache})
    run = RunOptions(plan, deterministic, seed, check_inputs, Buckets.of(buckets))
    request = plan_request(
        model,
        mode=mode,
        strategy=strategy,
        memory=memory,
        recompute=recompute,
        optimizer=optimizer,
        master_copies=master_copies,
        inputs=inputs,
        outputs=outputs,
        hardware=hardware,
        solver=solver,
        time_limit=time_limit,
        gap=gap,
        microbatches=microbatches,
        pipeline=pipeline,
        schedule=schedule,
        chunks=chunks,
        stages=stages,
        assume=assume,
        static_argnames=static_argnames,
        capacity_factor=capacity_factor,
        loss_tiles=loss_tiles,
        mlp_tiles=mlp_tiles,
        weight_tiles=weight_tiles,
        imbalance=imbalance,
        precision=precision,
        prefetch=prefetch,
        offload=offload,
        host_memory=host_memory,
        memory_conventions=memory_conventions,
        training=training,
    )
    abstract = Mesh.of(mesh)
    request = request.on(abstract)  # a profile that is not known is refused at once, not at the first call
    axis = pipeline_axis(abstract, pipeline)
    check_in_one_piece(request, axis)
    if axis is None:
        kind = ParallelModule if training else InferenceModule
        module = compile_whole(model, mesh, request, run, PlanCache.of(plan_cache), kind)
        if isinstance(module, InferenceModule):
            module.request = request
    else:
        module = compile_pipeline(model, mesh, axis, request, run, PlanCache.of(plan_cache))
    if example_inputs is not None:
        module.prepare(*example_arguments(example_inputs))
    return module


@overload
def plan(
    model: nn.Module, mesh: Mesh | DeviceMesh, example_inputs: ExampleInputs, **options: Unpack[PipelinePlanOptions]
) -> PipelinePlan: ...
@overload
def plan(
    model: nn.Module, mesh: Mesh | DeviceMesh, example_inputs: ExampleInputs, **options: Unpack[PlanOptions]
) -> Plan: ...
@overload
def plan(
    model: nn.Module, mesh: Literal["auto"], example_inputs: ExampleInputs, **options: Unpack[MeshSearchOptions]
) -> Plan | PipelinePlan: ...
def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | Literal["auto"],
    example_inputs: ExampleInputs,
    *,
    devices: int | None = None,
    max_axes: int | None = None,
    mode: Mode = "auto",
    strategy: str | None = None,
    memory: str | int | None = None,
    recompute: Recompute = "auto",
    optimizer: str | Optimizer = "adamw",
    master_copies: bool = False,
    inputs: Inputs = "whole",
    outputs: Outputs = "plain",
    hardware: str | Hardware | None = None,
    solver: Solver = "auto",
    time_limit: float = TIME_LIMIT,
    gap: float | None = None,
    microbatches: int | None = None,
    pipeline: str | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    stages: Sequence[str] | None = None,
    assume: Sequence[str] | None = None,
    static_argnames: Sequence[str] | None = None,
    capacity_factor: float | None = None,
    loss_tiles: LossTiles = None,
    mlp_tiles: MlpTiles = None,
    weight_tiles: bool = False,
    imbalance: float = 1.0,
    precision: str | Precision | None = None,
    prefetch: Prefetch = "auto",
    offload: Offloaded = "none",
    host_memory: str | int | None = None,
    memory_conventions: str | MemoryConventions = "autopar",
    plan_cache: str | os.PathLike[str] | None = None,
    training: bool = True,
) -> Plan | PipelinePlan:
    """Plan without running: needs no process group and no devices; see `compile` for the other arguments.

    With mesh="auto" the best plan of all arrangements of `devices` in up to `max_axes` axes is returned (2, or 3 where
    the model has experts or the batch fewer samples than devices); with `pipeline` the name of an axis, pipelines of
    every length outside of these are compared, too, as they are where a memory limit leaves nothing else.
    On a mesh with a pipeline axis the plan is a `PipelinePlan`. `plan_cache` is not used if meshes are compared.

    >>> plan(model, Mesh({"dp": 8, "tp": 8}, hardware="h100"), (ids, labels))  # doctest: +SKIP
    >>> plan(model, "auto", (ids, labels), devices=64, hardware="h100", memory="80GB")  # doctest: +SKIP
    >>> plan(model, Mesh({"pp": 4, "tp": 8}, hardware="h100"), (ids, labels), microbatches=16)  # doctest: +SKIP
    """
    check_options({"plan_cache": plan_cache})
    request = plan_request(
        model,
        mode=mode,
        strategy=strategy,
        memory=memory,
        recompute=recompute,
        optimizer=optimizer,
        master_copies=master_copies,
        inputs=inputs,
        outputs=outputs,
        hardware=hardware,
        solver=solver,
        time_limit=time_limit,
        gap=gap,
        microbatches=microbatches,
        pipeline=pipeline,
        schedule=schedule,
        chunks=chunks,
        stages=stages,
        assume=assume,
        static_argnames=static_argnames,
        capacity_factor=capacity_factor,
        loss_tiles=loss_tiles,
        mlp_tiles=mlp_tiles,
        weight_tiles=weight_tiles,
        imbalance=imbalance,
        precision=precision,
        prefetch=prefetch,
        offload=offload,
        host_memory=host_memory,
        memory_conventions=memory_conventions,
        training=training,
    )
    return plan_offline(model, mesh, example_inputs, request, devices, max_axes, PlanCache.of(plan_cache))
