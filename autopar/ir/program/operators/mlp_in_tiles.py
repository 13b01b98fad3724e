"""An MLP in tiles of rows, so that its hidden activations are never all there at once, and none is saved.

    mlp_in_tiles(x, up, up_bias, gate, gate_bias, down, down_bias, activation, tiles) -> y

    y = down(activation(up(x)))             without a gate
    y = down(activation(gate(x)) · up(x))   with one

The forward saves its inputs alone. The backward computes hidden activations again, of one tile after the other, and
adds up the gradients of the weights over tiles, in float32 or wider. It is known as a tiled MLP (Bekman et al., "Arctic
Long Sequence Training", 2025; DeepSpeed's TiledMLP), or as chunked feed-forward layers (Kitaev et al., "Reformer",
2020). `capture.tiles.mlp` finds the places of this operator in a model's graph. Legend:

    N rows: samples times positions   T rows of a tile   D features, also those put out   K hidden features
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ir.program.operators.derivatives import once_differentiable
from autopar.ir.program.operators.linear_cross_entropy import tiles_of_rows, wide

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function, and the gradient of what it is given by that of its result."""

    of: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the result, what the function was given) → gradient of that."""


ACTIVATIONS = {
    "silu": Activation(F.silu, aten.silu_backward.default),
    "gelu": Activation(F.gelu, aten.gelu_backward.default),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"), lambda grad, x: aten.gelu_backward.default(grad, x, approximate="tanh")
    ),
    "relu": Activation(F.relu, lambda grad, x: aten.threshold_backward.default(grad, x, 0)),
}
"""Activations that an MLP in tiles may have, by name."""


@dataclass(frozen=True, slots=True)
class _Mlp:
    """The weights of an MLP, each (out, in), with their biases."""

    activation: Activation
    up_KD: Tensor
    up_bias_K: Tensor | None
    gate_KD: Tensor | None
    gate_bias_K: Tensor | None
    down_DK: Tensor
    down_bias_D: Tensor | None

    def rows(self, x_TD: Tensor) -> Tensor:
        """Return the MLP's outputs for some rows."""
        h_TK = F.linear(x_TD, self.up_KD, self.up_bias_K)
        if self.gate_KD is None:
            h_TK = self.activation.of(h_TK)
        else:
            h_TK.mul_(self.activation.of(F.linear(x_TD, self.gate_KD, self.gate_bias_K)))
        return F.linear(h_TK, self.down_DK, self.down_bias_D)


