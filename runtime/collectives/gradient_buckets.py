"""Parameters that move together: gradients reduced in buckets while the backward goes on, weights gathered in one go.

A bucket is two `autograd.Function`s. The backward of the inner one starts the collective and does not wait; that of the
outer one waits, just before the gradients reach the parameters. The autograd engine takes what is ready in the order
of sequence numbers, so the inner one gets one above all others (at once, when all gradients of the bucket are there)
and the outer one the lowest (when nothing else is left), but where a hook takes a gradient as soon as it is there: then
that is waited for at once. Compiled and simulated graphs have the inner one only, and it waits.

Every rank must start its collectives in the same order, and the engine takes nodes of the same number in an order that
depends on what else is ready: on a rank whose part of a weight is padded, on one node more. So nothing that starts a
collective, or that a collective waits for, shares its number.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed._local_tensor import local_tensor_mode

from autopar.costs.space.parameter_buckets import MOST_RUNNING
from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.direct import applied, below_autograd
from autopar.runtime.collectives.gathering import InFlight, Recipe, by_dtype, cast, issued
from autopar.runtime.collectives.layout_moves import waited_for
from autopar.runtime.collectives.mesh_axes import Axis, axis_of, count
from autopar.runtime.collectives.packed_messages import Part, joined, packed, sent
from autopar.runtime.collectives.regather import Regather

_c10d = torch.ops._c10d_functional
PREFERRED, LAST = 2**63, 0  # sequence numbers: above those of all other nodes, and what the engine leaves for the end
QUIET = frozenset(
    ("AccumulateGrad", "_LocalPartsBackward", "ConstantPadNdBackward0", "ToCopyBackward0", "_CastWeightBackward")
)
"""Nodes of the autograd graph that a parameter passes on its way to the first bucket; none of them communicates."""


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
            waited_for(result)
        self.results.clear()


def reduce_gradients(
    axis: str, *parameters: Tensor, in_place: bool = False, reduce: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """I → R for many parameters: one all-reduce per dtype of all their gradients. Moves their bytes backward.

    With `in_place`, which is for gradients that nobody else may hold, those that lie as they are sent are not copied.
    Gradients are summed as `reduce`, or as they are.
    """
    where = axis_of(axis)
    learning = _learning(parameters)
    if where.size == 1 or not learning:
        return parameters
    pending, entered = _enter([parameters[i] for i in learning])
    left = applied(_ReduceGradients, where, pending, in_place, reduce, *entered)
    return _replaced(parameters, learning, _prefer(left, pending))


def _learning(parameters: Sequence[Tensor]) -> list[int]:
    """Return the positions of those that get a gradient."""
    return [i for i, p in enumerate(parameters) if p.requires_grad] if torch.is_grad_enabled() else []


def _enter(parameters: Sequence[Tensor]) -> tuple[_Pending | None, Sequence[Tensor]]:
    """Return the parameters behind the outer function; as they are where a collective may not be left running."""
    if torch.compiler.is_compiling() or local_tensor_mode() is not None:
        return None, parameters
    pending = _Pending()
    entered = applied(_Wait, pending, *parameters)
    # Gradients that came through another bucket are reduced here, too: per layer, not all at the end.
    node: Any = entered[0].grad_fn
    taken, stays = False, True
    for leaf in _leaves_of(parameters):
        if leaf is None:
            stays = False
        elif leaf._post_accumulate_grad_hooks:
            taken = True
    if taken:
        run_at_once(node)
    elif stays:
        node._set_sequence_nr(LAST)
    return pending, entered


def _leaves_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return `_leaf_of` for each parameter; parameters from one autograd node share one look-up."""
    found: dict[Any, Tensor | None] = {}
    leaves: list[Tensor | None] = []
    for parameter in parameters:
        node = parameter.grad_fn
        if node is None:
            leaves.append(parameter)
            continue
        if node not in found:
            found[node] = _leaf_of(node)
        leaves.append(found[node])
    return leaves


def _leaf_of(node: Any) -> Tensor | None:
    """Return the leaf whose gradient passes `node` without a further collective, or the first of several such leaves.

    Returns None if another collective comes first.
    """
    while node.name().rpartition("::")[2] in QUIET:
        if not node.next_functions:
            return node.variable
        for before, _ in node.next_functions:
            if before is not None:
                node = before
                break
    return None


