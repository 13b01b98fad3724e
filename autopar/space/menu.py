"""The menu of one call: every strategy it may run by on a mesh, with seconds and the collectives it runs itself.

A strategy takes one choice of the call's rule per mesh axis. A factor is split into whole parts, or, where it comes
from a parameter alone (the vocabulary), padded to equal ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopar.cost.operations import bandwidth, flops, forward_seconds, num_backward
from autopar.cost.reshard import Transfer, transfer_seconds
from autopar.errors import RuleError
from autopar.hardware.profile import Hardware
from autopar.plans.strategy_names import strategy_name
from autopar.program.program import TensorInfo
from autopar.sharding.layout import I, Layout, S
from autopar.sharding.mesh import Mesh
from autopar.sharding.operation import Call, OpRule, Traffic
from autopar.sharding.rule import WHOLE, BoundRule, Choice, Rule, Term
from autopar.strategies import rule_of


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a call: a choice per mesh axis, the layouts it asks of its inputs and gives its outputs."""

    choices: tuple[str, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    implemented: bool = False
    transfers: tuple[Transfer, ...] = ()
    kept: bool = False
    """A parameter that is stored in parts: once gathered it is kept for the backward, not gathered again there."""

    def __str__(self) -> str:
        return strategy_name(self.choices, self.kept)

    def axes_by_factor(self, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        """Split factors → the names of the mesh axes that split them, outer first."""
        found: dict[str, tuple[str, ...]] = {}
        for name, choice in zip(mesh.names, self.choices, strict=True):
            if choice not in ("-", "R") and not choice.startswith("P"):
                found[choice] = (*found.get(choice, ()), name)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """The strategies of a call with their seconds (compute and own collectives, forward and backward)."""

    strategies: tuple[Strategy, ...]
    seconds: np.ndarray
    forward_seconds: np.ndarray
    """Of the forward's compute alone."""
    call: Call | None = None
    op: OpRule | None = None
    bound: BoundRule | None = None
    paddable: frozenset[str] = frozenset()
    """Factors of the call that may be padded."""
    reason: str = ""
    """Why the call runs replicated, where no rule fits it."""


def call_menu(
    node: fx.Node, padded: Sequence[frozenset[int]], mesh: Mesh, hardware: Hardware, weight_only: bool = False
) -> Menu:
    """The menu of a call_function node.

    `padded` says for each tensor input which dims may be padded, `weight_only` that all are made of parameters alone.
    """
    call = Call.of(node)
    key = _Key(call, tuple(padded), weight_only, repr(sorted(call.arguments.items(), key=lambda item: item[0])))
    return _menu(key, mesh, hardware)


@functools.lru_cache(maxsize=4096)
def whole_menu(layouts: tuple[Layout, ...]) -> Menu:
    """A menu without a call, one strategy per layout of its only tensor (inputs, hubs, outputs); free of charge."""
    strategies = tuple(Strategy((str(layout),), (layout,), (layout,)) for layout in layouts)
    return Menu(strategies, np.zeros(len(layouts)), np.zeros(len(layouts)))


@functools.lru_cache(maxsize=4096)
def gathered_or_kept(menu: Menu) -> Menu:
    """The menu of a weight with every strategy that splits it twice: gathered again in the backward, or kept for it."""
    split = [i for i, strategy in enumerate(menu.strategies) if strategy.outputs[0].is_split]
    order = [*range(len(menu.strategies)), *split]
    strategies = (*menu.strategies, *(replace(menu.strategies[i], kept=True) for i in split))
    times, forwards = menu.seconds[order], menu.forward_seconds[order]
    return replace(menu, strategies=strategies, seconds=times, forward_seconds=forwards)


def split_layouts(
    info: TensorInfo, mesh: Mesh, padded: bool = False, dims: frozenset[int] | None = None
) -> tuple[Layout, ...]:
    """Every layout of I and S in which `info` divides, or is padded in a dim that one axis splits."""
    options = (I, *(S(d) for d, size in enumerate(info.shape) if size > 1 and (dims is None or d in dims)))
    found = []
    for each in itertools.product(options, repeat=mesh.ndim):
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


@dataclass(frozen=True, slots=True)
class _Key:
    """What a menu depends on; equal for the same call in every layer. Hashed without the argument mapping."""

    call: Call
    padded: tuple[frozenset[int], ...]
    weight_only: bool
    arguments: str

    def __hash__(self) -> int:
        call = self.call
        return hash((call.target, call.inputs, call.outputs, self.padded, self.weight_only, self.arguments))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Key)
            and self.call.target is other.call.target
            and self.call.inputs == other.call.inputs
            and self.call.outputs == other.call.outputs
            and self.padded == other.padded
            and self.weight_only == other.weight_only
            and self.arguments == other.arguments
        )


