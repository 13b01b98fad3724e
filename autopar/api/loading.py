"""`load`: a compiled model with the values of a checkpoint, each rank reading its own parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.api.entry import compile
from autopar.api.option_types import Forward, InStages, Training
from autopar.compiler.arguments import ExampleInputs, Run
from autopar.compiler.inference.inference_module import InferenceModule
from autopar.costs.plans.plan import Plan
from autopar.errors import InputError
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.runtime.module.compiled_module import ParallelModule
from autopar.runtime.pipeline.pipeline_module import PipelineModule


@overload
def load(
    model: nn.Module,
    mesh: DeviceMesh,
    path: str | Path,
    example_inputs: ExampleInputs,
    *,
    plan: Plan | PipelinePlan | None = None,
    run: Run | None = None,
    **options: Unpack[InStages],
) -> PipelineModule: ...
@overload
def load(
    model: nn.Module,
    mesh: DeviceMesh,
    path: str | Path,
    example_inputs: ExampleInputs,
    *,
    plan: Plan | PipelinePlan | None = None,
    run: Run | None = None,
    **options: Unpack[Forward],
) -> InferenceModule: ...
@overload
def load(
    model: nn.Module,
    mesh: DeviceMesh,
    path: str | Path,
    example_inputs: ExampleInputs,
    *,
    plan: Plan | PipelinePlan | None = None,
    run: Run | None = None,
    **options: Unpack[Training],
) -> ParallelModule: ...
def load(
    model: nn.Module, mesh: DeviceMesh, path: str | Path, example_inputs: ExampleInputs, **options: Any
) -> ParallelModule | PipelineModule:
    """Compile a model on the meta device with the values of a checkpoint: each rank reads only its own parts.

    A rank holds what it stores, and one tensor's part as it is read (docs/how-to/checkpoints.md).

    Args:
        model: made with its parameters on the meta device: `with torch.device("meta"): model = …`.
        mesh: as of `compile`.
        path: a safetensors file, or a folder with `model.safetensors` or `model.safetensors.index.json`.
        example_inputs: as of `compile`.
        **options: as of `compile`.

    Raises:
        InputError: parameters have values already, or the checkpoint has other names or shapes than the model, and
            transformers has no rules that convert them.
        What `compile` raises.
    """
    filled = next((name for name, each in model.named_parameters() if not each.is_meta), None)
    if filled is not None:
        raise InputError(
            f"{filled} has values, and memory, on every rank; make the model on the meta device, "
            'with torch.device("meta"): model = …, or compile it and call model.load_safetensors(path).'
        )
    module = compile(model, mesh, example_inputs, **options)
    module.to_empty(device=mesh.device_type)
    module.load_safetensors(path)
    return module
