"""Record of the Python state that a forward reads and writes during tracing.

That is the attributes of its modules and of the objects that these hold.

Attribute access of all modules, and of the objects that are found in their attributes, goes through this file while a
model is traced. The graph depends on everything that a forward reads before it writes. A write is harmless if nothing
reads the value first, or if it settles: a cache that is filled once. A value that goes from one call to the next would
stand still in a graph, and is refused.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar.capture.python.attributes import (
    Read,
    Write,
    is_computed,
    is_plain,
    is_registered,
    is_unchanged,
    items_of,
    only_cached,
    own_attributes,
    tensors_in,
    value_at,
)
from autopar.capture.python.cone import comes_from, depends_on_call
from autopar.capture.python.tensor_hooks import hooks_in, registered_hooks
from autopar.capture.python.user_code import is_users, where
from autopar.errors import CaptureError
from autopar.ir.program.python_state import (
    ATOMS,
    INTERNALS,
    MAX_ITEMS,
    MISSING,
    Place,
    PythonState,
    RegisteredHooks,
    equal,
    is_observable,
)

ADVICE = (
    "A compiled module runs a graph, in which that stands still: register it as a buffer and write into that, or take "
    "it as an argument and return its new value."
)


ReadValues = tuple[int, dict[int, tuple[Read, Any, list[Any] | None]]]


class Recorder:
    """Records one trace of a model."""

    def __init__(self, traced: nn.Module, model: nn.Module, globals_read: tuple[Place, ...] = ()) -> None:
        """`traced` is a copy of `model`."""
        self._traced, self._model = traced, model
        self._places = {id(module): Place(path, (), path) for path, module in traced.named_modules()}
        """Place of each object whose attributes are recorded, by its id."""
        self._reads: dict[tuple[int, str], Read] = {}
        self._globals = [self._global(place) for place in globals_read]
        self._inner: list[Read] = []
        """Reads of values inside containers."""
        self._writes: dict[tuple[int, str], Write] = {}
        self._sets = 0
        """Number of times that the forward has set an attribute."""
        self._kept: list[Any] = []  # an object that goes would leave its id to another
        self._patched: set[type] = set()
        self._stack = contextlib.ExitStack()
        self._on = self._ended = False
        self.evolved: tuple[Write, ...] = ()
        """Plain values that the forward has read, and then changed; known when it has ended."""
        self.registered = RegisteredHooks()
        """Forward hooks that the forward has left in modules; known when it has ended."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside; at the end of the forward, CaptureError for what it writes and a graph cannot keep."""
        with self._stack:
            self._patch(nn.Module)
            ends = self._traced.register_forward_hook(lambda *_: self._end())
            self._stack.callback(ends.remove)
            before = hooks_in(self._traced)
            self._on = True
            self._stack.callback(setattr, self, "_on", False)
            yield
            assert self._ended, "a traced forward ends"
            new = {at: hook for at, hook in hooks_in(self._traced).items() if at not in before}
            self.registered = registered_hooks(self._model, self._traced, new)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Record nothing inside the block, which is not part of the forward."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def held(self) -> ReadValues:
        """Return the present values at all places that were read, and the number of attribute writes so far."""
        with self.aside():
            reads = ((read, read.own.get(name, read.before)) for (_, name), read in self._reads.items())
            outside = ((read, value_at(read.place, self._traced)) for read in self._globals)
            inner = ((read, read.before) for read in self._inner)
            return self._sets, {id(read): (read, v, items_of(v)) for read, v in (*reads, *inner, *outside)}

    def changed_since(self, earlier: ReadValues) -> bool:
        """Return whether the forward has since written an attribute, or changed anything it had read or has read
        since.
        """
        sets, now = self.held()
        if sets != earlier[0]:
            return True
        for key, (read, value, items) in now.items():
            _, before, held = earlier[1].get(key, (read, read.before, read.items))
            if not equal(before, value) or not all(map(equal, held or (), items or ())):
                return True
            if len(held or ()) != len(items or ()):
                return True
        return False

    def has_read(self, holder: Any, name: str) -> bool:
        """Return whether the forward has read or written an attribute so far."""
        return (id(holder), name) in self._reads or (id(holder), name) in self._writes

    def read_alike(self, pairs: Mapping[int, tuple[nn.Module, nn.Module]]) -> None:
        """Record the reads of modules, by id, for those whose forward theirs stands for: the second of each pair."""
        for (holder, name), read in list(self._reads.items()):
            _, other = pairs.get(holder, (None, None))
            if other is None or (id(other), name) in self._reads:
                continue
            value = vars(other).get(name, read.before)
            own = own_attributes(other)
            self._reads[id(other), name] = Read(self._place(other, name), value, items_of(value), read.location, own)

    def state(self, settled: bool) -> PythonState:
        """Return the Python state that this trace has read and written; `settled` is as in `PythonState`."""
        reads = (*self._reads.values(), *self._globals)
        fresh = [write for key, write in self._writes.items() if key not in self._reads]
        evolved = [write for write in self.evolved if isinstance(write.place.owner, str)]
        plain = [write for write in fresh if is_plain(write.value)]
        lost = [write for write in fresh if not is_plain(write.value)]
        return PythonState(
            tuple(read.place for read in reads),
            tuple((write.place, write.value) for write in (*plain, *evolved)),
            tuple(write.place for write in lost),
            self.registered,
            settled=settled,
        )

    def put_evolved(self, traced: nn.Module) -> None:
        """Change another copy of the model as this forward has changed its own; globals are changed already."""
        for write in self.evolved:
            if isinstance(write.place.owner, str):
                write.place.set(traced, copy.deepcopy(write.value))
        self.registered.put(traced)

    def restore_globals(self) -> None:
        """Undo what the forward has written outside the model."""
        for read in self._globals:
            if read.before is not MISSING:
                read.place.set(self._traced, read.before)

    def _global(self, place: Place) -> Read:
        value = value_at(place, self._traced)
        return Read(place, value, items_of(value), "")

    def _patch(self, cls: type) -> None:
        """Record reads and writes of attributes of a class's objects."""
        get: Callable[[Any, str], Any] = cls.__getattribute__  # pyright: ignore[reportAssignmentType]
        put: Callable[[Any, str, Any], None] = cls.__setattr__  # pyright: ignore[reportAssignmentType]

        def read(holder: Any, name: str) -> Any:
            try:
                value = get(holder, name)
            except AttributeError:
                if self._on:
                    self._note_missing(holder, name)
                raise
            if self._on:
                self._note(holder, name, value)
            return value

        def write(holder: Any, name: str, value: Any) -> None:
            put(holder, name, value)
            if self._on:
                self._note_write(holder, name, value)

        self._stack.enter_context(_replacing_method(cls, "__getattribute__", read))
        self._stack.enter_context(_replacing_method(cls, "__setattr__", write))

    def _note(self, holder: Any, name: str, value: Any) -> None:
        key = id(holder), name
        if name in INTERNALS or key in self._reads or key in self._writes or key[0] not in self._places:
            return
        if name not in own_attributes(holder) and is_computed(type(holder), name):
            return
        self._on = False  # reading the value is not part of the forward
        try:
            place = self._place(holder, name)
            location = where(sys._getframe(2))
            if isinstance(value, torch.Generator):
                raise CaptureError(
                    f"the forward draws from {place.name} ({location}), a torch.Generator, which a graph cannot hold; "
                    "leave generator= out: random operations follow Run(seed=…) and the step."
                )
            if isinstance(value, Iterator):
                raise CaptureError(
                    f"the forward reads {place.name} ({location}), a {type(value).__name__}, which gives another value "
                    f"in every call. {ADVICE}"
                )
            self._reads[key] = Read(place, value, items_of(value), location, own_attributes(holder))
            self._observe(value, place)
        finally:
            self._on = True

    def _note_missing(self, holder: Any, name: str) -> None:
        key = id(holder), name
        if name in INTERNALS or name.startswith("__") or key in self._reads or key in self._writes:
            return
        if key[0] not in self._places or is_registered(holder, name):
            return
        self._reads[key] = Read(self._place(holder, name), MISSING, None, where(sys._getframe(2)))

    def _note_write(self, holder: Any, name: str, value: Any) -> None:
        key = id(holder), name
        if name in INTERNALS or key[0] not in self._places:
            return
        self._sets += 1
        if is_registered(holder, name):
            return
        self._on = False
        try:
            before = self._reads[key].before if key in self._reads else MISSING
            written = tensors_in(value) if value is not before else []
            dependent = any(depends_on_call(x, self._traced) or comes_from(x, before) for x in written)
            self._writes[key] = Write(self._place(holder, name), value, where(sys._getframe(2)), dependent)
        finally:
            self._on = True

    def _place(self, holder: Any, name: str) -> Place:
        return self._places[id(holder)].attribute(name)

    def _observe(self, value: Any, place: Place) -> None:
        """Record the attributes of an object, and of those in a container, which a module has in its own."""
        if isinstance(value, dict):
            pairs = list(value.items())
        elif isinstance(value, list | tuple):
            pairs = list(enumerate(value))
        else:
            pairs = []
        for key, item in pairs[:MAX_ITEMS]:
            if not isinstance(item, ATOMS):
                self._observe(item, place.item(key))
                self._inner.append(Read(place.item(key), item, items_of(item), ""))
        cls = type(value)
        if pairs or id(value) in self._places or not (is_observable(value) and is_users(cls.__module__)):
            return
        self._places[id(value)] = place
        self._kept.append(value)
        if cls not in self._patched:
            self._patched.add(cls)
            self._patch(cls)

    def _end(self) -> None:
        """Record changes at the end of a forward, before `torch.export` restores attributes."""
        self._on = False
        for key, read in self._reads.items():
            now = read.own.get(key[1], read.before)
            if now is not read.before and key not in self._writes:  # behind the back of __setattr__
                dependent = any(depends_on_call(x, self._traced) for x in tensors_in(now))
                self._writes[key] = Write(read.place, now, read.location, dependent)
        containers = self._changed_containers()
        self._check()
        pairs = [(self._reads[key], write) for key, write in self._writes.items() if key in self._reads]
        evolved = [w for read, w in pairs if not equal(read.before, w.value) and is_plain(w.value)]
        now = [Write(read.place, value_at(read.place, self._traced), read.location, False) for read in self._globals]
        evolved += [w for read, w in zip(self._globals, now, strict=True) if not equal(read.before, w.value)]
        self.evolved = (*evolved, *containers)
        self._ended = True

    def _check(self) -> None:
        """Raise CaptureError for tensors that the next call would read, and for containers that were changed."""
        for key, write in self._writes.items():
            read = self._reads.get(key)
            remembers = write.dependent or is_observable(write.value)
            if read is not None and remembers and write.value is not read.before:
                what = "a tensor" if write.dependent else f"a {type(write.value).__name__}"
                raise CaptureError(
                    f"the forward writes {what} into {write.place.name} ({write.location}), which the next call reads "
                    f"({read.location}). {ADVICE}"
                )

    def _changed_containers(self) -> list[Write]:
        """Return writes for the changed containers of plain items, with their present contents.

        Raises CaptureError for other changed containers, except caches that only gained constants.
        """
        found = []
        for read in (*self._reads.values(), *self._inner, *self._globals):
            if read.items is None or is_unchanged(read):
                continue
            if isinstance(read.place.owner, str) and is_plain(read.before) and all(map(is_plain, read.items)):
                found.append(Write(read.place, copy.deepcopy(read.before), read.location, False))
            elif not only_cached(read, self._traced):
                raise CaptureError(
                    f"the forward changes the {type(read.before).__name__} {read.place.name}"
                    f"{f' ({read.location})' if read.location else ''}. {ADVICE}"
                )
        return found


