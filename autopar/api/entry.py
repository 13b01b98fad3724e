"""Public functions `compile` and `plan`, which read their options into one request and pass it on."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.api.option_types import Forward, InOnePiece, InStages, OnAnyMesh, Training
from autopar.compiler.arguments import (
    ExampleInputs,
    Run,
    check_in_one_piece,
    check_mesh,
    check_one_decides,
    defaults,
    example_arguments,
    plan_request,
)
from autopar.compiler.inference.inference_module import InferenceModule
from autopar.compiler.offline import plan_offline
from autopar.compiler.options import check_options
from autopar.compiler.pipelined import compile_pipeline
from autopar.compiler.whole import compile_whole
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.request import pipeline_axis
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.runtime.pipeline.pipeline_module import PipelineModule
from autopar.runtime.ranks.options import agree_on_options


@overload
def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    plan: Plan | PipelinePlan | None = None,
    run: Run | None = None,
    **options: Unpack[InStages],
) -> PipelineModule: ...
@overload
def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    plan: Plan | PipelinePlan | None = None,
    run: Run | None = None,
    **options: Unpack[Forward],
) -> InferenceModule: ...
@overload
def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    plan: Plan | PipelinePlan | None = None,
    run: Run | None = None,
    **options: Unpack[Training],
) -> ParallelModule: ...
def compile(  # noqa: D417 - its options are listed one by one
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs | None = None,
    *,
    plan: Plan | PipelinePlan | None = None,
    run: Run | None = None,
    **options: Any,
) -> ParallelModule | PipelineModule:
    """Parallelize `model` over `mesh`: capture it, plan a layout for every operation, rewrite it, and run it there.

    Parameters keep their names. If the first plan (on a pipeline, of all stages) stores each parameter whole on every
    rank, all of them are plain tensors; otherwise all of them are DTensors. Later plans keep to that storage.

    Args:
        model: any module that `torch.export` can trace; its parameters may be on the meta device.
        mesh: a DeviceMesh with axis names, over ranks of an initialised process group.
        example_inputs: positional inputs (a tuple) or keyword inputs (a dict) of the global batch; only shapes and
            dtypes count. Without them the model is planned on its first call.
        strategy: name of a preset, as "zero3" or "megatron" (autopar/strategies/presets), or several, as "fsdp+tp+cp".
            The model's own annotations take precedence.
        plan: a plan made before; nothing is solved.
        mode: "auto" (the solver decides; pins hold), "semi_auto" (the same, and every annotation must match
            something), "manual" (nothing is searched: what is not annotated follows its input, or
            is data parallel on axes that annotations leave alone).
        memory: an `autopar.Memory`: the limit per device, recomputation, prefetch, offload, tiles. "80GB" is the limit.
        precision: "bf16-mixed" (parameters and the sums of gradients in float32, compute in bfloat16), "fp16-mixed",
            "bf16", or an `autopar.Precision` (docs/how-to/precision.md). By default dtypes are those of the model.
        optimizer: the optimizer whose state and step are planned for: "adamw", "sgd", "adamw-8bit", "muon", "galore" or
            "none", or an `autopar.Optimizer`, which says GaLore's rank, and whether it has float32 master copies.
        hardware: name or path of a hardware profile, or a `Hardware`.
        inputs: the batch that each rank is called with: the "whole" batch, its own part of it ("local", as
            DistributedSampler gives), or the names of the axes over which ranks have different parts; example_inputs
            are the same.
        outputs: "plain" (plain tensors of the samples that the rank was called with, which a loss outside the module
            takes as on one process; if the model computes a loss, moved when first used), "dtensor" (DTensors in the
            layouts of the plan) or "full" (plain tensors of all samples, whatever `inputs` says).
        microbatches: number of parts into which `train_step` splits a batch; the plan is for one of them. By default
            one, or as many as suit a pipeline.
        training: False plans and runs the forward alone, in evaluation mode: no gradients, no optimizer, nothing saved
            for a backward. A language model of transformers can `generate` then, with a cache
            (docs/how-to/inference.md).
        pipeline: an `autopar.Pipeline`: the mesh axis, the schedule, the stages. "pp" is the axis.
        experts: an `autopar.Experts`: the capacity of experts, and how unequal their rows are.
        search: an `autopar.Search`: the time limit, the optimality gap, the solver, the cache of plans.
        capture: an `autopar.Capture`: branches that are assumed, and static arguments.
        run: an `autopar.Run`: the seed, checks of inputs, buckets of lengths.

    Raises:
        PeerError: an option differs between ranks; every rank raises it.
        CaptureError, AnnotationError, MeshError, PlanError, InfeasibleError, InputError: see their messages.
    """
    check_mesh(mesh)
    agree_on_options("compile", {**defaults(), "plan": plan, "run": run, **options}, mesh)
    check_one_decides(plan, options.get("strategy"))
    check_options({"plan": plan})
    running, request = Run.of(run), plan_request(model, **options)
    abstract = Mesh.of(mesh)
    request = request.on(abstract)  # a profile that is not known is refused at once, not at the first call
    axis = pipeline_axis(abstract, request.pipeline.axis)
    check_in_one_piece(request, axis)
    if axis is None:
        kind = ParallelModule if request.training else InferenceModule
        module = compile_whole(model, mesh, request, running, plan, kind)
        if isinstance(module, InferenceModule):
            module.request = request
    else:
        module = compile_pipeline(model, mesh, axis, request, running, plan)
    if example_inputs is not None:
        module.prepare(*example_arguments(example_inputs))
    return module


@overload
def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    example_inputs: ExampleInputs,
    *,
    devices: int | None = None,
    run: Run | None = None,
    **options: Unpack[InStages],
) -> PipelinePlan: ...
@overload
def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    example_inputs: ExampleInputs,
    *,
    devices: int | None = None,
    run: Run | None = None,
    **options: Unpack[InOnePiece],
) -> Plan: ...
@overload
def plan(
    model: nn.Module,
    mesh: Literal["auto"],
    example_inputs: ExampleInputs,
    *,
    devices: int | None,
    run: Run | None = None,
    **options: Unpack[OnAnyMesh],
) -> Plan | PipelinePlan: ...
def plan(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | Literal["auto"],
    example_inputs: ExampleInputs,
    *,
    devices: int | None = None,
    run: Run | None = None,
    **options: Any,
) -> Plan | PipelinePlan:
    """Plan without running: needs no process group and no devices; see `compile` for the options.

    Of `run` only `cuda_graph` and `deterministic` count: the plan has the copies of inputs that a graph needs, and what
    `compile` would refuse with these options is refused.

    With mesh="auto" the best plan is returned of all ways to arrange `devices` in up to `Search(max_axes=…)` axes. With
    `pipeline` the name of an axis, pipelines of every length outside of these are compared, too, as they are if a
    memory limit leaves nothing else. On a mesh with a pipeline axis the plan is a `PipelinePlan`. No plan is taken from
    `Search(cache=…)` while meshes are compared.

    >>> plan(model, Mesh({"dp": 8, "tp": 8}, hardware="h100"), (ids, labels))  # doctest: +SKIP
    >>> plan(model, "auto", (ids, labels), devices=64, hardware="h100", memory="80GB")  # doctest: +SKIP
    >>> plan(model, Mesh({"pp": 4, "tp": 8}, hardware="h100"), (ids, labels), microbatches=16)  # doctest: +SKIP
    """
    return plan_offline(model, mesh, example_inputs, plan_request(model, **options), devices, Run.of(run))
