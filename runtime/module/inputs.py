"""The inputs of a call: by name, told apart by all that a graph depends on, and as this rank holds them.

A plain tensor is the whole of an input, equal on every rank. A DTensor may be split: its local part is taken as it is
where its parts are equal, and gathered where the planner has no layout for it (partial sums, uneven parts).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from autopar.capture.passes.autocast import Autocast
from autopar.errors import InputError
from autopar.ir.program.program import Program, fault_of_form
from autopar.ir.sharding.layout import I, Layout, S, replicated
from autopar.runtime.numbers.leaves import Arguments, leaves_of, name_of
from autopar.runtime.ranks.calls import Values
from autopar.runtime.ranks.checksums import checksums


class CallSignature(inspect.Signature):
    """Signature of a model's forward, with what binds a call in every step."""

    @cached_property
    def is_by_name(self) -> bool:
        """True if every argument has a name."""
        return not any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in self.parameters.values())

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """Names of the arguments that may be given by position."""
        return tuple(p.name for p in self.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)

    @cached_property
    def named(self) -> dict[str, bool]:
        """Names of all arguments, in order → whether a call needs them."""
        known = (p for p in self.parameters.values() if p.kind is not p.VAR_KEYWORD)
        return {p.name: p.default is p.empty for p in known}

    @cached_property
    def required(self) -> frozenset[str]:
        """Names of the arguments that every call has."""
        return frozenset(name for name, needed in self.named.items() if needed)


def call_signature(model: nn.Module) -> CallSignature:
    """Return the signature that calls of a model are brought to; any, where a hook is to see them as they were made."""
    if model._forward_pre_hooks or model._forward_hooks:
        return CallSignature.from_callable(lambda *args, **kwargs: None)
    return CallSignature.from_callable(model.forward)


def canonical_arguments(signature: CallSignature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the same call with every argument by name, in the order of the signature; as it is where that cannot be.

    InputError where the signature does not take it, or a tensor is not dense.
    """
    if not signature.is_by_name:
        return _dense((args, dict(kwargs)))
    given = dict(zip(signature.positional, args, strict=False), **kwargs)
    if len(given) == len(args) + len(kwargs) and signature.required <= given.keys() <= signature.named.keys():
        return _dense(((), {name: given[name] for name in signature.named if name in given} if kwargs else given))
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InputError(f"the inputs do not fit the model's forward{signature}: {error}.") from error
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    extra = bound.pop(rest, {}) if rest else {}
    return _dense(((), {**bound, **extra}))


def _dense(arguments: Arguments) -> Arguments:
    """Return the same inputs; InputError where a tensor is not dense."""
    faults = [isinstance(leaf, Tensor) and fault_of_form(leaf) for leaf in leaves_of(arguments)[0]]
    if any(faults):
        paths = pytree.tree_flatten_with_path(arguments)[0]
        raise InputError(
            next(f"{name_of(path)} {fault}." for (path, _), fault in zip(paths, faults, strict=True) if fault)
        )
    return arguments


def kind_of(arguments: Arguments, device: str, tensors: Collection[int] = ()) -> object:
    """Return what a graph depends on: structure, tensors without values, everything else with its value, autocast.

    `tensors` are the places of numbers that are tensors of the graph, of which only the type counts.
    """
    leaves, structure = leaves_of(arguments)
    kinds = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, None) if type(leaf) is Tensor else _kind_of_leaf(leaf)
        for leaf in leaves
    ]
    for place in tensors:
        kinds[place] = type(leaves[place])
    return structure, tuple(kinds), Autocast.around(device)


def _kind_of_leaf(leaf: Any) -> object:
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)
    where = (leaf.device_mesh, leaf.placements) if isinstance(leaf, DTensor) else None
    return tuple(leaf.shape), leaf.dtype, leaf.requires_grad, where


def values_of(arguments: Arguments) -> Values:
    """Return the checksums of plain tensors, which all ranks hold alike, and of DTensors' parts, which some do."""
    by_part: dict[str, dict[str, Tensor]] = {"": {}}
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        if type(leaf) in (Tensor, nn.Parameter):
            by_part[""][name_of(path)] = leaf
        elif isinstance(leaf, DTensor) and not any(each.is_partial() for each in leaf.placements):
            by_part.setdefault(_part_of(leaf), {})[name_of(path)] = leaf.to_local()
    return {part: checksums(tensors) for part, tensors in by_part.items()}


def _part_of(value: DTensor) -> str:
    """Describe the part of a DTensor that this rank holds, by the axes that split it."""
    mesh = value.device_mesh
    split = [axis for axis, placement in enumerate(value.placements) if not placement.is_replicate()]
    return " ".join(f"{(mesh.mesh_dim_names or range(mesh.ndim))[axis]}={mesh.get_local_rank(axis)}" for axis in split)


def without_placements(arguments: Arguments) -> Arguments:
    """Return the same inputs with a tensor of the global shape, without memory, in place of each DTensor."""

    def whole(x: DTensor) -> Tensor:
        with FakeTensorMode():
            return torch.empty(x.shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    return pytree.tree_map_only(DTensor, whole, arguments)


def layout_of(value: DTensor, mesh: DeviceMesh) -> Layout:
    """Return the layout over `mesh` in which an input arrives; InputError where it lies on another mesh."""
    names, theirs = mesh.mesh_dim_names or (), value.device_mesh.mesh_dim_names or ()
    part = tuple(name for name in names if name in theirs)
    if value.device_mesh != mesh and (part != theirs or not part or mesh[part] != value.device_mesh):
        raise InputError(
            f"an input of shape {tuple(value.shape)} is a DTensor on {value.device_mesh}, the model runs on {mesh}; "
            "distribute it over that mesh or over some of its axes, or give the whole tensor."
        )
    placements = dict(zip(theirs, value.placements, strict=True))
    found = [placements.get(name, Replicate()) for name in names]
    known = all(type(placement) in (Shard, Replicate) for placement in found)
    layout = Layout(S(each.dim % value.ndim) if isinstance(each, Shard) else I for each in found)
    return layout if known and layout.divides(value.shape, mesh.shape) else replicated(mesh.ndim)


def layouts_of(program: Program, arguments: Arguments, mesh: DeviceMesh) -> dict[str, Layout]:
    """Return the placeholder → the layout in which it arrives, for inputs that are DTensors."""
    return {
        placeholder: layout_of(leaf, mesh)
        for placeholder, leaf in zip(program.inputs, pytree.tree_leaves(arguments), strict=True)
        if placeholder is not None and isinstance(leaf, DTensor)
    }


def local_input(value: Tensor, layout: Layout) -> Tensor:
    """Return this rank's part of an input in `layout`; communicate only if the planner had no layout for it."""
    if not isinstance(value, DTensor):
        return value
    return value.to_local() if any(placement.is_split for placement in layout) else value.full_tensor()
