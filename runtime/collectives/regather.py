"""Weights gathered again for the backward in place of being saved.

Inside a `Regather` block the backward holds how a bucket is gathered, not its weights. When the first of them is
needed, the backward has reached their layer: all of it is gathered, and the gathers of the layers that come next, which
are those before it, are issued to overlap with its matmuls (`depth` of them). They come in the reverse of the order in
which their weights were saved.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.collectives.gathering import InFlight, Recipe, issued
from autopar.runtime.collectives.layout_moves import is_eager
from autopar.runtime.collectives.left_running import SHARED
from autopar.runtime.collectives.reused_weights import ReusedBucket, ReusedBuckets

Reuse = tuple[int, tuple[int, ...]]
"""The number of a gather in its graph, and the positions of the weights that `empty_weights` frees."""
NEVER = -1
"""The number of no backward: torch gives those from 0 on."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """The weights of one recipe; they live as long as somebody uses them."""

    recipe: Recipe
    positions: Sequence[int]
    """Their positions among the weights that the forward has gathered together."""
    parts: tuple[Any, ...]
    """Tensors, or handles of parts that are gathered first."""
    layer: int | None
    """The number of the layer in whose backward they are used; None where nothing is known of it."""
    depth: int
    """Number of layers by which weights are fetched ahead of their use."""
    take: Callable[[], ReusedBucket] | None
    """Function that returns tensors to gather into; None if they are made anew."""
    reused: ReusedBucket | None = None
    """The tensors that it has returned, while weights are there."""
    uses: int = 0
    """Number of times that a weight, or a view of one, was saved for the backward."""
    requested: int = 0
    """Number of those uses that this backward has requested so far."""
    again: tuple[Tensor, ...] | None = None
    """Tensors in the weights' storages: each use takes a view of one, of its own shape."""
    in_flight: InFlight | None = None
    done: int = NEVER
    """The last backward that has taken all uses."""
    later: _Bucket | None = field(default=None, repr=False)
    """The one that a backward asks for next: it was saved before this one."""

    def use(self, saved: Regathered, shared: bool) -> Tensor:
        """Return a view of a weight for one of its uses: its own, or one that it shares with other uses."""
        if self.again is None:
            self.fetch()
            self._fetch_layers()
        assert self.again is not None
        rows, size, stride, offset = self.again[saved.number], saved.size, saved.stride, saved.offset
        there = self.reused.made.get(self.positions[saved.number]) if shared and self.reused is not None else None
        if there is not None and there.rows is rows:
            view = there.view(size, stride, offset)
        else:
            view = rows.as_strided(size, stride, offset)
        self.requested += 1
        if self.requested == self.uses:
            self.requested, self.done = 0, _backward()
            self._leave()
        return view

    def issue(self) -> None:
        """Let the weights be on their way."""
        if self.in_flight is None:
            with torch.no_grad():
                self.in_flight = issued(self.recipe, map(Regather.given_back, self.parts))

    def fetch(self) -> None:
        """Have the weights."""
        self.issue()
        assert self.in_flight is not None
        if self.take is not None and _backward() != NEVER:
            self.reused = self.take()
            torch.autograd.Variable._execution_engine.queue_callback(_end_backward)  # type: ignore[attr-defined]
        with torch.no_grad():
            self.again = self.in_flight.arrived(False, self.reused, self.positions)
        self.in_flight = None

    def _leave(self) -> None:
        """Let go of the weights."""
        self.again = None
        if self.reused is not None:
            self.reused.leave()
            self.reused = None

    def _fetch_layers(self) -> None:
        """Have the rest of the layer, and let those that come next be on their way."""
        if self.depth == 0 or self.layer is None or _backward() == NEVER or not Regather.in_order:
            return
        ahead = [each for each in self._next_buckets() if each.again is None and each.done != _backward()]
        for each in ahead:
            torch.autograd.Variable._execution_engine.queue_callback(each.drop)  # type: ignore[attr-defined]
        # A gather of gathered parts would wait for them.
        ready = [each for each in ahead if all(isinstance(part, Tensor) for part in each.parts)]
        own, later = ([each for each in ready if (each.layer == self.layer) == now] for now in (True, False))
        for each in own:
            each.issue()
        for each in ahead:
            if each.layer == self.layer:
                each.fetch()
        for each in later:
            each.issue()

    def _next_buckets(self) -> Iterator[_Bucket]:
        """Yield the buckets that the backward needs after this one, as far as they are prefetched."""
        each, layer = self.later, self.layer or 0
        while each is not None and each.layer is not None and 0 <= layer - each.layer <= self.depth:
            yield each
            each = each.later

    def drop(self) -> None:
        """Free what a finished backward has not taken."""
        self.in_flight = None
        if not self.requested:
            self._leave()


