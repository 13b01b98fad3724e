"""Weights gathered ahead of their use and at their use, compared: seconds of a step, on gloo
ranks.

The model is a stack of equal blocks under `zero3`. Contestants differ in `prefetch` alone and take turns, step by step,
so that what else the machine does weighs on all alike. A step takes as long as on the slowest rank; medians count.

    python -m benchmarks.prefetch                       8 blocks, none and one layer ahead
    python -m benchmarks.prefetch --depths 0 1 2 --steps 20

Gloo's threads need the cores that compute: on a machine with no more cores than ranks there is little to gain.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.ranks.launch import World, on_ranks
from benchmarks.timed_training import TimedTraining

WARM_UP = 2  # steps; the first one plans


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    depths: tuple[int, ...]
    layers: int
    hidden: int
    rows: int
    steps: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Line:
    """A contestant: seconds of a step by the clock and of the processor, predicted bytes, and the last loss."""

    depth: int
    seconds: float
    processor: float
    predicted: int
    loss: float


class Stack(nn.Module):
    """Blocks of two linear layers around a residual stream."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Rows [batch, hidden] → mean square of what comes out."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def measured(options: Options) -> list[Line]:
    """All contestants; runs on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    x = torch.randn(options.rows, options.hidden, generator=torch.Generator().manual_seed(0))
    contestants, peaks = [], []
    for depth in options.depths:
        torch.manual_seed(0)
        model = Stack(options.layers, options.hidden)
        compiled = autopar.compile(model, mesh, (x,), strategy="zero3", memory=autopar.Memory(prefetch=depth))  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(compiled.parameters(), lr=1e-2)
        contestants.append(TimedTraining(optimizer, lambda compiled=compiled: _forward_and_backward(compiled, x)))
        peaks.append(compiled.plan.peak_bytes)
    for number in range(WARM_UP + options.steps):
        for each in contestants:
            took = torch.tensor(each.step(), dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= WARM_UP:
                each.seconds.append((float(took[0]), float(took[1])))
    found = []
    for depth, trained, peak in zip(options.depths, contestants, peaks, strict=True):
        seconds, processor = (statistics.median(each) for each in zip(*trained.seconds, strict=True))
        found.append(Line(depth, seconds, processor, peak, trained.loss))
    return found


def _forward_and_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward()
    return loss


def table(lines: Sequence[Line]) -> str:
    """Return a table of every contestant, compared with the first."""
    first = lines[0]
    rows = [
        [
            *(line.depth, f"{1e3 * line.seconds:.1f} ms", f"{line.seconds / first.seconds:.2f}"),
            *(f"{1e3 * line.processor:.1f} ms", f"{line.predicted / 1e6:.1f} MB", f"{line.loss - first.loss:+.1e}"),
        ]
        for line in lines
    ]
    heads = ["layers ahead", "step", "ratio", "processor", "predicted peak", "loss apart"]
    return tabulate(rows, heads, disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", choices=(0, 1, 2), default=[0, 1])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args(arguments)
    numbers = {name: getattr(given, name) for name in ("layers", "hidden", "rows", "steps")}
    options = Options(depths=tuple(given.depths), **numbers, num_ranks=given.ranks)
    print(table(on_ranks(World(options.num_ranks), measured, (options,))))


if __name__ == "__main__":
    main()