class _Gradients:
    """Gradients of weights and biases, summed over tiles; None if a tensor needs none."""

    def __init__(self, weights: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        self.dtypes = [None if each is None else each.dtype for each in weights]
        self.sums = [
            torch.zeros_like(each, dtype=wide(each.dtype)) if each is not None and learns else None
            for each, learns in zip(weights, needed, strict=True)
        ]

    def add(self, position: int, grad_TO: Tensor, x_TI: Tensor) -> None:
        """Add the gradients of the weight at a position and of its bias, given the gradient of the weight's outputs."""
        weight_OI, bias_O = self.sums[position], self.sums[position + 1]
        if weight_OI is not None and weight_OI.dtype == grad_TO.dtype:
            weight_OI.addmm_(grad_TO.t(), x_TI)
        elif weight_OI is not None:
            weight_OI.add_(grad_TO.t() @ x_TI)
        if bias_O is not None:
            bias_O.add_(grad_TO.sum(0, dtype=bias_O.dtype))

    def taken(self) -> Iterator[Tensor | None]:
        """Yield each gradient in the dtype of its weight, and release the wider one."""
        for position, dtype in enumerate(self.dtypes):
            found, self.sums[position] = self.sums[position], None
            yield None if found is None else found.to(dtype)


UP, GATE, DOWN = 0, 2, 4
"""Positions of the weights among weights and biases."""


class MlpInTiles(torch.autograd.Function):
    """x (N, D) through weights and biases, in the order of the operator → (N, D)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, activation: str, tiles: int, *weights: Tensor | None) -> Tensor:
        ctx.activation, ctx.tiles = activation, tiles
        ctx.save_for_backward(x_ND, *weights)
        mlp = _Mlp(ACTIVATIONS[activation], *weights)  # type: ignore[arg-type]
        y_ND = x_ND.new_empty(x_ND.shape[0], mlp.down_DK.shape[0])
        for start, stop in _tiles(x_ND, tiles):
            y_ND[start:stop] = mlp.rows(x_ND[start:stop])
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> Any:
        x_ND, *weights = ctx.saved_tensors
        needs_x, _, _, *needed = ctx.needs_input_grad
        mlp = _Mlp(ACTIVATIONS[ctx.activation], *weights)
        found, dx_ND = _Gradients(weights, needed), torch.empty_like(x_ND) if needs_x else None
        for start, stop in _tiles(x_ND, ctx.tiles):
            _add_tile(mlp, found, x_ND[start:stop], grad_ND[start:stop], None if dx_ND is None else dx_ND[start:stop])
        return dx_ND, None, None, *found.taken()


def _add_tile(mlp: _Mlp, found: _Gradients, x_TD: Tensor, dy_TD: Tensor, dx_TD: Tensor | None) -> None:
    """Add the gradients of some rows. At most four tensors of hidden features exist at once, three without a gate."""
    up_TK = F.linear(x_TD, mlp.up_KD, mlp.up_bias_K)
    if mlp.gate_KD is None:
        found.add(DOWN, dy_TD, mlp.activation.of(up_TK))
        dup_TK = mlp.activation.backward(dy_TD @ mlp.down_DK, up_TK)
        del up_TK
        found.add(UP, dup_TK, x_TD)
        if dx_TD is not None:
            dx_TD.copy_(dup_TK @ mlp.up_KD)
        return
    gate_TK = F.linear(x_TD, mlp.gate_KD, mlp.gate_bias_K)
    dup_TK = mlp.activation.of(gate_TK)  # to become the gradient of up, when it is multiplied by that of hidden ones
    found.add(DOWN, dy_TD, up_TK * dup_TK)
    dh_TK = dy_TD @ mlp.down_DK
    dup_TK.mul_(dh_TK)
    dh_TK.mul_(up_TK)
    del up_TK
    dgate_TK = mlp.activation.backward(dh_TK, gate_TK)
    del dh_TK, gate_TK
    found.add(UP, dup_TK, x_TD)
    found.add(GATE, dgate_TK, x_TD)
    if dx_TD is not None:
        dx_TD.copy_((dup_TK @ mlp.up_KD).addmm_(dgate_TK, mlp.gate_KD))


def _tiles(x_ND: Tensor, tiles: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each tile of all rows; nothing if there are no rows."""
    return tiles_of_rows(x_ND.shape[0], tiles) if x_ND.shape[0] else iter(())


def _mlp_in_tiles(
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    gate: Tensor | None,
    gate_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    tiles: int,
) -> Tensor:
    weights = up, up_bias, gate, gate_bias, down, down_bias
    y_ND = MlpInTiles.apply(x.flatten(0, -2), activation, tiles, *weights)
    return y_ND.view(*x.shape[:-1], down.shape[0])  # pyright: ignore[reportOptionalMemberAccess]


torch.library.define(
    "autopar::mlp_in_tiles",
    "(Tensor x, Tensor up, Tensor? up_bias, Tensor? gate, Tensor? gate_bias, Tensor down, Tensor? down_bias,"
    " str activation, int tiles) -> Tensor",
)
# A composite: its derivative is that of what it calls.
torch.library.impl("autopar::mlp_in_tiles", "CompositeImplicitAutograd", _mlp_in_tiles)

MLP_IN_TILES: torch._ops.OpOverload = torch.ops.autopar.mlp_in_tiles.default
"""x (…, D), up (K, D), gate (K, D), down (D, K), biases (K), (K), (D) → (…, D); gate and biases may be None."""
