"""Classification of the numbers with which an additive mask hides keys: -inf, the lowest finite ones, or others.

The softmax of a row whose scores all are -1e9 is the mean of its values, or what rounding leaves of it, and the blocks
of such a row are not merged exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.masks.reading import FILLED
from autopar.capture.passes.traced_graph import aten, shape_of, value_of
from autopar.ir.program.operators.attention.expressions import FUNCTIONS

Hiding = Literal["infinity", "lowest", "other"]
LOWEST = -1e30
"""Below it no number of float32, float64 or bfloat16 leaves anything of a score that is added to it."""
LARGE = 1e4
"""Finite numbers above, or below its negative, may be there to hide keys."""
WITH_NUMBERS = frozenset({*FUNCTIONS, *FILLED, "scalar_tensor"})
"""Operations whose numbers are values, not sizes and places."""


def hiding_of(mask: fx.Node) -> Hiding:
    """Return the kind of numbers with which a mask may hide keys; "other" also if an input or buffer supplies them."""
    num_keys = shape_of(mask)[-1]
    found: Hiding = "infinity"
    seen, left = {mask}, [mask]
    while left:
        node = left.pop()
        if _is_given(node, num_keys):
            return "other"
        for number in _large_numbers(node):
            if number > LOWEST:
                return "other"
            found = "lowest"
        left += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return found


def _large_numbers(node: fx.Node) -> Iterator[float]:
    """Yield the finite numbers that contribute to a node's values; for a constant, its highest and its lowest."""
    if node.op == "placeholder":
        value = node.meta["source"].value
        if value is not None and value.is_floating_point():
            yield from _extremes(value[value.isfinite() & (value.abs() >= LARGE)])
        return
    name = getattr(node.target, "_schema", aten.add.Tensor._schema).name.partition("::")[2]
    for number in pytree.tree_leaves((node.args, node.kwargs)) if name in WITH_NUMBERS else []:
        if isinstance(number, float | int) and math.isfinite(number) and abs(number) >= LARGE:
            yield number


def _extremes(large: Tensor) -> tuple[float, ...]:
    return (large.min().item(), large.max().item()) if large.numel() else ()


def _is_given(node: fx.Node, num_keys: int) -> bool:
    """Return whether a node is an input or buffer of unknown floating-point values with a dim of `num_keys`."""
    if node.op != "placeholder" or node.meta["source"].value is not None:
        return False
    return value_of(node).is_floating_point() and num_keys in shape_of(node)
