"""Seconds of the processor that steps take on four ranks of one axis and of two, in turns, on ranks that share cores.

What moves between ranks of a host its cores move, too: a step takes at least the seconds of all its ranks over the
number of cores, by the clock, on a machine that does nothing else. Programs that are the same on both meshes
(`fully_replicated`) show what else differs between two measurements.

    python -m benchmarks.shared_cores
    python -m benchmarks.shared_cores --models tiny-llama --strategies zero3 --steps 20
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time
from collections.abc import Sequence

import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

from autopar.costs.hardware.load import load
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.ranks.launch import World, on_ranks
from autopar.tools.benchmarking.runner import Cell
from autopar.tools.benchmarking.trainers import Terms, Trainer, contestant
from benchmarks.timed_training import of_every_rank

MESHES = (Mesh({"dp": 4}), Mesh({"dp": 2, "tp": 2}))
WARM_UP = 2


def measured(model: str, strategies: Sequence[str], steps: int) -> dict[tuple[str, Mesh], float]:
    """Seconds of the processor of a step, of all ranks over the number of cores; runs on every rank."""
    terms, contestants = Terms(load("cpu")), {}
    for mesh in MESHES:
        devices = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
        for strategy in strategies:
            subject = Cell(model, mesh, (strategy,), terms).subject()
            contestants[strategy, mesh] = contestant(strategy, *copy.deepcopy(subject), devices, terms)
    seconds: dict[tuple[str, Mesh], list[float]] = {key: [] for key in contestants}
    for turn in range(WARM_UP + steps):
        order = list(contestants)
        random.Random(turn).shuffle(order)  # equal on all ranks
        for key in order:
            seconds[key].append(_processor_seconds(contestants[key]))
    cores = os.cpu_count() or 1
    return {key: statistics.median(each[WARM_UP:]) / cores for key, each in seconds.items()}


def _processor_seconds(trainer: Trainer) -> float:
    """Train one step and return its CPU seconds, summed over all ranks."""
    dist.barrier()
    start = time.process_time()
    trainer.step()
    return sum(of_every_rank(time.process_time() - start))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny-llama", "tiny-cnn"])
    parser.add_argument("--strategies", nargs="+", default=["fully_replicated", "data_parallel", "zero3", "megatron"])
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args(arguments)
    rows = []
    for model in given.models:
        found = on_ranks(World(MESHES[0].num_devices), measured, (model, tuple(given.strategies), given.steps))
        for strategy in given.strategies:
            rows.append([model, strategy, *(f"{1e3 * found[strategy, mesh]:.1f} ms" for mesh in MESHES)])
    print(tabulate(rows, ["model", "strategy", *map(str, MESHES)], disable_numparse=True))


if __name__ == "__main__":
    main()
