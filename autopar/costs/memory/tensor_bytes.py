"""Effect of layouts on a tensor: bytes on a device, and how it lies in memory after a move.

    same            nothing changes in memory
    sliced          a part of what is there anyway
    copied          a tensor of its own, made without communication
    communicated    a tensor of its own, made of what others have sent

Arrays have an entry per strategy of a decision, or a matrix over the strategies at both ends of an edge. Equal queries
return the same array (`shared`), which must not be changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np

from autopar.costs.memory.lifetimes import Lifetimes
from autopar.costs.pricing.message_sizes import worth_a_message
from autopar.costs.pricing.moves import MovedTensor
from autopar.costs.space.space import Decision, ExpertRows, Space, TensorEdge
from autopar.costs.space.strategy import Strategy, running_in
from autopar.ir.program.operators.expert_operators import DISPATCH
from autopar.ir.program.program import TensorInfo
from autopar.ir.program.recompute_segments import MODES
from autopar.ir.sharding.layout import I, Layout, P, Placement, R
from autopar.ir.sharding.rule import BoundRule

SAME, SLICED, COPIED, COMMUNICATED = range(4)  # relation of a resharded tensor's memory to its source
Bytes = np.ndarray
Modes = tuple[Bytes, ...]
"""An array per mode of recomputation; one array where the mode does not matter."""
StatedBytes = Literal["saved_bytes", "forward_bytes", "backward_bytes", "inference_bytes"]
"""Methods of an implementation that state bytes, or None."""
UNSTATED = -1
_INVARIANT, _REPLICATED, _PARTIAL, _FIRST_DIM = range(4)  # S(d) is _FIRST_DIM + d
_ZIGZAG = 1000  # and Z(d) so much more
Found = TypeVar("Found")
Method = TypeVar("Method", bound=Callable[..., Any])


def shared(make: Method) -> Method:
    """Let a method of a memory model answer equal queries with one object: what it makes at the first.

    Edges that move alike are equal in a query, and so are decisions of the same candidates. Arrays are equal if they
    are one: only arrays that are shared themselves may be in a query.
    """

    @functools.wraps(make)
    def found(self: Any, *query: Any) -> Any:
        key = make, *[_alike(self.space, each) for each in query]
        return self.cached(key, lambda: make(self, *query))

    return cast(Method, found)


def _alike(space: Space, queried: Any) -> object:
    if isinstance(queried, TensorEdge):
        return space.kind(queried)
    if isinstance(queried, Decision):
        return queried.candidates
    return id(queried) if isinstance(queried, np.ndarray) else queried


def of_layouts(make: Method) -> Method:
    """Let a method, whose array follows from the layouts at an edge's ends, be `shared` by all models of a space."""

    @functools.wraps(make)
    def found(self: Any, edge: TensorEdge) -> np.ndarray:
        key, known = (make.__name__, self.space.kind(edge)), self.space.of_layouts
        if key not in known:
            known[key] = make(self, edge)
        return known[key]

    return cast(Method, found)


