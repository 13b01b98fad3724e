"""Random operations: an implementation draws the same numbers whatever the layout; without a draw they are plain.

Random numbers drawn element by element may be split along every dim. Such rules call factors after the dims of the
result, as `draws:seeded` reads them. A call that draws and has no rule runs whole, by the same implementation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.ir.program.effects import draws
from autopar.ir.sharding.operation import Call, Implementation, OpRule
from autopar.ir.sharding.rule import WHOLE
from autopar.strategies.notation import Answer, Entry, all_whole, names, pointwise, rule, term, whole_at

aten = torch.ops.aten

SEEDED = Implementation("draws:seeded", random=True)
"""The ATen call itself, by a generator that is seeded for it."""


def dropout(call: Call) -> OpRule:
    """Elements set to zero at random, the others scaled: linear for any one draw."""
    text = pointwise(input="~")(call)
    if not draws(call.target, call.arguments):
        return OpRule(text)
    return OpRule(text, (Implementation("dropout:dropout", random=True),))


def noisy(call: Call) -> Answer:
    """Elements that are drawn by themselves, from tensors that are broadcast; a draw may be switched off."""
    text = pointwise()(call)
    return OpRule(text, (SEEDED,)) if draws(call.target, call.arguments) else text


def feature_dropout(call: Call) -> Answer:
    """Dims 0 and 1 draw; all that lies behind one of their elements is dropped with it."""
    text = pointwise(input="~")(call)
    if not draws(call.target, call.arguments):
        return text
    dims = names(len(call.outputs[0].shape))
    dims = whole_at(dims, range(2, len(dims)))
    linear = "~" if call.target is aten.feature_dropout.default else ""
    return OpRule(rule([term(dims, linear)], [term(dims)]), (SEEDED,))


def alpha_dropout(call: Call) -> Answer:
    """Elements set to a number at random, the others scaled and shifted."""
    return noisy(call) if draws(call.target, call.arguments) else pointwise(input="~")(call)


def made(shape_argument: int) -> Callable[[Call], OpRule]:
    """A new tensor whose elements are drawn by themselves; the argument at this position states its shape."""

    def entry(call: Call) -> OpRule:
        text = rule([], [term(names(len(call.outputs[0].shape)))])
        return OpRule(text, (SEEDED,), shape_argument=shape_argument)

    return entry


def multinomial(call: Call) -> OpRule:
    """Each row is drawn by itself."""
    dims = ["a"] * (len(call.inputs[0].shape) - 1)
    return OpRule(rule([term([*dims, WHOLE])], [term([*dims, WHOLE])]), (SEEDED,))


def whole(call: Call) -> OpRule:
    """Return the rule of a random operation whose draw depends on all elements: no dim is split."""
    return OpRule(all_whole(call), (SEEDED,))


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.dropout.default: dropout,
    aten.feature_dropout.default: feature_dropout,
    aten.feature_alpha_dropout.default: feature_dropout,
    aten.alpha_dropout.default: alpha_dropout,
    **dict.fromkeys(
        (
            aten.rand_like.default,
            aten.randn_like.default,
            aten.randint_like.default,
            aten.randint_like.low_dtype,
            aten.bernoulli.default,
            aten.bernoulli.p,
            aten.bernoulli.Tensor,
            aten.binomial.default,
            aten.cauchy.default,
            aten.exponential.default,
            aten.geometric.default,
            aten.log_normal.default,
            aten.normal.Tensor_float,
            aten.normal.float_Tensor,
            aten.normal.Tensor_Tensor,
            aten.normal_functional.default,
            aten.poisson.default,
            aten.random.default,
            aten.random.to,
            aten.rrelu.default,
            aten.uniform.default,
            aten._standard_gamma.default,
        ),
        noisy,
    ),
    aten.rand.default: made(0),
    aten.randn.default: made(0),
    aten.randint.default: made(1),
    aten.randint.low: made(2),
    aten.normal.float_float: made(2),
    aten.multinomial.default: multinomial,
    aten.randperm.default: whole,
}
