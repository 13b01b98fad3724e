"""Rules that users give for operations of their own: custom operators and autograd.Functions.

A rule has a term for every argument that is a tensor, in the order of the operation's schema, and one for every output.
Where a call leaves an optional tensor out, its term is left out; a list of tensors has one term for all of them. An
autograd.Function has no schema: each call's tensors are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.ir.program.autograd_function import FunctionCall
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, OpRule
from autopar.ir.sharding.rule import Rule, Term

Flops = int | Callable[..., int] | None


@dataclass(frozen=True, slots=True)
class Registered:
    """A user's rule, and the floating point operations of a forward.

    `flops` is a number per point of the space that the rule's names span, or a function of the shapes of the tensor
    arguments (a list of shapes where one is a list, None where it is left out).
    """

    rule: Rule
    flops: Flops = None

    def of(self, call: Call) -> OpRule:
        """Return the rule of one call; RuleError where it does not fit the call."""
        inputs = _repeated(
            self.rule, self.rule.inputs, list(map(_num_tensors, _tensor_arguments(call))), "tensor arguments"
        )
        outputs = _repeated(self.rule, self.rule.outputs, _outputs_of(call), "outputs")
        fitted = Rule(inputs, outputs)
        return OpRule(str(fitted), flops=self._flops(fitted, call))

    def _flops(self, fitted: Rule, call: Call) -> int | None:
        if self.flops is None:
            return None
        if callable(self.flops):
            return self.flops(*map(_shapes_of, _tensor_arguments(call)))
        shapes = [info.shape for info in call.inputs], [info.shape for info in call.outputs]
        return self.flops * math.prod(fitted.bind(*shapes).sizes.values())


REGISTERED: dict[object, Registered] = {}
"""Users' rules, by operator, or by the class of an autograd.Function."""


def registered(target: object) -> Registered | None:
    """Return the rule that the user has registered for the target of a call; None if there is none."""
    return REGISTERED.get(target.function if isinstance(target, FunctionCall) else target)


def tensor_arguments(operator: torch._ops.OpOverload) -> list[str]:
    """Return the names of an operator's arguments that are tensors, optional tensors or lists of them."""
    return [argument.name for argument in operator._schema.arguments if "Tensor" in str(argument.type)]


def tensor_returns(operator: torch._ops.OpOverload) -> int:
    """Return the number of an operator's results that are tensors or lists of them."""
    return sum("Tensor" in str(result.type) for result in operator._schema.returns)


def _tensor_arguments(call: Call) -> list[Any]:
    """Return the arguments that have terms: those that the schema calls tensors; of a Function, those that have
    some.
    """
    if isinstance(call.target, torch._ops.OpOverload):
        return [call.arguments.get(name) for name in tensor_arguments(call.target)]
    return [argument for argument in call.arguments.values() if _num_tensors(argument)]


def _outputs_of(call: Call) -> list[int]:
    if isinstance(call.target, torch._ops.OpOverload) and tensor_returns(call.target) == 1:
        return [len(call.outputs)]
    return [1] * len(call.outputs)


def _num_tensors(argument: Any) -> int:
    if isinstance(argument, list | tuple):
        return sum(map(_num_tensors, argument))
    return isinstance(argument, TensorInfo)


def _shapes_of(argument: Any) -> Any:
    """Return the shape of a tensor, the shapes of a list of them, None where an optional one is left out."""
    return argument.shape if isinstance(argument, TensorInfo) else argument and list(map(_shapes_of, argument))


def _repeated(rule: Rule, terms: Sequence[Term], counts: Sequence[int], what: str) -> tuple[Term, ...]:
    if len(terms) != len(counts):
        raise RuleError(f'rule "{rule}": found {len(counts)} {what}, and the rule has {len(terms)} terms for them.')
    return tuple(term for term, count in zip(terms, counts, strict=True) for _ in range(count))
