"""Branches on the values of tensors while a model is traced: `Capture(assume=…)` settles them, the rest are refused.

A captured graph is one path for all values. A check of the inputs (`assert torch.all(…)`, `if …: raise`) may be taken
to pass, and another branch may be told the value it tests: "modeling_detr.py:643=True". Without an assumption tracing
goes on as if the checks passed, so that one error names all of them, in the words that `Capture(assume=…)` takes.
An error names only assumptions with which the model can be traced.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.errors import CaptureError, InputError

TORCH, HERE = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep
TRACING = tuple(TORCH + part for part in ("fx/", "_export/", "export/", "_subclasses/", "_functorch/", "overrides.py"))
"""Path prefixes of the torch code that runs between a branch in the model and the query for its truth value."""
_SPECIFIED = re.compile(r"(?P<file>.+\.py):(?P<line>[0-9]{1,9})(=(?P<value>True|False))?")


@dataclass(frozen=True, slots=True)
class Assumption:
    """Assumed outcome of the branch at a line: the value of its test, or None for a check that passes."""

    file: str
    line: int
    value: bool | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + ("" if self.value is None else f"={self.value}")

    def names(self, place: Place) -> bool:
        path = place.path.replace(os.sep, "/")
        return self.line == place.line and (path == self.file or path.endswith("/" + self.file))


def assumptions_of(specified: object) -> tuple[Assumption, ...]:
    """Parse the option `Capture(assume=…)` to assumptions.

    Raises InputError unless it is None or a list of texts such as "model.py:12" and "model.py:12=True".
    """
    if specified is None:
        return ()
    if not isinstance(specified, list | tuple):
        raise InputError(
            f'Capture(assume={specified!r}); give a list of the lines whose checks are taken to pass, ["model.py:12"].'
        )
    found = []
    for text in specified:
        match = _SPECIFIED.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InputError(
                f'Capture(assume=…) has {text!r}; name a branch by file and line, "model.py:12" for a check that '
                'passes, or with the value that it tests, "model.py:12=True", as the CaptureError prints it.'
            )
        value = None if match["value"] is None else match["value"] == "True"
        found.append(Assumption(match["file"].replace("\\", "/"), int(match["line"]), value))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the model, and what stands there."""

    path: str
    line: int
    function: str

    @property
    def name(self) -> str:
        return f"{os.path.basename(self.path)}:{self.line}"

    def assumed(self, value: bool | None = None) -> Assumption:
        """Return the assumption that names this place."""
        return Assumption(os.path.basename(self.path), self.line, value)

    def __str__(self) -> str:
        code = linecache.getline(self.path, self.line).strip()
        return f"{self.name}, in {self.function}" + (f": {code}" if code else "")


@dataclass(slots=True)
class Branches:
    """Branches on values that tracing a model encountered."""

    model: str
    assumptions: Sequence[Assumption]
    taken: dict[str, None] = field(default_factory=dict)
    """Assumptions that were applied, as text, in the order of their use."""
    open: dict[Place, bool | None] = field(default_factory=dict)
    """Branches that no assumption covers, with the value that lets a check pass; None if it is not a check."""
    origins: dict[object, Place] = field(default_factory=dict)
    """Place where a truth value was read that is tested elsewhere, by the value's expression."""

    def specified(self, place: Place, passing: bool | None) -> bool | None:
        """Return the value that `Capture(assume=…)` gives to the branch at a place."""
        for each in self.assumptions:
            if each.names(place) and (each.value is not None or passing is not None):
                value = passing if each.value is None else each.value
                self.taken[f"{place}, is {value}"] = None
                return value
        return None

    def decide(self, tested: Any) -> bool:
        """Return the value of a branch that tracing cannot tell; UndecidedError for one that is no check and not spoken
        of.
        """
        place, passing = _current_line()
        origin = self.origins.get(_expression(tested))
        value = self.specified(place, passing)
        if value is None and origin is not None:
            value = self.specified(origin, None)
        if value is not None:
            return value
        self.open[place if origin is None or passing is not None else origin] = passing
        if passing is None:
            raise UndecidedError(self)
        return passing

    def refusal(self, works: Callable[[Sequence[Assumption]], bool]) -> str:
        """Return the branches encountered, and assumptions with which tracing `works`."""
        checks = [place.assumed() for place, value in self.open.items() if value is not None]
        if checks and not works(checks):
            checks = []
        advice = ""
        if checks:
            advice += f" Checks that may be taken to pass are named so: Capture(assume=[{_quoted(checks, ', ')}])."
        for place in (place for place, value in self.open.items() if value is None):
            tried = [place.assumed(value) for value in (True, False) if works([*checks, place.assumed(value)])]
            if tried:
                advice += f" To fix what {place.name} tests, add {_quoted(tried, ' or ')} to Capture(assume=[…])."
            else:
                advice += f" What follows {place.name} needs the value itself, so that it cannot be assumed."
        otherwise = "Otherwise replace" if "assume=[" in advice else "Replace"
        return (
            f"{self.model} decides on the value of a tensor while it runs ({'; '.join(map(str, self.open))}); a "
            f"captured graph is one path for all values.{advice} {otherwise} the branch by torch.where, make the "
            "number an argument of forward, and set layerdrop to 0 where the model has one."
        )