class TensorBytes:
    """Bytes of tensors in the layouts that the strategies of a space give them."""

    def __init__(self, space: Space, lifetimes: Lifetimes, known: TensorBytes | None = None) -> None:
        """Share the arrays of `known`: bytes on a space that differs in the costs of moves alone."""
        self.space, self.lifetimes = space, lifetimes
        self._cache: dict[object, Any] = {} if known is None else known._cache

    def cached(self, key: object, make: Callable[[], Found]) -> Found:
        """Return the array of a key; `make` is called once per key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    # Memory layout of tensors: an entry for each pair of layouts at the ends of an edge.

    @of_layouts
    def kinds(self, edge: TensorEdge) -> np.ndarray:
        """Return how the tensor lies in memory after the edge (`SAME` … `COMMUNICATED`)."""

        def kinds_of(before: np.ndarray, after: np.ndarray) -> np.ndarray:
            whole_before, whole_after = before <= _REPLICATED, after <= _REPLICATED
            kinds = np.where(before == _PARTIAL, COMMUNICATED, np.where(after == _PARTIAL, COPIED, COMMUNICATED))
            kinds = np.where(whole_before & (after > _PARTIAL), np.where(after == _FIRST_DIM, SLICED, COPIED), kinds)
            return np.where((before == after) | (whole_before & whole_after), SAME, kinds)

        return self._on_any_axis(edge, kinds_of)

    def communicated(self, edge: TensorEdge) -> np.ndarray:
        """Return whether the tensor goes over links."""
        return self.kinds(edge) == COMMUNICATED

    def stays(self, edge: TensorEdge) -> np.ndarray:
        """Return whether no memory is taken: what arrives is, or lies in, what was there."""
        return self.kinds(edge) <= SLICED

    @of_layouts
    def reduced(self, edge: TensorEdge) -> np.ndarray:
        """Return whether the gradient is summed over devices on its way, though the tensor stays as it is."""
        return self._on_any_axis(edge, lambda before, after: (before == _INVARIANT) & (after == _REPLICATED))

    @of_layouts
    def only_gathers(self, edge: TensorEdge) -> np.ndarray:
        """Return whether nothing happens but gathers, slices and the reduction of gradients."""

        def differs(before: np.ndarray, after: np.ndarray) -> np.ndarray:
            exchanged = (before > _PARTIAL) & (after > _PARTIAL) & (before != after)
            # A weight whose gradient is equal everywhere is gathered in a way that is not done again.
            invariant = (before > _PARTIAL) & (after == _INVARIANT) & edge.tensor.requires_grad
            return exchanged | invariant | (before == _PARTIAL) | (after == _PARTIAL)

        return ~self._on_any_axis(edge, differs)

    def _on_any_axis(self, edge: TensorEdge, of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the most on any mesh axis of what follows there from the codes before and after."""
        found = []
        for ends in zip(*(codes.T for codes in self._codes(edge)), strict=True):
            # There are few codes, and many pairs of layouts.
            (before, rows), (after, columns) = (np.unique(codes, return_inverse=True) for codes in ends)
            found.append(of(before[:, None], after[None, :])[rows[:, None], columns])
        return np.maximum.reduce(found)

    def _codes(self, edge: TensorEdge) -> tuple[np.ndarray, np.ndarray]:
        source, target = self.space.source_layouts(edge), self.space.target_layouts(edge)
        return self._encoded(tuple(source)), self._encoded(tuple(target))

    @shared
    def _encoded(self, layouts: tuple[Layout, ...]) -> np.ndarray:
        codes: dict[Placement, int] = {I: _INVARIANT, R: _REPLICATED, P: _PARTIAL}
        codes |= {p: _FIRST_DIM + p.dim + _ZIGZAG * p.zigzag for each in layouts for p in each if p.is_split}
        return np.array([[codes[p] for p in each] for each in layouts])

    @shared
    def gathered_alone(self, edge: TensorEdge) -> np.ndarray:
        """Return whether a weight is gathered in a message of its own."""
        before, after = self._codes(edge)
        sizes, mesh = self.bytes_at_ends(edge)[1].astype(np.int64), self.space.mesh
        gathered = (before > _PARTIAL)[:, None, :] & (after <= _REPLICATED)[None, :, :]
        in_first_dim = (before - _FIRST_DIM) % _ZIGZAG == 0
        over = np.where((gathered <= in_first_dim[:, None, :]).all(axis=2), gathered @ (1 << np.arange(mesh.ndim)), 0)
        found = np.zeros(over.shape, dtype=bool)
        for axes in filter(None, np.unique(over).tolist()):  # `over` is a bit mask of axes
            some = [axis for axis in range(mesh.ndim) if axes >> axis & 1]
            found |= (over == axes) & worth_a_message(sizes, some, mesh, self.space.hardware)
        return found

    def sent_alone(self, edge: TensorEdge) -> np.ndarray:
        """Return whether a weight is gathered alone and its gradient sent from where it lies.

        Where rows do not divide over the devices, it is padded for its way.
        """
        rows, sizes = edge.tensor.shape[0] if edge.tensor.shape else 1, self.space.mesh.sizes
        even = [rows % layout.num_parts(0, sizes) == 0 for layout in self.space.source_layouts(edge)]
        return self.gathered_alone(edge) & np.array(even)[:, None]

    # Bytes.

    def bytes_at_ends(self, edge: TensorEdge) -> tuple[Bytes, Bytes]:
        """Return the bytes on one device of an edge's tensor, per strategy of its source and of its target."""
        ends = self.space.source_layouts(edge), self.space.target_layouts(edge)
        return self.of(edge.tensor, ends[0]), self.of(edge.tensor, ends[1])

    def of(self, tensor: TensorInfo | MovedTensor, layouts: Sequence[Layout]) -> Bytes:
        """Return the bytes on one device of a tensor, per layout."""
        return self.local(tensor.shape, tuple(layouts), tensor.dtype.itemsize)

    @shared
    def local(self, shape: tuple[int, ...], layouts: tuple[Layout, ...], size: int) -> Bytes:
        """Return the bytes on one device of a tensor with elements of `size` bytes, per layout."""
        return self.array([math.prod(each.local_shape(shape, self.space.mesh.sizes)) * size for each in layouts])

    def local_sizes(self, strategy: Strategy, bound: BoundRule) -> dict[str, int]:
        """Return the size of every factor of a call on one device."""
        return strategy.local_sizes(bound.sizes, self.space.mesh)

    def array(self, sizes: Sequence[int]) -> Bytes:
        """Return numbers of bytes as an array."""
        return np.array(sizes, dtype=np.int64)

    @shared
    def stated(self, cost: StatedBytes, decision: Decision, mode: int = 0) -> Bytes:
        """Return the bytes that the implementations of a call state, by strategy; UNSTATED of those that state none.

        In the mode selective, variants state them that gather again.
        """
        call, bound, found = decision.candidates.call, decision.candidates.bound, list[int]()
        for chosen in decision.candidates.strategies:
            strategy, num_bytes = running_in(MODES[mode], chosen), None
            if strategy.implemented and call is not None and bound is not None:
                num_bytes = getattr(strategy.implementation, cost)(call, self.local_sizes(strategy, bound))
            found.append(UNSTATED if num_bytes is None else num_bytes)
        return self.array(found)

    @shared
    def states(self, cost: StatedBytes, decision: Decision) -> bool:
        """Return whether the implementation of any strategy of a call states such bytes."""
        return bool((self.stated(cost, decision) != UNSTATED).any())

    @shared
    def applied(self, function: Callable[..., np.ndarray], *arguments: Any) -> np.ndarray:
        """Return what a function of numpy, or of a module, gives of shared arrays and numbers."""
        return function(*arguments)

    def optimizer_state(self, number: int) -> dict[str, Bytes]:
        """Return the bytes of optimizer state of a parameter, by name."""
        decision, matrix, optimizer = self.space.decisions[number], self.space.is_matrix(number), self.space.optimizer
        info: TensorInfo = decision.node.meta["tensor"]
        names = optimizer.state_of(info, matrix)
        return {name: self.state_bytes(name, info, self.elements(decision), matrix) for name in names}

    @shared
    def state_bytes(self, name: str, info: TensorInfo, elements: Bytes, matrix: bool) -> Bytes:
        """Return the bytes of one optimizer state for so many elements of a parameter."""
        return self.space.optimizer.state_bytes_of(name, info, elements, matrix)

    def elements(self, decision: Decision) -> Bytes:
        """Return the elements on one device of a decision's tensor, per strategy."""
        layouts = tuple([strategy.outputs[0] for strategy in decision.candidates.strategies])
        return self.local(decision.node.meta["tensor"].shape, layouts, 1)

    def whole(self, decision: Decision) -> Bytes:
        """Return the bytes on one device of a decision's tensor, per strategy."""
        return self.applied(np.multiply, self.elements(decision), decision.node.meta["tensor"].dtype.itemsize)

    @shared
    def saved(self, edge: TensorEdge, there: bool) -> Bytes:
        """Return the bytes of a tensor that is saved as it arrives; if it is not moved, it may be `there` anyway."""
        found = self.arriving(edge, not there)
        if not edge.tensor.regather:
            return found
        again = np.array([not each.saved for each in self.space.decisions[edge.source].candidates.strategies])
        return np.where(again[:, None] & self.only_gathers(edge), 0, found)

    @shared
    def arriving(self, edge: TensorEdge, itself: bool) -> Bytes:
        """Return the bytes of a tensor as it arrives; if it is not moved, those of the tensor `itself`, or none."""
        before, after = self.bytes_at_ends(edge)
        return np.where(self.stays(edge), (before if itself else np.zeros_like(before))[:, None], after[None, :])

    def hidden(self, decision: Decision, other_bytes: int, largest: int, local: Bytes) -> Bytes:
        """Return the bytes that a call saves besides inputs and outputs, by local elements of its largest input."""
        return np.ceil(other_bytes * (local / max(decision.call.inputs[largest].num_elements, 1))).astype(np.int64)

    def travelling(self, number: int) -> Bytes | None:
        """Return the bytes of rows that a call sends while others run; None if none run.

        As many arrive, and as many of gradients in the backward.
        """
        decision = self.space.decisions[number]
        is_sent = decision.kind == "call" and decision.node in self.space.meanwhile
        return self._travelling(decision) if is_sent else None

    @shared
    def _travelling(self, decision: Decision) -> Bytes:
        call, strategies = decision.call, decision.candidates.strategies
        if call.target is DISPATCH:
            rows, layouts = call.outputs[0], [each.outputs[0] for each in strategies]
        else:
            rows, layouts = call.inputs[0], [each.inputs[0] for each in strategies]
        travels = [self.space.travels(self.space.index[decision.name], choice) for choice in range(len(strategies))]
        return np.where(travels, self.of(rows, layouts), 0)

    def gradients(self, number: int) -> Bytes | None:
        """Return the bytes of a parameter's gradient, once it is reduced; None where there is none."""
        decision = self.space.decisions[number]
        learns = decision.kind == "parameter" and decision.node.meta["tensor"].requires_grad
        return self.whole(decision) if learns else None

    @shared
    def nothing(self, shape: tuple[int, ...]) -> Bytes:
        """Return zero bytes for every choice."""
        return np.zeros(shape, dtype=np.int64)

    def total(self, parts: Sequence[tuple[int, Modes]]) -> Modes | None:
        """Return the sum of shared arrays, each times its weight, mode by mode; None if there are no arrays."""
        count = max((len(modes) for _, modes in parts), default=0)
        by_mode = ([(weight, modes[mode % len(modes)]) for weight, modes in parts] for mode in range(count))
        return tuple(map(self._total, by_mode)) or None

    def _total(self, parts: list[tuple[int, Bytes]]) -> Bytes:
        if len(parts) == 1 and parts[0][0] == 1:
            return parts[0][1]
        # The cache holds every array, so that an id names one array for good.
        key = "total", *[(weight, id(array)) for weight, array in parts]
        return self.cached(key, lambda: np.sum([weight * array for weight, array in parts], axis=0))

    @staticmethod
    def modes(arrays: Sequence[Bytes]) -> Modes:
        """Return an array per mode; one where all modes agree."""
        return (arrays[0],) if all(array is arrays[0] for array in arrays) else tuple(arrays)


