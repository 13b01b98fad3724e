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
SHARED = 2**62  # added for nodes that steps share: their order is the same whichever step has made them
QUIET = frozenset(
    (
        *("AccumulateGrad", "_LocalPartsBackward", "ConstantPadNdBackward0", "ToCopyBackward0"),
        *("_CastWeightBackward", "_CastWeightsBackward"),
    )
)
"""Nodes of the autograd graph that a parameter passes on its way to the first bucket; none of them communicates."""


class Pending:
    """Collectives that inner backwards have started and the outer one waits for.

    The oldest are waited for sooner where others are running, so that what they send is freed.
    """

    running: ClassVar[dict[int, Pending]] = {}

    def __init__(self, outer: Pending | None = None) -> None:
        self.results: dict[int, Tensor] = {}
        """Results by `id`."""
        self.is_shared = True
        """True if steps may share the node that waits.

        They may not once a node of one step hands it what that has started: autograd adds up what two calls of a model
        hand to one node, before that node waits.
        """
        self._outer = outer

    def belong_to_one_step(self) -> None:
        """Let no other step use the nodes that wait for these collectives, and for those behind them."""
        pending: Pending | None = self
        while pending is not None:
            pending.is_shared, pending = False, pending._outer

    def started(self, result: Tensor) -> None:
        """Remember a collective to wait for, whose message is freed by that."""
        self.results[id(result)], self.running[id(result)] = result, self
        while len(self.running) > MOST_RUNNING:
            oldest = next(iter(self.running))
            waited_for(self.running.pop(oldest).results.pop(oldest))

    def wait(self) -> None:
        """Wait for all of them; nothing the second time."""
        with torch._C._AutoDispatchBelowAutograd():
            for number, result in self.results.items():
                self.running.pop(number, None)
                _wait(result)
        self.results.clear()


def behind_wait(
    parameters: Sequence[Tensor], axis: Axis, shared: bool = False
) -> tuple[Pending | None, Sequence[Tensor]]:
    """Return the parameters behind the outer function, and what it waits for; None where a collective may not be left
    running.

    Parameters stay as they are if they come from one node that waits itself, as that of stored parts does. `shared`:
    whether steps share what takes them.
    """
    if torch.compiler.is_dynamo_compiling() or not isinstance(axis.rank, int):  # or simulated
        return None, parameters
    first: Any = parameters[0].grad_fn
    reductions = getattr(first, "reductions", None)
    if reductions is not None and all(map(operator.is_, map(GRAD_FN, parameters), repeat(first))):
        if first._sequence_nr() >= PREFERRED:  # an inner node that now waits, too: it takes its turn
            first._set_sequence_nr(first._sequence_nr() % SHARED)
        if not shared:
            reductions.belong_to_one_step()
        return reductions, parameters
    pending = Pending()
    behind = applied_eagerly(Wait, pending, *parameters)
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


def share_reductions(parameters: Iterable[Tensor]) -> None:
    """Let buckets of these parameters, which outlive a step, be reduced by the same nodes in every step."""
    for each in parameters:
        each.reduced = {}  # pyright: ignore[reportAttributeAccessIssue]


def reductions_of_steps(parameters: Sequence[Tensor]) -> dict[Any, tuple[Tensor, ...]] | None:
    """Return bucket → its outputs in steps before, of buckets that begin as this one; None if parameters do not
    outlive a step.
    """
    found = None if torch.compiler.is_dynamo_compiling() else getattr(parameters[0], "reduced", None)
    if found is None or not all(map(operator.is_, map(GRAD_FN, parameters), repeat(parameters[0].grad_fn))):
        return None
    return found


def is_shared_behind(output: Tensor, parameter: Tensor) -> bool:
    """Return whether steps share the node of an output of a bucket, and the node that waits for it now."""
    node: Any = output.grad_fn
    waiting: Any = parameter.grad_fn
    return node.reductions.is_shared and node.pending is waiting.reductions


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
    def forward(ctx: Any, reductions: Pending, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.reductions = reductions
        # Not the leaves themselves, which give their `grad_dtype` to outputs: gradients would be cast before the wait.
        # No views either: steps share them, and between steps an optimizer writes into what they are of.
        return tuple([x.detach() for x in parameters])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return differentiated_once(Wait.backward, ctx, grads)
        ctx.reductions.wait()
        return None, *grads


def started(result: Tensor, pending: Pending | None) -> Tensor:
    """Return the collective's result: to be waited for later, or waited for now."""
    if pending is None or torch.is_anomaly_enabled():
        return waited_for(result)
    pending.started(result)
    return result
