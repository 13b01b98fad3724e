"""An MLP in tiles of rows: samples, positions and hidden features may be split, features not.

Parts of the hidden features give parts of a sum, as the two products of Megatron-LM do. Nothing is saved for the
backward but inputs; there hidden activations are computed again, a tile of which is all that is worked on. (Program
operator: `ir.program.operators.mlp_in_tiles`, whose legend holds here.)
"""

from __future__ import annotations

import math

from autopar.ir.program.operators.linear_cross_entropy import rows_of_tiles, wide
from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from autopar.ir.sharding.operation import Call, LocalSizes, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, names, rule, tensor_arguments, term

HIDDEN = "k"
"""The factor of the hidden features; every other one is of rows."""
WEIGHTS = {
    "up": term([HIDDEN, WHOLE]),
    "up_bias": term([HIDDEN]),
    "gate": term([HIDDEN, WHOLE]),
    "gate_bias": term([HIDDEN]),
    "down": term([WHOLE, HIDDEN]),
    "down_bias": term([WHOLE], "+"),
}


def mlp_in_tiles(call: Call) -> OpRule:
    """Rows of any number of dims, and hidden features, over which it sums."""
    dims = [*_rows(call), WHOLE]
    weights = [WEIGHTS[name] for name, _ in tensor_arguments(call) if name in WEIGHTS]
    gated, learned = call["gate"] is not None, _arguments_that_learn(call)
    up, down = call["up"].num_elements, call["down"].num_elements
    forward = up * (1 + gated) + down
    of_weights = sum(call[name].num_elements for name in learned & {"up", "gate", "down"})
    backward = forward + of_weights + up * (1 + gated) * ("x" in learned)
    return OpRule(
        rule([term(dims), *weights], [term(dims)]),
        flops=2 * math.prod(call["x"].shape[:-1]) * forward,
        backward=backward / forward,
        moved_bytes=lambda inputs, outputs: call["tiles"] * inputs + outputs,
        elementwise_bytes=_elementwise_bytes,
        backward_bytes=_backward_bytes,
    )


def _elementwise_bytes(call: Call, sizes: LocalSizes) -> int:
    """Return the bytes that the activation, and the product of a gate, read and write."""
    tensors = 2 if call["gate"] is None else 2 + 3
    return tensors * math.prod(sizes[name] for name in (*_rows(call), HIDDEN)) * call["x"].dtype.itemsize


def _backward_bytes(call: Call, sizes: LocalSizes) -> int:
    """Hidden activations and gradients of a tile, and what gradients of weights take more while they are added up."""
    x, down, learned = call["x"], call["down"], _arguments_that_learn(call)
    itemsize, added = x.dtype.itemsize, wide(x.dtype).itemsize
    rows = rows_of_tiles(math.prod(sizes[name] for name in _rows(call)), call["tiles"])[0]
    hidden, features, gated = sizes[HIDDEN], x.shape[-1], call["gate"] is not None
    narrow = added > itemsize  # each product of a tile is made before it is added
    product_of_down = hidden * down.shape[0] * (narrow and "down" in learned)
    product_of_up = hidden * features * (narrow and not learned.isdisjoint(("up", "gate")))
    worked_on = max(
        (3 + gated) * rows * hidden,
        (2 + 2 * gated) * rows * hidden + product_of_down,
        (1 + gated) * rows * hidden + max(product_of_up, rows * features * ("x" in learned)),
    )
    elements = {
        **dict.fromkeys(("up", "gate"), hidden * features),
        **dict.fromkeys(("up_bias", "gate_bias"), hidden),
        "down": hidden * down.shape[0],
        "down_bias": down.shape[0],
    }
    summed = sum(elements[name] for name in sorted(learned - {"x"}))
    return worked_on * itemsize + summed * (added - itemsize)


def _rows(call: Call) -> list[str]:
    return names(len(call["x"].shape) - 1)


def _arguments_that_learn(call: Call) -> frozenset[str]:
    return frozenset(name for name, info in tensor_arguments(call) if info.requires_grad)


RULES: dict[object, Entry] = {MLP_IN_TILES: mlp_in_tiles}
