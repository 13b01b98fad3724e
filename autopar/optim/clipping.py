"""Gradients clipped by their norm over all ranks, where they are: on the device, or on the host (`host_gradients`).

For gradients on the host each rank takes the norm of its own parts; on axes that split a parameter these are added up,
and the sum is waited for. All that has been brought is scaled there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.optim.host_gradients import gradient_on_host
from autopar.optim.sharded_tensors import split_dim

SMALL = 1e-6  # added to a norm before dividing by it: as in torch.nn.utils.clip_grad_norm_
Axes = tuple[DeviceMesh | None, tuple[int, ...]]
"""A mesh, and the axes of it that split a parameter."""


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before, which every rank has.

    As `torch.nn.utils.clip_grad_norm_`, which finds no gradients on the host.
    """
    every = list(parameters)
    norm = total_norm(every, norm_type)
    scale_to(every, max_norm, norm)
    return norm


@torch.no_grad()
def total_norm(parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of the gradients of all parameters that have one."""
    on_host = _norms_on_host(parameters, norm_type)
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None], norm_type)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not on_host:
        return norm
    return torch.linalg.vector_norm(torch.stack([norm.to(on_host[0]), *on_host]), norm_type)


@torch.no_grad()
def scale_to(parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale the gradients of parameters whose norm is `norm`, so that it is at most `max_norm`."""
    on_host = [each for each in map(gradient_on_host, parameters) if each is not None]
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    if on_host:
        factor = min(max_norm / (float(norm) + SMALL), 1.0)
        for gradient in on_host:
            gradient.mul_(factor)


def _norms_on_host(parameters: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norms of gradients in host memory, one per way of splitting parameters, on the parameters' device."""
    norms: dict[Axes, list[torch.Tensor]] = defaultdict(list)
    devices: dict[Axes, torch.device] = {}
    for parameter in parameters:
        gradient = gradient_on_host(parameter)
        if gradient is not None:
            axes, dtype = _axes(parameter), torch.promote_types(gradient.dtype, torch.float32)
            norms[axes].append(torch.linalg.vector_norm(gradient, norm_type, dtype=dtype))
            devices[axes] = parameter.device
    return [_over_ranks(torch.stack(own).to(devices[axes]), norm_type, axes) for axes, own in norms.items()]


def _axes(parameter: torch.Tensor) -> Axes:
    if not isinstance(parameter, DTensor):
        return None, ()
    split = (axis for axis, each in enumerate(parameter.placements) if split_dim(each) is not None)
    return parameter.device_mesh, tuple(split)


def _over_ranks(norms: torch.Tensor, norm_type: float, axes: Axes) -> torch.Tensor:
    """Return the norm of all parts: those of these norms on this rank, and those of other ranks along some axes."""
    norm, (mesh, split) = torch.linalg.vector_norm(norms, norm_type), axes
    if mesh is None or not split:
        return norm
    largest = norm_type == float("inf")
    summed = norm if largest else norm**norm_type
    for axis in split:
        dist.all_reduce(summed, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, mesh.get_group(axis))
    return summed if largest else summed ** (1 / norm_type)
