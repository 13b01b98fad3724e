"""Python state that a forward reads beyond its inputs, and the check that it is unchanged since capture.

A forward reads attributes of modules and of objects that they hold, globals of files, cells of closures. Each is a
`Place`. A `Watch` remembers what the places of one program hold, and checks them in every step: in one pass in C over
flat lists, by identity. Values are compared only if that finds another object.
"""

from __future__ import annotations

import copy
import enum
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn

MISSING: Any = types.SimpleNamespace(name="nothing")
"""Stand-in for an absent value."""
ATOMS = (
    *(int, float, complex, bool, str, bytes, type(None), range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose values never change and are compared by value; everything else is compared by identity."""
INTERNALS = (frozenset(vars(nn.Module)) | frozenset(vars(nn.Module()))) - {"forward"}
"""Names that `nn.Module` itself keeps in modules: modes, hooks, parameters and buffers, which are no Python state."""
HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Names of the attributes in which modules keep their forward hooks, by number."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
MAX_ITEMS = 1000
"""Maximum size of a container or array whose contents are watched.

Longer containers are watched by identity and length only, larger arrays by identity only.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Place that a forward reads: an attribute of a module or of an object that a module holds, or a global."""

    owner: Any
    """The path of a module, a `str`; else what holds globals: the dict of a file, a class, an object, a cell."""
    steps: tuple[tuple[Literal["attribute", "item"], Any], ...]
    """Attribute and item accesses that lead from the owner to the value."""
    name: str
    """Name of the place as a user writes it: `layers.0.config.beta`."""

    def holder(self, root: nn.Module) -> Any:
        """Return the object in which the last step looks."""
        found: Any = root.get_submodule(self.owner) if isinstance(self.owner, str) else self.owner
        for kind, key in self.steps[:-1]:
            found = getattr(found, key) if kind == "attribute" else found[key]
        return found

    def attribute(self, key: str) -> Place:
        """Return an attribute of the object that is here."""
        return Place(self.owner, (*self.steps, ("attribute", key)), f"{self.name}.{key}" if self.name else key)

    def item(self, key: Any) -> Place:
        """Return an item of the container that is here."""
        return Place(self.owner, (*self.steps, ("item", key)), f"{self.name}[{key!r}]")

    def set(self, root: nn.Module, value: Any) -> None:
        """Put a value here."""
        kind, key = self.steps[-1]
        holder = self.holder(root)
        if kind == "item":
            holder[key] = value
        else:
            setattr(holder, key, value)


Position = tuple[str, str, int]
"""Position of a forward hook: path of the module, name of a table of `HOOK_TABLES`, number of the hook there.

PyTorch gives a number once, and all copies of a model have a hook under the same number.
"""


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredHooks:
    """Forward hooks that the first call of a forward registers and leaves in modules."""

    entries: Mapping[Position, Any] = field(default_factory=dict)
    """Position → hook; in the tables of options True."""
    binding: Callable[[nn.Module], Callable[[Any], Any]] = lambda root: lambda entry: entry
    """Makes, for a copy of the model, the function that turns an entry into one that knows the copy's modules."""

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def numbers(self) -> set[int]:
        return {number for _, _, number in self.entries}

    @property
    def modules(self) -> list[tuple[str, str]]:
        """Path of the module and name of the table of each entry, in order."""
        return [(module, table) for module, table, _ in self.entries]

    def put(self, root: nn.Module) -> None:
        """Register the hooks in a copy of the model where they are not there."""
        tables = {at: vars(root.get_submodule(at[0]))[at[1]] for at in self.entries}
        missing = [at for at, table in tables.items() if at[2] not in table]
        bound = self.binding(root) if missing else None
        for at in missing:
            assert bound is not None
            tables[at][at[2]] = bound(self.entries[at])


@dataclass(frozen=True, slots=True)
class PythonState:
    """Python state that the forward of a captured program reads, and that it leaves behind."""

    read: tuple[Place, ...] = ()
    written: tuple[tuple[Place, Any], ...] = ()
    """Plain values that a call leaves in places, which later calls leave alone."""
    lost: tuple[Place, ...] = ()
    """Places into which the forward writes tensors or objects, which a compiled module does not have."""
    registered: RegisteredHooks = field(default_factory=RegisteredHooks)
    """Forward hooks that the first call registers; they go with `written`, where a flag may say that they are there."""
    hooks: tuple[Callable[[Tensor], Tensor | None], ...] = ()
    """The gradient hooks that the forward registers on tensors, by the number that calls of `gradient_hook` have."""
    modes: tuple[tuple[str, bool], ...] = ()
    """The functions of torch that the forward asks for modes (`is_grad_enabled` …), and what they say in the call."""
    settled: bool = True
    """True if the graph is the same before and after the written values and registered hooks are in place."""


class Watch:
    """Snapshot of the Python state that a program reads, to check that it has not changed."""

    def __init__(self, root: nn.Module, state: PythonState) -> None:
        self._root, self._state = root, state
        if state.settled:
            self.leave_written()
        self._entries = _Entries.of(root, state.read)
        self._values = self._entries.compared()

    def holds(self) -> bool:
        """Return whether nothing has changed since the snapshot."""
        if any(getattr(torch, name)() != value for name, value in self._state.modes):
            return False
        if self._entries.same():
            return True
        try:
            now = _Entries.of(self._root, self._state.read)
        except (AttributeError, LookupError, ValueError):
            return False  # a place is gone
        if now.compared() != self._values:
            return False
        self._entries = now  # other objects of equal values
        return True

    def on(self, root: nn.Module) -> Watch:
        """Return the same watch on a copy of the model."""
        other = copy.copy(self)
        other._root, other._entries = root, _Entries.of(root, self._state.read)
        return other

    def leave_written(self) -> None:
        """Put into the model what a call of the program writes there."""
        for place, value in self._state.written:
            place.set(self._root, value)
        if self._state.registered.entries:
            self._state.registered.put(self._root)

    def differs_in(self, other: Watch) -> list[str]:
        """Return the names of places in which another watch has found something else."""
        mine = dict(zip(self._entries.names, self._entries.values, strict=True))
        theirs = zip(other._entries.names, other._entries.values, strict=True)
        return [name for name, value in theirs if not equal(mine.get(name, MISSING), value)]


@dataclass(slots=True)
class _Entries:
    """The values of places as flat lists, so that looking again is one pass over each."""

    dicts: list[dict[Any, Any]] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """Value of each dict under its key."""
    names: list[str] = field(default_factory=list)
    """Names of the places that lie in a dict."""
    containers: list[tuple[Any, list[Any]]] = field(default_factory=list)
    """A container and its items."""
    tensors: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    others: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    """Functions that look up the remaining places, each with the value found."""

    @classmethod
    def of(cls, root: nn.Module, places: Iterable[Place]) -> _Entries:
        found = cls(others=[(torch.get_default_dtype, torch.get_default_dtype())])
        seen: set[int] = set()
        for place in places:
            found._add(place, place.holder(root), seen)
        return found

    def _add(self, place: Place, holder: Any, seen: set[int]) -> None:
        kind, key = place.steps[-1]
        own = holder if kind == "item" else getattr(holder, "__dict__", None)
        value = MISSING
        if isinstance(own, dict):
            value = own.get(key, MISSING)
            self.dicts.append(own)
            self.keys.append(key)
            self.values.append(value)
            self.names.append(place.name)
        if value is MISSING and not _is_method(holder, key):
            look = _item if kind == "item" else _attribute
            value = look(holder, key)
            if value is not MISSING:
                self.others.append((lambda: look(holder, key), value))
        self._add_content(value, seen)

    def _add_content(self, value: Any, seen: set[int]) -> None:
        if isinstance(value, ATOMS) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_inference():
                self.tensors.append(value)
                self.versions.append(value._version)
        elif isinstance(value, CONTAINERS):
            items = contents(value)
            if len(items) > MAX_ITEMS:
                self.others.append((lambda: len(value), len(value)))
                return
            if not isinstance(value, tuple | frozenset):
                self.containers.append((value, items))
            for item in items:
                self._add_content(item, seen)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.size <= MAX_ITEMS:
            self.others.append((value.tobytes, value.tobytes()))
        elif is_plain_object(value):
            self._add_content(vars(value), seen)

    def same(self) -> bool:
        """Return whether every place still holds the very same object."""
        return (
            all(map(operator.is_, map(dict.get, self.dicts, self.keys, repeat(MISSING)), self.values))
            and (not self.containers or all(_same_items(container, items) for container, items in self.containers))
            and (not self.tensors or [tensor._version for tensor in self.tensors] == self.versions)
            and all(_equal(look(), value) for look, value in self.others)
        )

    def compared(self) -> tuple[Any, ...]:
        """Return the values, in a form that is equal where they are."""
        return (
            tuple(map(_compared, self.values)),
            tuple(tuple(map(_compared, items)) for _, items in self.containers),
            tuple(map(id, self.tensors)),
            tuple(self.versions),
            tuple(_compared(value) for _, value in self.others),
        )


def is_plain_object(value: Any) -> bool:
    """Return whether an object is a namespace without code, whose attributes a watch must check itself."""
    return isinstance(value, types.SimpleNamespace) and value is not MISSING


def is_observable(value: Any) -> bool:
    """Return whether an object may keep data in attributes, and its class is written in Python."""
    if isinstance(value, (*ATOMS, *CONTAINERS, Tensor, nn.Module, type, types.ModuleType, Mapping)) or callable(value):
        return False
    return bool(type(value).__flags__ & 1 << 9) and hasattr(value, "__dict__")  # Py_TPFLAGS_HEAPTYPE


def contents(container: Any) -> list[Any]:
    """Return the items of a container; of a dict its keys and its values."""
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same to a forward.

    Atoms and containers of them are compared by value, others by identity.
    """
    if one is other:
        return True
    if isinstance(one, CONTAINERS) and type(one) is type(other) and len(one) == len(other):
        return all(map(equal, contents(one), contents(other)))
    return _equal(one, other)


def _same_items(container: Any, items: list[Any]) -> bool:
    now: Any = chain(container.keys(), container.values()) if isinstance(container, dict) else container
    length = 2 * len(container) if isinstance(container, dict) else len(container)
    return length == len(items) and all(map(operator.is_, now, items))


def _equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, ATOMS) and bool(one == other))


def _compared(value: Any) -> Any:
    if isinstance(value, ATOMS):
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, tuple):
        return tuple(map(_compared, value))
    return None if isinstance(value, Mapping | list | set | deque) else id(value)


def _is_method(holder: Any, key: Any) -> bool:
    return isinstance(key, str) and isinstance(getattr(type(holder), key, None), types.FunctionType)


def _attribute(holder: Any, key: str) -> Any:
    return getattr(holder, key, MISSING)


def _item(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except (LookupError, TypeError):
        return MISSING
