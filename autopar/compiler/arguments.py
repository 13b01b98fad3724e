"""Arguments of `compile`, `plan` and `attach`, read and checked before anything is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.assumptions import assumptions_of
from autopar.capture.static.arguments import static_argnames_of
from autopar.capture.tiles.mlp import MlpTiles
from autopar.capture.tiles.tiled_losses import AUTO, LossTiles
from autopar.compiler.options import check_example_inputs, check_model, check_options
from autopar.console.units import parse_bytes
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.plan import Plan
from autopar.costs.plans.workload import Workload
from autopar.costs.pricing.conventions import MemoryConventions
from autopar.costs.pricing.optimizer import Optimizer
from autopar.costs.space.returned import Outputs
from autopar.errors import CaptureError, InputError, MeshError, PipelineError
from autopar.ir.program.precision import Precision, precision_of
from autopar.ir.program.program import Program
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotations_of
from autopar.planning.annotations.pins import Mode
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.schedule import HALVING
from autopar.planning.request import Inputs, Offloaded, PlanRequest
from autopar.planning.settings import TIME_LIMIT, Settings
from autopar.runtime.lengths.length_buckets import Buckets
from autopar.strategies.presets import preset_named
from autopar.strategies.presets.data import OF_TRAINING, parts_named

Recompute = Literal["auto", "none", "selective", "full_save_collectives", "full"]
Solver = Literal["auto", "ilp"]
Prefetch = Literal["auto", 0, 1, 2]
ExampleInputs = tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options for running a compiled module, besides its plan; `plan` is one that was made before."""

    plan: Plan | PipelinePlan | None = None
    deterministic: bool = False
    seed: int | None = None
    check_inputs: bool | None = None
    buckets: Buckets | None = None
    """Sizes to which inputs are padded; None for no padding."""

    def __post_init__(self) -> None:
        check_options({each.name: getattr(self, each.name) for each in fields(self)})


def plan_request(
    model: nn.Module,
    *,
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
    training: bool = True,
) -> PlanRequest:
    """Return the options of `compile` and `plan`, with the model's annotations, as one value.

    Raises InputError for an option that is not of its kind, or does not apply with training=False.
    """
    check_options(locals())
    check_model(model)
    strategy = None if strategy is None else preset_named(strategy)
    if not training:
        check_forward_alone(locals())
        recompute = "none"
    return PlanRequest(
        annotations_of(model),
        strategy,
        mode,
        Settings(None if memory is None else parse_bytes(memory), recompute, solver, time_limit, gap, prefetch),
        _optimizer(optimizer, master_copies, offload),
        hardware,
        outputs,
        microbatches,
        pipeline,
        schedule,
        chunks,
        None if stages is None else tuple(stages),
        assumptions_of(assume),
        inputs,
        None if capacity_factor is None else float(capacity_factor),
        loss_tiles,
        mlp_tiles,
        weight_tiles,
        imbalance,
        precision_of(precision),
        offload=offload,
        host_memory=None if host_memory is None else parse_bytes(host_memory),
        training=training,
        static_argnames=static_argnames_of(static_argnames, model),
        memory_conventions=MemoryConventions.of(memory_conventions),
    )


USUAL: Mapping[str, tuple[object, ...]] = {
    "optimizer": ("adamw", "none"),
    "master_copies": (False,),
    "recompute": ("auto", "none"),
    "microbatches": (None, 1),
    "pipeline": (None,),
    "schedule": (None,),
    "chunks": (None,),
    "stages": (None,),
    "loss_tiles": (None, False),
    "mlp_tiles": (None,),
    "weight_tiles": (False,),
    "offload": ("none",),
    "host_memory": (None,),
}
"""Training option → the values that are accepted with training=False."""


def check_forward_alone(given: Mapping[str, Any]) -> None:
    """Raise InputError for the first option that is of training alone."""
    for name, usual in USUAL.items():
        if not any(type(given[name]) is type(each) and given[name] == each for each in usual):
            raise InputError(
                f"{name}={given[name]!r} with training=False, which plans and runs the forward alone: there are "
                "no gradients, no optimizer, no pipeline and no micro-batches. Leave it out."
            )
    if not OF_TRAINING.isdisjoint(parts_named(given["strategy"])):
        raise InputError(
            f'strategy="{given["strategy"]}" with training=False: it shards gradients and optimizer state, '
            'which inference does not have. "zero3" stores parameters in parts, "data_parallel" whole.'
        )


def check_in_one_piece(request: PlanRequest, axis: str | None) -> None:
    """Raise PipelineError where a forward alone would run in stages."""
    if axis is not None and not request.training:
        raise PipelineError(
            f'the mesh has a pipeline, the axis "{axis}", and training=False runs a forward without one; rename the '
            "axis, or give a mesh without it."
        )


