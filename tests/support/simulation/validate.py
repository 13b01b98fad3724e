"""Ground truth for rules: run a call whole and in parts, and see which placements give the same values and gradients.

One mesh axis of `num_ranks` ranks, played as `autopar.tools.validation.whole_call` does. A rule is wrong where one of
its choices gives other values or gradients than the call run whole; it lacks what passes the same test but is none of
its choices (the idea of `strategy_validation` in torch's DTensor).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from autopar.ir.sharding.layout import I, P, Placement, R, S
from autopar.ir.sharding.operation import Implementation, OpRule
from autopar.ir.sharding.rule import Choice
from autopar.tools.validation.sharded_values import split, tolerance_of, value_fault
from autopar.tools.validation.whole_call import Placements, Whole, fault_of, possible, run_with, show


@dataclass(frozen=True, slots=True)
class Report:
    """Choices of a rule that are wrong, and right placements it lacks; each a line that names the call."""

    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*(f"wrong    {line}" for line in self.wrong), *(f"missing  {line}" for line in self.missing)])


def check(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    op_rule: OpRule,
    k: int = 2,
    allowed: Collection[str] = (),
) -> Report:
    """Compare the choices of `op_rule` with everything that is right on one mesh axis of `k` ranks.

    Choices that an implementation carries out are taken for right here; `validate_implementations` checks them.
    What the rule lacks on purpose is named in `allowed`, as `show` prints it, with `*` for anything.
    """
    whole = Whole.of(target, args, kwargs)
    bound = whole.bind(op_rule)
    report = Report()
    implementation = only_implementation(op_rule)
    choices = bound.choices(implementation.joined if implementation else frozenset())
    for choice in choices:
        if implemented(op_rule, choice) or not possible(whole, choice, k):
            continue
        fault = fault_of(whole, choice.inputs, choice.outputs, k, op_rule.shape_argument)
        if fault:
            report.wrong.append(f'{whole}: "{op_rule.rule}", {choice.name}: {show(choice)}: {fault}')
    if implementation and implementation.random:
        return report
    for found in right_choices(whole, k, op_rule.shape_argument):
        on_purpose = any(fnmatchcase(show(found), pattern) for pattern in allowed)
        if not on_purpose and not any(covers(choice, found, whole) for choice in choices):
            report.missing.append(f'{whole}: "{op_rule.rule}" lacks {show(found)}')
    return report


def only_implementation(op: OpRule) -> Implementation | None:
    """The implementation of a rule that has one at most; those of a rule with several are validated one by one.

    Implementations on demand, which need not serve all choices of the rule, have tests of their own.
    """
    offered = op.offering(()).implementations
    assert len(offered) <= 1, f"{op} has several; take them apart with replace"
    return offered[0] if offered else None


def implemented(op: OpRule, choice: Choice) -> bool:
    """Return whether the choice runs by the rule's implementation instead of the ATen call."""
    implementation = only_implementation(op)
    if implementation is None:
        return False
    return implementation.factors is None or not implementation.factors.isdisjoint(choice.factors)


def covers(choice: Choice, found: Choice, whole: Whole) -> bool:
    """Return whether `choice` is `found`; I and R are the same if no gradient tells them apart."""
    placed = zip((*choice.inputs, *choice.outputs), (*found.inputs, *found.outputs), strict=True)
    gradients = (*whole.gradients, *whole.cotangents)
    return all(
        ours is theirs or ({ours, theirs} == {I, R} and (gradient is None or not gradient.any()))
        for (ours, theirs), gradient in zip(placed, gradients, strict=True)
    )


def right_choices(whole: Whole, num_ranks: int, shape_argument: int | None = None) -> list[Choice]:
    """Every choice that gives the right values and gradients, but for those that keep all tensors replicated.

    The inputs' placements are enumerated (R and I as one), the outputs' and the gradients' follow from the values.
    """
    found = []
    for inputs in itertools.product(*(_options(x, num_ranks) for x in whole.inputs)):
        for outputs in _outputs(whole, inputs, num_ranks, shape_argument):
            if any(p is not R for p in inputs) or any(p is not I for p in outputs):
                found.extend(_with_gradients(whole, inputs, outputs, num_ranks, shape_argument))
    return found


def _outputs(whole: Whole, inputs: Placements, num_ranks: int, shape_argument: int | None) -> list[Placements]:
    """The placements that the values of the outputs have; all that are possible where the arguments depend on them."""
    if shape_argument is not None:
        y = whole.outputs[0]
        return [(placement,) for placement in (I, *_partial(y), *_splits(y, num_ranks))]
    local = _run_ranks(whole, inputs, num_ranks)
    if local is None:
        return []
    tolerance = tolerance_of((*whole.inputs, *whole.outputs))
    seen = [_seen(list(parts), y, tolerance) for parts, y in zip(zip(*local, strict=True), whole.outputs, strict=True)]
    return list(itertools.product(*seen))


def _with_gradients(
    whole: Whole, inputs: Placements, outputs: Placements, num_ranks: int, shape_argument: int | None
) -> list[Choice]:
    """The choices with these values (R stands for I or R) whose gradients are right, with I and R told apart."""
    found = []
    for whole_output in (I, R) if I in outputs else (I,):
        requested = tuple(whole_output if p is I else p for p in outputs)
        for whole_input in (R, I) if R in inputs else (R,):
            given = tuple(whole_input if p is R else p for p in inputs)
            if not fault_of(whole, given, requested, num_ranks, shape_argument):
                found.append(Choice("?", given, requested))
                break
    return found


def _options(x: Tensor, num_ranks: int) -> Placements:
    return (R, *_splits(x, num_ranks), *((P,) if x.is_floating_point() else ()))


def _splits(x: Tensor, num_ranks: int) -> Placements:
    return tuple(S(dim) for dim, size in enumerate(x.shape) if size and size % num_ranks == 0)


def _seen(parts: list[Tensor], y: Tensor, tolerance: float) -> list[Placement]:
    """The placements as which the parts are the right value."""
    options = (I, *_splits(y, len(parts)), *_partial(y))
    return [placement for placement in options if not value_fault(parts, placement, y, tolerance)]


def _partial(y: Tensor) -> Placements:
    """P, if `y` can be summed."""
    return () if y.dtype == torch.bool else (P,)


def _run_ranks(whole: Whole, inputs: Placements, num_ranks: int) -> list[tuple[Tensor, ...]] | None:
    """Each rank's outputs, without gradients; None where the call refuses such inputs or has more or fewer outputs."""
    given = [split(x, placement, num_ranks) for x, placement in zip(whole.inputs, inputs, strict=True)]
    found = []
    for rank in range(num_ranks):
        try:
            with torch.no_grad():
                found.append(run_with(whole, [parts[rank].clone() for parts in given]))
        except (RuntimeError, ValueError, IndexError):
            return None
        if len(found[-1]) != len(whole.outputs):
            return None
    return found
