"""Kernels, ATen operations and Python calls of a training step on the host, compared with PyTorch's own tools.

One process is rank 0 of many: torch's fake process group moves nothing, so that 512 ranks need no machine. Both sides
train the decoder of `transformer_model` on a global batch of one sample per rank, with AdamW (foreach). The third step
is counted by a TorchDispatchMode, the fourth by `sys.setprofile`. What ranks would receive is made up
(`step_exchanges`). Counted are

    operations    calls that reach ATen, or an operator of a library, below autograd
    kernels       those that write values: neither views, nor allocations, nor collectives. A foreach operation is one
                  kernel only if each pair of its tensors is dense and has equal strides, as CUDA demands; a peer's
                  fused operation (`fsdp::chunk_cat` …) is one
    calls         Python functions that are called

in each phase, and in all of them together (`total`).

    python -m benchmarks.step_operations                                all cases on 8, 64 and 512 ranks: some minutes
    python -m benchmarks.step_operations --only zero3 --ranks 8 512

target: kernels are as many on 512 ranks as on 8, and at most 1.1 × the peer's; Python calls and operations of a step
(`total`) are at most the peer's.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Link, Protocol
from autopar.ir.program.precision import NAMED
from autopar.tools.benchmarking.baselines import own_samples
from benchmarks.step_counts import Contestant, Counts, counted
from benchmarks.step_exchanges import NUM_EXPERTS, STAGES, experts, experts_by_hand, pipeline, pipeline_by_hand
from benchmarks.transformer_model import Size, Transformer, batch, transformer
from benchmarks.transformer_pairs import styles_of
from tests.support.simulation.fake_mesh import fake_mesh

MIXED = "bf16-mixed"
TENSOR = 8  # ranks of tensor parallelism
LATENCY_S = 20e-6
MACHINE = replace(load("h100"), links=(Link("network", None, 0.0, 450e9, (Protocol("messages", "ring", LATENCY_S),)),))
"""A network whose latency is the same for any number of ranks, so that the collectives of a plan are, too."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A case on a number of ranks, in a precision, with or without recomputation."""

    ranks: int
    precision: str | None
    recompute: str
    size: Size

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The precision as FSDP2 has it."""
        found = NAMED[self.precision] if self.precision else None
        return MixedPrecisionPolicy(found.compute, found.reduce) if found else MixedPrecisionPolicy()

    def model(self) -> Transformer:
        """Return a peer's model, its layers checkpointed if they are computed again."""
        model = transformer(self.size)
        if self.recompute == "full":
            for number, block in enumerate(model.blocks):
                model.blocks[number] = checkpoint_wrapper(block)
        return model


Build = Callable[[Setting, DeviceMesh], Contestant]


def ours(strategy: str) -> Build:
    """Return what compiles with a preset."""

    def build(setting: Setting, mesh: DeviceMesh) -> Contestant:
        inputs = batch(setting.size)
        memory: Any = {"recompute": setting.recompute}  # one of its words
        options: Any = {"strategy": strategy, "precision": setting.precision, "memory": autopar.Memory(**memory)}
        return Contestant.of(
            autopar.compile(transformer(setting.size), mesh, inputs, hardware=MACHINE, **options), inputs
        )

    return build


def ddp(setting: Setting, mesh: DeviceMesh) -> Contestant:
    """DistributedDataParallel; a hook stands for its collectives, whose results a fake world has not."""
    inputs = own_samples(batch(setting.size), mesh)
    model = DistributedDataParallel(setting.model(), process_group=mesh.get_group(), gradient_as_bucket_view=True)

    model.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer().div_(mesh.size())))
    if setting.precision is None:
        return Contestant.of(model, inputs)
    return Contestant.of(model, inputs, lambda: torch.autocast("cpu", torch.bfloat16))


def _done(result: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


def fsdp2(setting: Setting, mesh: DeviceMesh) -> Contestant:
    """`fully_shard` of each layer and of the root; over two axes as hybrid sharding."""
    model = setting.model()
    whole = mesh if mesh.ndim == 1 else mesh._flatten("all")
    return Contestant.of(_sharded(model, mesh, setting), own_samples(batch(setting.size), whole))


def zero2_by_fsdp2(setting: Setting, mesh: DeviceMesh) -> Contestant:
    """`fully_shard` that keeps gathered weights for the backward."""
    model = _sharded(setting.model(), mesh, setting, reshard_after_forward=False)
    return Contestant.of(model, own_samples(batch(setting.size), mesh))


def _sharded(model: Transformer, mesh: DeviceMesh, setting: Setting, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=setting.policy, **options)
    fully_shard(model, mesh=mesh, mp_policy=setting.policy, **options)
    return model


def dtensor(sequence: bool) -> Build:
    """Return what parallelizes the last axis by `parallelize_module`, and shards over one before it."""

    def build(setting: Setting, mesh: DeviceMesh) -> Contestant:
        model = transformer(setting.size)
        inner = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]
        parallelize_module(model, inner, styles_of(sequence))
        if setting.recompute == "full":
            for number, block in enumerate(model.blocks):
                model.blocks[number] = checkpoint_wrapper(block)
        inputs = batch(setting.size)
        if mesh.ndim == 1:
            return Contestant.of(model, inputs, lambda: _autocast_with_parallel_loss(setting.precision is not None))
        outer = mesh[mesh.mesh_dim_names[0]]  # type: ignore[index]
        return Contestant.of(_sharded(model, outer, setting), own_samples(inputs, outer), loss_parallel)

    return build


