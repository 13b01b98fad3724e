"""Mesh axes at run time, found by name, and the count of what moves over them.

Graphs name an axis; `use_mesh` says which process group that is, so that one graph serves every rank.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis at run time: its process group, its size, and where this rank stands on it."""

    name: str
    group: str
    size: int
    rank: Any  # an int; under LocalTensorMode a SymInt with a value per simulated rank


_axes: dict[str, Axis] = {}
_traffic: list[Traffic] = []


@contextlib.contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[None]:
    """Resolve axis names on `mesh` inside the block."""
    axes = {}
    for position, name in enumerate(mesh.mesh_dim_names or ()):
        group = mesh.get_group(position).group_name
        axes[name] = Axis(name, group, mesh.size(position), mesh.get_local_rank(position))
    with use_axes(axes):
        yield


def current_axes() -> Mapping[str, Axis]:
    """The axes of the current mesh by name, for `use_axes`."""
    return dict(_axes)


@contextlib.contextmanager
def use_axes(axes: Mapping[str, Axis]) -> Iterator[None]:
    """Have these axes inside the block, and no others."""
    before = dict(_axes)
    _axes.clear()
    _axes.update(axes)
    try:
        yield
    finally:
        _axes.clear()
        _axes.update(before)


def axis_of(name: str) -> Axis:
    """The axis of that name on the current mesh."""
    if name not in _axes:
        axes = ", ".join(_axes) or "none"
        raise MeshError(
            f"no axis {name!r} on the current mesh (axes: {axes}); run inside use_mesh(mesh) with such an axis."
        )
    return _axes[name]


Axes = Mapping[str, tuple[str, ...]]
"""Factor → the mesh axes that split it, outer first."""


def axes_of(names: Iterable[str]) -> tuple[Axis, ...]:
    """Several axes, without those of size one, which do nothing."""
    return tuple(axis for axis in map(axis_of, names) if axis.size > 1)


def part_of(axes: Sequence[Axis]) -> Any:
    """Which part this rank holds of a dim that the axes split, outer first; a SymInt where ranks are simulated."""
    part: Any = 0
    for axis in axes:
        part = part * axis.size + axis.rank
    return part


def num_parts_of(axes: Sequence[Axis]) -> int:
    """Into how many parts the axes split a dim."""
    parts = 1
    for axis in axes:
        parts *= axis.size
    return parts


@dataclass(slots=True)
class Traffic:
    """Every collective that ran: (collective, axis) → bytes in NCCL's convention, and how often."""

    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def by_collective(self) -> dict[tuple[str, str], int]:
        return dict(self.num_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values())


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Count every collective that runs inside the block, forward and backward."""
    traffic = Traffic()
    _traffic.append(traffic)
    try:
        yield traffic
    finally:
        _traffic.remove(traffic)


def count(collective: str, axis: Axis, num_bytes: int) -> None:
    """Note a collective in every open record; what runs inside a compiled region is not seen."""
    if torch.compiler.is_compiling():
        return
    for traffic in _traffic:
        traffic.num_bytes[collective, axis.name] += num_bytes
        traffic.calls[collective, axis.name] += 1
