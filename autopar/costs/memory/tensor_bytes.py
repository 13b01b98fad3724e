"""Effect of layouts on a tensor: bytes on a device, and how it lies in memory after a move.

    same            nothing changes in memory
    sliced          a part of what is there anyway
    copied          a tensor of its own, made without communication
    communicated    a tensor of its own, made of what others have sent

Arrays have an entry per strategy of a decision, or a matrix over the strategies at both ends of an edge. Equal queries
return the same array, which must not be changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from autopar.costs.pricing.message_sizes import worth_a_message
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


class TensorBytes:
    """Bytes of tensors in the layouts that the strategies of a space give them."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._cache: dict[object, Bytes] = {}

    # Memory layout of tensors.

    def reduced(self, edge: TensorEdge) -> np.ndarray:
        """Return the pairs of layouts on whose way the gradient is summed over devices, though the tensor stays as it
        is.
        """
        return self._on_any_axis(edge, lambda before, after: (before == _INVARIANT) & (after == _REPLICATED))

    def communicated(self, edge: TensorEdge) -> np.ndarray:
        """Return the pairs of layouts between which a tensor goes over links."""
        return self.space.of_layouts("communicated", edge, lambda: self.kinds(edge) == COMMUNICATED)

    def changes(self, edge: TensorEdge) -> np.ndarray:
        """Return the pairs of layouts between which a tensor becomes another one, if only a slice."""
        return self.kinds(edge) != SAME

    def stays(self, edge: TensorEdge) -> np.ndarray:
        """Return the pairs of layouts between which no memory is taken: what arrives is, or lies in, what was there."""
        return self.space.of_layouts("stays", edge, lambda: self.kinds(edge) <= SLICED)

    def _codes(self, edge: TensorEdge) -> tuple[np.ndarray, np.ndarray]:
        return (
            self.cached(
                ("codes", tuple(self.space.source_layouts(edge))), lambda: _encode(self.space.source_layouts(edge))
            ),
            self.cached(
                ("codes", tuple(self.space.target_layouts(edge))), lambda: _encode(self.space.target_layouts(edge))
            ),
        )

    def kinds(self, edge: TensorEdge) -> np.ndarray:
        """Return how the tensor lies in memory after the edge (`SAME` … `COMMUNICATED`), for every pair of layouts."""
        return self.space.of_layouts("kinds", edge, lambda: self._kinds(edge))

    def _kinds(self, edge: TensorEdge) -> np.ndarray:
        return self._on_any_axis(edge, self._kinds_of)

    def _on_any_axis(self, edge: TensorEdge, of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the most on any mesh axis of what follows there from the codes before and after, for each pair."""
        found = []
        for ends in zip(*(codes.T for codes in self._codes(edge)), strict=True):
            # There are few codes, and many pairs of layouts.
            (before, rows), (after, columns) = (np.unique(codes, return_inverse=True) for codes in ends)
            found.append(of(before[:, None], after[None, :])[rows[:, None], columns])
        return np.maximum.reduce(found)

    @staticmethod
    def _kinds_of(before: np.ndarray, after: np.ndarray) -> np.ndarray:
        whole_before, whole_after = before <= _REPLICATED, after <= _REPLICATED
        kinds = np.where(before == _PARTIAL, COMMUNICATED, np.where(after == _PARTIAL, COPIED, COMMUNICATED))
        kinds = np.where(whole_before & (after > _PARTIAL), np.where(after == _FIRST_DIM, SLICED, COPIED), kinds)
        return np.where((before == after) | (whole_before & whole_after), SAME, kinds)

    def only_gathers(self, edge: TensorEdge) -> np.ndarray:
        """Return the pairs of layouts between which nothing happens but gathers, slices and the reduction of
        gradients.
        """
        return self.space.of_layouts("only gathers", edge, lambda: self._only_gathers(edge))

    def _only_gathers(self, edge: TensorEdge) -> np.ndarray:
        def differs(before: np.ndarray, after: np.ndarray) -> np.ndarray:
            exchanged = (before > _PARTIAL) & (after > _PARTIAL) & (before != after)
            # A weight whose gradient is equal everywhere is gathered in a way that is not done again.
            invariant = (before > _PARTIAL) & (after == _INVARIANT) & edge.tensor.requires_grad
            return exchanged | invariant | (before == _PARTIAL) | (after == _PARTIAL)

        return ~self._on_any_axis(edge, differs)

    def gathered_alone(self, edge: TensorEdge) -> np.ndarray:
        """Return the pairs of layouts between which a weight is gathered in a message of its own."""
        return self.cached(("gathered alone", self.space.kind(edge)), lambda: self._gathered_alone(edge))

    def _gathered_alone(self, edge: TensorEdge) -> np.ndarray:
        before, after = self._codes(edge)
        sizes, mesh = self.bytes_at_ends(edge)[1], self.space.mesh
        gathered = (before > _PARTIAL)[:, None, :] & (after <= _REPLICATED)[None, :, :]
        in_first_dim = (before - _FIRST_DIM) % _ZIGZAG == 0
        over = np.where((gathered <= in_first_dim[:, None, :]).all(axis=2), gathered @ (1 << np.arange(mesh.ndim)), 0)
        found = np.zeros(over.shape, dtype=bool)
        for axes in filter(None, np.unique(over).tolist()):  # `over` is a bit mask of axes
            some = [axis for axis in range(mesh.ndim) if axes >> axis & 1]
            found |= (over == axes) & worth_a_message(sizes, some, mesh, self.space.hardware)
        return found

    def sent_alone(self, edge: TensorEdge) -> np.ndarray:
        """Return the pairs of layouts between which a weight is gathered alone and its gradient sent from where it
        lies.

        Where rows do not divide over the devices, it is padded for its way.
        """
        rows, sizes = edge.tensor.shape[0] if edge.tensor.shape else 1, self.space.mesh.sizes
        even = [rows % layout.num_parts(0, sizes) == 0 for layout in self.space.source_layouts(edge)]
        return self.gathered_alone(edge) & np.array(even)[:, None]

    # Bytes.

    def bytes_at_ends(self, edge: TensorEdge) -> tuple[Bytes, Bytes]:
        """Return the bytes on one device of an edge's tensor, per strategy of its source and of its target."""
        shape, size = edge.tensor.shape, edge.tensor.dtype.itemsize
        return (
            self.local(shape, self.space.source_layouts(edge), size),
            self.local(shape, self.space.target_layouts(edge), size),
        )

    def local(self, shape: Sequence[int], layouts: Sequence[Layout], size: int) -> Bytes:
        """Return the bytes on one device of a tensor with elements of `size` bytes, per layout."""
        key = ("local", tuple(shape), tuple(layouts), size)
        sizes = self.space.mesh.sizes
        return self.cached(
            key, lambda: self.array([math.prod(each.local_shape(shape, sizes)) * size for each in layouts])
        )

    def local_sizes(self, strategy: Strategy, bound: BoundRule) -> dict[str, int]:
        """Return the size of every factor of a call on one device."""
        return strategy.local_sizes(bound.sizes, self.space.mesh)

    def array(self, sizes: Sequence[int]) -> Bytes:
        """Return numbers of bytes as an array."""
        return np.array(sizes, dtype=np.int64)

    def stated(self, cost: StatedBytes, decision: Decision, mode: int = 0) -> Bytes:
        """Return the bytes that the implementations of a call state, by strategy; UNSTATED of those that state none.

        In the mode selective, variants state them that gather again.
        """

        def make() -> Bytes:
            call, bound = decision.candidates.call, decision.candidates.bound
            found: list[int] = []
            for chosen in decision.candidates.strategies:
                strategy, num_bytes = running_in(MODES[mode], chosen), None
                if strategy.implemented and call is not None and bound is not None:
                    num_bytes = getattr(strategy.implementation, cost)(call, self.local_sizes(strategy, bound))
                found.append(UNSTATED if num_bytes is None else num_bytes)
            return self.array(found)

        return self.cached((cost, id(decision.candidates), mode), make)

    def states(self, cost: StatedBytes, decision: Decision) -> bool:
        """Return whether the implementation of any strategy of a call states such bytes."""
        stated = self.stated(cost, decision)
        return bool(self.cached(("states", id(stated)), lambda: (stated != UNSTATED).any()))

    def cached(self, key: object, make: Callable[[], Bytes]) -> Bytes:
        """Return the array of a key; `make` is called once per key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def times(self, elements: Bytes, size: int) -> Bytes:
        """Return the bytes of so many elements of `size` bytes."""
        return self.cached(("times", id(elements), size), lambda: elements * size)

    def optimizer_state(self, info: TensorInfo, elements: Bytes, matrix: bool) -> dict[str, Bytes]:
        """Return the bytes of optimizer state for so many elements of a parameter, by name."""
        optimizer, found = self.space.optimizer, {}
        for name, size in optimizer.state_of(info, matrix).items():
            make = partial(optimizer.state_bytes_of, name, info, elements, matrix)
            found[name] = self.cached(("optimizer bytes", name, id(elements), info.dtype, size), make)
        return found

    def elements(self, info: TensorInfo, decision: Decision) -> Bytes:
        """Return the elements on one device of a decision's tensor, per strategy."""
        layouts = tuple(strategy.outputs[0] for strategy in decision.candidates.strategies)
        return self.cached(("elements", info.shape, layouts), lambda: self.local(info.shape, layouts, 1))

    def saved(self, edge: TensorEdge, there: bool) -> Bytes:
        """Return the bytes of a tensor that is saved as it arrives; if it is not moved, it may be `there` anyway."""
        return self.cached(("saved", there, self.space.kind(edge)), lambda: self._saved_bytes(edge, there))

    def _saved_bytes(self, edge: TensorEdge, there: bool) -> Bytes:
        before, after = self.bytes_at_ends(edge)
        unmoved = np.zeros_like(before) if there else before
        found = np.where(self.stays(edge), unmoved[:, None], after[None, :])
        if edge.tensor.regather:
            strategies = self.space.decisions[edge.source].candidates.strategies
            again = np.array([not strategy.saved for strategy in strategies])
            found[again[:, None] & self.only_gathers(edge)] = 0
        return found

    def sent(self, edge: TensorEdge) -> Bytes:
        """Return the bytes of a tensor where it has come over links; where not, it is made again."""
        return self.cached(
            ("sent", self.space.kind(edge)),
            lambda: np.where(self.communicated(edge), self.bytes_at_ends(edge)[1][None, :], 0),
        )

    def travelling(self, number: int) -> Bytes | None:
        """Return the bytes of rows that a call sends while others run; None if none run.

        As many arrive, and as many of gradients in the backward.
        """
        decision = self.space.decisions[number]
        if decision.kind != "call" or decision.node not in self.space.meanwhile:
            return None

        def make() -> Bytes:
            call, strategies = decision.candidates.call, decision.candidates.strategies
            assert call is not None, "a call has one candidate"
            if call.target is DISPATCH:
                rows, layouts = call.outputs[0], [each.outputs[0] for each in strategies]
            else:
                rows, layouts = call.inputs[0], [each.inputs[0] for each in strategies]
            travels = [self.space.travels(number, choice) for choice in range(len(strategies))]
            return np.where(travels, self.local(rows.shape, layouts, rows.dtype.itemsize), 0)

        return self.cached(("travelling", id(decision.candidates)), make)

    def gradients(self, number: int) -> Bytes | None:
        """Return the bytes of a parameter's gradient, once it is reduced; None where there is none."""
        decision = self.space.decisions[number]
        info = decision.node.meta["tensor"]
        if decision.kind != "parameter" or not info.requires_grad:
            return None
        return self.times(self.elements(info, decision), info.dtype.itemsize)

    def nothing(self, shape: tuple[int, ...]) -> Bytes:
        """Return zero bytes for every choice."""
        return self.cached(("nothing", shape), lambda: np.zeros(shape, dtype=np.int64))

    def copies(self, modes: Modes, count: int) -> Modes:
        """Return the bytes of so many times the same."""
        return tuple([self.cached(("copies", id(each), count), lambda a=each: a * count) for each in modes])

    def with_rerun(self, saved: Modes) -> Modes:
        """Return the bytes by mode while a segment itself runs again: what it saves, and all that it makes again."""
        each = [
            array
            if array is saved[0]
            else self.cached(("rerun", id(saved[0]), id(array)), partial(np.maximum, saved[0], array))
            for array in saved
        ]
        return self.modes(each)

    @staticmethod
    def modes(arrays: Sequence[Bytes]) -> Modes:
        """Return an array per mode; one where all modes agree."""
        return (arrays[0],) if all(array is arrays[0] for array in arrays) else tuple(arrays)


def _encode(layouts: Sequence[Layout]) -> np.ndarray:
    codes: dict[Placement, int] = {I: _INVARIANT, R: _REPLICATED, P: _PARTIAL}
    codes |= {p: _FIRST_DIM + p.dim + _ZIGZAG * p.zigzag for each in layouts for p in each if p.is_split}
    return np.array([[codes[p] for p in each] for each in layouts])


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

    return tensors.cached(("uneven share", id(candidates), rows.position), make)


def uneven_modes(tensors: TensorBytes, rows: ExpertRows, modes: Modes) -> Modes:
    """Return the bytes of the busiest device above an equal share of expert rows, for each mode.

    They are `uneven_share` · bytes of a share, rounded up; a leading dim stands for the strategies of the counts'
    decision.
    """
    shares = uneven_share(tensors, rows)
    return tuple(
        tensors.cached(("uneven modes", id(shares), id(array)), lambda a=array: _outer(shares, a)) for array in modes
    )


def _outer(shares: np.ndarray, array: Bytes) -> Bytes:
    return np.ceil(np.multiply.outer(shares, array)).astype(np.int64)


def stated_or(stated: Bytes, otherwise: Bytes) -> Bytes:
    """Return the bytes that implementations state, and those of `otherwise` where they state none."""
    return np.where(stated == UNSTATED, otherwise, stated)
