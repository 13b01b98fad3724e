"""Sample calls of the operations that are taken apart at capture."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten


def overloads(names: str) -> list[Any]:
    return [
        getattr(getattr(aten, packet), overload or "default")
        for packet, _, overload in (name.partition(".") for name in names.split())
    ]


def each(names: str, samples: Samples) -> dict[Any, Samples]:
    return dict.fromkeys(overloads(names), samples)


def unary(*further: Any, **keywords: Any) -> Samples:
    """Return samples of a call on numbers between 0.5 and 2."""
    return lambda d: [sample(d.positive(4, 6), *further, **keywords)]


def below_one(d: Draw) -> list[Sample]:
    return [sample((d.positive(4, 6).detach() / 3).requires_grad_())]


def square(*further: Any) -> Samples:
    """Matrices near the identity."""
    return lambda d: [sample((torch.eye(4).double() + d.constant(4, 4) / 9).requires_grad_(), *further)]


def binary(d: Draw) -> list[Sample]:
    return [sample(d.positive(4, 6), d.positive(6))]


def several(d: Draw) -> list[Sample]:
    return [sample([d.x(4, 6), d.x(4, 6)])]


def affine_grid(d: Draw) -> list[Sample]:
    return [
        *(sample(d.x(4, 2, 3), [4, 3, 5, 6], corners) for corners in (True, False)),
        sample(d.x(2, 3, 4), [2, 3, 1, 4, 5], False),
    ]


def with_spacing(*spacing: Any, **keywords: Any) -> Samples:
    return lambda d: [sample(d.x(4, 6), *spacing, **keywords)]


SAMPLES: dict[Any, Samples] = {
    **each(
        "absolute arcsinh arctan clip.Tensor fix negative ravel special_digamma special_erf special_erfc special_exp2 "
        "special_expm1 special_gammaln special_log1p special_sinc arcsin arccos arctanh special_erfinv special_logit",
        below_one,
    ),
    **each("arccosh", lambda d: [sample((d.positive(4, 6).detach() + 1).requires_grad_())]),
    **each("clip", unary(0.7, 1.5)),
    **each("clip.Tensor", lambda d: [sample(d.x(4, 6), d.constant(6), d.constant(6) + 2)]),
    **each("divide.Scalar multiply.Scalar subtract.Scalar true_divide.Scalar special_xlogy.other_scalar", unary(2.5)),
    **each("special_xlogy.self_scalar float_power.Scalar", lambda d: [sample(2.5, d.positive(4, 6))]),
    **each("float_power.Tensor_Scalar", unary(2.5)),
    **each("divide.Scalar_mode", unary(2.5, rounding_mode=None)),
    **each("divide.Tensor_mode", lambda d: [sample(*binary(d)[0].args, rounding_mode=None)]),
    **each("special_round", unary(decimals=1)),
    **each(
        "arctan2 divide.Tensor float_power.Tensor_Tensor greater.Tensor greater_equal.Tensor less.Tensor "
        "less_equal.Tensor multiply.Tensor not_equal.Tensor special_xlogy subtract.Tensor true_divide.Tensor",
        binary,
    ),
    **each("greater.Scalar greater_equal.Scalar less.Scalar less_equal.Scalar not_equal.Scalar", unary(1.0)),
    **each("special_log_softmax special_softmax", unary(1)),
    **each("special_logsumexp", unary([1])),
    **each("msort nanmean", with_spacing()),
    **each("moveaxis.int", with_spacing(0, 1)),
    **each("moveaxis.intlist", with_spacing([0], [1])),
    **each("ger", lambda d: [sample(d.x(4), d.x(6))]),
    **each("inverse det slogdet logdet svd qr matrix_exp", square()),
    **each("matrix_power linalg_matrix_power", square(3)),
    **each("linalg_matmul", lambda d: [sample(d.x(4, 6), d.x(6, 3))]),
    **each("concatenate row_stack vstack hstack dstack column_stack", several),
    **each("atleast_1d.Sequence atleast_2d.Sequence atleast_3d.Sequence", several),
    **each("atleast_1d atleast_2d atleast_3d", lambda d: [sample(d.x(4, 6)), sample(d.x())]),
    **each("cartesian_prod", lambda d: [sample([d.x(4), d.x(6)])]),
    **each("diag", lambda d: [sample(d.x(4)), sample(d.x(4, 6), 1)]),
    **each("diagflat", lambda d: [sample(d.x(4)), sample(d.x(2, 3))]),
    **each("fliplr flipud", with_spacing()),
    **each("hsplit.int vsplit.int", with_spacing(2)),
    **each("hsplit.array vsplit.array", with_spacing([1, 3])),
    **each("dsplit.int", lambda d: [sample(d.x(2, 3, 4), 2)]),
    **each("dsplit.array", lambda d: [sample(d.x(2, 3, 4), [1])]),
    **each("tensor_split.indices", with_spacing([1, 3], 1)),
    **each("tensor_split.sections", with_spacing(4, 1)),
    **each("unsafe_chunk", with_spacing(2, 1)),
    **each("sum_to_size", with_spacing([1, 6])),
    **each("kron", lambda d: [sample(d.x(4, 6), d.x(2, 3))]),
    **each("linalg_diagonal", lambda d: [sample(d.x(4, 6, 6))]),
    **each(
        "take_along_dim",
        lambda d: [sample(d.x(4, 6), d.index(6, 4, 3), 1), sample(d.x(4, 6), d.index(24, 5))],
    ),
    **each("tile", with_spacing([2, 3])),
    **each("chain_matmul linalg_multi_dot", lambda d: [sample([d.x(4, 6), d.x(6, 3), d.x(3, 5)])]),
    **each("cross", lambda d: [sample(d.x(4, 3), d.x(4, 3), 1)]),
    **each("cumulative_trapezoid.dx trapezoid.dx", with_spacing(dx=0.5, dim=1)),
    **each("trapz.dx", with_spacing(dx=0.5)),
    **each("cumulative_trapezoid.x trapezoid.x trapz.x", lambda d: [sample(d.x(4, 6), d.x(6))]),
    **each("gradient.scalarint", with_spacing(spacing=2.0)),
    **each("gradient.array", with_spacing(dim=[0, 1])),
    **each("gradient.scalararray", with_spacing(spacing=2.0, dim=[0, 1])),
    **each("gradient.scalarrayint", with_spacing(spacing=[2.0], dim=1)),
    **each("gradient.scalarrayarray", with_spacing(spacing=[2.0, 3.0], dim=[0, 1])),
    **each("gradient.tensorarrayint", lambda d: [sample(d.x(4, 6), spacing=[d.positive(6)], dim=1)]),
    **each(
        "gradient.tensorarray",
        lambda d: [sample(d.x(4, 6), spacing=[d.positive(4), d.positive(6)], dim=[0, 1])],
    ),
    **each("linalg_norm", lambda d: [sample(d.x(4, 6)), sample(d.x(4, 6), 1, [1]), sample(d.x(4, 6), 2)]),
    **each(
        "linalg_norm.ord_str linalg_matrix_norm.str_ord", lambda d: [sample(d.x(4, 6), "nuc"), sample(d.x(4, 6), "fro")]
    ),
    **each("linalg_matrix_norm", with_spacing(1)),
    **each("mH matrix_H conj special_i0 corrcoef", with_spacing()),
    **each("cov", lambda d: [sample(d.x(4, 6)), sample(d.x(6)), sample(d.x(4, 6), correction=0)]),
    **each(
        "bincount",
        lambda d: [
            sample(torch.tensor([0, 2, 2, 4]), minlength=6),
            sample(torch.tensor([1, 0, 1], dtype=torch.int32), d.positive(3).detach(), minlength=2),
        ],
    ),
    **each("special_psi", below_one),
    **each("special_polygamma", lambda d: [sample(1, d.positive(4, 6))]),
    **each("special_gammainc special_gammaincc", lambda d: [sample(d.positive(4, 6).detach(), d.positive(6))]),
    **each("orgqr", lambda d: [sample(d.x(6, 3), d.x(3))]),
    **each("linalg_vander", lambda d: [sample(d.x(4))]),
    **each("vander", lambda d: [sample(d.constant(4))]),
    **each("linalg_vecdot", lambda d: [sample(d.x(4, 6), d.x(4, 6))]),
    **each("norm_except_dim", lambda d: [sample(d.x(4, 6, 8), 2, dim) for dim in (0, 1, 2, -1)]),
    **each("nuclear_norm", with_spacing()),
    **each("nuclear_norm.dim", with_spacing([0, 1])),
    **each("pairwise_distance", lambda d: [sample(d.x(4, 6), d.x(4, 6)), sample(d.x(4, 6), d.x(6), 1.0)]),
    **each("std_mean var var_mean", lambda d: [sample(d.x(4, 6)), sample(d.x(4, 6), False)]),
    **each("std_mean.dim", with_spacing([1])),
    **each("affine_grid_generator", affine_grid),
}
