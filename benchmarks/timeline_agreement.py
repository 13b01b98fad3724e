"""The solver's sum and the simulated timeline: published recipes, and a random grid of models, meshes and
GPUs.

Nothing runs: models lie on the meta device, and both predictions are autopar's own. Printed are each ratio, and by
group the median and the worst distance of the sum from the timeline. The sum counts the launches that the timeline
waits for; distances are also given as shares of a step without them. Models of the grid have few layers of their own
sizes.

    python -m benchmarks.timeline_agreement                     recipes and sixteen plans of the grid: some minutes
    python -m benchmarks.timeline_agreement --grid 40 --seed 7  more of the grid
    python -m benchmarks.timeline_agreement --grid 0 --recipes FSDP8
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.sharding.mesh import Mesh
from autopar.models.catalogue import BUILT_IN, LanguageModel, built_in
from autopar.planning.options.groups import Search
from benchmarks.recipes import CONFIGS


@dataclass(frozen=True, slots=True)
class Case:
    """A model with so many layers (None: its own), a global batch of a micro-batch, a mesh, and how to plan."""

    name: str
    model: str
    batch: int
    sequence: int
    axes: tuple[tuple[str, int], ...]
    strategy: str | None
    hardware: str = "h100"
    layers: int | None = None


RECIPES = (
    Case("FSDP8 8B", "llama-8b", 16, 8192, (("dp", 8),), "zero3"),
    Case("FSDP128 8B", "llama-8b", 256, 8192, (("dp", 128),), "zero3"),
    Case("FSDP8×TP8 8B", "llama-8b", 96, 8192, (("dp", 8), ("tp", 8)), "fsdp_megatron"),
    Case("FSDP32×TP8 70B", "llama-70b", 512, 8192, (("dp", 32), ("tp", 8)), "fsdp_megatron"),
    Case("FSDP256 70B", "llama-70b", 512, 8192, (("dp", 256),), "zero3"),
    Case("FSDP32×TP2 8B", "llama-8b", 128, 8192, (("dp", 32), ("tp", 2)), "fsdp_megatron"),
    Case("FSDP16×TP4 70B", "llama-70b", 64, 8192, (("dp", 16), ("tp", 4)), "fsdp_megatron"),
    Case("HSDP 8×16 8B", "llama-8b", 256, 8192, (("replicate", 16), ("shard", 8)), "hsdp"),
    Case("405B on 16,384, auto", "llama-405b", 2048, 8192, (("dp", 2048), ("sp", 8)), None),
    Case("405B on 16,384, three axes", "llama-405b", 2048, 8192, (("dp", 512), ("sp", 4), ("tp", 8)), None),
)
FAMILIES = {
    "dense": ("llama-8b", "llama-70b"),
    "experts": ("qwen3-30b-a3b",),
    "images": ("vit-h",),
    "encoder and decoder": ("t5-large",),
}
PER_DEVICE = (1, 2, 4)
"""Texts for each part into which a strategy splits the batch; of images `IMAGES` times as many."""
IMAGES = 8
SEQUENCES = (1024, 2048, 4096, 8192)
LAYERS = 2
TIME_LIMIT = 60.0
"""Seconds that the search of a plan may take."""
MESHES = {
    1: ((8,), (64,), (256,), (1024,)),
    2: ((8, 8), (32, 4), (16, 2), (128, 8)),
    3: ((4, 4, 8), (2, 16, 4), (8, 2, 2), (16, 8, 8)),
}
NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "sp", "tp")}
WITH_EXPERTS = {1: ("ep",), 2: ("dp", "ep"), 3: ("dp", "ep", "tp")}
GPUS = ("h100", "a100", "gb200")
STRATEGIES = {
    1: {None: 1, "zero3": 1, "data_parallel": 1, "zero1": 1},
    2: {None: 1, "fsdp_megatron": 1, "megatron_sequence": 1, "hsdp": 2, "zero3": 2},
    3: {None: 1, "usp": 1, "zero3": 3},
}
"""Axes → strategies, each with the number of axes that it splits the batch over, from the first; None is the search."""
OF_EXPERTS = {
    1: {None: 1, "zero3": 1},
    2: {None: 2, "fsdp+ep": 2, "expert_data": 2, "zero3": 2},
    3: {None: 2, "fsdp+sp+ep": 2, "expert_data_model": 2},
}


def grid(count: int, seed: int) -> Iterator[Case]:
    """Yield cases drawn with a seed; families, numbers of axes and GPUs are equally likely."""
    draw = random.Random(seed)
    for number in range(count):
        family, num_axes = draw.choice(tuple(FAMILIES)), draw.choice(tuple(NAMES))
        sizes = draw.choice(MESHES[num_axes])
        names = (WITH_EXPERTS if family == "experts" else NAMES)[num_axes]
        strategies = (OF_EXPERTS if family == "experts" else STRATEGIES)[num_axes]
        strategy = draw.choice(tuple(strategies))
        if strategy == "usp" and family != "dense":
            strategy = None  # images have no positions that divide, and relative positions no ring
        of_images = family == "images"
        parts = math.prod(sizes[: strategies[strategy]])
        yield Case(
            name=f"grid {number}",
            model=draw.choice(FAMILIES[family]),
            batch=parts * draw.choice(PER_DEVICE) * (IMAGES if of_images else 1),
            sequence=0 if of_images else draw.choice(SEQUENCES),
            axes=tuple(zip(names, sizes, strict=True)),
            strategy=strategy,
            hardware=draw.choice(GPUS),
            layers=LAYERS,
        )


def model_of(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model of a case on the meta device, and a step's inputs."""
    if case.model in BUILT_IN:
        return built_in(case.model, case.batch, case.sequence, case.layers)
    config = CONFIGS[case.model]()
    config.num_hidden_layers = case.layers or config.num_hidden_layers
    with torch.device("meta"):
        ids_BS = torch.zeros(case.batch, case.sequence, dtype=torch.int64)
        return LanguageModel(config), (ids_BS, ids_BS.clone())


