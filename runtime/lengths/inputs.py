"""Inputs as buckets see them: which of their dims count positions and samples, and the same inputs of another size.

Samples are dim 0 of every tensor that has the batch's size there, which is that of the first tensor with dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.runtime.lengths.length_buckets import Buckets

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a call: positions of a sequence, and samples; None if no input has any."""

    length: int | None
    batch: int | None


@dataclass(frozen=True, slots=True)
class Role:
    """Meaning of the dims of one input tensor: which count positions, and whether dim 0 counts samples."""

    name: str
    positions: tuple[int, ...]
    samples: bool
    value: float | None
    """Value at padded positions; None if unspecified."""

    def shape(self, shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of the input in a call of these sizes."""
        found = list(shape)
        for dim in self.positions:
            found[dim] = sizes.length or found[dim]
        if self.samples:
            found[0] = sizes.batch or found[0]
        return tuple(found)


def roles_of(arguments: Arguments, buckets: Buckets) -> tuple[Role | None, ...]:
    """Return the role of each leaf of the arguments; None for what is no tensor with dims."""
    found: list[Role | None] = []
    batch: int | None = None
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            found.append(None)
            continue
        batch = leaf.shape[0] if batch is None else batch
        name = _name(path)
        value = buckets.padding.get(name)
        positions = () if value is None or buckets.lengths is None else buckets.positions_of(name, leaf.ndim)
        found.append(Role(name, positions, leaf.shape[0] == batch and 0 not in positions, value))
    return tuple(found)


def _name(path: tuple[Any, ...]) -> str:
    """Return the last name on the way to a leaf: an argument of forward, or a key in one."""
    keys = [each.key for each in path[1:] if isinstance(each, pytree.MappingKey)]
    return str(keys[-1]) if keys else f"input {path[-1].idx}"


def sizes_of(arguments: Arguments, roles: tuple[Role | None, ...]) -> Sizes:
    """Return the positions and samples of a call; raise InputError if inputs differ in their positions."""
    lengths: dict[int, str] = {}
    batch: int | None = None
    for leaf, role in zip(pytree.tree_leaves(arguments), roles, strict=True):
        if role is None:
            continue
        batch = leaf.shape[0] if role.samples and batch is None else batch
        for dim in role.positions:
            lengths.setdefault(leaf.shape[dim], role.name)
    if len(lengths) > 1:
        specified = ", ".join(f"{name} {length}" for length, name in lengths.items())
        raise InputError(
            f"the inputs have different numbers of positions ({specified}), and buckets pad them alike; give inputs of "
            "one "
            "length, say with Buckets(dims=…) which dims count positions, or leave inputs without out of padding."
        )
    return Sizes(next(iter(lengths), None), batch)


def padded(arguments: Arguments, roles: tuple[Role | None, ...], sizes: Sizes) -> Arguments:
    """Return the same call in larger sizes, with the values of padding behind; InputError where a value is not
    known.
    """
    leaves, spec = pytree.tree_flatten(arguments)
    found = [
        leaf if role is None else _padded(leaf, role, role.shape(tuple(leaf.shape), sizes))
        for leaf, role in zip(leaves, roles, strict=True)
    ]
    return pytree.tree_unflatten(found, spec)


def _padded(leaf: Tensor, role: Role, shape: tuple[int, ...]) -> Tensor:
    if tuple(leaf.shape) == shape:
        return leaf
    if isinstance(leaf, DTensor):
        raise InputError(
            f"{role.name} is a DTensor of {list(leaf.shape)}, which would have to be padded to {list(shape)}; pad it "
            'before it is distributed, or give plain tensors (inputs="local": each rank its own part).'
        )
    if role.value is None:
        raise InputError(
            f"{role.name} has {leaf.shape[0]} samples and is to be padded to {shape[0]}, with no value to pad it with; "
            f"give Buckets(padding={{{role.name!r}: value, …}})."
        )
    missing = [after - before for before, after in zip(leaf.shape, shape, strict=True)]
    behind = [amount for count in reversed(missing) for amount in (0, count)]
    return F.pad(leaf, behind, value=role.value)


def empty(arguments: Arguments, roles: tuple[Role | None, ...], sizes: Sizes) -> Arguments:
    """Return the same call in these sizes, on the meta device."""
    return _made(arguments, roles, sizes, lambda leaf, role, shape: torch.empty(shape, dtype=leaf.dtype, device="meta"))


def random(arguments: Arguments, roles: tuple[Role | None, ...], sizes: Sizes) -> Arguments:
    """Return the same call in these sizes, on the CPU, with numbers that are valid in most models, equal in every run.

    Integers are 0 or 1; what is called a mask hides nothing.
    """
    generator = torch.Generator().manual_seed(0)

    def made(leaf: Tensor, role: Role, shape: tuple[int, ...]) -> Tensor:
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
        elif leaf.dtype == torch.bool or "mask" in role.name:
            values = torch.ones(shape)
        else:
            values = torch.randint(2, shape, generator=generator)
            if values.numel() > 1:  # not all alike, however few there are
                values.view(-1)[:2] = torch.tensor([0, 1])
        return values if leaf.dtype.is_floating_point else values.to(leaf.dtype)

    return _made(arguments, roles, sizes, made)


def _made(arguments: Arguments, roles: tuple[Role | None, ...], sizes: Sizes, make: Any) -> Arguments:
    leaves, spec = pytree.tree_flatten(arguments)
    found = []
    for leaf, role in zip(leaves, roles, strict=True):
        if role is None:
            found.append(torch.ones((), dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf)
        else:
            made = make(leaf, role, role.shape(tuple(leaf.shape), sizes))
            found.append(made.requires_grad_(leaf.requires_grad))
    return pytree.tree_unflatten(found, spec)
