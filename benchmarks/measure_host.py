"""Measure this machine as a host of gloo ranks and print the JSON of its hardware profile.

    OMP_NUM_THREADS=1 python benchmarks/measure_host.py --date 2026-11-21 > autopar/profiles/cpu.json

Best of several repetitions, as a roofline asks for what the machine can do: matmul FLOP/s and copy bandwidth of one
thread, seconds of an operation on one element, and latency and bandwidth of gloo's all-reduce, from a line through the
times of a small and a large message.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

MATMUL_SIZE = 1024
COPY_BYTES = 1 << 28  # well beyond the caches
SMALL_BYTES = 1 << 10
LARGE_BYTES = 1 << 25
WORLD_SIZES = (2, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def best_seconds(call: Callable[[], object], repetitions: int, inner: int = 1) -> float:
    """The least seconds of one call, over `repetitions` timings of `inner` calls each, after one call to warm up."""
    call()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - start) / inner)
    return min(times)


def matmul_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a square matmul."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype) for _ in range(2))
    return 2 * MATMUL_SIZE**3 / best_seconds(lambda: a @ b, 5)


def copy_bytes_per_s() -> float:
    """Bytes read plus bytes written per second of a large copy."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: target.copy_(source), 7)


def op_latency_s() -> float:
    """Seconds of an addition of one element."""
    x = torch.ones(1)
    return best_seconds(lambda: x + x, 50, inner=500)


def all_reduce(world_size: int) -> tuple[float, float]:
    """Latency in seconds, and the bytes per second each rank sends, of gloo's all-reduce: 2(n-1)/n of the message."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store, answer = str(Path(folder, "store")), context.SimpleQueue()
        ranks = [context.Process(target=_rank, args=(r, world_size, store, answer)) for r in range(world_size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            if rank.exitcode:
                raise RuntimeError(f"a rank of {world_size} ended with exit code {rank.exitcode}.")
        small, large = answer.get()
    sent = 2 * (world_size - 1) / world_size * (LARGE_BYTES - SMALL_BYTES)
    return small, sent / (large - small)


def _rank(rank: int, world_size: int, store: str, answer: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    times = []
    for num_bytes, inner in ((SMALL_BYTES, 50), (LARGE_BYTES, 1)):
        message = torch.zeros(num_bytes // 4)
        times.append(best_seconds(lambda message=message: dist.all_reduce(message), 20, inner))
    if rank == 0:
        answer.put(tuple(times))
    dist.destroy_process_group()


def profile(date: str) -> dict[str, object]:
    """The profile of this machine; every number carries how it was found."""
    torch.set_num_threads(1)
    num_cores = os.cpu_count() or 1
    # The load says how far others disturbed the measurement.
    load = os.getloadavg()[0]
    measured = f"measured: {_cpu_model()}, {num_cores} cores (load {load:.1f}), {date}, benchmarks/measure_host.py"

    def number(value: float, how: str) -> dict[str, object]:
        return {"value": float(f"{value:.3g}"), "source": f"{measured}: {how}"}

    def link(world_size: int) -> dict[str, object]:
        latency, bytes_per_s = all_reduce(world_size)
        small, large = f"{SMALL_BYTES} bytes", f"{LARGE_BYTES >> 20} MiB"
        return {
            "name": "gloo",
            "devices": None,
            "latency_s": number(latency, f"all-reduce of {small} over {world_size} ranks"),
            "bytes_per_s": number(bytes_per_s, f"all-reduce of {large} over {world_size} ranks, sent per rank"),
        }

    links = {world_size: link(world_size) for world_size in WORLD_SIZES}
    # A host is one level of network; the profile takes the largest group in which every rank has a core.
    chosen = max((size for size in WORLD_SIZES if size <= num_cores), default=min(WORLD_SIZES))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    copied = f"copy of {COPY_BYTES >> 20} MiB, read plus written, one thread"
    return {
        "name": "cpu",
        "flops": {
            str(dtype).removeprefix("torch."): number(matmul_flops(dtype), f"{MATMUL_SIZE}² matmul, one thread")
            for dtype in DTYPES
        },
        "memory_bytes_per_s": number(copy_bytes_per_s(), copied),
        "memory_bytes": {
            "value": memory // chosen,
            "source": f"{measured}: {memory} bytes of the host, shared by {chosen} ranks",
        },
        "op_latency_s": number(op_latency_s(), "addition of one element"),
        "links": [links.pop(chosen)],
        "also_measured": list(links.values()),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    print(json.dumps(profile(parser.parse_args().date), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
