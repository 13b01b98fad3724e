"""Agreement of all ranks of a mesh before they run, so that none waits for another that has failed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError, InputError, PlanError

T = TypeVar("T")


def from_first_rank(work: Callable[[], T], mesh: DeviceMesh) -> T:
    """Return on every rank the result of `work` on the first rank of the mesh; raise its error on every rank."""
    if not many_processes(mesh):
        return work()
    result: Any = None
    error: BaseException | None = None
    if is_first_rank(mesh):
        try:
            result = work()
        except BaseException as found:  # an interrupt, too: the others wait
            error = found
    message = [(result, error and _portable(error))]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        dist.broadcast_object_list(message, src=dist.get_global_rank(group, 0), group=group)
    result, failure = message[0]
    if failure is not None:
        raise error or failure
    return result


def on_all_ranks(
    work: Callable[[], T], describe: Callable[[T], str], mesh: DeviceMesh, details: Callable[[T], list[str]]
) -> T:
    """Return the result of `work` on this rank; raise an error on every rank if one fails or their results differ.

    Results differ if `describe` gives different texts. The error then names the first of the lines of `details` that
    differ.
    """
    if not many_processes(mesh):
        return work()
    result: Any = None
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as found:  # an interrupt, too: the others wait
        error = found
    outcomes = gathered((dist.get_rank(), error and _portable(error), "" if error else describe(result)), mesh)
    if error is not None:
        raise error
    for _, failure, _ in outcomes:
        if failure is not None:
            raise failure
    first_rank, _, first = outcomes[0]
    differing = next((number for number, (_, _, other) in enumerate(outcomes) if other != first), None)
    if differing is None:
        return result
    rank, _, other = outcomes[differing]
    lines = gathered(details(result), mesh)
    raise InputError(
        f"the ranks were called differently: rank {first_rank} with {first}; rank {rank} with {other}."
        f"{_difference(lines[0], lines[differing])} Every rank needs the same model and inputs of the same global "
        "shapes: give each the whole batch, or DTensors."
    )


def _difference(lines: list[str], others: list[str]) -> str:
    """Describe the first line in which two lists of lines differ; "" if there is none."""
    for number, (line, other) in enumerate(itertools.zip_longest(lines, others, fillvalue="nothing")):
        if line != other:
            return f" They part at node {number}: {line} and {other}."
    return ""


def _portable(error: BaseException) -> AutoparError:
    rank = dist.get_rank()
    if isinstance(error, AutoparError):
        return type(error)(f"on rank {rank}: {error}")
    if not isinstance(error, Exception):
        return PlanError(f"preparing the model was interrupted on rank {rank}: {type(error).__name__}")
    return PlanError(f"preparing the model failed on rank {rank}: {type(error).__name__}: {error}")


def gathered(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Return the values of all ranks, in the order of the mesh."""
    values = [value]
    for axis in reversed(range(mesh.ndim)):
        lists: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(lists, values, group=mesh.get_group(axis))
        values = list(itertools.chain.from_iterable(lists))
    return values


def is_first_rank(mesh: DeviceMesh) -> bool:
    """Return whether this is the first rank of the mesh, whose results all ranks use."""
    return dist.get_rank() == int(mesh.mesh.flatten()[0])


def many_processes(mesh: DeviceMesh) -> bool:
    """Return whether the mesh spans processes; simulated ranks share one."""
    return mesh.size() > 1 and dist.get_backend() != "fake"
