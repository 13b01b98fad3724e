"""Mesh axes at run time, found by name, and the count of what moves over them.

Graphs name an axis, or joined ones ("dp_tp"); `use_mesh` says which process group that is, so that one graph serves
every rank. Torch makes a group per axis; `join_axes` makes those of joined ones, ahead of any step. The collectives of
a group stand in one queue: where weights are gathered while gradients are reduced, gathers have groups of their own
(`gathering_groups`), so that neither waits for the other.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.ir.sharding.mesh import joined_axes, joined_name


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis (or joined ones) at run time: its process group, its size, and where this rank stands on it."""

    name: str
    group: str
    size: int
    rank: Any  # an int; under LocalTensorMode a SymInt with a value per simulated rank
    gathering: str = ""
    """The group of the same ranks that gathers weights; "" where that is the same one."""


_axes: Mapping[str, Axis] = {}
OPEN_RECORDS: list[Traffic] = []
"""Records that `record_traffic` has opened and not closed."""


Groups = Mapping[str, str]
"""Axes, or joined ones → the name of the process group that this rank is in."""

_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[bool, tuple[int, ...]], str]] = WeakKeyDictionary()
"""World → whether it gathers weights, and ranks → the name of the group made of them, for all meshes and graphs."""


def join_axes(mesh: DeviceMesh, names: Iterable[str]) -> Groups:
    """Return the process groups of those names that are joined axes of the mesh; all its ranks call this, in no step.

    A group is made once, and of all ranks it is the world's own.
    """
    joined = joined_axes(mesh.mesh_dim_names or ())
    return {name: _group_of(_ranks_of(mesh, joined[name])) for name in names if name in joined}


def gathering_groups(mesh: DeviceMesh, names: Iterable[str]) -> Groups:
    """Return second process groups of (joined) axes for gathers of weights; to be called as `join_axes`."""
    axes = mesh.mesh_dim_names or ()
    positions = {**{name: (position,) for position, name in enumerate(axes)}, **joined_axes(axes)}
    return {name: _made_of(_ranks_of(mesh, positions[name]), True) for name in names}


