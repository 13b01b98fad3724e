"""Costs of a model's blocks, and of sends if a pipeline is cut between them, from one plan of the whole model.

The plan is that of the whole model on the devices of one stage. Its restriction to the blocks of a stage is the best
plan of that stage, given the layouts of the tensors that the stage receives and sends. Nothing else ties stages
together, so the seconds of a stage are the sum over its blocks. A block takes the time from the end of the block before
it to its own, in the simulated micro-batch. Half of a backward counts for the gradient of the inputs, half for that of
the weights. A block takes no less than the host needs to launch its computations, which all plans launch alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import fx

from autopar.costs.hardware.collectives import message_seconds
from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.model import MemoryModel
from autopar.costs.space.space import Space, TensorEdge
from autopar.costs.steps.step import microbatch_tasks
from autopar.costs.timeline.simulation import simulate
from autopar.costs.timeline.values import COMPUTE, Event, Task
from autopar.ir.program.calls import source_of
from autopar.ir.program.effects import of_weights_alone
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import I, Layout, P, R, replicated
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.stages.blocks import Block
from autopar.planning.pipeline.stages.cheapest_cut import Floats
from autopar.planning.pipeline.stages.cuts import BlockCost
from autopar.planning.step_seconds import parts_by_decision

FORWARD, OPTIMIZER = "forward", "optimizer"


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
    space, count = whole.space, len(blocks)
    home = block_of_decisions(space, blocks)
    once = np.zeros(count)
    for number, parts in enumerate(parts_by_decision(whole.memory, whole.choices, whole.modes)):
        if (place := home[number]) is not None:
            once[place] += parts.once
    by_name = {each.name: place for each, place in zip(space.decisions, home, strict=True) if place is not None}
    tasks = microbatch_tasks(whole.memory, whole.choices, whole.modes)
    alone = simulate([replace(task, launch=0.0) for task in tasks], space.hardware.communication_share)
    computing = [task for task in tasks if task.stream == COMPUTE]
    spans = paced(*spans_of_blocks(alone.events, by_name, count), launching_of_blocks(computing, by_name, count))
    costs = zip(*spans, once, blocks, strict=True)
    return tuple(BlockCost(float(f), float(b) / 2, float(b) / 2, float(o), block.name) for f, b, o, block in costs)


def spans_of_blocks(events: Sequence[Event], home: Mapping[str, int], count: int) -> tuple[Floats, Floats]:
    """Return the seconds of the forward and of the backward of blocks, each from the end of the block before it.

    `home` is the block of each row.
    """
    ends = np.zeros((2, count))
    for event in events:
        place, task = home.get(event.task.row), event.task
        if place is not None and ends_block(task) and task.phase != OPTIMIZER:
            row = int(task.phase != FORWARD)
            ends[row, place] = max(ends[row, place], event.end)
    there, turn = np.maximum.accumulate(ends[0]), ends[0].max(initial=0.0)
    back = np.maximum.accumulate(np.maximum(ends[1, ::-1], turn))
    return np.diff(there, prepend=0.0), np.diff(back, prepend=turn)[::-1]


def ends_block(task: Task) -> bool:
    """Return whether a pass of a block ends no earlier than the task.

    Copies to the host are waited for at the end of a stage's forward. Weights that move, and copies back, are waited
    for by other tasks.
    """
    return not task.weights and (not task.overlapped or task.phase == FORWARD)


def launching_of_blocks(tasks: Sequence[Task], home: Mapping[str, int], count: int) -> Floats:
    """Return the seconds in which a host launches each block's forward, and its backward: [2, block]."""
    found = np.zeros((2, count))
    for task in tasks:
        if task.phase != OPTIMIZER and (place := home.get(task.row)) is not None:
            found[int(task.phase != FORWARD), place] += task.launch
    return found


def paced(forward: Floats, backward: Floats, launching: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of passes, at least those in which a host launches them: [2, block or stage].

    The host's lead from the forward is left in the backward.
    """
    there, back = launching
    forward = np.maximum(forward, there)
    return forward, np.maximum(backward, there + back - forward)


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
