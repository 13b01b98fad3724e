"""Parameters that move together: gradients reduced in buckets while the backward goes on, weights gathered in one go.

A bucket is two `autograd.Function`s. The backward of the inner one starts the collective and does not wait; that of the
outer one waits, just before the gradients reach the parameters. The autograd engine takes what is ready in the order
of sequence numbers, so the inner one gets one above all others (at once, when all gradients of the bucket are there)
and the outer one the lowest (when nothing else is left). Compiled and simulated graphs have the inner one only, and it
waits.

Every rank must start its collectives in the same order, and the engine takes nodes of the same number in an order that
depends on what else is ready: on a rank whose part of a weight is padded, on one node more. So nothing that starts a
collective, or that a collective waits for, shares its number.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed._local_tensor import local_tensor_mode

from autopar.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.axes import Axis, axis_of, count
from autopar.runtime.collectives.functions import gathered_rows, padded

_c10d = torch.ops._c10d_functional
PREFERRED, LAST = 2**63, 0  # sequence numbers: above those of all other nodes, and what the engine leaves for the end
QUIET = frozenset(("AccumulateGrad", "_LocalPartsBackward", "ConstantPadNdBackward0", "ToCopyBackward0"))
"""Nodes of the autograd graph that a parameter passes on its way to the first bucket; none of them communicates."""

MOST_RUNNING = 2  # buckets: a collective holds what it sends until it is waited for


class _Pending:
    """Collectives that the inner backward has started and the outer one waits for.

    The oldest are waited for sooner where others are running, so that what they send is freed.
    """

    __slots__ = ("results",)
    running: ClassVar[list[_Pending]] = []

    def __init__(self) -> None:
        self.results: list[Tensor] = []

    def started(self, result: Tensor) -> None:
        """Remember a collective to wait for."""
        if self not in self.running:
            self.running.append(self)
        self.results.append(result)
        while len(self.running) > MOST_RUNNING:
            self.running[0].wait()

    def wait(self) -> None:
        """Wait for all of them; nothing the second time."""
        if self in self.running:
            self.running.remove(self)
        for result in self.results:
            _c10d.wait_tensor(result)
        self.results.clear()


def reduce_gradients(axis: str, *parameters: Tensor, in_place: bool = False) -> tuple[Tensor, ...]:
    """I → R for many parameters: one all-reduce per dtype of all their gradients. Moves their bytes backward.

    With `in_place`, which is for one parameter whose gradient nobody else may hold, that gradient is not copied.
    """
    where = axis_of(axis)
    learning = _learning(parameters)
    if where.size == 1 or not learning:
        return parameters
    pending, entered = _enter([parameters[i] for i in learning])
    left = _ReduceGradients.apply(where, pending, in_place, *entered)
    return _replaced(parameters, learning, _prefer(left, pending))


def _learning(parameters: Sequence[Tensor]) -> list[int]:
    """The positions of those that get a gradient."""
    return [i for i, p in enumerate(parameters) if p.requires_grad] if torch.is_grad_enabled() else []


def _enter(parameters: Sequence[Tensor]) -> tuple[_Pending | None, Sequence[Tensor]]:
    """The parameters behind the outer function; as they are where a collective may not be left running."""
    if torch.compiler.is_compiling() or local_tensor_mode() is not None:
        return None, parameters
    pending = _Pending()
    entered = _Wait.apply(pending, *parameters)
    # What has come through another bucket is reduced there, too: after this layer, and not all layers at the end.
    if all(map(_is_as_stored, parameters)):
        entered[0].grad_fn._set_sequence_nr(LAST)
    return pending, entered


def _is_as_stored(parameter: Tensor) -> bool:
    """Whether a gradient goes from here to where it is kept without another collective."""
    node = parameter.grad_fn
    while node is not None and node.name().rpartition("::")[2] in QUIET:
        node = next((before for before, _ in node.next_functions), None)
    return node is None


def _prefer(outputs: tuple[Tensor, ...], pending: _Pending | None) -> tuple[Tensor, ...]:
    """The outputs of an inner function, whose backward is to run as soon as it can."""
    if pending is not None:
        node: Any = next(x.grad_fn for x in outputs if x.requires_grad)
        node._set_sequence_nr(PREFERRED + node._sequence_nr())
    return outputs


def _replaced(tensors: Sequence[Tensor], positions: Sequence[int], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, with new ones at some positions."""
    found = dict(zip(positions, new, strict=True))
    return tuple(found.get(i, x) for i, x in enumerate(tensors))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _Pending, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        return parameters

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.pending.wait()
        return None, *grads


