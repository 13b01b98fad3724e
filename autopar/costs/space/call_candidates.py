"""The candidate strategies of one call on a mesh, with seconds and the collectives that each runs itself.

A strategy takes one choice of the call's rule per mesh axis, and one implementation of the split call: the ATen call,
or an implementation of the rule. A factor is split into whole parts, or, where it comes from a parameter alone (the
vocabulary), padded to equal ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autopar.costs.hardware.overlap import NOTHING, OverlappedWork
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.strategy_names import MOVED_TOGETHER
from autopar.costs.pricing.moves import MovedTensor
from autopar.costs.pricing.operations import backward_share, gradient_sum_seconds, hidden_share, larger, smaller
from autopar.costs.pricing.reshard import Transfer, transfer_seconds
from autopar.costs.space.computing import Work, computing_seconds
from autopar.costs.space.strategy import Strategy
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.layout import I, Layout, P, Placement, R, S, zigzag_in
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import ATEN, Call, Implementation, OpRule
from autopar.ir.sharding.padding import padded_factors
from autopar.ir.sharding.rule import NONE, PASS_PARTIAL, PASS_REPLICATED, BoundRule, Choice, factors_of
from autopar.strategies.ruled import RuledCall

Turn = Literal["alone", "first", "later"]
"""Turn of a call among those that may move an input together."""
ZigzagDimsOfCall = tuple[tuple[frozenset[int], ...], tuple[frozenset[int], ...]]
"""Zigzag-sharded dims of each input, and of each output."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The strategies of a call with their seconds (compute and own collectives, forward and backward)."""

    strategies: tuple[Strategy, ...]
    seconds: np.ndarray
    forward_seconds: np.ndarray
    """Seconds of the forward's computation alone, by strategy."""
    call: Call | None = None
    op: OpRule | None = None
    bound: BoundRule | None = None
    reason: str = ""
    """Why the call runs replicated, where no rule fits it."""
    summed: tuple[int, ...] = ()
    """Positions of inputs whose gradient is added to that of later uses."""


@functools.lru_cache(maxsize=4096)
def layout_candidates(layouts: tuple[Layout, ...]) -> Candidates:
    """Return candidates without a call, one per layout of the only tensor (inputs, reshards, outputs); at no cost."""
    strategies = tuple(Strategy((str(layout),), (layout,), (layout,)) for layout in layouts)
    return Candidates(strategies, np.zeros(len(layouts)), np.zeros(len(layouts)))


@functools.lru_cache(maxsize=4096)
def shared_reshard_candidates(
    tensor: MovedTensor, source: tuple[Candidates, int], consumers: tuple[tuple[Candidates, int], ...], mesh: Mesh
) -> Candidates:
    """Return the candidates of a shared reshard, between an output of `source` and inputs of `consumers`.

    These are the layouts there that the tensor can have. A weight goes on only in layouts that a consumer takes, and
    never as a partial sum, which would save nothing: shared reshards of packed weights and biases stay small. From some
    layouts all consumers move the tensor together.
    """
    wanted = [s.inputs[position] for candidates, position in consumers for s in candidates.strategies]
    if tensor.bucketed:
        wanted = [layout for layout in wanted if P not in layout]
    else:
        wanted = [*(s.outputs[source[1]] for s in source[0].strategies), *wanted]
    layouts = tuple(layout for layout in dict.fromkeys(wanted) if tensor.allows(layout, mesh.sizes))
    each = [
        dict.fromkeys(s.inputs[position] for s in candidates.strategies if s.shared and position == 0)
        for candidates, position in consumers
    ]
    return _with_shared(layouts, tuple(layout for layout in each[0] if all(layout in other for other in each)))


@functools.lru_cache(maxsize=4096)
def _with_shared(layouts: tuple[Layout, ...], shared: tuple[Layout, ...]) -> Candidates:
    plain = layout_candidates(layouts)
    if not shared:
        return plain
    moved = tuple(Strategy((f"{layout}{MOVED_TOGETHER}",), (layout,), (layout,), shared=True) for layout in shared)
    seconds = np.zeros(len(layouts) + len(shared))
    return Candidates((*plain.strategies, *moved), seconds, seconds)


