"""Globals that a forward may read: those that its code names, and those of user code that it calls by name.

Code is followed by the names in it and never run: from the forwards of a model to methods of the same classes,
functions and classes of the same file, and functions of modules that the file imports. Globals that hold numbers, text
or containers are found, and attributes of modules, classes and objects that the code names. The globals of installed
packages are taken for constants.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from autopar.capture.python.user_code import is_installed, is_users
from autopar.ir.program.python_state import ATOMS, CONTAINERS, Place


def globals_read(model: nn.Module, functions: Sequence[types.FunctionType]) -> tuple[Place, ...]:
    """Return the globals, and the cells of closures, that `functions`, called by the forwards of a model, may read."""
    found: dict[tuple[int, str], Place] = {}
    for function in functions:
        if is_installed(function.__code__):
            continue
        for place in _places(function):
            found.setdefault((id(place.owner), str(place.steps)), place)
    for cls in dict.fromkeys(base for module in model.modules() for base in type(module).__mro__):
        if is_users(cls.__module__) and isinstance(vars(cls).get("forward"), types.FunctionType):
            for place in _class_places(cls):
                found.setdefault((id(place.owner), str(place.steps)), place)
    return tuple(found.values())


def _class_places(cls: type) -> Iterator[Place]:
    """Yield the data of a module's class, its own or inherited, that its forward names, as `type(self).calls`."""
    forward = vars(cls)["forward"]
    if not is_installed(forward.__code__):
        known = {
            name: value
            for base in reversed(cls.__mro__)
            if is_users(base.__module__)
            for name, value in vars(base).items()
        }
        for name in sorted(_names_in(forward.__code__) & known.keys()):
            if _is_data(known[name]) and not name.startswith("__"):
                yield Place(cls, (("attribute", name),), f"{cls.__name__}.{name}")


def called_functions(model: nn.Module) -> list[types.FunctionType]:
    """Return the functions of the user's files that the forwards of a model's modules may call."""
    left: list[tuple[Any, type | None]] = []
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        left.append((getattr(cls, "forward", None), cls))
    for module in model.modules():
        own = [value for value in vars(module).values() if isinstance(value, types.FunctionType | types.MethodType)]
        left += [(function, type(module)) for function in own]
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        left += [(hook, None) for hook in hooks]
    found: dict[tuple[int, type | None], types.FunctionType] = {}
    while left:
        function, cls = left.pop()
        function = _plain_function(function)
        if function is None or not is_users(function.__module__) or (id(function), cls) in found:
            continue
        found[id(function), cls] = function
        names = _names_in(function.__code__)
        if cls is not None:
            left += [(getattr(cls, name, None), cls) for name in names if hasattr(cls, name)]
        for _, value in _named_values(function):
            left += [(each, None) for each in _functions_of(value, names)]
    return list({id(function): function for function in found.values()}.values())


def _functions_of(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield the functions that code may call through a global, given the names that the code uses."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, types.ModuleType) and is_users(value.__name__):
        yield from (vars(value)[name] for name in names if name in vars(value))
    elif isinstance(value, type) and is_users(value.__module__):
        yield from (found for name, found in vars(value).items() if name in names or name in ("__init__", "forward"))
    elif isinstance(value, dict):
        yield from (each for each in value.values() if isinstance(each, types.FunctionType))


def _places(function: types.FunctionType) -> Iterator[Place]:
    names = {name for name in _names_in(function.__code__) if not name.startswith("__")}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if _is_data(_content(cell)):
            yield Place(cell, (("attribute", "cell_contents"),), name)
    for name, value in _named_values(function):
        if name in names and name in function.__globals__ and _is_data(value):
            yield Place(function.__globals__, (("item", name),), name)
        elif _has_data(value):
            owner = vars(value)
            for attribute in sorted(names & owner.keys()):
                if _is_data(owner[attribute]):
                    yield Place(value, (("attribute", attribute),), f"{name}.{attribute}")
        elif value is os and names & {"environ", "getenv"}:
            yield Place(os.environ, (("attribute", "_data"),), "os.environ")


def _named_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals and the cells of closures that a function names, with their values."""
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield name, _content(cell)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function, and in those written inside it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
    return found


def _plain_function(function: Any) -> types.FunctionType | None:
    """Return the function written in Python behind a method, a property, a decorator or a partial call."""
    for _ in range(10):
        if isinstance(function, types.FunctionType):
            inner = getattr(function, "__wrapped__", None)
            if not callable(inner):
                return function
            function = inner
        elif isinstance(function, property):
            function = function.fget
        else:
            function = getattr(function, "__func__", None) or getattr(function, "func", None)
    return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_data(value: Any) -> bool:
    """Return whether a global is a number, text or a container; code, modules and tensors are not replaced."""
    return isinstance(value, (*ATOMS, *CONTAINERS))


def _has_data(value: Any) -> bool:
    """Return whether a global is the user's module, class or object, whose attributes may be data."""
    if isinstance(value, types.ModuleType):
        return is_users(value.__name__)
    if isinstance(value, type):
        return is_users(value.__module__)
    return hasattr(value, "__dict__") and (is_users(type(value).__module__) or isinstance(value, types.SimpleNamespace))
