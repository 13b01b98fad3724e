"""What the solver chooses for Qwen3-235B-A22B on 64 H100s, beside mappings that people publish for it.

Predicted with the `h100` profile from the meta device: bf16 weights with fp32 copies, 64 sequences of 4,096 tokens, no
pipeline, nothing computed again, no memory limit. Published are tensor parallelism of 2 with experts over all 64 GPUs
(Megatron-Bridge, docs/performance-summary-archive.md, 25.09, 64 GB200s), which is MoE Parallel Folding; and experts
inside a node, as EP 8 of its tables. Their parameters lie in parts over data-parallel ranks, gathered once per step
(ZeRO-2). The solver is free on each mesh.

Models of two depths are planned, and what 94 layers would take lies on the line through both.

    python -m benchmarks.chosen_mappings
"""

from __future__ import annotations

import argparse
import datetime
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate

import autopar
from autopar.plans.plan import Plan
from autopar.sharding.mesh import Mesh
from benchmarks.folding import SEQUENCE, language_model

LAYERS, BATCH = 94, 64
SOLVER = "solver"
CASES: Sequence[tuple[str, dict[str, int], str | None]] = (
    ("tp 2, experts over 64 (Megatron-Bridge)", {"dp": 32, "tp": 2}, "expert_folded"),
    (SOLVER, {"dp": 32, "tp": 2}, None),
    ("experts inside a node", {"dp": 8, "ep": 8}, "expert_data"),
    (SOLVER, {"dp": 8, "ep": 8}, None),
)
STORED = ("self_attn.*_proj.weight", "embed_tokens.weight", "lm_head.weight")


def qwen3_235b() -> Any:
    """Its config.json."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=4096,
        num_hidden_layers=LAYERS,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
    )


def planned(axes: dict[str, int], strategy: str | None, layers: int, time_limit: float) -> Plan:
    """The plan of the mesh, by a preset or by the solver."""
    model = language_model(qwen3_235b(), layers)
    if strategy is not None:
        batch = tuple(axis for axis in axes if axis != "tp")
        for matrix in STORED:
            autopar.annotate(model, f"*.{matrix}", storage=batch, regather=False)
        if strategy == "expert_data":
            autopar.annotate(model, "*.experts.*_proj", storage="dp", regather=False)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device="meta")
    plan = autopar.plan(
        model,
        Mesh(axes, hardware="h100"),
        (ids, ids),
        strategy=strategy,
        master_copies=True,
        recompute="none",
        time_limit=time_limit,
    )
    assert isinstance(plan, Plan)
    return plan


def choices(plan: Plan) -> str:
    """How the calls of the last layer's experts and attention are divided, over the axes of the mesh."""
    found = {}
    for row in plan.rows:
        for name in ("q_proj", "sdpa", "dispatch", "grouped_mm"):
            if row.kind == "call" and name in f"{row.module} {row.name}":
                found[name] = plan.choices[row.name].split(" by ")[-1].strip()
    return ", ".join(f"{name} {choice}" for name, choice in found.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs=2, default=(1, 2), help="layers that are planned")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of the solver for each plan")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="autopar")
    rows = []
    for name, axes, strategy in CASES:
        start = time.perf_counter()
        low, high = (planned(axes, strategy, depth, given.time_limit) for depth in given.depths)
        far = (LAYERS - given.depths[0]) / (given.depths[1] - given.depths[0])
        seconds = low.seconds + far * (high.seconds - low.seconds)
        peak = low.peak_bytes + far * (high.peak_bytes - low.peak_bytes)
        per_layer = (high.seconds - low.seconds) / (given.depths[1] - given.depths[0])
        mesh = " × ".join(f"{axis} {size}" for axis, size in axes.items())
        rows.append(
            (
                *(mesh, name, f"{1e3 * per_layer:.2f}", f"{seconds:.2f}", f"{peak / 1e9:.0f}", f"{high.gap:.1%}"),
                *(f"{time.perf_counter() - start:.0f}", choices(high)),
            )
        )
        print(tabulate(rows[-1:], disable_numparse=True), flush=True)
    headers = ("mesh", "mapping", "ms a layer", "step s", "peak GB", "gap", "planned in s", "choices")
    print(f"date {datetime.date.today()}, torch {torch.__version__}, depths {given.depths}")
    print(tabulate(rows, headers, disable_numparse=True))


if __name__ == "__main__":
    main()
