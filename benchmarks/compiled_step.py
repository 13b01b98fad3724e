"""Seconds of a training step whose forward, backward and optimizer step are compiled by Inductor, on gloo ranks.

Contestants of a row are autopar eager, autopar compiled and PyTorch's own tool compiled; they take turns, step by step,
so that what else the machine does weighs on all alike. A step takes as long as on the slowest rank; medians of the
processor's seconds and of the clock's count. Each has its optimizer's step compiled, too (AdamW, foreach).

    python -m benchmarks.compiled_step                  data_parallel, zero3, megatron with and without the sequence,
                                                        and zero3 with micro-batches
    python -m benchmarks.compiled_step --only zero3 --steps 40
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.runtime.ranks.launch import World, on_ranks
from benchmarks import transformer_pairs as pairs
from benchmarks.timed_training import TimedTraining, adamw, of_every_rank, train_in_turns
from benchmarks.transformer_model import Size, batch, transformer
from benchmarks.transformer_pairs import Scheduled

SIZE = Size(2, 256, 4)
MICROBATCHES = 2


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy: what autopar runs, and PyTorch's own tool, if it has the same."""

    name: str
    ours: Callable[[Size, DeviceMesh, bool], pairs.Contestant]
    theirs: Callable[[Size, DeviceMesh, bool], pairs.Contestant] | None


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    only: tuple[str, ...]
    steps: int
    size: Size = SIZE


def _in_microbatches(size: Size, mesh: DeviceMesh, compiled: bool) -> Scheduled:
    model = autopar.compile(transformer(size), mesh, batch(size), strategy="zero3", microbatches=MICROBATCHES)
    if compiled:
        model.compile()
    return Scheduled(model, partial(model.train_step, *batch(size)))


def _fsdp2_in_microbatches(size: Size, mesh: DeviceMesh, compiled: bool) -> Scheduled:
    peer = pairs.fsdp2(size, mesh, compiled)

    def step() -> Tensor:
        losses = []
        for number, part in enumerate(zip(*(x.chunk(MICROBATCHES) for x in peer.inputs), strict=True)):
            peer.model.set_requires_gradient_sync(number == MICROBATCHES - 1)  # pyright: ignore[reportCallIssue]
            loss = peer.model(*part) / MICROBATCHES
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return Scheduled(peer.model, step)


ROWS = (
    Row("data_parallel", pairs.data_parallel, pairs.ddp),
    Row("zero3", pairs.zero3, pairs.fsdp2),
    Row("megatron", pairs.megatron, pairs.dtensor),
    Row("megatron_sequence", pairs.megatron_sequence, pairs.dtensor_sequence),
    Row("zero3-microbatches", _in_microbatches, _fsdp2_in_microbatches),
)


class Trained(TimedTraining):
    """A contestant with its optimizer, whose step may be compiled."""

    def __init__(self, contestant: pairs.Contestant, compiled: bool) -> None:
        optimizer = adamw(contestant.model.parameters())
        if compiled:
            optimizer.step = torch.compile(optimizer.step)
        super().__init__(optimizer, contestant.forward_and_backward)


def measured(row: Row, options: Options) -> list[object]:
    """Return the cells of a row; runs on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    torch._dynamo.reset()
    built = [(row.ours, False), (row.ours, True), *([] if row.theirs is None else [(row.theirs, True)])]
    trained = [Trained(build(options.size, mesh, compiled), compiled) for build, compiled in built]
    train_in_turns(trained, options.steps)
    eager, compiled, *theirs = (_of_slowest_rank(each) for each in trained)
    losses = [of_every_rank(each.loss) for each in trained]
    apart = max(abs(statistics.fmean(each) - statistics.fmean(losses[0])) for each in losses)  # a peer has its samples'
    cells: list[object] = [row.name, *(f"{1e3 * each[0]:.1f}" for each in (eager, compiled, *theirs))]
    ratios = [compiled[kind] / other[kind] for other in (eager, *theirs) for kind in (0, 1)]
    return [*cells, *(f"{each:.2f}" for each in ratios), f"{apart:.0e}"]


HEADERS = (
    "strategy",
    "eager ms",
    "compiled ms",
    "peer compiled ms",
    "compiled / eager",
    "of processor",
    "compiled / peer",
    "of processor",
    "loss apart",
)


def _of_slowest_rank(trained: Trained) -> tuple[float, float]:
    """Return the medians over steps of the slowest rank's seconds, by the clock and of the processor."""
    of_ranks = of_every_rank(trained.seconds)
    clock, processor = (
        statistics.median(max(times[kind] for times in step) for step in zip(*of_ranks, strict=True)) for kind in (0, 1)
    )
    return clock, processor


def _rows(options: Options) -> list[list[object]]:
    return [measured(row, options) for row in ROWS if not options.only or row.name in options.only]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[row.name for row in ROWS], default=[])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    given = parser.parse_args(arguments)
    options = Options(tuple(given.only), given.steps)
    if given.tiny:
        options = replace(options, size=Size(1, 32, 4, vocabulary=64, batch=4, sequence=8))
    print(tabulate(on_ranks(World(2), _rows, (options,)), HEADERS, disable_numparse=True))


if __name__ == "__main__":
    main()
