"""Layouts of the outputs that a user gets, and which of them the plan must not change.

    outputs     a tensor with a row per sample       other tensors
    "plain"     this rank's samples, or all of them   whole on every rank
    "full"      whole on every rank                   whole on every rank
    "dtensor"   as the plan leaves it                 as the plan leaves it

"plain" gives a rank the samples that it was called with: all of them with inputs="whole". Beside a loss that the model
computes, plain outputs are left in any layout, because most scripts read the loss alone; the runtime moves an output
when it is first used. Scalars are whole in every mode, though a plan may leave a loss partial (`output_candidates`).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import fx

from autopar.costs.hardware.collectives import Transfer, transfer_seconds
from autopar.costs.hardware.profile import Hardware
from autopar.costs.space.call_candidates import Candidates, layout_candidates, split_layouts
from autopar.ir.program.calls import source_of
from autopar.ir.program.program import Program, TensorInfo
from autopar.ir.sharding.layout import I, Layout, P, S, replicated
from autopar.ir.sharding.mesh import Mesh, joined_name
from autopar.strategies.roles import RoledProgram, Value

Outputs = Literal["plain", "dtensor", "full"]


@dataclass(frozen=True, slots=True)
class Returned:
    """Form in which the outputs of a program come back to the user."""

    outputs: Outputs = "dtensor"
    axes: tuple[str, ...] = ()
    """The axes over which the batch is given in parts."""

    def layouts(self, program: Program, mesh: Mesh) -> tuple[Layout | None, ...]:
        """Return the layout of each output as the user gets it; None if the plan decides, or it is no tensor."""
        roled = RoledProgram.of(program)
        return tuple(self._layout(value, roled, mesh) for value in returned_values(program))

    def _layout(self, value: object, roled: RoledProgram, mesh: Mesh) -> Layout | None:
        if not isinstance(value, fx.Node):
            return None
        node, position = source_of(value)
        info = roled.infos[node.name, position]
        whole = replicated(mesh.ndim)
        if not info.shape or self.outputs == "full":
            return whole
        if self.outputs == "dtensor":
            return None
        own = Layout(S(0) if name in self.axes and size > 1 else I for name, size in mesh.axes.items())
        counts_samples = _counts_samples((node.name, position), info, roled)
        return own if counts_samples and own.divides(info.shape, mesh.sizes) else whole

    def leaves_free(self, program: Program) -> bool:
        """Return whether the plan may leave outputs that are no scalars in any layout."""
        return self.outputs == "dtensor" or (self.outputs == "plain" and _returns_loss(program))


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ranks sum their parts of a loss: its own, or float64 if that is half precision."""
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float64


AS_PLANNED, WHOLE = Returned("dtensor"), Returned("full")


def output_candidates(
    info: TensorInfo, wanted: Layout | None, free: bool, mesh: Mesh, hardware: Hardware
) -> Candidates:
    """Return the candidates of an output that the user gets as `wanted`, or in any layout if `free`.

    A loss may stay partial: its gradient does not depend on the sum, which the runtime overlaps with the backward.
    """
    if not info.shape and info.requires_grad:
        return _loss_candidates(mesh, hardware, summed_in(info.dtype).itemsize)
    return layout_candidates(split_layouts(info, mesh) if free and info.shape else (wanted or replicated(mesh.ndim),))


@functools.lru_cache(maxsize=256)
def _loss_candidates(mesh: Mesh, hardware: Hardware, num_bytes: int) -> Candidates:
    """Return every layout of I and P, with the sum of so many bytes that makes it whole, once per step."""
    layouts = tuple(map(Layout, itertools.product(*((I, P) if size > 1 else (I,) for size in mesh.sizes))))
    candidates, strategies = layout_candidates(layouts), []
    for layout, strategy in zip(layouts, candidates.strategies, strict=True):
        partial = [axis for axis, placement in enumerate(layout) if placement is P]
        sums = (Transfer("all_reduce", joined_name(mesh.names, partial), num_bytes, ahead=True),) if partial else ()
        waits = tuple(transfer_seconds(each, mesh, hardware) for each in sums)
        strategies.append(replace(strategy, transfers=sums, waits=waits))
    seconds = np.array([sum(each.waits, 0.0) for each in strategies])
    return replace(candidates, strategies=tuple(strategies), seconds=seconds)


def returned_values(program: Program) -> tuple[object, ...]:
    """Return what the user gets of the flat output: nodes and constants."""
    return tuple(program.output[program.num_sent : program.num_results])


def _returns_loss(program: Program) -> bool:
    infos = (value.meta["tensor"] for value in returned_values(program) if isinstance(value, fx.Node))
    return any(isinstance(info, TensorInfo) and not info.shape and info.dtype.is_floating_point for info in infos)


def _counts_samples(value: Value, info: TensorInfo, roled: RoledProgram) -> bool:
    """Return whether dim 0 counts the samples of the batch, or several rows of each."""
    return roled.dims[value][0] == "data" and roled.samples > 0 and info.shape[0] % roled.samples == 0
