"""Dotted paths of modules and parameters: which layer one belongs to, what lies below what, what a pattern matches."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase


def is_number(part: str) -> bool:
    """Return whether a part of a path is the number of a module in a list, as of layers."""
    return part.isdecimal()


def split_at_number(path: str) -> tuple[str, str, str] | None:
    """Return the path before its first number, the number, and the path behind it; None if it has no number.

    >>> split_at_number("model.layers.3.mlp.up_proj")
    ('model.layers', '3', 'mlp.up_proj')
    """
    parts = path.split(".")
    place = next((i for i, part in enumerate(parts) if is_number(part)), None)
    return None if place is None else (".".join(parts[:place]), parts[place], ".".join(parts[place + 1 :]))


def layer_of(path: str) -> str:
    """Return the layer that a module or parameter belongs to: its path up to the first number, "" where it has none.

    >>> layer_of("model.layers.3.mlp.up_proj")
    'model.layers.3'
    """
    found = split_at_number(path)
    return "" if found is None else f"{found[0]}.{found[1]}".removeprefix(".")


def layer_or_owner(parameter: str) -> str:
    """Return the layer of a parameter, or the module that owns it where it lies outside of numbered layers."""
    return layer_of(parameter) or parameter.rpartition(".")[0]


def starred(path: str) -> str:
    """Return a path with `*` for every number: "model.layers.*.mlp"."""
    return ".".join("*" if is_number(part) else part for part in path.split("."))


def is_below(path: str, module: str) -> bool:
    """Return whether a path is a module's own or lies below it."""
    return not module or path == module or path.startswith(f"{module}.")


def ancestors(path: str) -> Iterator[str]:
    """Yield a module and every module around it, the root last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def relative_to(name: str, within: str) -> str | None:
    """Return a name as seen from a module; None where it lies outside."""
    if not is_below(name, within):
        return None
    return name[len(within) :].removeprefix(".")


def matches(name: str, pattern: str, within: str) -> bool:
    """Return whether a name, relative to the module `within`, matches the pattern; False if it lies outside of that."""
    relative = relative_to(name, within)
    return relative is not None and fnmatchcase(relative, pattern)
