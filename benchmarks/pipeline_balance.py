"""Stage cuts by autopar compared with equal numbers of layers, on a model whose head weighs several layers, timed.

The model is a language model of small layers with a large vocabulary, in fp32. Cut into equal numbers of layers, the
last stage has the head and the loss on top, and all other ranks wait for it. Both plans are trained in one process
group, on gloo ranks of one thread each, in turns, step by step, so that what else the machine does weighs on both. A
step clears the gradients, and is forward, backward and fused AdamW; it takes as long as its slowest rank, and the
median of the steps counts. A rank idles for the part of a step in which it takes no processor time.

Where other programs take the cores in which a rank waits, the clock shows how much work there is, not how it is
divided. Seconds of the processor are therefore also measured: of the rank that takes most, and of the step as the
simulation has it if every rank's computations take what they took of the processor.

    python -m benchmarks.pipeline_balance                      two ranks
    python -m benchmarks.pipeline_balance --ranks 4            needs four cores
    python -m benchmarks.pipeline_balance --schedule zbv       another schedule, which has two stages per rank

Predictions are by a profile that is measured first, on as many ranks (`autopar calibrate`), or by --hardware.
target: autopar ≤ 1.0 × equal layers, in predicted and in measured seconds.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.costs.hardware.profile import Hardware
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.schedules.choice import SEVERAL_STAGES
from autopar.planning.pipeline.schedules.schedule import NAMES
from autopar.planning.pipeline.schedules.simulation import StageSeconds, simulate
from autopar.runtime.ranks.launch import World, on_ranks
from benchmarks.timed_training import TimedTraining, of_every_rank, profile_of, train_in_turns
from benchmarks.transformer_model import Size, batch, transformer

AUTOPAR, EQUAL = "autopar", "equal layers"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    size: Size
    num_ranks: int
    schedule: str
    microbatches: int
    steps: int
    hardware: Hardware

    @property
    def num_stages(self) -> int:
        return self.num_ranks * (2 if self.schedule in SEVERAL_STAGES else 1)

    @property
    def equal_stages(self) -> list[str]:
        """The layers with which stages begin that have equally many of them."""
        first = [stage * self.size.num_layers // self.num_stages for stage in range(1, self.num_stages)]
        return [f"blocks.{layer}" for layer in first]


@dataclass(frozen=True, slots=True)
class Line:
    """A way to cut: its stages, its seconds, and the share of the ranks' time in which they wait."""

    name: str
    stages: tuple[str, ...]
    stage_seconds: tuple[float, ...]
    """Predicted, of one micro-batch."""
    predicted: float
    measured: float
    quartiles: tuple[float, float]
    processor: float
    """Seconds of the processor, of the rank that takes most."""
    replayed: float
    """Seconds of the simulated step of ranks that compute for as long as they took of the processor."""
    bubble: float
    idle: float
    loss: float

    def cells(self) -> tuple[object, ...]:
        return (
            self.name,
            " | ".join(self.stages),
            " | ".join(f"{1e3 * each:.1f}" for each in self.stage_seconds),
            f"{1e3 * self.predicted:.0f}",
            f"{1e3 * self.measured:.0f}",
            " – ".join(f"{1e3 * each:.0f}" for each in self.quartiles),
            f"{self.measured / self.predicted:.2f}",
            f"{1e3 * self.processor:.0f}",
            f"{1e3 * self.replayed:.0f}",
            f"{self.bubble:.0%}",
            f"{self.idle:.0%}",
        )


HEADERS = (
    "cuts",
    "layers per stage",
    "stages, predicted ms",
    "predicted ms",
    "measured ms",
    "quartiles",
    "ratio",
    "cpu ms, fullest rank",
    "step in cpu ms",
    "bubble, predicted",
    "idle, measured",
)