@contextlib.contextmanager
def _autocast_with_parallel_loss(mixed: bool) -> Iterator[None]:
    with loss_parallel(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        yield


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy, its mesh, and what it is compared with."""

    name: str
    axes: Callable[[int], Mapping[str, int]]
    ours: Build
    theirs: Build
    peer: str
    any_number: bool = True
    """True if the case also runs on more than TENSOR ranks."""
    recomputes: bool = True
    """True if it is counted with full recomputation, too."""
    layers: int = 1
    """Times as many layers as requested."""


def of_schedule(schedule: str) -> tuple[Build, Build]:
    """Return a pipeline by autopar, and one by hand."""
    return (
        lambda setting, mesh: pipeline(setting.size, mesh, schedule, setting.precision, MACHINE),
        lambda setting, mesh: pipeline_by_hand(setting.size, mesh, schedule, setting.precision),
    )


def _stages(ranks: int) -> Mapping[str, int]:
    return {"dp": ranks // STAGES, "pp": STAGES}


def _flat(ranks: int) -> Mapping[str, int]:
    return {"dp": ranks}


def _tensor(ranks: int) -> Mapping[str, int]:
    return {"tp": ranks}


CASES = (
    Case("data_parallel", _flat, ours("data_parallel"), ddp, "DDP"),
    Case("zero1", _flat, ours("zero1"), zero2_by_fsdp2, "FSDP2, kept"),
    Case("zero2", _flat, ours("zero2"), zero2_by_fsdp2, "FSDP2, kept"),
    Case("zero3", _flat, ours("zero3"), fsdp2, "FSDP2"),
    Case("hsdp", lambda ranks: {"dp": 2, "fsdp": ranks // 2}, ours("hsdp"), fsdp2, "FSDP2, hybrid"),
    Case("megatron", _tensor, ours("megatron"), dtensor(False), "DTensor", False),
    Case("megatron_sequence", _tensor, ours("megatron_sequence"), dtensor(True), "DTensor", False),
    Case(
        "fsdp_megatron",
        lambda ranks: {"dp": max(2, ranks // TENSOR), "tp": min(TENSOR, ranks // 2)},
        ours("fsdp_megatron"),
        dtensor(False),
        "FSDP2 + DTensor",
    ),
    Case(
        "expert_data",
        lambda ranks: {"dp": max(2, ranks // NUM_EXPERTS), "ep": min(NUM_EXPERTS, ranks // 2)},
        lambda setting, mesh: experts(setting.size, mesh, setting.precision, MACHINE),
        lambda setting, mesh: experts_by_hand(setting.size, mesh, setting.precision, MACHINE),
        "by hand, as torchtitan",
        recomputes=False,
    ),
    *(
        Case(schedule, _stages, *of_schedule(schedule), "torch.distributed.pipelining", recomputes=False, layers=4)
        for schedule in ("1f1b", "interleaved_zero_bubble")
    ),
)


HEADERS = (
    *("case", "ranks", "precision", "recompute", "phase"),
    *("kernels", "peer", "ratio", "operations", "peer", "ratio", "calls", "peer", "ratio"),
)


def rows_of(case: Case, setting: Setting, names: bool = False) -> list[tuple[object, ...]]:
    """Return the lines of a case: a line per phase, both sides in one."""
    sides = []
    for build in (case.ours, case.theirs):
        with fake_mesh(case.axes(setting.ranks)) as mesh:
            phases, operations = counted(build(setting, mesh))
        sides.append(phases)
        if names:
            for phase, found in operations.items():
                print(build.__qualname__, phase, found.kernels.most_common(16), found.every.most_common(12), sep="\n  ")
    lines = []
    for side in sides:
        side["total"] = sum(side.values(), Counts())
    for phase, here in sides[0].items():
        there = sides[1][phase]
        pairs = [[getattr(each, name) for each in (here, there)] for name in ("kernels", "operations", "calls")]
        cells = [cell for one, other in pairs for cell in (one, other, f"{one / max(other, 1):.2f}")]
        lines.append(
            (f"{case.name} / {case.peer}", setting.ranks, setting.precision or "fp32", setting.recompute, phase, *cells)
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], default=[])
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 64, 512])
    parser.add_argument("--precisions", nargs="*", choices=["fp32", MIXED], default=["fp32", MIXED])
    parser.add_argument("--recompute", nargs="*", choices=["none", "full"], default=["none", "full"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--names", action="store_true", help="print what is counted, by name, most frequent first")
    given = parser.parse_args(arguments)
    lines = []
    for case in CASES:
        for ranks in given.ranks:
            for precision in given.precisions:
                for recompute in given.recompute:
                    if (given.only and case.name not in given.only) or (ranks > TENSOR and not case.any_number):
                        continue
                    if recompute != "none" and not case.recomputes:
                        continue
                    size = Size(case.layers * given.layers, given.hidden, TENSOR, 1024, ranks, 8)
                    setting = Setting(ranks, None if precision == "fp32" else precision, recompute, size)
                    lines += rows_of(case, setting, given.names)
    print(tabulate(lines, HEADERS, disable_numparse=True))


if __name__ == "__main__":
    main()