class OfTensors:
    """Base of the parts of a memory model, which share its arrays."""

    def __init__(self, tensors: TensorBytes) -> None:
        self.tensors, self.space, self.lifetimes = tensors, tensors.space, tensors.lifetimes
        self.cached = tensors.cached


def uneven_share(tensors: TensorBytes, rows: ExpertRows) -> np.ndarray:
    """Return how many more rows than its share the busiest device has, in shares.

    It has an entry per strategy of the decision on their counts, where rows that follow from routing depend on those
    (`costs.space.expert_rows`).
    """
    space = tensors.space
    candidates = space.decisions[rows.counts].candidates

    def make() -> np.ndarray:
        choices = range(len(candidates.strategies))
        return np.array([space.uneven_share_at(rows, choice, space.imbalance) for choice in choices])

    return tensors.cached(("uneven share", candidates, rows.position), make)


def uneven_modes(tensors: TensorBytes, rows: ExpertRows, modes: Modes) -> Modes:
    """Return the bytes of the busiest device above an equal share of expert rows, for each mode.

    They are `uneven_share` · bytes of a share, rounded up; a leading dim stands for the strategies of the counts'
    decision.
    """
    shares = uneven_share(tensors, rows)
    return tuple([tensors.applied(_shares_of, shares, each) for each in modes])


def _shares_of(shares: np.ndarray, num_bytes: Bytes) -> Bytes:
    """Return so large shares of bytes, rounded up; they have the first dim."""
    return np.ceil(np.multiply.outer(shares, num_bytes)).astype(np.int64)


def stated_or(stated: Bytes, otherwise: Bytes | int) -> Bytes:
    """Return the bytes that implementations state, and those of `otherwise` where they state none."""
    return np.where(stated == UNSTATED, otherwise, stated)
