"""Lookup of the captured program that fits the model's present Python state: attributes, globals, closures.

A program is captured for what the forward has read of Python. If that has changed, the call is one of another kind,
for which the model is captured and planned anew; if it is again what it was, the old program runs.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from torch import nn

from autopar.errors import InputError, warn_user
from autopar.ir.program.python_state import (
    ATOMS,
    CONTAINERS,
    INTERNALS,
    MISSING,
    Place,
    PythonState,
    Watch,
    equal,
    is_observable,
)

Key = tuple[int, Any]
MANY = 8
"""After so many programs for one kind of input a warning says what varies."""


class PythonKinds:
    """The Python state of one model."""

    def __init__(self, root: nn.Module, left_hooks: set[int]) -> None:
        """`root` is the captured model; `left_hooks` takes the numbers of forward hooks that change no graph."""
        self.root, self._left_hooks = root, left_hooks
        self._original: _Original | None = None
        self.shown = False
        """True once the compiled module exists and shows the attributes of the model."""

    def follow(self, original: nn.Module | None) -> None:
        """Let what is set in attributes of the model of which `root` is a copy count, while somebody else holds it."""
        self._original = None if original is None else _Original(original, self.root)
        self.shown = True

    def keeps(self, name: str) -> bool:
        """Return whether the model has data under a name: an attribute of its own, or a class attribute that is no
        code.
        """
        if name in INTERNALS:
            return False
        return name in vars(self.root) or isinstance(getattr(type(self.root), name, MISSING), (*ATOMS, *CONTAINERS))

    def takes(self, compiled: type, name: str, value: Any) -> bool:
        """Return whether an attribute set on the compiled module goes to the model; InputError if both have one."""
        if name in INTERNALS or isinstance(value, nn.Parameter | nn.Module):
            return False
        if hasattr(compiled, name) and name in vars(self.root) and not name.startswith("_"):
            raise InputError(
                f"{name} is an attribute of the compiled module and one of the model; set that of the model with "
                f"compiled.tree.root.{name} = …, or give it another name."
            )
        registered = any(name in vars(self.root)[kind] for kind in ("_parameters", "_buffers", "_modules"))
        return not registered and not hasattr(compiled, name) and (self.keeps(name) or not name.startswith("_"))

    def fitting(self, known: Sequence[tuple[Watch, Any]]) -> int:
        """Return the index of the program, among those for one kind of input, that fits the present Python state.

        Return the number of programs if none fits.
        """
        for everything in (False, True) if self._original is not None else (False,):
            if self._original is not None:
                self._original.take_over(everything)
            for number in reversed(range(len(known))):
                if known[number][0].holds():
                    return number
        return len(known)

    def watched(self, state: PythonState) -> Watch:
        """Return the places that the captured forward has read and written."""
        watch = Watch(self.root, state)
        if state.settled:
            self._left_hooks.update(state.registered.numbers)
        if self._original is not None:
            self._original.read(state.read)
        for place in state.lost:
            place.set(self.root, Lost(place.name))
        return watch


def warn_of_many(known: Sequence[tuple[Watch, Any]]) -> None:
    """Warn where a number that changes in every step has the model planned in every step."""
    if len(known) == MANY:
        (before, _), (now, _) = known[-2:]
        varying = ", ".join(before.differs_in(now)) or "a container"
        warn_user(
            f"the model was captured and planned {MANY} times for equal inputs, as {varying} changed in between, which "
            "forward reads; where it changes in every step, make it a buffer or an argument of forward.",
        )


class Lost:
    """Stand-in for a tensor or object that a forward writes into an attribute and a compiled module does not keep."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return (
            f"<{self._name} is written by forward, and a compiled module keeps no intermediate results: return it from "
            "forward>"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("_") else f"{self!r} has no {name}")

    def _refuse(self, *args: Any) -> Any:
        raise TypeError(repr(self))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next((each for each in args if isinstance(each, Lost)), cls("an attribute"))
        raise TypeError(f"{function.__name__} of {found!r}")


class _Original:
    """The model that was given to compile, as long as somebody holds it: what is set there counts for its copy, too.

    That is so for numbers, texts and the like in attributes of its modules, and of objects that these hold.
    """

    def __init__(self, original: nn.Module, root: nn.Module) -> None:
        self._root = root
        self._model = weakref.ref(original)
        self._seen: dict[Key, list[Any]] = {}
        """(id of what holds an attribute, its name) → a reference to that, the name, the value last seen, the place."""
        self._read: dict[Key, None] = {}
        """Keys of the attributes that forward reads, in order."""
        self._flat: tuple[list[Any], ...] = ([], [], [])
        """References, names and last values of the attributes that forward reads, for a check in one pass in C."""
        for path, module in original.named_modules():
            self._collect(module, Place(path, (), path), depth=3)

    def _collect(self, holder: Any, at: Place, depth: int) -> None:
        for name, value in vars(holder).items():
            if isinstance(value, ATOMS) and name not in INTERNALS:
                self._seen.setdefault((id(holder), name), [weakref.ref(holder), name, value, at.attribute(name)])
            elif depth and is_observable(value):
                with contextlib.suppress(TypeError):  # an object without weak references
                    self._collect(value, at.attribute(name), depth - 1)

    def read(self, places: Iterable[Place]) -> None:
        """Note that the forward reads these places."""
        model = self._model()
        if model is None:
            return
        for place in places:
            if isinstance(place.owner, str):
                with contextlib.suppress(AttributeError, LookupError):  # the original has changed
                    key = id(place.holder(model)), place.steps[-1][1]
                    if key in self._seen:
                        self._read[key] = None
        self._flatten()

    def _flatten(self) -> None:
        entries = [self._seen[key] for key in self._read]
        self._flat = [each[0] for each in entries], [each[1] for each in entries], [each[2] for each in entries]

    def take_over(self, everything: bool) -> None:
        """Set in the copy what was set in the original since it was last looked at; of what forward reads, or all."""
        if self._model() is None:
            for kept in (self._seen, self._read, *self._flat):
                kept.clear()
        elif everything or not self._is_unchanged():
            for entry in self._seen.values():
                reference, name, value, place = entry
                holder = reference()
                now = value if holder is None else holder.__dict__.get(name, MISSING)
                if now is not MISSING and not equal(now, value):
                    place.set(self._root, now)
                entry[2] = now
            self._flatten()

    def _is_unchanged(self) -> bool:
        references, names, values = self._flat
        held = map(operator.attrgetter("__dict__"), map(operator.call, references))
        try:
            return all(map(operator.is_, map(dict.get, held, names, repeat(MISSING)), values))
        except AttributeError:  # an object is gone
            return False
