"""The module that a user trains: the original names outside, one per-rank graph per kind of input inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.costs.plans.plan import Plan
from autopar.costs.space.returned import Returned
from autopar.ir.program.program import Program
from autopar.optim.clipping import clip_grad_norm_
from autopar.runtime.module.batches import loss_position, split_batch
from autopar.runtime.module.executable import Executable, Surroundings
from autopar.runtime.module.inputs import Arguments
from autopar.runtime.module.local_batch import GIVEN_WHOLE, Given
from autopar.runtime.module.loss_scale import scale_of
from autopar.runtime.module.parameters import SharedParts
from autopar.runtime.module.stage import Stage, accumulate
from autopar.runtime.module.stored import StoredModule
from autopar.runtime.module.tree import Tree
from autopar.runtime.ranks.uncompiled import uncompiled
from autopar.runtime.recompute.graph import called_below, compiler_around
from autopar.runtime.recompute.random_state import RandomState
from autopar.runtime.rewrite.printing import readable_code
from autopar.runtime.step_graphs.graphable import Graphable

Prepare = Callable[[Arguments, bool, frozenset[str] | None], Executable]
"""(arguments, training, names of frozen parameters if known) → what runs them; called once per kind of input."""
Capture = Callable[[Arguments, bool, frozenset[str] | None], Program]
"""The same → the program, without a plan."""


class ParallelModule(Graphable, StoredModule[Executable]):
    """A model running on a mesh. Made by `autopar.compile`; used like the model it was made from.

    It takes the global batch as plain tensors, equal on every rank, or DTensors, and returns what the model returns as
    plain tensors, of the samples that it was called with (or as DTensors, with `outputs="dtensor"`).
    """

    def __init__(
        self,
        tree: Tree,
        mesh: DeviceMesh,
        prepare: Prepare,
        capture: Capture,
        *,
        returned: Returned,
        random_state: RandomState,
        num_microbatches: int = 1,
        given: Given = GIVEN_WHOLE,
    ) -> None:
        super().__init__(tree, mesh, prepare, capture, random_state, Exception, given, returned)
        self._num_microbatches = num_microbatches
        self._stages: dict[Executable, Stage] = {}
        self._shared: dict[Executable, SharedParts] = {}

    @property
    def plan(self) -> Plan:
        """The plan of the most recent kind of input."""
        return self._ready().plan

    @property
    def program(self) -> Program:
        """The captured program of the most recent kind of input: of a micro-batch, where the last was one."""
        return self._ready().program

    @property
    def num_microbatches(self) -> int:
        """Into how many micro-batches `train_step` splits a batch."""
        return self._num_microbatches

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh that the module runs on."""
        return self._mesh

    def print_code(self) -> None:
        """Print the per-rank graph as code: sections per module, layouts as comments, collectives by name."""
        print(readable_code(self._ready().graph.ahead, self._mesh.mesh_dim_names or ()))

    @uncompiled
    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """Return the executable for a micro-batch of these inputs, planned when they first appear."""
        with self._watch:
            arguments = self._arguments(args, kwargs)
            return self._prepared(split_batch(arguments, self._num_microbatches)[0])

    # Under torch.compile this frame runs as it is, and what it calls is compiled: the per-rank graph alone, because
    # everything else is disabled.
    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the global batch."""
        compiler = set_eval_frame(None)
        try:
            with self._watch:
                executable, inputs = self._entered(args, kwargs)
                random = self.random_state.begin(executable.draws)
                with Surroundings(executable, random, self._shared[executable].gathered):
                    runner = executable.graph.runner(self.compilation, bool(compiler))
                    outputs = runner(*inputs) if compiler is None else called_below(compiler, runner, *inputs)
                self.random_state.end()
                return self._user_outputs(executable, outputs)
        finally:
            set_eval_frame(compiler)

    # As in `forward`: if the caller is under torch.compile, only the graphs are compiled.
    @torch.compiler.disable(recursive=False)
    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a batch, micro-batch by micro-batch, and leave the gradients in `.grad`.

        The batch is split along dim 0 into as many micro-batches as `compile(..., microbatches=)` says. Weights are
        gathered and gradients reduced once for all of them, but for weights that the plan gathers again.

        Returns the mean of the micro-batches' losses (the model's only output, or what it calls "loss", or the first).

        Raises InputError where the batch does not divide or the model returns no loss.
        """
        return self._stepped(compiler_around(), args, kwargs)

    @uncompiled
    def _stepped(self, compiler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if self._graphed_step is not None and self._called is None:
            return self._graphed(args, kwargs)
        with self._watch:
            return self._trained(args, kwargs, compiler)

    def _train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._watch:
            return self._trained(args, kwargs)

    def _trained(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any = None) -> torch.Tensor:
        arguments = self._arguments(args, kwargs)
        batches = split_batch(arguments, self._num_microbatches)
        executable = self._prepared(batches[0], arguments, runs=len(batches) > 1)
        position = loss_position(executable.program)
        scale = scale_of(self.scaler, self._mesh.device_type)
        if len(batches) == 1:
            loss = pytree.tree_leaves(called_below(compiler, self, *args, **kwargs))[position]
            loss.backward(scale)
            return loss.detach()
        if executable not in self._stages:
            self._stages[executable] = Stage(executable, self, self.random_state)
        stage = self._stages[executable]
        stage.compiler = compiler
        return accumulate(stage, batches, position, self.random_state.advance(len(batches)), scale)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients as `torch.nn.utils.clip_grad_norm_` does, including gradients that wait on the host.

        A pipeline has it too; there the norm is that of all stages.
        """
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._shared.clear()  # they hold the values that parameters had
        return super()._apply(fn, recurse)

    def _entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Executable, list[torch.Tensor]]:
        """Return the executable for these inputs, and the values that its graph takes."""
        arguments = self._arguments(args, kwargs)
        executable = self._prepared(arguments, arguments)
        shared = self._shared.get(executable) or self._shared.setdefault(executable, SharedParts())
        given = {**executable.constants, **executable.weights_of(self, shared), **executable.buffers_of(self)}
        given.update(executable.inputs_of(arguments))
        return executable, [given[name] for name in executable.local.placeholders]

    def _user_outputs(self, executable: Executable, outputs: tuple[Any, ...]) -> Any:
        """Write mutated buffers, and return the outputs as the user gets them."""
        program = executable.program
        executable.write_buffers(self, outputs)
        values, layouts = outputs[: program.num_outputs], executable.local.output_layouts[: program.num_outputs]
        if executable.returns_constants:  # a caller may write into outputs
            constants = set(map(id, executable.constants.values()))
            values = tuple(each.clone() if id(each) in constants else each for each in values)
        return self._returned(executable, program, values, layouts)
