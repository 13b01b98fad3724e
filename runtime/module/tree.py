"""The modules of a model as its compiled module shows them: copies, of its own classes, with attributes and hooks.

Each slot of the copy holds a parameter or buffer as this rank stores it. While the model is captured it holds a
stand-in on the meta device instead, with the shape, strides and dtype of the whole, so that what is captured is what
the user sees: a module in evaluation, a hook, an attribute that was set.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from autopar.capture.guards import HOOKS_ON_ALL, hooks_on_all_modules
from autopar.errors import InputError

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MODULE_INTERFACE = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes that a compiled module shares with the root of its tree: the very same dicts."""
MISSING: Any = object()


@dataclass(slots=True, eq=False)
class Slot:
    """Place of a parameter or buffer in a module."""

    name: str
    kind: str
    stand_in: Tensor
    """The same one in all slots of a tied tensor."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Parameters, or buffers, of the module that has this place now."""

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


class State(NamedTuple):
    """State on which a captured graph depends, besides its inputs: the modules, their modes and their hooks."""

    training: bool
    modes: tuple[bool, ...]
    hooks: tuple[int, ...]
    """Numbers that are given once: a hook that was removed never comes back."""
    changes: int
    """Number of times that modules were put in the place of others."""

    def may_come_back(self, now: State) -> bool:
        """Return whether modules that are in state `now` can be in this state again."""
        return self.changes == now.changes and set(self.hooks) <= set(now.hooks)


class Tree:
    """The modules below a compiled module, and a separate root of the model's own class."""

    def __init__(self, skeleton: nn.Module) -> None:
        """`skeleton` is a copy of a model whose tensors are on the meta device; it becomes the tree."""
        self.root = skeleton
        named = skeleton.named_parameters(remove_duplicate=False)
        self.parameters = tuple(Slot(name, "_parameters", stand_in) for name, stand_in in named)
        named = skeleton.named_buffers(remove_duplicate=False)
        self.buffers = tuple(Slot(name, "_buffers", stand_in) for name, stand_in in named)
        first: dict[int, str] = {}
        self.first_name = {each.name: first.setdefault(id(each.stand_in), each.name) for each in self._slots()}
        """Name of a tensor → the first of its names."""
        self._children: list[dict[str, Any]] = []
        self._known: list[object] = []
        self._attributes: list[dict[str, Any]] = []
        self._hooks: list[dict[int, Any]] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._changes = 0
        self.left_hooks: set[int] = set()
        """Numbers of forward hooks that captured forwards have registered, and that change no graph."""
        self._read_modules()

    def _slots(self) -> Iterator[Slot]:
        return itertools.chain(self.parameters, self.buffers)

    @property
    def first_names(self) -> tuple[str, ...]:
        """First names of all parameters, so that tied ones appear once."""
        return tuple(slot.name for slot in self.parameters if self.first_name[slot.name] == slot.name)

    def put(self, stored: Mapping[str, Tensor]) -> None:
        """Fill the slots: first name → tensor; None in those whose tensors this rank does not hold."""
        for slot in self._slots():
            slot.tensors[slot.leaf] = stored.get(self.first_name[slot.name])

    def take_copies(self, other: Tree, memo: dict[int, Any]) -> None:
        """Fill the slots with copies of what another tree of the same model holds; go on with its changes and hooks."""
        tensors: dict[str, Any] = {slot.name: slot.tensors.get(slot.leaf) for slot in other._slots()}
        for name in set(other.first_name.values()):
            tensor = tensors[name]
            if tensor is not None:
                memo[id(tensor)] = tensors[name] = _copied(tensor)
        self.put(tensors)
        self._changes = other._changes
        self.left_hooks.update(other.left_hooks)

    def absent(self) -> dict[str, nn.Module]:
        """Return the modules of which another rank has all parameters and buffers, by name."""
        here = {slot.name.rpartition(".")[0] for slot in self._slots() if slot.tensors.get(slot.leaf) is not None}
        owners = {slot.name.rpartition(".")[0] for slot in self._slots()}
        return {name: self.root.get_submodule(name) for name in owners - here}

    def held(self) -> list[Any]:
        """Return the current contents of the parameters' slots."""
        return [tensors.get(leaf, MISSING) for tensors, leaf in self._places]

    def state(self, training: bool) -> State:
        """Return the state on which a captured graph depends, besides its inputs."""
        modes = tuple(map(operator.itemgetter("training"), self._attributes))
        hooks: tuple[int, ...] = ()
        if any(self._hooks) or any(HOOKS_ON_ALL):
            found = itertools.chain(*self._hooks, hooks_on_all_modules())
            hooks = tuple(number for number in found if number not in self.left_hooks)
        return State(training, modes, hooks, self._changes)

    def look(self) -> None:
        """Find the modules again where others have been put in their place.

        Asked for in every step, so it walks over flat lists.
        """
        if list(itertools.chain.from_iterable(map(dict.values, self._children))) != self._known:
            self._read_modules()

    def _read_modules(self) -> None:
        modules = list(self.root.modules())
        self._children = [module._modules for module in modules]
        self._known = list(itertools.chain.from_iterable(map(dict.values, self._children)))
        self._attributes = [vars(module) for module in modules[1:]]
        self._hooks = [vars(module)[name] for module in modules for name in HOOKS]
        self._changes += 1
        by_name = dict(self.root.named_modules(remove_duplicate=False))
        for slot in self._slots():
            owner = by_name.get(slot.name.rpartition(".")[0])
            slot.tensors = {} if owner is None else vars(owner)[slot.kind]
        self._places = [(slot.tensors, slot.leaf) for slot in self.parameters]

    @contextlib.contextmanager
    def standing_in(self, training: bool) -> Iterator[nn.Module]:
        """Yield the model to capture, in the compiled module's mode; raise InputError for tensors that it lacked."""
        held = [(slot, slot.tensors.get(slot.leaf, MISSING)) for slot in self._slots()]
        for slot, _ in held:
            slot.tensors[slot.leaf] = slot.stand_in
        self.root.training = training
        try:
            self._check_complete()
            yield self.root
        finally:
            for slot, tensor in held:
                slot.tensors[slot.leaf] = tensor
                if tensor is MISSING:
                    del slot.tensors[slot.leaf]

    def _check_complete(self) -> None:
        """Raise InputError where parameters or buffers have come or gone since the model was compiled."""
        now = itertools.chain(
            self.root.named_parameters(remove_duplicate=False), self.root.named_buffers(remove_duplicate=False)
        )
        found, known = (
            {name: id(tensor) for name, tensor in now},
            {each.name: id(each.stand_in) for each in self._slots()},
        )
        if found == known:
            return
        new = [name for name, tensor in found.items() if known.get(name) != tensor]
        gone = [name for name in known if name not in found]
        raise InputError(
            f"the modules have changed since the model was compiled: {_listed('new are', new)}"
            f"{'; ' if new and gone else ''}{_listed('gone are', gone)}. Change the model (adapters, parametrizations, "
            "pruning, other layers), then call autopar.compile; to give a parameter other values, assign to it or load "
            "a state dict."
        )


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy without a gradient, as `copy.deepcopy` of a parameter gives (of DTensors it fails, torch 2.13)."""
    values = tensor.detach().clone()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _listed(what: str, names: Iterable[str], most: int = 4) -> str:
    found = list(names)
    return f"{what} {', '.join(found[:most])}{' …' if len(found) > most else ''}" if found else ""
