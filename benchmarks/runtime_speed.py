"""Seconds and peak memory of a training step by autopar and by PyTorch's own tools, on gloo ranks of one thread
each.

A step clears the gradients, and is forward, backward and AdamW (foreach) in fp32. The two of a pair take turns, step by
step, so that what else the machine does weighs on both alike; a step takes as long as its slowest rank, and the median
of the steps counts. Seconds of processor time, which a busy machine bends less, are also measured. Memory is what
tensors of a rank hold at the highest moment of a step, with parameters, optimizer state and the buffers of gradients;
what compiled code holds is not seen, so it is measured without torch.compile.

    python -m benchmarks.runtime_speed                     both sizes: some minutes
    python -m benchmarks.runtime_speed --compile           with torch.compile on top of every contestant
    python -m benchmarks.runtime_speed --only zero3 --steps 50

target: data_parallel ≤ 1.0 × DDP, zero3 ≤ 1.0 × FSDP2 in time and memory (in fp32, and in bf16-mixed with the same
policy), megatron ≤ 0.75 and megatron_sequence ≤ 0.8 × DTensor, async_tensor_parallel ≤ 1.0 × megatron_sequence, and
pipelines ≤ 1.0 × the same stages cut by hand on torch's schedules, in time and memory.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

from autopar.runtime.ranks.launch import World, on_ranks
from autopar.tools.benchmarking.meters import held_in_training, peak_bytes
from benchmarks.timed_training import TimedTraining, adamw, of_every_rank, train_in_turns
from benchmarks.transformer_model import Size
from benchmarks.transformer_pairs import PAIRS, Contestant, Pair

SIZES = {
    "d256": Size(4, 256, 4),
    "d1024": Size(2, 1024, 16),
    "tiny": Size(1, 32, 4, vocabulary=64, batch=4, sequence=8),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    sizes: tuple[str, ...]
    only: tuple[str, ...]
    steps: int
    compiled: bool
    world_size: int = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A pair on one size: seconds and bytes of ours and theirs, and how far apart their losses are after all steps."""

    size: str
    ours: str
    theirs: str
    seconds: tuple[float, float]
    processor_seconds: tuple[float, float]
    num_bytes: tuple[int, int] | None
    """None where it was not measured."""
    apart: float
    goal: float
    memory_goal: float | None

    def cells(self) -> tuple[object, ...]:
        return (
            self.size,
            f"{self.ours} / {self.theirs}",
            *(f"{1e3 * each:.1f}" for each in self.seconds),
            f"{self.seconds[0] / self.seconds[1]:.2f}",
            f"{self.goal:.2f}",
            *(f"{1e3 * each:.1f}" for each in self.processor_seconds),
            f"{self.processor_seconds[0] / self.processor_seconds[1]:.2f}",
            *self._memory_cells(),
            "" if self.memory_goal is None else f"{self.memory_goal:.2f}",
            f"{self.apart:.0e}",
        )

    def _memory_cells(self) -> tuple[str, ...]:
        if self.num_bytes is None:
            return "", "", ""
        ours, theirs = self.num_bytes
        return f"{ours / 2**20:.1f}", f"{theirs / 2**20:.1f}", f"{ours / theirs:.2f}"


HEADERS = (
    "model",
    "pair",
    "ms",
    "ms",
    "ratio",
    "goal",
    "cpu ms",
    "cpu ms",
    "ratio",
    "MiB",
    "MiB",
    "ratio",
    "goal",
    "loss apart",
)


class Trained(TimedTraining):
    """A contestant with its optimizer, and the seconds of its steps."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        super().__init__(adamw(contestant.model.parameters()), contestant.forward_and_backward)

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that are resident between steps; gradients may lie in persistent buffers."""
        return held_in_training(self.contestant.model, self.optimizer)


def _measured(pair: Pair, size: str, options: Options) -> Line:
    """A pair on one size, its contestants in turns (runs on every rank; the line is the same on all)."""
    mesh = init_device_mesh("cpu", (options.world_size,), mesh_dim_names=("ranks",))
    both = [Trained(build(SIZES[size], mesh, options.compiled)) for build in (pair.ours, pair.theirs)]
    train_in_turns(both, options.steps)
    ours, theirs = (_over_ranks(each) for each in both)
    return Line(
        str(SIZES[size]),
        pair.ours.__name__,
        pair.theirs.__name__,
        (ours[0], theirs[0]),
        (ours[1], theirs[1]),
        None if options.compiled else (_peak(both[0]), _peak(both[1])),
        abs(ours[2] - theirs[2]),
        pair.goal,
        pair.memory_goal,
    )


def _over_ranks(trained: Trained) -> tuple[float, float, float]:
    """Medians of the slowest rank's seconds, by the clock and of the processor, and the mean of the known losses."""
    seconds, losses = zip(*of_every_rank((trained.seconds, trained.loss)), strict=True)
    clock, processor = (
        statistics.median(max(times[kind] for times in step) for step in zip(*seconds, strict=True)) for kind in (0, 1)
    )
    return clock, processor, statistics.fmean(loss for loss in losses if not math.isnan(loss))


def _peak(trained: Trained) -> int:
    """Bytes at the highest moment of one more step, on the rank that holds most."""
    return max(of_every_rank(peak_bytes(trained.step, trained.optimizer.zero_grad, trained.held)))


def _lines(options: Options) -> list[Line]:
    """The lines of all sizes and pairs; runs on every rank."""
    pairs = [pair for pair in PAIRS if not options.only or pair.ours.__name__ in options.only]
    return [
        _measured(pair, size, options)
        for size in options.sizes
        for pair in pairs
        if SIZES[size].num_layers >= pair.least_layers
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["d256", "d1024"])
    parser.add_argument("--only", nargs="*", choices=[pair.ours.__name__ for pair in PAIRS], default=[])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args(arguments)
    options = Options(tuple(given.sizes), tuple(given.only), given.steps, given.compile)
    lines: list[Line] = on_ranks(World(options.world_size), _lines, (options,))
    print(tabulate([line.cells() for line in lines], HEADERS, disable_numparse=True))


if __name__ == "__main__":
    main()
