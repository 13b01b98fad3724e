"""Costs of a model's blocks, and of sends if a pipeline is cut between them, from one plan of the whole model.

The plan is that of the whole model on the devices of one stage. Its restriction to the blocks of a stage is the best
plan of that stage, given the layouts of the tensors that the stage receives and sends. Nothing else ties stages
together, so the seconds of a stage are the sum over its blocks. Half of a backward counts for the gradient of the
inputs, half for that of the weights. A block takes no less than the host needs to launch its computations, which all
plans launch alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.costs.hardware.collectives import message_seconds
from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.model import MemoryModel
from autopar.costs.space.space import Space, TensorEdge
from autopar.costs.steps.step import microbatch_tasks
from autopar.costs.timeline.values import COMPUTE
from autopar.ir.program.calls import source_of
from autopar.ir.program.effects import of_weights_alone
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import I, Layout, P, R, replicated
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.stages.blocks import Block
from autopar.planning.pipeline.stages.cuts import BlockCost
from autopar.planning.step_seconds import StepSeconds, parts_by_decision


@dataclass(frozen=True)
class PlannedWhole:
    """A plan of a whole program: a choice per decision, and the modes in which segments are computed again."""

    memory: MemoryModel
    choices: tuple[int, ...]
    modes: Mapping[str, str]

    @property
    def space(self) -> Space:
        return self.memory.space

    @cached_property
    def edges_from(self) -> Mapping[tuple[int, int], Sequence[TensorEdge]]:
        """The edges that each output leaves by, by decision and output."""
        found: dict[tuple[int, int], list[TensorEdge]] = defaultdict(list)
        for edge in self.space.edges:
            found[edge.source, edge.source_output].append(edge)
        return found


def block_costs(whole: PlannedWhole, blocks: Sequence[Block]) -> tuple[BlockCost, ...]:
    """Return the cost of every block. Calls that stages share are left out."""
    space = whole.space
    home = block_of_decisions(space, blocks)
    sums = [StepSeconds(0.0, 0.0, 0.0)] * len(blocks)
    for number, parts in enumerate(parts_by_decision(whole.memory, whole.choices, whole.modes)):
        place = home[number]
        if place is not None:
            sums[place] = StepSeconds(*(a + b for a, b in zip(sums[place], parts, strict=True)))
    found = []
    for parts, block, (there, both) in zip(sums, blocks, _launching(whole, home, len(blocks)), strict=True):
        forward = max(parts.forward, there)
        half = max(parts.backward, both - forward) / 2
        found.append(BlockCost(forward, half, half, parts.once, block.name))
    return tuple(found)


def _launching(whole: PlannedWhole, home: Sequence[int | None], count: int) -> list[tuple[float, float]]:
    """Return the host's seconds to launch the computations of each block's forward, and of both passes."""
    by_name = {each.name: place for each, place in zip(whole.space.decisions, home, strict=True)}
    there, both = [0.0] * count, [0.0] * count
    for task in microbatch_tasks(whole.memory, whole.choices, whole.modes):
        if task.stream == COMPUTE and (place := by_name.get(task.row)) is not None:
            there[place] += task.launch if task.phase == "forward" else 0.0
            both[place] += task.launch
    return list(zip(there, both, strict=True))


def cut_seconds(
    whole: PlannedWhole, blocks: Sequence[Block], mesh: Mesh, axis: str, hardware: Hardware
) -> tuple[float, ...]:
    """Return the seconds to send, there and back, what crosses the start of each block over `axis` of `mesh`."""
    there, back = [0] * len(blocks), [0] * len(blocks)
    for node, (made, last) in crossings(whole.space, blocks).items():
        num_bytes = boundary_bytes(whole, node)
        for place in range(made + 1, last + 1):
            there[place] += num_bytes
            back[place] += num_bytes * node.meta["tensor"].requires_grad
    pairs = zip(there, back, strict=True)
    return tuple(sum(message_seconds(each, mesh, axis, hardware) for each in pair if each) for pair in pairs)


def boundary_bytes(whole: PlannedWhole, node: fx.Node) -> int:
    """Return the bytes of a value that each device sends from stage to stage."""
    info: TensorInfo = node.meta["tensor"]
    shape = boundary_layout(whole, node).local_shape(info.shape, whole.space.mesh.sizes)
    return math.prod(shape) * info.dtype.itemsize


def boundary_layout(whole: PlannedWhole, node: fx.Node) -> Layout:
    """Return the layout in which a value goes from stage to stage: the one behind its maker in the whole plan.

    It is that of its shared reshard, or of its maker, or of its only user; equal everywhere on axes where none of them
    has it whole.
    """
    space, choices = whole.space, whole.choices
    made, position = source_of(node)
    maker = space.index[made.name]
    offered = [space.decisions[maker].candidates.strategies[choices[maker]].outputs[position]]
    for edge in whole.edges_from.get((maker, position), ()):
        target = space.decisions[edge.target].candidates.strategies[choices[edge.target]]
        found = target.inputs[edge.target_input]
        offered = [found, *offered] if space.decisions[edge.target].kind == "shared_reshard" else [*offered, found]
    info: TensorInfo = node.meta["tensor"]
    for layout in offered:
        if P not in layout and R not in layout and layout.divides(info.shape, space.mesh.sizes):
            return layout
    whole_axes = Layout(I if placement in (P, R) else placement for placement in offered[0])
    return whole_axes if whole_axes.divides(info.shape, space.mesh.sizes) else replicated(space.mesh.ndim)


def crossings(space: Space, blocks: Sequence[Block]) -> dict[fx.Node, tuple[int, int]]:
    """Return every value that a block passes to later ones, with that block and the last one that takes it."""
    place = {node: number for number, block in enumerate(blocks) for node in block.nodes}
    end = len(blocks) - 1
    weights = of_weights_alone(space.program)
    found: dict[fx.Node, tuple[int, int]] = {}
    for node, made in place.items():
        if isinstance(node.meta["tensor"], TensorInfo) and node not in weights:
            last = max((place.get(user, end if user.op == "output" else made) for user in node.users), default=made)
            if last > made:
                found[node] = (made, last)
    return found


def block_of_decisions(space: Space, blocks: Sequence[Block]) -> list[int | None]:
    """Return the block of every decision: of its call, of the call before a reshard or output, or of the first use.

    A value is sent in the layout of its shared reshard: the stage that makes it has moved it there.
    """
    place = {node: number for number, block in enumerate(blocks) for node in block.nodes}
    found: list[int | None] = [place.get(d.node) if d.kind == "call" else None for d in space.decisions]
    for edge in reversed(space.edges):  # the edges out of a shared reshard lie behind the one into it
        target = found[edge.target]
        if space.decisions[edge.source].kind in ("shared_reshard", "parameter") and target is not None:
            before = found[edge.source]
            found[edge.source] = target if before is None else min(before, target)
    for edge in space.edges:
        ends = space.decisions[edge.source].kind, space.decisions[edge.target].kind
        if ends == ("call", "shared_reshard") or ends[1] == "output":
            found[edge.target] = found[edge.source]
    return found
