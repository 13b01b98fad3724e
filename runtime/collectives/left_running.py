"""Collectives of gradients that a backward starts and leaves running, and the node of autograd that waits for them.

A bucket is two `autograd.Function`s. The backward of the inner one starts the collective and does not wait; that of the
outer one waits, just before the gradients reach the parameters. The autograd engine takes what is ready in the order
of sequence numbers, so the inner one gets one above all others (at once, when all gradients of the bucket are there)
and the outer one the lowest (when nothing else is left), but where a hook takes a gradient as soon as it is there: then
that is waited for at once. Compiled and simulated graphs have the inner one only, and it waits. The node that hands out
stored parameters (`module.parameters`) is the outer one of all buckets of a call.

Every rank must start its collectives in the same order, and the engine takes nodes of the same number in an order that
depends on what else is ready: on a rank whose part of a weight is padded, on one node more. So nothing that starts a
collective, or that a collective waits for, shares its number.
"""

# pyright: reportIncompatibleMethodOverride=false
# The forward and backward of a Function name their own arguments.

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from autopar.costs.space.parameter_buckets import MOST_RUNNING
from autopar.ir.program.operators.derivatives import called_directly, differentiated_once
from autopar.runtime.collectives.direct import applied, applied_eagerly
from autopar.runtime.collectives.layout_moves import waited_for
from autopar.runtime.collectives.mesh_axes import Axis

GRAD_FN = operator.attrgetter("grad_fn")
_wait = torch.ops._c10d_functional.wait_tensor.default._op
PREFERRED, LAST = 2**63, 0  # sequence numbers: above those of all other nodes, and what the engine leaves for the end
QUIET = frozenset(
    (
        *("AccumulateGrad", "_LocalPartsBackward", "ConstantPadNdBackward0", "ToCopyBackward0"),
        *("_CastWeightBackward", "_CastWeightsBackward"),
    )
)
"""Nodes of the autograd graph that a parameter passes on its way to the first bucket; none of them communicates."""


class Pending:
    """Collectives that the inner backward has started and the outer one waits for.

    The oldest are waited for sooner where others are running, so that what they send is freed.
    """

    running: ClassVar[list[Pending]] = []
    results: tuple[Tensor, ...] = ()

    def started(self, result: Tensor) -> None:
        """Remember a collective to wait for."""
        if self not in self.running:
            self.running.append(self)
        self.results += (result,)
        while len(self.running) > MOST_RUNNING:
            self.running[0].wait()

    def wait(self) -> None:
        """Wait for all of them; nothing the second time."""
        wait_for_all((self,))


def wait_for_all(reductions: Iterable[Pending]) -> None:
    """Wait for the collectives of several; called in every backward, so without a call for each."""
    running = Pending.running
    with torch._C._AutoDispatchBelowAutograd():
        for each in reductions:
            if each in running:
                running.remove(each)
            for result in each.results:
                _wait(result)
            each.results = ()


def behind_wait(parameters: Sequence[Tensor], axis: Axis) -> tuple[Pending | None, Sequence[Tensor]]:
    """Return the parameters behind the outer function; as they are where a collective may not be left running.

    So they are, too, if they come from one node that waits itself for its `reductions`, as that of stored parts does.
    """
    if torch.compiler.is_dynamo_compiling() or not isinstance(axis.rank, int):  # or simulated
        return None, parameters
    pending = Pending()
    first: Any = parameters[0].grad_fn
    reductions = getattr(first, "reductions", None)
    if reductions is not None and all(map(operator.is_, map(GRAD_FN, parameters), repeat(first))):
        if first._sequence_nr() >= PREFERRED:  # an inner node that now waits, too: it takes its turn
            first._set_sequence_nr(first._sequence_nr() - PREFERRED)
        reductions.append(pending)
        return pending, parameters
    behind = applied_eagerly(Wait, [pending], *parameters)
    # Gradients that came through another bucket are reduced here, too: per layer, not all at the end.
    node: Any = behind[0].grad_fn
    taken, stays = False, True
    for leaf in _leaves_of(parameters):
        if leaf is None:
            stays = False
        elif leaf._post_accumulate_grad_hooks:
            taken = True
    if taken:
        run_at_once(node)
    elif stays:
        node._set_sequence_nr(LAST)
    return pending, behind


def _leaves_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return `_leaf_of` for each parameter; parameters from one autograd node share one look-up."""
    found: dict[Any, Tensor | None] = {}
    leaves: list[Tensor | None] = []
    for parameter in parameters:
        node = parameter.grad_fn
        if node is None:
            leaves.append(parameter)
            continue
        if node not in found:
            found[node] = _leaf_of(node)
        leaves.append(found[node])
    return leaves


def _leaf_of(node: Any) -> Tensor | None:
    """Return the leaf whose gradient passes `node` without a further collective, or the first of several such leaves.

    Returns None if another collective comes first.
    """
    while node.name().rpartition("::")[2] in QUIET:
        if not node.next_functions:
            return node.variable
        for before, _ in node.next_functions:
            if before is not None:
                node = before
                break
    return None


def waits(node: Any) -> bool:
    """Return whether a node of the autograd graph is the backward of an outer function."""
    return isinstance(node, Wait._backward_cls)  # type: ignore[attr-defined]


def run_at_once(node: Any) -> None:
    """Have the backward of an autograd node run as soon as it can."""
    node._set_sequence_nr(PREFERRED + node._sequence_nr())


def applied_inside(
    function: type[torch.autograd.Function], pending: Pending | None, *arguments: Any
) -> tuple[Tensor, ...]:
    """Apply an inner function, whose backward is to run as soon as it can if its collective may be left running."""
    if pending is None:
        return applied(function, *arguments)
    if torch._C._are_functorch_transforms_active():
        outputs = function.apply(*arguments)
    else:
        outputs = super(torch.autograd.Function, function).apply(*arguments)  # pyright: ignore[reportAttributeAccessIssue]
    for x in outputs:
        if x.requires_grad:
            node: Any = x.grad_fn
            node._set_sequence_nr(PREFERRED + node._sequence_nr())  # `run_at_once`, without a call
            break
    return outputs


@called_directly
class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reductions: list[Pending], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.reductions = reductions
        # A leaf gives its `grad_dtype` to an output that it is itself: autograd would cast gradients before the wait.
        return tuple([x.view_as(x) if x.is_leaf and x.grad_dtype != x.dtype else x for x in parameters])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return differentiated_once(Wait.backward, ctx, grads)
        wait_for_all(ctx.reductions)
        return None, *grads


def started(result: Tensor, pending: Pending | None) -> Tensor:
    """Return the collective's result: to be waited for later, or waited for now."""
    if pending is None or torch.is_anomaly_enabled():
        return waited_for(result)
    pending.started(result)
    return result
