"""The space of plans of a program: every decision with its candidates, and the edges that reshard tensors.

Decisions are the calls, the parameters (their storage layout), the inputs, the outputs, and a shared reshard (kind
"hub") for every tensor with several consumers. `build` makes the space of a program.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.costs.hardware.overlap import NOTHING, OverlappedWork
from autopar.costs.hardware.profile import Hardware
from autopar.costs.pricing.conventions import OF_AUTOPAR, MemoryConventions
from autopar.costs.pricing.moves import MovedTensor
from autopar.costs.pricing.optimizer import ADAMW, Optimizer
from autopar.costs.pricing.optimizer_step import step_seconds
from autopar.costs.pricing.reshard import ReshardPath, ReshardTable, reshard_table
from autopar.costs.space.call_candidates import Candidates
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout, Splits, splits_of
from autopar.ir.sharding.mesh import Mesh
from autopar.ir.sharding.operation import Call
from autopar.ir.sharding.rule import PASS_PARTIAL, factors_of
from autopar.strategies.roles import Roles


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A decision: which of its candidate strategies a node of the graph takes."""

    name: str
    kind: str
    """"call", "parameter", "buffer", "input", "output" or "hub"."""
    candidates: Candidates
    node: fx.Node
    roles: Mapping[str, str]
    """Role of each factor (calls) or of each dim, as "S(0)" (everything else)."""

    @property
    def call(self) -> Call:
        """The call that a decision of kind "call" is about."""
        assert self.candidates.call is not None, f"{self.name} is no call"
        return self.candidates.call

    def role(self, strategy: int, axis: int) -> str:
        """Return what the strategy does on a mesh axis, in the words of annotations and tables."""
        if self.kind != "call":
            placement = repr(self.candidates.strategies[strategy].outputs[0][axis])
            return self.roles.get(placement, placement)
        choice = self.candidates.strategies[strategy].choices[axis]
        *_, factor = factors_of(choice) or ("",)
        if not factor:
            return "partial" if choice.startswith(PASS_PARTIAL) else "replicated"
        return self.roles.get(factor, choice)