@dataclass(frozen=True, slots=True)
class Regathered:
    """A saved view of a gathered weight, without its storage."""

    bucket: _Bucket
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regather(torch.autograd.graph.saved_tensors_hooks):
    """Inside the block, gathered weights (or views of them) that a backward needs are not saved, but gathered again.

    Each bucket is gathered once per backward and freed after its last use. The gather is issued when the backward
    reaches a layer that is at most `depth` layers behind it, and else when the first of its weights is needed.
    """

    current: Regather | None = None
    in_order: bool = True
    """True if backwards go through all layers, one after the other."""

    def __init__(self, depth: int = 0, buckets: ReusedBuckets | None = None) -> None:
        """`buckets` are those of the steps of one graph; without them, each gather makes its weights."""
        super().__init__(self._pack, self.unpacked)
        self.depth = depth
        self._reusable = buckets
        self._reused: dict[int, tuple[ReusedBucket, int]] = {}
        """Storage → the bucket and the position of a weight that is to be emptied."""
        self._buckets: dict[int, tuple[Any, _Bucket, int]] = {}
        self._saved: dict[_Bucket, None] = {}
        """Buckets in the order in which their last weight was saved."""

    def __enter__(self) -> Regather:  # type: ignore[override]
        self._before = Regather.current
        Regather.current = self
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        Regather.current = self._before
        self._buckets.clear()
        while self._reused:  # returned by the model, or left by a call that failed
            bucket, position = self._reused.popitem()[1]
            bucket.let_go(position)
        before = None
        for bucket in self._saved:
            bucket.later, before = before, bucket
        self._saved.clear()

    def bucket(self, reuse: Reuse, learning: tuple[int, ...]) -> Callable[[], ReusedBucket] | None:
        """Return a function that takes tensors for weights of which some learn; None if these are made anew."""
        if self._reusable is None or not is_eager() or torch._C._are_functorch_transforms_active():
            return None
        number, positions = reuse
        return partial(self._reusable.taken, (number, learning), positions)

    def empty(self, *weights: Tensor) -> None:
        """Free weights after their last use in a forward, if they lie in storages that are filled again."""
        for weight in weights:
            bucket, position = self._reused.pop(weight.untyped_storage()._cdata, (None, 0))
            if bucket is not None:
                bucket.empty((position,))

    def watch(
        self,
        recipe: Recipe,
        positions: Sequence[int],
        parts: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        layer: int | None,
        take: Callable[[], ReusedBucket] | None = None,
        reused: ReusedBucket | None = None,
    ) -> None:
        """Remember whose weights these are, without keeping them alive.

        They have these `positions` among all that were gathered together, of which some are `reused`.
        """
        if reused is not None:
            for position, one in reused.made.items():
                self._reused[one.address] = reused, position
        # Parts that were themselves gathered are not saved either: a handle gathers them again first.
        held = tuple([self._held(part, 0) for part in parts])
        bucket = _Bucket(recipe, positions, held, layer, self.depth, take)
        for number, weight in enumerate(weights):
            storage = weight.untyped_storage()
            self._buckets[storage._cdata] = (weakref.ref(storage), bucket, number)

    def _pack(self, x: Tensor) -> Tensor | Regathered:
        return self._held(x, saving_node(x))

    def _held(self, x: Tensor, since: int) -> Tensor | Regathered:
        storage = x.untyped_storage()
        alive, bucket, number = self._buckets.get(storage._cdata, (None, None, 0))
        if alive is None or bucket is None or alive() is None:
            if storage._cdata in self._reused:  # saved, as the plan has it
                reused, position = self._reused.pop(storage._cdata)
                reused.let_go(position)
            return _held_tensor(x, since)
        bucket.uses += 1
        self._saved.pop(bucket, None)
        self._saved[bucket] = None
        return Regathered(bucket, number, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    @classmethod
    @contextlib.contextmanager
    def out_of_order(cls) -> Iterator[None]:
        """Prefetch nothing inside the block, as its backwards visit only parts of a graph."""
        before, cls.in_order = cls.in_order, False
        try:
            yield
        finally:
            cls.in_order = before

    @staticmethod
    def hold(x: Tensor, since: int = 0) -> object:
        """Return the object to save for a tensor, as an open `Regather` block would save it.

        `given_back` turns it into the tensor, once. A tensor whose node of autograd is older than the sequence number
        `since` is held with its graph: whoever holds it has no part in that.
        """
        return _held_tensor(x, since) if Regather.current is None else Regather.current._held(x, since)

    @staticmethod
    def given_back(saved: object) -> Tensor:
        """Return the saved tensor; of a weight a view that is nobody else's."""
        if isinstance(saved, Tensor):
            return saved
        assert isinstance(saved, Regathered)
        return saved.bucket.use(saved, shared=False)

    @staticmethod
    def unpacked(saved: object) -> Tensor:
        """Return the saved tensor to autograd, which makes another one of it."""
        if ReusedBucket.left:
            ReusedBucket.empty_left()
        if isinstance(saved, Tensor):
            return saved
        assert isinstance(saved, Regathered)
        return saved.bucket.use(saved, shared=True)


def saving_node(x: Tensor) -> int:
    """Return the sequence number of the node of autograd that saves `x` now; 0 if that is not known."""
    # It is the newest one, unless it is of a function in Python, whose forward may make others.
    of_python = isinstance(x.grad_fn, torch.autograd.function.BackwardCFunction)
    return 0 if of_python else torch._C._autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]


def _held_tensor(x: Tensor, since: int) -> Tensor:
    """Return a tensor without its graph, unless its node is older than `since`."""
    node: Any = x.grad_fn
    # A call's own output, with its graph, would hold the node that holds it.
    return x if node is None or node._sequence_nr() % SHARED < since else x.detach()


def empty_weights(*weights: Tensor) -> None:
    """Free gathered weights after their last use in a forward that reuses their tensors."""
    if Regather.current is not None:
        Regather.current.empty(*weights)


def _end_backward() -> None:
    ReusedBucket.empty_left(last=True)


def _backward() -> int:
    """Return the number of the backward that runs in this thread; NEVER where none does."""
    return torch._C._current_graph_task_id()
