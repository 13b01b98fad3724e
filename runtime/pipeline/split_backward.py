"""A stage's backward in two: the gradients of its inputs, which the stage before waits for, and those of its weights.

The first half runs the nodes of the autograd graph that lie between the outputs and the inputs. It notes what arrives
at the first such node above every weight: there the second half begins, and goes down to the weights alone (Qi et al.,
"Zero Bubble Pipeline Parallelism", ICLR 2024). An output that reaches a weight on a path without those nodes is a
beginning too; an example is the embedding of a decoder, sent together with the output of the encoder.

Weights with a beginning in common are done together. Where one beginning lies below another, what comes down to it in
the second half is replaced by what it was given in the first, which holds that already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.runtime.collectives.regather import Regather

Given = tuple[Tensor | None, ...]
"""Gradients that arrive at a node, one entry per output of its forward."""


@dataclass(slots=True, eq=False)
class WeightGroup:
    """Weights whose gradients are still to be made, and where to begin."""

    weights: list[Tensor] = field(default_factory=list)
    nodes: dict[Node, Given] = field(default_factory=dict)
    outputs: dict[GradientEdge, Tensor] = field(default_factory=dict)


def backward_to_inputs(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Any],
    weights: Sequence[Tensor],
) -> tuple[Given, list[WeightGroup]]:
    """Return the gradients of the inputs, and what `backward_to_weights` needs; outputs without gradients have ones."""
    given = [None] * len(outputs) if output_gradients is None else output_gradients
    pairs = [
        (output, torch.ones_like(output) if gradient is None else gradient)
        for output, gradient in zip(outputs, given, strict=True)
        if output.requires_grad and (gradient is not None or output_gradients is None)
    ]
    roots: dict[GradientEdge, Tensor] = {}
    for output, gradient in pairs:  # one tensor may be given out twice
        edge = get_gradient_edge(output)
        roots[edge] = roots[edge] + gradient if edge in roots else gradient
    learning = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
    above = _consumers(edge.node for edge in roots)
    between = _upward([get_gradient_edge(inputs[i]).node for i in learning], above, frozenset())[0]
    groups = _groups([w for w in weights if w.requires_grad], roots, above, between)
    handles = [
        node.register_prehook(lambda given, group=group, node=node: group.nodes.__setitem__(node, given))
        for group in groups
        for node in group.nodes
    ]
    found: list[Tensor | None] = [None] * len(inputs)
    if pairs and learning:
        made = torch.autograd.grad(
            [output for output, _ in pairs],
            [inputs[i] for i in learning],
            [gradient for _, gradient in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        for i, gradient in zip(learning, made, strict=True):
            found[i] = gradient
    for handle in handles:
        handle.remove()
    return tuple(found), groups


def backward_to_weights(groups: Sequence[WeightGroup]) -> None:
    """Add the gradients of the weights to their `.grad`, those that are used last first, and run hooks behind that."""
    for group in reversed(groups):
        begun = dict(group.outputs)
        for node, given in group.nodes.items():
            begun.update({GradientEdge(node, i): each for i, each in enumerate(given) if each is not None})
        handles = [
            node.register_prehook(lambda _, given=given: given) for node, given in group.nodes.items() if len(begun) > 1
        ]
        gradients: Sequence[Tensor | None] = [None] * len(group.weights)
        if begun:
            with Regather.out_of_order():
                gradients = torch.autograd.grad(
                    list(begun), group.weights, list(begun.values()), retain_graph=True, allow_unused=True
                )
        for handle in handles:
            handle.remove()
        for weight, gradient in zip(group.weights, gradients, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
                for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
                    hook(weight)


def _consumers(roots: Any) -> dict[Node, list[Node]]:
    above: dict[Node, list[Node]] = defaultdict(list)
    seen, waiting = set(), list(roots)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for below, _ in node.next_functions:
            if below is not None:
                above[below].append(node)
                waiting.append(below)
    return above


def _upward(
    start: Sequence[Node], above: dict[Node, list[Node]], until: frozenset[Node]
) -> tuple[set[Node], set[Node]]:
    """Return all nodes from `start` upward until `until`, and the first ones in `until`."""
    passed: set[Node] = set()
    visited: set[Node] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node in until:
            visited.add(node)
        elif node not in passed:
            passed.add(node)
            waiting.extend(above.get(node, ()))
    return passed, visited


def _groups(
    weights: Sequence[Tensor], roots: dict[GradientEdge, Tensor], above: dict[Node, list[Node]], between: set[Node]
) -> list[WeightGroup]:
    """Return the weights in groups that have no beginning in common."""
    inner = frozenset(between)
    of_beginning: dict[object, WeightGroup] = {}
    groups: list[WeightGroup] = []
    for weight in weights:
        passed, visited = _upward([get_gradient_edge(weight).node], above, inner)
        direct = {edge: gradient for edge, gradient in roots.items() if edge.node in passed}
        joined = WeightGroup([weight], dict.fromkeys(visited, ()), direct)
        for beginning in (*visited, *direct):
            other = of_beginning.get(beginning)
            if other is not None and other is not joined and other in groups:
                groups.remove(other)
                joined.weights = [*other.weights, *joined.weights]
                joined.nodes |= other.nodes
                joined.outputs |= other.outputs
        groups.append(joined)
        of_beginning.update(dict.fromkeys((*joined.nodes, *joined.outputs), joined))
    return groups
