"""PipeDream's asynchronous 1F1B: every stage updates its weights after each micro-batch (Narayanan et al., SOSP 2019).

A forward takes the newest weights and stashes them: the backward of its micro-batch runs on what autograd saved of
them, and its gradient is applied to the weights that are the newest by then. Weights that are stored as they are used
are copied for that, as an update changes them in place; what is cast or gathered is a copy already. Which weights a
forward sees is written down in `autopar/planning/pipeline/schedules/schedule.py`.

Every micro-batch is a batch of its own: its loss is not divided by their number, and its gradients go through the moves
of the weights (reductions, scatters) by themselves. Between two stages activations go one way and gradients the other,
both in the order of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import PipelineError
from autopar.ir.program.program import info_of
from autopar.planning.pipeline.schedules.schedule import Schedule
from autopar.runtime.module.executable import Executable
from autopar.runtime.module.inputs import Arguments
from autopar.runtime.module.stage import Stage, leaf_of
from autopar.runtime.module.stored import StoredModule
from autopar.runtime.pipeline.stage import received_tensors, sent_tensors
from autopar.runtime.ranks.backends import backend_of
from autopar.runtime.recompute.random_state import RandomState


class Root(Protocol):
    """The module whose stages run."""

    optimizer: torch.optim.Optimizer | None


class StashingStage(Stage):
    """A stage whose micro-batches each have the weights that were the newest at their forward."""

    def __init__(
        self, executable: Executable, root: StoredModule[Any], random_state: RandomState | None = None
    ) -> None:
        super().__init__(executable, root, random_state)
        self._stash: dict[int, tuple[tuple[Tensor, ...], dict[str, nn.Parameter | None]]] = {}

    def run(self, microbatches: Sequence[Arguments], first_step: int, number: int, received: Sequence[Tensor]) -> Any:
        """Run micro-batch `number` on the newest weights; return the tensors that it sends, and the user's outputs."""
        self.begin(microbatches, first_step)
        stored = {_memory(part) for part in self.executable.weights_of(self._root[0]).values()}
        for name, leaf in self._parameters.items():
            if leaf is not None and _memory(leaf) in stored:
                # A leaf of its own: one that only gets other memory counts the changes of the stored weight as its own.
                self._parameters[name] = leaf_of(leaf.detach().clone(), leaf.requires_grad, leaf.grad_dtype)
        self.microbatch = number
        outputs = self(*received)
        self._stash[number] = self._moved, dict(self._parameters)
        self.abandon()
        return outputs

    def learn(self, number: int) -> None:
        """Give the gradients that the backward of micro-batch `number` left to the parameters, and drop its weights."""
        self._moved, weights = self._stash.pop(number)
        self._parameters.update(weights)
        self.finish()

    def drop(self) -> None:
        """Let go of what a step that failed has left."""
        self._stash.clear()
        self.abandon()


