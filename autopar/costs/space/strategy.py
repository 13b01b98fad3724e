"""One way to run a call on a mesh: a choice per axis, the layouts that it takes and gives, and what runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costs.plans.strategy_names import strategy_name
from autopar.costs.pricing.reshard import Transfer
from autopar.ir.program.recompute_segments import SELECTIVE
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh, joined_name
from autopar.ir.sharding.operation import ATEN, ZIGZAG, Implementation
from autopar.ir.sharding.rule import ANY_OF, TOGETHER, factors_of


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a call: a choice per mesh axis, the layouts it asks of its inputs and gives its outputs."""

    choices: tuple[str, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    implementation: Implementation = ATEN
    """Implementation that runs the call, or `ATEN`."""
    transfers: tuple[Transfer, ...] = ()
    """The collectives that the implementation runs itself."""
    zigzag: frozenset[str] = frozenset()
    """The zigzag-sharded factors, of those that are split."""
    waits: tuple[float, ...] = ()
    """Seconds of each of them, as far as computing does not hide them."""
    shared: bool = False
    """True if a call moves its first input together with all calls that take it.

    On a shared reshard, it is true if its consumers do.
    """
    regathering: Strategy | None = None
    """The same by the variant of the implementation that gathers again in the backward; None if it has none."""
    saved: bool = False
    """A parameter that is stored in parts: once gathered it is saved for the backward, not gathered again there."""

    def __str__(self) -> str:
        return strategy_name(self.choices, self.saved, self.implementation.name)

    @property
    def implemented(self) -> bool:
        """True if a runtime function replaces the ATen call."""
        return bool(self.implementation.function)

    @property
    def communicates(self) -> bool:
        """True if a call runs collectives of its own in the forward, or takes part in those of another call."""
        return self.shared or any(not transfer.backward for transfer in self.transfers)

    @property
    def forward_collectives(self) -> tuple[tuple[Transfer, float], ...]:
        """Its own collectives of the forward, each with the seconds that computing does not hide."""
        return tuple(each for each in zip(self.transfers, self.waits, strict=True) if not each[0].backward)

    @property
    def travelling(self) -> tuple[int, ...]:
        """Positions of the collectives that other calls may run during: the last of the forward, all of the backward.

        There are none unless the implementation has halves.
        """
        if not self.implementation.in_halves:
            return ()
        forward = [position for position, each in enumerate(self.transfers) if not each.backward]
        return (*forward[-1:], *(position for position, each in enumerate(self.transfers) if each.backward))

    def local_sizes(self, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
        """Return the size of every factor on one device; under "+x" the parts of x that go with those of another
        factor.
        """
        axes = self.axes_by_factor(mesh)
        local = {
            factor: -(-size // math.prod(mesh.size(axis) for axis in axes.get(factor, ())))
            for factor, size in sizes.items()
        }
        if self.zigzag:
            axes_of = self.zigzag_by(mesh)
            local.update((ZIGZAG + each, 1 + (len(axes_of[each]) < len(axes[each]))) for each in self.zigzag)
        for size, choice in zip(mesh.sizes, self.choices, strict=True):
            for factor in factors_of(choice)[1:]:
                local[TOGETHER + factor] = local.get(TOGETHER + factor, 1) * size
        return local

    def axes_by_factor(self, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        """Split factors → the names of the mesh axes that split them, outer first."""
        found: dict[str, tuple[str, ...]] = {}
        for name, choice in zip(mesh.names, self.choices, strict=True):
            for factor in factors_of(choice):
                found[factor] = (*found.get(factor, ()), name)
        return found

    def zigzag_by(self, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        """Return zigzag-sharded factors → the names of the mesh axes that shard them, outer first."""
        found: dict[str, tuple[str, ...]] = {}
        for axis, (name, choice) in enumerate(zip(mesh.names, self.choices, strict=True)):
            if any(layout[axis].zigzag for layout in (*self.inputs, *self.outputs)):
                for factor in factors_of(choice):
                    found[factor] = (*found.get(factor, ()), name)
        return found

    def links(self, factor: str, mesh: Mesh) -> tuple[str, ...]:
        """Return the mesh axes of more than one device that a collective over `factor` runs over, one after the other.

        A factor with "+" before it stands for the axes that split it with another factor, and several behind "&" for
        those that split any of them: one joined axis.
        """
        if factor[:1] == ANY_OF:
            names = set(factor.removeprefix(ANY_OF).split())
            made = [not names.isdisjoint(factors_of(choice)) for choice in self.choices]
            axes = [axis for axis, found in enumerate(made) if found and mesh.sizes[axis] > 1]
            return (joined_name(mesh.names, axes),) if axes else ()
        together = factor[:1] == TOGETHER
        name = factor.removeprefix(TOGETHER)
        made = [factors_of(choice)[together:] for choice in self.choices]
        axes = [axis for axis, found in enumerate(made) if name in found and mesh.sizes[axis] > 1]
        if together:
            return (joined_name(mesh.names, axes),) if axes else ()
        return tuple(mesh.names[axis] for axis in axes)

    def num_parts(self, mesh: Mesh) -> int:
        """Return the number of equal parts into which the call's work is divided."""
        split = (size for size, choice in zip(mesh.sizes, self.choices, strict=True) if factors_of(choice))
        return math.prod(split)


def running_in(mode: str, strategy: Strategy) -> Strategy:
    """Return what runs of a strategy in a segment of a mode: itself, or its variant that gathers again."""
    return strategy.regathering or strategy if mode == SELECTIVE else strategy