def _quoted(assumptions: Sequence[Assumption], between: str) -> str:
    return between.join(f'"{each}"' for each in assumptions)


class UndecidedError(CaptureError):
    """Error for a model that tests values for which there is no assumption."""

    def __init__(self, branches: Branches) -> None:
        super().__init__(f"{branches.model} decides on the value of a tensor")
        self.branches = branches


@contextlib.contextmanager
def decided_branches(branches: Branches) -> Iterator[None]:
    """Ask `branches` for the truth value of every tensor without one, while a graph is traced."""
    of_tensor, of_number, item = Tensor.__bool__, torch.SymBool.__bool__, Tensor.item

    def decided(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def truth(self: Any) -> bool:
            try:
                return original(self)
            except (GuardOnDataDependentSymNode, DataDependentOutputException):
                return branches.decide(self)

        return truth

    def read(self: Tensor) -> Any:
        value = item(self)
        if not isinstance(value, torch.SymBool):
            return value
        place, _ = _current_line()
        specified = branches.specified(place, None)
        branches.origins.setdefault(_expression(value), place)
        return value if specified is None else specified

    with (
        mock.patch.object(Tensor, "__bool__", decided(of_tensor)),
        mock.patch.object(torch.SymBool, "__bool__", decided(of_number)),
        mock.patch.object(Tensor, "item", read),
    ):
        yield


def place_of(error: BaseException) -> Place | None:
    """Return the innermost line outside torch and capture where an error, or what caused it, was raised."""
    found, seen = None, set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        trace = current.__traceback__
        while trace is not None:
            if _is_of_the_model(trace.tb_frame.f_code):
                found = Place(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        if found is not None:
            return found
        current = current.__cause__ or current.__context__
    return None


def _current_line() -> tuple[Place, bool | None]:
    """Return the model's line that runs, and the value with which a check there passes, or one that torch makes for
    it.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((HERE, *TRACING)):
        frame = frame.f_back
    passing = passing_value(frame.f_code.co_filename, frame.f_lineno)
    while frame.f_back is not None and not _is_of_the_model(frame.f_code):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name), passing


def _is_of_the_model(code: CodeType) -> bool:
    return not code.co_filename.startswith((TORCH, HERE, "<")) and code.co_filename not in LIBRARIES


LIBRARIES = frozenset({contextlib.__file__, functools.__file__, mock.__file__})


def _expression(value: Any) -> object:
    return value.node.expr if isinstance(value, torch.SymBool) else id(value)


def passing_value(path: str, line: int) -> bool | None:
    """Return the value of what an assert, or an `if` that raises, tests at a line, with which it lets the model go on.

    None where no such check stands there, or where parts of it ask for different values.
    """
    wanted: set[bool] = set()
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.Assert | ast.If) or not node.test.lineno <= line <= (node.test.end_lineno or 0):
            continue
        if isinstance(node, ast.If) and not any(isinstance(each, ast.Raise) for each in node.body):
            return None
        wanted.update(_needed(node.test, isinstance(node, ast.Assert)))
    return wanted.pop() if len(wanted) == 1 else None


@functools.lru_cache(maxsize=64)
def _tree(path: str) -> ast.Module:
    try:
        return ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _needed(test: ast.expr, value: bool) -> Iterator[bool]:
    """Yield the values that the parts of a test need for it to have `value`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _needed(test.operand, not value)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _needed(part, value)
    else:
        yield value
