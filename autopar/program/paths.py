"""Dotted paths of modules and parameters: which layer one belongs to, what lies below what, what a pattern matches."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase


def prefix_of(module: str) -> str:
    """A module path up to its first number, "" where it has none.

    >>> prefix_of("model.layers.3.mlp.up_proj")
    'model.layers.3'
    """
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, or the module that owns it."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1])


def is_numbered(layer: str) -> bool:
    """Whether a layer is one of several, as of a list of modules."""
    return any(part.isdigit() for part in layer.split("."))


def is_below(path: str, module: str) -> bool:
    """Whether a path is a module's own or lies below it."""
    return not module or path == module or path.startswith(f"{module}.")


def ancestors(path: str) -> Iterator[str]:
    """A module and every module around it, the root last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def relative_to(name: str, within: str) -> str | None:
    """A name as seen from a module; None where it lies outside."""
    if not is_below(name, within):
        return None
    return name[len(within) :].removeprefix(".")


def matches(name: str, pattern: str, within: str) -> bool:
    """Whether a name, as seen from the module `within`, is what the pattern says; False where it lies outside."""
    relative = relative_to(name, within)
    return relative is not None and fnmatchcase(relative, pattern)
