"""The module that a user trains on a mesh with a pipeline axis: this rank's stages, run by a schedule of PyTorch.

Every rank is called with the whole batch and takes from it what its stages need; between stages go only tensors that
the model computes. A rank stores the parameters of its own stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError, PipelineError
from autopar.layout import Layout
from autopar.pipeline_plan import PipelinePlan
from autopar.program import Program
from autopar.runtime.code import readable_code
from autopar.runtime.executable import Executable
from autopar.runtime.inputs import Arguments, canonical_arguments, kind_of
from autopar.runtime.microbatches import loss_position, split_batch
from autopar.runtime.parameters import placements_of
from autopar.runtime.pipeline_stage import ScheduledStage, received_tensors, result_tensors
from autopar.runtime.shared_parameters import holders_of, sum_over_holders
from autopar.runtime.stage import Stage
from autopar.runtime.stored import StoredModule
from autopar.schedules import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """What runs one kind of input on a rank of a pipeline."""

    plan: PipelinePlan
    programs: tuple[Program, ...]
    """Of all stages."""
    executables: Mapping[int, Executable]
    """Of this rank's stages."""
    result_layouts: tuple[Layout | None, ...]
    """Of the user's outputs, which the last stage gives; None where an output is no tensor."""

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several ranks hold."""
        schedule = self.schedule
        return holders_of(
            [
                [name for stage in schedule.stages_of(rank) for name in self.programs[stage].parameters]
                for rank in range(schedule.num_ranks)
            ]
        )


PreparePipeline = Callable[[Arguments, bool, frozenset[str] | None], Pipeline]
"""(arguments of a micro-batch, training, names of frozen parameters if known) → what runs them."""


class PipelineModule(StoredModule):
    """A model running on a mesh with a pipeline axis. Made by `autopar.compile`.

    `train_step` trains; a call evaluates. Each rank has the parameters of its stages, under their original names.
    """

    def __init__(
        self,
        forward_signature: inspect.Signature,
        mesh: DeviceMesh,
        axis: str,
        prepare: PreparePipeline,
        *,
        num_microbatches: Callable[[Arguments, bool], int],
        whole_outputs: bool = False,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._forward_signature = forward_signature
        self._mesh = mesh
        self._group = mesh.get_group(axis)
        self._prepare = prepare
        self._num_microbatches = num_microbatches
        self._whole_outputs = whole_outputs
        self._deterministic = deterministic
        self._seed = seed
        self._step = 0
        self._pipelines: dict[object, Pipeline] = {}
        self._runners: dict[Pipeline, _Runner] = {}
        self._latest: Pipeline | None = None

    @property
    def plan(self) -> PipelinePlan:
        """The plan of the most recent kind of input."""
        return self._ready().plan

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    def print_code(self) -> None:
        """Print the graphs of this rank's stages as code."""
        for number, executable in self._ready().executables.items():
            print(f"# stage {number}")
            print(readable_code(executable.local.module, executable.mesh.mesh_dim_names or ()))

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pipeline:
        """What trains a batch of these inputs, planned on its first appearance."""
        arguments = canonical_arguments(self._forward_signature, args, kwargs)
        return self._prepared(split_batch(arguments, self._num_microbatches(arguments, self.training))[0])

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a batch through the pipeline, and leave the gradients in `.grad`.

        The batch is split along dim 0 into micro-batches. Returns the mean of their losses, on every rank.

        Raises InputError where the batch does not divide or the model returns no loss.
        """
        arguments = canonical_arguments(self._forward_signature, args, kwargs)
        batches = split_batch(arguments, self._num_microbatches(arguments, self.training))
        pipeline = self._prepared(batches[0])
        if pipeline not in self._runners:
            self._runners[pipeline] = _Runner(pipeline, self, self._group, self._seed, self._deterministic)
        first_step, self._step = self._step, self._step + len(batches)
        loss = self._runners[pipeline].step(batches, first_step)
        sum_over_holders(self, pipeline.holders, self._group)
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the model on a batch, stage after stage; every rank gets the outputs.

        Raises PipelineError in training with gradients, which only `train_step` gives.
        """
        if self.training and torch.is_grad_enabled():
            raise PipelineError(
                "a pipeline gives gradients in train_step alone: loss = model.train_step(inputs…). To evaluate, call "
                "model.eval() or use torch.no_grad()."
            )
        arguments = canonical_arguments(self._forward_signature, args, kwargs)
        with torch.no_grad():
            self._num_microbatches(arguments, self.training)  # the schedule says which stages there are
            pipeline = self._prepared(arguments)
            results = _evaluated(pipeline, self, arguments, self._group, (self._seed, self._step, self._deterministic))
        self._step += 1
        users = [
            self._user_output(value, layout, pipeline)
            for value, layout in zip(results, pipeline.result_layouts, strict=True)
        ]
        return pytree.tree_unflatten(users, pipeline.programs[-1].out_spec)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; the norm before.

        As `torch.nn.utils.clip_grad_norm_` on one process; a parameter that several ranks hold counts once.
        """
        here, holders = dist.get_rank(self._group), self._ready().holders
        named = [(name, p) for name, p in self.named_parameters() if p.grad is not None]
        counted = [p.grad for name, p in named if holders.get(name, (here,))[0] == here]
        norm = torch.nn.utils.get_total_norm(counted, norm_type)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norm = norm.to(self._mesh.device_type)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, self._group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self._group)
            norm = norm ** (1 / norm_type)
        torch.nn.utils.clip_grads_with_norm_([p for _, p in named], max_norm, norm)
        return norm

    def _prepared(self, arguments: Arguments) -> Pipeline:
        frozen = self._frozen() if self._latest is not None else None
        key = kind_of(arguments, self._mesh.device_type), self.training, frozen
        if key not in self._pipelines:
            with torch.inference_mode(False), torch.enable_grad():
                found = self._prepare(arguments, self.training, frozen)
            self._pipelines[*key[:2], self._frozen() if frozen is None else frozen] = found
            self._latest = found
        else:
            self._latest = self._pipelines[key]
        return self._latest

    def _user_output(self, value: Any, layout: Layout | None, pipeline: Pipeline) -> Any:
        if layout is None or value.ndim == 0 or self._whole_outputs:
            return value
        mesh = next(iter(pipeline.executables.values())).mesh
        return DTensor.from_local(value, mesh, placements_of(layout), run_check=False)

    def _ready(self) -> Pipeline:
        if self._latest is None:
            raise InputError(
                "the model was compiled without example_inputs, so it has no parameters and no plan yet; "
                "call train_step once, or give autopar.compile(..., example_inputs=...)."
            )
        return self._latest


class _Runner:
    """This rank's stages on a schedule."""

    def __init__(
        self, pipeline: Pipeline, root: StoredModule, group: dist.ProcessGroup, seed: int, deterministic: bool
    ) -> None:
        schedule = pipeline.schedule
        last = schedule.num_stages - 1
        position = loss_position(pipeline.programs[last])
        self._stages = [Stage(each, root, seed, deterministic) for each in pipeline.executables.values()]
        scheduled = [
            ScheduledStage(stage, number, schedule.num_stages, position if number == last else None, group)
            for number, stage in zip(pipeline.executables, self._stages, strict=True)
        ]
        self._count = schedule.num_microbatches
        self._group, self._last_rank = group, schedule.rank_of(last)
        torch_class: Any = schedule.torch_class
        self._schedule = torch_class(
            scheduled[0] if schedule.chunks == 1 else scheduled,
            self._count,
            loss_fn=lambda loss, _: loss / self._count,
            scale_grads=False,
        )
        self._device = torch.device(scheduled[0].device)

    def step(self, batches: Sequence[Arguments], first_step: int) -> Tensor:
        """Forward and backward of all micro-batches; the mean of their losses, on every rank."""
        for stage in self._stages:
            stage.begin(batches, first_step)
        losses: list[Tensor] = []
        numbers = torch.arange(self._count)
        self._schedule.step(target=numbers, losses=losses, return_outputs=False)
        for stage in reversed(self._stages):
            stage.finish()
        total = torch.zeros((), device=self._device)
        if losses:
            total = torch.stack([loss.detach().float() for loss in losses]).sum()
        dist.broadcast(total, group=self._group, group_src=self._last_rank)
        return total


