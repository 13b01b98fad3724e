"""Split of a packed output along its last dim: split, chunk, slices, or a view that makes the slices a dim.

The last is what nn.MultiheadAttention and many vision models do: view(…, 3, e), some permutation, then select or
unbind along the new dim. Each dim is followed by a label, so that the slice's own dims can be put in the same order.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from autopar.capture.passes.traced_graph import TracedGraph, arguments, aten, shape_of

Label = int | Literal["piece", "one"]
"""The slice's own dim, the dim that counts slices, or a dim of size one that was put in."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Outputs `start` to `end` of a packed projection, and the node that has been them until now."""

    node: fx.Node
    start: int
    end: int
    shape: tuple[int, ...] | None = None
    """The shape of its own dims before they were permuted; None: as the product gives them."""
    labels: tuple[Label, ...] = ()

    def arranged(self, draft: TracedGraph, product: fx.Node) -> fx.Node:
        """Return the matmul of this slice, with its dims as the node has had them."""
        if self.shape is None:
            return product
        module = self.node.meta["module"]
        if shape_of(product) != self.shape:
            product = draft.call(aten.view.default, product, list(self.shape), module=module)
        order = [label for label in self.labels if isinstance(label, int)]
        if order != sorted(order):
            product = draft.call(aten.permute.default, product, order, module=module)
        for dim, label in enumerate(self.labels):
            if label == "one":
                product = draft.call(aten.unsqueeze.default, product, dim, module=module)
        return product


def pieces_of(output: fx.Node) -> list[Piece] | None:
    """Return the slices of a packed output; None if something reads it otherwise."""
    users = list(output.users)
    if len(users) == 1 and users[0].target in (aten.view.default, aten.reshape.default):
        return _pieces_of_view(output, users[0])
    pieces: list[Piece] = []
    for user in users:
        found = _slices_taken(output, user)
        if found is None:
            return None
        pieces += found
    covered = sorted({(piece.start, piece.end) for piece in pieces})
    apart = all(before[1] <= after[0] for before, after in itertools.pairwise(covered))
    return pieces if apart and len(covered) > 1 else None


def _slices_taken(output: fx.Node, user: fx.Node) -> list[Piece] | None:
    """Return the slices that one split, chunk or slice takes."""
    last, size = len(shape_of(output)) - 1, shape_of(output)[-1]
    if user.target in (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes):
        if arguments(user)["dim"] % (last + 1) != last or any(u.target is not operator.getitem for u in user.users):
            return None
        ends = [0]
        for piece in user.meta["val"]:
            ends.append(ends[-1] + piece.shape[-1])
        return [Piece(taken, ends[i], ends[i + 1]) for taken in user.users if isinstance(i := taken.args[1], int)]
    if user.target is aten.slice.Tensor:
        given = arguments(user)
        if given["dim"] % (last + 1) != last or given["step"] != 1:
            return None
        start, end, _ = slice(given["start"], given["end"]).indices(size)
        return [Piece(user, start, end)]
    return None


def _pieces_of_view(output: fx.Node, view: fx.Node) -> list[Piece] | None:
    """Return the slices of a view that makes them a dim, permutes, and then selects."""
    before, after = shape_of(output), shape_of(view)
    leading = len(before) - 1
    if len(after) <= len(before) or after[:leading] != before[:leading] or after[leading] < 2:
        return None
    shape = (*after[:leading], *after[leading + 1 :])
    labels: list[Label] = [*range(leading), "piece", *range(leading, len(shape))]
    node = view
    while True:
        taken = _selections(node, labels)
        if taken is not None:
            break
        user = next(iter(node.users), None)
        if user is None or len(node.users) != 1 or user.target not in MOVES:
            return None
        MOVES[user.target](labels, arguments(user))
        if len(labels) != len(shape_of(user)) or "piece" not in labels:
            return None
        node = user
    size = before[-1] // after[leading]
    rest: tuple[Label, ...] = tuple(label for label in labels if label != "piece")
    return [Piece(piece, index * size, (index + 1) * size, shape, rest) for piece, index in taken]


def _selections(node: fx.Node, labels: list[Label]) -> list[tuple[fx.Node, int]] | None:
    """Return (slice, its index) if all users of `node` select from the dim that counts slices."""
    dim, found = labels.index("piece"), []
    for user in node.users:
        if user.target not in (aten.select.int, aten.unbind.int) or arguments(user)["dim"] % len(labels) != dim:
            return None
        if user.target is aten.select.int:
            found.append((user, arguments(user)["index"] % shape_of(node)[dim]))
        else:
            found += [(piece, piece.args[1]) for piece in user.users]
    return found


def _move_transpose(labels: list[Label], given: dict[str, Any]) -> None:
    a, b = given["dim0"], given["dim1"]
    labels[a], labels[b] = labels[b], labels[a]


def _move_permute(labels: list[Label], given: dict[str, Any]) -> None:
    labels[:] = [labels[dim] for dim in given["dims"]]


def _move_unsqueeze(labels: list[Label], given: dict[str, Any]) -> None:
    labels.insert(given["dim"] % (len(labels) + 1), "one")


def _move_squeeze(labels: list[Label], given: dict[str, Any]) -> None:
    if labels[given["dim"]] == "one":
        del labels[given["dim"]]


def _move_nothing(labels: list[Label], given: dict[str, Any]) -> None:
    pass


MOVES: dict[Any, Callable[[list[Label], dict[str, Any]], None]] = {
    aten.transpose.int: _move_transpose,
    aten.permute.default: _move_permute,
    aten.unsqueeze.default: _move_unsqueeze,
    aten.squeeze.dim: _move_squeeze,
    aten.contiguous.default: _move_nothing,
}
