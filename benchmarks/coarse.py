"""Estimates of mesh="auto" beside exact plans, on candidates drawn at random.

A candidate is a mesh, with or without a pipeline, and a number of micro-batches. Each is estimated by the shorter form
of the model, and planned exactly with the schedule of its estimate. Printed are seconds of a step and bytes of a device
by both, and the seconds of a processor that both took.

    python -m benchmarks.coarse                                            Llama-3-8B on 64 H100s, 20 candidates
    python -m benchmarks.coarse llama-70b --devices 64 --batch 128 --sample 5
    python -m benchmarks.coarse llama-8b --layers 8 --memory none          fewer layers, no limit of memory

target: estimates are within 5 % of exact plans in the median, and within 12 % at most.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings

from tabulate import tabulate

from autopar.arranging.estimates import Candidate, Estimates
from autopar.compiler.offline import subject_of
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.errors import AutoparError
from autopar.models.catalogue import built_in
from autopar.planning.meshes.search import Turn
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from autopar.program.precision import NAMED
from autopar.units import parse_bytes

HEADERS = (
    "mesh",
    "micro-batches",
    "schedule",
    "estimate s",
    "exact s",
    "ratio",
    "GB",
    "exact GB",
    "CPU s",
    "exact CPU",
)


def main() -> None:
    """Print the table."""
    arguments = _arguments()
    memory = None if arguments.memory == "none" else parse_bytes(arguments.memory)
    request = PlanRequest(
        hardware=arguments.hardware,
        settings=Settings(memory=memory, time_limit=arguments.time_limit * 2 * arguments.sample),
        precision=NAMED["bf16-mixed"],
        pipeline="pp",
    )
    model, inputs = built_in(arguments.model, arguments.batch, arguments.sequence, arguments.layers)
    planner = OfflinePlanner(model, inputs, request, PlanCache())
    subject, exact = subject_of(planner, "auto", arguments.devices, arguments.max_axes)
    estimates = Estimates(subject, float("inf"))
    every = [Candidate(mesh, count) for mesh in subject.meshes for count in estimates.counts(mesh)]
    random.Random(arguments.seed).shuffle(every)
    rows, ratios = [], []
    for candidate in every:
        if len(rows) == arguments.sample:
            break
        begin = time.process_time()
        found = estimates.estimate(candidate)
        coarse = time.process_time() - begin
        if found is None:
            continue
        begin, made, reason = time.process_time(), None, ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = exact(found, Turn(arguments.time_limit))
            except AutoparError as error:
                reason = str(error).splitlines()[0][:60]
        schedule = f"{found.schedule.name} {found.schedule.chunks}" if found.schedule else ""
        row = [found.mesh, found.microbatches, schedule, f"{found.seconds:.3f}", reason, "", found.num_bytes / 1e9, ""]
        if made is not None:
            ratios.append(found.seconds / made.seconds)
            row[4:6] = [f"{made.seconds:.3f}", f"{ratios[-1]:.3f}"]
            row[7] = made.plan.peak_bytes / 1e9
        rows.append([*row, coarse, time.process_time() - begin])
        print(*rows[-1], flush=True)
    print(tabulate(rows, headers=HEADERS, floatfmt=".1f", disable_numparse=[3, 4, 5]))
    errors = [abs(each - 1) for each in ratios]
    print(f"{len(ratios)} planned: {statistics.median(errors):.1%} apart in the median, {max(errors):.1%} at most")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama-8b")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--memory", default="80GB")
    parser.add_argument("--max-axes", type=int, default=2)
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=120)
    return parser.parse_args()


if __name__ == "__main__":
    main()
