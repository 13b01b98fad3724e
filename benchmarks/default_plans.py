"""Measure the default plan and every preset of a suite: `python -m benchmarks.default_plans [--models tiny-vit]`.

All strategies of a cell train in turns, in shuffled order, on gloo ranks of this machine
(`autopar.tools.benchmarking`). The table has the median step of the default plan over that of the fastest preset. A
default plan that runs the program of a preset shares its measurement.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable

from tabulate import tabulate

from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.presets import PRESETS
from autopar.tools.benchmarking.bench import BenchResult, bench
from autopar.tools.benchmarking.command import SUITES
from autopar.tools.benchmarking.measurement import Measurement
from autopar.tools.benchmarking.trainers import AUTO


def rows_of(measurements: Iterable[Measurement]) -> list[list[str]]:
    """Return a row for each model and mesh: the default plan, the fastest preset, and their ratio."""
    cells: dict[tuple[str, str], dict[str, Measurement]] = defaultdict(dict)
    for each in measurements:
        if each.measured is not None:
            cells[each.model, str(each.mesh)][each.strategy] = each
    rows = []
    for (model, mesh), found in cells.items():
        presets = [each for name, each in found.items() if name in PRESETS]
        if AUTO not in found or not presets:
            continue
        best = min(presets, key=_seconds)
        own, theirs = _seconds(found[AUTO]), _seconds(best)
        same = found[AUTO].same_as
        rows.append(
            [model, mesh, f"{own * 1e3:.1f}", best.strategy, f"{theirs * 1e3:.1f}", f"{own / theirs:.2f}", same]
        )
    return rows


def _seconds(each: Measurement) -> float:
    assert each.measured is not None
    return each.measured.seconds


if __name__ == "__main__":
    suite = SUITES["small"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=suite.models)
    parser.add_argument("--meshes", nargs="+", default=[json.dumps(each) for each in suite.meshes], help='as {"dp": 2}')
    parser.add_argument("--presets", nargs="+", default=[name for name in suite.strategies if name in PRESETS])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    meshes = [Mesh(json.loads(each)) for each in options.meshes]
    found: BenchResult = bench(options.models, meshes, (AUTO, *options.presets), steps=options.steps)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, median of {options.steps} steps in turns")
    headers = ["model", "mesh", "default, ms", "best preset", "ms", "ratio", "same program as"]
    print(tabulate(rows_of(found.measurements), headers=headers, disable_numparse=True))
