"""Factors of a call that may be split unevenly, padded at the end of their dim to equal parts.

The padding holds no value of the model. It starts as zeros, operations compute with it as with any
value, and nobody sees it: it is cut off before a sum. For the same reason its gradient is zero, and the backward may
sum over it. Both hold as long as values and derivatives are finite there: behind a square root, the zero gradient
becomes 0 · inf, and the sum is nan for all that is not padding, too. So operations that are infinite or undefined
somewhere, or refuse some values, are not given padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import BoundRule

UNDEFINED = frozenset(
    (
        *(
            "acos",
            "acosh",
            "asin",
            "atanh",
            "digamma",
            "erfinv",
            "hypot",
            "igamma",
            "igammac",
            "lgamma",
            "log",
            "log10",
        ),
        *("log1p", "log2", "logit", "polygamma", "reciprocal", "rsqrt", "special_entr", "special_erfcx"),
        *("special_ndtri", "special_xlog1py", "special_zeta", "sqrt", "xlogy"),
        *("_weight_norm", "addcdiv", "binary_cross_entropy", "kl_div"),
        *("bernoulli", "binomial", "multinomial", "normal", "normal_functional", "poisson", "_standard_gamma"),
        *("cholesky_inverse", "cholesky_solve", "linalg_cholesky", "linalg_eigh", "linalg_eigvalsh", "linalg_inv"),
        *("linalg_householder_product", "linalg_lu_factor", "linalg_pinv", "linalg_qr", "linalg_slogdet"),
        *("linalg_solve", "linalg_solve_triangular", "linalg_svd", "linalg_svdvals"),
    )
)
"""Operations with values or derivatives that are infinite or undefined somewhere."""
DIVIDING = frozenset(("div", "floor_divide", "fmod", "remainder"))
"""Operations that are undefined where their second tensor is zero; a number as the second argument is none."""


def bears_padding(call: Call) -> bool:
    """Return whether a call's values and derivatives are finite for any padding; False for a user's operators."""
    if not isinstance(call.target, torch._ops.OpOverload) or call.target.namespace not in ("aten", "autopar"):
        return False
    if call.name in DIVIDING:
        return not isinstance(call["other"], TensorInfo)
    if call.name == "pow":
        exponent = call["exponent"]
        return isinstance(exponent, int | float) and exponent >= 0 and float(exponent).is_integer()
    return call.name not in UNDEFINED


def padded_factors(
    call: Call, op: OpRule, bound: BoundRule, padded: Sequence[frozenset[int]], left_out: frozenset[str]
) -> frozenset[str]:
    """Return factors that may be padded: alone on their dims, padded on every input that has them.

    `padded` are the dims of each input that may be, `left_out` the factors whose padding an implementation leaves out.
    An implementation that does not say so of a factor that it serves may sum over it, though the factor is kept.
    """
    if not bears_padding(call):
        return frozenset()
    terms = (*bound.rule.inputs, *bound.rule.outputs)
    grouped = {name for term in terms for dim in term.dims if len(dim) > 1 for name in dim}
    found = set()
    for factor in bound.splittable:
        dims = [term.dim_of(factor) for term in bound.rule.inputs]
        held = [dim in padded[i] for i, dim in enumerate(dims) if dim is not None]
        kept = all(term.dim_of(factor) is not None for term in bound.rule.outputs) and factor not in op.served
        if factor not in grouped and held and all(held) and (kept or factor in left_out):
            found.add(factor)
    return frozenset(found)
