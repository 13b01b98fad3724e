"""Sample calls of operations on single elements: unary, binary with broadcasting, casts, masks, copies."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tests.support.simulation.samples.draw import Draw, Sample, Samples, sample

aten = torch.ops.aten


def overloads(names: str) -> list[Any]:
    """Operations by name; the overload is `default` where none is named."""
    return [operator.attrgetter(name if "." in name else f"{name}.default")(aten) for name in names.split()]


def unary(*arguments: Any, **kwargs: Any) -> Samples:
    """One tensor of one to three dims, with these further arguments."""

    def samples(d: Draw) -> list[Sample]:
        return [sample(d.x(*d.sizes(n)), *arguments, **kwargs) for n in (1, 2, 3)]

    return samples


def positive_unary(d: Draw) -> list[Sample]:
    return [sample(d.positive(*d.sizes(n))) for n in (1, 2, 3)]


def small_unary(d: Draw) -> list[Sample]:
    """Numbers between -1 and 1 (exclusive)."""
    return [sample(d.x(*d.sizes(n)).detach().tanh().requires_grad_()) for n in (1, 2)]


def mask_unary(d: Draw) -> list[Sample]:
    return [sample(d.mask(*d.sizes(n))) for n in (1, 2, 3)]


def odd_unary(d: Draw) -> list[Sample]:
    """Numbers of which some are zero, infinite or not numbers."""
    x = torch.tensor([[0.0, 1.0, torch.inf, -torch.inf, torch.nan, 2.0]] * 4, dtype=torch.float64)
    return [sample(x[:, torch.randperm(6)]), sample(x[0, torch.randperm(6)])]


def index_unary(*arguments: Any) -> Samples:
    return lambda d: [sample(d.index(20, *d.sizes(n)), *arguments) for n in (1, 2)]


def binary(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.positive(a, b), d.x(a, b)),
        sample(d.positive(a, b, c), d.positive(c)),
        sample(d.positive(b), d.positive(a, b)),
        sample(d.positive(a, 1, c), d.positive(b, 1)),
        sample(d.positive(a, b), d.positive()),
    ]


def positive_binary(d: Draw) -> list[Sample]:
    a, b, c = d.sizes(3)
    return [
        sample(d.positive(a, b), d.positive(a, b)),
        sample(d.positive(a, b, c), d.positive(c)),
        sample(d.positive(b), d.positive(a, b)),
        sample(d.positive(a, 1, c), d.positive(b, 1)),
        sample(d.positive(a, b), d.positive()),
        sample(d.positive(), d.positive(b)),
    ]


def with_numbers(d: Draw) -> list[Sample]:
    """A tensor with a number in the place of the second tensor, as capture leaves them."""
    return [sample(d.positive(*d.sizes(n)), number) for n, number in ((1, 2.5), (2, 3))]


def binary_or_number(d: Draw) -> list[Sample]:
    return [*positive_binary(d), *with_numbers(d)]


def sum_like(d: Draw) -> list[Sample]:
    """Addition and subtraction: also with `alpha`, and of whole numbers."""
    a, b = d.sizes(2)
    return [
        *binary_or_number(d),
        sample(d.x(a, b), d.x(b), alpha=2),
        sample(d.index(9, a, b), d.index(9, a, b)),
        sample(d.x(a, b), d.index(9, b)),
    ]


def comparison(d: Draw) -> list[Sample]:
    """Small whole numbers, so that some are equal."""
    a, b = d.sizes(2)
    return [
        sample(d.index(5, a, b).double(), d.index(5, b).double()),
        sample(d.index(5, a, 1), d.index(5, b)),
        sample(d.index(5, a, b), d.index(5)),
    ]


def comparison_with_number(d: Draw) -> list[Sample]:
    return [sample(d.index(5, *d.sizes(2)).double(), 2.0), sample(d.index(5, *d.sizes(1)), 2)]


def of_masks(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.mask(a, b), d.mask(a, b)), sample(d.mask(a, 1), d.mask(b))]


def where(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [
        sample(d.mask(a, b), d.x(a, b), d.x(a, b)),
        sample(d.mask(a, 1), d.x(b), d.x()),
        sample(d.mask(b), d.x(a, b), d.constant(a, b)),
    ]


def where_number(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.mask(a, b), d.x(a, b), 1.5), sample(d.mask(b), d.x(a, 1), 1.5)]


def masked_fill(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [
        sample(d.x(a, b), d.mask(a, b), value) if whole else sample(d.x(a, b), d.mask(b), value)
        for value in (0.0, -1e9)
        for whole in (True, False)
    ]


def masked_fill_tensor(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.mask(a, 1), d.constant())]


def cast(d: Draw) -> list[Sample]:
    return [
        sample(d.x(*d.sizes(2)), dtype=torch.float32),
        sample(d.index(9, *d.sizes(2)), dtype=torch.float64),
        sample(d.x(*d.sizes(1)), dtype=torch.int64),
    ]


def to_dtype(d: Draw) -> list[Sample]:
    return [sample(*each.args, each.kwargs["dtype"]) for each in cast(d)]


def type_as(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2)), d.constant(*d.sizes(1)).float())]


def like(*arguments: Any, **kwargs: Any) -> Samples:
    return lambda d: [sample(d.constant(*d.sizes(n)), *arguments, **kwargs) for n in (1, 2)]


def complex_numbers(d: Draw) -> torch.Tensor:
    return torch.view_as_complex(d.constant(*d.sizes(2), 2))


def clamp(d: Draw) -> list[Sample]:
    return [sample(d.x(*d.sizes(2)), -0.5, 0.5), sample(d.x(*d.sizes(1)), 0.0), sample(d.x(*d.sizes(1)), None, 0.0)]


def lerp(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.x(b), 0.3)]


def three(d: Draw) -> list[Sample]:
    a, b = d.sizes(2)
    return [sample(d.x(a, b), d.x(b), d.positive(a, 1)), sample(d.x(a, b), d.x(a, b), d.positive(a, b), value=0.5)]


def positive_unary_with_number(d: Draw) -> list[Sample]:
    return [sample(d.positive(*d.sizes(2)), 2.5)]


SAMPLES: dict[Any, Samples] = {
    **dict.fromkeys(
        overloads(
            "abs alias atan ceil clone contiguous cos detach elu erf exp expm1 floor gelu hardsigmoid "
            "hardswish hardtanh leaky_relu lift_fresh_copy log_sigmoid mish neg positive relu relu6 round "
            "selu sgn sigmoid sign silu sin softplus square tanh tan trunc celu exp2 sinh cosh asinh "
            "hardshrink softshrink erfc sinc frac deg2rad"
        ),
        unary(),
    ),
    **dict.fromkeys(
        overloads("log log1p log2 log10 reciprocal rsqrt sqrt lgamma digamma"),
        positive_unary,
    ),
    **dict.fromkeys([aten.asin.default, aten.acos.default, aten.atanh.default, aten.erfinv.default], small_unary),
    aten.bitwise_not.default: mask_unary,
    aten.logical_not.default: mask_unary,
    **dict.fromkeys(
        [aten.isinf.default, aten.isnan.default, aten.isfinite.default, aten.nan_to_num.default], odd_unary
    ),
    **dict.fromkeys(
        [aten.signbit.default, aten.rad2deg.default, aten.special_expit.default, aten.angle.default], unary()
    ),
    **dict.fromkeys(
        overloads("i0 special_i0e special_i1 special_i1e special_erfcx special_ndtr special_log_ndtr conj_physical"),
        unary(),
    ),
    aten.special_entr.default: positive_unary,
    aten.special_ndtri.default: small_unary,
    **dict.fromkeys(overloads("resolve_conj resolve_neg lift_fresh"), unary()),
    aten.copysign.Scalar: unary(-1.5),
    aten.polygamma.default: lambda d: [sample(1, d.positive(*d.sizes(2)))],
    **dict.fromkeys(
        overloads("igamma igammac special_xlog1py special_zeta"),
        lambda d: [sample(d.positive(4, 6).detach() + 1, d.positive(6).detach() + 1)],
    ),
    **dict.fromkeys(overloads("gcd lcm"), lambda d: [sample(d.index(20, 4, 6) + 1, d.index(20, 6) + 1)]),
    **dict.fromkeys(overloads("isneginf isposinf"), odd_unary),
    aten.isclose.default: lambda d: [sample(d.index(3, 4, 6).double(), d.index(3, 6).double())],
    **dict.fromkeys([aten.real.default, aten.imag.default, aten._conj.default], lambda d: [sample(complex_numbers(d))]),
    aten.acosh.default: lambda d: [sample((d.positive(*d.sizes(2)).detach() + 1).requires_grad_())],
    aten.logit.default: lambda d: [sample(d.x(*d.sizes(2)).detach().sigmoid().requires_grad_())],
    aten.round.decimals: unary(decimals=1),
    **dict.fromkeys([aten.copysign.Tensor, aten.logaddexp2.default], positive_binary),
    aten.heaviside.default: lambda d: [sample(d.index(3, 4, 6).double() - 1, d.constant(6))],
    **dict.fromkeys([aten.clamp_max.Tensor, aten.clamp_min.Tensor], positive_binary),
    **dict.fromkeys(
        [
            aten.__lshift__.Tensor,
            aten.__rshift__.Tensor,
            aten.bitwise_left_shift.Tensor,
            aten.bitwise_right_shift.Tensor,
        ],
        lambda d: [sample(d.index(20, 4, 6), d.index(4, 6))],
    ),
    **dict.fromkeys([aten.__and__.Scalar, aten.__or__.Scalar, aten.__xor__.Scalar], index_unary(3)),
    **dict.fromkeys([aten.empty_like.default], like()),
    aten.new_empty.default: lambda d: [sample(d.constant(6), d.sizes(2))],
    **dict.fromkeys(
        [
            aten.add.Tensor,
            aten.sub.Tensor,
        ],
        sum_like,
    ),
    **dict.fromkeys([aten.mul.Tensor, aten.div.Tensor], binary_or_number),
    **dict.fromkeys(
        overloads(
            "maximum minimum pow.Tensor_Tensor atan2 fmod.Tensor remainder.Tensor max.other min.other hypot "
            "logaddexp fmax fmin"
        ),
        positive_binary,
    ),
    aten.xlogy.Tensor: positive_binary,
    aten.xlogy.Scalar_Other: positive_unary_with_number,
    aten.xlogy.Scalar_Self: lambda d: [sample(2.5, d.positive(*d.sizes(2)))],
    aten.floor_divide.default: lambda d: [sample(d.index(20, 4, 6), d.index(5, 6) + 1), sample(d.index(20, 4, 6), 3)],
    aten.floor_divide.Scalar: lambda d: [sample(d.index(20, *d.sizes(2)), 3)],
    **dict.fromkeys(
        overloads(
            "add.Scalar sub.Scalar mul.Scalar div.Scalar pow.Tensor_Scalar rsub.Scalar remainder.Scalar fmod.Scalar"
        ),
        with_numbers,
    ),
    aten.rsub.Tensor: positive_binary,
    aten.pow.Scalar: lambda d: [sample(2.5, d.x(*d.sizes(2)))],
    aten.div.Tensor_mode: lambda d: [
        sample(*each.args, rounding_mode=mode) for each in positive_binary(d)[:2] for mode in ("floor", "trunc", None)
    ],
    aten.div.Scalar_mode: lambda d: [sample(d.index(20, *d.sizes(2)), 3, rounding_mode="floor")],
    **dict.fromkeys(overloads("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor"), comparison),
    **dict.fromkeys(
        overloads("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar"),
        comparison_with_number,
    ),
    **dict.fromkeys(
        overloads(
            "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor logical_and logical_or logical_xor "
            "__and__.Tensor __or__.Tensor __xor__.Tensor"
        ),
        of_masks,
    ),
    **dict.fromkeys(
        overloads(
            "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __lshift__.Scalar __rshift__.Scalar "
            "bitwise_right_shift.Tensor_Scalar bitwise_left_shift.Tensor_Scalar"
        ),
        index_unary(3),
    ),
    **dict.fromkeys([aten.where.self], where),
    **dict.fromkeys([aten.where.ScalarOther], where_number),
    aten.where.ScalarSelf: lambda d: [sample(each.args[0], 1.5, each.args[1]) for each in where_number(d)],
    aten.where.Scalar: lambda d: [sample(d.mask(*d.sizes(2)), 1.0, 2.0)],
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill_tensor,
    aten._to_copy.default: cast,
    aten.to.dtype: to_dtype,
    aten.to.device: lambda d: [sample(d.x(*d.sizes(2)), torch.device("cpu"), torch.float32)],
    aten.to.dtype_layout: cast,
    aten.type_as.default: type_as,
    **dict.fromkeys([aten.zeros_like.default, aten.ones_like.default], like()),
    aten.full_like.default: like(2.5),
    aten.new_zeros.default: lambda d: [sample(d.constant(*d.sizes(1)), d.sizes(2))],
    aten.new_ones.default: lambda d: [sample(d.constant(*d.sizes(1)), d.sizes(2))],
    aten.new_full.default: lambda d: [sample(d.constant(*d.sizes(1)), d.sizes(2), 2.5)],
    **dict.fromkeys([aten.clamp.default], clamp),
    aten.clamp.Tensor: lambda d: [sample(d.x(4, 6), d.constant(6), d.constant(4, 1) + 3)],
    aten.clamp_min.default: unary(0.1),
    aten.clamp_max.default: unary(0.1),
    aten.threshold.default: unary(0.1, 2.0),
    aten.lerp.Scalar: lerp,
    aten.lerp.Tensor: lambda d: [sample(d.x(4, 6), d.x(6), d.x(4, 1))],
    **dict.fromkeys([aten.addcmul.default, aten.addcdiv.default], three),
    aten.view_as_complex.default: lambda d: [sample(d.x(*d.sizes(2), 2))],
    aten.polar.default: lambda d: [sample(d.positive(4, 6), d.x(4, 6))],
}
