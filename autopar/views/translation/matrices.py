"""Modules whose matrices are split on an axis so that plain local code between them computes what the plan does.

A column-split matrix leaves a part of its outputs on each rank. If everything computed from it stays in parts, up
to matrices that are split by rows, nothing is moved: the calls between are a chain. Outputs are gathered behind the
matrix in two cases: the plan reshards them, or the model's code would take something whole that the plan has in parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from autopar.costs.space.space import Space, TensorEdge
from autopar.ir.program.calls import module_of
from autopar.ir.sharding.layout import Placement
from autopar.planning.settings import PlanContext

aten = torch.ops.aten
MATRICES = {aten.linear.default: "linear", aten.embedding.default: "embedding"}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A module with one matrix: "column" splits its outputs (features), "row" its inputs (an embedding's rows)."""

    module: str
    kind: str
    """"linear" or "embedding"."""
    role: str
    """"column", "row", or "" for one that is whole."""
    whole: bool = False
    """True if the split side is whole outside the module: outputs are gathered, or inputs sliced."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of a model on one axis."""

    matrices: tuple[Matrix, ...]
    expressed: frozenset[str]
    """Names of the calls that run as planned: of matrices, and of the chains between them."""
    own_weights: frozenset[str]
    """Modules in chains with weights that are whole: each rank has a part of their gradients."""
    tied: tuple[str, ...]
    """Modules that stay whole, as they are called several times, or their matrix is another module's, too."""


@dataclass(slots=True)
class _Chain:
    """The calls behind one column-split matrix."""

    calls: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    needs: set[int] = field(default_factory=set)
    """Other sources of what its calls take in parts."""
    weights: set[str] = field(default_factory=set)
    broken: bool = False


def matrices_on(context: PlanContext, axis: str, weights_in_chains: bool) -> Matrices:
    """Return the matrices of a plan on an axis; chains with weights are taken for broken without
    `weights_in_chains`.
    """
    walk = _Walk(context, context.space.mesh.names.index(axis))
    found, tied = walk.modules()
    columns = {number for number, each in found.items() if each.kind == "linear" and each.role == "column"}
    rows = {number for number, each in found.items() if each.kind == "linear" and each.role == "row"}
    chains = {number: walk.chain(number, rows) for number in columns}
    kept = {n for n, chain in chains.items() if not chain.broken and (weights_in_chains or not chain.weights)}
    while True:
        inside = kept.union(*(chains[number].calls for number in kept))
        still = {number for number in kept if chains[number].needs <= inside}
        if still == kept:
            break
        kept = still
    fed = set[int]().union(*(chains[number].rows for number in kept))
    matrices: dict[str, Matrix] = {}
    for number, each in found.items():
        whole = (each.role == "column" and number not in kept) or (each.role == "row" and number not in fed)
        matrices[each.module] = Matrix(each.module, each.kind, each.role, bool(each.role) and whole)
    names = [decision.name for decision in context.space.decisions]
    expressed = frozenset(names[number] for number in (*inside, *(n for n, each in found.items() if each.role)))
    own = frozenset[str]().union(*(chains[number].weights for number in kept))
    return Matrices(tuple(matrices.values()), expressed, own, tied)