class _ReduceGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: Axis, pending: _Pending | None, in_place: bool, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.pending, ctx.in_place = axis, pending, in_place
        return parameters

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.in_place and grads[0] is not None and grads[0].is_contiguous():
            return None, None, None, _reduced(grads[0], ctx.axis, ctx.pending)
        reduced: list[Tensor | None] = [None] * len(grads)
        for group in _by_dtype(grads).values():
            flat = _reduced(torch.cat([grad.reshape(-1) for grad in group.values()]), ctx.axis, ctx.pending)
            pieces = flat.split([grad.numel() for grad in group.values()])
            for (i, grad), piece in zip(group.items(), pieces, strict=True):
                reduced[i] = piece.view(grad.shape)
        return None, None, None, *reduced


def _reduced(own: Tensor, axis: Axis, pending: _Pending | None) -> Tensor:
    """The sum over the axis of a tensor that nobody else holds; in place where it may be left running."""
    count("all_reduce", axis, own.numel() * own.itemsize)
    if pending is None:
        return _c10d.wait_tensor(_c10d.all_reduce(own, "sum", axis.group))
    result = _c10d.all_reduce_(own, "sum", axis.group)
    pending.results.append(result)
    return result


def _started(result: Tensor, pending: _Pending | None) -> Tensor:
    """The collective's result: to be waited for later, or waited for now."""
    if pending is None:
        return _c10d.wait_tensor(result)
    pending.started(result)
    return result


