"""A loss in tiles compared with the same loss untiled: peak memory and processor time of a step, on gloo ranks.

The model is an embedding, a head, and the cross-entropy of its outputs, so that logits are most of it. Both contestants
are made by autopar with the same preset and take turns, step by step, so that what else the machine does weighs on both
alike. Processor time, which a busy machine bends less than seconds on the clock, is that of the slowest rank, and its
median counts; memory is what tensors of a rank hold at the highest moment of a step. Losses are compared, too.

    python -m benchmarks.tiled_loss                       float32 and bfloat16, split by samples and by classes
    python -m benchmarks.tiled_loss --tiles 4 8 16 --steps 10

target: with 8 tiles at most 0.3 times the memory, at most 1.3 times the processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.runtime.ranks.launch import World, on_ranks
from autopar.tools.benchmarking.meters import held_in_training, peak_bytes

WARM_UP = 1  # steps; the first one plans
PRESETS = ("data_parallel", "megatron")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    tiles: tuple[int, ...]
    presets: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: int
    classes: int
    hidden: int
    steps: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Line:
    """A contestant: bytes at the peak, measured and predicted, processor seconds of a step, and its last loss."""

    preset: str
    dtype: str
    tiles: int
    peak: int
    predicted: int
    seconds: float
    loss: float


class Head(nn.Module):
    """Embedded tokens, two layers between, and a head with its loss."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed = nn.Embedding(options.classes, options.hidden)
        self.up = nn.Linear(options.hidden, 2 * options.hidden)
        self.down = nn.Linear(2 * options.hidden, options.hidden)
        self.head = nn.Linear(options.hidden, options.classes, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Token ids and labels [samples, positions] → mean loss."""
        x = self.embed(ids)
        logits = self.head(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Contestant:
    """The model by one number of tiles (0: in one piece), and its optimizer."""

    def __init__(self, options: Options, preset: str, dtype: str, tiles: int) -> None:
        torch.manual_seed(0)
        model = Head(options).to(DTYPES[dtype])
        self.batch = tuple(torch.randint(options.classes, (8, options.rows // 8)) for _ in range(2))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.model = autopar.compile(
            model, mesh, self.batch, strategy=preset, memory=autopar.Memory(loss_tiles=tiles or "auto")
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.seconds: list[float] = []
        self.loss = 0.0

    def step(self) -> None:
        begun = time.process_time()
        loss = self.model(*self.batch)
        loss.backward()
        self.seconds.append(time.process_time() - begun)
        self.loss = loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self) -> int:
        def forward_backward() -> None:
            self.model(*self.batch).backward()

        forward_backward()
        return peak_bytes(
            forward_backward,
            self.optimizer.zero_grad,
            lambda: [*held_in_training(self.model, self.optimizer), *self.batch],
        )


def measured(options: Options) -> list[Line]:
    """All contestants; runs on every rank."""
    found = []
    for preset in options.presets:
        for dtype in options.dtypes:
            contestants = [Contestant(options, preset, dtype, tiles) for tiles in (0, *options.tiles)]
            for _ in range(WARM_UP + options.steps):
                for each in contestants:
                    each.step()
            for tiles, each in zip((0, *options.tiles), contestants, strict=True):
                seconds = statistics.median(each.seconds[WARM_UP:])
                slowest = torch.tensor([seconds, float(each.peak())], dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                took, peak = slowest.tolist()
                found.append(Line(preset, dtype, tiles, int(peak), each.model.plan.peak_bytes, took, each.loss))
    return found


def table(lines: Sequence[Line]) -> str:
    """Return a table of every contestant, compared with the untiled loss of its preset and dtype."""
    whole = {(line.preset, line.dtype): line for line in lines if line.tiles == 0}
    rows = []
    for line in lines:
        base = whole[line.preset, line.dtype]
        rows.append(
            [
                *(line.preset, line.dtype, line.tiles or "none"),
                *(f"{line.peak / 1e6:.1f} MB", f"{line.peak / base.peak:.2f}", f"{line.predicted / line.peak:.2f}"),
                *(f"{line.seconds:.3f} s", f"{line.seconds / base.seconds:.2f}", f"{line.loss - base.loss:+.1e}"),
            ]
        )
    heads = ["preset", "dtype", "tiles", "peak", "ratio", "predicted", "processor", "ratio", "loss apart"]
    return tabulate(rows, heads, disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--rows", type=int, default=2048, help="samples times positions (2048)")
    parser.add_argument("--classes", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args(arguments)
    lists: Any = {name: tuple(getattr(given, name)) for name in ("tiles", "presets", "dtypes")}
    numbers = {name: getattr(given, name) for name in ("rows", "classes", "hidden", "steps")}
    options = Options(**lists, **numbers, num_ranks=given.ranks)
    print(table(on_ranks(World(options.num_ranks), measured, (options,))))


if __name__ == "__main__":
    main()
