"""Find the numbers of a call that can be tensors of its graph: all ranks capture both programs, compare, and agree."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.assumptions import UndecidedError, place_of
from autopar.capture.numbers.equivalence import difference
from autopar.capture.numbers.marked import CANDIDATES
from autopar.capture.numbers.watched import Watch
from autopar.ir.program.program import Program
from autopar.runtime.numbers.leaves import Arguments, with_tensors, with_watched
from autopar.runtime.ranks.agreement import gathered, many_processes

Capture = Callable[[Arguments], Program]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason for which a number stays a constant of its graph."""

    why: str
    is_captured: bool
    """True if the model can be captured with a tensor in its place, which then is another computation."""


@dataclass(slots=True)
class Replaced:
    """A call with tensors in place of numbers."""

    arguments: Arguments
    refused: dict[int, Refusal] = field(default_factory=dict)
    """The numbers that stay numbers, by their places among the leaves."""


def as_tensors(
    arguments: Arguments, numbers: Mapping[int, int | float], capture: Capture, mesh: DeviceMesh
) -> Replaced:
    """Return the call with tensors in place of `numbers`, where that is the same computation for all their values.

    Called by all ranks of the mesh. `numbers` are those to be replaced, by their places among the leaves.
    """

    @functools.cache
    def number(places: frozenset[int]) -> tuple[Program, int]:
        watch = Watch()
        with watch.counting():
            return capture(with_watched(arguments, places, watch)), watch.num_computed

    replaced = Replaced(arguments)

    def refusal_of(dtypes: Mapping[int, torch.dtype]) -> Refusal | None:
        given = with_tensors(arguments, dtypes)
        values = {place: numbers[place] for place in dtypes}
        refusal = _agreed(_compared(lambda: number(frozenset(dtypes)), lambda: capture(given), values), mesh)
        if refusal is None:
            replaced.arguments = given
            replaced.refused = {place: each for place, each in replaced.refused.items() if place not in dtypes}
        return refusal

    first = {place: CANDIDATES[type(value)][0] for place, value in numbers.items()}
    refusal = refusal_of(first)
    if refusal is None:
        return replaced
    replaced.refused = dict.fromkeys(numbers, refusal)
    fitting: dict[int, torch.dtype] = {}
    for place, value in numbers.items():
        for dtype in CANDIDATES[type(value)]:
            known = {**fitting, place: dtype}
            refusal = replaced.refused[place] if known == first else refusal_of(known)
            if refusal is None:
                fitting = known
                break
            replaced.refused[place] = refusal
    return replaced


def _compared(
    number: Callable[[], tuple[Program, int]], tensor: Callable[[], Program], values: Mapping[int, int | float]
) -> Refusal | None:
    """Return why the programs differ, or cannot be made; None if they are the same."""
    try:
        with _quiet():
            (program, num_computed), other = number(), tensor()
    except Exception as error:  # whatever it is, the number stays one, and the other ranks wait
        return Refusal(_specified_by(error), False)
    found = difference(program, other, values, num_computed)
    return Refusal(found, True) if found else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what forward prints and what PyTorch says of a capture that fails: the number is no error."""
    logs, aside = logging.root.manager.disable, io.StringIO()
    logging.disable(max(logs, logging.WARNING))
    try:
        with contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logs)


def _specified_by(error: Exception) -> str:
    """Return why a model cannot be captured with a tensor in place of a number, with the line, if that is known."""
    cause = error.__cause__
    if cause is None:
        return str(error).partition(";")[0]
    place = next(iter(cause.branches.open), None) if isinstance(cause, UndecidedError) else place_of(cause)
    return "forward needs its value" + ("" if place is None else f" at {place}")


def _agreed(refusal: Refusal | None, mesh: DeviceMesh) -> Refusal | None:
    if not many_processes(mesh):
        return refusal
    return next((each for each in gathered(refusal, mesh) if each is not None), None)
