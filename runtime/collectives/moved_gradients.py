"""Gradients of a step's leaves, taken back through the moves of their weights.

Leaves add gradients up over micro-batches, and the moves reduce the sums once. In the last backward of a step a bucket
is reduced as soon as the last gradient of its leaves is there, and left running: its gradients are taken back up to the
node that waits (`left_running.waits`), and the rest of the way, with the wait, at the end of the step.

Every rank must start its collectives in the same order. The autograd engine accumulates gradients that are ready at
once in no order that all ranks share. So buckets start in an order that the graph gives: that of the first use of their
weights, the last one first. A bucket that is complete sooner waits for those before it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from autopar.runtime.collectives.left_running import waits


@dataclass(slots=True, eq=False)
class _Bucket:
    """Weights whose gradients are reduced together; without a collective that may be left running, the others."""

    values: list[Tensor] = field(default_factory=list)
    """Weights as the moves give them."""
    leaves: list[Tensor] = field(default_factory=list)
    waits: dict[Node, None] = field(default_factory=dict)
    """The nodes up to which gradients are taken back at once."""
    first_use: int = 0
    missing: set[int] = field(default_factory=set)
    """Ids of the leaves whose last gradient is yet to come."""


class MovedGradients:
    """The way back of the gradients of one step."""

    def __init__(self, moved: Sequence[Tensor], leaves: Sequence[Tensor], first_uses: Sequence[int]) -> None:
        """`first_uses` are the places in the graph at which each weight is used first; the three run in parallel."""
        self._others = _Bucket()
        self._buckets: list[_Bucket] = []
        of_node: dict[Node, _Bucket] = {}
        known: dict[Node, tuple[Node, ...]] = {}
        for value, leaf, first_use in zip(moved, leaves, first_uses, strict=True):
            if leaf is value or not value.requires_grad:
                continue
            waits = known.get(value.grad_fn) if value.grad_fn is not None else ()
            waits = _last_waits(value.grad_fn, known) if waits is None else waits
            bucket = of_node.get(waits[0]) if len(waits) == 1 else None
            if bucket is None:
                self._add(value, leaf, first_use, waits, of_node)
            else:
                bucket.values.append(value)
                bucket.leaves.append(leaf)
                bucket.first_use = min(bucket.first_use, first_use)
        self._to_start = deque(sorted(self._buckets, key=lambda each: -each.first_use))
        self._results: list[tuple[GradientEdge, Tensor]] = []

    def _add(
        self, value: Tensor, leaf: Tensor, first_use: int, waits: Sequence[Node], of_node: dict[Node, _Bucket]
    ) -> None:
        if not waits:
            self._others.values.append(value)
            self._others.leaves.append(leaf)
            return
        joined = _Bucket([value], [leaf], dict.fromkeys(waits), first_use)
        for bucket in dict.fromkeys(of_node[node] for node in waits if node in of_node):
            self._buckets.remove(bucket)
            joined = _Bucket(
                [*bucket.values, *joined.values],
                [*bucket.leaves, *joined.leaves],
                bucket.waits | joined.waits,
                min(bucket.first_use, joined.first_use),
            )
        self._buckets.append(joined)
        of_node.update(dict.fromkeys(joined.waits, joined))

    def start_in_next_backward(self) -> None:
        """Reduce the gradients of every bucket as soon as the backward that comes next has made the last of them."""
        is_first = all(leaf.grad is None for bucket in self._buckets for leaf in bucket.leaves)
        for number, bucket in enumerate(self._buckets):
            # A leaf to which no backward before has given anything gets nothing in the last one either.
            awaited = [leaf for leaf in bucket.leaves if is_first or leaf.grad is not None]
            bucket.missing = set(map(id, awaited))
            for leaf in awaited:
                leaf.register_post_accumulate_grad_hook(partial(_has_come, weakref.ref(self), number))

    def has_come(self, number: int, leaf: Tensor) -> None:
        """Take note of the last gradient of a leaf in a bucket."""
        self._buckets[number].missing.discard(id(leaf))
        while self._to_start and not self._to_start[0].missing:
            self._start(self._to_start.popleft())

    def _start(self, bucket: _Bucket) -> None:
        values, gradients = _taken(bucket)
        if values:
            edges = [GradientEdge(node, i) for node in bucket.waits for i in range(len(node.next_functions))]
            found = _run_backward(values, gradients, edges)
            self._results += [(edge, each) for edge, each in zip(edges, found, strict=True) if each is not None]

    def finish(self) -> None:
        """Start what has not been started, wait for all, and give the gradients to what was moved."""
        while self._to_start:
            self._start(self._to_start.popleft())
        values, gradients = _taken(self._others)
        roots: list[GradientEdge | Tensor] = [*values]
        behind: dict[Any, Any] = {edge.node: edge.node.next_functions for edge, _ in self._results}
        for node in behind:
            node.reductions.wait()
        for edge, gradient in self._results:
            before, number = behind[edge.node][edge.output_nr]
            leaf = getattr(before, "variable", None)
            if leaf is not None and _may_take(leaf, gradient):
                leaf.grad = gradient  # autograd would copy what is also held here
            else:
                roots.append(GradientEdge(before, number))
                gradients.append(gradient)
        self._results.clear()
        if roots:
            _run_backward(roots, gradients, ())


def _run_backward(
    roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor], edges: Sequence[GradientEdge]
) -> Sequence[Tensor | None]:
    """Run what `torch.autograd.grad` does, or `backward` if no edges are given; gradients have the shapes of roots.

    PyTorch compares these shapes one by one, in Python.
    """
    return _engine_run_backward(  # pyright: ignore[reportReturnType]
        tuple(roots), tuple(gradients), False, False, tuple(edges), allow_unreachable=True, accumulate_grad=not edges
    )


def _may_take(leaf: Tensor, gradient: Tensor) -> bool:
    """Return whether autograd would do no more with a leaf's gradient than to put it, or a copy, into `.grad`."""
    is_alike = gradient.dtype == leaf.dtype and gradient.stride() == leaf.stride()
    return is_alike and leaf.grad is None and not (leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _has_come(gradients: weakref.ref[MovedGradients], number: int, leaf: Tensor) -> None:
    """Handle a leaf's gradient; the hook must not keep the leaf's owner alive."""
    known = gradients()
    if known is not None:
        known.has_come(number, leaf)


def _taken(bucket: _Bucket) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of a bucket that have learned, and their gradients, which their leaves let go of.

    A gradient may be of higher precision than its weight. Autograd casts a gradient to the dtype of its tensor before
    it is summed: what has cast the tensor gets it apart, unless other weights are made of that tensor.
    """
    made_of: set[tuple[Node, int]] | None = None
    values: list[Tensor] = []
    gradients: list[Tensor] = []
    for value, leaf in zip(bucket.values, bucket.leaves, strict=True):
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:
            continue
        exact = getattr(value.grad_fn, "exact", None)
        if exact is not None and gradient.dtype != value.dtype:
            made_of = _made_of(bucket.values) if made_of is None else made_of
            if (value.grad_fn, value.output_nr) not in made_of:
                exact[value.output_nr] = gradient
        values.append(value)
        gradients.append(gradient)
    return values, gradients


def _made_of(weights: Sequence[Tensor]) -> set[tuple[Node, int]]:
    """Return the outputs of nodes that weights are made of, with those that these are made of."""
    found: set[tuple[Node, int]] = set()
    left, known = [weight.grad_fn for weight in weights], set[Node]()
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        for before, number in node.next_functions:
            if before is not None:
                found.add((before, number))
                left.append(before)
    return found


def _last_waits(node: Node | None, known: dict[Node, tuple[Node, ...]]) -> tuple[Node, ...]:
    """Return the nodes at and behind a node that wait for a bucket behind which there is no other one.

    `known` has those of nodes visited before: all weights of a bucket have one node in common.
    """
    if node is None:
        return ()
    found = known.get(node)
    if found is None:
        behind: dict[Node, None] = {}
        for before, _ in node.next_functions:
            behind.update(dict.fromkeys(_last_waits(before, known)))
        found = known[node] = tuple(behind) or ((node,) if waits(node) else ())
    return found