class Trained(TimedTraining):
    """One of the two plans with its optimizer, and what its steps took."""

    def __init__(self, options: Options, mesh: Any, stages: list[str] | None) -> None:
        self.inputs = batch(options.size)
        self.model = autopar.compile(
            transformer(options.size),
            mesh,
            self.inputs,
            hardware=options.hardware,
            pipeline=autopar.Pipeline(schedule=options.schedule, split_points=stages),
            microbatches=options.microbatches,
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        super().__init__(optimizer, lambda: self.model.train_step(*self.inputs))

    def line(self, name: str) -> Line:
        """Gather the measurements of all ranks into a line; call it on every rank, the line is the same on all."""
        plan = self.model.plan
        assert isinstance(plan, PipelinePlan)
        ranks = of_every_rank(self.seconds)
        clock = [max(seconds for seconds, _ in step) for step in zip(*ranks, strict=True)]
        processor = [statistics.median(seconds for _, seconds in steps) for steps in ranks]
        busy = [statistics.fmean(processor for _, processor in step) for step in zip(*ranks, strict=True)]
        idle = statistics.median(1 - each / whole for each, whole in zip(busy, clock, strict=True))
        low, middle, high = statistics.quantiles(clock, n=4)
        each = [stage.seconds for stage in plan.stages]
        return Line(
            name,
            tuple(_described(stage.blocks) for stage in plan.stages),
            tuple(own.forward + own.backward_input + own.backward_weight for own in each),
            plan.seconds,
            middle,
            (low, high),
            max(processor),
            _replayed(plan, processor),
            plan.bubble,
            max(0.0, idle),
            self.loss,
        )


def _replayed(plan: PipelinePlan, processor: Sequence[float]) -> float:
    """Seconds of the simulated step if the computations of each rank take so many seconds, divided as predicted."""
    scales = [seconds / (plan.seconds * (1 - plan.idle(rank))) for rank, seconds in enumerate(processor)]
    found = []
    for stage in plan.stages:
        own, scale = stage.seconds, scales[plan.schedule.rank_of(stage.number)]
        computed = (own.forward * scale, own.backward_input * scale, own.backward_weight * scale)
        found.append(StageSeconds(*computed, own.send_forward, own.send_backward, own.once * scale))
    return simulate(plan.schedule, found).seconds


def _described(blocks: Sequence[str]) -> str:
    """The blocks of a stage in short: how many layers, and what else."""
    layers = sum(name.startswith("blocks.") for name in blocks)
    others = [name for name in blocks if not name.startswith("blocks.")]
    names = [*(others[:1] if others[:1] == ["embedding"] else []), *([str(layers)] if layers else [])]
    return " + ".join([*names, *(name for name in others if name != "embedding")])


def _lines(options: Options) -> list[Line]:
    """Both plans, measured in turns; runs on every rank."""
    mesh = init_device_mesh("cpu", (options.num_ranks,), mesh_dim_names=("pp",))
    both = {AUTOPAR: Trained(options, mesh, None), EQUAL: Trained(options, mesh, options.equal_stages)}
    train_in_turns(both.values(), options.steps)
    return [each.line(name) for name, each in both.items()]


def report(options: Options, lines: Sequence[Line], load_before: float) -> str:
    """The table, with what its numbers depend on."""
    ours, theirs = lines
    size, about = options.size, Mesh({"pp": options.num_ranks})
    facts = {
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores (load {load_before:.1f}), CPU, "
        "one thread per rank, gloo",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "model": f"{size}, {size.num_heads} heads, vocabulary {size.vocabulary}, batch {size.batch}, sequence "
        f"{size.sequence}, fp32",
        "a step": f"forward and backward of {options.microbatches} micro-batches by {options.schedule} on {about}, and "
        f"fused AdamW; median of {options.steps} in turns",
        "profile": options.hardware.name,
    }
    if options.num_ranks > (os.cpu_count() or 1):
        facts["note"] = "more ranks than cores: ranks that should run at once take turns, so measured gains are less"
    width = max(map(len, facts)) + 2
    head = "\n".join(f"{name:<{width}}{text}" for name, text in facts.items())
    table = tabulate([line.cells() for line in lines], HEADERS, disable_numparse=True)
    return (
        f"{head}\n\n{table}\n\n{EQUAL} / {AUTOPAR}: {theirs.predicted / ours.predicted:.2f} predicted, "
        f"{theirs.measured / ours.measured:.2f} measured, {theirs.processor / ours.processor:.2f} in processor time of "
        f"the fullest rank, {theirs.replayed / ours.replayed:.2f} of the step; losses after all steps "
        f"{abs(ours.loss - theirs.loss):.0e} apart"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", choices=NAMES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--hardware", help="name or path of a profile (calibrates this machine)")
    given = parser.parse_args(arguments)
    load_before, mesh = os.getloadavg()[0], Mesh({"pp": given.ranks})
    hardware = profile_of(given.hardware, mesh)
    size = Size(given.layers, given.hidden, 4, given.vocabulary, given.batch, given.sequence)
    options = Options(size, given.ranks, given.schedule, given.microbatches, given.steps, hardware)
    lines: list[Line] = on_ranks(World(given.ranks), _lines, (options,))
    print(report(options, lines, load_before))


if __name__ == "__main__":
    main()
