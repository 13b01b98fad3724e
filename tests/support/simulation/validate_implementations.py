"""Ground truth for implementations: the runtime function on simulated ranks against the ATen call run whole.

The counterpart of `validate` for the choices that `implemented` leaves out: these run collectives, so all ranks
run together, on one mesh axis named `AXIS`. A parameter whose split dim does not divide is padded at its end with
numbers that must not matter.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.ir.sharding.layout import I, Placement
from autopar.ir.sharding.operation import OpRule
from autopar.ir.sharding.padding import padded_factors
from autopar.ir.sharding.rule import BoundRule, Choice
from autopar.runtime.collectives.mesh_axes import use_mesh
from autopar.runtime.implementations.randomness import use_randomness
from autopar.strategies import rule_of
from autopar.tools.validation.sharded_values import Parts, local_shape, split
from autopar.tools.validation.whole_call import (
    Placements,
    Whole,
    gradients_of,
    joined_fault,
    possible,
    show,
    tensors_of,
)
from tests.support.simulation.simulate import from_ranks, local_values, simulate
from tests.support.simulation.validate import implemented, only_implementation

AXIS = "x"


def check_implementation(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    op_rule: OpRule,
    k: int = 2,
    seed: int | None = None,
) -> list[str]:
    """Return the faults of the choices of `op_rule` that its implementation carries out.

    They run on one mesh axis of `k` ranks. An operation that draws random numbers is compared with one device in the
    deterministic mode, from `seed`.
    """
    if seed is not None:
        torch.manual_seed(seed)
    whole = Whole.of(target, args, kwargs)
    bound = whole.bind(op_rule)
    faults = []
    for choice in implemented_choices(op_rule, bound):
        if not possible(whole, choice, k):
            continue
        inputs = [split(x, placement, k) for x, placement in zip(whole.inputs, choice.inputs, strict=True)]
        fault = implementation_fault(whole, op_rule, bound, choice, inputs, k, seed)
        if fault:
            faults.append(f'{whole}: "{op_rule.rule}", {choice.name}: {show(choice)}: {fault}')
    return faults


def implemented_choices(op: OpRule, bound: BoundRule) -> list[Choice]:
    """The choices that the rule's implementation carries out."""
    implementation = only_implementation(op)
    joined = implementation.joined if implementation else frozenset()
    return [choice for choice in bound.choices(joined, weight_only=True) if implemented(op, choice)]


def implementation_fault(
    whole: Whole,
    op: OpRule,
    bound: BoundRule,
    choice: Choice,
    inputs: Sequence[Parts],
    num_ranks: int,
    seed: int | None = None,
) -> str:
    """Return the fault of the choice if the ranks hold `inputs`; empty if values and gradients are right."""
    cotangents = [
        None if g is None else split(g, placement.transposed, num_ranks)
        for g, placement in zip(whole.cotangents, choice.outputs, strict=True)
    ]
    outputs, gradients = run_implementation(whole, op, bound, choice, inputs, cotangents, seed)
    if len(outputs) != len(whole.outputs):
        return f"{len(outputs)} outputs instead of {len(whole.outputs)}"
    return _fault(whole, choice.inputs, choice.outputs, outputs, gradients)


def run_implementation(
    whole: Whole,
    op: OpRule,
    bound: BoundRule,
    choice: Choice,
    inputs: Sequence[Parts],
    cotangents: Sequence[Parts | None],
    seed: int | None = None,
) -> tuple[list[Parts], list[Parts | None]]:
    """Run the function on all ranks: the parts of every output, and of every input's gradient (None: it has none)."""
    implementation = only_implementation(op)
    assert implementation is not None
    num_ranks = len(inputs[0]) if inputs else 2
    module, name = implementation.function.split(":")
    function = getattr(importlib.import_module(f"autopar.runtime.implementations.{module}"), name)
    extra: dict[str, Any] = {"axes": dict.fromkeys(choice.factors, (AXIS,)), "sizes": dict(bound.sizes)}
    extra.update(implementation.keywords)
    if implementation.random:
        extra["key"] = 0
    if "op" in inspect.signature(function).parameters:
        extra["op"] = whole.target
    with simulate(num_ranks), use_randomness(0, 0, seed is not None):
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(AXIS,))
        with use_mesh(mesh):
            local = [from_ranks(parts, x.requires_grad) for parts, x in zip(inputs, whole.inputs, strict=True)]
            args, kwargs = whole.arguments(local)
            if op.shape_argument is not None:
                shape = list(local_shape(whole.outputs[0], choice.outputs[0], num_ranks))
                args = (*args[: op.shape_argument], shape, *args[op.shape_argument + 1 :])
            if seed is not None:
                torch.manual_seed(seed)
            outputs = tensors_of(function(*args, **kwargs, **extra))
            given = [None if parts is None else from_ranks(parts) for parts in cotangents]
            gradients = gradients_of(local, outputs, given)
            return [local_values(y) for y in outputs], [None if g is None else local_values(g) for g in gradients]