@functools.lru_cache(maxsize=4096)
def gathered_or_saved(candidates: Candidates) -> Candidates:
    """Return a weight's candidates, each that splits it twice: gathered again in the backward, or saved for it."""
    split = [i for i, strategy in enumerate(candidates.strategies) if strategy.outputs[0].is_split]
    order = [*range(len(candidates.strategies)), *split]
    strategies = (*candidates.strategies, *(replace(candidates.strategies[i], saved=True) for i in split))
    times, forwards = candidates.seconds[order], candidates.forward_seconds[order]
    return replace(candidates, strategies=strategies, seconds=times, forward_seconds=forwards)


def split_layouts(
    info: TensorInfo, mesh: Mesh, padded: bool = False, dims: frozenset[int] | None = None
) -> tuple[Layout, ...]:
    """Return every layout of I and S in which `info` divides, or is padded in a dim that one axis splits."""
    options = (I, *(S(d) for d, size in enumerate(info.shape) if size > 1 and (dims is None or d in dims)))
    found = []
    for each in itertools.product(*(options if size > 1 else (I,) for size in mesh.sizes)):
        layout = Layout(each)
        if layout.divides(info.shape, mesh.sizes) or (padded and _pads_once(layout, info.shape, mesh)):
            found.append(layout)
    return tuple(found)


