"""Whether a mask that is added to the scores may hide keys by large finite numbers, and not by -inf alone.

The softmax of a row whose scores all are -1e9 is the mean of its values, or what rounding leaves of it, and the blocks
of such a row are not merged exactly.
"""

from __future__ import annotations

import math

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.masks.reading import FILLED
from autopar.capture.passes.traced_graph import aten, shape_of, value_of
from autopar.program.operators.attention.expressions import FUNCTIONS

LARGE = 1e4
"""Finite numbers above, or below its negative, may be there to hide keys."""
WITH_NUMBERS = frozenset({*FUNCTIONS, *FILLED, "scalar_tensor"})
"""Operations whose numbers are values, not sizes and places."""


def hides_by_numbers(mask: fx.Node) -> bool:
    """Whether large finite numbers, or numbers for keys that are not known, have a part in a mask."""
    num_keys = shape_of(mask)[-1]
    seen, left = {mask}, [mask]
    while left:
        node = left.pop()
        if _has_large_numbers(node) or _is_given(node, num_keys):
            return True
        left += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return False


def _has_large_numbers(node: fx.Node) -> bool:
    if node.op == "placeholder":
        value = node.meta["source"].value
        return value is not None and value.is_floating_point() and _any_large(value)
    name = getattr(node.target, "_schema", aten.add.Tensor._schema).name.partition("::")[2]
    numbers = pytree.tree_leaves((node.args, node.kwargs)) if name in WITH_NUMBERS else []
    return any(isinstance(x, float | int) and math.isfinite(x) and abs(x) >= LARGE for x in numbers)


def _any_large(value: Tensor) -> bool:
    return bool((value.isfinite() & (value.abs() >= LARGE)).any())


def _is_given(node: fx.Node, num_keys: int) -> bool:
    """Whether it is an input or a buffer with a number for each key."""
    if node.op != "placeholder" or node.meta["source"].value is not None:
        return False
    return value_of(node).is_floating_point() and num_keys in shape_of(node)
