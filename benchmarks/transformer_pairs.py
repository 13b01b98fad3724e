"""One transformer, parallelized by autopar and by PyTorch's own tools, each as its users would do it at their best.

Every contestant takes the same global batch and trains the same weights. Vocabulary, attention heads and hidden layers
are split alike by both sides, and so is the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import autopar
from autopar.ir.program.precision import NAMED
from autopar.tools.benchmarking import baselines
from autopar.tools.benchmarking.baselines import Baseline
from benchmarks.pipelines_by_hand import MICROBATCHES, ByHand, cuts
from benchmarks.transformer_model import Size, batch, transformer

MIXED = "bf16-mixed"


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A model that is trained by a step of its own, which gives the loss of the batch where it is known."""

    model: nn.Module
    forward_and_backward: Callable[[], Tensor]


Contestant = Baseline | Scheduled


def ddp(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """DistributedDataParallel as `autopar bench` runs it."""
    peer = baselines.ddp(transformer(size), mesh, batch(size))
    if compiled:
        peer.model.compile()
    return peer


def fsdp2(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """`fully_shard` as `autopar bench` runs it, its layers compiled one by one."""
    return _fsdp2(size, mesh, compiled, MixedPrecisionPolicy())


def bf16_mixed_fsdp2(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """The same with the policy that autopar calls bf16-mixed."""
    requested = NAMED[MIXED]
    return _fsdp2(size, mesh, compiled, MixedPrecisionPolicy(requested.compute, requested.reduce))


def _fsdp2(size: Size, mesh: DeviceMesh, compiled: bool, policy: MixedPrecisionPolicy) -> Baseline:
    model = transformer(size)
    if compiled:
        for block in model.blocks:
            block.compile()
    return baselines.fsdp2(model, mesh, batch(size), policy)


def _split_block(sequence: bool) -> Mapping[str, ParallelStyle]:
    """The styles of a layer, as in PyTorch's tensor parallelism tutorial."""
    row = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    columns = ("attention.q", "attention.k", "attention.v", "feedforward.up")
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    styles |= {"attention.o": row, "feedforward.down": row}
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        styles |= {"attention": whole, "feedforward": whole}
        styles |= {"attention_norm": SequenceParallel(), "feedforward_norm": SequenceParallel()}
    return styles


def styles_of(sequence: bool) -> dict[str, ParallelStyle]:
    """Return the styles of the whole decoder, with or without sequence parallelism."""
    between = Shard(1) if sequence else Replicate()
    around: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        around["norm"] = SequenceParallel()
    return {**around, **{f"blocks.*.{name}": style for name, style in _split_block(sequence).items()}}


def _dtensor(size: Size, mesh: DeviceMesh, compiled: bool, sequence: bool) -> Baseline:
    model = transformer(size)
    parallelize_module(model, mesh, styles_of(sequence))
    if compiled:
        model.compile()
    return Baseline(model, batch(size), loss_parallel)


def dtensor(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """`parallelize_module`: tensor parallelism with the loss split over the vocabulary."""
    return _dtensor(size, mesh, compiled, sequence=False)


def dtensor_sequence(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """The same with sequence parallelism between the split projections."""
    return _dtensor(size, mesh, compiled, sequence=True)


def pipeline_by_hand(size: Size, mesh: DeviceMesh, compiled: bool) -> Scheduled:
    """Stages of equally many layers on `Schedule1F1B`."""
    return _by_hand(size, mesh, compiled, 1)


def interleaved_by_hand(size: Size, mesh: DeviceMesh, compiled: bool) -> Scheduled:
    """Two such stages on each rank, on `ScheduleInterleaved1F1B`."""
    return _by_hand(size, mesh, compiled, 2)


def _by_hand(size: Size, mesh: DeviceMesh, compiled: bool, stages_per_rank: int) -> Scheduled:
    made = ByHand(size, mesh, stages_per_rank, compiled)
    return Scheduled(made.model, made.forward_and_backward)


def _planned(size: Size, mesh: DeviceMesh, compiled: bool, strategy: str, precision: str | None = None) -> Baseline:
    found = autopar.compile(
        *(transformer(size), mesh, batch(size)),
        strategy=strategy,
        memory=autopar.Memory(recompute="none"),
        precision=precision,
    )
    if compiled:
        found.compile()
    return Baseline(found, batch(size))


def data_parallel(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """The preset of that name; so are `zero3`, `megatron`, `megatron_sequence` and `async_tensor_parallel`."""
    return _planned(size, mesh, compiled, "data_parallel")


def zero3(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """Parameters in parts, gathered where they are used."""
    return _planned(size, mesh, compiled, "zero3")


def bf16_mixed_zero3(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """Parameters stored and gradients added up in float32, computed with in bfloat16."""
    return _planned(size, mesh, compiled, "zero3", MIXED)


def megatron(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """Projections and vocabulary split."""
    return _planned(size, mesh, compiled, "megatron")


def megatron_sequence(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """The same with norms on parts of the sequence."""
    return _planned(size, mesh, compiled, "megatron_sequence")


def async_tensor_parallel(size: Size, mesh: DeviceMesh, compiled: bool) -> Baseline:
    """Build `megatron_sequence` with matmuls in chunks that overlap with collectives."""
    return _planned(size, mesh, compiled, "async_tensor_parallel")


def pipeline(size: Size, mesh: DeviceMesh, compiled: bool) -> Scheduled:
    """A stage on each rank, cut where it is cut by hand."""
    return _pipelined(size, mesh, compiled, "1f1b", 1)


def interleaved(size: Size, mesh: DeviceMesh, compiled: bool) -> Scheduled:
    """Two stages on each rank."""
    return _pipelined(size, mesh, compiled, "interleaved_1f1b", 2)


def _pipelined(size: Size, mesh: DeviceMesh, compiled: bool, schedule: str, stages_per_rank: int) -> Scheduled:
    assert mesh.mesh_dim_names, "a mesh of autopar names its axes"
    inputs, axis = batch(size), mesh.mesh_dim_names[0]
    model: Any = autopar.compile(
        transformer(size),
        mesh,
        inputs,
        microbatches=MICROBATCHES,
        pipeline=autopar.Pipeline(axis, schedule, split_points=cuts(size, mesh.size() * stages_per_rank)),
        memory=autopar.Memory(recompute="none"),
    )
    if compiled:
        model.compile()
    return Scheduled(model, lambda: model.train_step(*inputs))


Build = Callable[[Size, DeviceMesh, bool], Contestant]


@dataclass(frozen=True, slots=True)
class Pair:
    """A training by autopar and the one it is compared with, with a goal in time and, optionally, in memory."""

    ours: Build
    theirs: Build
    goal: float
    memory_goal: float | None = None
    least_layers: int = 1
    """A smaller model has too few for its stages."""


PAIRS = (
    Pair(data_parallel, ddp, 1.0),
    Pair(zero3, fsdp2, 1.0, 1.0),
    Pair(megatron, dtensor, 0.75),
    Pair(megatron_sequence, dtensor_sequence, 0.8),
    Pair(async_tensor_parallel, megatron_sequence, 1.0),
    Pair(bf16_mixed_zero3, bf16_mixed_fsdp2, 1.0, 1.0),
    Pair(pipeline, pipeline_by_hand, 1.0, 1.0, least_layers=2),
    Pair(interleaved, interleaved_by_hand, 1.0, 1.0, least_layers=4),
)
