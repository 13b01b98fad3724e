"""Layers compiled one by one, and the graph compiled as a whole: seconds until the first step, and of later
ones.

The model is a Llama of equal layers on gloo ranks; contestants are made one after the other, then take turns, step by
step. A step takes as long as on the slowest rank; medians count. "until trained" is what the first step takes of the
processor, with planning left out: compilation, almost all of it.

    python -m benchmarks.regional_compile                       4 layers, zero3, on 2 ranks
    python -m benchmarks.regional_compile --layers 16 --strategy megatron

Inductor keeps what it has compiled in a folder between runs; every contestant has an empty one here.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.ranks.launch import World, on_ranks
from benchmarks.timed_training import TimedTraining

WARM_UP = 1  # steps behind the first one
CONTESTANTS = ("eager", "whole", "by layers")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, passed to each rank."""

    layers: int
    hidden: int
    sequence: int
    strategy: str
    steps: int


@dataclass(frozen=True, slots=True)
class Line:
    """A contestant: processor seconds of its first step, seconds of later ones, graphs compiled, and the last loss."""

    name: str
    first: float
    seconds: float
    num_graphs: int
    loss: float


def measured(options: Options) -> list[Line]:
    """All contestants; runs on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    ids = torch.randint(0, 512, (8, options.sequence), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    contestants: list[TimedTraining] = []
    firsts, graphs = [], []
    for name in CONTESTANTS:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=options.hidden,
            intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            vocab_size=512,
            use_cache=False,
        )
        model = autopar.compile(LlamaForCausalLM(config), mesh, batch, strategy=options.strategy)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        if name != "eager":
            model.compile(regional=name == "by layers")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        trained = TimedTraining(optimizer, lambda model=model: _forward_and_backward(model, batch))
        start, before = _processor_seconds(), _num_graphs()
        trained.step()
        firsts.append(_slowest(_processor_seconds() - start))
        graphs.append(_num_graphs() - before)
        contestants.append(trained)
        for _ in range(WARM_UP):
            trained.step()
    for _ in range(options.steps):
        for each in contestants:
            each.seconds.append((_slowest(each.step()[0]), 0.0))
    return [
        Line(name, first, statistics.median(seconds for seconds, _ in each.seconds), number, each.loss)
        for name, first, number, each in zip(CONTESTANTS, firsts, graphs, contestants, strict=True)
    ]


def _forward_and_backward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    return loss


def _processor_seconds() -> float:
    """Return the CPU seconds of this process and of the compilers that it has started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _slowest(seconds: float) -> float:
    of_all = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    return float(of_all)


def table(lines: Sequence[Line]) -> str:
    """Return a table of every contestant, compared with the graph compiled as a whole."""
    whole = next(line for line in lines if line.name == "whole")
    rows = [
        [
            *(line.name, line.num_graphs, f"{line.first:.1f} s", f"{line.first / whole.first:.2f}"),
            *(f"{1e3 * line.seconds:.1f} ms", f"{line.seconds / whole.seconds:.2f}", f"{line.loss - whole.loss:+.1e}"),
        ]
        for line in lines
    ]
    heads = ["layers compiled", "graphs", "first step, processor", "ratio", "step", "ratio", "loss apart"]
    return tabulate(rows, heads, disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    given = vars(parser.parse_args(arguments))
    world = World(given.pop("ranks"))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # so that what compiles is a child that is counted
    print(table(on_ranks(world, measured, (Options(**given),))))


if __name__ == "__main__":
    main()