def _pads_once(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    for dim, size in enumerate(shape):
        axes = layout.axes_of(dim)
        parts = layout.num_parts(dim, mesh.sizes)
        if size % parts and (len(axes) > 1 or size < parts):
            return False
    return True


@functools.lru_cache(maxsize=8192)
def candidates_of(
    found: RuledCall,
    padded: tuple[frozenset[int], ...],
    mesh: Mesh,
    hardware: Hardware,
    weight_only: bool = False,
    infinite: frozenset[int] = frozenset(),
    zigzag_dims: ZigzagDimsOfCall | None = None,
    requested: frozenset[str] = frozenset(),
    turn: Turn = "alone",
    summed: tuple[int, ...] = (),
    zigzag_axes: tuple[str, ...] = (),
    meanwhile: OverlappedWork = NOTHING,
) -> Candidates:
    """Return the candidates of a call: those of the ATen call and of the implementations of its rule.

    Implementations on demand are included if `requested` names them, but never for a call on weights alone.
    `infinite` are the positions of inputs whose values may be infinite: partial values, which may be zeros, are not
    multiplied with them. `zigzag_dims` are the dims of inputs, and of outputs, that axes of `zigzag_axes` zigzag-shard.
    `turn` says whether other calls move the first input together with this one, and which of them is the first.
    `summed` are the positions of inputs whose gradient is added to that of later uses. `meanwhile` is the computation
    of other calls, on one device, that runs while what this one moves travels.
    """
    call, op, bound = found.call, found.op.offering(() if weight_only else requested), found.bound
    op = op.following() if turn == "later" else op
    stated = (*op.choices, *(choice for each in op.implementations for choice in each.choices))
    barred = _divides_zigzag_dims(op, bound, zigzag_dims) if zigzag_dims is not None else frozenset[str]()
    is_zigzag_axis = [zigzag_dims is not None and name in zigzag_axes for name in mesh.names]
    offered = {
        id(each): _Offer.of(
            [
                choice
                for choice in bound.choices(each.joined, weight_only, stated)
                if choice.name not in op.only_together and not _multiplies_zeros(choice, infinite)
            ],
            zigzag_dims,
            frozenset() if each.choices else padded_factors(call, op, bound, padded, each.padded),
        )
        for each in (ATEN, *op.implementations)
    }
    plain = offered[id(ATEN)].choices
    work, passes = Work.of(call, op, bound, hardware), 1 + backward_share(call, op)
    own = OwnCollectives(call, bound, mesh, hardware, meanwhile)
    seen: dict[tuple[object, ...], tuple[Strategy, float, float]] = {}
    # An axis of one device splits nothing.
    whole = next(number for number, choice in enumerate(plain) if choice.name == NONE)
    offers = [range(len(plain)) if size > 1 else (whole,) for size in mesh.sizes]
    for numbers in itertools.product(*offers):
        names = [plain[number].name for number in numbers]
        if any(zigzag_axes and name in barred for zigzag_axes, name in zip(is_zigzag_axis, names, strict=True)):
            continue
        for implementation in op.ways(names):
            if implementation.choices and not _inside(names, implementation):
                continue
            offer = offered[id(implementation)]
            choices = offer.on(numbers, is_zigzag_axis)
            if not _divides(choices, bound, offer.paddable, mesh) or not _nested(choices, bound, mesh):
                continue
            strategy = _strategy(choices, call, bound, implementation, mesh)
            forward = computing_seconds(strategy, work, mesh, hardware)
            strategy = own.priced(strategy, forward * passes)
            if (variant := implementation.regathering) is not None:
                again = own.priced(_strategy(choices, call, bound, variant, mesh), forward * passes)
                strategy = replace(strategy, regathering=again)
            if turn != "alone":
                strategy = replace(strategy, shared=not implementation.shared.isdisjoint(names))
            same = (strategy.inputs, strategy.outputs, id(implementation))
            if same not in seen:
                seconds = forward * passes + sum(strategy.waits)
                for position in summed:
                    layout = strategy.inputs[position]
                    seconds += gradient_sum_seconds(call.inputs[position], layout, mesh.sizes, hardware)
                seen[same] = (strategy, seconds, forward)
    strategies, times, forwards = zip(*seen.values(), strict=True)
    return Candidates(tuple(strategies), np.array(times), np.array(forwards), call, op, bound, found.reason, summed)


@dataclass(frozen=True, slots=True)
class _Offer:
    """Choices of one mesh axis for a call that runs in one way, and the factors that may then be padded."""

    choices: tuple[Choice, ...]
    zigzag_dims: tuple[Choice, ...]
    """The same on an axis that zigzag-shards."""
    paddable: frozenset[str]

    @classmethod
    def of(cls, choices: Sequence[Choice], dims: ZigzagDimsOfCall | None, paddable: frozenset[str]) -> _Offer:
        in_order = tuple(choices)
        return cls(
            in_order, in_order if dims is None else tuple(_zigzag_dims(each, dims) for each in choices), paddable
        )

    def on(self, numbers: Sequence[int], is_zigzag_axis: Sequence[bool]) -> list[Choice]:
        """Return the choice of each axis, some of which zigzag-shard."""
        return [
            (self.zigzag_dims if zigzag_axes else self.choices)[number]
            for number, zigzag_axes in zip(numbers, is_zigzag_axis, strict=True)
        ]


def _divides_zigzag_dims(op: OpRule, bound: BoundRule, zigzag_dims: ZigzagDimsOfCall) -> frozenset[str]:
    """Return choices of implementations alone that zigzag-shard a factor other than their first: an axis cannot."""
    terms, found = (*bound.rule.inputs, *bound.rule.outputs), set[str]()
    for choice in (choice for each in op.implementations for choice in each.choices):
        made = _zigzag_dims(choice, zigzag_dims)
        placed = zip(terms, (*made.inputs, *made.outputs), strict=True)
        if any(each.zigzag and each.dim != term.dim_of(choice.factors[0]) for term, each in placed):
            found.add(choice.name)
    return frozenset(found)


def _inside(names: Sequence[str], implementation: Implementation) -> bool:
    """Return whether exactly one axis takes a choice of the implementation's own, and no inner one splits its factor.

    The factor is the first one of that choice.
    """
    own = {choice.name for choice in implementation.choices}
    at = [axis for axis, name in enumerate(names) if name in own]
    first = factors_of(names[at[0]])[0]
    return len(at) == 1 and not any(first in factors_of(name) for name in names[at[0] + 1 :])


def _multiplies_zeros(choice: Choice, infinite: frozenset[int]) -> bool:
    """Return whether partial values, or gradients, would meet an input of infinite values that all ranks have."""
    passes = P in choice.inputs and choice.name.startswith(PASS_PARTIAL)
    passes_gradients = choice.name == PASS_REPLICATED and len(choice.inputs) > 1
    return (passes or passes_gradients) and any(choice.inputs[position] is R for position in infinite)


@dataclass(frozen=True, slots=True)
class OwnCollectives:
    """The collectives that a call runs itself, and the computation of others meanwhile. All may have symbols."""

    call: Call
    bound: BoundRule
    mesh: Mesh
    hardware: Hardware
    meanwhile: OverlappedWork

    def exposed(self, strategy: Strategy, seconds: Sequence[float], computing: float) -> tuple[float, ...]:
        """Return which of their seconds neither other calls hide nor the call's computing, of which a share may."""
        if strategy.implementation.in_halves and self.meanwhile != NOTHING:
            found = list(seconds)
            for position in strategy.travelling:
                backward = strategy.transfers[position].backward
                side = self.meanwhile.backward if backward else self.meanwhile.forward
                others = side.seconds / self.mesh.num_devices + side.latency  # each device computes a part of them
                left = found[position] - others
                found[position] = larger(self.hardware.communication_share * found[position], left)
            return tuple(found)
        local_sizes = strategy.local_sizes(self.bound.sizes, self.mesh)
        share, total = hidden_share(strategy.implementation, self.hardware, self.call, local_sizes), sum(seconds)
        hidden = smaller(share * total, computing) if share else 0.0
        return tuple(each * (1 - hidden / total) if hidden else each for each in seconds)

    def priced(self, strategy: Strategy, computing: float) -> Strategy:
        """Return the strategy with the exposed seconds of its transfers."""
        if not strategy.transfers:
            return strategy
        seconds = [transfer_seconds(each, self.mesh, self.hardware) for each in strategy.transfers]
        return replace(strategy, waits=self.exposed(strategy, seconds, computing))


def _zigzag_dims(choice: Choice, dims: ZigzagDimsOfCall) -> Choice:
    """Return the choice with Z(d) in place of S(d) of zigzag-sharded dims."""

    def placed(placements: Sequence[Placement], of: Sequence[frozenset[int]]) -> tuple[Placement, ...]:
        return tuple(map(zigzag_in, placements, of))

    return replace(choice, inputs=placed(choice.inputs, dims[0]), outputs=placed(choice.outputs, dims[1]))


def _zigzag(choices: Sequence[Choice]) -> frozenset[str]:
    zigzag_dims = [each for each in choices if any(placement.zigzag for placement in (*each.inputs, *each.outputs))]
    return frozenset(factor for choice in zigzag_dims for factor in choice.factors)


def _divides(choices: Sequence[Choice], bound: BoundRule, paddable: frozenset[str], mesh: Mesh) -> bool:
    parts: dict[str, list[int]] = {}
    for axis, choice in enumerate(choices):
        for factor in choice.factors:
            parts.setdefault(factor, []).append(mesh.sizes[axis])
    zigzag_dims = _zigzag(choices)
    for factor, sizes in parts.items():
        size, whole = bound.sizes[factor], math.prod(sizes)
        if factor in zigzag_dims:
            if size % (2 * whole):
                return False
        elif size % whole and not (factor in paddable and len(sizes) == 1 and size >= whole):
            return False
    return True


def _nested(choices: Sequence[Choice], bound: BoundRule, mesh: Mesh) -> bool:
    """Return whether the axes split products of factors so that their parts nest.

    An axis may split a product only if its outermost factor would not divide evenly there. It has to be inside of all
    axes that split that factor, and all parts have to be even. The parts that an axis makes of all query heads are no
    parts of the groups that an axis inside of it would make.
    """
    for name, (outermost, *_) in bound.rule.products:
        parts, within = 1, False
        for size, choice in zip(mesh.sizes, choices, strict=True):
            if outermost in choice.factors and within:
                return False
            if name in choice.factors and not within:
                if bound.sizes[outermost] % (parts * size) == 0:
                    return False
                within = True
            if name in choice.factors or outermost in choice.factors:
                parts *= size
        if within and bound.sizes[name] % parts:
            return False
    return True


def _strategy(
    choices: Sequence[Choice], call: Call, bound: BoundRule, implementation: Implementation, mesh: Mesh
) -> Strategy:
    def layouts(infos: Sequence[TensorInfo], side: str) -> tuple[Layout, ...]:
        found = []
        for index, info in enumerate(infos):
            layout = Layout(getattr(choice, side)[index] for choice in choices)
            found.append(layout if info.requires_grad else layout.without_gradient)
        return tuple(found)

    strategy = Strategy(
        tuple(choice.name for choice in choices),
        layouts(call.inputs, "inputs"),
        layouts(call.outputs, "outputs"),
        implementation,
        zigzag=_zigzag(choices),
    )
    transfers = own_transfers(strategy, call, bound.sizes, mesh)
    return replace(strategy, transfers=transfers) if transfers else strategy


def own_transfers(strategy: Strategy, call: Call, sizes: Mapping[str, int], mesh: Mesh) -> tuple[Transfer, ...]:
    """Return the collectives that an implementation runs itself, one per mesh axis that splits the factor it names.

    Those of the backward count where there is one. `sizes` are those of the call's factors.
    """
    if not strategy.implemented:
        return ()
    learns = any(info.requires_grad for info in call.inputs)
    return tuple(
        Transfer(
            collective.name,
            axis,
            collective.num_bytes,
            collective.backward,
            ahead=collective.ahead,
            unpadded=collective.unpadded,
        )
        for collective in strategy.implementation.traffic(call, strategy.local_sizes(sizes, mesh))
        if learns or not collective.backward
        for axis in strategy.links(collective.factor, mesh)
    )