@dataclass(frozen=True, slots=True)
class TensorEdge:
    """A tensor on its way from output `source_output` of one decision to input `target_input` of another."""

    source: int
    source_output: int
    target: int
    target_input: int
    tensor: MovedTensor

    @property
    def end(self) -> tuple[int, int]:
        """The decision at which it arrives and the position among its inputs, where no other tensor arrives."""
        return self.target, self.target_input


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Inputs and outputs of a call, or of a shared reshard, that are rows of experts."""

    inputs: frozenset[int]
    outputs: frozenset[int]
    counts: int
    """The decision on where it lies how many rows each expert has: split, where ranks have rows of own experts."""
    position: int
    """Position of the counts among the outputs of that decision."""


@dataclass(slots=True)
class Space:
    """All decisions and edges of a program on a mesh."""

    program: Program
    mesh: Mesh
    hardware: Hardware
    optimizer: Optimizer = ADAMW
    imbalance: float = 1.0
    """Rows of the busiest rank over the mean, where they are divided by expert."""
    overlapped: OverlappedWork = NOTHING
    """Computation of the model that overlaps with the moves of its parameters; the program may be one of its stages."""
    num_devices: int | None = None
    """Number of devices of all stages, if the program is one of a pipeline; None for those of the mesh."""
    conventions: MemoryConventions = OF_AUTOPAR
    """Conventions on the memory that a framework holds besides tensors of the program."""
    decisions: list[Decision] = field(default_factory=list)
    edges: list[TensorEdge] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    inbound: dict[tuple[int, int], TensorEdge] = field(default_factory=dict)
    """(decision, input position) → the edge that ends there."""
    weight_casts: dict[str, str] = field(default_factory=dict)
    """Call that casts a parameter for use (mixed precision) → the parameter; what it gives is moved like a weight."""
    dim_roles: dict[tuple[str, int], Roles] = field(default_factory=dict)
    """(node name, output position) → roles of its dims."""
    rows: dict[int, ExpertRows] = field(default_factory=dict)
    """Calls and shared reshards that rows of experts pass."""
    zigzag_axes: tuple[str, ...] = ()
    """Mesh axes that zigzag-shard positions if they split them; the others have them in order."""
    rebuild: Callable[[Collection[str]], Space] | None = field(default=None, repr=False)
    """Lays the space out anew with other zigzag-sharding axes."""
    kept: tuple[Space, Mapping[int, np.ndarray]] | None = field(default=None, repr=False)
    """The space that this one keeps some strategies of, with masks of these; None if it has all (`keeping`)."""
    limited: frozenset[int] = frozenset()
    """Decisions that keep some strategies though no pin excludes the others."""
    meanwhile: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    """Dispatches and combines of experts' rows → the calls that run while these travel (`calls_meanwhile`)."""
    _kinds: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict, init=False, repr=False)
    of_layouts: dict[tuple[str, int], np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """Cache of arrays that follow from the layouts at the ends of an edge, by name and kind of edge."""
    _paths: dict[tuple[int, int, int], ReshardPath] = field(default_factory=dict, init=False, repr=False)

    def add(self, decision: Decision) -> int:
        assert decision.name not in self.index, f"two decisions named {decision.name}"
        self.index[decision.name] = len(self.decisions)
        self.decisions.append(decision)
        return len(self.decisions) - 1

    def connect(self, edge: TensorEdge) -> None:
        self.edges.append(edge)
        self.inbound[edge.end] = edge

    def is_weight(self, number: int) -> bool:
        """Return whether a decision gives a parameter, as it is stored or cast for use."""
        decision = self.decisions[number]
        return decision.kind == "parameter" or decision.name in self.weight_casts

    @property
    def devices_on_host(self) -> int:
        """Number of devices that share a host."""
        return self.hardware.devices_on_host(self.num_devices or self.mesh.num_devices)

    def with_optimizer(self, optimizer: Optimizer) -> Space:
        """Return the space with the steps of another optimizer, which takes the same parameters as matrices."""
        by_identity: dict[int, Candidates] = {}
        decisions = list(self.decisions)
        for number, decision in enumerate(decisions):
            candidates = decision.candidates
            if decision.kind != "parameter":
                continue
            if id(candidates) not in by_identity:
                info, matrix = decision.node.meta["tensor"], self.is_matrix(number)
                steps = [
                    step_seconds(info, each.outputs[0], self.mesh, self.hardware, optimizer, matrix) + sum(each.waits)
                    for each in candidates.strategies
                ]
                by_identity[id(candidates)] = replace(candidates, seconds=np.array(steps))
            decisions[number] = replace(decision, candidates=by_identity[id(candidates)])
        return replace(self, optimizer=optimizer, decisions=decisions)

    @property
    def entries(self) -> list[int]:
        """Pairs of strategies at the ends of each edge."""
        counts = [len(each.candidates.strategies) for each in self.decisions]
        return [counts[edge.source] * counts[edge.target] for edge in self.edges]

    def keeping(self, masks: Mapping[int, np.ndarray], limited: Collection[int] = ()) -> Space:
        """Return the same space with the strategies that masks over those of decisions leave, and no others.

        `widened` takes it back. The masks of `limited` decisions are no pins.
        """
        made: dict[tuple[int, bytes], Candidates] = {}  # equal candidates under equal masks share theirs
        decisions = list(self.decisions)
        for number, mask in masks.items():
            candidates = decisions[number].candidates
            key = id(candidates), mask.tobytes()
            if key not in made:
                made[key] = replace(
                    candidates,
                    strategies=tuple(itertools.compress(candidates.strategies, mask)),
                    seconds=candidates.seconds[mask],
                    forward_seconds=candidates.forward_seconds[mask],
                )
            decisions[number] = replace(decisions[number], candidates=made[key])
        return replace(self, decisions=decisions, kept=(self, masks), limited=frozenset(limited))

    def widened(self) -> tuple[Space, Mapping[int, np.ndarray]]:
        """Return the space that this one keeps some strategies of, under the same costs, and masks of the kept ones."""
        if self.kept is None:
            return self, {}
        space, masks = self.kept
        space = space if space.optimizer == self.optimizer else space.with_optimizer(self.optimizer)
        return space.waiting_for(dict(self.overlapped.waited)) if self.overlapped.waited else space, masks

    def with_zigzag_axes(self, axes: Collection[str]) -> Space:
        """Return the space in which these axes zigzag-shard positions, and no others."""
        if set(axes) == set(self.zigzag_axes):
            return self
        assert self.rebuild is not None, "a space that was not built"
        space = self.rebuild(axes)
        space = space if space.optimizer == self.optimizer else space.with_optimizer(self.optimizer)
        return space.waiting_for(dict(self.overlapped.waited)) if self.overlapped.waited else space

    def waiting_for(self, shares: Mapping[str, float]) -> Space:
        """Return the space whose steps wait for these shares of weights' collectives (`OverlappedWork.waited`)."""
        waited = replace(self.overlapped, waited=tuple(sorted(shares.items())))
        known: dict[MovedTensor, MovedTensor] = {}

        def changed(edge: TensorEdge) -> TensorEdge:
            tensor = edge.tensor
            if tensor.sharing.overlapped == NOTHING:
                return edge
            if tensor not in known:
                known[tensor] = replace(tensor, sharing=replace(tensor.sharing, overlapped=waited))
            return replace(edge, tensor=known[tensor])

        edges = list(map(changed, self.edges))
        found = replace(self, overlapped=waited, edges=edges, inbound={edge.end: edge for edge in edges})
        found._kinds, found._numbers, found.of_layouts = self._kinds, self._numbers, self.of_layouts
        return found

    def moves_alike(self, other: Space) -> bool:
        """Return whether another space is the same but for the shares of moves that computing hides."""
        return self._kinds is other._kinds

    def has_same_candidates(self, other: Space) -> bool:
        """Return whether decisions have as many strategies as in another space of the same program and mesh.

        Strategies are in one order, so that each is that of the same number, but for zigzag-sharding and costs.
        """
        pairs = zip(self.decisions, other.decisions, strict=True)
        return all(len(one.candidates.strategies) == len(another.candidates.strategies) for one, another in pairs)

    def is_matrix(self, number: int) -> bool:
        """Return whether the optimizer treats a parameter as a matrix."""
        node = self.decisions[number].node
        return self.optimizer.takes(self.program.parameter_names[node.name], node.meta["tensor"])

    def travels(self, number: int, choice: int) -> bool:
        """Return whether other calls run while what a call moves itself is on its way, under one of its strategies."""
        decision = self.decisions[number]
        strategy = decision.candidates.strategies[choice]
        return strategy.implementation.in_halves and strategy.communicates and decision.node in self.meanwhile

    def rows_on(self, edge: TensorEdge) -> ExpertRows | None:
        """Return the expert rows at the end of an edge, if it brings any."""
        rows = self.rows.get(edge.target)
        return rows if rows is not None and edge.target_input in rows.inputs else None

    def ranks_by_expert(self, rows: ExpertRows, choice: int) -> int:
        """Return the number of ranks over which rows are divided by expert, given the strategy of the counts."""
        layout = self.decisions[rows.counts].candidates.strategies[choice].outputs[rows.position]
        return math.prod(size for size, each in zip(self.mesh.sizes, layout, strict=True) if each.is_split)

    def uneven_share(self, rows: ExpertRows | None, choices: Sequence[int], imbalance: float | None = None) -> float:
        """Return the rows of the busiest rank beyond an equal share, in shares: 0.5 if it has 1.5 times its share.

        At most all rows that are divided by expert may come to one rank. `imbalance` is that of the space unless it is
        given.
        """
        requested = self.imbalance if imbalance is None else imbalance
        return 0.0 if rows is None or requested == 1 else self.uneven_share_at(rows, choices[rows.counts], requested)

    def uneven_share_at(self, rows: ExpertRows, choice: int, imbalance: float) -> float:
        """Return `uneven_share` by the strategy of the decision on the counts."""
        return min(imbalance, self.ranks_by_expert(rows, choice)) - 1.0

    def share(self, rows: ExpertRows | None, choices: Sequence[int], imbalance: float | None = None) -> float:
        """Return the ratio of the busiest rank's rows to its share, by which their cost grows; 1 for other tensors."""
        return 1.0 + self.uneven_share(rows, choices, imbalance)

    def table(self, edge: TensorEdge, saved: bool = False) -> ReshardTable:
        """Return the reshard table of an edge; `saved`: of a parameter that is not gathered again in the backward."""
        # A tensor may pass layouts that are left out, and only arrives in those that are left.
        every = self.decisions if self.kept is None else self.kept[0].decisions
        by_identity = every[edge.source].candidates, every[edge.target].candidates
        dims, *zigzag = _splits(by_identity[0], edge.source_output, by_identity[1], edge.target_input)
        tensor = replace(edge.tensor, regather=False) if saved and edge.tensor.regather else edge.tensor
        targets = None if self.kept is None else _taken(self.decisions[edge.target].candidates, edge.target_input)
        return reshard_table(tensor, dims, self.mesh, self.hardware, *zigzag, targets)

    def reshard_seconds(self, edge: TensorEdge) -> np.ndarray:
        """Return the seconds of the reshard for every pair of strategies at the two ends of an edge."""
        table = self.table(edge)
        rows = [table.index[layout] for layout in self.source_layouts(edge)]
        columns = [table.column[layout] for layout in self.target_layouts(edge)]
        seconds = table.seconds[np.ix_(rows, columns)]
        saved = [i for i, s in enumerate(self.decisions[edge.source].candidates.strategies) if s.saved]
        if saved:
            other = self.table(edge, saved=True)
            seconds[saved] = other.seconds[np.ix_([rows[i] for i in saved], columns)]
        leaves, enters = (self.decisions[end].kind == "shared_reshard" for end in (edge.source, edge.target))
        if edge.target_input == 0 and leaves and not enters:  # between shared reshards one kind may move alone
            seconds = self._moved_together(edge, seconds)
        return seconds

    def forward_seconds(self, edge: TensorEdge, travelling: bool = False) -> np.ndarray:
        """Return the seconds of the forward collectives of an activation's edge, by the strategies at its ends.

        `travelling`: a gather at its end overlaps with compute, which loses the share of the device that it takes.
        """
        table = self.table(edge)
        rows = [table.index[layout] for layout in self.source_layouts(edge)]
        columns = [table.column[layout] for layout in self.target_layouts(edge)]
        found = table.forward_seconds[np.ix_(rows, columns)]
        if not travelling:
            return found
        return found - (1 - self.hardware.communication_share) * table.last_gather_seconds[np.ix_(rows, columns)]

    def _moved_together(self, edge: TensorEdge, seconds: np.ndarray) -> np.ndarray:
        """Return the seconds between a shared reshard and a consumer; its consumers move a tensor together or never."""
        source, target = (self.decisions[end].candidates.strategies for end in (edge.source, edge.target))
        if not any(each.shared for each in (*source, *target)):
            return seconds
        fits = [
            [a.shared == b.shared and (not a.shared or a.outputs[0] == b.inputs[0]) for b in target] for a in source
        ]
        return np.where(fits, seconds, np.inf)

    def source_layouts(self, edge: TensorEdge) -> list[Layout]:
        return [s.outputs[edge.source_output] for s in self.decisions[edge.source].candidates.strategies]

    def target_layouts(self, edge: TensorEdge) -> list[Layout]:
        return [s.inputs[edge.target_input] for s in self.decisions[edge.target].candidates.strategies]

    def path(self, edge: TensorEdge, choices: Sequence[int]) -> ReshardPath:
        """Return the reshard along an edge under the choices at its two ends."""
        key = self.kind(edge), choices[edge.source], choices[edge.target]
        if key not in self._paths:
            source = self.decisions[edge.source].candidates.strategies[choices[edge.source]]
            target = self.decisions[edge.target].candidates.strategies[choices[edge.target]].inputs[edge.target_input]
            self._paths[key] = self.table(edge, source.saved).path(source.outputs[edge.source_output], target)
        return self._paths[key]

    def kind(self, edge: TensorEdge) -> int:
        """Return a number shared by edges that move alike: same candidates and positions at both ends, same tensor."""
        if edge.end not in self._kinds:
            by_identity = self.decisions[edge.source].candidates, self.decisions[edge.target].candidates
            alike = id(by_identity[0]), edge.source_output, id(by_identity[1]), edge.target_input, edge.tensor
            self._kinds[edge.end] = self._numbers.setdefault(alike, len(self._numbers))
        return self._kinds[edge.end]

    def unruled(self) -> dict[str, str]:
        """Map calls that run replicated because no rule fits them to the reason."""
        return {d.name: d.candidates.reason for d in self.decisions if d.candidates.reason}


@functools.lru_cache(maxsize=16384)
def _splits(source: Candidates, output: int, target: Candidates, position: int) -> Splits:
    """Return what strategies at either end split; candidates are shared by equal calls and hashed by identity."""
    return splits_of({*(s.outputs[output] for s in source.strategies), *_taken(target, position)})


@functools.lru_cache(maxsize=16384)
def _taken(candidates: Candidates, position: int) -> tuple[Layout, ...]:
    """Return the layouts in which some strategy takes an input."""
    return tuple(dict.fromkeys(strategy.inputs[position] for strategy in candidates.strategies))


def stores_dtensors(space: Space, choices: Sequence[int]) -> bool:
    """Return whether parameters are DTensors: all of them are if any is stored in parts."""
    return any(
        decision.kind == "parameter" and decision.candidates.strategies[choice].outputs[0].is_split
        for decision, choice in zip(space.decisions, choices, strict=True)
    )


def without_gradient(space: Space) -> frozenset[int]:
    """Return decisions that no gradient comes back to: if a scalar is returned, only its backward runs.

    Among them are other outputs, and all that only these are made of, as a router's logits returned with a loss.
    """
    outputs = [number for number, decision in enumerate(space.decisions) if decision.kind == "output"]
    infos = [space.decisions[number].node.meta["tensor"] for number in outputs]
    reached = {n for n, info in zip(outputs, infos, strict=True) if info.requires_grad and not info.shape}
    if not reached:
        return frozenset()
    inbound: dict[int, list[int]] = defaultdict(list)
    for edge in space.edges:
        if edge.tensor.requires_grad:
            inbound[edge.target].append(edge.source)
    waiting = list(reached)
    while waiting:
        more = set(inbound[waiting.pop()]) - reached
        reached |= more
        waiting += more
    return frozenset(range(len(space.decisions))) - reached
