"""A Llama of one long text on gloo ranks: one process, the presets that split positions, and the planner's choice.

The planner knows this machine by a profile that is measured first, on as many ranks (`autopar calibrate`), or by
--hardware. Every contestant trains for some steps on ranks of its own, so that its peak is its own. Printed are the
loss of the first step, the seconds of a step (median, without the first where there are several) by clock and by
processor time of the slowest rank, what was predicted, and the peak of the memory of a rank.

    python -m benchmarks.long_llama
    python -m benchmarks.long_llama --positions 4096 --steps 5

target: losses of one process; the planner's choice the fastest, or within noise of it; 32k positions on 4 ranks in less
than 0.35 of one process's memory.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.costs.hardware.profile import Hardware
from autopar.ir.sharding.mesh import Mesh
from autopar.runtime.ranks.launch import World, on_ranks
from autopar.tools.benchmarking.meters import LiveBytes
from benchmarks.timed_training import of_every_rank, profile_of

AXIS = "cp"
ONE = "one process"
STRATEGIES = ("context_parallel", "ring", "gather_kv", "ulysses", "auto")
VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a training run, passed to each rank."""

    positions: int
    layers: int
    num_ranks: int
    steps: int
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Line:
    """A contestant: its first loss, seconds and peak bytes of its slowest and fullest rank, and what was predicted."""

    loss: float
    seconds: float
    processor_seconds: float
    peak_bytes: int
    predicted_seconds: float | None
    predicted_bytes: int | None


def llama_of(positions: int, layers: int) -> Any:
    """A small Llama, the same on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=positions,
            use_cache=False,
        )
    )


def _trained(options: Options, strategy: str) -> Line:
    """A contestant's steps (runs on every rank; the line is the same on all)."""
    model: Any = llama_of(options.positions, options.layers)
    ids = torch.randint(0, VOCABULARY, (1, options.positions), generator=torch.Generator().manual_seed(1))
    batch, plan = {"input_ids": ids, "labels": ids}, None
    if strategy != ONE:
        mesh = init_device_mesh("cpu", (options.num_ranks,), mesh_dim_names=(AXIS,))
        wish: Any = {} if strategy == "auto" else {"strategy": strategy}
        model = autopar.compile(
            model, mesh, batch, hardware=options.hardware, memory=autopar.Memory(recompute="none"), **wish
        )
        plan = model.plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    seconds: list[tuple[float, float]] = []
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        for _ in range(options.steps):
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            optimizer.zero_grad()
            losses.append(float((loss.full_tensor() if hasattr(loss, "full_tensor") else loss).detach()))
    clock, processor = (statistics.median(each) for each in zip(*(seconds[1:] or seconds), strict=True))
    gathered = of_every_rank((clock, processor, live.highest))
    clock, processor, peak = (max(each) for each in zip(*gathered, strict=True))
    predicted = (None, None) if plan is None else (plan.seconds, plan.peak_bytes)
    return Line(losses[0], clock, processor, int(peak), *predicted)


def table(found: dict[str, Line]) -> str:
    """Return a table of every contestant, compared with one process."""
    alone = found[ONE].peak_bytes
    rows = [
        (
            name,
            f"{line.loss:.6f}",
            f"{line.seconds:.2f}",
            "" if line.predicted_seconds is None else f"{line.predicted_seconds:.2f}",
            f"{line.processor_seconds:.2f}",
            f"{line.peak_bytes / 2**20:.0f}",
            "" if line.predicted_bytes is None else f"{line.predicted_bytes / 2**20:.0f}",
            f"{line.peak_bytes / alone:.2f}",
        )
        for name, line in found.items()
    ]
    headers = ("strategy", "loss", "s", "predicted", "processor s", "peak MiB", "predicted", "of one process")
    presets = {name: line.seconds for name, line in found.items() if name not in (ONE, "auto")}
    best = min(presets, key=lambda name: presets[name])
    ratio = found["auto"].seconds / presets[best]
    return f"{tabulate(rows, headers, disable_numparse=True)}\nauto / best preset ({best}): {ratio:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--hardware", help="name or path of a profile (calibrates this machine)")
    given = parser.parse_args(arguments)
    load_before, mesh = os.getloadavg()[0], Mesh({AXIS: given.ranks})
    hardware = profile_of(given.hardware, mesh)
    print(
        f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, load {load_before:.1f}, "
        f"torch {torch.__version__}, {datetime.date.today().isoformat()}; gloo, a thread a rank, float32\n\n"
        f"Llama of {given.layers} layers, {given.positions} positions, {given.ranks} ranks",
        flush=True,
    )
    options = Options(given.positions, given.layers, given.ranks, given.steps, hardware)
    found = {ONE: on_ranks(World(1), _trained, (options, ONE))}
    for strategy in STRATEGIES:
        found[strategy] = on_ranks(World(given.ranks), _trained, (options, strategy))
    print(table(found), flush=True)


if __name__ == "__main__":
    main()
