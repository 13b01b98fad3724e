"""Plans that the solver chooses for Qwen3-235B-A22B on 64 H100s, next to published mappings.

Plans are predicted with the `h100` profile from the meta device: bf16 weights with fp32 copies, 64 sequences of 4,096
tokens, no pipeline, within the memory of a device, with as much recomputation as that needs. Two published mappings are
compared. Tensor parallelism of 2 with experts over all 64 GPUs (Megatron-Bridge, docs/performance-summary-archive.md,
25.09, 64 GB200s) is MoE Parallel Folding. Experts inside a node are EP 8 of that paper's tables. Both shard their
parameters over data-parallel ranks and gather them once per step (ZeRO-2). The solver is free on each mesh.

    python -m benchmarks.chosen_mappings                          all 94 layers, within 80 GB
    python -m benchmarks.chosen_mappings --layers 2 --recompute none      no limit either
"""

from __future__ import annotations

import argparse
import datetime
import time
import warnings
from collections.abc import Sequence

import torch

import autopar
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError
from autopar.ir.sharding.mesh import Mesh
from benchmarks.folding import SEQUENCE, language_model
from benchmarks.recipes import CONFIGS

LAYERS, BATCH = 94, 64
SOLVER = "solver"
CASES: Sequence[tuple[str, dict[str, int], str | None]] = (
    ("tp 2, experts over 64 (Megatron-Bridge)", {"dp": 32, "tp": 2}, "expert_folded"),
    (SOLVER, {"dp": 32, "tp": 2}, None),
    ("experts inside a node", {"dp": 8, "ep": 8}, "expert_data"),
    (SOLVER, {"dp": 8, "ep": 8}, None),
)
STORED = ("self_attn.*_proj.weight", "embed_tokens.weight", "lm_head.weight")


def planned(axes: dict[str, int], strategy: str | None, given: argparse.Namespace) -> Plan:
    """The plan of the mesh, by a preset or by the solver."""
    model = language_model(CONFIGS["qwen3-235b-a22b"](), given.layers)
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
        optimizer=autopar.Optimizer(master_copies=True),
        memory=autopar.Memory(None if given.recompute == "none" else given.memory, recompute=given.recompute),
        search=autopar.Search(time_limit=given.time_limit, gap=given.gap),
    )
    assert isinstance(plan, Plan)
    return plan


def choices(plan: Plan) -> str:
    """Return how the calls of the last layer's experts and attention are sharded over the mesh axes."""
    found = {}
    for row in plan.rows:
        for name in ("q_proj", "sdpa", "dispatch", "grouped_mm"):
            if row.kind == "call" and name in f"{row.module} {row.name}":
                found[name] = plan.choices[row.name].split(" by ")[-1].strip()
    return ", ".join(f"{name} {choice}" for name, choice in found.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="some of them, from 0")
    parser.add_argument("--memory", default="80GB")
    parser.add_argument("--recompute", default="auto")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of the solver for each plan")
    parser.add_argument("--gap", type=float, default=0.0, help="how far from the best a plan may be proven to be")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="autopar")
    print(f"date {datetime.date.today()}, torch {torch.__version__}, {given.layers} layers\n")
    for name, axes, strategy in (CASES[number] for number in given.cases):
        start = time.perf_counter()
        try:
            plan = planned(axes, strategy, given)
        except InfeasibleError as error:
            found = (str(error).splitlines()[0],)
        else:
            found = (f"{plan.seconds:.3f} s", f"{plan.peak_bytes / 1e9:.0f} GB", f"gap {plan.gap:.1%}", choices(plan))
        mesh = " × ".join(f"{axis} {size}" for axis, size in axes.items())
        print("; ".join((mesh, name, *found, f"planned in {time.perf_counter() - start:.0f} s")), flush=True)


if __name__ == "__main__":
    main()