def _optimizer(said: str | Optimizer, master_copies: bool, offload: Offloaded) -> Optimizer:
    if isinstance(said, str):
        return Optimizer(said, master_copies)
    if said.gradients == "host" and offload in ("none", "activations"):
        raise InputError(
            f'gradients="host" with offload={offload!r}: gradients wait on the host where the optimizer steps there; '
            'give offload="optimizer", "both" or "auto", too, or gradients="device".'
        )
    return replace(said, master_copies=master_copies or said.master_copies)


def example_arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments; InputError for what is neither."""
    check_example_inputs(example_inputs)
    return ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (example_inputs, {})


def check_one_decides(plan: object, strategy: str | None) -> None:
    """Raise InputError where a plan and a preset are given."""
    if plan is not None and strategy is not None:
        raise InputError(f"strategy={strategy!r} with a plan, which has decided everything; give one of them.")


def check_no_pipeline(request: PlanRequest, mesh: Mesh, plan: object = None) -> None:
    """Raise PipelineError for pipeline options on a mesh without a pipeline."""
    said: dict[str, object] = {
        "schedule": request.schedule,
        "chunks": request.chunks,
        "stages": None if request.stages is None else list(request.stages),
        "annotate(stage=…)": next((each for each in request.annotations if each.stage is not None), None),
    }
    for name, value in said.items():
        if value is not None:
            raise PipelineError(
                f"{name} is given ({value}), but no axis of the mesh {mesh} is a pipeline; name one, as in "
                f'pipeline="{mesh.names[0]}", or call an axis "pp".'
            )
    if isinstance(plan, PipelinePlan):
        raise PipelineError(f"the plan is for the mesh {plan.mesh}, with a pipeline; this mesh is {mesh}.")


def check_stages(request: PlanRequest) -> None:
    """Raise PipelineError for requested options that stages do not support."""
    if request.static_argnames:
        raise PipelineError(
            f"static_argnames={list(request.static_argnames)} is given on a mesh with a pipeline, which would give "
            "each micro-batch the values of the whole batch. Use a mesh without a pipeline axis."
        )
    if request.offload in ("activations", "both") and request.schedule in HALVING:
        raise PipelineError(
            f"offload={request.offload!r} sends what layers keep for their backward to the host, and "
            f'schedule="{request.schedule}" makes gradients of inputs and of weights apart, between which all of it '
            'would be back on the device; give schedule="1f1b" or "interleaved_1f1b", or offload="optimizer".'
        )
    if request.mlp_tiles == AUTO:
        raise PipelineError(
            'mlp_tiles="auto" takes MLPs in tiles where a plan of the whole model asks for it, and the mesh has a '
            "pipeline; give a number of tiles, as in mlp_tiles=4, or leave it out."
        )


def check_buckets(buckets: Buckets | None, num_microbatches: int | None, static: Sequence[str] = ()) -> None:
    """Raise InputError where padded samples would fill micro-batches; None: how many these are is not known.

    Also raise it if there are `static` arguments, whose values do not fit padded inputs.
    """
    if buckets is not None and static:
        raise InputError(
            f"buckets is given with static_argnames={list(static)}: buckets pad inputs, and the values of static "
            "arguments would not fit the padded ones. Pad inputs before the call, and leave buckets out."
        )
    if buckets is not None and buckets.batches is not None and num_microbatches != 1:
        raise InputError(
            f"Buckets(batches={buckets.batches!r}) with micro-batches, whose losses count alike however many samples "
            "of each are padded; leave out batches=, or compile without a pipeline and with microbatches=1."
        )


def check_hooks(program: Program, num_microbatches: int) -> Program:
    """The program; CaptureError where gradient hooks would see the gradients of micro-batches."""
    if program.python.hooks and num_microbatches > 1:
        raise CaptureError(
            f"the forward registers gradient hooks, which would see the gradient of each of {num_microbatches} "
            "micro-batches, and not that of the batch; compile without a pipeline and with microbatches=1, or register "
            "them on parameters."
        )
    return program


def check_mesh(mesh: object) -> None:
    """Raise MeshError for what `compile` cannot run on."""
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


def on_device(workload: Workload | None, mesh: DeviceMesh) -> Workload | None:
    """Return the workload with the name of the device that runs it: "cpu", or as CUDA calls it."""
    if workload is None:
        return None
    name = torch.cuda.get_device_name() if mesh.device_type == "cuda" else mesh.device_type
    return replace(workload, device=name)