def _evaluated(
    pipeline: Pipeline,
    root: StoredModule,
    arguments: Arguments,
    group: dist.ProcessGroup,
    randomness: tuple[int, int, bool],
) -> list[Any]:
    """The flat outputs of a batch on every rank: stage after stage, each on its rank."""
    schedule, here = pipeline.schedule, dist.get_rank(group)
    last = pipeline.programs[-1]
    sent: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    for number, executable in pipeline.executables.items():
        program = executable.program
        given = {**executable.constants, **executable.weights_of(root), **executable.buffers_of(root)}
        given.update(executable.inputs_of(arguments))
        if number and schedule.rank_of(number - 1) != here:
            device = executable.mesh.device_type
            sent = tuple(torch.empty_like(each, device=device) for each in received_tensors(executable))
            for each in sent:
                dist.recv(each, group=group, group_src=schedule.rank_of(number - 1))
        given.update(zip(program.received, sent, strict=True))
        with executable.surroundings(*randomness):
            outputs = executable.local.module(*(given[name] for name in executable.local.placeholders))
        executable.write_buffers(root, outputs)
        sent = tuple(each.contiguous() for each in outputs[: program.num_sent])
        if number < schedule.num_stages - 1 and schedule.rank_of(number + 1) != here:
            for each in sent:
                dist.send(each, group=group, group_dst=schedule.rank_of(number + 1))
    source = schedule.rank_of(schedule.num_stages - 1)
    executable = next(iter(pipeline.executables.values()))
    shapes = result_tensors(last.output[: last.num_outputs], pipeline.result_layouts, executable.mesh.shape)
    results = list(outputs[: last.num_outputs]) if here == source else shapes
    for place, layout in enumerate(pipeline.result_layouts):
        if layout is not None:
            value = results[place]
            value = (
                value.contiguous() if here == source else torch.empty_like(value, device=executable.mesh.device_type)
            )
            dist.broadcast(value, group=group, group_src=source)
            results[place] = value
    return results
