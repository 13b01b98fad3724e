"""Contestants of `step_operations` that compute with what they receive: stages of pipelines, experts.

On a fake process group nothing arrives. A stage is told that its neighbours send what it sends itself, and ranks get
the numbers of rows that they send.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining._utils import _StageBackwardMeta
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import autopar
from autopar.costs.hardware.profile import Hardware
from autopar.tools.benchmarking import expert_peers
from autopar.tools.benchmarking.baselines import own_samples
from benchmarks.experts import Options, batch_of, model_of
from benchmarks.pipelines_by_hand import HandStage, cuts
from benchmarks.step_counts import Contestant, stepped
from benchmarks.transformer_model import Size, batch, loss_of, transformer

STAGES = 4  # ranks of a pipeline
MICROBATCHES = 4
NUM_EXPERTS = 8
STAGES_PER_RANK = {"1f1b": 1, "interleaved_zero_bubble": 2}
TOKENS_PER_RANK = 64


@contextlib.contextmanager
def neighbours_like_this_one() -> Iterator[None]:
    """Let stages believe that neighbours send tensors such as they send."""
    sent: list[Any] = []
    receive, send = PipelineStage._recv_meta, PipelineStage._send_meta

    def received(stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return sent[0]
        gradients = (replace(each, requires_grad=False) if each.requires_grad else None for each in outputs_of(stage))
        return _StageBackwardMeta(backward_metas=tuple(gradients))

    def outputs_of(stage: Any) -> Any:
        return stage._stage_meta.outputs

    PipelineStage._recv_meta = received  # type: ignore[method-assign]
    PipelineStage._send_meta = lambda stage, meta, target: sent.append(meta)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        PipelineStage._recv_meta, PipelineStage._send_meta = receive, send  # type: ignore[method-assign]


class RowsAsSent(TorchDispatchMode):
    """An exchange of numbers of rows gives those that were sent."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        pair = None
        if func._opname == "all_to_all_single":
            pair = found, args[0]
        elif func._opname == "alltoall_base_":
            pair = args[:2]
        if pair is not None and not pair[1].is_floating_point():
            with _disable_current_modes():  # uncounted
                pair[0].copy_(pair[1])
        return found


def pipeline(size: Size, mesh: DeviceMesh, schedule: str, precision: str | None, hardware: Hardware) -> Contestant:
    """A pipeline by autopar, cut into stages of equally many layers."""
    inputs, stages = batch(size), cuts(size, STAGES * STAGES_PER_RANK[schedule])
    model: Any = autopar.compile(
        *(transformer(size), mesh, inputs),
        strategy="data_parallel",
        hardware=hardware,
        precision=precision,
        microbatches=MICROBATCHES,
        pipeline=autopar.Pipeline(schedule=schedule, split_points=stages),
    )

    def train() -> None:
        with neighbours_like_this_one():
            model.train_step(*inputs)

    return Contestant({"train": train, "step": stepped(model)})


def pipeline_by_hand(size: Size, mesh: DeviceMesh, schedule: str, precision: str | None) -> Contestant:
    """`torch.distributed.pipelining` on stages cut by hand, whose gradients are summed in one all-reduce."""
    data, group = mesh["dp"], mesh.get_group("pp")
    num_stages = STAGES * STAGES_PER_RANK[schedule]
    whole, numbers = transformer(size), range(0, num_stages, STAGES)
    modules: list[nn.Module] = [HandStage(whole, number, num_stages) for number in numbers]
    stages: Any = [
        PipelineStage(each, number, num_stages, torch.device("cpu"), group=group)
        for each, number in zip(modules, numbers, strict=True)
    ]
    runs: Any = (
        Schedule1F1B(stages[0], MICROBATCHES, loss_of)
        if schedule == "1f1b"
        else ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_of)
    )
    ids, _ = own_samples(batch(size), data)

    def train() -> None:
        with neighbours_like_this_one(), torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
            runs.step(ids, return_outputs=False)
        summed([each for module in modules for each in module.parameters()], data.get_group())

    return Contestant({"train": train, "step": stepped(nn.ModuleList(modules))})


def summed(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters in one all-reduce."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([each.numel() for each in gradients])
    views = [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)]
    torch._foreach_copy_(gradients, views)  # pyright: ignore[reportPrivateImportUsage]


def _experts(size: Size, hardware: Hardware) -> Options:
    return Options((), 1, size.hidden, size.hidden, NUM_EXPERTS, 2, size.num_layers, NUM_EXPERTS, hardware)


def _tokens(size: Size, options: Options) -> tuple[Tensor, Tensor]:
    x, target = batch_of(options, TOKENS_PER_RANK * 8)
    return tuple(each[:1, :TOKENS_PER_RANK].expand(size.batch, -1, -1).contiguous() for each in (x, target))  # type: ignore[return-value]


def experts(size: Size, mesh: DeviceMesh, precision: str | None, hardware: Hardware) -> Contestant:
    """Experts over an axis, the batch over all, by autopar."""
    options = _experts(size, hardware)
    inputs, requested = (
        _tokens(size, options),
        {"strategy": "expert_data", "precision": precision, "hardware": hardware},
    )
    with RowsAsSent():
        made = Contestant.of(autopar.compile(model_of(options), mesh, inputs, **requested), inputs)
    return _with_rows(made)


def experts_by_hand(size: Size, mesh: DeviceMesh, precision: str | None, hardware: Hardware) -> Contestant:
    """Tokens sent to experts and home as torchtitan does; gradients are summed in one all-reduce per group of ranks."""
    options = _experts(size, hardware)
    model = model_of(options)
    layers: list[Any] = list(model.layers)
    expert_peers.dispatch_by_hand([layer.mlp.experts for layer in layers], mesh["ep"])
    inputs = own_samples(_tokens(size, options), mesh._flatten("all"))
    named = list(model.named_parameters())
    apart = [[p for name, p in named if (".experts." in name) is of_experts] for of_experts in (False, True)]
    groups = (mesh["all"].get_group(), mesh.get_group("dp"))
    losses: list[Tensor] = []

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
            losses.append(model(*inputs))

    def backward() -> None:
        losses.pop().backward()
        for parameters, group in zip(apart, groups, strict=True):
            summed(parameters, group)

    return _with_rows(Contestant({"forward": forward, "backward": backward, "step": stepped(model)}))


def _with_rows(made: Contestant) -> Contestant:
    """The same phases, each of them told how many rows arrive."""

    def told(run: Any) -> Any:
        def phase() -> None:
            with RowsAsSent():
                run()

        return phase

    return Contestant({name: told(run) for name, run in made.phases.items()})
