"""mesh="auto": the best arrangement of a number of devices in axes, found by planning on every one.

An arrangement is an ordered factorization of the number. The order is the assignment of axes to the topology: the last
axis lies on neighbouring devices, the first one across nodes. None is left out, for there is no bound to skip it by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tabulate import tabulate

from autopar.errors import AnnotationError, InfeasibleError, MeshError
from autopar.hardware.profile import Hardware
from autopar.plans.plan import Plan
from autopar.progress import progress
from autopar.sharding.mesh import Mesh
from autopar.units import format_bytes, format_seconds, format_share

AXIS_NAMES = ("dp", "tp", "sp")
SHOWN_REASON = 100  # characters
MAX_DEVICES = 10**6


@dataclass(frozen=True, slots=True)
class Tried:
    """One mesh, with its plan or the reason why it has none."""

    mesh: Mesh
    plan: Plan | None
    reason: str = ""


def best_mesh(
    make: Callable[[Mesh], Plan],
    mesh: str,
    devices: int | None,
    hardware: str | Hardware | None = None,
    max_axes: int = 2,
) -> Plan:
    """The fastest of the plans that `make` finds for `devices` in up to `max_axes` axes, with the others in its notes.

    The axes are named dp, tp and sp, outermost first. A tie goes to the mesh with fewer axes.
    Raises MeshError where the arguments name no meshes, and InfeasibleError where no mesh has a plan.
    """
    tried = try_meshes(make, meshes_of(mesh, devices, hardware, max_axes))
    found = [each.plan for each in tried if each.plan is not None]
    if not found:
        reasons = "\n".join(f"  {each.mesh}: {each.reason}" for each in tried)
        raise InfeasibleError(f"no mesh of {devices} devices has a plan; on each of them:\n{reasons}")
    best = min(found, key=lambda plan: plan.seconds)
    note = f"the best of {len(tried)} meshes of {devices} devices:\n{mesh_table(tried)}"
    return replace(best, notes=(*best.notes, note))


def meshes_of(mesh: str, devices: int | None, hardware: str | Hardware | None, max_axes: int) -> tuple[Mesh, ...]:
    """Every mesh of so many devices, those of fewer axes first; MeshError where the arguments do not say which."""
    if mesh != "auto":
        raise MeshError(f'mesh={mesh!r}; give a DeviceMesh, an autopar.Mesh, or "auto" with the number of devices.')
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= MAX_DEVICES:
        raise MeshError(
            f'mesh="auto" needs the number of devices to arrange, found devices={devices!r}; '
            f"give a whole number of at least 1, as in devices=64, at most {MAX_DEVICES}."
        )
    if not isinstance(max_axes, int) or isinstance(max_axes, bool) or not 1 <= max_axes <= len(AXIS_NAMES):
        raise MeshError(f"max_axes={max_axes!r}; a mesh is searched for in 1 to {len(AXIS_NAMES)} axes.")
    name = hardware.name if isinstance(hardware, Hardware) else hardware or Mesh({"dp": 1}).hardware
    return tuple(
        Mesh(dict(zip(AXIS_NAMES, sizes, strict=False)), name)
        for count in range(1, max_axes + 1)
        for sizes in factorizations(devices, count)
    )


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of `count` factors above 1; 1 is the factor of 1.

    >>> list(factorizations(8, 2))
    [(2, 4), (4, 2)]
    """
    if count == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorizations(number // first, count - 1))


def try_meshes(make: Callable[[Mesh], Plan], meshes: tuple[Mesh, ...]) -> tuple[Tried, ...]:
    """Plan on each mesh; one where the pins or the memory limit leave nothing keeps the reason."""
    found = []
    for mesh in progress(meshes, "meshes"):
        try:
            found.append(Tried(mesh, make(mesh)))
        except (InfeasibleError, AnnotationError) as error:
            found.append(Tried(mesh, None, str(error)))
    return tuple(found)


def mesh_table(tried: tuple[Tried, ...]) -> str:
    """What was tried, fastest first, those without a plan last."""
    planned = sorted((each for each in tried if each.plan is not None), key=lambda each: _plan(each).seconds)
    table = [
        [str(each.mesh), format_seconds(plan.seconds), format_bytes(plan.peak_bytes), format_share(plan.gap)]
        for each in planned
        for plan in [_plan(each)]
    ]
    for each in tried:
        if each.plan is None:
            reason = each.reason.splitlines()[0]
            short = reason if len(reason) <= SHOWN_REASON else f"{reason[: SHOWN_REASON - 1]}…"
            table.append([str(each.mesh), "-", "-", short])
    return tabulate(table, headers=["mesh", "step", "memory", "gap, or why not"], disable_numparse=True)


def _plan(tried: Tried) -> Plan:
    assert tried.plan is not None
    return tried.plan