@functools.lru_cache(maxsize=8192)
def _menu(key: _Key, mesh: Mesh, hardware: Hardware) -> Menu:
    call = key.call
    op, bound, reason = _bound_rule(call)
    implementation = op.implementation
    joined = implementation.joined if implementation else frozenset()
    paddable = padded_factors(op, bound, key.padded)
    total, speed = flops(call, op, bound), bandwidth(call, op, bound, hardware)
    passes = 1 + num_backward(call)
    found: dict[tuple[object, ...], tuple[Strategy, float, float]] = {}
    for choices in itertools.product(bound.choices(joined, key.weight_only), repeat=mesh.ndim):
        if not _divides(choices, bound, paddable, mesh):
            continue
        strategy = _strategy(choices, call, op, bound, mesh)
        share = 1 / math.prod(mesh.sizes[a] for a, choice in enumerate(choices) if choice.factor)
        layouts = strategy.inputs, strategy.outputs
        forward = forward_seconds(call, total, share, layouts, mesh.sizes, hardware, speed)
        seconds = forward * passes + sum(transfer_seconds(each, mesh, hardware) for each in strategy.transfers)
        same = (strategy.inputs, strategy.outputs, strategy.implemented)
        if same not in found:
            found[same] = (strategy, seconds, forward)
    strategies, times, forwards = zip(*found.values(), strict=True)
    return Menu(tuple(strategies), np.array(times), np.array(forwards), call, op, bound, paddable, reason)


def _bound_rule(call: Call) -> tuple[OpRule, BoundRule, str]:
    """The call's rule fitted to its shapes; one that keeps every dim whole, and the reason, where there is none."""
    op = rule_of(call)
    reason = "no rule"
    if op is not None:
        try:
            shapes = [info.shape for info in call.inputs], [info.shape for info in call.outputs]
            return op, Rule.parse(op.rule).bind(*shapes), ""
        except RuleError as error:
            reason = str(error)

    def whole(info: TensorInfo) -> Term:
        return Term(((WHOLE,),) * len(info.shape))

    rule = Rule(tuple(map(whole, call.inputs)), tuple(map(whole, call.outputs)))
    return OpRule(str(rule)), BoundRule(rule, {}), reason


def padded_factors(op: OpRule, bound: BoundRule, padded: Sequence[frozenset[int]]) -> frozenset[str]:
    """Factors that may be padded: alone on their dims, padded on every input that has them, kept or left out."""
    terms = (*bound.rule.inputs, *bound.rule.outputs)
    grouped = {name for term in terms for dim in term.dims if len(dim) > 1 for name in dim}
    left_out = op.implementation.padded if op.implementation else frozenset()
    found = set()
    for factor in bound.splittable:
        dims = [term.dim_of(factor) for term in bound.rule.inputs]
        held = [dim in padded[i] for i, dim in enumerate(dims) if dim is not None]
        kept = all(term.dim_of(factor) is not None for term in bound.rule.outputs) or factor in left_out
        if factor not in grouped and held and all(held) and kept:
            found.add(factor)
    return frozenset(found)


def _divides(choices: Sequence[Choice], bound: BoundRule, paddable: frozenset[str], mesh: Mesh) -> bool:
    parts: dict[str, list[int]] = {}
    for axis, choice in enumerate(choices):
        if choice.factor:
            parts.setdefault(choice.factor, []).append(mesh.sizes[axis])
    for factor, sizes in parts.items():
        size, whole = bound.sizes[factor], math.prod(sizes)
        if size % whole and not (factor in paddable and len(sizes) == 1 and size >= whole):
            return False
    return True


def _strategy(choices: Sequence[Choice], call: Call, op: OpRule, bound: BoundRule, mesh: Mesh) -> Strategy:
    def layouts(infos: Sequence[TensorInfo], side: str) -> tuple[Layout, ...]:
        found = []
        for index, info in enumerate(infos):
            layout = Layout(getattr(choice, side)[index] for choice in choices)
            found.append(layout if info.requires_grad else layout.without_gradient)
        return tuple(found)

    split = {choice.factor for choice in choices if choice.factor}
    implementation = op.implementation
    implemented = bool(implementation and (implementation.factors is None or split & implementation.factors))
    strategy = Strategy(
        tuple(choice.name for choice in choices),
        layouts(call.inputs, "inputs"),
        layouts(call.outputs, "outputs"),
        implemented,
    )
    if not (implemented and implementation and implementation.traffic):
        return strategy
    axes = strategy.axes_by_factor(mesh)
    transfers = _own_transfers(call, implementation.traffic, axes, bound.sizes, mesh)
    return Strategy(strategy.choices, strategy.inputs, strategy.outputs, True, transfers)


def _own_transfers(
    call: Call, traffic: Traffic, axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], mesh: Mesh
) -> tuple[Transfer, ...]:
    """The collectives that an implementation runs itself, one per mesh axis that splits the factor it names."""
    local = {
        factor: -(-size // math.prod(mesh.size(axis) for axis in axes.get(factor, ())))
        for factor, size in sizes.items()
    }
    return tuple(
        Transfer(collective.name, axis, collective.num_bytes, collective.backward)
        for collective in traffic(call, local)
        for axis in axes.get(collective.factor, ())
        if mesh.size(axis) > 1
    )
