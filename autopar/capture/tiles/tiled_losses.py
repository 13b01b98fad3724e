"""Losses in tiles, where the user asks for them: `Memory(loss_tiles=…)`.

    linear(hidden, weight, bias) → slices of positions, casts, views → cross_entropy(…, target)
        becomes  linear_cross_entropy(hidden, weight, bias, target, …, tiles)

Hidden states and targets keep their samples and positions apart, so that each may be split. Positions that are sliced
off the logits, as those of the last token, become targets that are ignored: their number stays one that divides.
Nothing else may read the logits, which are nowhere any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from autopar.capture.passes.refused_calls import where
from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of, value_of
from autopar.capture.passes.views import VIEWS
from autopar.capture.rows.labels import ONE_TENSOR, Cut, cut_of, cuts_positions, in_rows, with_ignored
from autopar.errors import CaptureError, warn_user
from autopar.ir.program.operators.linear_cross_entropy import CHOSEN, LINEAR_CROSS_ENTROPY, MEAN, SUM, wide
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY
from autopar.ir.program.program import Program

AUTO: Literal["auto"] = "auto"
MOST = 64
"""Tiles, where nobody says how many: each reads the weight, and adds to its gradient, once more."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """Request to tile everything that can be tiled, each loss or MLP with as few tiles as bound its memory.

    The logits of a loss then take no more bytes than the gradients, and what an MLP works on no more than the gradients
    of its weights, if samples and positions are split over all devices. Parts that cannot be tiled cause neither a
    warning nor an error. The number of tiles is at most `MOST`.
    """

    num_devices: int


LossTiles = int | Literal["auto", False] | Fitting | None
"""A number of tiles; "auto": a plan chooses it where losses can be taken so; None or False: the model as it is."""
LOSSES = (aten.cross_entropy_loss.default, CROSS_ENTROPY)
TRANSPOSED = (aten.t.default, aten.numpy_T.default)
PERMUTING = (
    aten.permute.default,
    aten.transpose.int,
    aten.movedim.int,
    aten.moveaxis.int,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.mT.default,
)
ALONE = (
    "the loss alone is to be returned (of a Hugging Face model, by a module whose forward returns "
    "model(input_ids, labels=labels).loss)"
)


@dataclass(frozen=True, slots=True)
class _Head:
    """Linear layer that makes the logits (…, V), and the slices of positions taken from them before the loss."""

    node: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    slices: tuple[Cut, ...]
    """(dim, positions cut off before, and behind) in the order in which they were taken."""


class _UnfitError(Exception):
    """Why a loss cannot be taken in tiles."""


def takes_tiles(draft: TracedGraph) -> bool:
    """Return whether a model has a loss that could run in tiles but does not yet."""
    return any(isinstance(_head_of(loss), _Head) for loss in draft.calls(*LOSSES))


def has_tiles(program: Program) -> bool:
    """Return whether a captured model has a loss in tiles."""
    return any(node.target is LINEAR_CROSS_ENTROPY for node in program.graph.nodes)


def tiled_losses(draft: TracedGraph, tiles: int | Literal["auto"] | Fitting, training: bool) -> None:
    """Take the cross-entropies of linear layers in tiles: all of them, or without a number those that can be.

    Raises CaptureError for a number of tiles and a model in training with none, or with one that cannot be taken so.
    """
    requested = "always" if tiles == AUTO else tiles
    message = f"Memory(loss_tiles={requested!r}) computes the cross-entropy of a linear layer tile by tile"
    losses = draft.calls(*LOSSES)
    if not losses and training:
        _refuse(
            f"{message}, and the forward computes none. Compute it there: give the model its labels, and return the "
            "loss.",
            tiles,
        )
    for loss in losses:
        head = _head_of(loss)
        if isinstance(head, str):
            if training:
                place = where(loss.meta["module"])
                _refuse(f"{message}, and that in {place} cannot be: {head}, or leave loss_tiles out.", tiles)
            continue
        with draft.graph.inserting_before(loss):
            new = _in_tiles(draft, loss, head, _number(head, tiles))
        draft.replace(loss, new)


def _number(head: _Head, tiles: int | Literal["auto"] | Fitting) -> int:
    if not isinstance(tiles, Fitting):
        return CHOSEN if tiles == AUTO else tiles
    hidden, weight = value_of(head.hidden), value_of(head.weight)
    (num_classes, features), narrow = weight.shape, hidden.dtype.itemsize
    added = wide(hidden.dtype).itemsize
    rows = -(-hidden.numel() // (features * tiles.num_devices))
    logits = rows * num_classes * (added if added == narrow else added + narrow)
    gradients = features * (rows * narrow + num_classes * added)
    return min(-(-logits // gradients), MOST)


def _refuse(text: str, tiles: int | Literal["auto"] | Fitting) -> None:
    if isinstance(tiles, int):
        raise CaptureError(text)
    if tiles == AUTO:
        warn_user(f"{text} It stays in one piece.")


def _head_of(loss: fx.Node) -> _Head | str:
    """Return the linear layer whose outputs a cross-entropy takes, or why it cannot be taken in tiles."""
    try:
        return _found_head(loss)
    except _UnfitError as reason:
        return str(reason)


def _found_head(loss: fx.Node) -> _Head:
    """Return the linear layer whose outputs a cross-entropy takes.

    Raises _UnfitError if other operations lie between, or if others read the logits.
    """
    given = arguments(loss)
    _check_kind(given)
    node = given["self"]
    if len(shape_of(node)) < 2:
        raise _UnfitError("it has logits of one row alone; give it several rows")
    if loss.target is not CROSS_ENTROPY and len(shape_of(node)) > 2:
        _only_user(node)
        node = _classes_last(node)
    num_classes = shape_of(node)[-1]
    slices: list[Cut] = []
    while True:
        _only_user(node)
        source = node.args[0] if node.args else None  # an input has none
        if node.target in PRODUCTS:
            return PRODUCTS[node.target](node, tuple(reversed(slices)))
        if not isinstance(source, fx.Node):
            break
        if cuts_positions(node):
            slices.append(cut_of(node))
        elif not _keeps_rows(node, source, num_classes, sliced=bool(slices)):
            break
        node = source
    raise _UnfitError(
        f"{_name(node)} in {where(node.meta.get('module', ''))} makes its logits; needed is a linear layer, with "
        "nothing but views, slices of positions and wider dtypes behind it. Scale hidden states instead of logits"
    )


def _check_kind(given: dict[str, Any]) -> None:
    kind = given["reduction"]
    faults = {
        "its targets are probabilities; give numbers of classes": value_of(given["target"]).dtype.is_floating_point,
        "it has weights of classes (weight=…); leave them out": given["weight"] is not None,
        f"it smooths labels (label_smoothing={given['label_smoothing']}); give 0": given["label_smoothing"] > 0,
        'it has a number for each row (reduction="none"); take "mean" or "sum"': kind not in (MEAN, SUM),
    }
    for fault, holds in faults.items():
        if holds:
            raise _UnfitError(fault)


def _only_user(node: fx.Node) -> None:
    """Raise _UnfitError if the loss is not the only reader of the logits."""
    if len(node.users) < 2:
        return
    if any(user.op == "output" for user in node.users):
        raise _UnfitError(f"its logits are returned, too; {ALONE}")
    names = ", ".join(dict.fromkeys(f"{_name(user)} in {where(user.meta['module'])}" for user in node.users))
    raise _UnfitError(f"its logits are read by others, too ({names}); {ALONE}")


def _classes_last(node: fx.Node) -> fx.Node:
    """Return the logits with their classes last, as a linear layer makes them, for a loss with classes in dim 1.

    Raises _UnfitError if the logits are no permutation of such a tensor.
    """
    source, ndim = node.args[0] if node.args else None, len(shape_of(node))
    moved = (0, ndim - 1, *range(1, ndim - 1))
    if (
        node.target not in PERMUTING
        or not isinstance(source, fx.Node)
        or _sorted_strides(node) != _sorted_strides(source, moved)
    ):
        raise _UnfitError(
            f"its logits have the shape {list(shape_of(node))} and are made by {_name(node)}; give it the outputs of a "
            "linear layer as rows (logits.flatten(0, -2)), or with their last dim moved to be the second"
        )
    return source


def _sorted_strides(node: fx.Node, order: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the size and stride of each dim, sorted."""
    found = list(zip(shape_of(node), value_of(node).stride(), strict=True))
    return [found[dim] for dim in order] or found