def plan_of(case: Case) -> autopar.Plan:
    """Plan a case: float32 parameters under bfloat16 autocast, as mixed precision trains."""
    network, inputs = model_of(case)
    with torch.autocast("cpu", torch.bfloat16):
        return autopar.plan(
            network,
            Mesh(dict(case.axes), hardware=case.hardware),
            inputs,
            strategy=case.strategy,
            search=Search(time_limit=TIME_LIMIT),
        )


def measured(cases: Sequence[Case], group: str) -> str:
    """Return a table of the cases that have a plan, and how far their sums are from their timelines."""
    rows: list[list[str]] = []
    apart: list[float] = []
    on_devices: list[float] = []
    for case in cases:
        start = time.process_time()
        try:
            plan = plan_of(case)
        except AutoparError as error:
            rows.append([case.name, case.model, case.hardware, "", str(error).splitlines()[0][:60]])
            continue
        took = time.process_time() - start
        timeline = plan.timeline()
        simulated = timeline.seconds
        apart.append(abs(plan.seconds / simulated - 1))
        on_devices.append(abs(plan.seconds - simulated) / (simulated - timeline.launching))
        mesh = " ".join(f"{name}={size}" for name, size in case.axes)
        rows.append(
            [
                *(case.name, case.model, case.hardware, mesh, case.strategy or "auto"),
                *(f"{plan.seconds:.4g}", f"{simulated:.4g}", f"{plan.seconds / simulated:.3f}"),
                *(f"{timeline.launching / simulated:.1%}", f"{took:.0f} s"),
            ]
        )
        print(*rows[-1], sep="\t", flush=True)
    headers = ["case", "model", "GPU", "mesh", "strategy", "sum s", "timeline s", "ratio", "launching", "planned in"]
    lines = [tabulate(rows, headers, disable_numparse=True)]
    if apart:
        for what, found in (("a step", apart), ("a step without launches", on_devices)):
            median, worst = statistics.median(found), max(found)
            lines.append(
                f"{group}: {len(found)} plans, apart by {median:.1%} of {what} in the median, {worst:.1%} at worst"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both predictions for recipes and a grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", help="only those whose names begin so; none: no recipe")
    parser.add_argument("--grid", type=int, default=16, help="plans of the grid")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    wanted = [
        each
        for each in RECIPES
        if options.recipes is None or any(each.name.startswith(start) for start in options.recipes)
    ]
    tables = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if wanted:
            tables.append(measured(wanted, "recipes"))
        if options.grid:
            tables.append(measured(list(grid(options.grid, options.seed)), f"grid, seed {options.seed}"))
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
