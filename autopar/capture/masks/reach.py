"""Farthest position back that queries see under a mask, derived from positions and not from data: a window's size.

Blocks of scores give a coarse distance. Diagonals of scores, each one distance between query and key, give the exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from autopar.capture.masks.seen import bounds_without_data, constant
from autopar.capture.passes.traced_graph import value_of
from autopar.ir.program.operators.attention.expressions import Bounds, Expression, of_keys, parse
from autopar.ir.program.operators.attention.masked_blocks import known_of, without_nan

NUM_BLOCKS = 1024
"""Maximum number of blocks of queries, and of keys."""


def reach_of(text: str, vectors: Sequence[fx.Node], num_queries: int, num_keys: int) -> int | None:
    """Return the most positions that a query may see back; None where the last ones see the first, or some what is
    ahead.
    """
    if num_queries != num_keys:
        return None
    known: dict[fx.Node, Tensor | None] = {}
    given = [(constant(node, known), value_of(node)) for node in vectors]
    expression, size = parse(text), -(-num_keys // NUM_BLOCKS)
    count = -(-num_keys // size)
    hidden, _ = known_of(expression, [bounds_without_data(*each, size, size) for each in given], count, count)
    seen = ~hidden
    ahead = seen.triu(1).any() or any(_seen_at(-distance, expression, given, num_keys) for distance in range(1, size))
    if ahead or seen[-1, 0]:
        return None
    rows, columns = seen.nonzero().unbind(1)
    most = int((rows - columns).max()) * size + size - 1
    least = max(most - 2 * size, 0)  # nearer than what the farthest blocks may have
    return next((back for back in range(most, least, -1) if _seen_at(back, expression, given, num_keys)), least)


def _seen_at(back: int, expression: Expression, given: Sequence[tuple[Tensor | None, Tensor]], size: int) -> bool:
    """Return whether some query may see the key `back` positions before its own."""
    length = size - abs(back)

    def part(x: Tensor | None, like: Tensor) -> Bounds:
        if x is None:
            return bounds_without_data(x, like, 1, 1)
        if of_keys(x):
            x = (x.squeeze(-2) if x.ndim > 1 else x).narrow(-1, max(-back, 0), length).unsqueeze(-1)
        elif x.ndim > 1 and x.shape[-2] > 1:
            x = x.narrow(-2, max(back, 0), length)
        return without_nan(x, x)

    hidden, _ = known_of(expression, [part(*each) for each in given], length, 1)
    return not bool(hidden.all())