def _by_dtype(tensors: Sequence[Tensor | None]) -> dict[torch.dtype, dict[int, Tensor]]:
    """Dtype → the tensors that there are, by position: a weight that a loss does not use has a gradient on no rank."""
    groups: dict[torch.dtype, dict[int, Tensor]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault(tensor.dtype, {})[number] = tensor
    return groups


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How the weights of a bucket are gathered: what `Regather` needs to do it again."""

    axis: Axis
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    shards: tuple[Any, ...]
    """Tensors, or handles of shards that are gathered first."""


def gather_parameters(
    axis: str, dims: tuple[int, ...], sizes: tuple[int, ...], *shards: Tensor, regather: tuple[int, ...] = ()
) -> tuple[Tensor, ...]:
    """S → R for many parameters: one all-gather per dtype, and one reduce-scatter per dtype of their gradients.

    `dims` are the split dims, `sizes` their whole sizes. Inside a `Regather` block, the weights at the positions
    `regather` are not kept for the backward but gathered again there. Moves the (padded) wholes' bytes per collective.
    """
    where = axis_of(axis)
    if where.size == 1:
        return shards
    learning = _learning(shards)
    pending, entered = None, shards
    if learning:
        pending, behind = _enter([shards[i] for i in learning])
        entered = _replaced(shards, learning, behind)
    gathered = _prefer(_GatherParameters.apply(where, dims, sizes, tuple(learning), pending, *entered), pending)
    # Hooks do not reach into a compiled region; its own partitioner decides what is kept for the backward.
    if regather and not torch.compiler.is_compiling() and Regather.current is not None:
        again = _Recipe(
            where,
            tuple(dims[i] for i in regather),
            tuple(sizes[i] for i in regather),
            tuple(shards[i].detach() for i in regather),
        )
        Regather.current.watch(again, tuple(gathered[i] for i in regather))
    return gathered


class _GatherParameters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        dims: tuple[int, ...],
        sizes: tuple[int, ...],
        learning: tuple[int, ...],
        pending: _Pending | None,
        *shards: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.dims, ctx.pending = axis, dims, pending
        whole = _gather(_Recipe(axis, dims, sizes, shards))
        ctx.mark_non_differentiable(*(x for i, x in enumerate(whole) if i not in learning))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        scattered: list[Tensor | None] = [None] * len(grads)
        size = ctx.axis.size
        for group in _by_dtype(grads).values():
            parts = [padded(grad, ctx.dims[i], size).chunk(size, ctx.dims[i]) for i, grad in group.items()]
            flat = torch.cat([part[rank].reshape(-1) for rank in range(size) for part in parts])
            count("reduce_scatter", ctx.axis, flat.numel() * flat.itemsize)
            mine = _started(_c10d.reduce_scatter_tensor(flat, "sum", size, ctx.axis.group), ctx.pending)
            for i, part, piece in zip(group, parts, mine.split([p[0].numel() for p in parts]), strict=True):
                scattered[i] = piece.view(part[0].shape)
        return None, None, None, None, None, *scattered


def _gather(recipe: _Recipe) -> tuple[Tensor, ...]:
    shards: list[Any] = list(map(Regather.given_back, recipe.shards))
    whole: list[Tensor | None] = [None] * len(shards)
    for numbers in map(tuple, _by_dtype(shards).values()):
        shapes = [shards[i].shape for i in numbers]
        flat = torch.cat([shards[i].reshape(-1) for i in numbers])
        for i in numbers:
            shards[i] = None  # parts that were gathered for this make room for the wholes
        size = recipe.axis.size
        count("all_gather", recipe.axis, flat.numel() * flat.itemsize * size)
        rows = gathered_rows(flat, recipe.axis).view(size, -1)
        del flat
        parts = rows.split([shape.numel() for shape in shapes], 1)
        for i, shape, part in zip(numbers, shapes, parts, strict=True):
            dim = recipe.dims[i]
            joined = part.view(size, *shape).movedim(0, dim).flatten(dim, dim + 1)
            # Each weight has a storage of its own, so that it is freed by itself, and `Regather` knows it by that.
            whole[i] = joined.narrow(dim, 0, recipe.sizes[i]).contiguous()
    return tuple(whole)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class _Bucket:
    """The weights of one recipe; they live as long as somebody uses them."""

    recipe: _Recipe
    uses: int = 0
    """How often a weight, or a view of one, was saved for the backward."""
    asked: int = 0
    """How many of those uses this backward has asked for."""
    again: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Handle:
    """A saved view of a gathered weight, without its storage."""

    bucket: _Bucket
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regather(torch.autograd.graph.saved_tensors_hooks):
    """Inside the block, gathered weights (or views of them) that a backward needs are not kept, but gathered again.

    Each bucket is gathered once per backward, when the first of its weights is needed, and freed after the last.
    """

    current: Regather | None = None

    def __init__(self) -> None:
        super().__init__(self._pack, self.given_back)
        self._buckets: dict[int, tuple[Any, _Bucket, int]] = {}

    def __enter__(self) -> Regather:  # type: ignore[override]
        self._before = Regather.current
        Regather.current = self
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        Regather.current = self._before
        self._buckets.clear()

    def watch(self, recipe: _Recipe, weights: tuple[Tensor, ...]) -> None:
        """Remember whose weights these are, without keeping them alive."""
        # Shards that were themselves gathered are not kept either: a handle gathers them again first.
        bucket = _Bucket(replace(recipe, shards=tuple(map(self._pack, recipe.shards))))
        for number, weight in enumerate(weights):
            storage = weight.untyped_storage()
            self._buckets[storage._cdata] = (weakref.ref(storage), bucket, number)

    def _pack(self, x: Tensor) -> Tensor | _Handle:
        storage = x.untyped_storage()
        alive, bucket, number = self._buckets.get(storage._cdata, (None, None, 0))
        if alive is None or bucket is None or alive() is None:
            return _without_graph(x)
        bucket.uses += 1
        return _Handle(bucket, number, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    @staticmethod
    def hold(x: Tensor) -> object:
        """What to keep of a tensor, as an open `Regather` block would; `given_back` makes the tensor of it, once."""
        return _without_graph(x) if Regather.current is None else Regather.current._pack(x)

    @staticmethod
    def given_back(saved: object) -> Tensor:
        """The tensor that was held."""
        if isinstance(saved, Tensor):
            return saved
        assert isinstance(saved, _Handle)
        bucket = saved.bucket
        if bucket.again is None:
            with torch.no_grad():
                bucket.again = _gather(bucket.recipe)
        weight = bucket.again[saved.number]
        bucket.asked += 1
        if bucket.asked == bucket.uses:
            bucket.asked, bucket.again = 0, None
        return weight.as_strided(saved.size, saved.stride, saved.offset)


def _without_graph(x: Tensor) -> Tensor:
    """The tensor as a node of the graph may hold it: a call's own output, with its graph, would hold the node."""
    return x.detach() if x.grad_fn is not None else x
