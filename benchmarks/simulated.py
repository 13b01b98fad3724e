"""The sum that the solver minimizes, compared with the simulated timeline, over models, meshes, batches and strategies.

Nothing runs: models lie on the meta device, few layers at their sizes, and both predictions are autopar's own. What the
solver can only guess, as it prices one decision at a time, is how much of the moves of parameters overlaps with
compute.

    python -m benchmarks.simulated                       three devices' profiles: some minutes
    python -m benchmarks.simulated --hardware h100
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate

import autopar
from autopar.errors import AutoparError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import built_in
from autopar.tools.benchmarking.rank_correlation import spearman

MODELS = (("llama-8b", 2048, 2), ("vit-h", 0, 4), ("t5-large", 512, 2))
"""Name, tokens of a text, and layers."""
BATCHES = (1, 8, 64)
"""Per device of the outermost axis."""
MESHES = ({"dp": 8}, {"dp": 64}, {"dp": 8, "tp": 8})
STRATEGIES = ("auto", "data_parallel", "zero1", "zero3", "hsdp", "megatron_sequence")


@dataclass(frozen=True, slots=True)
class Line:
    """The two predictions for one plan, in seconds."""

    hardware: str
    model: str
    mesh: str
    batch: int
    strategy: str
    summed: float
    simulated: float


def lines(hardware: Sequence[str]) -> Iterator[Line]:
    """A line for each plan; strategies that a mesh or a model has no place for are left out."""
    for model, tokens, layers in MODELS:
        for batch in BATCHES:
            for axes in MESHES:
                size = batch * axes["dp"]
                network, inputs = built_in(model, size, tokens, layers)
                for name in hardware:
                    mesh = Mesh(axes, hardware=name)
                    for strategy in STRATEGIES:
                        try:
                            with torch.autocast("cpu", torch.bfloat16):
                                plan = autopar.plan(
                                    network, mesh, inputs, strategy=None if strategy == "auto" else strategy
                                )
                        except AutoparError:
                            continue
                        where = "×".join(map(str, axes.values()))
                        yield Line(
                            name,
                            model,
                            where,
                            size,
                            strategy,
                            plan.device_seconds,
                            plan.timeline().seconds,
                        )


def table(found: Sequence[Line]) -> str:
    """Return a table that compares the summed step time with the timeline's, per profile.

    It shows the rank correlation of plans, how far the sum is from the timeline, and the time lost by choosing by the
    sum.
    """
    rows = []
    for name in dict.fromkeys(each.hardware for each in found):
        of = [each for each in found if each.hardware == name]
        ratios = [each.summed / each.simulated for each in of]
        apart = [abs(each - 1) for each in ratios]
        cases: dict[tuple[str, str, int], list[Line]] = {}
        for each in of:
            cases.setdefault((each.model, each.mesh, each.batch), []).append(each)
        lost = [
            min(case, key=lambda each: each.summed).simulated / min(each.simulated for each in case) - 1
            for case in cases.values()
        ]
        rows.append(
            [
                name,
                len(of),
                f"{spearman([e.summed for e in of], [e.simulated for e in of]):.4f}",
                f"{statistics.median(ratios):.3f}",
                f"{statistics.mean(apart):.1%}",
                f"{max(apart):.1%}",
                f"{statistics.mean(lost):.2%}",
                f"{max(lost):.1%}",
            ]
        )
    headers = ["profile", "plans", "Spearman", "sum / timeline", "apart, mean", "most", "regret, mean", "most"]
    return tabulate(rows, headers, disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", nargs="+", default=["h100", "a100", "b200"])
    parser.add_argument("--all", action="store_true", help="a line for each plan, too")
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(lines(options.hardware))
    if options.all:
        rows = [
            [
                e.hardware,
                e.model,
                e.mesh,
                e.batch,
                e.strategy,
                f"{e.summed:.4g}",
                f"{e.simulated:.4g}",
                f"{e.summed / e.simulated:.2f}",
            ]
            for e in found
        ]
        print(tabulate(rows, ["profile", "model", "mesh", "batch", "strategy", "sum s", "timeline s", "ratio"]))
    print(table(found))


if __name__ == "__main__":
    main()
