"""Baselines through their own interfaces: DDP, FSDP2, and DTensor's tensor and sequence parallelism.

ddp             DistributedDataParallel over all ranks
fsdp2           fully_shard of every layer and of the root, over all ranks
dtensor-tp      parallelize_module over the last axis; over the axes before it, fully_shard as torchtitan combines them
dtensor-tp+sp   the same, with norms sharded over the sequence
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import AutoparError
from autopar.tools.benchmarking.dtensor_plans import tensor_parallel_plan

AS_IT_IS = MixedPrecisionPolicy()
FLAT = "all"  # the name of all axes as one, where a peer takes no mesh of several
Context = Callable[[], contextlib.AbstractContextManager[Any]]


class InapplicableError(AutoparError, ValueError):
    """A strategy that this model, mesh or batch does not allow; the message says why."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A model as a peer trains it, with this rank's inputs."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    context: Context = contextlib.nullcontext
    """Context manager in which forward and backward run."""

    def forward_and_backward(self) -> Tensor:
        with self.context():
            loss = self.model(*self.inputs)
            loss.backward()
        return loss


def ddp(model: nn.Module, mesh: DeviceMesh, inputs: tuple[Tensor, ...]) -> Baseline:
    """Wrap the model in DistributedDataParallel with gradients as views of its buckets."""
    if dist.get_backend() == "fake":
        raise InapplicableError(
            "DistributedDataParallel waits for the results of its collectives; a fake world has none"
        )
    flat = flattened(mesh)
    part = own_samples(inputs, flat)
    return Baseline(DistributedDataParallel(model, process_group=flat.get_group(), gradient_as_bucket_view=True), part)


def fsdp2(
    model: nn.Module, mesh: DeviceMesh, inputs: tuple[Tensor, ...], policy: MixedPrecisionPolicy = AS_IT_IS
) -> Baseline:
    """Apply `fully_shard` to every layer and to the root, with one policy."""
    flat = flattened(mesh)
    part = own_samples(inputs, flat)
    return Baseline(_sharded(model, flat, policy), part)


def dtensor(model: nn.Module, mesh: DeviceMesh, inputs: tuple[Tensor, ...]) -> Baseline:
    """Apply tensor parallelism with the loss split over the vocabulary."""
    return _dtensor(model, mesh, inputs, sequence=False)


def dtensor_sequence(model: nn.Module, mesh: DeviceMesh, inputs: tuple[Tensor, ...]) -> Baseline:
    """Return the same with sequence parallelism between the split projections."""
    return _dtensor(model, mesh, inputs, sequence=True)


def _dtensor(model: nn.Module, mesh: DeviceMesh, inputs: tuple[Tensor, ...], sequence: bool) -> Baseline:
    names = mesh.mesh_dim_names
    assert names, "a mesh of autopar names its axes"
    inner = mesh[names[-1]]
    plan = tensor_parallel_plan(model, inner.size(), inputs, sequence)
    if isinstance(plan, str):
        raise InapplicableError(plan)
    part = inputs
    outer = flattened(mesh[names[:-1]]) if len(names) > 1 else None
    if outer is not None:
        part = own_samples(inputs, outer)
    parallelize_module(model, inner, dict(plan.styles))
    if outer is not None:
        _sharded(model, outer)
    return Baseline(model, part, loss_parallel if plan.splits_loss else contextlib.nullcontext)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return all axes of the mesh as one."""
    return mesh if mesh.ndim == 1 else mesh._flatten(FLAT)


def own_samples(inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """Return this rank's part of the global batch; raise InapplicableError if samples do not divide."""
    num_parts = mesh.size()
    uneven = sorted({x.shape[0] for x in inputs if x.shape[0] % num_parts})
    if uneven:
        raise InapplicableError(f"a batch of {uneven[0]} does not divide over {num_parts} ranks")
    return tuple(x.chunk(num_parts)[mesh.get_local_rank()].contiguous() for x in inputs)


def _sharded(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy = AS_IT_IS) -> nn.Module:
    """Apply `fully_shard` to the layers (members of outermost module lists) and to the root."""
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _layers(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [child for child in module if next(child.parameters(), None) is not None]
    return [layer for child in module.children() for layer in _layers(child)]
