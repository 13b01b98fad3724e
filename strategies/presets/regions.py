"""Where a model can be split as Megatron-LM splits a block: pairs of matrix products with a free way between them.

A product by a weight is a column if what it puts out stays split, through everything that works on it (activations,
reshapes, attention by heads), until another product sums over the split dim (a row), or a loss over classes joins it.
A way ends where an operation needs the dim whole (a norm), where it does not divide, and where it meets an activation
that is whole (a residual connection). Columns all of whose ways end are none.

(Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.strategies.presets.graph import CLASS_LOSSES, Graph, Step, Value

OUTER, COLUMN, INNER, ROW, LOSS = "outer", "column", "inner", "row", "loss"
"""Regions: a call outside all pairs; a column; between a column and its rows; a row; a loss over split classes."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A tensor split along a dim, as a consequence of the columns `origins`."""

    dim: int
    origins: frozenset[str]
    padded: bool
    """Whether the dim need not divide: it has come from a parameter alone."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The region of every call that makes activations, and why products by weights are no columns."""

    regions: Mapping[str, str]
    factors: Mapping[str, str]
    """Factor of each call outside OUTER that is split."""
    reasons: Mapping[str, str]
    """Product that is neither column nor row → where its way ended."""
    origins: Mapping[str, frozenset[str]]
    """Call on a way → the columns where the way begins."""

    def names(self, region: str) -> list[str]:
        return [name for name, each in self.regions.items() if each == region]

    @property
    def heads(self) -> frozenset[str]:
        """The calls that make a loss over split classes, from their product on."""
        columns = frozenset().union(*(self.origins[name] for name in self.names(LOSS)))
        return frozenset(
            name for name, origins in self.origins.items() if origins & columns and self.regions[name] != ROW
        )


@dataclass(slots=True)
class _Walk:
    """One walk through the graph with a set of columns, and which of them come to nothing."""

    regions: dict[str, str] = field(default_factory=dict)
    factors: dict[str, str] = field(default_factory=dict)
    origins: dict[str, frozenset[str]] = field(default_factory=dict)
    splits: dict[Value, _Split] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    """Column → why a way from it ends."""
    arrived: set[str] = field(default_factory=set)
    """Columns from which a way comes to a row or a loss."""


def blocks_of(graph: Graph, parts: int) -> Blocks:
    """The pairs of a graph for an axis of `parts` devices.

    All products are taken for columns at first; those that come to nothing are taken out until none is left to be.
    """
    columns = {step.name for step in graph.learned if weight_of(graph, step) is not None}
    reasons: dict[str, str] = {}
    while True:
        walk = _walk(graph, parts, columns)
        lost = dict(walk.ended)
        used = {name for name, region in walk.regions.items() if region == COLUMN}
        lost |= {name: "nothing sums over its outputs" for name in used - walk.arrived if name not in lost}
        if not lost:
            return Blocks(walk.regions, walk.factors, reasons, walk.origins)
        reasons |= lost
        columns -= lost.keys()


def weight_of(graph: Graph, step: Step) -> int | None:
    """The position of the weight in a product of an activation (or an input) and a weight; None for other calls."""
    if step.weight_only or step.is_lookup or not {"o", "k"} <= set(step.bound.splittable):
        return None
    weights = [
        position
        for position, term in enumerate(step.in_terms)
        if {"o", "k"} <= set(term.factors) and graph.is_weight(step.inputs[position])
    ]
    return weights[0] if len(weights) == 1 else None


def _walk(graph: Graph, parts: int, columns: set[str]) -> _Walk:
    walk = _Walk()
    for step in graph.learned:
        if step.weight_only:
            continue
        weight = weight_of(graph, step)
        held = {position: walk.splits[value] for position, value in enumerate(step.inputs) if value in walk.splits}
        summed = {p: split for p, split in held.items() if step.in_terms[p].dims[split.dim][0] == "k"}
        if weight is not None and summed:
            _arrive(walk, step, summed, ROW, "k")
        elif weight is not None and not held and step.name in columns and _divides(step, "o", parts, True):
            _enter(walk, step, COLUMN, "o", frozenset({step.name}))
            _go_on(walk, step, "o", step.bound.sizes["o"] % parts != 0)
        elif held:
            _through(walk, graph, step, held, parts)
        else:
            walk.regions[step.name] = OUTER
    return walk


def _through(walk: _Walk, graph: Graph, step: Step, held: Mapping[int, _Split], parts: int) -> None:
    """One call on a way: it keeps the dim split, joins it as a loss does, or ends the way."""
    position, split = next(iter(held.items()))
    factor = step.in_terms[position].dims[split.dim][0]
    uneven = any(each.padded for each in held.values())
    reason = ""
    if factor not in step.bound.splittable:
        reason = f"{step.name} needs it whole"
    elif not _divides(step, factor, parts, uneven):
        reason = f"{step.name} has {step.bound.sizes[factor]} of it, which do not divide into {parts}"
    for other, value in enumerate(step.inputs):
        if not reason and graph.is_activation(value) and factor in step.in_terms[other].factors:
            same = other in held and step.in_terms[other].dim_of(factor) == held[other].dim
            reason = "" if same else f"{step.name} adds to it what is whole"
    joined = step.call.target in CLASS_LOSSES and factor in step.padded
    if not reason and not joined and any(term.dim_of(factor) is None for term in step.out_terms):
        reason = f"{step.name} sums over it"
    if reason:
        walk.regions[step.name] = OUTER
        walk.ended |= dict.fromkeys(_origins(held), reason)
    elif joined:
        _arrive(walk, step, held, LOSS, factor)
    else:
        _enter(walk, step, INNER, factor, _origins(held))
        _go_on(walk, step, factor, uneven)


def _origins(held: Mapping[int, _Split]) -> frozenset[str]:
    return frozenset().union(*(split.origins for split in held.values()))


def _enter(walk: _Walk, step: Step, region: str, factor: str, origins: frozenset[str]) -> None:
    walk.regions[step.name], walk.factors[step.name], walk.origins[step.name] = region, factor, origins


def _arrive(walk: _Walk, step: Step, held: Mapping[int, _Split], region: str, factor: str) -> None:
    _enter(walk, step, region, factor, _origins(held))
    walk.arrived |= _origins(held)


def _go_on(walk: _Walk, step: Step, factor: str, padded: bool) -> None:
    for position, term in enumerate(step.out_terms):
        dim = term.dim_of(factor)
        if dim is not None:
            walk.splits[step.name, position] = _Split(dim, walk.origins[step.name], padded)


def _divides(step: Step, factor: str, parts: int, paddable: bool) -> bool:
    """Whether a factor has equal parts, or may be padded: it is in no group, and nothing but parameters fixed it."""
    size = step.bound.sizes[factor]
    terms = (*step.in_terms, *step.out_terms)
    grouped = any(len(dim) > 1 and factor in dim for term in terms for dim in term.dims)
    return size % parts == 0 or (paddable and not grouped and size >= parts)