def waits(node: Any) -> bool:
    """Return whether a node of the autograd graph is the backward of an outer function."""
    return isinstance(node, _Wait._backward_cls)  # type: ignore[attr-defined]


def run_at_once(node: Any) -> None:
    """Have the backward of an autograd node run as soon as it can."""
    node._set_sequence_nr(PREFERRED + node._sequence_nr())


def _prefer(outputs: tuple[Tensor, ...], pending: _Pending | None) -> tuple[Tensor, ...]:
    """Return the outputs of an inner function, whose backward is to run as soon as it can."""
    if pending is not None:
        for x in outputs:
            if x.requires_grad:
                run_at_once(x.grad_fn)
                break
    return outputs


def _replaced(tensors: Sequence[Tensor], positions: Sequence[int], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len(positions) == len(tensors):
        return tuple(new)
    found = list(tensors)
    for position, each in zip(positions, new, strict=True):
        found[position] = each
    return tuple(found)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _Pending, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        # As it is, a leaf gives `grad_dtype` to its output: gradients in transit would be cast before the wait.
        return tuple(each.view_as(each) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.pending.wait()
        return None, *grads


class _ReduceGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        pending: _Pending | None,
        in_place: bool,
        reduce: torch.dtype | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.pending, ctx.in_place, ctx.reduce = axis, pending, in_place, reduce
        return parameters

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        reduced: list[Tensor | None] = [None] * len(grads)
        for dtype, group in by_dtype(grads).items():
            own = joined(list(group.values()), ctx.reduce or dtype, writes=ctx.pending is not None and not ctx.in_place)
            # Wait first if the result is cast.
            flat = _reduced(own, ctx.axis, ctx.pending if own.dtype == dtype else None).to(dtype)
            pieces = flat.split([grad.numel() for grad in group.values()])
            for (i, grad), piece in zip(group.items(), pieces, strict=True):
                reduced[i] = piece.view(grad.shape)
        return None, None, None, None, *reduced


def _reduced(own: Tensor, axis: Axis, pending: _Pending | None) -> Tensor:
    """Return the sum over the axis of a tensor that nobody else holds; in place where it may be left running."""
    count("all_reduce", axis, own.numel() * own.itemsize)
    if pending is None or torch.is_anomaly_enabled():  # anomaly mode reads a node's outputs at once
        return waited_for(below_autograd(_c10d.all_reduce.default, own, "sum", axis.group))
    result = below_autograd(_c10d.all_reduce_.default, own, "sum", axis.group)
    pending.results.append(result)
    return result


def _started(result: Tensor, pending: _Pending | None) -> Tensor:
    """Return the collective's result: to be waited for later, or waited for now."""
    if pending is None or torch.is_anomaly_enabled():
        return waited_for(result)
    pending.started(result)
    return result


def gather_parameters(
    axis: str,
    dims: tuple[int, ...],
    sizes: tuple[int, ...],
    *shards: Tensor,
    regather: tuple[int, ...] = (),
    to: tuple[torch.dtype | None, ...] = (),
    reduce: torch.dtype | None = None,
    layer: int | None = None,
    in_flight: InFlight | None = None,
) -> tuple[Tensor, ...]:
    """S → R for many parameters: one all-gather per dtype, and one reduce-scatter per dtype of their gradients.

    `dims` are the split dims, `sizes` their whole sizes; `to` the dtypes to which shards are cast before they are
    gathered, and `reduce` that in which gradients are summed; without them both are as they are. Inside a `Regather`
    block, the weights at the positions `regather` are not saved for the backward but gathered again there; `layer`
    says ahead of which other layers. What `start_gather` has issued is `in_flight`, and only waited for. Moves the
    (padded) wholes' bytes per collective.
    """
    where = axis_of(axis)
    if where.size == 1:
        return tuple(cast(shards, to))
    recipe, learning = Recipe(where, dims, sizes, to), _learning(shards)
    if learning:
        pending, behind = _enter([shards[i] for i in learning])
        entered = _replaced(shards, learning, behind)
        gathered = _prefer(
            applied(_GatherParameters, recipe, in_flight, tuple(learning), pending, reduce, *entered), pending
        )
    else:
        gathered = (in_flight or issued(recipe, shards)).arrived()
    # Hooks do not reach into a compiled region; its own partitioner decides what is saved for the backward.
    if regather and not torch.compiler.is_compiling() and Regather.current is not None:
        again = Recipe(
            where,
            tuple(dims[i] for i in regather),
            tuple(sizes[i] for i in regather),
            [to[i] for i in regather] if to else (),
        )
        parts, weights = ([each[i] for i in regather] for each in (shards, gathered))
        Regather.current.watch(again, tuple([part.detach() for part in parts]), tuple(weights), layer)
    return gathered


def use_gathered(
    axis: str,
    dims: tuple[int, ...],
    sizes: tuple[int, ...],
    *shards_and_wholes: Tensor,
    reduce: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Run `gather_parameters` on shards whose wholes are already there, without gradient: shards, then wholes.

    Moves nothing forward, and reduce-scatters the gradients.
    """
    where, number = axis_of(axis), len(dims)
    shards, wholes = shards_and_wholes[:number], shards_and_wholes[number:]
    learning = _learning(shards)
    if not learning:
        return wholes
    pending, behind = _enter([shards[i] for i in learning])
    recipe = Recipe(where, dims, sizes, ())
    entered = _replaced(shards, learning, behind)
    used = applied(_UseGathered, recipe, tuple(learning), pending, reduce, *entered, *wholes)
    return _prefer(used, pending)


class _GatherParameters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        in_flight: InFlight | None,
        learning: tuple[int, ...],
        pending: _Pending | None,
        reduce: torch.dtype | None,
        *shards: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.pending, ctx.reduce, ctx.exact = recipe.axis, pending, reduce, {}
        ctx.parts, ctx.dtypes = sent(shards, recipe.dims), [x.dtype for x in shards]
        whole = (in_flight or issued(recipe, shards)).arrived()
        if len(learning) < len(whole):
            ctx.mark_non_differentiable(*(x for i, x in enumerate(whole) if i not in learning))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.exact:
            grads = tuple(ctx.exact.pop(i, grad) for i, grad in enumerate(grads))
        return None, None, None, None, None, *_scattered(ctx, grads)


class _UseGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        learning: tuple[int, ...],
        pending: _Pending | None,
        reduce: torch.dtype | None,
        *shards_and_wholes: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.pending, ctx.reduce = recipe.axis, pending, reduce
        shards, wholes = shards_and_wholes[: len(recipe.dims)], shards_and_wholes[len(recipe.dims) :]
        ctx.parts, ctx.dtypes = sent(shards, recipe.dims), [shard.dtype for shard in shards]
        used = tuple(whole.view_as(whole) for whole in wholes)
        if len(learning) < len(used):
            ctx.mark_non_differentiable(*(x for i, x in enumerate(used) if i not in learning))
        return used

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, None, *_scattered(ctx, grads), *(None for _ in grads)


def _scattered(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return this rank's parts of the sums of gradients of gathered parameters."""
    scattered: list[Tensor | None] = [None] * len(grads)
    size = ctx.axis.size
    for dtype, group in by_dtype(grads).items():
        parts: list[Part] = [ctx.parts[i] for i in group]
        wholes = [part.sent(grad) if part.first else grad for part, grad in zip(parts, group.values(), strict=True)]
        message = packed(
            wholes, [part.shape for part in parts], [part.dim for part in parts], size, ctx.reduce or dtype
        )
        count("reduce_scatter", ctx.axis, message.numel() * message.itemsize)
        # Wait first if the result is cast.
        later = all(ctx.dtypes[i] == message.dtype for i in group)
        mine = below_autograd(_c10d.reduce_scatter_tensor.default, message, "sum", size, ctx.axis.group)
        mine = _started(mine, ctx.pending if later else None)
        for i, part, piece in zip(group, parts, mine.split([part.shape.numel() for part in parts]), strict=True):
            found = piece.view(part.shape)
            scattered[i] = (part.received(found) if part.first else found).to(ctx.dtypes[i])
    return scattered


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in the dtype of its use; its gradient gets back the dtype in which it is stored."""
    return _CastWeight.apply(weight, dtype)


class _CastWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype, ctx.exact = weight.dtype, {}
        return weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.exact.pop(0, grad).to(ctx.dtype), None
