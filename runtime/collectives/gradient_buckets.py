"""Parameters that move together: gradients reduced in buckets while the backward goes on, weights gathered in one go.

A bucket's collective is started by one node of autograd and waited for by another (`left_running`).
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.derivatives import called_directly, differentiated_once, once_differentiable
from autopar.runtime.collectives.direct import applied, below_autograd
from autopar.runtime.collectives.gathering import InFlight, Recipe, by_dtype, cast, issued
from autopar.runtime.collectives.layout_moves import waited_for
from autopar.runtime.collectives.left_running import (
    SHARED,
    Pending,
    Wait,
    applied_inside,
    behind_wait,
    is_shared_behind,
    reductions_of_steps,
    started,
)
from autopar.runtime.collectives.mesh_axes import OPEN_RECORDS, Axis, axis_of, count
from autopar.runtime.collectives.packed_messages import Part, joined, packed, sent
from autopar.runtime.collectives.regather import Regather, Reuse
from autopar.runtime.collectives.reused_weights import ReusedBucket

_c10d = torch.ops._c10d_functional
_all_reduce_in_place = _c10d.all_reduce_.default._op
_set_versions = torch._C._autograd._unsafe_set_version_counter  # pyright: ignore[reportAttributeAccessIssue]
_VERSION = operator.attrgetter("_version")


def reduce_gradients(
    axis: str, *parameters: Tensor, in_place: bool = False, reduce: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """I → R for many parameters: one all-reduce per dtype of all their gradients. Moves their bytes backward.

    With `in_place`, which is for gradients that nobody else may hold, those that lie as they are sent are not copied.
    Gradients are summed as `reduce`, or as they are.
    """
    where = axis_of(axis)
    if where.size == 1 or not torch.is_grad_enabled():
        return parameters
    of_steps, bucket = reductions_of_steps(parameters), (axis, in_place, reduce, *map(id, parameters))
    before = () if of_steps is None else of_steps.get(bucket, ())
    if before and is_shared_behind(before[0], parameters[0]):
        return before
    for parameter in parameters:
        if not parameter.requires_grad:
            break
    else:
        pending, behind = behind_wait(parameters, where, shared=of_steps is not None)
        if behind is parameters:
            reduced = applied_inside(_ReduceGradients, pending, where, pending, in_place, reduce, before, *behind)
        else:  # new tensors, which nobody else has: they are the outputs as they are, and nothing writes into them
            versions = tuple(map(_VERSION, behind))
            reduced = applied_inside(_ReduceGradients, pending, where, pending, in_place, reduce, behind, *behind)
            _set_versions(behind, versions)
        if of_steps is not None:
            node: Any = reduced[0].grad_fn
            node._set_sequence_nr(SHARED + node._sequence_nr())
            of_steps[bucket] = reduced
        return reduced
    learning = _learning(parameters)
    if not learning:
        return parameters
    reduced = reduce_gradients(axis, *[parameters[i] for i in learning], in_place=in_place, reduce=reduce)
    return _replaced(parameters, learning, reduced)


def _learning(parameters: Sequence[Tensor]) -> list[int]:
    """Return the positions of those that get a gradient."""
    return [i for i, p in enumerate(parameters) if p.requires_grad] if torch.is_grad_enabled() else []


def _replaced(tensors: Sequence[Tensor], positions: Sequence[int], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len(positions) == len(tensors):
        return tuple(new)
    found = list(tensors)
    for position, each in zip(positions, new, strict=True):
        found[position] = each
    return tuple(found)


@called_directly
class _ReduceGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        pending: Pending | None,
        in_place: bool,
        reduce: torch.dtype | None,
        outputs: tuple[Tensor, ...],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.pending, ctx.in_place, ctx.reduce = axis, pending, in_place, reduce
        ctx.reductions = Pending(pending)  # inner buckets that gradients come from: the backward waits for them
        if outputs and outputs[0] is parameters[0]:
            ctx.mark_dirty(*parameters)  # else the outputs would be views of them
        # No views: steps may share them, as those of `Wait`.
        return outputs or (parameters if pending is None else tuple([x.detach() for x in parameters]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return differentiated_once(_ReduceGradients.backward, ctx, grads)
        if ctx.reductions.results:
            ctx.reductions.wait()
        first = grads[0]
        found: list[Tensor] = []
        sizes: list[int] = []
        for grad in grads:  # loops, because this runs for every bucket, and comprehensions are calls of Python
            if grad is None or first is None or grad.dtype != first.dtype:
                break
            found.append(grad)
            sizes.append(grad.numel())
        if len(found) < len(grads):
            return None, None, None, None, None, *_reduced_by_dtype(ctx, grads)
        dtype, pending, axis = found[0].dtype, ctx.pending, ctx.axis
        reduce, writes = ctx.reduce or dtype, pending is not None and not ctx.in_place
        one = found[0].to(reduce, copy=writes).contiguous() if len(found) == 1 else None  # is a message as it is
        own = joined(found, reduce, writes=writes) if one is None else one
        if OPEN_RECORDS:
            count("all_reduce", axis, own.numel() * own.itemsize)
        # Wait first if the result is cast; anomaly mode reads a node's outputs at once.
        if pending is None or reduce != dtype or torch.is_anomaly_enabled():
            total = waited_for(below_autograd(_c10d.all_reduce.default, own, "sum", axis.group)).to(dtype)
        else:  # nobody else holds the message
            with torch._C._AutoDispatchBelowAutograd():
                total = _all_reduce_in_place(own, "sum", axis.group)
            pending.results[id(total)] = total
            if total.untyped_storage()._cdata == found[0].untyped_storage()._cdata:  # summed where they lie
                return None, None, None, None, None, *found
        if one is not None:
            return None, None, None, None, None, total
        reduced: list[Tensor | None] = [None] * 5
        for grad, piece in zip(found, total.split_with_sizes(sizes), strict=True):
            reduced.append(piece if grad.ndim == 1 else piece.view(grad.shape))
        return tuple(reduced)


def _reduced_by_dtype(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of gradients, in one message for each dtype."""
    reduced: list[Tensor | None] = [None] * len(grads)
    for group in by_dtype(grads).values():
        for i, each in zip(group, _ReduceGradients.backward(ctx, *group.values())[5:], strict=True):
            reduced[i] = each
    return reduced


