"""Random operations: an implementation draws the same numbers whatever the layout; without a draw they are plain."""

from __future__ import annotations

import torch

from autopar.sharding.operation import Call, Implementation, OpRule
from autopar.strategies.notation import Answer, Entry, pointwise

aten = torch.ops.aten


def dropout(call: Call) -> OpRule:
    """Elements set to zero at random, the others scaled: linear for any one draw."""
    text = pointwise(input="~")(call)
    if not call["train"] or call["p"] == 0:
        return OpRule(text)
    return OpRule(text, (Implementation("dropout:dropout", factors=None, random=True),))


def without_draw(call: Call) -> Answer:
    """Other dropouts: only where they do nothing."""
    return pointwise(input="~")(call) if not call["train"] or call["p"] == 0 else None


RULES: dict[torch._ops.OpOverload, Entry] = {
    aten.dropout.default: dropout,
    aten.feature_dropout.default: without_draw,
    aten.alpha_dropout.default: without_draw,
}
