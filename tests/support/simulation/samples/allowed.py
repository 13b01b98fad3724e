"""Correct placements that rules leave out on purpose, by operation, each with its reason.

Patterns are matched against the output of `validate.show`; `*` stands for anything.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.program.operators.attention.by_mask import ATTENTION_BY_MASK
from autopar.ir.program.operators.attention.cached import CACHED_ATTENTION, WRITE_CACHE
from autopar.ir.program.operators.embedding_bags import EMBEDDING_BAGS
from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY

aten = torch.ops.aten

WEIGHT = "weights and running statistics are never partial"
SHAPE = "only the shape or the type of this input matters, and no partial value is kept for that"
ZERO = "a zero is also a partial zero, which nobody asks for"
EACH = "every output follows one input only; the notation says one thing of all"
NO_NAN = "linear only where no value is infinite or not a number"
COARSE = "only for bfloat16, in which sums of partial values lose digits"
UNKNOWN = "the values are undefined"
LIKE = {"*P* -> *": SHAPE}
AS = {"*, P -> *": SHAPE}
NEW = {"* -> *": SHAPE}
LOSS = {"R, R, P -> P": WEIGHT}
SEVERAL = {"*P* -> *": EACH}

ALLOWED: dict[Any, dict[str, str]] = {
    aten._grouped_mm.default: {"P, R, R -> P": COARSE, "R, P, R -> P": COARSE},
    aten._fused_rms_norm.default: {"R, P -> P, *": WEIGHT},
    aten.native_layer_norm.default: {"R, P -> P, *": WEIGHT, "R, P, P -> P, *": WEIGHT},
    aten.batch_norm.default: {
        "*, P -> *": WEIGHT,
        "*, P, * -> *": WEIGHT,
        "S(1), S(0), S(0)* -> S(1)": "running statistics are written in place, on every rank alike",
    },
    **dict.fromkeys(
        [
            aten.binary_cross_entropy.default,
            aten.cross_entropy_loss.default,
            CROSS_ENTROPY,
            aten.nll_loss.default,
            aten.nll_loss_nd.default,
        ],
        LOSS,
    ),
    **dict.fromkeys([aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing], SEVERAL),
    **dict.fromkeys([aten.ones_like.default, aten.full_like.default, aten.empty_like.default], LIKE),
    **dict.fromkeys([aten.expand_as.default, aten.view_as.default, aten.reshape_as.default], AS),
    aten.type_as.default: {"*, P -> *": SHAPE, "*, S(?) -> *": SHAPE},
    **dict.fromkeys([aten.new_ones.default, aten.new_full.default, aten.new_zeros.default], NEW),
    EMBEDDING_BAGS: {"R, S(1), S(1) -> P": "a sum over the places of weighted bags would pass for a matrix product"},
    aten.rot90.default: {"S(0) -> S(2)": "a turn keeps the order of one of its dims only"},
    aten.zeros.default: {" -> P": ZERO},
    aten.zeros_like.default: {"R -> P": ZERO, **LIKE},
    aten.squeeze.default: {"S(?) -> S(?)": "a dim of which a rank holds one element would be squeezed away"},
    aten.squeeze.dim: {"S(0) -> S(0)": "a dim of which a rank holds one element would be squeezed away"},
    aten.squeeze.dims: {"S(0) -> S(0)": "a dim of which a rank holds one element would be squeezed away"},
    aten.nan_to_num.default: {"P -> P": NO_NAN},
    aten.nansum.default: {"P -> P": NO_NAN},
    aten.scaled_dot_product_attention.default: {
        "R, R, S(?) -> S(?)": "every rank would compute all scores; fused kernels want values as wide as queries",
        "R, R, S(?), R -> S(?)": "every rank would compute all scores; fused kernels want values as wide as queries",
    },
}

ALLOWED[ATTENTION_BY_MASK] = {
    f"R, R, S(?), R, R{sinks} -> S(?)": ALLOWED[aten.scaled_dot_product_attention.default]["R, R, S(?) -> S(?)"]
    for sinks in ("", ", R")
}

ALLOWED[CACHED_ATTENTION] = {
    "R, R, S(?), R -> S(?)": ALLOWED[aten.scaled_dot_product_attention.default]["R, R, S(?) -> S(?)"],
}
ALLOWED[WRITE_CACHE] = {"P, P, R -> P": "a cache is stored, and never partial"}

_WHOLE = "features are whole, before and behind"
ALLOWED[MLP_IN_TILES] = {
    "R, R, R, S(0) -> S(?)": _WHOLE,
    "R, R, S(0) -> S(?)": _WHOLE,
    "R, R, R, R, R, S(0), S(0) -> S(?)": _WHOLE,
    "R, R, R, S(0), S(0) -> S(?)": _WHOLE,
    "R, R, R, P -> P": WEIGHT,
    "R, P, R, R -> P": WEIGHT,
    "R, R, R, R, R, P, P -> P": WEIGHT,
    "R, P, P, R, R, R, P -> P": WEIGHT,
    "R, R, R, P, P -> P": WEIGHT,
    "R, R, P -> P": WEIGHT,
}

NOT_COMPARED: dict[Any, str] = dict.fromkeys(
    [aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default], UNKNOWN
)
