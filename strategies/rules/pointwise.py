"""Operations on single elements: any dim may be split; most of them are not linear.

A cast keeps a sum (up to rounding) between floating types and from integers; a cast to integers or bool does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Entry, is_bool, names, pointwise, rule, tensor_arguments, term

aten = torch.ops.aten

_UNARY = pointwise()
_LINEAR = pointwise(self="~")
_SUM = pointwise(self="+", other="+")
_PRODUCT = pointwise(self="~", other="~")
_QUOTIENT = pointwise(self="~")


def cast(call: Call) -> str:
    """A copy with another dtype; linear where no fraction is lost."""
    before, after = call.inputs[0].dtype, call.outputs[0].dtype
    exact = after.is_floating_point or after.is_complex or not (before.is_floating_point or before.is_complex)
    return _LINEAR(call) if exact and after is not torch.bool else _UNARY(call)


def type_as(call: Call) -> str:
    """`type_as`: a cast, with a second tensor that only names the dtype and may have any shape."""
    alone = Call(call.target, call.inputs[:1], call.outputs, {"self": call["self"]})
    left, right = cast(alone).split(" -> ")
    other = " ".join("_" * len(call.inputs[1].shape)) or "()"
    return f"{left}, {other} -> {right}"


def quotient(call: Call) -> str:
    """A division; linear in the dividend unless it rounds."""
    return _UNARY(call) if call["rounding_mode"] else _QUOTIENT(call)


def masked_fill(call: Call) -> str:
    """A number instead of the masked elements; linear if it is zero."""
    return _LINEAR(call) if call["value"] == 0 else _UNARY(call)


def where(call: Call) -> str:
    """A choice between two tensors, or a tensor and zero: linear in both together."""
    branches = {name: call[name] for name in ("self", "other")}
    tensors = [name for name, value in branches.items() if isinstance(value, TensorInfo)]
    numbers = [value for value in branches.values() if not isinstance(value, TensorInfo)]
    if not tensors or any(numbers) or any(is_bool(branches[name]) for name in tensors):
        return _UNARY(call)
    # One "~" lets a partial value in; the "+" asks the other branch to be partial, too. The condition stays whole.
    return pointwise(**dict(zip(tensors, "~+", strict=False)))(call)


def prelu(call: Call) -> str:
    """A slope for each channel, the second dim, or one for all."""
    ndim, weight = len(call["self"].shape), call["weight"]
    dims = names(ndim)
    slope = [] if not weight.shape else ["1"] if weight.num_elements == 1 else [dims[1]]
    return rule([term(dims), term(slope)], [term(dims)])


def compared(ordered: str, values: str) -> Callable[[Call], str]:
    """Each element of `values` looked for among those of `ordered`, whose last dim is whole; other dims are common."""

    def entry(call: Call) -> str:
        shape, among = call[values].shape, call[ordered].shape
        dims = names(len(shape))
        terms = {
            name: term(dims if name == values else [*(dims[: len(among) - 1] if among[1:] else []), WHOLE])
            for name, _ in tensor_arguments(call)
        }
        return rule(terms.values(), [term(dims)])

    return entry


def isin(call: Call) -> str:
    """Return the rule of a test whether each element is among those of a second tensor, which stays whole."""
    elements, others = term(names(len(call["elements"].shape))), term([WHOLE] * len(call["test_elements"].shape))
    return rule([elements, others], [elements])


_NOT_LINEAR = (
    aten.abs.default,
    aten.acos.default,
    aten.acosh.default,
    aten.angle.default,
    aten.asin.default,
    aten.asinh.default,
    aten.atan.default,
    aten.atan2.default,
    aten.atanh.default,
    aten.bitwise_and.Scalar,
    aten.bitwise_and.Tensor,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_not.default,
    aten.bitwise_or.Scalar,
    aten.bitwise_or.Tensor,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_xor.Scalar,
    aten.bitwise_xor.Tensor,
    aten.ceil.default,
    aten.celu.default,
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_max.default,
    aten.clamp_max.Tensor,
    aten.clamp_min.default,
    aten.clamp_min.Tensor,
    aten.copysign.Scalar,
    aten.copysign.Tensor,
    aten.cos.default,
    aten.cosh.default,
    aten.digamma.default,
    aten.elu.default,
    aten.erf.default,
    aten.erfc.default,
    aten.erfinv.default,
    aten.exp.default,
    aten.exp2.default,
    aten.expm1.default,
    aten.floor.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.fmax.default,
    aten.fmin.default,
    aten.fmod.Scalar,
    aten.fmod.Tensor,
    aten.frac.default,
    aten.gcd.default,
    aten.lcm.default,
    aten.gelu.default,
    aten.hardshrink.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.hardtanh.default,
    aten.hypot.default,
    aten.igamma.default,
    aten.igammac.default,
    aten.heaviside.default,
    aten.i0.default,
    aten.isclose.default,
    aten.isfinite.default,
    aten.isin.Tensor_Scalar,
    aten.isinf.default,
    aten.isnan.default,
    aten.isneginf.default,
    aten.isposinf.default,
    aten.leaky_relu.default,
    aten.lgamma.default,
    aten.log.default,
    aten.log10.default,
    aten.log1p.default,
    aten.log2.default,
    aten.log_sigmoid.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.logit.default,
    aten.max.other,
    aten.maximum.default,
    aten.min.other,
    aten.minimum.default,
    aten.mish.default,
    aten.nan_to_num.default,
    aten.polygamma.default,
    aten.pow.Scalar,
    aten.pow.Tensor_Scalar,
    aten.pow.Tensor_Tensor,
    aten.reciprocal.default,
    aten.relu.default,
    aten.relu6.default,
    aten.remainder.Scalar,
    aten.remainder.Tensor,
    aten.round.decimals,
    aten.round.default,
    aten.rsqrt.default,
    aten.rsub.Scalar,
    aten.selu.default,
    aten.sgn.default,
    aten.sigmoid.default,
    aten.sign.default,
    aten.signbit.default,
    aten.silu.default,
    aten.sin.default,
    aten.sinc.default,
    aten.sinh.default,
    aten.softplus.default,
    aten.softshrink.default,
    aten.special_entr.default,
    aten.special_erfcx.default,
    aten.special_expit.default,
    aten.special_i0e.default,
    aten.special_i1.default,
    aten.special_i1e.default,
    aten.special_log_ndtr.default,
    aten.special_ndtr.default,
    aten.special_ndtri.default,
    aten.special_zeta.default,
    aten.sqrt.default,
    aten.square.default,
    aten.tan.default,
    aten.tanh.default,
    aten.threshold.default,
    aten.trunc.default,
    aten.where.Scalar,
    aten.__and__.Scalar,
    aten.__and__.Tensor,
    aten.__lshift__.Scalar,
    aten.__lshift__.Tensor,
    aten.__or__.Scalar,
    aten.__or__.Tensor,
    aten.__rshift__.Scalar,
    aten.__rshift__.Tensor,
    aten.__xor__.Scalar,
    aten.__xor__.Tensor,
    *(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    # A number is added: affine, not linear.
    aten.add.Scalar,
    aten.sub.Scalar,
)

_LINEAR_UNARY = (
    aten._conj.default,
    aten.alias.default,
    aten.clone.default,
    aten.conj_physical.default,
    aten.contiguous.default,
    aten.deg2rad.default,
    aten.detach.default,
    aten.div.Scalar,
    aten.imag.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.mul.Scalar,
    aten.neg.default,
    aten.positive.default,
    aten.rad2deg.default,
    aten.real.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)

RULES: dict[torch._ops.OpOverload, Entry] = {
    **dict.fromkeys(_NOT_LINEAR, _UNARY),
    **dict.fromkeys(_LINEAR_UNARY, _LINEAR),
    aten.add.Tensor: _SUM,
    aten.sub.Tensor: _SUM,
    aten.rsub.Tensor: _SUM,
    aten.mul.Tensor: _PRODUCT,
    aten.div.Tensor: _QUOTIENT,
    aten.div.Tensor_mode: quotient,
    aten.div.Scalar_mode: quotient,
    aten.xlogy.Tensor: _QUOTIENT,
    aten.special_xlog1py.default: _QUOTIENT,
    aten.xlogy.Scalar_Other: _QUOTIENT,
    aten.xlogy.Scalar_Self: _UNARY,
    aten.polar.default: _UNARY,
    aten.complex.default: pointwise(real="+", imag="+"),
    aten.prelu.default: prelu,
    aten.bucketize.Tensor: compared("boundaries", "self"),
    aten.searchsorted.Tensor: compared("sorted_sequence", "self"),
    aten.isin.Tensor_Tensor: isin,
    aten.lerp.Scalar: pointwise(self="+", end="+"),
    aten.lerp.Tensor: pointwise(self="~", end="+"),
    aten.addcmul.default: pointwise(self="+", tensor1="~", tensor2="~"),
    aten.addcdiv.default: pointwise(self="+", tensor1="~"),
    aten.where.self: where,
    aten.where.ScalarOther: where,
    aten.where.ScalarSelf: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: pointwise(self="~", value="+"),
    aten.type_as.default: type_as,
    **dict.fromkeys((aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout), cast),
}

BY_NAME: dict[str, Entry] = dict.fromkeys(
    (
        "transformers.models.bloom.modeling_bloom.GeLUFunction",
        "transformers.models.recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative",
    ),
    _UNARY,
)
"""autograd.Functions of libraries that need not be there."""
