"""Regions of a model that can be split as Megatron-LM splits a block: pairs of products with a free way between.

A product by a weight is a column if its output stays split, through everything that works on it (activations,
reshapes, attention by heads), until another product sums over the split dim (a row), a loss over classes joins it, or
it is written into a cache, which stays split.
A way ends at an operation that needs the dim whole (a norm), at one that does not divide, and at an activation
that is whole (a residual connection). Columns all of whose ways end are none. An MLP in tiles is both products at once:
a row that begins no way and ends none.

The two products of a low-rank adapter (LoRA: x·A·B added to x·W) are no pair: they follow the product by W.
Next to a column W the product by A is whole and that by B a column; next to a row W, A is a row and B whole.

(Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopar.ir.program.operators.attention.cached import WRITE_CACHE
from autopar.ir.program.operators.expert_operators import OF_EXPERT
from autopar.ir.program.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from autopar.strategies.padding import Padding
from autopar.strategies.roles import CLASS_LOSSES, RoledCall, RoledProgram, Value
from autopar.strategies.rules.layers.tiled_loss import CLASSES
from autopar.strategies.rules.layers.tiled_mlp import HIDDEN

OUTER, COLUMN, INNER, ROW, LOSS = "outer", "column", "inner", "row", "loss"
"""Regions: a call outside all pairs; a column; between a column and its rows; a row; a loss over split classes."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A tensor split along a dim, as a consequence of the columns `origins`."""

    dim: int
    origins: frozenset[str]


@dataclass(frozen=True, slots=True)
class Product:
    """A product by a weight."""

    weight: int
    """The position of the weight among the inputs."""
    column: str
    """The factor of the weight that is put out."""
    row: str
    """The one that is summed."""


