"""Parameters as they are stored, under their original names, and their local parts as the graph takes them."""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from autopar.sharding.layout import Layout


def placements_of(layout: Layout) -> tuple[Placement, ...]:
    """DTensor placements of a layout of I and S."""
    assert all(placement.kind in "IS" for placement in layout), f"{layout} is no layout to store a tensor in"
    return tuple(Shard(placement.dim) if placement.is_split else Replicate() for placement in layout)


def distribute(tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A tensor in a storage layout; rank 0's values count, and a meta tensor stays meta."""
    placements = placements_of(layout)
    if tensor.is_meta:
        local = torch.empty(_unpadded_shape(tensor.shape, layout, mesh), dtype=tensor.dtype, device="meta")
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
        )
    # A copy: what is not split would share memory with the original, which training must not change.
    return distribute_tensor(tensor.detach().to(mesh.device_type, copy=True), mesh, placements)


def attach(
    root: nn.Module,
    model: nn.Module,
    layouts: Mapping[str, Layout],
    mesh: DeviceMesh,
    whole: Layout,
    wanted: Callable[[str], bool] = lambda name: True,
    agreed: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> None:
    """Give `root` the parameters and buffers of `model` under their names, ties kept, each in its storage layout.

    Parameters become DTensors where `layouts` splits one of them: optimizers and clipping do not mix DTensors and plain
    tensors. Where it splits none they become plain tensors, which cost no dispatch. Those without a layout are stored
    as `whole`. Buffers become plain tensors. What is plain is equal on every rank.

    Of whose (first) name `wanted` is false, that is left out, under all its names. `agreed` gives the values of a
    tensor that counts; it is called for each one, of those left out too.
    """
    splits = any(placement.is_split for layout in layouts.values() for placement in layout)
    made: dict[int, nn.Parameter] = {}
    left_out: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in left_out:
            continue
        if id(parameter) not in made:
            values = agreed(parameter)
            if not wanted(name):
                left_out.add(id(parameter))
                continue
            stored = distribute(values, layouts.get(name, whole), mesh)
            if not splits:
                stored = stored.to_local()
            made[id(parameter)] = nn.Parameter(stored, requires_grad=parameter.requires_grad)
        owner, leaf = _owner(root, name)
        owner.register_parameter(leaf, made[id(parameter)])
    shared: dict[int, torch.Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) in left_out:
            continue
        if id(buffer) not in shared:
            values = agreed(buffer)
            if not wanted(name):
                left_out.add(id(buffer))
                continue
            shared[id(buffer)] = distribute(values, whole, mesh).to_local()
        owner, leaf = _owner(root, name)
        source = model.get_submodule(name.rpartition(".")[0])
        owner.register_buffer(leaf, shared[id(buffer)], persistent=leaf not in source._non_persistent_buffers_set)


def ties_of(root: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter → its first name."""
    first: dict[int, str] = {}
    named = nn.Module.named_parameters(root, remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def tie(root: nn.Module, ties: Mapping[str, str]) -> None:
    """Make parameters one again that `nn.Module.to_empty` and the like have replaced one by one."""
    for name, first in ties.items():
        owner, leaf = _owner(root, name)
        owner.register_parameter(leaf, root.get_parameter(first))


def as_stored(root: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in the kind of tensors that `root` stores.

    Where it stores DTensors, whole tensors of a parameter's shape are split as that parameter. Where it stores plain
    tensors, DTensors are gathered, which all ranks of their mesh do together.
    """
    stored = dict(nn.Module.named_parameters(root, remove_duplicate=False))
    if not any(isinstance(parameter, DTensor) for parameter in stored.values()):
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}

    def split(name: str, value: Any) -> Any:
        parameter = stored.get(name)
        plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not plain or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
            return value
        mesh = parameter.device_mesh
        value = value.detach().to(mesh.device_type)
        return distribute_tensor(value, mesh, parameter.placements, src_data_rank=None)

    return {name: split(name, value) for name, value in state.items()}


def local_parts(parameters: Sequence[torch.Tensor], local_shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The rank's parts of stored parameters, padded with zeros to the shapes that a graph takes.

    What `DTensor.to_local` does for one parameter is done for all of them in one node of the autograd graph.
    """
    enabled = torch.is_grad_enabled()
    learning = [p for p in parameters if enabled and p.requires_grad and isinstance(p, DTensor)]
    learned = iter(_LocalParts.apply(*learning) if learning else ())
    parts = []
    for p, shape in zip(parameters, local_shapes, strict=True):
        if not isinstance(p, DTensor):
            part = p
        else:
            part = next(learned) if enabled and p.requires_grad else p._local_tensor.detach()
        parts.append(part if part.shape == shape else _padded(part, shape))
    return parts


class _LocalParts(torch.autograd.Function):
    """DTensors → their local tensors; gradients become DTensors that lie as their parameters do."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = [(p._spec, p._local_tensor.stride()) for p in parameters]
        return tuple(p._local_tensor.detach() for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        found: list[DTensor | None] = []
        for grad, (spec, stride) in zip(grads, ctx.parameters, strict=True):
            if grad is not None and grad.stride() != stride:
                grad = torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
            # What `DTensor()` does, but for its `__init__`, which does nothing in twice the time.
            found.append(None if grad is None else DTensor.__new__(DTensor, grad, spec, requires_grad=False))
        return tuple(found)


def _padded(local: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
    """A part with zeros at the end of each dim that is too short."""
    padding: list[int] = []
    for have, want in zip(reversed(local.shape), reversed(local_shape), strict=True):
        padding += [0, want - have]
    return torch.nn.functional.pad(local, padding)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor `name`, made where it is missing, and the tensor's own name in it."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    return root, leaf


def _unpadded_shape(shape: torch.Size, layout: Layout, mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's part of a shape, where the last parts of a dim that does not divide are smaller."""
    local = list(shape)
    for axis, placement in enumerate(layout):
        if placement.is_split:
            part = -(-local[placement.dim] // mesh.size(axis))
            start = min(part * mesh.get_local_rank(axis), local[placement.dim])
            local[placement.dim] = min(part, local[placement.dim] - start)
    return tuple(local)
