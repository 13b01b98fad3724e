"""Arguments of `compile`, `plan` and `attach`, read and checked before anything is captured."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.static.arguments import static_argnames_of
from autopar.compiler.options import check_example_inputs, check_model, check_options
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.workload import Workload
from autopar.costs.pricing.optimizer import ADAMW, Optimizer
from autopar.costs.space.returned import Outputs
from autopar.errors import CaptureError, InputError, MeshError, PipelineError
from autopar.files.schema import Flag, Maybe, Whole
from autopar.ir.program.precision import Precision, precision_of
from autopar.ir.program.program import Program
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotations_of
from autopar.planning.annotations.pins import Mode
from autopar.planning.options.definition import OFF, Group, Satisfying, flat_name, option
from autopar.planning.options.groups import Capture, Experts, Memory, Pipeline, Search
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.schedule import HALVING
from autopar.planning.request import Inputs, PlanRequest
from autopar.planning.settings import Settings
from autopar.runtime.lengths.length_buckets import Buckets
from autopar.strategies.presets import preset_named
from autopar.strategies.presets.data import OF_TRAINING, parts_named

ExampleInputs = tuple[Any, ...] | Mapping[str, Any]

_SEED = Maybe(Whole(-(2**63), 2**64 - 1))
_BUCKETS = Satisfying(
    lambda found: isinstance(found, Buckets) or (isinstance(found, str) and found in ("auto", OFF)),
    '"auto", "none" or autopar.Buckets(…)',
)
_GRAPH = Satisfying(
    lambda found: isinstance(found, bool) or (isinstance(found, str) and found in ("auto", OFF)),
    'True, False, "auto" or "none"',
)


@dataclass(frozen=True, slots=True, repr=False)
class Run(Group):
    """Run of a compiled module: its random numbers, and its inputs."""

    seed: int | None = option(None, _SEED)
    """Seed of random numbers (dropout and the like); by default `torch.initial_seed()` of rank 0."""
    deterministic: bool = option(False, Flag())
    """Draw the random numbers that one device draws, at the price of drawing whole tensors."""
    check_inputs: bool | None = option(None, Maybe(Flag()))
    """Compare the values of inputs that ranks must hold alike in every call (True), never (False), or by default in
    the first, second, tenth, hundredth … call of a kind."""
    buckets: Buckets | Literal["auto", "none"] | None = option(None, Maybe(_BUCKETS))
    """Lengths and batch sizes to which inputs are padded, so that a new one is not planned anew: an `autopar.Buckets`
    (docs/how-to/varying-lengths.md), or "auto" for powers of two and the input names of transformers. By default
    inputs are taken as they are, except that the Trainer pads texts of different lengths; "none" turns that off,
    too."""

    cuda_graph: bool | Literal["auto", "none"] = option("none", _GRAPH)
    """Run each step as one CUDA graph, captured in its fifth call: `train_step`, and functions given to
    `model.cuda_graph`, which may step the optimizer, too. True refuses a model that needs the host in a step
    (experts on several ranks without `Experts(padded=…)`, offload, pipedream) and devices without CUDA graphs; "auto"
    runs these without."""

    @property
    def sizes(self) -> Buckets | None:
        """Sizes to which inputs are padded; None for no padding."""
        return Buckets.of(self.buckets)


GROUPS: Mapping[str, type[Group]] = {
    "memory": Memory,
    "pipeline": Pipeline,
    "experts": Experts,
    "search": Search,
    "capture": Capture,
    "run": Run,
}
"""Option of `compile` → the group that it takes."""
_TAKING: Mapping[str, type] = {**GROUPS, "optimizer": Optimizer, "precision": Precision}
"""Option → the value with fields that it takes."""


def plan_request(
    model: nn.Module,
    *,
    mode: Mode = "auto",
    strategy: str | None = None,
    memory: Memory | str | int | None = None,
    precision: str | Precision | None = None,
    optimizer: str | Optimizer = "adamw",
    hardware: str | Hardware | None = None,
    inputs: Inputs = "whole",
    outputs: Outputs = "plain",
    microbatches: int | None = None,
    pipeline: Pipeline | str | None = None,
    experts: Experts | None = None,
    search: Search | None = None,
    capture: Capture | None = None,
    training: bool = True,
    **unknown: Any,
) -> PlanRequest:
    """Return the options of `compile` and `plan`, with the annotations of the model, as one value.

    Raises InputError for an option that is not known or not of its kind, or has no place with training=False.
    """
    check_known(unknown)
    check_options(locals())
    check_model(model)
    request = PlanRequest(
        annotations=annotations_of(model),
        strategy=None if strategy is None else preset_named(strategy),
        mode=mode,
        settings=Settings(Memory.of(memory), Search.of(search)),
        optimizer=Optimizer(optimizer) if isinstance(optimizer, str) else optimizer,
        hardware=hardware,
        outputs=outputs,
        inputs=inputs,
        microbatches=microbatches,
        pipeline=Pipeline.of(pipeline),
        experts=Experts.of(experts),
        capture=Capture.of(capture),
        precision=precision_of(precision),
        training=training,
    )
    static_argnames_of(request.static_argnames, model)
    if request.optimizer.gradients == "host" and request.memory.offload in ("none", "activations"):
        raise InputError(
            f'Optimizer(gradients="host") is given with Memory(offload={request.memory.offload!r}): gradients wait on '
            'the host where the optimizer steps there; give Memory(offload="optimizer"), "both" or "auto", too, or '
            'Optimizer(gradients="device").'
        )
    return request if training else forward_alone(request)


def defaults() -> dict[str, Any]:
    """Return each option of `plan_request` with its default."""
    taken = inspect.signature(plan_request).parameters.values()
    return {each.name: each.default for each in taken if each.kind is each.KEYWORD_ONLY}


def check_known(unknown: Mapping[str, Any]) -> None:
    """Raise InputError for the first unknown option; if it is a field of a group, the message names the group."""
    for name, value in unknown.items():
        for taking, kind in _TAKING.items():
            for each in fields(kind):
                if name in (each.name, flat_name(each)):
                    specified = f"{kind.__name__}({each.name}={reprlib.repr(value)})"
                    raise InputError(f"{name} is a field of autopar.{kind.__name__}; give {taking}={specified}.")
        raise InputError(f"{name} is no option here; options are {', '.join(defaults())}.")


def forward_alone(request: PlanRequest) -> PlanRequest:
    """Return the request for the forward alone; InputError for the first option that is of training alone."""
    optimizer = request.optimizer
    for group in (request.memory, request.pipeline):
        for each, value in group.given():
            if each.of_training and value != OFF:
                raise _of_training(f"{type(group).__name__}({each.name}={value!r})")
    if optimizer not in (ADAMW, Optimizer("none")):
        raise _of_training(f"optimizer={optimizer.name!r}" if optimizer.name != "adamw" else f"optimizer={optimizer!r}")
    if request.microbatches not in (None, 1):
        raise _of_training(f"microbatches={request.microbatches}")
    if not OF_TRAINING.isdisjoint(parts_named(request.strategy)):
        raise InputError(
            f'strategy="{request.strategy}" is given with training=False: it shards gradients and optimizer state, '
            'which a forward has not. "zero3" stores parameters in parts, "data_parallel" whole.'
        )
    return request.with_memory(replace(request.memory, recompute="none"))


def _of_training(specified: str) -> InputError:
    return InputError(
        f"{specified} is given with training=False, which plans and runs the forward alone, in one piece: there are no "
        "gradients, no optimizer and no micro-batches. Leave it out."
    )


def check_in_one_piece(request: PlanRequest, axis: str | None) -> None:
    """Raise PipelineError where a forward alone would run in stages."""
    if axis is not None and not request.training:
        raise PipelineError(
            f'the mesh has a pipeline, the axis "{axis}", and training=False runs a forward without one; rename the '
            "axis, or give a mesh without it."
        )


def check_not_deterministic(run: Run) -> None:
    """Raise PipelineError where stages would have to draw in the order of one device."""
    if run.deterministic:
        raise PipelineError(
            "Run(deterministic=True) draws dropout masks in the order of one device, which the stages of a pipeline do "
            "not run in; leave it out. The masks of a pipeline are equal in every run with the same seed."
        )


def example_arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as positional and keyword arguments; raise InputError for anything else."""
    check_example_inputs(example_inputs)
    return ((), dict(example_inputs)) if isinstance(example_inputs, Mapping) else (example_inputs, {})