class PipeDream:
    """This rank's stage, its optimizer, and what it exchanges with the stages before and after."""

    def __init__(
        self, stage: StashingStage, number: int, schedule: Schedule, position: int, root: Root, group: dist.ProcessGroup
    ) -> None:
        """`position` is that of the loss among the user's outputs, on the last stage."""
        executable = stage.executable
        last = schedule.num_stages - 1
        self._root: Root = root
        self._stage = stage
        self._order = schedule.orders[schedule.rank_of(number)]
        self._device = executable.mesh.device_type
        self._group, self._gradients_group = group, _second_group(group, self._device)
        self._last_rank = schedule.rank_of(last)
        self._before = schedule.rank_of(number - 1) if number else None
        self._after = schedule.rank_of(number + 1) if number < last else None
        self._loss_position = position if number == last else None
        self._received = received_tensors(executable)
        self._sent = sent_tensors(executable)
        self._sending: list[tuple[Any, Tensor]] = []
        nodes = executable.program.placeholders()
        self._learning = any(info_of(nodes[name]).requires_grad for name in executable.program.parameters.values())

    def step(self, batches: Sequence[Arguments], first_step: int, scale: Tensor | None = None) -> Tensor:
        """Run forward, backward and update of all micro-batches; return the mean of their losses, on every rank.

        Raises PipelineError without an optimizer, or with a scale of gradients.
        """
        self._check_optimizer()
        if scale is not None:
            raise PipelineError(
                'Pipeline(schedule="pipedream") updates every stage by itself, and a scaler skips an update on all of '
                "them at once; found model.scaler. Set it to None and train in bfloat16, or use "
                'Pipeline(schedule="1f1b").'
            )
        self._clear_gradients()
        total = torch.zeros((), device=self._device)
        waiting: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._stage.drop()
        for action in self._order:
            if action.kind == "F":
                waiting[action.microbatch] = self._forward(batches, first_step, action.microbatch, total)
            else:
                self._backward(*waiting.pop(action.microbatch))
                self._stage.learn(action.microbatch)
                self._update()
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        if self._loss_position is not None:
            total = self._stage.begin_sum(self._loss_position, total).arrived()
        dist.broadcast(total, group=self._group, group_src=self._last_rank)
        return total

    def _forward(
        self, batches: Sequence[Arguments], first_step: int, number: int, total: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward of micro-batch `number`; return what it received, and the tensors where its backward begins.

        Its part of the loss is added to `total`. Nothing else holds these tensors, and with them the weights that the
        micro-batch has stashed.
        """
        received = self._from_before()
        outputs = self._stage.run(batches, first_step, number, received)
        if self._loss_position is not None:
            outputs = [outputs[self._loss_position]]
            total += outputs[0].detach() / len(batches)
        return received, self._to_after(outputs)

    def _from_before(self) -> list[Tensor]:
        """Receive the tensors that the stage before sends for the next micro-batch, as leaves."""
        received = [torch.empty_like(each, device=self._device, requires_grad=False) for each in self._received]
        for tensor in received:
            dist.recv(tensor, group=self._group, group_src=self._before)
        return [x.requires_grad_(like.requires_grad) for x, like in zip(received, self._received, strict=True)]

    def _to_after(self, outputs: Sequence[Any]) -> list[Tensor]:
        """Send what the next stage takes; what a backward begins at."""
        if self._after is None:
            return list(outputs)
        sent = list(outputs[: len(self._sent)])
        for tensor in sent:
            self._send(tensor.detach(), self._group, self._after)
        return sent

    def _backward(self, received: list[Tensor], sent: list[Tensor]) -> None:
        """Run the backward of a micro-batch: from the gradients of what was sent to those of what was received."""
        gradients = self._gradients_of_sent() if self._after is not None else [None]
        pairs = [pair for pair in zip(sent, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        for tensor in received:
            if tensor.requires_grad:
                assert self._before is not None
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._send(gradient, self._gradients_group, self._before)

    def _gradients_of_sent(self) -> list[Tensor | None]:
        """Receive the gradients that the next stage sends back; None for tensors that have no gradient."""
        found: list[Tensor | None] = []
        for like in self._sent:
            gradient = torch.empty_like(like, device=self._device, requires_grad=False) if like.requires_grad else None
            if gradient is not None:
                dist.recv(gradient, group=self._gradients_group, group_src=self._after)
            found.append(gradient)
        return found

    def _send(self, tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
        """Begin to send; who waits here could wait for a rank that waits for this one."""
        tensor = tensor.contiguous()
        self._sending.append((dist.isend(tensor, group=group, group_dst=to), tensor))

    def _update(self) -> None:
        if self._root.optimizer is not None:
            self._root.optimizer.step()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        if self._root.optimizer is not None:
            self._root.optimizer.zero_grad()

    def _check_optimizer(self) -> None:
        """Raise PipelineError where weights are to be updated and nothing is there to do it."""
        if self._learning and self._root.optimizer is None:
            raise PipelineError(
                'Pipeline(schedule="pipedream") updates the weights inside train_step, after every micro-batch, and '
                "found no optimizer; set model.optimizer = torch.optim.SGD(model.parameters(), lr=…), or another one."
            )


def check_not_shared(schedule: str, holders: Sequence[str]) -> None:
    """Raise PipelineError for parameters that several ranks hold, which updates of their own would drive apart."""
    if schedule == "pipedream" and holders:
        raise PipelineError(
            f'Pipeline(schedule="pipedream") updates every stage by itself, and {", ".join(holders)} would be held by '
            "several stages, whose copies would not stay equal. Untie the weights, put all their uses into one stage "
            '(Pipeline(split_points=…) or autopar.annotate(…, stage=…)), or use Pipeline(schedule="1f1b").'
        )


def _second_group(group: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    """Return the group for gradients: NCCL serializes the messages between two ranks of a group, in both directions."""
    if backend_of(group, device) != "nccl":
        return group
    second = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    assert isinstance(second, dist.ProcessGroup)
    return second


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
