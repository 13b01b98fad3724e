"""Every expert on all tokens: experts and tokens kept apart, where a model repeats its tokens in one long list.

    x.repeat(E, 1)                  (T, D) → (E · T, D)
    * gates.reshape(-1, 1)          (E, T) → (E · T, 1)
    .view(E, T, D)                  what a product with a matrix of each expert takes

In the list tokens are the inner factor of a dim, which no device can have a part of. Elementwise calls need no list:
tokens are expanded instead, and what a product gives is not made a list either (Llama 4 in transformers). Legend:
E experts, T tokens, D features.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.experts.forms import CASTS
from autopar.capture.passes.traced_graph import TracedGraph, aten, shape_of
from autopar.capture.passes.views import VIEWS


def repeated_tokens(draft: TracedGraph) -> None:
    """Let elementwise calls on a list of every expert's tokens work on experts and tokens."""
    for node in draft.calls(*VIEWS):
        source = node.args[0]
        if not isinstance(source, fx.Node) or len(shape_of(node)) != len(shape_of(source)) + 1:
            continue
        if source.target in VIEWS and _restores_shape(node, source):
            draft.replace(node, source.args[0])  # type: ignore[arg-type]
        elif shape_of(node)[2:] == shape_of(source)[1:] and _repeats(source):
            with draft.graph.inserting_before(node):
                draft.replace(node, _by_expert_and_token(draft, source, shape_of(node)[:2]))


def _restores_shape(node: fx.Node, before: fx.Node) -> bool:
    """Return whether a view restores the shape of a product by experts that the view `before` had flattened."""
    made = before.args[0]
    return isinstance(made, fx.Node) and made.target is aten.bmm.default and shape_of(made) == shape_of(node)


def _repeats(node: fx.Node) -> bool:
    """Return whether elementwise calls, each with one reader, make this list from repeated tokens."""
    if len(node.users) != 1:
        return False
    if node.target is aten.repeat.default:
        return _num_repeats(node) is not None
    return _is_elementwise(node) and any(_repeats(each) for each in node.all_input_nodes)


def _num_repeats(node: fx.Node) -> int | None:
    """Return the number of times that a call repeats dim 0; None if it repeats another dim."""
    source, repeats = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(repeats, list | tuple)
    alone = len(repeats) == len(shape_of(source)) and all(each == 1 for each in repeats[1:])
    return int(repeats[0]) if alone else None  # type: ignore[arg-type]


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    pointwise = torch.Tag.pointwise in node.target.tags and torch.Tag.nondeterministic_seeded not in node.target.tags
    return (pointwise or node.target in CASTS) and all(
        shape_of(each)[:1] == shape_of(node)[:1] and len(shape_of(each)) == len(shape_of(node))
        for each in node.all_input_nodes
    )


def _by_expert_and_token(draft: TracedGraph, node: fx.Node, leading: tuple[int, ...]) -> fx.Node:
    """Return a list (E · T, ...) as (E, T, ...)."""
    module, rest = node.meta["module"], shape_of(node)[1:]
    if node.target is aten.repeat.default and _num_repeats(node) == leading[0]:
        one = draft.call(aten.unsqueeze.default, node.args[0], 0, module=module)
        return draft.call(aten.expand.default, one, [*leading, *rest], module=module)
    if _is_elementwise(node) and _repeats(node):
        args = [_by_expert_and_token(draft, each, leading) if isinstance(each, fx.Node) else each for each in node.args]
        return draft.call(node.target, *args, module=module, **node.kwargs)  # type: ignore[arg-type]
    source = node.args[0] if node.target in VIEWS else None
    if isinstance(source, fx.Node) and shape_of(source) == leading and rest == (1,):
        return draft.call(aten.unsqueeze.default, source, 2, module=module)
    return draft.call(aten.reshape.default, node, [*leading, *rest], module=module)