def _ranks_of(mesh: DeviceMesh, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that stand with this one on some axes, outer axis first."""
    others = [position for position in range(mesh.ndim) if position not in positions]
    size = math.prod(map(mesh.size, positions))
    lines = mesh.mesh.permute(*others, *positions).reshape(-1, size).tolist()
    near, *_ = dist.get_process_group_ranks(mesh.get_group(positions[0]))
    return next(tuple(line) for line in lines if near in line)


def _group_of(ranks: tuple[int, ...]) -> str:
    world = dist.group.WORLD
    assert world is not None
    if ranks == tuple(range(world.size())):
        return world.group_name
    return _made_of(ranks, False)


def _made_of(ranks: tuple[int, ...], gathers: bool) -> str:
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    if (gathers, ranks) not in made:
        # Other ranks of the world may be on other stages of a pipeline, or not on the mesh.
        group = dist.new_group(list(ranks), use_local_synchronization=True, sort_ranks=False)
        assert isinstance(group, dist.ProcessGroup)
        made[gathers, ranks] = group.group_name
    return made[gathers, ranks]


def made_groups() -> list[dist.ProcessGroup]:
    """Return every group that was made in addition to those of the mesh."""
    made = _made.get(dist.group.WORLD, {}) if dist.group.WORLD is not None else {}
    return [_resolve_process_group(cast(Any, name)) for name in made.values()]


@contextlib.contextmanager
def use_mesh(mesh: DeviceMesh, joined: Groups | None = None, gathering: Groups | None = None) -> Iterator[None]:
    """Resolve axis names on `mesh` inside the block, and those of joined axes, which `join_axes` gives.

    Weights are gathered in the groups that `gathering_groups` gives, where there are any.
    """
    with use_axes(axes_on(mesh, joined, gathering)):
        yield


def axes_on(mesh: DeviceMesh, joined: Groups | None = None, gathering: Groups | None = None) -> dict[str, Axis]:
    """Return the axes that `use_mesh` resolves, by name."""
    names = mesh.mesh_dim_names or ()
    axes: dict[str, Axis] = {}
    for position, name in enumerate(names):
        group = mesh.get_group(position).group_name
        axes[name] = Axis(name, group, mesh.size(position), mesh.get_local_rank(position))
    for name, group in (joined or {}).items():
        parts = [axes[names[position]] for position in joined_axes(names)[name]]
        axes[name] = Axis(name, group, num_parts_of(parts), part_of(parts))
    for name, group in (gathering or {}).items():
        axes[name] = replace(axes[name], gathering=group)
    return axes


def current_axes() -> Mapping[str, Axis]:
    """Return the axes of the current mesh by name, for `use_axes`."""
    return _axes


def put_axes(axes: Mapping[str, Axis]) -> Mapping[str, Axis]:
    """Have these axes from now on, and no others; return those before."""
    global _axes
    before, _axes = _axes, axes
    return before


@contextlib.contextmanager
def use_axes(axes: Mapping[str, Axis]) -> Iterator[None]:
    """Have these axes inside the block, and no others."""
    before = put_axes(axes)
    try:
        yield
    finally:
        put_axes(before)


def axis_of(name: str) -> Axis:
    """Return the axis of that name on the current mesh."""
    if name not in _axes:
        axes = ", ".join(_axes) or "none"
        raise MeshError(
            f"no axis {name!r} on the current mesh (axes: {axes}); run inside use_mesh(mesh) with such an axis."
        )
    return _axes[name]


Axes = Mapping[str, tuple[str, ...]]
"""Factor → the mesh axes that split it, outer first."""
IN_ORDER: Axes = MappingProxyType({})
"""Factor → the mesh axes that zigzag-shard it, if none does."""


def axes_of(names: Collection[str]) -> tuple[Axis, ...]:
    """Return the axes without those of size one, which do nothing."""
    return tuple([axis for axis in map(axis_of, names) if axis.size > 1]) if names else ()


def one_axis_of(names: Set[str]) -> Axis | None:
    """Join axes, in the order of the mesh, without those of size one; None if none is left."""
    found = [name for name, axis in _axes.items() if name in names and axis.size > 1]
    if len(found) == 1:
        return _axes[found[0]]
    return axis_of(joined_name(found, range(len(found)))) if found else None


def part_of(axes: Sequence[Axis]) -> Any:
    """Return the number of this rank's part of a dim that the axes split, outer axis first.

    It is a SymInt if ranks are simulated.
    """
    part: Any = 0
    for axis in axes:
        part = part * axis.size + axis.rank
    return part


def on_rank(number: Any, rank: int) -> int:
    """Return the value of a number on a simulated rank; each rank may have a value of its own."""
    ints = getattr(getattr(number, "node", None), "_local_ints", None)
    return int(number) if ints is None else ints[rank]


def num_parts_of(axes: Sequence[Axis]) -> int:
    """Return the number of parts into which the axes split a dim."""
    parts = 1
    for axis in axes:
        parts *= axis.size
    return parts


@dataclass(slots=True, eq=False)
class Traffic:
    """Every collective that ran: (collective, axis) → bytes in NCCL's convention, and how often."""

    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Count every collective that runs inside the block, forward and backward."""
    traffic = Traffic()
    OPEN_RECORDS.append(traffic)
    try:
        yield traffic
    finally:
        OPEN_RECORDS.remove(traffic)


def count(collective: str, axis: Axis, num_bytes: int) -> None:
    """Note a collective in every open record; what runs inside a compiled region is not seen."""
    if not OPEN_RECORDS or torch.compiler.is_compiling():
        return
    for traffic in OPEN_RECORDS:
        traffic.num_bytes[collective, axis.name] += num_bytes
        traffic.calls[collective, axis.name] += 1