@contextlib.contextmanager
def tracing_again(first: Recorder) -> Iterator[None]:
    """Raise CaptureErrors of a second call, traced inside, with the names of what the first one has changed."""
    try:
        yield
    except CaptureError as error:
        first.restore_globals()
        written = [f"{each.place.name}{f' ({each.location})' if each.location else ''}" for each in first.evolved]
        changed = written or [f"the forward hooks of {first.registered.modules[0][0] or 'the model'}"]
        raise CaptureError(
            f"the first call of forward changes {', '.join(changed)}, after which a second call cannot be traced: "
            f"{error} Numbers, texts, containers of them and forward hooks stay from one call to the next, and nothing "
            "else: make tensors, functions and modules in __init__."
        ) from error


def check_settled(first: Recorder, second: Recorder) -> None:
    """Raise CaptureError where a second call changes again what the first one has changed."""
    for module, _ in second.registered.modules:
        first.restore_globals()
        raise CaptureError(
            f"the forward registers a forward hook on {module or 'the model'} with every call, so that they pile "
            "up; register it once, outside of forward, or remove it before forward returns (handle.remove())."
        )
    changed = {write.place.name: write.value for write in first.evolved}
    for write in second.evolved:
        first.restore_globals()
        found = f" ({write.location})" if write.location else ""
        raise CaptureError(
            f"the forward changes {write.place.name} with every call{found}: to "
            f"{_short(changed.get(write.place.name))}, then to {_short(write.value)}. {ADVICE}"
        )


@contextlib.contextmanager
def _replacing_method(cls: type, name: str, function: Any) -> Iterator[None]:
    """Replace a method of a class inside the block; an inherited method is inherited again afterwards."""
    had = vars(cls).get(name, MISSING)
    setattr(cls, name, function)
    try:
        yield
    finally:
        if had is MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, had)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
