"""A linear layer with its cross-entropy in tiles of rows: samples, positions and classes may be split, features not.

Each number of tiles is an implementation, so that a plan may choose one: what a tile holds is there in the forward
alone, for which one more tile costs reading the weight, and adding to its gradient, once more. Only the gradients are
saved for the backward. (Program operator: `ir.program.operators.linear_cross_entropy`, whose legend holds here.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.ir.program.operators.linear_cross_entropy import CHOSEN, LINEAR_CROSS_ENTROPY, MEAN, rows_of_tiles, wide
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, names, rule, term
from autopar.strategies.rules.layers.loss_rules import DIVISOR_BYTES, divisor_over

CLASSES = "o"
OFFERED = (1, 4, 16, 64)
"""Numbers of tiles among which a plan chooses."""


def linear_cross_entropy(call: Call) -> OpRule:
    """Rows of any number of dims, and classes."""
    rows = _rows(call)
    bias = [term([CLASSES])] if call["bias"] is not None else []
    text = rule([term([*rows, WHOLE]), term([CLASSES, WHOLE]), *bias, term(rows)], ["()"])
    tiles = OFFERED if call["tiles"] == CHOSEN else (call["tiles"],)
    passes = 1 + call["hidden"].requires_grad + call["weight"].requires_grad
    return OpRule(
        text,
        tuple(_in_tiles(number) for number in tiles),
        flops=2 * passes * call["hidden"].num_elements * call["weight"].shape[0],
        backward=0.0,
    )


def _in_tiles(number: int) -> Implementation:
    tiles = _Tiles(number)
    return Implementation(
        "tiled_loss:linear_cross_entropy",
        factors=None,
        joined=frozenset({CLASSES}),
        padded=frozenset({CLASSES}),
        ordered=frozenset({CLASSES}),
        traffic=tiles.traffic,
        name=f"tiles={number}",
        keywords=(("in_tiles", number),),
        moved_bytes=tiles.moved_bytes,
        saved_bytes=_saved_bytes,
        forward_bytes=tiles.forward_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Costs of a tiled loss that depend on the number of tiles."""

    number: int

    def traffic(self, call: Call, sizes: LocalSizes) -> tuple[Collective, ...]:
        """Return the collectives of all tiles: maxima of rows and two sums over classes, a mean's count over rows."""
        itemsize = wide(call["hidden"].dtype).itemsize
        each = [
            Collective("all_reduce", CLASSES, times * itemsize * rows)
            for rows in rows_of_tiles(_num_rows(call, sizes), self.number)
            for times in (1, 2)
        ]
        if call["reduction"] == MEAN:
            each.append(divisor_over(_rows(call), ahead=True))
        return tuple(each)

    def moved_bytes(self, inputs: int, outputs: int) -> int:
        """Return the bytes read and written: per tile all inputs twice, and the sums of gradients read and written.

        A tile reads inputs once for the logits and once for gradients.
        """
        return 4 * self.number * inputs + outputs

    def forward_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """The logits of a tile, as they are computed and as they become a loss; or their gradients' products."""
        hidden, weight = call["hidden"], call["weight"]
        rows, classes, features = rows_of_tiles(_num_rows(call, sizes), self.number)[0], sizes[CLASSES], _features(call)
        narrow, size = hidden.dtype.itemsize, wide(hidden.dtype).itemsize
        if size == narrow:  # all in one place
            return rows * (classes + features) * size
        product = classes * features * narrow * weight.requires_grad
        return max(rows * classes * (size + narrow), rows * classes * narrow + max(product, rows * features * narrow))


def _saved_bytes(call: Call, sizes: LocalSizes) -> int:
    """The gradients of those that need one, and the count of a mean."""
    hidden, weight, bias = call["hidden"], call["weight"], call["bias"]
    if not call.outputs[0].requires_grad:
        return 0
    of_weight = wide(weight.dtype).itemsize * sizes[CLASSES]
    found = DIVISOR_BYTES + of_weight * _features(call) * weight.requires_grad
    if hidden.requires_grad:
        found += _num_rows(call, sizes) * _features(call) * hidden.dtype.itemsize
    return found + of_weight * (bias is not None and bias.requires_grad)


def _rows(call: Call) -> list[str]:
    return names(len(call["target"].shape))


def _num_rows(call: Call, sizes: LocalSizes) -> int:
    return math.prod(sizes[name] for name in _rows(call))


def _features(call: Call) -> int:
    return call["hidden"].shape[-1]


RULES: dict[object, Entry] = {LINEAR_CROSS_ENTROPY: linear_cross_entropy}
