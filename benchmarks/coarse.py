"""Estimates of mesh="auto" compared with exact plans, on candidates drawn at random.

A candidate is a mesh, with or without a pipeline, and a number of micro-batches. Each is estimated by the shorter form
of the model, and planned exactly with the schedule of its estimate. Printed are seconds of a step and bytes of a device
by both, and the seconds of a processor that both took.

    python -m benchmarks.coarse                                    10 candidates of each model of MODELS
    python -m benchmarks.coarse --only gpt-22b --sample 5          of one of them
    python -m benchmarks.coarse --only llama-8b --kept found.json  add to what a file holds, and print all of that

target: estimates are within 5 % of exact plans in the median, and within 12 % at most.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from autopar.compiler.offline import subject_of
from autopar.compiler.offline_planner import OfflinePlanner
from autopar.compiler.plan_cache import PlanCache
from autopar.console.units import parse_bytes
from autopar.errors import AutoparError
from autopar.ir.program.precision import NAMED
from autopar.models.catalogue import BUILT_IN, LanguageModel, built_in
from autopar.planning.mesh_estimates.estimates import Candidate, Estimates
from autopar.planning.mesh_search.search import Turn
from autopar.planning.options.groups import Memory, Pipeline, Search
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings
from benchmarks.frameworks import with_kernels
from benchmarks.recipes import CONFIGS

HEADERS = ("model", "mesh", "runs", "estimate s", "exact s", "ratio", "GB", "exact GB", "CPU s", "exact CPU s")


@dataclass(frozen=True, slots=True)
class Setting:
    """A model of few layers, and what it is arranged on."""

    layers: int
    """Layers; an encoder and its decoder have as many each."""
    hardware: str
    memory: str
    devices: int
    batch: int
    sequence: int
    max_axes: int = 2


MODELS = {
    "llama-8b": Setting(12, "h100", "80GB", 64, 128, 8192),
    "gpt-22b": Setting(12, "a100", "40GB", 32, 128, 2048),
    "mixtral-8x22b": Setting(6, "h100", "80GB", 32, 64, 4096),
    "llama-70b": Setting(10, "h100", "80GB", 256, 512, 4096),
    "qwen3-30b-a3b": Setting(8, "h100", "80GB", 32, 128, 4096),
    "t5-large": Setting(8, "a100", "40GB", 16, 512, 512),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate with its estimate, and its exact plan or the reason why it has none."""

    model: str
    mesh: str
    runs: str
    estimate: float
    exact: float | None
    reason: str
    num_bytes: float
    exact_bytes: float
    seconds: float
    """Processor seconds of the estimate."""
    exact_seconds: float

    @property
    def ratio(self) -> float | None:
        return None if self.exact is None else self.estimate / self.exact

    @property
    def cells(self) -> tuple[str | float, ...]:
        ratio = self.ratio
        by_plan = (self.reason, "") if ratio is None else (f"{self.exact:.3f}", f"{ratio:.3f}")
        sizes = self.num_bytes / 1e9, self.exact_bytes / 1e9, self.seconds, self.exact_seconds
        return self.model, self.mesh, self.runs, f"{self.estimate:.3f}", *by_plan, *sizes


def model_of(name: str, setting: Setting) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model on the meta device, and a step's inputs."""
    if name in BUILT_IN:
        return built_in(name, setting.batch, setting.sequence, setting.layers)
    config = CONFIGS[name]()
    config.num_hidden_layers = setting.layers
    with torch.device("meta"):
        ids_BS = torch.zeros(setting.batch, setting.sequence, dtype=torch.int64)
        model = LanguageModel(config)
        with_kernels(model)
        return model, (ids_BS, ids_BS.clone())


def rows(name: str, sample: int, seed: int, time_limit: float) -> Iterator[Row]:
    """Yield so many candidates of a model that have an estimate, drawn at random."""
    setting = MODELS[name]
    request = PlanRequest(
        hardware=setting.hardware,
        settings=Settings(
            Memory(parse_bytes(setting.memory)), Search(time_limit * 2 * sample, max_axes=setting.max_axes)
        ),
        precision=NAMED["bf16-mixed"],
        pipeline=Pipeline("pp"),
    )
    planner = OfflinePlanner(*model_of(name, setting), request, PlanCache())
    subject, exact = subject_of(planner, "auto", setting.devices)
    estimates = Estimates(subject, float("inf"))
    every = [Candidate(mesh, count) for mesh in subject.meshes for count in estimates.counts(mesh)]
    random.Random(seed).shuffle(every)
    for candidate in every:
        begin = time.process_time()
        found = estimates.estimate(candidate)
        coarse = time.process_time() - begin
        if found is None:
            continue
        begin, made, reason = time.process_time(), None, ""
        try:
            made = exact(found, Turn(time_limit))
        except AutoparError as error:
            reason = " ".join(str(error).split())[:60]
        schedule = f", {found.schedule.name} × {found.schedule.chunks}" if found.schedule else ""
        seconds, num_bytes = (None, 0.0) if made is None else (made.seconds, float(made.plan.peak_bytes))
        yield Row(
            *(name, str(found.mesh), f"{found.microbatches}{schedule}", found.seconds, seconds, reason),
            *(found.num_bytes, num_bytes, coarse, time.process_time() - begin),
        )
        sample -= 1
        if not sample:
            return


def table(found: Sequence[Row]) -> str:
    """Return the candidates, and how far estimates are from plans."""
    ratios = [each.ratio for each in found if each.ratio is not None]
    errors = [abs(each - 1) for each in ratios]
    text = tabulate([each.cells for each in found], HEADERS, floatfmt=".1f", disable_numparse=[2, 3, 4, 5])
    if not errors:
        return text
    apart = f"{statistics.median(errors):.1%} apart in the median, {max(errors):.1%} at most"
    return f"{text}\n{len(ratios)} of {len(found)} planned: {apart}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the candidates of some models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sample", type=int, default=10, help="candidates of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=120, help="seconds for each exact plan")
    parser.add_argument("--kept", type=Path, help="file of rows as JSON, to which those of this run are added")
    parsed = parser.parse_args(arguments)
    kept = json.loads(parsed.kept.read_text()) if parsed.kept and parsed.kept.exists() else []
    found = [Row(**each) for each in kept]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in parsed.only:
            for row in rows(name, parsed.sample, parsed.seed, parsed.time_limit):
                print(*row.cells, flush=True)
                found.append(row)
                if parsed.kept:
                    parsed.kept.write_text(json.dumps([asdict(each) for each in found]))
    print(table(found))


if __name__ == "__main__":
    main()