def check_one_decides(plan: object, strategy: str | None) -> None:
    """Raise InputError where a plan and a preset are given."""
    if plan is not None and strategy is not None:
        raise InputError(f"strategy={strategy!r} with a plan, which has decided everything; give one of them.")


def check_no_pipeline(request: PlanRequest, mesh: Mesh, plan: object = None) -> None:
    """Raise PipelineError for options of a pipeline on a mesh without one."""
    specified = [f"Pipeline({each.name}={value!r})" for each, value in request.pipeline.given() if each.name != "axis"]
    specified += [f"annotate(stage=…) ({each})" for each in request.annotations if each.stage is not None]
    if specified:
        raise PipelineError(
            f"{specified[0]} is given, but no axis of the mesh {mesh} is a pipeline; name one, as in "
            f'Pipeline(axis="{mesh.names[0]}"), or call an axis "pp".'
        )
    if isinstance(plan, PipelinePlan):
        raise PipelineError(f"the plan is for the mesh {plan.mesh}, with a pipeline; this mesh is {mesh}.")


def check_stages(request: PlanRequest) -> None:
    """Raise PipelineError for requested options that stages do not support."""
    if request.static_argnames:
        raise PipelineError(
            f"Capture(static_argnames={list(request.static_argnames)}) is given on a mesh with a pipeline, which would "
            "give each micro-batch the values of the whole batch. Use a mesh without a pipeline axis."
        )
    if request.memory.offloads_activations and request.pipeline.schedule in HALVING:
        raise PipelineError(
            f"Memory(offload={request.memory.offload!r}) sends what layers save for their backward to the host, and "
            f'Pipeline(schedule="{request.pipeline.schedule}") makes gradients of inputs and of weights apart, between '
            'which all of it would be back on the device; give Pipeline(schedule="1f1b") or '
            'Pipeline(schedule="interleaved_1f1b"), or Memory(offload="optimizer").'
        )
    if request.memory.mlp_tiles == "auto":
        raise PipelineError(
            'Memory(mlp_tiles="auto") takes MLPs in tiles where a plan of the whole model asks for it, and the mesh '
            "has a pipeline; give a number of tiles, as in Memory(mlp_tiles=4), or leave it out."
        )


def check_buckets(buckets: Buckets | None, num_microbatches: int | None, static: Sequence[str] = ()) -> None:
    """Raise InputError where padded samples would fill micro-batches; None: how many these are is not known.

    Also raise it if there are `static` arguments, whose values do not fit padded inputs.
    """
    if buckets is not None and static:
        raise InputError(
            f"Run(buckets=…) is given with Capture(static_argnames={list(static)}): buckets pad inputs, and the "
            "values of static arguments would not fit the padded ones. Pad inputs before the call, without buckets."
        )
    if buckets is not None and buckets.batches is not None and num_microbatches != 1:
        raise InputError(
            f"Buckets(batches={buckets.batches!r}) with micro-batches, whose losses count alike however many samples "
            "of each are padded; leave out batches=, or compile without a pipeline and with microbatches=1."
        )


def check_hooks(program: Program, num_microbatches: int) -> Program:
    """Return the program; CaptureError where gradient hooks would see the gradients of micro-batches."""
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
