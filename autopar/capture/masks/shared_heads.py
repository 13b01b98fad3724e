"""Heads of keys and values that a model repeats for query heads that share them, as transformers' `repeat_kv` does."""

from __future__ import annotations

from torch import fx

from autopar.capture.passes.traced_graph import aten, shape_of
from autopar.capture.passes.views import VIEWS


def without_repeats(keys: fx.Node, values: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the keys and values before a model repeats their heads for the query heads.

    Both have the shape [batch, heads, positions, features]. Return the inputs unless both are repeated from equally
    many heads.
    """
    found = _before_repeating_heads(keys), _before_repeating_heads(values)
    if found[0] is None or found[1] is None or shape_of(found[0])[1] != shape_of(found[1])[1]:
        return keys, values
    return found[0], found[1]


def _before_repeating_heads(node: fx.Node) -> fx.Node | None:
    """Return the input of view(expand(unsqueeze(x, 2))), which repeats each head; None for other calls."""
    expanded = node.args[0] if node.target in VIEWS else None
    if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
        return None
    single = expanded.args[0]
    if not isinstance(single, fx.Node) or single.target is not aten.unsqueeze.default or single.args[1] != 2:
        return None
    x = single.args[0]
    assert isinstance(x, fx.Node)
    if len(shape_of(x)) != 4:
        return None
    batch, heads, *each = shape_of(x)
    times = shape_of(expanded)[2]
    alike = shape_of(expanded) == (batch, heads, times, *each) and shape_of(node) == (batch, heads * times, *each)
    return x if alike else None
