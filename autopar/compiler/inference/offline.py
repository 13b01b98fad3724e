"""`plan_generation`: the plans of a language model's prompt and of its new tokens, made without running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.compiler.arguments import plan_request
from autopar.compiler.offline_planner import USUAL_AXES
from autopar.compiler.options import check_planned_mesh
from autopar.errors import InputError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.mesh_search.arrangements import meshes_of

if TYPE_CHECKING:
    from autopar.compiler.inference.planning import GenerationPlan


def plan_generation(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | Literal["auto"],
    *,
    batch: int,
    prompt: int,
    tokens: int,
    devices: int | None = None,
    within: float | None = None,
    **options: Any,
) -> GenerationPlan:
    """Plan generation without running: `batch` prompts of `prompt` tokens, each of which gets `tokens` new ones.

    Args:
        model: a causal language model of transformers, which may be on the meta device.
        mesh: where; "auto" is the way to arrange `devices` in up to `Search(max_axes=…)` axes, by default 2, that makes
            the most tokens per second.
        batch: number of prompts.
        prompt: tokens of a prompt.
        tokens: new tokens of each prompt.
        devices: number of devices to arrange, on "auto".
        within: on "auto", seconds within which the first token has to come.
        **options: those of `plan` that are not of training alone, as strategy, memory, hardware and precision.

    >>> plan_generation(model, Mesh({"tp": 8}, hardware="h100"), batch=32, prompt=2048, tokens=256)  # doctest: +SKIP
    """
    from autopar.compiler.inference.planning import Load, best_for, plan_for  # this import needs transformers

    load, request = Load(batch, prompt, tokens), plan_request(model, **{**options, "training": False})
    check_planned_mesh(mesh, devices)
    if isinstance(mesh, str):
        most = request.settings.search.max_axes or USUAL_AXES
        meshes = meshes_of(mesh, devices, request.hardware, most)
        return best_for(model, meshes, load, request.on(meshes[0]), within)
    if within is not None:
        raise InputError(f'within={within!r} chooses among meshes; give mesh="auto" with devices, or leave it out.')
    abstract = Mesh.of(mesh)
    return plan_for(model, abstract, load, request.on(abstract))
