"""Comparison of two modules of one class in everything that a forward could read, except tensor values.

It covers classes, the tree of modules, shapes and dtypes, hooks, and every attribute. Plain attributes may differ,
as the number of a layer does: the trace has shown whether a forward reads them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.ir.program.python_state import ATOMS, INTERNALS

STATE = ("_parameters", "_buffers")
LOOKS_AT_ALL = frozenset({"__dict__", "vars"})
"""Names with which code reads attributes without naming them."""


@dataclass(slots=True)
class Comparison:
    """Two trees of modules, side by side."""

    pairs: dict[int, tuple[nn.Module, nn.Module]] = field(default_factory=dict)
    """Pairs of corresponding modules, by the id of the first."""
    differing: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Modules of the first tree, and names of plain attributes that have another value in the second."""

    def equal(self, one: nn.Module, other: nn.Module) -> bool:
        """Return whether the trees are equal, except for the values of tensors and the attributes put in
        `differing`.
        """
        if not self._pair(one, other) or not all(self._attributes(a, b) for a, b in list(self.pairs.values())):
            return False
        return not self.differing or not any(_looks_at_all(type(module)) for module, _ in self.pairs.values())

    def _pair(self, one: nn.Module, other: nn.Module) -> bool:
        known = self.pairs.setdefault(id(one), (one, other))
        if known[1] is not other:
            return False
        mine, theirs = vars(one)["_modules"], vars(other)["_modules"]
        if type(one) is not type(other) or mine.keys() != theirs.keys() or vars(one).keys() != vars(other).keys():
            return False
        return all(
            a is b is None or (a is not None and b is not None and self._pair(a, b))
            for a, b in zip(mine.values(), theirs.values(), strict=True)
        )

    def _attributes(self, one: nn.Module, other: nn.Module) -> bool:
        mine, theirs = vars(one), vars(other)
        for name, value in mine.items():
            if name in STATE:
                same = _same_tensors(value, theirs[name])
            elif name in INTERNALS and "hook" in name:
                same = not value and not theirs[name]
            elif name == "_modules":
                same = True
            elif name in INTERNALS:
                same = value == theirs[name]
            else:
                same = self._is_interchangeable(value, theirs[name])
                if not same and _is_plain(value) and _is_plain(theirs[name]):
                    self.differing.append((one, name))
                    continue
            if not same:
                return False
        return True

    def _is_interchangeable(self, one: Any, other: Any) -> bool:
        """Return whether a forward behaves the same no matter which of the two values it reads."""
        if isinstance(one, nn.Module):
            return id(one) in self.pairs and self.pairs[id(one)][1] is other
        if type(one) is not type(other):
            return False
        if isinstance(one, ATOMS):
            return bool(one == other)
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self._is_interchangeable, one, other))
        if isinstance(one, dict):
            return list(one) == list(other) and all(map(self._is_interchangeable, one.values(), other.values()))
        if isinstance(one, functools.partial):
            return all(
                self._is_interchangeable(getattr(one, part), getattr(other, part))
                for part in ("func", "args", "keywords")
            )
        if isinstance(one, types.MethodType):
            return one.__func__ is other.__func__ and self._is_interchangeable(one.__self__, other.__self__)
        return one is other and not any(isinstance(value, nn.Module) for value in getattr(one, "__dict__", {}).values())


def _is_plain(value: Any) -> bool:
    """Return whether an attribute is a value, or a list, tuple or dict of values, as adapters keep a layer's name."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, ATOMS)


def state_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers of a module and those inside, in a fixed order, tied ones as often as they are
    named.
    """
    for each in module.modules():
        for kind in STATE:
            yield from (tensor for tensor in vars(each)[kind].values() if tensor is not None)


def ties(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return for each tensor the index of the first one that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return everything that a trace can observe of a tensor except its values."""
    memory = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return type(tensor), *memory, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()


def _same_tensors(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> bool:
    return one.keys() == other.keys() and all(
        a is b is None or (a is not None and b is not None and form_of(a) == form_of(b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@functools.cache
def _looks_at_all(cls: type) -> bool:
    """Return whether code of a module's class may read attributes without naming them.

    PyTorch's own classes do so only to print, and are left out.
    """
    bases = (base for base in cls.__mro__ if not base.__module__.startswith("torch."))
    functions = (value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType))
    return any(not LOOKS_AT_ALL.isdisjoint(function.__code__.co_names) for function in functions)
