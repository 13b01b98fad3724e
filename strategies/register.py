"""`register_rule`: a user says along which dims an operation of their own may be split."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch._library.custom_ops import CustomOpDef

from autopar.errors import RuleError
from autopar.ir.sharding.rule import Rule
from autopar.strategies import BY_NAME, RULES
from autopar.strategies.registered import REGISTERED, Flops, Registered, tensor_arguments, tensor_returns
from autopar.strategies.ruled import ruled

Operation = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket | CustomOpDef | type[torch.autograd.Function]


def register_rule(operation: Operation, rule: str, *, flops: Flops = None, override: bool = False) -> None:
    """Say along which dims a custom operator, or an autograd.Function, may be split; it then runs on each rank's part.

    Args:
        operation: "library::operator" or "library::operator.overload", what torch.library.custom_op returned, an
            operator below torch.ops, or a class of autograd.Function.
        rule: a term per tensor argument, and behind "->" a term per output, with a name per dim: "b s d, d -> b s d".
            Splitting a name splits every tensor that has it; a name missing on the right is summed over the ranks, "_"
            stays whole, "..." is any number of dims. Before a term "~" says that the operation is linear in it, "+"
            that it is added. Numbers and other arguments are passed over.
        flops: floating point operations of a forward: a number per point of all names (2 for a matrix product), or a
            function of the shapes of the tensor arguments (None for one that a call leaves out, a list of shapes for
            a list). An operation that states them counts as a product: selective recomputation saves its outputs. By
            default as the rule says: two per point where it multiplies and sums, else one per element of the outputs.
        override: whether to replace a rule that there is.

    Every process registers the same rules, before it plans. `check_rule` finds out whether a rule is right.

    Raises:
        RuleError: no such operation, a rule that cannot be read or has another number of terms than the operation
            takes tensors, or one that there is already. Where the rule does not fit the shapes of a call, planning
            raises it, with the call's place.

    >>> register_rule("mylib::scaled", "b s d, d -> b s d")  # doctest: +SKIP
    """
    target = target_of(operation)
    given = Registered(_checked(Rule.parse(rule)), _checked_flops(flops))
    present = REGISTERED.get(target)
    if isinstance(target, torch._ops.OpOverload):
        _check_number(given.rule, len(tensor_arguments(target)), tensor_returns(target), str(target))
    else:
        _check_signature(given.rule, target)
    if present == given:
        return
    built_in = target in RULES or str(target) in BY_NAME
    if (present is not None or built_in) and not override:
        what = f'the rule "{present.rule}"' if present is not None else "a rule that autopar brings along"
        raise RuleError(f"{_named(target)} has {what}; replace it with override=True.")
    REGISTERED[target] = given
    ruled.cache_clear()  # drop results that were cached without the rule


def target_of(operation: Operation) -> torch._ops.OpOverload | type[torch.autograd.Function]:
    """Return the operator or class that is meant; RuleError where there is none."""
    if isinstance(operation, CustomOpDef):
        return operation._opoverload
    if isinstance(operation, torch._ops.OpOverload):
        return operation
    if isinstance(operation, type) and issubclass(operation, torch.autograd.Function):
        return operation
    if isinstance(operation, torch._ops.OpOverloadPacket):
        return _overload(operation, "", str(operation))
    if not isinstance(operation, str):
        raise RuleError(
            f"found {operation!r} in the place of an operation; give the name of a custom operator "
            '("library::operator"), what torch.library.custom_op returned, or a class of autograd.Function.'
        )
    library, _, name = operation.partition("::")
    name, _, overload = name.partition(".")
    packet = (
        getattr(getattr(torch.ops, library), name, None) if library.isidentifier() and name.isidentifier() else None
    )
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise RuleError(
            f'there is no operator "{operation}"; write "library::operator", and import what defines it before its '
            "rule is registered."
        )
    return _overload(packet, overload, operation)


def _overload(packet: torch._ops.OpOverloadPacket, name: str, specified: str) -> torch._ops.OpOverload:
    found = packet.overloads()
    wanted = name or ("default" if "default" in found else found[0] if len(found) == 1 else "")
    if wanted not in found:
        there_are = ", ".join(f"{specified.partition('.')[0]}.{each}" for each in found)
        raise RuleError(f'"{specified}" means no overload; there are {there_are}.')
    return getattr(packet, wanted)


def _checked(rule: Rule) -> Rule:
    """Return the rule; RuleError for a name of an output that no input has: nothing would be split there."""
    known = {name for term in rule.inputs for name in term.factors}
    for term in rule.outputs:
        unknown = [name for name in term.factors if name not in known]
        if unknown:
            raise RuleError(
                f'rule "{rule}": "{unknown[0]}" stands on the right only, so that no rank could make its part; write '
                '"_" for a dim that every rank makes whole.'
            )
    return rule


def _checked_flops(flops: object) -> Flops:
    if flops is None or callable(flops) or (isinstance(flops, int) and not isinstance(flops, bool) and flops >= 0):
        return flops  # type: ignore[return-value]
    raise RuleError(f"flops={flops!r}; give a whole number per point of all names, or a function of the input shapes.")


def _check_number(rule: Rule, num_inputs: int, num_outputs: int, name: str) -> None:
    if (len(rule.inputs), len(rule.outputs)) != (num_inputs, num_outputs):
        raise RuleError(
            f'rule "{rule}" has {len(rule.inputs)} terms for inputs and {len(rule.outputs)} for outputs; {name} takes '
            f"{num_inputs} tensors (lists count as one, optional ones count) and gives {num_outputs}."
        )


def _check_signature(rule: Rule, function: type[torch.autograd.Function]) -> None:
    """Raise RuleError if `forward` takes fewer arguments than the rule has terms."""
    parameters = list(inspect.signature(function.forward).parameters.values())
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return
    separate = function.setup_context is not torch.autograd.Function.setup_context
    num_arguments = len(parameters) - (not separate)
    if len(rule.inputs) > num_arguments:
        raise RuleError(
            f'rule "{rule}" has {len(rule.inputs)} terms for inputs; {_named(function)} takes {num_arguments} '
            "arguments."
        )


def _named(target: Callable[..., object]) -> str:
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, type) else str(target)
