"""The rule of a call fitted to its shapes; of a call without one, a rule that keeps every dim whole, and the reason."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.ir.program.effects import draws
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import WHOLE, BoundRule, Rule, Term
from autopar.strategies import rule_of
from autopar.strategies.registered import registered
from autopar.strategies.rules.random import SEEDED

NO_RULE = "no rule"
"""The reason of a call that has none at all."""


@dataclass(frozen=True, slots=True, eq=False)
class RuledCall:
    """A call with its rule; the same object for equal calls."""

    call: Call
    op: OpRule
    bound: BoundRule
    reason: str = ""
    """Why the call runs replicated, where no rule fits it."""

    @property
    def splittable(self) -> tuple[str, ...]:
        """The factors that one axis may split alone."""
        stated = (choice.factors[0] for choice in self.op.choices if len(choice.factors) == 1)
        return tuple(dict.fromkeys((*self.bound.splittable, *(f for f in stated if self.bound.sizes[f] > 1))))


@functools.lru_cache(maxsize=8192)
def ruled(call: Call) -> RuledCall:
    """Return the call with its rule; equal calls of all layers get theirs once.

    A rule of the tables that does not fit leaves the call replicated; one that the user gave is a RuleError.
    """
    op = rule_of(call)
    reason = NO_RULE
    if op is not None:
        try:
            shapes = [info.shape for info in call.inputs], [info.shape for info in call.outputs]
            return RuledCall(call, op, Rule.parse(op.rule).bind(*shapes))
        except RuleError as error:
            if registered(call.target) is not None:
                raise
            reason = str(error)
    rule = Rule(tuple(map(_whole, call.inputs)), tuple(map(_whole, call.outputs)))
    drawn = (SEEDED,) if draws(call.target, call.arguments) else ()
    return RuledCall(call, OpRule(str(rule), drawn), BoundRule(rule, {}), reason)


def _whole(info: TensorInfo) -> Term:
    return Term(((WHOLE,),) * len(info.shape))
