"""A linear layer with its cross-entropy in tiles of rows: samples, positions and classes may be split, features not.

Each number of tiles is an implementation, so that a plan may choose one: what a tile holds is there in the forward
alone, for which one more tile costs reading the weight, and adding to its gradient, once more. Only the gradients are
saved for the backward. (Program operator: `ir.program.operators.linear_cross_entropy`, whose legend holds here.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.console.units import format_bytes
from autopar.ir.program.operators.linear_cross_entropy import CHOSEN, LINEAR_CROSS_ENTROPY, MEAN, rows_of_tiles, wide
from autopar.ir.sharding.operation import Call, Collective, Implementation, LocalSizes, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, names, rule, term
from autopar.strategies.rules.layers.loss_rules import DIVISOR_BYTES, divisor_over

CLASSES = "o"
OFFERED = (1, 4, 16, 64)
"""Numbers of tiles among which a plan chooses."""
READ, CHANGED = 1, 2
"""Passes over a tensor that is read, and over one that is changed in place."""


def linear_cross_entropy(call: Call) -> OpRule:
    """Rows of any number of dims, and classes."""
    rows = _rows(call)
    bias = [term([CLASSES])] if call["bias"] is not None else []
    text = rule([term([*rows, WHOLE]), term([CLASSES, WHOLE]), *bias, term(rows)], ["()"])
    tiles = OFFERED if call["tiles"] == CHOSEN else (call["tiles"],)
    passes = 1 + call["hidden"].requires_grad + call["weight"].requires_grad
    return OpRule(
        text,
        tuple(TiledLoss(name=f"tiles={number}", number=number) for number in tiles),
        flops=2 * passes * call["hidden"].num_elements * call["weight"].shape[0],
        backward=0.0,
    )


@dataclass(frozen=True, slots=True)
class TiledLoss(Implementation):
    """The loss in a number of tiles of rows, whose forward makes the gradients."""

    function: str = "tiled_loss:linear_cross_entropy"
    joined: frozenset[str] = frozenset({CLASSES})
    padded: frozenset[str] = frozenset({CLASSES})
    ordered: frozenset[str] | None = frozenset({CLASSES})
    number: int = 1
    """Number of tiles."""

    @property
    def keywords(self) -> Mapping[str, int]:
        return {"in_tiles": self.number}

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

    def moved_bytes(self, op: OpRule, call: Call, sizes: LocalSizes, inputs: int, outputs: int) -> int:
        """Return the bytes that products read and write.

        A tile reads inputs once for the logits and once for gradients, and reads and writes the sums of gradients.
        """
        return 4 * self.number * inputs + outputs

    def elementwise_bytes(self, op: OpRule, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of logits on their way to gradients, and of adding each tile's gradient of the weight.

        In the order of `ir.program.operators.linear_cross_entropy`, with one pass for each tensor read or written.
        """
        hidden, weight, bias = call["hidden"], call["weight"], call["bias"]
        narrow, size = hidden.dtype.itemsize, wide(hidden.dtype).itemsize
        of_bias = bias is not None and bias.requires_grad
        learns = hidden.requires_grad or weight.requires_grad or of_bias
        casts = 0 if narrow == size else narrow + size
        loss = casts + (READ + CHANGED + CHANGED + READ) * size  # amax, sub_, exp_, sum
        gradient = casts + (CHANGED + CHANGED + READ * of_bias) * size  # div_, masked_fill_, sum of rows
        added = 0 if narrow == size else narrow + CHANGED * size  # else the product adds to the sums
        classes = sizes[CLASSES]
        of_logits = _num_rows(call, sizes) * classes * (loss + gradient * learns)
        return of_logits + self.number * classes * _features(call) * added * weight.requires_grad

    def forward_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of a tile's logits, as computed and as they become a loss; or of gradients' products."""
        hidden, weight = call["hidden"], call["weight"]
        rows, classes, features = rows_of_tiles(_num_rows(call, sizes), self.number)[0], sizes[CLASSES], _features(call)
        narrow, size = hidden.dtype.itemsize, wide(hidden.dtype).itemsize
        if size == narrow:  # all in one place
            return rows * (classes + features) * size
        product = classes * features * narrow * weight.requires_grad
        return max(rows * classes * (size + narrow), rows * classes * narrow + max(product, rows * features * narrow))

    def note(self, call: Call, sizes: LocalSizes, where: str) -> str:
        """Return the number of tiles, their rows, and the bytes of logits that remain."""
        tiles = rows_of_tiles(_num_rows(call, sizes), self.number)
        row_bytes = sizes[CLASSES] * call["hidden"].dtype.itemsize
        return (
            f"the loss of {where or 'the forward'} is taken in {len(tiles)} tile{'s' * (len(tiles) > 1)} of {tiles[0]} "
            f"rows: {format_bytes(tiles[0] * row_bytes)} of logits at a time on each device, of "
            f"{format_bytes(sum(tiles) * row_bytes)}."
        )

    def saved_bytes(self, call: Call, sizes: LocalSizes) -> int:
        """Return the bytes of the gradients of those that need one, and of a mean's count."""
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
