"""mesh="auto" compared with the recipes of experts (`benchmarks.recipes`): the same model, devices, batch and memory.

The recipe is planned as its source has it, and "auto" is told the number of devices alone. Printed are the simulated
seconds of a step of both, their ratio, gigabytes of a device, the answer, and what "auto" took: seconds on the clock,
seconds of a processor, and the most memory of its process.

    python -m benchmarks.auto                                  all, each in a process of its own
    python -m benchmarks.auto --only llama-8b-fsdp8 gpt-175b-full
    python -m benchmarks.auto --here --only llama-8b-fsdp8     in this process
    python -m benchmarks.auto --processor                      limits are seconds of a processor: for a busy machine

target: "auto" is no slower than the recipe within the same memory, in 60 s up to 64 devices, 120 s up to 1,024 and
300 s beyond.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import autopar
from autopar.console.units import format_bytes, format_seconds, parse_bytes
from autopar.costs.plans.plan import Plan
from autopar.errors import AutoparError
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.views.report.comparison_table import comparison_text
from benchmarks.recipes import UNEXPRESSED, Recipe, planned, planned_on, recipes, step_seconds

SECONDS = ((64, 60.0), (1024, 120.0), (sys.maxsize, 300.0))
"""Devices, at most, and the seconds in which "auto" is to answer."""


def time_limit(num_devices: int) -> float:
    """Return the seconds in which "auto" is to answer."""
    return next(seconds for most, seconds in SECONDS if num_devices <= most)


def of_recipe(recipe: Recipe) -> tuple[str, float | None]:
    """Return the step of a recipe in words, and its seconds; None where it is refused."""
    try:
        plan = planned(recipe, parse_bytes(recipe.memory), 600.0)
    except AutoparError as error:
        return f"refused: {' '.join(str(error).split())[:80]}", None
    return f"{format_seconds(step_seconds(plan))}, {format_bytes(plan.peak_bytes)}", step_seconds(plan)


@dataclass(frozen=True, slots=True)
class Taken:
    """Use of the machine by "auto"."""

    seconds: float
    """Seconds on the clock."""
    processor_seconds: float
    num_bytes: int
    """Most memory of the process."""

    def __str__(self) -> str:
        words = f"{self.seconds:.0f} s, {self.processor_seconds:.0f} s of a processor"
        return f"{words}, {format_bytes(self.num_bytes)} of memory"


def of_auto(recipe: Recipe, seconds: float) -> tuple[Plan | PipelinePlan | AutoparError, Taken]:
    """Return what "auto" answers, and what it took."""
    start, processor_start = time.perf_counter(), time.process_time()
    found: Plan | PipelinePlan | AutoparError
    try:
        found = planned_on(
            recipe,
            "auto",
            devices=recipe.gpus,
            memory=parse_bytes(recipe.memory),
            search=autopar.Search(seconds),
            precision=recipe.options["precision"],
        )
    except AutoparError as error:
        found = error
    num_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found, Taken(time.perf_counter() - start, time.process_time() - processor_start, num_bytes)


def compared(recipe: Recipe, seconds: float, with_table: bool) -> str:
    """Return a line of both, and with `with_table` what else was tried."""
    found, taken = of_auto(recipe, seconds)
    text, expected = of_recipe(recipe)
    head = f"{recipe.name}: {recipe.gpus} devices, limit {seconds:.0f} s, took {taken}"
    if isinstance(found, AutoparError):
        return f"{head}; recipe {text}; auto: {' '.join(str(found).split())[:300]}"
    step = step_seconds(found)
    ratio = "" if expected is None else f" ({step / expected:.3f} of the recipe)"
    schedule = f", {found.schedule}" if isinstance(found, PipelinePlan) else ""
    table = comparison_text(found.comparison) if with_table and found.comparison else []
    words = f"{head}; recipe {text}; auto {format_seconds(step)}{ratio}, {format_bytes(found.peak_bytes)}, "
    return "\n".join([f"{words}{found.mesh}{schedule}", *table])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for every recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of recipes")
    parser.add_argument("--seconds", type=float, help='in which "auto" is to answer, instead of those of its target')
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--processor", action="store_true", help="time limits are seconds of a processor")
    parser.add_argument("--table", action="store_true", help="print what else was tried")
    parsed = parser.parse_args(arguments)
    if parsed.processor:
        time.monotonic = time.process_time
    for recipe in recipes(parsed.only):
        if recipe.precision in UNEXPRESSED:
            continue
        seconds = parsed.seconds or time_limit(recipe.gpus)
        if parsed.here:
            print(compared(recipe, seconds, parsed.table), flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.auto", "--here", "--only", recipe.name, "--seconds", str(seconds)]
        further = [f"--{name}" for name in ("processor", "table") if getattr(parsed, name)]
        subprocess.run([*command, *further], check=False)


if __name__ == "__main__":
    main()
