"""Cost of a sequence length that was not seen before: with buckets, and with a new plan per length without them.

Two gloo ranks train a small Llama on texts of lengths that come up once each. The first call of each length is compared
with the second one of the same length: the difference is the cost of the new length. The figure is the median of wall
clock seconds, so nothing else should run; CPU seconds are printed next to it.

    python -m benchmarks.lengths                 40 lengths in one bucket: a minute
    python -m benchmarks.lengths --lengths 10

target: a new length in a known bucket costs less than 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.ranks.launch import World, on_ranks

BUCKET, BATCH = 128, 4


def _batch(length: int, batch: int = BATCH) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 512, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8))


def _seconds(step: Callable[[int], None], length: int) -> tuple[float, float]:
    """Return the wall clock seconds and this rank's CPU seconds of a step."""
    clock, cpu = time.perf_counter(), time.process_time()
    step(length)
    return time.perf_counter() - clock, time.process_time() - cpu


def measure(count: int, inputs: str, folder: str) -> dict[str, Any]:
    """Seconds of first and second calls of so many lengths on this rank."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found: dict[str, Any] = {}
    for name, buckets in (("buckets", autopar.Buckets((BUCKET,))), ("none", None)):
        compiled = autopar.compile(
            _llama(),
            mesh,
            _batch(BUCKET),
            inputs=inputs,
            search=autopar.Search(cache=folder),
            run=autopar.Run(buckets=buckets),
        )

        def step(length: int, compiled: Any = compiled) -> None:
            compiled.zero_grad()
            compiled(**_batch(length)).loss.backward()

        for _ in range(3):
            step(BUCKET)
        lengths = range(BUCKET - 1, BUCKET - 1 - (count if buckets else 3), -1)
        firsts, seconds = zip(*((_seconds(step, each), _seconds(step, each)) for each in lengths), strict=True)
        found[name] = [statistics.median(a[i] - b[i] for a, b in zip(firsts, seconds, strict=True)) for i in (0, 1)]
        found[f"{name}, a step"] = [statistics.median(each[i] for each in seconds) for i in (0, 1)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What a new length costs.")
    parser.add_argument("--lengths", type=int, default=40, help="lengths that come up once (40)")
    count = parser.parse_args().lengths
    what = f"a Llama of 2 layers (192 wide), batches of {BATCH} × up to {BUCKET}, 2 gloo ranks"
    print(f"{count} lengths, {what}, torch {torch.__version__}")
    for inputs in ("whole", "local"):
        with tempfile.TemporaryDirectory() as folder:
            first, again = (on_ranks(World(2), measure, (count, inputs, folder)) for _ in range(2))
        for whence, run in (("", first), (", plans of a folder", again)):
            for name in ("buckets", "none"):
                (clock, cpu), (step, _) = run[name], run[f"{name}, a step"]
                print(
                    f"inputs={inputs:6} {name:8}{whence:20} a new length +{1e3 * clock:8.1f} ms "
                    f"({1e3 * cpu:.1f} ms of CPU) beside a step of {1e3 * step:.1f} ms"
                )


if __name__ == "__main__":
    main()
