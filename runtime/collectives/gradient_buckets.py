"""Parameters that move together: gradients reduced in buckets while the backward goes on, weights gathered in one go.

A bucket's collective is started by one node of autograd and waited for by another (`left_running`).
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.runtime.collectives.direct import below_autograd, run_eagerly
from autopar.runtime.collectives.gathering import InFlight, Recipe, by_dtype, cast, issued
from autopar.runtime.collectives.layout_moves import waited_for
from autopar.runtime.collectives.left_running import Pending, Wait, applied_inside, behind_wait, started
from autopar.runtime.collectives.mesh_axes import Axis, axis_of, count
from autopar.runtime.collectives.packed_messages import Part, joined, packed, sent
from autopar.runtime.collectives.regather import Regather

_c10d = torch.ops._c10d_functional


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
    all_learn = len(learning) == len(parameters)
    pending, behind = behind_wait(parameters if all_learn else [parameters[i] for i in learning])
    reduced = applied_inside(_ReduceGradients, pending, where, pending, in_place, reduce, *behind)
    return reduced if all_learn else _replaced(parameters, learning, reduced)


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


class _ReduceGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        pending: Pending | None,
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
        writes = ctx.pending is not None and not ctx.in_place
        if len(grads) == 1 and grads[0] is not None:  # is a message as it is
            return None, None, None, None, _reduced_alone(ctx, grads[0], writes)
        reduced: list[Tensor | None] = [None] * len(grads)
        for dtype, group in by_dtype(grads).items():
            own = joined(list(group.values()), ctx.reduce or dtype, writes=writes)
            # Wait first if the result is cast.
            flat = _reduced(own, ctx.axis, ctx.pending if own.dtype == dtype else None).to(dtype)
            pieces = flat.split_with_sizes([grad.numel() for grad in group.values()])
            for (i, grad), piece in zip(group.items(), pieces, strict=True):
                reduced[i] = piece.view(grad.shape)
        return None, None, None, None, *reduced


def _reduced_alone(ctx: Any, grad: Tensor, writes: bool) -> Tensor:
    own = grad.to(ctx.reduce or grad.dtype, copy=writes).contiguous()
    return _reduced(own, ctx.axis, ctx.pending if own.dtype == grad.dtype else None).to(grad.dtype)


_SAME_VALUES = (Wait._backward_cls, _ReduceGradients._backward_cls)  # type: ignore[attr-defined]
"""Nodes of the autograd graph whose inputs have the values of their outputs, in the same order."""


def _reduced(own: Tensor, axis: Axis, pending: Pending | None) -> Tensor:
    """Return the sum over the axis of a tensor that nobody else holds; in place where it may be left running."""
    count("all_reduce", axis, own.numel() * own.itemsize)
    if pending is None or torch.is_anomaly_enabled():  # anomaly mode reads a node's outputs at once
        return waited_for(below_autograd(_c10d.all_reduce.default, own, "sum", axis.group))
    result = run_eagerly(_c10d.all_reduce_.default, own, "sum", axis.group)
    pending.results += (result,)
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
        pending, behind = behind_wait([shards[i] for i in learning])
        taken = _replaced(shards, learning, behind)
        gathered = applied_inside(
            _GatherParameters, pending, recipe, in_flight, tuple(learning), pending, reduce, *taken
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
        weights = tuple([gathered[i] for i in regather])
        Regather.current.watch(again, _values(shards, regather), weights, layer)
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
    pending, behind = behind_wait([shards[i] for i in learning])
    recipe = Recipe(where, dims, sizes, ())
    taken = _replaced(shards, learning, behind)
    return applied_inside(_UseGathered, pending, recipe, tuple(learning), pending, reduce, *taken, *wholes)


class _GatherParameters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        in_flight: InFlight | None,
        learning: tuple[int, ...],
        pending: Pending | None,
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
            found = piece.view(part.shape)
            scattered[i] = (part.received(found) if part.first else found).to(ctx.dtypes[i])
    return scattered


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in the dtype of its use; its gradient gets back the dtype in which it is stored."""
    return _CastWeight.apply(weight, dtype)


def cast_weights(dtypes: tuple[torch.dtype, ...], *weights: Tensor) -> tuple[Tensor, ...]:
    """Return `cast_weight` of several weights that are used together, all cast by one kernel."""
    if len(weights) == 1:
        return (cast_weight(weights[0], dtypes[0]),)
    return _CastWeights.apply(dtypes, *weights)


class _CastWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype, ctx.exact = weight.dtype, {}
        return weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.exact.pop(0, grad).to(ctx.dtype), None


class _CastWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtypes: Sequence[torch.dtype], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes, ctx.exact = [weight.dtype for weight in weights], {}
        return tuple(_cast_together(weights, dtypes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        positions = [i for i, grad in enumerate(grads) if grad is not None]
        given = [ctx.exact.pop(i, grads[i]) for i in positions]
        found: list[Tensor | None] = [None] * len(grads)
        for i, grad in zip(positions, _cast_together(given, [ctx.dtypes[i] for i in positions]), strict=True):
            found[i] = grad
        return None, *found


def _cast_together(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return tensors in other dtypes; those that have theirs as they are."""
    found = [
        x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x, dtype in zip(tensors, dtypes, strict=True)
    ]
    new = [i for i, x in enumerate(tensors) if found[i] is not x]
    if new:
        targets, sources = [found[i] for i in new], [tensors[i] for i in new]
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    return found
