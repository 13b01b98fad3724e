"""Runtime functions of calls, whole or in halves, between which other calls run while rows of experts travel."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import fx

START, END = "start_", "end_"
"""Beginnings of the names of the two halves."""


def runtime_function(name: str, half: str = "") -> Callable[..., Any]:
    """Return the runtime function that `Implementation.function` names, "module:name", or a half of it."""
    module, function = name.split(":")
    return getattr(importlib.import_module(f"autopar.runtime.implementations.{module}"), half + function)


def second_half(graph: fx.Graph, name: str, call: fx.Node, first: fx.Node) -> fx.Node:
    """Emit the second half of a program's call, given its first: it takes what that gives, and arguments that it
    names.
    """
    function = runtime_function(name, END)
    schema = call.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((each.name for each in schema), first.args, strict=False)) | first.kwargs
    named = {each: given[each] for each in inspect.signature(function).parameters if each in given}
    new = graph.call_function(function, (first,), named)
    new.meta = dict(first.meta)
    return new
