"""Calls that are given padding have finite values and derivatives there, whatever the padding contains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.sharding.operation import OpRule
from autopar.ir.sharding.padding import bears_padding, padded_factors
from autopar.strategies import RULES, rule_of
from autopar.tools.validation.whole_call import Whole, gradients_of, run_with
from tests.support.simulation.samples import SAMPLES
from tests.support.simulation.samples.draw import Draw

aten = torch.ops.aten


def filled(x: Tensor, dim: int | None, zeros: bool = True) -> Tensor:
    """A copy of `x` whose last entries along `dim` are padding: zeros, or whole numbers from -3 to 3."""
    found = x.detach().clone()
    if dim is not None:
        part = found.narrow(dim, x.shape[dim] - 1, 1)
        numbers = (torch.arange(part.numel()) % 7 - 3).reshape(part.shape)
        part.copy_(torch.zeros_like(numbers) if zeros else numbers)
    return found


def fault_of(whole: Whole, op: OpRule, factor: str, zeros: bool) -> str:
    """Return the fault that a factor's padding causes in a call whose gradient is zero there; empty if none."""
    terms = whole.bind(op).rule
    learned = any(x.requires_grad for x in whole.inputs)
    inputs = [
        filled(x, term.dim_of(factor) if x.requires_grad or (x.is_floating_point() and not learned) else None, zeros)
        for x, term in zip(whole.inputs, terms.inputs, strict=True)
    ]
    inputs = [x.requires_grad_(each.requires_grad) for x, each in zip(inputs, whole.inputs, strict=True)]
    try:
        outputs = run_with(whole, inputs)
    except RuntimeError as error:
        return f"raises {error}"
    cotangents = [
        None if g is None else filled(g, term.dim_of(factor))
        for g, term in zip(whole.cotangents, terms.outputs, strict=True)
    ]
    found = gradients_of(inputs, outputs, cotangents)
    return "" if all(g is None or g.isfinite().all() for g in found) else "has gradients that are no numbers"


def sampled() -> Iterator[tuple[Whole, OpRule]]:
    """The sample calls that a rule fits."""
    targets: list[Any] = [target for target in RULES if target in SAMPLES]
    for target in targets:
        for each in SAMPLES[target](Draw(0)):
            whole = Whole.of(target, each.args, each.kwargs)
            op = rule_of(whole.call)
            if op is not None:
                yield whole, op


def test_padding_harms_no_operation_that_bears_it() -> None:
    faults, bearing = [], 0
    for whole, op in sampled():
        everywhere = [frozenset(range(x.ndim)) for x in whole.inputs]
        for factor in sorted(padded_factors(whole.call, op, whole.bind(op), everywhere, frozenset())):
            bearing += 1
            for fault in filter(None, (fault_of(whole, op, factor, zeros) for zeros in (True, False))):
                faults.append(f"{whole}, padded along {factor}: {fault}")
    assert not faults, "\n" + "\n".join(faults)
    assert bearing > len(RULES), "next to nothing bears padding"


def bears(target: Any, *args: Any) -> bool:
    return bears_padding(Whole.of(target, args, {}).call)


def test_padding_is_kept_from_what_divides_by_tensors_and_not_from_division_by_a_number() -> None:
    x = torch.ones(3, requires_grad=True)
    assert bears(aten.div.Tensor, x, 2.0)
    assert not bears(aten.div.Tensor, x, x)


@pytest.mark.parametrize(("exponent", "borne"), [(2, True), (3.0, True), (0, True), (0.5, False), (-1, False)])
def test_padding_is_kept_from_powers_without_a_derivative_at_zero(exponent: float, borne: bool) -> None:
    assert bears(aten.pow.Tensor_Scalar, torch.ones(3, requires_grad=True), exponent) is borne


@torch.library.custom_op("autopar_tests::root", mutates_args=())
def root(x: Tensor) -> Tensor:
    """Compute the square root as a user's own operation, which has no rule."""
    return x.sqrt()


@pytest.mark.parametrize("target", [torch.ops.autopar_tests.root.default, lambda x: x.sqrt()])
def test_padding_is_kept_from_what_is_a_users_own(target: Any) -> None:
    assert not bears(target, torch.ones(3))
