"""Refusal of values that a forward may not query during tracing: clocks, seeds, random numbers not from PyTorch.

A graph would hold the answer of one call for ever. `torch.rand` and the like are operations, and stay random.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import secrets
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture.python.user_code import is_installed, is_users, where
from autopar.errors import CaptureError

RANDOM = "draw with torch's random operations (torch.rand, torch.randint …), which stay random, or give it as input"
CLOCK = "measure around the model, or give the time as input"
SEED = "seed outside the model: dropout follows Run(seed=…) and the step"
SOURCES: tuple[tuple[types.ModuleType, tuple[str, ...], str], ...] = (
    (
        random,
        tuple(name for name, value in vars(random).items() if getattr(value, "__self__", 0) is random._inst),
        RANDOM,
    ),
    (uuid, ("uuid1", "uuid4"), RANDOM),
    (os, ("urandom",), RANDOM),
    (secrets, ("token_bytes", "token_hex", "token_urlsafe", "randbelow", "choice", "randbits"), RANDOM),
    (time, tuple(f"{n}{s}" for n in ("time", "monotonic", "perf_counter", "process_time") for s in ("", "_ns")), CLOCK),
    (torch, ("manual_seed", "seed", "set_rng_state"), SEED),
    (torch.random, ("manual_seed", "seed", "set_rng_state", "fork_rng"), SEED),
    (torch.cuda, ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state"), SEED),
)
"""(module, functions, what to do instead)"""
Check = Callable[[types.FrameType, str, str], None]


@contextlib.contextmanager
def refuse_outside_sources(model: nn.Module, functions: Sequence[types.FunctionType]) -> Iterator[None]:
    """Raise CaptureError where the user's code asks one of SOURCES, or draws from a generator of its own.

    `functions` are those of the user that the model calls, in whose files the sources may be globals.
    """
    packages, own = {type(module).__module__.partition(".")[0] for module in model.modules()}, threading.get_ident()

    def check(frame: types.FrameType, name: str, advice: str) -> None:
        """Raise CaptureError if a frame of this thread runs code of the user, or of a package with model classes."""
        of = frame.f_globals.get("__name__")
        if threading.get_ident() != own:
            return
        if is_users(of) and (not is_installed(frame.f_code) or str(of).partition(".")[0] in packages):
            raise CaptureError(
                f"the forward calls {name}() ({where(frame)}): a graph would keep this one answer for all calls; "
                f"{advice}."
            )

    replaced: dict[int, Any] = {id(_DATETIME): _clock(check)}
    namespaces: list[Any] = [vars(datetime)]
    for module, names, advice in _sources():
        namespaces.append(vars(module))
        for name in names:
            function = getattr(module, name, None)
            if function is not None:
                replaced.setdefault(id(function), _refusing(function, f"{module.__name__}.{name}", advice, check))
    files = {id(function.__globals__): function.__globals__ for function in functions}
    generators = _generators(model, functions)
    before = [_state_of(generator) for _, generator in generators]
    with _python_generators(check), replaced_in(replaced, [*namespaces, *files.values()]):
        yield
    for (name, generator), state in zip(generators, before, strict=True):
        if _state_of(generator) != state:
            raise CaptureError(
                f"the forward draws from {name}, a {type(generator).__name__}: a graph would keep this one draw for "
                f"all calls; {RANDOM}."
            )


@contextlib.contextmanager
def replaced_in(replaced: Mapping[int, Any], namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Put others in the place of some objects, known by their ids, wherever they are globals of `namespaces`."""
    found = {
        (id(namespace), name): (namespace, name, value)
        for namespace in namespaces
        for name, value in namespace.items()
        if id(value) in replaced
    }
    for namespace, name, value in found.values():
        namespace[name] = replaced[id(value)]
    try:
        yield
    finally:
        for namespace, name, value in found.values():
            namespace[name] = value


def _generators(model: nn.Module, functions: Sequence[types.FunctionType]) -> list[tuple[str, Any]]:
    """Return the random generators that are attributes of modules, or globals or closures of the user's functions."""
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))
    named = [(f"{path}.{name}".lstrip("."), v) for path, m in model.named_modules() for name, v in vars(m).items()]
    files = {id(function.__globals__): function.__globals__ for function in functions}
    named += [item for file in files.values() for item in file.items()]
    for function in functions:
        named += [
            (name, cell.cell_contents)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if cell != types.CellType()  # an empty one
        ]
    return [(name, value) for name, value in named if isinstance(value, kinds)]


@contextlib.contextmanager
def _python_generators(check: Check) -> Iterator[None]:
    """Refuse draws from a `random.Random` inside, but for one that the forward makes from a seed of its own."""
    seeded: list[random.Random] = []  # kept, so that no other object takes their ids

    def made(generator: random.Random, seed: Any = None) -> None:
        initialize(generator, seed)
        if seed is not None:
            seeded.append(generator)

    def drawing(name: str) -> Callable[..., Any]:
        draw = getattr(random.Random, name)

        def drawn(generator: random.Random, *args: Any, **kwargs: Any) -> Any:
            if not any(generator is each for each in seeded):
                check(sys._getframe(1), f"random.Random.{name}", RANDOM)
            return draw(generator, *args, **kwargs)

        return drawn

    initialize = random.Random.__init__
    names = [name for name in SOURCES[0][1] if name not in ("seed", "getstate", "setstate")]
    own = {name: vars(random.Random)[name] for name in names if name in vars(random.Random)}
    replaced = {name: drawing(name) for name in names}
    try:
        random.Random.__init__ = made  # pyright: ignore[reportAttributeAccessIssue]
        for name, function in replaced.items():
            setattr(random.Random, name, function)
        yield
    finally:
        random.Random.__init__ = initialize
        for name in replaced:
            if name in own:
                setattr(random.Random, name, own[name])
            else:
                delattr(random.Random, name)  # uncovers the method of the C base class


def _state_of(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    return repr(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


_DATETIME = datetime.datetime


def _sources() -> Iterator[tuple[Any, tuple[str, ...], str]]:
    yield from SOURCES
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.mtrand._rand
        yield numpy, tuple(n for n in dir(numpy) if getattr(getattr(numpy, n), "__self__", 0) is state), RANDOM
        yield numpy, ("default_rng",), RANDOM


def _refusing(function: Callable[..., Any], name: str, advice: str, check: Check) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        is_seeded = any(value is not None for value in (*args, *kwargs.values()))
        if not (name.endswith("default_rng") and is_seeded):
            check(sys._getframe(1), name, advice)
        return function(*args, **kwargs)

    return refuse


def _clock(check: Check) -> type:
    def now(cls: type, *args: Any) -> Any:
        check(sys._getframe(1), "datetime.now", CLOCK)
        return _DATETIME.now(*args)

    return type("datetime", (_DATETIME,), dict.fromkeys(("now", "utcnow", "today"), classmethod(now)))
