"""The module that a user trains on a mesh with a pipeline axis: this rank's stages, run by a schedule of PyTorch.

Every rank is called with the whole batch and takes from it what its stages need; between stages go only tensors that
the model computes. A rank stores the parameters of its own stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.costs.space.returned import Returned
from autopar.errors import AutoparError, PipelineError
from autopar.optim.clipping import scale_to, total_norm
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.runtime.module.batches import loss_position, split_batch
from autopar.runtime.module.compiled_module import Capture
from autopar.runtime.module.inputs import Arguments
from autopar.runtime.module.local_batch import GIVEN_WHOLE, Given
from autopar.runtime.module.loss_scale import scale_of
from autopar.runtime.module.stored import StoredModule
from autopar.runtime.module.tree import Tree
from autopar.runtime.pipeline.evaluation import evaluated
from autopar.runtime.pipeline.executable import Pipeline
from autopar.runtime.pipeline.host_values import HostValues
from autopar.runtime.pipeline.older_weights import OlderWeights
from autopar.runtime.pipeline.pipedream import PipeDream, StashingStage
from autopar.runtime.pipeline.shared_parameters import SharedGradients
from autopar.runtime.pipeline.step import ScheduledStep
from autopar.runtime.ranks.backends import host_group
from autopar.runtime.ranks.uncompiled import uncompiled
from autopar.runtime.recompute.random_state import RandomState
from autopar.runtime.rewrite.printing import readable_code
from autopar.runtime.step_graphs.graphable import Graphable

PreparePipeline = Callable[[Arguments, bool, frozenset[str] | None], Pipeline]
"""(arguments of a micro-batch, training, names of frozen parameters if known) → what runs them."""


class PipelineModule(Graphable, StoredModule[Pipeline]):
    """A model running on a mesh with a pipeline axis. Made by `autopar.compile`.

    `train_step` trains; a call evaluates. Each rank has the parameters of its stages, under their original names.
    """

    FIRST_CALL = "call train_step once"

    def __init__(
        self,
        tree: Tree,
        mesh: DeviceMesh,
        axis: str,
        stage_devices: DeviceMesh,
        prepare: PreparePipeline,
        capture: Capture,
        *,
        num_microbatches: Callable[[Arguments, bool], int],
        returned: Returned,
        random_state: RandomState,
        given: Given = GIVEN_WHOLE,
    ) -> None:
        super().__init__(tree, mesh, prepare, capture, random_state, AutoparError, given, returned, stage_devices)
        self._group = mesh.get_group(axis)
        self._num_microbatches = num_microbatches
        self._runners: dict[Pipeline, ScheduledStep | PipeDream] = {}
        self._hosts = host_group(self._group)
        self._shared_gradients: dict[Pipeline, SharedGradients] = {}
        self._frozen_names: HostValues[frozenset[str]] = HostValues(self._hosts)
        self._for_graphs: HostValues[Any] = HostValues(self._hosts)
        """Kinds and reasons of steps that become CUDA graphs."""
        self._older_weights = OlderWeights()
        self.optimizer: torch.optim.Optimizer | None = None
        """Optimizer of this rank's parameters; Pipeline(schedule="pipedream") needs it, to update in `train_step`."""

    @property
    def plan(self) -> PipelinePlan:
        """The plan of the most recent kind of input."""
        return self._ready().plan

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh that the module runs on, the axis of the pipeline included."""
        return self._mesh

    def print_code(self) -> None:
        """Print the graphs of this rank's stages as code."""
        for number, executable in self._ready().executables.items():
            print(f"# stage {number}")
            print(readable_code(executable.graph.ahead, executable.mesh.mesh_dim_names or ()))

    @uncompiled
    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pipeline:
        """Return the pipeline that trains a batch of these inputs, planned when they first appear."""
        with self._watch:
            arguments = self._arguments(args, kwargs)
            batches = split_batch(arguments, self._num_microbatches(arguments, self.training))
            return self._prepared(batches[0])

    @uncompiled
    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a batch through the pipeline, and leave the gradients in `.grad`.

        The batch is split along dim 0 into micro-batches. Returns the mean of their losses, on every rank. With
        Pipeline(schedule="pipedream") every micro-batch is a step of `model.optimizer`, and no gradients are left; with
        "pipedream_2bw" gradients and loss are those at the weights before the last update.

        Raises InputError where the batch does not divide or the model returns no loss, and PeerError where
        another rank fails.
        """
        if self._graphed_step is not None and self._called is None:
            return self._graphed(args, kwargs)
        with self._watch:
            return self._trained(args, kwargs)

    def _train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._watch:
            return self._trained(args, kwargs)

    def _trained(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        arguments = self._arguments(args, kwargs)
        batches = split_batch(arguments, self._num_microbatches(arguments, self.training))
        pipeline = self._prepared(batches[0], arguments)
        if pipeline not in self._runners:
            runner = _pipedream if pipeline.schedule.torch_class is None else ScheduledStep
            self._runners[pipeline] = runner(pipeline, self, self._group, self.random_state)
            self._shared_gradients[pipeline] = SharedGradients(pipeline.holders, self._group, self._hosts)
        if self.compilation is not None and pipeline.schedule.halves_backwards:
            raise PipelineError(
                f'"{pipeline.schedule.name}" makes gradients of inputs and of weights apart, and torch.compile makes '
                'one backward of both; use Pipeline(schedule="1f1b") or "interleaved_1f1b", or do without '
                "model.compile()."
            )
        first_step = self.random_state.advance(len(batches))
        older = self._older_weights.in_place(self) if pipeline.schedule.delays_updates else nullcontext()
        with older, self._shared_gradients[pipeline].summed(self):
            return self._runners[pipeline].step(batches, first_step, scale_of(self.scaler, self._mesh.device_type))

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the model on a batch, stage after stage; every rank gets the outputs.

        Raises PipelineError in training with gradients, which only `train_step` gives, and PeerError where
        another rank fails.
        """
        if self.training and torch.is_grad_enabled():
            raise PipelineError(
                "a pipeline gives gradients in train_step alone: loss = model.train_step(inputs…). To evaluate, call "
                "model.eval() or use torch.no_grad()."
            )
        with self._watch:
            return self._evaluated(args, kwargs)

    def _evaluated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self._arguments(args, kwargs)
        with torch.no_grad():
            self._num_microbatches(arguments, self.training)  # the schedule says which stages there are
            pipeline = self._prepared(arguments, arguments)
            random = self.random_state.at(self.random_state.step)
            results = evaluated(pipeline, self, arguments, self._group, random)
        self.random_state.advance(1)
        return self._returned(pipeline, pipeline.programs[-1], results, pipeline.result_layouts)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as the base class does, and forget older weights."""
        self._older_weights.forget()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def load_safetensors(self, path: str | Path) -> None:
        """Load safetensors as the base class does, and forget older weights."""
        self._older_weights.forget()
        super().load_safetensors(path)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a function as the base class does, and forget older weights."""
        self._older_weights.forget()
        return super()._apply(fn, recurse)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; the norm before.

        As `torch.nn.utils.clip_grad_norm_` on one process, of gradients that wait on the host, too; a parameter that
        several ranks hold counts once.
        """
        here, holders = dist.get_rank(self._group), self._ready().holders
        named = list(self.named_parameters())
        counted = [p for name, p in named if holders.get(name, (here,))[0] == here]
        norm = total_norm(counted, norm_type).to(self._mesh.device_type)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, self._group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self._group)
            norm = norm ** (1 / norm_type)
        scale_to([p for _, p in named], max_norm, norm)
        return norm

    def _frozen(self) -> frozenset[str]:
        """Return the frozen parameters of all ranks, because a stage's graph depends on what is frozen before it."""
        agreed = self._calls.is_quiet  # a step that is to be a graph: hosts have told each other before
        own = super()._frozen()
        return frozenset().union(*(self._frozen_names.latest if agreed else self._frozen_names.of_all_ranks(own)))

    def _of_all_stages(self, own: Any) -> Sequence[Any]:
        return self._for_graphs.of_all_ranks(own)

    @property
    def _stages_here(self) -> str:
        if self._latest is None:
            return f"rank {dist.get_rank(self._group)} of the pipeline"
        numbers = list(map(str, self._latest.executables))
        return f"stage{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"


def _pipedream(
    pipeline: Pipeline, root: PipelineModule, group: dist.ProcessGroup, random_state: RandomState
) -> PipeDream:
    """Return this rank's stage for the pipedream schedules, which PyTorch lacks."""
    ((number, executable),) = pipeline.executables.items()
    stage = StashingStage(executable, root, random_state)
    return PipeDream(stage, number, pipeline.schedule, loss_position(pipeline.programs[-1]), root, group)
