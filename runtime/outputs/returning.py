"""Conversion of a rank's flat results to the user's outputs: plain tensors, or DTensors if requested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from autopar.costs.space.returned import Returned
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout, P
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.collectives.mesh_axes import Axis, axes_on, part_of
from autopar.runtime.lengths.outputs import Counted, Padding, cut, cut_part
from autopar.runtime.outputs.entering import Entrance, handed
from autopar.runtime.outputs.relaid import relaid
from autopar.runtime.outputs.sums import Sums
from autopar.runtime.outputs.unread import Reading, arriving, unread
from autopar.runtime.ranks.calls import THE_OUTPUT, Backwards, Calls


@dataclass(frozen=True, slots=True)
class Result:
    """One of the user's outputs on a rank: its local value, the layout that the plan gave it, and what it counts."""

    value: Any
    layout: Layout | None
    """None if it is no tensor."""
    counted: Counted | None = None
    """Meaning of its dims, if the call was padded."""


class Returning:
    """Hands out the outputs of a module's calls."""

    def __init__(self, returned: Returned, mesh: DeviceMesh, calls: Calls) -> None:
        self._returned, self._mesh, self._calls = returned, mesh, calls
        self._key = f"returned as {returned} on {mesh.shape}"
        self.averages = returned.outputs == "plain" and bool(returned.axes)
        """True if the loss of a step is the mean of the losses of ranks that are called with their own samples."""
        self._sums = Sums(mesh)

    @cached_property
    def _axes(self) -> tuple[Axis, ...]:
        found = axes_on(self._mesh)
        return tuple(found[name] for name in self._mesh.mesh_dim_names or ())

    @cached_property
    def _given(self) -> tuple[Axis, ...]:
        """The axes over which the batch is given in parts."""
        return tuple(axis for axis in self._axes if axis.name in self._returned.axes and axis.size > 1)

    def outputs(self, program: Program, results: Sequence[Result], padding: Padding | None) -> Any:
        """Return what the user gets of a call, in the structure that the model returns."""
        key = self._key
        if key not in program.facts:
            named = pytree.tree_unflatten(list(range(program.num_outputs)), program.out_spec)
            names = [_name_of(path) for path, _ in pytree.tree_flatten_with_path(named)[0]]
            program.facts[key] = names, self._returned.layouts(program, Mesh.of(self._mesh))
        names, layouts = program.facts[key]
        backwards = self._calls.backwards()

        def output(name: str, result: Result, wanted: Layout | None) -> Any:
            if result.layout is None or not isinstance(result.value, Tensor):
                return result.value
            if P in result.layout:
                return self._sum(result.value, result.layout, self._entrance(name, backwards, result.layout))
            if wanted is None:
                split = [axis for axis, each in zip(self._axes, result.layout, strict=True) if each.is_split]
                return self._dtensor(result, Entrance(name, backwards, self._part(split)), padding)
            return self._plain(result, wanted, self._entrance(name, backwards, wanted), padding)

        outputs = [output(*each) for each in zip(names, results, layouts, strict=True)]
        return outputs[0] if program.out_spec.is_leaf() else pytree.tree_unflatten(outputs, program.out_spec)

    def _entrance(self, name: str, backwards: Backwards, wanted: Layout) -> Entrance:
        if not self.averages:
            return Entrance(name, backwards, "")
        part = self._part(self._given)
        holds_own = any(placement.is_split for placement in wanted)
        return Entrance(name, backwards, part, self._given, holds_own)

    def _sum(self, part: Tensor, layout: Layout, entrance: Entrance) -> Tensor:
        """Return a loss of which this rank has a part, plain in every mode; its sum is on its way."""
        total = self._sums.begin(part, layout)
        return arriving(handed(part, entrance), total.arrived)

    def _part(self, split: Sequence[Axis]) -> str | None:
        """Return the part that this rank holds of what some axes split; None if no other rank holds it."""
        if all(axis in split for axis in self._axes if axis.size > 1):
            return None
        return " ".join(f"{axis.name}={axis.rank}" for axis in split)

    def _plain(self, result: Result, wanted: Layout, entrance: Entrance, padding: Padding | None) -> Tensor:
        finish = partial(self._cut, result.counted, padding, entrance.holds_own)
        if result.layout == wanted:
            return finish(handed(result.value, entrance))
        assert result.layout is not None
        axes, there, back = self._axes, (result.layout, wanted), (wanted, result.layout)

        def read(part: Tensor) -> Tensor:
            self._calls.gather(entrance.name)
            return relaid(part, *there, axes)

        sizes = self._mesh.shape
        whole = [size * result.layout.num_parts(dim, sizes) for dim, size in enumerate(result.value.shape)]
        shape = finish(torch.empty(wanted.local_shape(whole, sizes), device="meta")).shape
        return unread(result.value, shape, Reading(read, lambda grad: relaid(entrance(grad), *back, axes), finish))

    def _cut(self, counted: Counted | None, padding: Padding | None, holds_own: bool, value: Tensor) -> Tensor:
        """Return a plain output without what was padded."""
        if counted is None or padding is None:
            return value
        if holds_own:
            own, others = ([each for each in counted.samples if bool(each[0]) is other] for other in (False, True))
            within = padding.of_part(int(part_of(self._given)))
            value = cut(value, Counted(counted.positions, tuple(own)), within)
            counted = Counted((), tuple(others))
        return cut(value, counted, padding)

    def _dtensor(self, result: Result, entrance: Entrance, padding: Padding | None) -> DTensor:
        value, layout = handed(result.value, entrance), result.layout
        assert layout is not None
        if result.counted is None or padding is None:
            placements = [Shard(each.dim) if each.is_split else Replicate() for each in layout]
            return DTensor.from_local(value, self._mesh, placements, run_check=False)
        return cut_part(value, layout, self._mesh, self._returned.axes, result.counted, padding)


def _name_of(path: Sequence[Any]) -> str:
    """Return the name of an output in the user's words."""
    if len(path) == 1 and isinstance(path[0], pytree.MappingKey):
        return f"{THE_OUTPUT} {path[0].key}"
    return f"{THE_OUTPUT} {pytree.keystr(tuple(path))}" if path else THE_OUTPUT
