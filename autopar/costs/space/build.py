"""One walk over a program that lays out its space of plans.

A tensor moved to one layout for several consumers is moved once, in the cost and in the graph: they take it from a
shared reshard. Consumers that are the same operation (query, key and value) have a second shared reshard if the tensor
has others.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx

from autopar.costs.hardware.collectives import transfer_seconds
from autopar.costs.hardware.overlap import NOTHING, OverlappedWork
from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.conventions import OF_AUTOPAR, MemoryConventions
from autopar.costs.pricing.message_sizes import ALONE, first_layer, sharing
from autopar.costs.pricing.moves import MovedTensor
from autopar.costs.pricing.optimizer import ADAMW, Optimizer
from autopar.costs.pricing.optimizer_step import step_seconds, step_transfers
from autopar.costs.space.call_candidates import (
    Candidates,
    Turn,
    candidates_of,
    gathered_or_saved,
    layout_candidates,
    shared_reshard_candidates,
    split_layouts,
)
from autopar.costs.space.expert_rows import rows_of_experts
from autopar.costs.space.returned import AS_PLANNED, WHOLE, Returned, output_candidates
from autopar.costs.space.space import Decision, Roles, Space, TensorEdge
from autopar.costs.space.unsharded import meanwhile_of, overlapped_of
from autopar.files.schema import MAX_WHOLE
from autopar.ir.program.calls import is_call, is_cast, source_of
from autopar.ir.program.effects import calls_meanwhile
from autopar.ir.program.infinite import may_be_infinite
from autopar.ir.program.operators.attention.cached import WRITE_CACHE
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
from autopar.ir.program.program import Program, TensorInfo, tensor_inputs
from autopar.ir.program.saved_tensors import backward_needs, saved_in
from autopar.ir.sharding.constraint import is_constraint
from autopar.ir.sharding.layout import Layout, S, Z, replicated, zigzag_in
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.padding import Padding
from autopar.strategies.roles import RoledCall, RoledProgram, Value
from autopar.strategies.zigzag import zigzag_dims, zigzag_dims_in_stage

AUXILIARY_ELEMENTS = 2**24  # masks, positions and labels up to this size are computed whole on every device


@dataclass(frozen=True, slots=True)
class _Use:
    """One consumption of a tensor: which decision consumes it, where, and what kind of operation that is."""

    decision: int
    position: int
    kind: object


def build_space(
    program: Program,
    mesh: Mesh,
    hardware: Hardware,
    returned: Returned = AS_PLANNED,
    input_layouts: Mapping[str, Layout] | None = None,
    optimizer: Optimizer = ADAMW,
    imbalance: float = 1.0,
    whole: Program | None = None,
    requested: frozenset[str] = frozenset(),
    num_devices: int | None = None,
    conventions: MemoryConventions = OF_AUTOPAR,
    zigzag_axes: Collection[str] | None = None,
    overlapped: OverlappedWork | None = None,
) -> Space:
    """Lay out every decision and edge.

    `returned` says in which layouts the user gets the outputs; `input_layouts` (placeholder → layout) says which inputs
    arrive split, the others are equal everywhere: to take a slice of those costs nothing. `imbalance` is how many times
    its share of the rows of experts the busiest rank has, `whole` the program that this one is a stage of, `requested`
    the names of requested implementations that are offered on demand, `num_devices` those of all stages, `conventions`
    what a framework holds in memory. Axes of `zigzag_axes` zigzag-shard positions of causal attention; None: all axes.
    `overlapped` is the compute that overlaps with moves of weights, if not the program's (or the whole's) own.
    """
    others = optimizer, imbalance, whole, requested, num_devices, conventions
    overlapped = overlapped or overlapped_of(whole or program, hardware)
    space = Space(
        program, mesh, hardware, optimizer, float(min(imbalance, MAX_WHOLE)), overlapped, num_devices, conventions
    )
    is_zigzag_axis = [size > 1 and (zigzag_axes is None or name in zigzag_axes) for name, size in mesh.axes.items()]
    space.meanwhile = calls_meanwhile(program)
    space.zigzag_axes = tuple(itertools.compress(mesh.names, is_zigzag_axis))
    space.rebuild = lambda axes: build_space(
        program, mesh, hardware, returned, input_layouts, *others, axes, overlapped
    )
    return _Builder(space, returned, input_layouts or {}, whole, requested).build()


class _Builder:
    """The state of one pass over the graph: what is known of each tensor so far."""

    def __init__(
        self,
        space: Space,
        returned: Returned,
        input_layouts: Mapping[str, Layout],
        whole: Program | None,
        requested: frozenset[str],
    ) -> None:
        self.space = space
        self.requested = requested
        self.program = space.program
        self.input_layouts = input_layouts
        writes_cache = any(node.target is WRITE_CACHE for node in self.program.graph.nodes)
        self.returned = WHOLE if writes_cache else returned
        self.roled = RoledProgram.of(space.program)
        self.space.dim_roles.update(self.roled.dims)
        self._saved = saved_in(space.program)
        self.infinite = may_be_infinite(space.program)
        self._regathered: dict[fx.Node, bool] = {}
        self.sharing = sharing(space.program, space.overlapped, first_layer(whole or space.program))
        self.padded = Padding.of(self.roled).dims
        sizes = [space.mesh.size(axis) for axis in space.zigzag_axes]
        self.zigzag_dims = (
            zigzag_dims(self.roled, sizes) if whole is None else zigzag_dims_in_stage(self.program, whole, sizes)
        )
        """Dims that are zigzag-sharded if axes of `zigzag_axes` split them."""
        if not self.zigzag_dims.dims:
            space.zigzag_axes = ()
        self.meanwhile = meanwhile_of(space.program, space.hardware)
        self.rows: set[Value] = set()
        """Rows of experts."""
        self.uses: dict[Value, list[_Use]] = defaultdict(list)

    def build(self) -> Space:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif is_call(node):
                self._call(node)
        self._outputs()
        for key, uses in self.uses.items():
            self._edge(key, uses)
        self.space.rows.update(rows_of_experts(self.space))
        return self.space

    def _placeholder(self, node: fx.Node) -> None:
        info = node.meta["tensor"]
        if not isinstance(info, TensorInfo):
            return
        parameter = node.name in self.roled.parameters
        is_input = node.name in self.program.inputs or node.name in self.program.received
        mesh, hardware = self.space.mesh, self.space.hardware
        if parameter:
            matrix = self.space.optimizer.takes(self.program.parameter_names[node.name], info)
            candidates, kind = _parameter_candidates(info, mesh, hardware, self.space.optimizer, matrix), "parameter"
            if self._is_regathered(node):
                candidates = gathered_or_saved(candidates)
        else:
            layout = self.input_layouts.get(node.name, replicated(mesh.ndim))
            candidates, kind = layout_candidates((layout,)), "input" if is_input else "buffer"
        roles = _roles_by_placement(self.roled.dims[node.name, 0])
        self.space.add(Decision(node.name, kind, candidates, node, roles))

    def _call(self, node: fx.Node) -> None:
        found = self.roled.calls[node.name]
        padded = tuple([self.padded[key] for key in found.inputs])
        only_weights = found.learned and found.weight_only
        infinite = frozenset(place for place, (name, _) in enumerate(found.inputs) if name in self.infinite)
        dims = (
            (self.zigzag_dims.inputs(found, self.roled), self.zigzag_dims.outputs(found))
            if self.zigzag_dims.dims
            else ()
        )
        candidates = candidates_of(
            found.ruled,
            padded,
            self.space.mesh,
            self.space.hardware,
            only_weights,
            infinite,
            dims if any(map(any, dims)) else None,
            self.requested,
            self._turn(found),
            self.roled.summed(found),
            self.space.zigzag_axes if any(map(any, dims)) else (),
            self.meanwhile.get(node, NOTHING),
        )
        if not found.learned and not is_constraint(node.target):
            candidates = _auxiliary(candidates)
        if is_cast(node) and found.inputs[0][0] in self.roled.parameters:
            self.space.weight_casts[node.name] = found.inputs[0][0]
            if self._is_regathered(node):
                candidates = gathered_or_saved(candidates)
        if node.target is DISPATCH:
            self.rows.add((node.name, 0))
        elif node.target is not COMBINE and not self.rows.isdisjoint(found.inputs):
            self.rows.update((node.name, position) for position in range(len(found.call.outputs)))
        decision = self.space.add(Decision(node.name, "call", candidates, node, found.roles))
        for position, key in enumerate(found.inputs):
            self.uses[key].append(_Use(decision, position, (node.target, position)))

    def _turn(self, call: RoledCall) -> Turn:
        """Return whether a call moves its first input "alone" or may share that move with calls of its kind.

        If it may share, the value tells the "first" call from "later" ones. The other inputs of such calls are weights
        only, so that all may be computed where the first one is.
        """
        value = call.inputs[0] if call.inputs else ("", 0)
        if not self.requested or not self.roled.is_activation(value) or not self.roled.infos[value].requires_grad:
            return "alone"
        alike = [each for each, at in self.roled.users[value] if at == 0 and each.node.target is call.node.target]
        for each in alike:
            shares = any(way.shared for way in each.op.offering(self.requested).implementations)
            if not shares or not all(map(self.roled.is_weight, each.inputs[1:])):
                return "alone"
        return "alone" if len(alike) < 2 else "first" if alike[0] is call else "later"

    def _outputs(self) -> None:
        """Add one sink per tensor the graph returns; mutated buffers are equal everywhere.

        A cache that is written into keeps its layout; outputs next to one, such as logits of the next token, are whole.
        Outputs for the next stage may be split, whatever the layouts of the user's outputs.
        """
        sent = self.program.num_sent
        mesh = self.space.mesh
        wanted = self.returned.layouts(self.program, mesh)
        leaves_free = self.returned.leaves_free(self.program)
        for number, value in enumerate(self.program.output):
            if not isinstance(value, fx.Node):
                continue
            source, position = source_of(value)
            info = self.roled.infos[source.name, position]
            candidates = layout_candidates((replicated(mesh.ndim),))
            if source.target is WRITE_CACHE:
                candidates = layout_candidates((self._layout_of_state(source),))
            elif number < sent:
                candidates = layout_candidates(
                    self._zigzag_layouts((source.name, position), info, split_layouts(info, mesh))
                )
            elif number < self.program.num_results:
                candidates = output_candidates(info, wanted[number - sent], leaves_free, mesh, self.space.hardware)
            roles = _roles_by_placement(self.roled.dims[source.name, position])
            decision = self.space.add(Decision(f"output:{number}", "output", candidates, value, roles))
            self.uses[source.name, position].append(_Use(decision, 0, ("output", number)))

    def _layout_of_state(self, written: fx.Node) -> Layout:
        """Return the layout in which a cache arrives that is written into, and in which it is to be left."""
        cache, _ = source_of(tensor_inputs(written)[0])
        return self.input_layouts.get(cache.name, replicated(self.space.mesh.ndim))

    def _zigzag_layouts(self, value: Value, info: TensorInfo, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """Return the layouts with Z(d) in place of S(d) for zigzag-sharded dims, on axes of `zigzag_axes`."""
        of_axes = [
            self.zigzag_dims.of(value) if name in self.space.zigzag_axes else () for name in self.space.mesh.names
        ]
        found = (Layout(map(zigzag_in, layout, of_axes)) for layout in layouts)
        return tuple(layout for layout in found if layout.divides(info.shape, self.space.mesh.sizes))

    def _edge(self, key: tuple[str, int], uses: list[_Use]) -> None:
        """Connect a tensor with its consumers, through shared reshards if there are several."""
        name, position = key
        info = self.roled.infos[key]
        number = self.space.index[name]
        weight = self.space.is_weight(number)
        regather = weight and self._is_regathered(self.space.decisions[number].node)
        views = [self._is_view(self.space.decisions[use.decision].node) for use in uses]
        assert not regather or len(uses) == 1 or all(views), f"{name} is gathered again but has {len(uses)} consumers"
        shared = self.sharing[self.space.weight_casts.get(name, name)] if weight else ALONE
        fixed = self.space.decisions[number].node.target is DISPATCH and key not in self.rows
        tensor = MovedTensor(
            info.shape,
            info.dtype,
            info.requires_grad,
            self.padded[key],
            weight,
            regather,
            viewed=weight and all(views),
            view=not weight and self._is_view(self.space.decisions[number].node),
            sharing=shared,
            reduced=self._reduced(name, weight, info),
            ragged=key in self.rows,
            fixed=fixed,
        )
        source = (self.space.index[name], position)
        only = self.space.decisions[source[0]].candidates.strategies
        made = self.roled.calls.get(name)
        free = (
            not info.requires_grad
            and not (made is not None and made.learned)
            and len(only) == 1
            and only[0].outputs[position] == replicated(self.space.mesh.ndim)
        )
        if len(uses) == 1 or free:  # to slice what is equal everywhere costs nothing, however often
            for use in uses:
                self._connect(source, use, tensor)
            return
        suffix = f":{position}" if position else ""
        shared_reshard = self._shared_reshard(f"{name}{suffix}/reshard", source, uses, tensor)
        if regather:  # on the way to the shared reshard
            tensor = replace(tensor, regather=False, viewed=False, view=True)
        tensor = replace(tensor, alone=weight)
        groups: dict[object, list[_Use]] = defaultdict(list)
        for use in uses:
            groups[use.kind].append(use)
        for number, group in enumerate(groups.values()):
            if len(group) > 1 and len(groups) > 1:
                inner = self._shared_reshard(f"{name}{suffix}/reshard{number + 1}", (shared_reshard, 0), group, tensor)
                for use in group:
                    self._connect((inner, 0), use, tensor)
            else:
                for use in group:
                    self._connect((shared_reshard, 0), use, tensor)

    def _reduced(self, name: str, weight: bool, info: TensorInfo) -> torch.dtype | None:
        """Return the dtype in which the gradient of what is made of weights is summed, if not in its own."""
        made = self.roled.calls.get(name)
        of_weights = weight or (made is not None and made.learned and made.weight_only)
        return self.program.reduced if of_weights and self.program.reduced != info.dtype else None

    def _shared_reshard(self, name: str, source: tuple[int, int], uses: list[_Use], tensor: MovedTensor) -> int:
        """Return a decision on the layout that a tensor takes before it goes on to several consumers."""
        decisions = self.space.decisions
        origin = decisions[source[0]]
        consumers = tuple(dict.fromkeys((decisions[use.decision].candidates, use.position) for use in uses))
        candidates = shared_reshard_candidates(tensor, (origin.candidates, source[1]), consumers, self.space.mesh)
        shared_reshard = self.space.add(Decision(name, "shared_reshard", candidates, origin.node, {}))
        self.space.connect(TensorEdge(source[0], source[1], shared_reshard, 0, tensor))
        return shared_reshard

    def _is_regathered(self, weight: fx.Node) -> bool:
        """Return whether a sharded weight may be gathered again for the backward, which needs it there.

        It has one consumer, or all consumers take views of it, such as the slices of a packed weight.
        """
        if weight not in self._regathered:
            uses = sum(each is weight for user in weight.users if user.op != "output" for each in tensor_inputs(user))
            returned = any(user.op == "output" for user in weight.users)
            alone = uses == 1 or (uses > 1 and not returned and all(map(self._is_view, weight.users)))
            self._regathered[weight] = alone and not returned and backward_needs(weight, self._saved)
        return self._regathered[weight]

    def _is_view(self, node: fx.Node) -> bool:
        """Return whether a call takes a view of a weight, such as a slice of it."""
        found = self.roled.calls.get(node.name)
        if found is None or not (found.learned and found.weight_only):
            return False
        return len(found.inputs) == 1 and bool(self._saved[node].aliases)

    def _connect(self, source: tuple[int, int], use: _Use, tensor: MovedTensor) -> None:
        self.space.connect(TensorEdge(source[0], source[1], use.decision, use.position, tensor))


@functools.lru_cache(maxsize=4096)
def _parameter_candidates(
    info: TensorInfo, mesh: Mesh, hardware: Hardware, optimizer: Optimizer, matrix: bool
) -> Candidates:
    layouts = split_layouts(info, mesh, padded=True)
    seconds = [step_seconds(info, each, mesh, hardware, optimizer, matrix) for each in layouts]
    candidates = layout_candidates(layouts)
    if not matrix:
        return replace(candidates, seconds=np.array(seconds))
    strategies = []
    for each, strategy in zip(layouts, candidates.strategies, strict=True):
        moved = step_transfers(info, each, mesh, optimizer, matrix)
        waits = tuple(transfer_seconds(transfer, mesh, hardware) for transfer in moved)
        strategies.append(replace(strategy, transfers=moved, waits=waits))
    waiting = [sum(strategy.waits) for strategy in strategies]
    return replace(candidates, strategies=tuple(strategies), seconds=np.array(seconds) + np.array(waiting))


def _auxiliary(candidates: Candidates) -> Candidates:
    """Return candidates of a call without parameters (a mask, positions, shifted labels): whole, unless large.

    Such calls feed every layer; deciding on them would tie all layers together for next to no time.
    """
    assert candidates.call is not None
    if sum(info.num_elements for info in candidates.call.outputs) > AUXILIARY_ELEMENTS:
        return candidates
    number = next(i for i, s in enumerate(candidates.strategies) if all(choice == "-" for choice in s.choices))
    return replace(
        candidates,
        strategies=(candidates.strategies[number],),
        seconds=candidates.seconds[number : number + 1],
        forward_seconds=candidates.forward_seconds[number : number + 1],
    )


def _roles_by_placement(roles: Roles) -> dict[str, str]:
    named = {repr(placed(dim)): role for dim, role in enumerate(roles) if role for placed in (S, Z)}
    return {"I": "replicated", "R": "replicated", "P": "partial", **named}
