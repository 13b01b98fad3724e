"""Operations along dims: sums become partial, means are implemented, all others need their dims whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.ir.sharding.operation import Call, Implementation, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import (
    Entry,
    all_whole,
    along_dims,
    dim_of,
    dims_of,
    is_bool,
    names,
    rule,
    term,
    whole_at,
)

aten = torch.ops.aten


def reduced(call: Call, dims: list[str], gone: frozenset[int]) -> list[str]:
    """The output's dims when `gone` are reduced: left out, or of size one."""
    if call.arguments.get("keepdim"):
        return ["1" if i in gone else name for i, name in enumerate(dims)]
    return [name for i, name in enumerate(dims) if i not in gone]


def _gone(call: Call, argument: str | None) -> frozenset[int]:
    return dims_of(call[argument] if argument else None, len(call.inputs[0].shape))


def total(argument: str | None = None, mark: str = "~") -> Callable[[Call], str]:
    """A sum over the dims that `argument` names (None: all): a split of one of them gives partial sums."""

    def entry(call: Call) -> str:
        dims = names(len(call.inputs[0].shape))
        own = "" if is_bool(call.inputs[0]) else mark
        return rule([term(dims, own)], [term(reduced(call, dims, _gone(call, argument)))])

    return entry


def mean(argument: str | None = None) -> Callable[[Call], OpRule]:
    """A mean: as a sum, but divided by the whole count when an averaged dim is split."""

    def entry(call: Call) -> OpRule:
        dims, gone = names(len(call.inputs[0].shape)), _gone(call, argument)
        text = rule([term(dims, "~")], [term(reduced(call, dims, gone))])
        if not gone:
            return OpRule(text)
        return OpRule(text, (Implementation("mean:mean", frozenset(dims[i] for i in gone), ordered=frozenset()),))

    return entry


def whole(argument: str | None = "dim") -> Callable[[Call], str]:
    """Any other reduction: its dims stay whole."""

    def entry(call: Call) -> str:
        dims, gone = names(len(call.inputs[0].shape)), _gone(call, argument)
        left = [WHOLE if i in gone else name for i, name in enumerate(dims)]
        return rule([term(left)], [term(reduced(call, dims, gone))] * len(call.outputs))

    return entry


def quantile(call: Call) -> str:
    """One or several quantiles, which become the first dim."""
    dims, gone = names(len(call.inputs[0].shape)), _gone(call, "dim")
    requested = [term([WHOLE] * len(info.shape)) for info in call.inputs[1:]]
    several = [WHOLE] if any(info.shape for info in call.inputs[1:]) else []
    return rule([term(whole_at(dims, gone)), *requested], [term([*several, *reduced(call, dims, gone)])])


def renorm(call: Call) -> str:
    """Each place of one dim scaled, by the norm of all that is there."""
    dims = names(len(call.inputs[0].shape))
    kept = term(whole_at(dims, set(range(len(dims))) - {dim_of(call)}))
    return rule([kept], [kept])


def histogram(call: Call) -> str:
    """Counts of the elements in each bin; without limits these are the extremes of the whole tensor."""
    if call["min"] == call["max"]:
        return all_whole(call)
    return rule([term(names(len(call.inputs[0].shape)))], [WHOLE])


def diff(call: Call) -> str:
    """Differences of neighbours; what is put before or behind is joined along the same dim."""
    dims = names(len(call.inputs[0].shape))
    dims[dim_of(call)] = WHOLE
    mark = "" if any(map(is_bool, call.inputs)) else "~" if len(call.inputs) == 1 else "+"
    return rule([term(dims, mark)] * len(call.inputs), [term(dims)])


_ALONG = along_dims()
_ALONG_LINEAR = along_dims(mark="~")

RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.sum.dim_IntList: total("dim"),
    aten.sum.default: total(),
    aten.nansum.default: total("dim", mark=""),
    aten.count_nonzero.dim_IntList: total("dim", mark=""),
    aten.count_nonzero.default: total("dim", mark=""),
    aten.dist.default: all_whole,
    aten.histc.default: histogram,
    aten.mean.dim: mean("dim"),
    aten.mean.default: mean(),
    **dict.fromkeys(
        (
            aten.all.dim,
            aten.all.dims,
            aten.amax.default,
            aten.amin.default,
            aten.aminmax.default,
            aten.any.dim,
            aten.any.dims,
            aten.argmax.default,
            aten.argmin.default,
            aten.kthvalue.default,
            aten.linalg_vector_norm.default,
            aten.logsumexp.default,
            aten.max.dim,
            aten.median.dim,
            aten.min.dim,
            aten.mode.default,
            aten.nanmedian.dim,
            aten.norm.ScalarOpt_dim,
            aten.norm.ScalarOpt_dim_dtype,
            aten.prod.dim_int,
            aten.std.correction,
            aten.std.dim,
            aten.std_mean.correction,
            aten.var.correction,
            aten.var.dim,
            aten.var_mean.correction,
            aten.var_mean.dim,
        ),
        whole(),
    ),
    **dict.fromkeys(
        (
            aten.all.default,
            aten.any.default,
            aten.max.default,
            aten.median.default,
            aten.min.default,
            aten.nanmedian.default,
            aten.norm.Scalar,
            aten.norm.ScalarOpt_dtype,
            aten.prod.default,
            aten.std.default,
        ),
        whole(None),
    ),
    **dict.fromkeys(
        (
            aten._log_softmax.default,
            aten._safe_softmax.default,
            aten._softmax.default,
            aten.argsort.default,
            aten.argsort.stable,
            aten.cummax.default,
            aten.cummin.default,
            aten.cumprod.default,
            aten.glu.default,
            aten.log_softmax.int,
            aten.logcumsumexp.default,
            aten.softmax.int,
            aten.sort.default,
            aten.sort.stable,
            aten.topk.default,
        ),
        _ALONG,
    ),
    **dict.fromkeys(
        (aten.nanquantile.default, aten.nanquantile.scalar, aten.quantile.default, aten.quantile.scalar), quantile
    ),
    aten.renorm.default: renorm,
    aten.trace.default: "~_ _ -> ()",
    aten.cumsum.default: _ALONG_LINEAR,
    aten.diff.default: diff,
}
