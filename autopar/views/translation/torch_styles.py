"""A plan as torch's own calls: `parallelize_module` on one mesh axis, `fully_shard` over those of samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from autopar.costs.plans.answers import ParallelizePlan
from autopar.costs.plans.plan import Plan
from autopar.errors import MeshError
from autopar.ir.program.paths import layer_of
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from autopar.views.translation.axis_purposes import (
    DATA,
    purposes,
    recomputed,
    stored_in_parts,
    tensor_axis,
    unexpressed,
)
from autopar.views.translation.matrices import Matrices, matrices_on

STYLES: Mapping[tuple[str, str, bool], Callable[[], ParallelStyle]] = {
    ("linear", "column", False): ColwiseParallel,
    ("linear", "column", True): lambda: ColwiseParallel(output_layouts=Replicate()),
    ("linear", "row", False): RowwiseParallel,
    ("linear", "row", True): lambda: RowwiseParallel(input_layouts=Replicate()),
    ("embedding", "column", True): lambda: ColwiseParallel(output_layouts=Replicate()),
    ("embedding", "row", True): lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""(kind, role, whole outside) → style."""
NOTHING = Matrices((), frozenset(), frozenset(), ())


def parallelize_plan(plan: Plan, axis: str | None = None) -> ParallelizePlan:
    """Return the plan for torch; PlanError if several axes split matrices and none is requested, or it was loaded."""
    context, axis = context_of(plan, "parallelize_plan"), tensor_axis(plan, axis)
    found = NOTHING if axis is None else matrices_on(context, axis, weights_in_chains=False)
    styles = {each.module: STYLES[each.kind, each.role, each.whole]() for each in found.matrices if each.role}
    others = {name: p for name, p in purposes(plan).items() if name != axis and plan.mesh.size(name) > 1}
    parts = stored_in_parts(plan)
    sharded = tuple(name for name in others if name in parts)
    replicated = tuple(name for name in others if name not in parts)
    shards, mixed = _shards(plan) if others else ({}, ())
    lost = [f"{module}: shares its matrix or is called several times, and stays whole" for module in found.tied]
    lost += unexpressed(plan, axis, found.expressed)
    lost += [
        f"{name}: divided by {purpose}; here its ranks take samples of their own"
        for name, purpose in others.items()
        if purpose != DATA
    ]
    if replicated and not sharded:
        lost.append(
            f"weights are whole on {' and '.join(replicated)}; fully_shard stores them in parts, and gathers them"
        )
        sharded, replicated = replicated, ()
        shards = dict.fromkeys(shards, False)
    return ParallelizePlan(axis, styles, shards, sharded, replicated, (*lost, *mixed, *recomputed(plan)))


def _shards(plan: Plan) -> tuple[dict[str, bool], tuple[str, ...]]:
    """Map layers, and the root, to whether their weights are freed after the forward; list weights that differ."""
    freed: dict[str, list[bool]] = defaultdict(list)
    for row in plan.rows:
        if row.kind == "parameter":
            freed[layer_of(row.module)].append(not plan.is_saved(row.name))
    mixed = tuple(
        f"{module or 'the root'}: {len(each) - sum(each)} of {len(each)} weights saved for the backward, here as most"
        for module, each in freed.items()
        if 0 < sum(each) < len(each)
    )
    layers = {module: 2 * sum(each) >= len(each) for module, each in freed.items() if module}
    root = freed.get("", [False])
    return {**layers, "": 2 * sum(root) >= len(root)}, mixed


def apply(plan: ParallelizePlan, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split the matrices, then shard the layers and the root; MeshError where the mesh lacks an axis of the plan."""
    requested = (*([plan.axis] if plan.axis else ()), *plan.replicated, *plan.sharded)
    missing = [name for name in requested if name not in (mesh.mesh_dim_names or ())]
    if missing:
        raise MeshError(
            f"the plan has the axes {', '.join(requested)}, the mesh is {Mesh.of(mesh)}; give one with all of them."
        )
    if plan.axis and plan.styles:
        parallelize_module(model, mesh[plan.axis], dict(plan.styles))
    if plan.shards:
        over = _one_each(mesh, plan.replicated, plan.sharded)
        for module, freed in plan.shards.items():
            fully_shard(model.get_submodule(module), mesh=over, reshard_after_forward=freed)  # type: ignore[arg-type]
    return model


def _one_each(mesh: DeviceMesh, replicated: tuple[str, ...], sharded: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh for fully_shard: one axis that shards, and before it one that replicates, where there is such."""
    names = []
    for axes in (replicated, sharded):
        if len(axes) > 1:
            mesh[axes]._flatten("_".join(axes))
        names += ["_".join(axes)] if axes else []
    return mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]