def _linear(node: fx.Node, slices: tuple[Cut, ...]) -> _Head:
    given = arguments(node)
    return _Head(node, given["input"], given["weight"], given["bias"], slices)


def _product_with_transposed(node: fx.Node, slices: tuple[Cut, ...]) -> _Head:
    """Return a product with a transposed matrix, as `x @ weight.t()`."""
    x, weight = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    source = weight.args[0] if weight.args else None
    swapped = weight.target in TRANSPOSED or (
        weight.target is aten.transpose.int and {dim % 2 for dim in weight.args[1:]} == {0, 1}  # type: ignore[operator]
    )
    if not swapped or not isinstance(source, fx.Node) or len(shape_of(weight)) != 2 or len(shape_of(x)) < 2:
        raise _UnfitError(
            f"{_name(node)} in {where(node.meta['module'])} makes its logits, of a matrix that is not transposed; use "
            "nn.Linear, or x @ weight.t()"
        )
    return _Head(node, x, source, None, slices)


PRODUCTS: dict[object, Callable[[fx.Node, tuple[Cut, ...]], _Head]] = {
    aten.linear.default: _linear,
    aten.matmul.default: _product_with_transposed,
    aten.mm.default: _product_with_transposed,
}


def _keeps_rows(node: fx.Node, source: fx.Node, num_classes: int, sliced: bool) -> bool:
    """Return whether a call gives the same rows in the same order.

    Such calls are views after which nothing is sliced, casts to a wider dtype, and copies.
    """
    if node.target in VIEWS:
        return shape_of(source)[-1:] == (num_classes,) == shape_of(node)[-1:] and not sliced
    before, after = value_of(source).dtype, value_of(node).dtype
    widens = node.target is aten.to.dtype and torch.promote_types(before, after) == after
    return widens or node.target in ONE_TENSOR


def _in_tiles(draft: TracedGraph, loss: fx.Node, head: _Head, tiles: int) -> fx.Node:
    given, module = arguments(loss), head.node.meta["module"]
    hidden, target = head.hidden, given["target"]
    while _flattens_positions(hidden) and not head.slices:
        hidden = hidden.args[0]
        assert isinstance(hidden, fx.Node)
    rows = list(shape_of(hidden)[:-1])
    for dim, before, behind in head.slices:
        rows[dim] -= before + behind
    target = in_rows(draft, target, tuple(rows), module)
    target = with_ignored(draft, target, reversed(head.slices), given["ignore_index"], module)
    dtype = value_of(given["self"]).dtype
    call = (hidden, head.weight, head.bias, target, given["reduction"], given["ignore_index"], dtype, tiles)
    return draft.call(LINEAR_CROSS_ENTROPY, *call, module=module)


def _flattens_positions(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return (
        node.target in VIEWS
        and isinstance(source, fx.Node)
        and len(shape_of(source)) > len(shape_of(node)) == 2
        and shape_of(source)[-1] == shape_of(node)[-1]
    )


def _name(node: fx.Node) -> str:
    return f"the input {node.name}" if node.op == "placeholder" else str(node.target)