_SAME_VALUES = (Wait._backward_cls, _ReduceGradients._backward_cls)  # type: ignore[attr-defined]
"""Nodes of the autograd graph whose inputs have the values of their outputs, in the same order."""


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
    reuse: Reuse | None = None,
) -> tuple[Tensor, ...]:
    """S → R for many parameters: one all-gather per dtype, and one reduce-scatter per dtype of their gradients.

    `dims` are the split dims, `sizes` their whole sizes; `to` the dtypes to which shards are cast before they are
    gathered, and `reduce` that in which gradients are summed; without them both are as they are. Inside a `Regather`
    block, the weights at the positions `regather` are not saved for the backward but gathered again there; `layer`
    says ahead of which other layers. What `start_gather` has issued is `in_flight`, and only waited for. Weights that
    the graph says how to `reuse` are gathered into tensors of steps before, where there are some. Moves the (padded)
    wholes' bytes per collective.
    """
    where = axis_of(axis)
    if where.size == 1:
        return tuple(cast(shards, to))
    recipe, learning = Recipe(where, dims, sizes, to), _learning(shards)
    # Hooks do not reach into a compiled region; its own partitioner decides what is saved for the backward.
    watching = Regather.current if regather and not torch.compiler.is_compiling() else None
    take = watching.bucket(reuse, tuple(learning)) if watching is not None and reuse is not None else None
    reused = None if take is None else take()
    if learning:
        pending, behind = behind_wait([shards[i] for i in learning], where)
        taken = _replaced(shards, learning, behind)
        gathered = applied_inside(
            _GatherParameters, pending, recipe, in_flight, tuple(learning), pending, reduce, reused, *taken
        )
    else:
        gathered = (in_flight or issued(recipe, shards)).arrived(True, reused, range(len(shards)))
    if watching is not None:
        again = Recipe(
            where,
            tuple(dims[i] for i in regather),
            tuple(sizes[i] for i in regather),
            [to[i] for i in regather] if to else (),
        )
        weights = tuple([gathered[i] for i in regather])
        watching.watch(again, regather, _values(shards, regather), weights, layer, take, reused)
    return gathered


