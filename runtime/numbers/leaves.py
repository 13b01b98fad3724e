"""The inputs of a call, flat: what a user calls them, and those that are numbers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.numbers.marked import Number, is_replaceable, tensor_for
from autopar.capture.numbers.watched import Watch
from autopar.capture.static.arguments import Arguments, StaticTensor

_PLAIN = (Tensor, int, float, str, type(None))
"""Types of leaves that a tree is without, if it is flat."""
_FREQUENT = frozenset((*_PLAIN, bool, DTensor))
"""Such types that are told without a call for each leaf."""


def leaves_of(arguments: Arguments) -> tuple[list[Any], Hashable]:
    """Return the leaves of a call's inputs, and their structure; without pytree's Python code if inputs are flat."""
    positional, named = arguments
    leaves = named.values()
    flat = _FREQUENT.issuperset(map(type, leaves)) or all(isinstance(each, _PLAIN) for each in leaves)
    if flat and not positional:
        return list(named.values()), tuple(named)
    found, spec = pytree.tree_flatten(arguments)
    return found, str(spec)


def name_of(path: tuple[Any, ...]) -> str:
    """Return what a user calls an input, or what lies in it."""
    _, outer, *inner = path
    name = str(outer.key) if isinstance(outer, pytree.MappingKey) else f"input {outer.idx}"
    return name + pytree.keystr(tuple(inner))


def names_of(arguments: Arguments) -> list[str]:
    """Return what a user calls each leaf of the inputs."""
    return [name_of(path) for path, _ in pytree.tree_flatten_with_path(arguments)[0]]


def described(arguments: Arguments) -> dict[str, str]:
    """Return the inputs by name, as other ranks are told of them: shapes and dtypes, and of what is no tensor the
    value.
    """
    found = {}
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        found[name_of(path)] = _described_leaf(leaf)
    return found


def _described_leaf(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        plain = (bool, int, float, str, type(None), StaticTensor)
        return repr(leaf) if isinstance(leaf, plain) else type(leaf).__name__
    text = f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(map(str, leaf.shape))}]"
    if isinstance(leaf, DTensor):
        text += f" as {', '.join(map(str, leaf.placements))} over {', '.join(leaf.device_mesh.mesh_dim_names or ())}"
    return text + (" with a gradient" if leaf.requires_grad else "")


def replaceable(arguments: Arguments) -> dict[int, int | float]:
    """Return the numbers that a tensor may stand for, by their places among the leaves."""
    return {place: leaf for place, leaf in enumerate(pytree.tree_leaves(arguments)) if is_replaceable(leaf)}


def with_tensors(arguments: Arguments, dtypes: Mapping[int, torch.dtype]) -> Arguments:
    """Return the same call with tensors of these dtypes in place of numbers."""
    leaves, spec = pytree.tree_flatten(arguments)
    for place, dtype in dtypes.items():
        leaves[place] = tensor_for(leaves[place], dtype).as_subclass(Number)
    return pytree.tree_unflatten(leaves, spec)


def with_watched(arguments: Arguments, places: Collection[int], watch: Watch) -> Arguments:
    """Return the same call with watched numbers."""
    leaves, spec = pytree.tree_flatten(arguments)
    return pytree.tree_unflatten([watch.of(x) if i in places else x for i, x in enumerate(leaves)], spec)
