"""Memory that a rank needs to load a checkpoint: `autopar.load` against reading the whole model on every rank.

A Llama is written as safetensors, and loaded on all gloo ranks with `zero3` in either way. Peaks are those of the
process's resident memory from when its weights are laid out (or read whole), above its memory before; the largest rank
counts.

    python -m benchmarks.load_memory            4 ranks, 107 M parameters
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.ranks.launch import World, on_ranks

CONFIG = LlamaConfig(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=7,
    num_attention_heads=16,
)
WAYS = ("autopar.load", "whole on every rank")


def resident(kind: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at the peak since `forget_peak`."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(folder: str, way: str) -> dict[str, int]:
    """Bytes on the rank that needs most of each kind."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    ids = torch.zeros(4, 64, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    # What planning and the first use of libraries take is there before the measurement begins.
    autopar.compile(_on_meta(), mesh, batch, strategy="zero3")
    if way == WAYS[0]:
        compiled = autopar.compile(_on_meta(), mesh, batch, strategy="zero3")
        before = _begin()
        compiled.to_empty(device="cpu")
        compiled.load_safetensors(folder)
    else:
        before = _begin()
        model = LlamaForCausalLM.from_pretrained(folder)
        compiled = autopar.compile(model, mesh, batch, strategy="zero3")
    found = {
        "peak": resident("VmHWM") - before,
        "shards": sum(_local(p).numel() * p.element_size() for p in compiled.parameters()),
        "model": sum(p.numel() * p.element_size() for p in compiled.parameters()),
        "largest tensor": max(p.numel() * p.element_size() for p in compiled.parameters()),
    }
    return {name: _largest(value) for name, value in found.items()}


def _begin() -> int:
    forget_peak()
    return resident("VmRSS")


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG)


def _local(p: Any) -> torch.Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def _largest(value: int) -> int:
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(CONFIG).save_pretrained(folder, max_shard_size="100MB")
        lines = [on_ranks(World(given.ranks), measured, (folder, way)) for way in WAYS]
    rows = [
        [way, *(f"{line[name] / 1e6:.1f} MB" for name in line), f"{line['peak'] / lines[0]['peak']:.2f}"]
        for way, line in zip(WAYS, lines, strict=True)
    ]
    print(tabulate(rows, ["way", *lines[0], "ratio of peaks"], disable_numparse=True))


if __name__ == "__main__":
    main()
