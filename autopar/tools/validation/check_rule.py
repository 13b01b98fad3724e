"""`check_rule`: whether the rule of an operation gives, on ranks, the values and gradients of the operation itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import RuleError
from autopar.ir.program.autograd_function import function_call
from autopar.ir.sharding.operation import ATEN
from autopar.strategies import rule_of
from autopar.strategies.register import Operation, target_of
from autopar.tools.validation.whole_call import Whole, fault_of, possible, show


def check_rule(operation: Operation, *args: Any, num_ranks: int = 2, **kwargs: Any) -> tuple[str, ...]:
    """Run an operation on these arguments whole, and in parts in every way that its rule allows, and compare.

    Values and the gradients of all inputs of floating-point numbers are compared, for random gradients of the outputs;
    the ranks are played one after the other in this process. Dims that the rule names must divide into `num_ranks`.
    In double precision differences of 1e-9 are found, in single of 1e-4.

    Returns what is right: for each way the placements that it asks of the inputs and gives the outputs.

    Raises RuleError where the operation has no rule, a name cannot be split in these shapes, or a way gives other
    values or gradients; the message has them all.

    >>> check_rule("mylib::scaled", torch.randn(4, 6, 8).double(), torch.randn(8).double())  # doctest: +SKIP
    ('b: S(0), R -> S(0)', 's: S(1), R -> S(1)', 'd: S(2), S(0) -> S(2)', '-: I, I -> I')
    """
    target = target_of(operation)
    call = function_call(target) if isinstance(target, type) else target
    args, kwargs = pytree.tree_map_only(Tensor, _with_gradient, (args, kwargs))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        whole = Whole.of(call, args, kwargs)
        op = rule_of(whole.call)
        if op is None:
            raise RuleError(f"{whole} has no rule; give it one with autopar.register_rule.")
        # An implementation's collectives do not follow from the operation alone.
        choices = [each for each in whole.bind(op).choices() if ATEN in op.ways((each.name,))]
        undivided = [choice.name for choice in choices if choice.factors and not possible(whole, choice, num_ranks)]
        if undivided:
            raise RuleError(
                f"{whole}: {', '.join(undivided)} cannot be split into {num_ranks} equal parts in these shapes; give "
                "arguments whose dims divide, or another num_ranks."
            )
        checked = [choice for choice in choices if possible(whole, choice, num_ranks)]
        faults = {
            choice: fault_of(whole, choice.inputs, choice.outputs, num_ranks, op.shape_argument) for choice in checked
        }
    wrong = [f"  {choice.name}: {show(choice)}: {fault}" for choice, fault in faults.items() if fault]
    if wrong:
        raise RuleError(f'{whole}: the rule "{op.rule}" is wrong where it splits\n' + "\n".join(wrong))
    return tuple(f"{choice.name}: {show(choice)}" for choice in checked)


def _with_gradient(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())
