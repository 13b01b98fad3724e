"""A mesh of devices as the planner sees it: named axes with sizes, and the hardware underneath."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MAX_AXES = 8
"""Any of them may be joined, so that what there is to decide grows with 2 ** axes."""


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
        if not isinstance(self.axes, Mapping):
            raise MeshError(f'the axes of a mesh are {self.axes!r}; give names with sizes, as in Mesh({{"dp": 2}}).')
        if not isinstance(self.hardware, str):
            raise MeshError(
                f"the hardware of a mesh is a {type(self.hardware).__name__}; give the name or the path of a profile, "
                "or a Hardware to compile and plan themselves."
            )
        if len(self.axes) > MAX_AXES:
            raise MeshError(f"a mesh of {len(self.axes)} axes; it can have {MAX_AXES}. Join some of them.")
        if not self.axes:
            raise MeshError('a mesh without axes: name at least one, for example Mesh({"dp": 2}).')
        for name, size in self.axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"axis name {name!r} is not an identifier; use names such as 'dp' or 'tp'.")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"axis {name!r} has size {size!r}; sizes are whole numbers of at least 1.")
        object.__setattr__(self, "names", tuple(self.axes))
        object.__setattr__(self, "sizes", tuple(self.axes.values()))

    def __hash__(self) -> int:
        return hash((self.names, self.sizes, self.hardware))

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes.items())

    @property
    def num_devices(self) -> int:
        """Number of devices of all axes together."""
        return math.prod(self.sizes)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.sizes)

    def size(self, axis: str) -> int:
        """Return the number of devices along `axis`."""
        return self.sizes[self.index(axis)]

    def index(self, axis: str) -> int:
        """Return the position of `axis` among the mesh's axes; raise MeshError if no axis has that name."""
        if axis not in self.axes:
            raise MeshError(f"the mesh has no axis {axis!r}; its axes are {', '.join(map(repr, self.names))}.")
        return self.names.index(axis)

    def positions(self, axes: str) -> tuple[int, ...]:
        """Return the positions of the axis, or joined axes, of this name; MeshError if there are none.

        >>> Mesh({"dp": 2, "tp": 4}).positions("dp_tp")
        (0, 1)
        """
        return joined_axes(self.names).get(axes) or (self.index(axes),)

    @property
    def joined(self) -> Mapping[str, tuple[int, ...]]:
        """The positions of axes that a collective may join, by their name together: all of more than one device."""
        every = joined_axes(self.names).items()
        return {name: axes for name, axes in every if all(self.sizes[axis] > 1 for axis in axes)}

    @classmethod
    def of(cls, mesh: DeviceMesh | Mesh, hardware: str | None = None) -> Mesh:
        """Return the abstract mesh of a torch `DeviceMesh` (which needs `mesh_dim_names`), or the mesh itself."""
        if isinstance(mesh, Mesh):
            return mesh
        names = mesh.mesh_dim_names
        if names is None:
            raise MeshError(
                "the DeviceMesh has no axis names; create it with mesh_dim_names, "
                'for example init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).'
            )
        return cls(dict(zip(names, mesh.shape, strict=True)), hardware or _default_hardware(mesh.device_type))


def joined_name(names: Sequence[str], positions: Iterable[int]) -> str:
    """Return the name of some of a mesh's axes together: "dp_tp", as torch's DeviceMesh flattens them."""
    return "_".join(names[position] for position in positions)


@functools.cache
def joined_axes(names: tuple[str, ...]) -> Mapping[str, tuple[int, ...]]:
    """Return the positions of two or more axes by their name together, but for names that two sets of axes would have.

    >>> joined_axes(("a", "b", "a_b"))
    {'a_a_b': (0, 2), 'b_a_b': (1, 2), 'a_b_a_b': (0, 1, 2)}
    """
    axes = range(len(names))
    every = [found for count in axes for found in itertools.combinations(axes, count + 1)]
    times = Counter(joined_name(names, found) for found in every)
    named = {joined_name(names, found): found for found in every if len(found) > 1}
    return {name: found for name, found in named.items() if times[name] == 1}


def _default_hardware(device_type: str) -> str:
    """Return the profile assumed when the user names none: a CPU host with gloo, or an H100 node."""
    return "cpu" if device_type == "cpu" else "h100"
