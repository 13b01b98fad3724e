"""Dims of a program that are zigzag-sharded: positions whose later ones do more work, and dims tied to them.

A causal attention computes for a late query more keys than for an early one. Its positions run through the program
along the factors of the rules, and a factor that a rule lets be split is independent of the order of its parts. So all
dims that positions run through are zigzag-sharded alike, from the call that makes them up to one that sums them, or
that needs them whole, and in order; results are what they would be in order.

They stay in order if one of them is a class, or anything else whose parts an implementation must tell apart. They also
stay in order on axes over which no causal attention divides its queries, as those that divide its heads: blocks in
order are what a message brings, and need no copy.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.program.calls import source_of
from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.expert_operators import COMBINE, DISPATCH
from autopar.ir.program.program import Program
from autopar.strategies.roles import ATTENTION, RoledCall, RoledProgram, Value
from autopar.strategies.ruled import RuledCall

Dim = tuple[Value, int]
"""A dim of a tensor."""
QUERIES = "s"
_ROUTE = 3
"""The output of a dispatch that has tokens; the others are rows of experts, which have no order of positions."""


@dataclass(frozen=True, slots=True)
class ZigzagDims:
    """Zigzag-sharded dims of a program's tensors."""

    dims: Mapping[Value, frozenset[int]]

    def of(self, value: Value) -> frozenset[int]:
        """Return the dims of a tensor."""
        return self.dims.get(value, frozenset())

    def inputs(self, call: RoledCall, graph: RoledProgram) -> tuple[frozenset[int], ...]:
        """Return the zigzag-sharded dims of a call's inputs; a weight follows the call's other tensors."""
        factors = {name for name, value, dim in _split_tensors(call) if dim in self.of(value)}
        of_weights: dict[Value, set[int]] = defaultdict(set)
        for name, value, dim in _split_tensors(call):
            if name in factors and graph.is_weight(value):
                of_weights[value].add(dim)
        return tuple(self.of(value) | of_weights.get(value, set()) for value in call.inputs)

    def outputs(self, call: RoledCall) -> tuple[frozenset[int], ...]:
        """Return the dims of a call's outputs."""
        return tuple(map(self.of, _outputs(call)))


def zigzag_dims(graph: RoledProgram, sizes: Sequence[int]) -> ZigzagDims:
    """Find, once, which dims are zigzag-sharded over any of the axes of these sizes."""
    if not sizes:
        return ZigzagDims({})
    known = graph.program.facts.setdefault("zigzag", {})
    if tuple(sizes) not in known:
        known[tuple(sizes)] = _followed(graph, sizes)
    return known[tuple(sizes)]


def zigzag_dims_in_stage(stage: Program, whole: Program, sizes: Sequence[int]) -> ZigzagDims:
    """Return the zigzag-sharded dims of a stage: those of the whole program, whose names the stage's nodes have."""
    found = zigzag_dims(RoledProgram.of(whole), sizes)
    nodes = {node.name: source_of(node) for node in whole.graph.nodes if node.name in stage.received}
    arriving = {(name, 0): found.of((source.name, position)) for name, (source, position) in nodes.items()}
    return ZigzagDims({**found.dims, **arriving})


def _followed(graph: RoledProgram, sizes: Sequence[int]) -> ZigzagDims:
    rows = _rows_of_experts(graph)
    together: dict[Dim, Dim] = {}

    def root(dim: Dim) -> Dim:
        path = []
        while (above := together.get(dim, dim)) != dim:
            path.append(dim)
            dim = above
        together.update(dict.fromkeys(path, dim))
        return dim

    wanted: list[Dim] = []
    told_apart: list[Dim] = []
    for call in graph.calls.values():
        if call.weight_only:
            continue
        ordered = frozenset[str]().union(*(each.told_apart for each in call.op.implementations))
        found: dict[str, list[Dim]] = defaultdict(list)
        for name, value, dim in _split_tensors(call):
            if value not in rows and not graph.is_weight(value):
                found[name].append((value, dim))
        for name, linked in found.items():
            for other in linked[1:]:
                together[root(other)] = root(linked[0])
            if name in ordered:
                told_apart += linked[:1]
        if later_see_more(call):
            wanted += found[QUERIES][:1]
    refused = {root(dim) for dim in told_apart}
    pieces = num_pieces(sizes)
    size_of = {root(dim): graph.infos[dim[0]].shape[dim[1]] for dim in wanted}
    kept = {each for each, size in size_of.items() if size % pieces == 0} - refused
    dims: dict[Value, set[int]] = defaultdict(set)
    for dim in {*together, *kept}:
        if root(dim) in kept:
            dims[dim[0]].add(dim[1])
    return ZigzagDims({value: frozenset(found) for value, found in dims.items()})


def num_pieces(sizes: Sequence[int]) -> int:
    """Return the number of parts that a dim needs to be zigzag-sharded by any one of axes of these sizes."""
    return 2 * max(sizes, default=1)


def later_see_more(call: RoledCall) -> bool:
    """Return whether an attention computes more keys for later queries."""
    argument = "rising" if call.call.target is ATTENTION_BY_MASK else "is_causal"
    return call.call.target in ATTENTION and call.call[argument]


def _split_tensors(call: RoledCall) -> Iterator[tuple[str, Value, int]]:
    """Yield every choice of a call by name, with a tensor that it splits, and the dim."""
    for name, is_output, position, dim in _places(call.ruled):
        yield name, (call.name, position) if is_output else call.inputs[position], dim


@functools.lru_cache(maxsize=8192)
def _places(found: RuledCall) -> tuple[tuple[str, bool, int, int], ...]:
    """Return the same of all equal calls: whether it is an output or an input, its position, and the dim."""
    rule, splittable = found.bound.rule, found.bound.splittable
    split: list[tuple[str, bool, int, int]] = []
    for is_output, terms in enumerate((rule.inputs, rule.outputs)):
        for position, term in enumerate(terms):
            dims = ((factor, term.dim_of(factor)) for factor in splittable)
            split += [(factor, bool(is_output), position, dim) for factor, dim in dims if dim is not None]
    for choice in found.op.choices:
        for is_output, placements in enumerate((choice.inputs, choice.outputs)):
            placed = enumerate(placements)
            split += [(choice.name, bool(is_output), position, each.dim) for position, each in placed if each.is_split]
    return tuple(split)


def _outputs(call: RoledCall) -> list[Value]:
    return [(call.name, position) for position in range(len(call.call.outputs))]


def _rows_of_experts(graph: RoledProgram) -> frozenset[Value]:
    """Return the rows of experts, what says where they are, and what is made of them."""
    rows: set[Value] = set()
    for call in graph.calls.values():
        outputs = set(_outputs(call))
        if call.call.target is DISPATCH:
            rows |= outputs - {(call.name, _ROUTE)}
        elif call.call.target is not COMBINE and not rows.isdisjoint(call.inputs):
            rows |= outputs
    return frozenset(rows)
