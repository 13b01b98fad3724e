"""Attributes that a forward reads and writes: plain values, containers, and computed attributes."""

from __future__ import annotations

import types
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.python.cone import depends_on_call
from autopar.ir.program.python_state import ATOMS, CONTAINERS, MISSING, Place, contents, equal


@dataclass(slots=True)
class Read:
    """The first time that a forward asks for an attribute or a global, before anything is written there."""

    place: Place
    before: Any
    items: list[Any] | None
    """Items of a container before the forward has changed it."""
    location: str
    own: dict[str, Any] = field(default_factory=dict)
    """The attributes of the object that has this one."""


@dataclass(slots=True)
class Write:
    """The last time that a forward sets an attribute."""

    place: Place
    value: Any
    location: str
    dependent: bool
    """True if the value holds a tensor that is computed from inputs, parameters or random numbers."""


def is_computed(cls: type, name: str) -> bool:
    """Return whether a class computes an attribute on access; if so, the code that computes it is recorded instead."""
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            kept = isinstance(found, types.FunctionType | types.MemberDescriptorType)
            return hasattr(type(found), "__get__") and not kept
    return False


def own_attributes(holder: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has."""
    try:
        return object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}


def is_registered(holder: Any, name: str) -> bool:
    """Return whether a module has a parameter, buffer or module of this name."""
    own = vars(holder) if isinstance(holder, nn.Module) else {}
    return any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


def is_plain(value: Any) -> bool:
    """Return whether a value is an atom, or a container of plain values."""
    return isinstance(value, ATOMS) or (isinstance(value, CONTAINERS) and all(map(is_plain, contents(value))))


def items_of(value: Any) -> list[Any] | None:
    """Return the contents of a mutable container, or the bytes of an array; None for other values."""
    if isinstance(value, list | dict | set | deque):
        return contents(value)
    return [value.tobytes()] if type(value).__module__ == "numpy" and hasattr(value, "tobytes") else None


def value_at(place: Place, root: nn.Module) -> Any:
    """Return the value at a place of a traced model, or MISSING."""
    holder, (kind, key) = place.holder(root), place.steps[-1]
    if kind == "item":
        return holder.get(key, MISSING)
    return getattr(holder, key, MISSING)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def is_unchanged(read: Read) -> bool:
    """Return whether a container still holds the items that it held when it was first read."""
    now, before = items_of(read.before) or [], read.items or []
    return len(now) == len(before) and all(map(equal, now, before))


def only_cached(read: Read, traced: nn.Module) -> bool:
    """Return whether a container is a dict that has only gained items, all independent of the call."""
    if not isinstance(read.before, dict) or read.items is None or len(read.items) == 2 * len(read.before):
        return False
    half = len(read.items) // 2
    old = dict(zip(read.items[:half], read.items[half:], strict=True))
    new = [value for key, value in read.before.items() if key not in old]
    kept = all(key in read.before and equal(read.before[key], value) for key, value in old.items())
    return kept and not any(depends_on_call(x, traced) for value in new for x in tensors_in(value))
