"""Measured steps compared with the planner's sum and the simulated timeline, on gloo ranks of this machine.

Strategies of small models train in turns on a machine that is calibrated first, as `autopar bench --suite small` does;
here without peers, and with the two predictions side by side. Below are the figures of each mesh, and how far
`fully_replicated` is off on it: it moves nothing, so that this is what computing alone is off.

    python -m benchmarks.timeline                                      two models on dp=2
    python -m benchmarks.timeline --models tiny-gpt2 tiny-llama tiny-vit tiny-cnn tiny-mlp --meshes 2 4 2x2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from tabulate import tabulate

import autopar
from autopar.ir.sharding.mesh import Mesh
from autopar.tools.benchmarking.measurement import Measurement
from autopar.tools.benchmarking.rank_correlation import spearman

AXES = ("dp", "tp")
STRATEGIES = ("auto", "fully_replicated", "data_parallel", "zero3", "hsdp", "megatron", "megatron_sequence", "ulysses")


def table(measurements: Sequence[Measurement]) -> str:
    """A line per plan, and how each prediction orders and meets what was measured."""
    rows: list[list[str]] = []
    sums: list[float] = []
    timelines: list[float] = []
    steps: list[float] = []
    for each in measurements:
        if each.predicted and each.measured and each.timeline_seconds and not each.same_as:
            sums.append(each.predicted.seconds)
            timelines.append(each.timeline_seconds)
            steps.append(each.measured.seconds)
            predicted = [f"{1e3 * seconds[-1]:.2f} ms ({steps[-1] / seconds[-1]:.2f})" for seconds in (sums, timelines)]
            rows.append([each.model, each.mesh, each.strategy, f"{1e3 * steps[-1]:.2f} ms", *predicted])
    lines = [tabulate(rows, ["model", "mesh", "strategy", "measured", "sum", "timeline"], disable_numparse=True)]
    lines += [f"{name:<9} {_deviation(found, steps)}" for name, found in (("sum", sums), ("timeline", timelines))]
    for mesh in dict.fromkeys(row[1] for row in rows):
        here = [number for number, row in enumerate(rows) if row[1] == mesh]
        alone = [steps[number] / timelines[number] for number in here if rows[number][2] == "fully_replicated"]
        used = _deviation([timelines[number] for number in here], [steps[number] for number in here])
        computing = f", {statistics.median(alone):.2f} where nothing moves" if alone else ""
        lines.append(f"{mesh}, timeline: {used}{computing}")
    return "\n".join(lines)


def _deviation(predicted: Sequence[float], steps: Sequence[float]) -> str:
    """Return, as text, the rank correlation of predicted and measured steps and the median measured / predicted."""
    ratio = statistics.median(theirs / ours for ours, theirs in zip(predicted, steps, strict=True))
    order = f"Spearman {spearman(predicted, steps):.3f} of {len(steps)} plans"
    return f"{order}, measured / predicted {ratio:.2f} in the median"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny-llama", "tiny-vit"])
    parser.add_argument("--meshes", nargs="+", default=["2"], help="sizes of axes, as 4 or 2x2")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args(arguments)
    meshes = [Mesh(dict(zip(AXES, map(int, mesh.split("x")), strict=False))) for mesh in given.meshes]
    found = autopar.bench(given.models, meshes, given.strategies, steps=given.steps)
    print("\n".join(f"{name}: {value}" for name, value in found.about.items()))
    print(table(found.measurements))


if __name__ == "__main__":
    main()