class _Walk:
    """A plan's choices, followed along one axis."""

    def __init__(self, context: PlanContext, axis: int) -> None:
        self.space: Space = context.space
        self.choices, self.axis = context.choices, axis
        self.parameters = self.space.program.parameter_names
        self.outbound: dict[int, list[TensorEdge]] = defaultdict(list)
        for edge in self.space.edges:
            self.outbound[edge.source].append(edge)

    def before(self, edge: TensorEdge) -> Placement:
        found = self.space.decisions[edge.source].candidates.strategies[self.choices[edge.source]]
        return found.outputs[edge.source_output][self.axis]

    def after(self, edge: TensorEdge) -> Placement:
        found = self.space.decisions[edge.target].candidates.strategies[self.choices[edge.target]]
        return found.inputs[edge.target_input][self.axis]

    def source(self, number: int, position: int) -> int | None:
        """Return the decision that makes an input, through shared reshards."""
        edge = self.space.inbound.get((number, position))
        while edge is not None and self.space.decisions[edge.source].kind == "shared_reshard":
            edge = self.space.inbound.get((edge.source, 0))
        return None if edge is None else edge.source

    def inputs(self, number: int) -> Iterator[tuple[TensorEdge, int]]:
        """Yield the edges to a call, each with what makes its tensor."""
        for position in range(len(self.space.decisions[number].candidates.strategies[0].inputs)):
            edge, source = self.space.inbound.get((number, position)), self.source(number, position)
            if edge is not None and source is not None:
                yield edge, source

    def weights(self, number: int) -> frozenset[str] | None:
        """Return the parameters that a decision is made of, where it is made of nothing else."""
        decision = self.space.decisions[number]
        if decision.kind == "parameter":
            return frozenset({self.parameters[decision.node.name]})
        made = [self.weights(source) for _, source in self.inputs(number)] if decision.kind == "call" else []
        if not made or any(each is None for each in made):
            return None
        return frozenset().union(*(each for each in made if each is not None))

    def modules(self) -> tuple[dict[int, Matrix], tuple[str, ...]]:
        """Return calls of modules with one matrix, and the modules whose matrix no style may split."""
        found: dict[int, Matrix] = {}
        owners: dict[str, set[str]] = defaultdict(set)
        for number, decision in enumerate(self.space.decisions):
            kind = MATRICES.get(decision.node.target) if decision.kind == "call" else None  # type: ignore[arg-type]
            used = frozenset[str]().union(*(self.weights(source) or () for _, source in self.inputs(number)))
            for name in used if decision.kind == "call" else ():
                owners[name].add(module_of(decision.node))
            module = module_of(decision.node)
            if kind is None or f"{module}.weight" not in {*used, *self._further_names(used)}:
                continue
            role = decision.role(self.choices[number], self.axis)
            found[number] = Matrix(module, kind, role if role in ("column", "row") else "")
        calls = Counter(each.module for each in found.values())
        shared = {module for modules in owners.values() if len(modules) > 1 for module in modules}
        tied = {m.module for m in found.values() if m.role and (m.module in shared or calls[m.module] > 1)}
        kept = {n: Matrix(m.module, m.kind, "") if m.module in tied else m for n, m in found.items()}
        return kept, tuple(sorted(tied))

    def _further_names(self, names: frozenset[str]) -> Iterator[str]:
        return (alias for alias, first in self.space.program.tied.items() if first in names)

    def chain(self, start: int, rows: set[int]) -> _Chain:
        """Return the calls that compute in parts behind a column-split matrix.

        The chain is `broken` if something is resharded, or is an output of the model.
        """
        chain, waiting = _Chain(), [start]
        while waiting and not chain.broken:
            for edge in self.outbound[waiting.pop()]:
                target = self.space.decisions[edge.target]
                if not self.before(edge).is_split or self.before(edge) != self.after(edge) or target.kind == "output":
                    chain.broken = True
                elif edge.target in rows and edge.target_input == 0:
                    chain.rows.add(edge.target)
                elif edge.target not in chain.calls:
                    chain.calls.add(edge.target)
                    waiting.append(edge.target)
                    self._take_in(chain, edge.target)
        return chain

    def _take_in(self, chain: _Chain, number: int) -> None:
        """Record the other inputs of a call in a chain: those in parts, and those made of whole weights."""
        if self.space.decisions[number].kind == "shared_reshard":
            return
        for edge, source in self.inputs(number):
            made = self.weights(source)
            if self.after(edge).is_split:
                chain.needs |= {source}
            elif made:
                chain.weights |= {name.rpartition(".")[0] for name in made}
