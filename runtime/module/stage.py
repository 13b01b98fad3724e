"""One stage program as a schedule runs it: once per micro-batch, on weights that are moved once per step.

Constants, too, are computed once per step.

A step is `begin`, a forward and a backward per micro-batch, and `finish`. The module's parameters are the leaves that
the graph of a micro-batch takes; between steps it has none. A weight that no move or cast changes is its own leaf.
Reductions of the other gradients overlap with the last backward (`collectives.moved_gradients`), and waited for in
`finish`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from autopar.ir.program.effects import constant_placeholders
from autopar.runtime.collectives.moved_gradients import MovedGradients
from autopar.runtime.collectives.reused_weights import ReusedBuckets
from autopar.runtime.module.executable import Executable, Surroundings, graph_of
from autopar.runtime.module.inputs import Arguments
from autopar.runtime.module.loss_scale import with_scaled_gradient
from autopar.runtime.module.stored import StoredModule
from autopar.runtime.outputs.sums import Arriving, Sums
from autopar.runtime.recompute.graph import called_below
from autopar.runtime.recompute.random_state import RandomState
from autopar.runtime.rewrite.hoist import adds_parts, first_uses, hoist


class Stage(nn.Module):
    """Runs the micro-batches of a step; `root` stores the parameters and buffers."""

    def __init__(
        self, executable: Executable, root: StoredModule[Any], random_state: RandomState | None = None
    ) -> None:
        super().__init__()
        self.executable = executable
        self._root = [root]  # in a list, so that it is no submodule
        self._random_state = random_state or RandomState()
        program = executable.program
        self._hoisted = hoist(
            executable.local.module.graph,
            program.parameters.values(),
            executable.plan.reduce_each,
            constant_placeholders(program),
        )
        self._first_uses, self._adds_parts = first_uses(self._hoisted), adds_parts(self._hoisted)
        self._graph = graph_of(self._hoisted.body, executable.program, executable.plan)
        self._moved: tuple[Tensor, ...] = ()
        self._gradients: MovedGradients | None = None
        self._microbatches: Sequence[Arguments] = ()
        self._gathered = ReusedBuckets()
        self._first_step = 0
        self._sums = Sums(executable.mesh)
        self.compiler: Any = None
        """`compiler_around` the step."""
        self.microbatch = 0
        """Number of the micro-batch that the next forward runs."""

    def begin(self, microbatches: Sequence[Arguments], first_step: int) -> None:
        """Move the weights, and make leaves of them; `first_step` counts the micro-batches of the steps before."""
        self._microbatches, self._first_step = microbatches, first_step
        root = self._root[0]
        given = {**self._constants_of(root), **self.executable.weights_of(root)}
        with self._surroundings(0):
            self._moved = self._hoisted.weights(*[given[name] for name in self._hoisted.parameters])
        for number, (moved, is_part) in enumerate(zip(self._moved, self._adds_parts, strict=True)):
            dtype = self.executable.program.accumulates(moved.dtype, is_part)
            leaf = moved if _is_leaf(moved, dtype) else leaf_of(moved, moved.requires_grad, dtype)
            self._parameters[f"weight{number}"] = leaf

    def forward(self, *received: Tensor) -> tuple[Any, ...]:
        """Run the forward of a micro-batch; return the tensors that it sends, and the user's outputs."""
        program, root = self.executable.program, self._root[0]
        given = self._constants_of(root)
        given.update(self.executable.inputs_of(self._microbatches[self.microbatch]))
        given.update(zip(program.received, received, strict=True))
        inputs = [*self._leaves(), *[given[name] for name in self._hoisted.others]]
        with self._surroundings(self.microbatch):
            runner = self._graph.runner(root.compilation, self.compiler is not None)
            outputs = called_below(self.compiler, runner, *inputs)
        self.executable.write_buffers(root, outputs)
        return tuple(outputs[: program.num_results])

    def begin_last_backward(self) -> None:
        """Start the reduction of gradients in the backward that comes next: it is the step's last."""
        self._gradients = self._moved_gradients()
        self._gradients.start_in_next_backward()

    def begin_sum(self, position: int, part: Tensor) -> Arriving:
        """Begin to sum over ranks what the micro-batches have put out there, as far as each has a part of it."""
        layout = self.executable.local.output_layouts[position]
        assert layout is not None
        return self._sums.begin(part, layout)

    def finish(self) -> None:
        """Give the gradients of the leaves, through the moves, to the parameters that the root stores."""
        gradients = self._gradients or self._moved_gradients()
        self.abandon()
        gradients.finish()

    def abandon(self) -> None:
        """Let go of what a step holds."""
        self._moved, self._microbatches, self._gradients = (), (), None
        self._gathered = ReusedBuckets()  # their weights refer to the leaves
        self._parameters.clear()

    def _constants_of(self, root: nn.Module) -> dict[str, Tensor]:
        return {**self.executable.constants, **self.executable.buffers_of(root)}

    def _moved_gradients(self) -> MovedGradients:
        return MovedGradients(self._moved, self._leaves(), self._first_uses)

    def _leaves(self) -> list[Tensor]:
        return [leaf for leaf in self._parameters.values() if leaf is not None]

    def _surroundings(self, microbatch: int) -> Any:
        random = self._random_state.at(self._first_step + microbatch)
        return Surroundings(self.executable, random, self._gathered)


def _is_leaf(moved: Tensor, dtype: torch.dtype) -> TypeGuard[nn.Parameter]:
    """Return whether a weight is used as stored, and its gradient adds up, without hooks, as in a leaf of its own."""
    return (
        moved.grad_fn is None
        and isinstance(moved, nn.Parameter)
        and not moved._backward_hooks
        and not moved._post_accumulate_grad_hooks
        and (not moved.requires_grad or moved.dtype == dtype)
    )


def leaf_of(values: Tensor, learns: bool, dtype: torch.dtype | None) -> nn.Parameter:
    """Return a weight as micro-batches take it, without its graph, whose gradient adds up over them in a dtype."""
    leaf = nn.Parameter(values, requires_grad=learns)
    if learns and dtype != values.dtype:
        leaf.grad_dtype = dtype
    return leaf


def accumulate(
    stage: Stage, microbatches: Sequence[Arguments], position: int, first_step: int, scale: Tensor | None = None
) -> Tensor:
    """Train a step on one stage, one micro-batch after the other; the mean of their losses, output `position`.

    Partial sums of ranks are summed once for all micro-batches, overlapped with the last backward.

    Gradients are multiplied by `scale`.
    """
    stage.begin(microbatches, first_step)
    losses: list[Tensor] = []
    total: Arriving | None = None
    for number in range(len(microbatches)):
        stage.microbatch = number
        loss = with_scaled_gradient(stage()[position], scale) / len(microbatches)
        losses.append(loss.detach())
        if number == len(microbatches) - 1:
            stage.begin_last_backward()
            total = stage.begin_sum(position, torch.stack(losses).sum())
        loss.backward()
    stage.finish()
    assert total is not None
    return total.arrived()