@dataclass(frozen=True, slots=True)
class Regions:
    """The region of every call that makes activations, and why products by weights are no columns."""

    by_call: Mapping[str, str]
    factors: Mapping[str, str]
    """Factor of each call outside OUTER that is split."""
    reasons: Mapping[str, str]
    """Product that is neither column nor row → where its way ended."""
    origins: Mapping[str, frozenset[str]]
    """Call on a way → the columns where the way begins."""

    def names(self, region: str) -> list[str]:
        """Return the calls of a region."""
        return [name for name, each in self.by_call.items() if each == region]

    @property
    def heads(self) -> frozenset[str]:
        """The calls that make a loss over split classes, from their product on."""
        columns = frozenset().union(*(self.origins[name] for name in self.names(LOSS)))
        return frozenset(
            name for name, origins in self.origins.items() if origins & columns and self.by_call[name] != ROW
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


def regions_of(graph: RoledProgram, parts: int) -> Regions:
    """The pairs of a graph for an axis of `parts` devices.

    All products are taken for columns at first; those that come to nothing are taken out until none is left to be.
    """
    columns = {call.name for call in graph.learned if product_of(graph, call) is not None} - _first_of_adapters(graph)
    reasons: dict[str, str] = {}
    while True:
        walk = _walk(graph, parts, columns)
        lost = dict(walk.ended)
        used = {name for name, region in walk.regions.items() if region == COLUMN}
        lost |= {name: "nothing sums over its outputs" for name in used - walk.arrived if name not in lost}
        if not lost:
            return Regions(walk.regions, walk.factors, reasons, walk.origins)
        reasons |= lost
        columns -= lost.keys()


def product_of(graph: RoledProgram, call: RoledCall) -> Product | None:
    """The product of an activation (or an input) and a weight that a call is; None for other calls."""
    if call.weight_only or call.is_lookup:
        return None
    found = []
    for position, term in enumerate(call.in_terms):
        if graph.is_weight(call.inputs[position]):
            roles = {call.roles.get(factor): factor for factor in term.factors if factor in call.bound.splittable}
            if "column" in roles and "row" in roles:
                found.append(Product(position, roles["column"], roles["row"]))
    return found[0] if len(found) == 1 else None


def _first_of_adapters(graph: RoledProgram) -> set[str]:
    """Return the products by A of all low-rank adapters: x·A·B, added to x·W of which A is narrower than both sides."""
    products = {call.name: product for call in graph.learned if (product := product_of(graph, call)) is not None}

    def made_by(value: Value) -> str | None:
        name = _way_back(graph, products, value)[-1][0]
        return name if name in products else None

    def taken_by(name: str) -> Value:
        call, product = graph.calls[name], products[name]
        others = zip(call.inputs, call.in_terms, strict=True)
        return next(value for value, term in others if product.row in term.factors and not graph.is_weight(value))

    def follows(first: str, adapted: str) -> bool:
        width, sizes = graph.calls[first].bound.sizes[products[first].column], graph.calls[adapted].bound.sizes
        narrow = width < min(sizes[products[adapted].row], sizes[products[adapted].column])
        return narrow and taken_by(adapted) in _way_back(graph, products, taken_by(first))

    found: set[str] = set()
    for call in graph.learned:
        if call.call.target is not torch.ops.aten.add.Tensor:
            continue
        terms = [name for value in call.inputs if (name := made_by(value)) is not None]
        for adapted, second in itertools.permutations(terms, 2):
            first = made_by(taken_by(second))
            if first is not None and follows(first, adapted):
                found.add(first)
    return found


def _way_back(graph: RoledProgram, products: Mapping[str, Product], value: Value) -> list[Value]:
    """Return a value and those that it is made from in turn, back to a product or to what has several inputs.

    The first term of a sum counts: adapters are added one after the other.
    """
    found = [value]
    while value[0] in graph.calls and value[0] not in products:
        call = graph.calls[value[0]]
        inputs = [each for each in call.inputs if not graph.is_weight(each)]
        if not inputs or (len(inputs) > 1 and call.call.target is not torch.ops.aten.add.Tensor):
            break
        value = inputs[0]
        found.append(value)
    return found


def _walk(graph: RoledProgram, parts: int, columns: set[str]) -> _Walk:
    walk = _Walk()
    for call in graph.learned:
        if call.weight_only:
            continue
        product = product_of(graph, call)
        held = {position: walk.splits[value] for position, value in enumerate(call.inputs) if value in walk.splits}
        summed = {p: s for p, s in held.items() if product and call.in_terms[p].dims[s.dim][0] == product.row}
        if product and summed:
            _arrive(walk, call, summed, ROW, product.row)
        elif product and not held and call.name in columns and _divides_evenly(graph, call, product.column, parts):
            _enter(walk, call, COLUMN, product.column, frozenset({call.name}))
            _go_on(walk, call, product.column)
        elif held:
            _follow_call(walk, graph, call, held, parts)
        elif call.call.target is LINEAR_CROSS_ENTROPY and _divides_evenly(graph, call, CLASSES, parts):
            _enter(walk, call, LOSS, CLASSES, frozenset({call.name}))
        elif call.call.target is MLP_IN_TILES and _divides_evenly(graph, call, HIDDEN, parts):
            _enter(walk, call, ROW, HIDDEN, frozenset({call.name}))
        else:
            walk.regions[call.name] = OUTER
    return walk


def _follow_call(walk: _Walk, graph: RoledProgram, call: RoledCall, held: Mapping[int, _Split], parts: int) -> None:
    """One call on a way: it keeps the dim split, joins it as a loss does, or ends the way."""
    position, split = next(iter(held.items()))
    factor = call.in_terms[position].dims[split.dim][0]
    found, reason = factor, ""
    if factor not in call.bound.splittable:
        reason = f"{call.name} needs it whole"
    elif not _divides_evenly(graph, call, factor, parts):
        # If key heads do not divide but query heads do, replicate the keys.
        found = call.fitting(factor, parts)
    if found is None:
        reason = f"{call.name} has {call.bound.sizes[factor]} of it, which do not divide into {parts}"
    biases: dict[str, str] = {}
    for other, value in enumerate(call.inputs):
        if not reason and found == factor and graph.is_activation(value) and factor in call.in_terms[other].factors:
            dim = call.in_terms[other].dim_of(factor)
            same = other in held and dim == held[other].dim
            taken = None if other in held or dim is None else _taken_by_rows(graph, value, dim)
            if taken is not None:
                biases[value[0]] = taken
            elif not same:
                reason = f"{call.name} adds to it what is whole"
    joined = call.call.target in CLASS_LOSSES and factor in call.op.padded
    if not reason and not joined and any(term.dim_of(factor) is None for term in call.out_terms):
        reason = f"{call.name} sums over it"
    if reason:
        walk.regions[call.name] = OUTER
        walk.ended |= dict.fromkeys(_origins(held), reason)
    elif joined:
        _arrive(walk, call, held, LOSS, factor)
    else:
        for name, taken in biases.items():
            _enter(walk, graph.calls[name], INNER, taken, _origins(held))
        _enter(walk, call, INNER, found or factor, _origins(held))
        _go_on(walk, call, factor)
        if call.call.target is WRITE_CACHE:
            walk.arrived |= _origins(held)


def _taken_by_rows(graph: RoledProgram, value: Value, dim: int) -> str | None:
    """The factor of a dim of what only one call takes: an expert's bias for each of its rows, which can be split so."""
    call = graph.calls[value[0]]
    if call.call.target is not OF_EXPERT or len(graph.users[value]) > 1 or not graph.is_weight(call.inputs[0]):
        return None
    return call.out_terms[0].dims[dim][0]


def _origins(held: Mapping[int, _Split]) -> frozenset[str]:
    return frozenset().union(*(split.origins for split in held.values()))


def _enter(walk: _Walk, call: RoledCall, region: str, factor: str, origins: frozenset[str]) -> None:
    walk.regions[call.name], walk.factors[call.name], walk.origins[call.name] = region, factor, origins


def _arrive(walk: _Walk, call: RoledCall, held: Mapping[int, _Split], region: str, factor: str) -> None:
    _enter(walk, call, region, factor, _origins(held))
    walk.arrived |= _origins(held)


def _go_on(walk: _Walk, call: RoledCall, factor: str) -> None:
    for position, term in enumerate(call.out_terms):
        dim = term.dim_of(factor)
        if dim is not None:
            walk.splits[call.name, position] = _Split(dim, walk.origins[call.name])


def _divides_evenly(graph: RoledProgram, call: RoledCall, factor: str, parts: int) -> bool:
    """Return whether a factor has equal parts, or may be padded."""
    size = call.bound.sizes[factor]
    return size % parts == 0 or (factor in Padding.of(graph).factors[call.name] and size >= parts)