def padded_parts(x: Tensor, placement: Placement, num_ranks: int, filling: int = 7) -> Parts:
    """The parts of `x`; where it is split, padded at the end to equal sizes with numbers that must not matter."""
    if not placement.is_split:
        return split(x, placement, num_ranks)
    shape = list(x.shape)
    shape[placement.dim] = -shape[placement.dim] % num_ranks
    padding = torch.full(shape, filling, dtype=x.dtype)
    return list(torch.cat([x.detach(), padding], placement.dim).chunk(num_ranks, placement.dim))


def paddable_choices(whole: Whole, op: OpRule, num_ranks: int) -> list[Choice]:
    """The implemented choices of a factor that does not divide and may be padded."""
    bound = whole.bind(op)
    paddable = padded_factors(whole.call, op, bound, [frozenset(range(x.ndim)) for x in whole.inputs], op.padded)
    return [
        choice
        for choice in implemented_choices(op, bound)
        if choice.factors and choice.factors[0] in paddable and bound.sizes[choice.factors[0]] % num_ranks
    ]


def padded_fault(whole: Whole, op: OpRule, choice: Choice, num_ranks: int) -> str:
    """Return the fault of the choice of a padded factor; empty if values and gradients are right."""
    bound = whole.bind(op)
    inputs = [padded_parts(x, placement, num_ranks) for x, placement in zip(whole.inputs, choice.inputs, strict=True)]
    cotangents = [
        None if g is None else padded_parts(g, placement.transposed, num_ranks, filling=0)
        for g, placement in zip(whole.cotangents, choice.outputs, strict=True)
    ]
    outputs, gradients = run_implementation(whole, op, bound, choice, inputs, cotangents)
    outputs = [_unpad(*each) for each in zip(outputs, choice.outputs, whole.outputs, strict=True)]
    gradients = [
        None if parts is None else _unpad(parts, placement, x)
        for parts, placement, x in zip(gradients, choice.inputs, whole.inputs, strict=True)
    ]
    # Already joined, what is split is compared as what is whole.
    given, made = (tuple(I if each.is_split else each for each in side) for side in (choice.inputs, choice.outputs))
    return _fault(whole, given, made, outputs, gradients)


def _fault(
    whole: Whole, inputs: Placements, outputs: Placements, values: Sequence[Parts], gradients: Sequence[Parts | None]
) -> str:
    """Return the fault in the parts of the outputs and of the inputs' gradients; empty if there is none."""
    ranks = range(len(values[0]))
    values_by_rank = [[parts[rank] for parts in values] for rank in ranks]
    gradients_by_rank = [[None if parts is None else parts[rank] for parts in gradients] for rank in ranks]
    return joined_fault(whole, inputs, outputs, values_by_rank, gradients_by_rank)


def _unpad(parts: Parts, placement: Placement, whole: Tensor) -> Parts:
    """Join split parts on every rank, and remove their padding."""
    if not placement.is_split:
        return parts
    return [torch.cat(parts, placement.dim).narrow(placement.dim, 0, whole.shape[placement.dim])] * len(parts)


def random_fault(args: tuple[Any, ...], probability: float, num_ranks: int) -> str:
    """Return the fault of dropout under any of its choices; empty if there is none.

    Each element is zero at the rate `probability` or scaled by 1 / (1 - `probability`), in the gradient as in the
    value; ranks that hold the same elements drop the same, ranks that hold others drop others.
    """
    target = torch.ops.aten.dropout.default
    whole = Whole.of(target, args, {})
    op = rule_of(whole.call)
    assert op is not None
    if only_implementation(op) is None:
        return "" if probability == 0 else "there is no implementation"
    bound = whole.bind(op)
    for choice in implemented_choices(op, bound):
        inputs = [split(x, placement, num_ranks) for x, placement in zip(whole.inputs, choice.inputs, strict=True)]
        cotangents = [[torch.ones_like(part) for part in split(whole.outputs[0], choice.outputs[0], num_ranks)]]
        (outputs,), (gradients,) = run_implementation(whole, op, bound, choice, inputs, cotangents)
        assert gradients is not None
        fault = _dropout_fault(inputs[0], outputs, gradients, probability, choice)
        if fault:
            return f"{choice.name}: {show(choice)}: {fault}"
    return ""


def _dropout_fault(inputs: Parts, outputs: Parts, gradients: Parts, probability: float, choice: Choice) -> str:
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    for x, y, g in zip(inputs, outputs, gradients, strict=True):
        if not torch.allclose(y, x * g):
            return "the gradient has another mask than the value"
        if not ((g == 0) | (g == scale)).all():
            return f"elements are neither dropped nor scaled by {scale}"
        rate = (g == 0).double().mean().item()
        # 3600 elements or more: six standard deviations
        if abs(rate - probability) > 6 * (probability * (1 - probability) / g.numel()) ** 0.5:
            return f"drops {rate:.3f} of the elements, not {probability}"
    same = all(torch.equal(gradients[0], g) for g in gradients)
    if len(gradients) > 1 and 0 < probability < 1 and same is choice.inputs[0].is_split:
        return "ranks with other elements drop the same" if same else "ranks with the same elements drop others"
    return ""
