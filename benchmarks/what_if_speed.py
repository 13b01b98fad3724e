"""Time `Plan.what_if` and `Plan.explain` under a memory limit, next to the plan that they start from.

Prints CPU seconds of this process and their ratio to those of `autopar.plan`, capture included. `what_if` runs twice,
and the script says whether both answers are equal.

    python -m benchmarks.what_if_speed                            Llama-3-8B with 8 layers on 8×8 within 6 GB
    python -m benchmarks.what_if_speed --layers 4 --memory 4GB

target: what_if and explain take at most twice the CPU seconds of the plan.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from tabulate import tabulate

import autopar
from autopar.costs.plans.plan import Plan
from autopar.ir.sharding.mesh import Mesh
from autopar.models.named import named

Value = TypeVar("Value")
AXES = ("dp", "tp")


def timed(call: Callable[[], Value]) -> tuple[Value, float]:
    """Return the value of a call and the CPU seconds of this process during it."""
    start = time.process_time()
    value = call()
    return value, time.process_time() - start


def planned(options: argparse.Namespace) -> Plan:
    model, example_inputs = named(options.model, options.batch, options.sequence, options.layers)
    mesh = Mesh(dict(zip(AXES, options.mesh, strict=True)), hardware=options.hardware)
    with torch.autocast("cpu", torch.bfloat16):
        found = autopar.plan(model, mesh, example_inputs, memory=options.memory)
    assert isinstance(found, Plan)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--mesh", type=int, nargs=len(AXES), default=[8, 8])
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--memory", default="6GB")
    parser.add_argument("--module", default="layers.*.mlp.down_proj", help="what what_if is asked about")
    parser.add_argument("--role", default="row", help="what what_if asks for it on the last axis")
    parser.add_argument("--name", default="layers.1.mlp.up_proj", help="what is explained")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    plan, seconds = timed(lambda: planned(options))
    requested = {AXES[-1]: options.role}
    other, what_if_seconds = timed(lambda: plan.what_if(options.module, **requested))
    again, again_seconds = timed(lambda: plan.what_if(options.module, **requested))
    brief, brief_seconds = timed(lambda: plan.explain(options.name, alternatives=False))
    full, full_seconds = timed(lambda: plan.explain(options.name))
    table = [
        ("plan", seconds, f"{plan.seconds:.6g} s, gap {plan.gap:.2%}"),
        ("what_if", what_if_seconds, f"{other.seconds:.6g} s, gap {other.gap:.2%}"),
        ("what_if again", again_seconds, "the same" if again.seconds == other.seconds else f"{again.seconds:.6g} s"),
        ("explain(alternatives=False)", brief_seconds, f"{brief.num_allowed} strategies"),
        ("explain", full_seconds, f"{len(full.alternatives)} alternatives"),
    ]
    rows = [(name, f"{taken:.1f}", f"{taken / seconds:.2f}", what) for name, taken, what in table]
    print(tabulate(rows, ["call", "CPU s", "× plan", "answer"], disable_numparse=True))
    print()
    print(full)


if __name__ == "__main__":
    main()
