"""Every way to arrange a number of devices in the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.costs.hardware.profile import Hardware
from autopar.errors import MeshError
from autopar.ir.sharding.mesh import Mesh

AXIS_NAMES: tuple[str, ...] = ("dp", "tp", "sp")
MAX_DEVICES = 10**6


def meshes_of(
    mesh: str, devices: int | None, hardware: str | Hardware | None, max_axes: int, pipeline: str | None = None
) -> tuple[Mesh, ...]:
    """Return every mesh of so many devices, fewer axes first; raise MeshError for contradictory arguments.

    The axes are named dp, tp and sp, outermost first; before them lies the `pipeline` axis, where one is offered, which
    does not count among them.
    """
    if mesh != "auto":
        raise MeshError(f'mesh={mesh!r}; give a DeviceMesh, an autopar.Mesh, or "auto" with the number of devices.')
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= MAX_DEVICES:
        raise MeshError(
            f'mesh="auto" needs the number of devices to arrange, found devices={devices!r}; '
            f"give a whole number of at least 1, as in devices=64, at most {MAX_DEVICES}."
        )
    if not isinstance(max_axes, int) or isinstance(max_axes, bool) or not 1 <= max_axes <= len(AXIS_NAMES):
        raise MeshError(f"Search(max_axes={max_axes!r}); a mesh is searched for in 1 to {len(AXIS_NAMES)} axes.")
    if pipeline in AXIS_NAMES:
        raise MeshError(
            f'pipeline={pipeline!r} is one of the axes that mesh="auto" arranges ({", ".join(AXIS_NAMES)}); '
            'rename the axis of the pipeline, as in pipeline="pp".'
        )
    name = hardware.name if isinstance(hardware, Hardware) else hardware or Mesh({"dp": 1}).hardware
    inner = [
        dict(zip(AXIS_NAMES, sizes, strict=False))
        for count in range(1, max_axes + 1)
        for sizes in factorizations(devices, count)
    ]
    found = [Mesh(axes, name) for axes in inner]
    for length in (each for each in range(2, devices + 1) if pipeline is not None and devices % each == 0):
        stages = {str(pipeline): length}
        if length == devices:
            found.append(Mesh(stages, name))
            continue
        for count in range(1, max_axes + 1):
            for sizes in factorizations(devices // length, count):
                found.append(Mesh(stages | dict(zip(AXIS_NAMES, sizes, strict=False)), name))
    return tuple(sorted(found, key=lambda each: each.ndim))


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as an ordered product of `count` factors above 1; 1 is the factor of 1.

    >>> list(factorizations(8, 2))
    [(2, 4), (4, 2)]
    """
    if count == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorizations(number // first, count - 1))