def _values(shards: Sequence[Tensor], positions: Sequence[int]) -> tuple[Tensor, ...]:
    """Return some shards outside of autograd: as they are stored, or as tensors of their own."""
    found = []
    for shard in map(shards.__getitem__, positions):
        node: Any = shard.grad_fn
        number = shard.output_nr
        while isinstance(node, _SAME_VALUES):
            node, number = node.next_functions[number]
        stored = getattr(node, "stored", None)
        found.append(shard.detach() if stored is None else stored[number])
    return tuple(found)


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
    pending, behind = behind_wait([shards[i] for i in learning], where)
    recipe = Recipe(where, dims, sizes, ())
    taken = _replaced(shards, learning, behind)
    return applied_inside(_UseGathered, pending, recipe, tuple(learning), pending, reduce, *taken, *wholes)


@called_directly
class _GatherParameters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        in_flight: InFlight | None,
        learning: tuple[int, ...],
        pending: Pending | None,
        reduce: torch.dtype | None,
        reused: ReusedBucket | None,
        *shards: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.pending, ctx.reduce, ctx.exact = recipe.axis, pending, reduce, {}
        ctx.parts, ctx.dtypes = sent(shards, recipe.dims), [x.dtype for x in shards]
        whole = (in_flight or issued(recipe, shards)).arrived(True, reused, range(len(shards)))
        if len(learning) < len(whole):
            ctx.mark_non_differentiable(*(x for i, x in enumerate(whole) if i not in learning))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.exact:
            grads = tuple(ctx.exact.pop(i, grad) for i, grad in enumerate(grads))
        return None, None, None, None, None, None, *_scattered(ctx, grads)


@called_directly
class _UseGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        learning: tuple[int, ...],
        pending: Pending | None,
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
    ReusedBucket.empty_left()  # before messages take their room
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
        mine = started(mine, ctx.pending if later else None)
        for i, part, piece in zip(group, parts, mine.split([part.shape.numel() for part in parts]), strict=True):
            found = piece if len(part.shape) == 1 else piece.view(part.shape)
            scattered[i] = (part.received(found) if part.first else found).to(ctx.dtypes[i])
    return scattered


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in the dtype of its use; its gradient gets back the dtype in which it is stored."""
    return applied(_CastWeight, weight, dtype)


def cast_weights(dtypes: tuple[torch.dtype, ...], *weights: Tensor) -> tuple[Tensor, ...]:
    """Return `cast_weight` of several weights that are used together, all cast by one kernel."""
    if len(weights) == 1:
        return (applied(_CastWeight, weights[0], dtypes[0]),)
    return applied(_CastWeights, dtypes, *weights)


@called_directly
class _CastWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype, ctx.exact = weight.dtype, {}
        return weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.exact.pop(0, grad).to(ctx.dtype), None


@called_directly
class _CastWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtypes: Sequence[torch.dtype], *weights: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes, ctx.exact = [weight.dtype for weight in weights], {}
        return tuple(_cast_together(weights, dtypes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return differentiated_once(_CastWeights.backward, ctx, grads)
        if ctx.exact:
            grads = tuple(ctx.exact.pop(i, grad) for i, grad in enumerate(grads))
        return None, *_cast_together(grads, ctx.dtypes)


def _cast_together(tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Return tensors in other dtypes; those that have theirs, and missing ones, as they are."""
    found: list[Tensor | None] = []
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for x, dtype in zip(tensors, dtypes, strict=True):
        if x is None or x.dtype == dtype:
            found.append(x)
            continue
        sources.append(x)
        targets.append(torch.empty_like(x, dtype=dtype))
        found.append(targets[-1])
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    return found
