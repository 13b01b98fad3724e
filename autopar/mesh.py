"""A mesh of devices as the planner sees it: named axes with sizes, and the hardware underneath."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, first axis outermost; needs no devices.

    >>> mesh = Mesh({"dp": 2, "tp": 4}, hardware="h100")
    >>> mesh.num_devices, mesh.size("tp")
    (8, 4)
    """

    axes: Mapping[str, int]
    hardware: str = "cpu"
    names: tuple[str, ...] = field(init=False, repr=False)
    sizes: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError('a mesh without axes: name at least one, for example Mesh({"dp": 2}).')
        for name, size in self.axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"axis name {name!r} is not an identifier; use names such as 'dp' or 'tp'.")
            if not isinstance(size, int) or size < 1:
                raise MeshError(f"axis {name!r} has size {size!r}; sizes are whole numbers of at least 1.")
        object.__setattr__(self, "names", tuple(self.axes))
        object.__setattr__(self, "sizes", tuple(self.axes.values()))

    def __hash__(self) -> int:
        return hash((self.names, self.sizes, self.hardware))

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes.items())

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, axis: str) -> int:
        """Number of devices along `axis`."""
        return self.sizes[self.index(axis)]

    def index(self, axis: str) -> int:
        """Position of `axis` among the mesh's axes; MeshError if there is none of that name."""
        if axis not in self.axes:
            raise MeshError(f"the mesh has no axis {axis!r}; its axes are {', '.join(map(repr, self.names))}.")
        return self.names.index(axis)

    @classmethod
    def of(cls, mesh: DeviceMesh | Mesh, hardware: str | None = None) -> Mesh:
        """The abstract mesh of a torch `DeviceMesh` (which needs `mesh_dim_names`), or the mesh itself."""
        if isinstance(mesh, Mesh):
            return mesh
        names = mesh.mesh_dim_names
        if names is None:
            raise MeshError(
                "the DeviceMesh has no axis names; create it with mesh_dim_names, "
                'for example init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).'
            )
        return cls(dict(zip(names, mesh.shape, strict=True)), hardware or _default_hardware(mesh.device_type))


def _default_hardware(device_type: str) -> str:
    """The profile assumed when the user names none: a CPU host with gloo, or an H100 node."""
    return "cpu" if device_type == "cpu" else "h100"
