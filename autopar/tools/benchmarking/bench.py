"""Public entry point to compare strategies: `bench` measures them on ranks of this machine, next to predictions."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from autopar.console.units import parse_bytes
from autopar.costs.hardware.load import load, parse
from autopar.errors import InputError
from autopar.files.reading import read_text
from autopar.files.replace import replace_text
from autopar.files.schema import Malformed
from autopar.ir.sharding.mesh import Mesh
from autopar.models.named import named
from autopar.runtime.ranks.launch import RankError, World, on_ranks
from autopar.tools.benchmarking.measurement import Measurement, from_json, to_json, write_csv
from autopar.tools.benchmarking.measurement_tables import report
from autopar.tools.benchmarking.plots import save_plots
from autopar.tools.benchmarking.rank_correlation import spearman
from autopar.tools.benchmarking.runner import Cell, race
from autopar.tools.benchmarking.trainers import Terms, check_strategies, strategy_names
from autopar.tools.calibration.calibrate import calibrate
from autopar.tools.calibration.timing import BRIEF

PRELOADED = ["autopar.tools.benchmarking.runner", "torch.distributed.fsdp", "torch.profiler"]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All measurements, and what is known of the machine and the run; `print` shows the tables."""

    measurements: tuple[Measurement, ...]
    about: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return report(self.measurements, self.about)

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predicted and measured step times over all cells; nan for fewer than two."""
        pairs = [(each.predicted, each.measured) for each in self.measurements if each.predicted and each.measured]
        return spearman([ours.seconds for ours, _ in pairs], [theirs.seconds for _, theirs in pairs])

    @property
    def agrees(self) -> bool:
        """True if all compared losses agree with those of one process."""
        return all(each.agrees for each in self.measurements)

    def save_json(self, path: str | Path) -> None:
        """Write everything to a JSON file, which `load` reads."""
        replace_text(path, to_json(self.measurements, self.about))

    def save_csv(self, path: str | Path) -> None:
        """Write a line per measurement to a CSV file."""
        write_csv(Path(path), self.measurements)

    def save_plots(self, folder: str | Path) -> list[Path]:
        """Write time.png, memory.png and traffic.png into the folder; needs matplotlib."""
        return save_plots(self.measurements, folder)

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """Read what `save_json` wrote; InputError where it cannot be read or is something else."""
        try:
            text = read_text(path)
        except Malformed as error:
            raise InputError(
                f"no measurements: {str(path)!r}: {error}; give what `autopar bench --json` wrote."
            ) from error
        measurements, about = from_json(text)
        return cls(tuple(measurements), about)


def bench(
    models: str | Sequence[str],
    meshes: Mesh | Sequence[Mesh],
    strategies: Sequence[str] = (),
    *,
    steps: int = 20,
    batch: int = 8,
    sequence: int = 64,
    layers: int | None = None,
    device: str = "cpu",
    hardware: str | None = None,
    memory: str | int | None = None,
    fake: bool = False,
    seed: int = 0,
) -> BenchResult:
    """Train each model on each mesh with each strategy, in turns, on processes of this machine; measure and compare.

    Args:
        models: built-in names, or "module:function" that returns a model, or a model and its example inputs (a tuple of
            tensors, the batch in dim 0).
        meshes: each on so many ranks as it has devices.
        strategies: "auto" (autopar's plan), names of presets, and the peers "ddp", "fsdp2", "dtensor-tp",
            "dtensor-tp+sp", "transformers-ep", "transformers-ep-reduce" and "ep-by-hand"; all of them where none is
            given.
        steps: rounds that count; two more come before.
        batch: samples of the global batch of built-in models; a strategy splits it as it needs.
        sequence: tokens of a sample of built-in models.
        layers: number of layers of built-in models, instead of their own.
        device: "cpu" with gloo and one thread per rank, or "cuda" with NCCL, which has not been run.
        hardware: name or path of the profile that predictions are made with. By default this machine is calibrated
            first, for each mesh, and what its devices compute again before each model; a fake world takes the profile
            of its mesh.
        memory: limit per device of autopar's plans.
        fake: run rank 0 alone, with collectives that do nothing: the mesh may have any size, times are of what one rank
            computes, and losses are not compared.
        seed: of the models' parameters and of the batches.

    A script calls this under `if __name__ == "__main__":`, as the ranks are processes that import it.

    Raises InputError for names that are not known, RankError where a rank dies. A strategy that does not apply, or
    fails on its own, is a measurement with its reason; so are all of a model on a mesh where a rank dies, if there are
    others.
    """
    models, meshes = [models] if isinstance(models, str) else models, [meshes] if isinstance(meshes, Mesh) else meshes
    strategies = tuple(strategies) or strategy_names()
    for name, count in (("batch", batch), ("sequence", sequence), ("layers", layers)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise InputError(f"{name}={count!r}; give a whole number of at least 1.")
    _check(models, meshes, strategies, steps, device, hardware, fake)
    limit = None if memory is None else parse_bytes(memory)
    load_before = os.getloadavg()[0]
    terms = _terms(meshes, device, hardware, fake, limit)
    cells = [
        Cell(
            *(model, mesh, strategies, terms[mesh]),
            *(steps, batch, sequence, layers, device, seed, fake),
        )
        for model in models
        for mesh in meshes
    ]
    measurements: list[Measurement] = []
    for cell in tqdm(cells, desc="cells", delay=1, leave=False):
        world = World(cell.mesh.num_devices, device, fake)
        try:
            measurements += on_ranks(world, race, (cell,), PRELOADED)
        except RankError as error:
            if len(cells) == 1:
                raise
            measurements += [cell.measurement(name, reason=str(error)) for name in strategies]
    return BenchResult(tuple(measurements), _run_conditions(cells, load_before))


def _terms(
    meshes: Sequence[Mesh], device: str, hardware: str | None, fake: bool, limit: int | None
) -> dict[Mesh, Terms]:
    """Return the planning terms of each mesh.

    The hardware is the given profile, in a fake world the profile of the mesh, and otherwise a profile measured on the
    mesh.
    """
    if hardware or fake:
        return {mesh: Terms(load(hardware or mesh.hardware), limit) for mesh in meshes}
    # Ranks that share cores wait for each other: a group of two among four ranks takes longer than one of two ranks.
    profiles = {mesh: calibrate(mesh, device, BRIEF, f"this machine, {mesh}") for mesh in meshes}
    return {mesh: Terms(parse(profile), limit, profile) for mesh, profile in profiles.items()}


def _check(
    models: Sequence[str],
    meshes: Sequence[Mesh],
    strategies: tuple[str, ...],
    steps: int,
    device: str,
    hardware: str | None,
    fake: bool,
) -> None:
    """Raise InputError for what no rank need be started to refuse."""
    check_strategies(strategies)
    if not models or not meshes or steps < 1:
        raise InputError(
            f"found {len(models)} models, {len(meshes)} meshes and {steps} steps; give at least one of each."
        )
    if device not in ("cpu", "cuda"):
        raise InputError(f"device {device!r} is not known; bench runs on 'cpu' or 'cuda'.")
    for model in models:
        named(model, 1, 1)
    for mesh in meshes:
        if hardware or fake:
            load(hardware or mesh.hardware)
        elif mesh.num_devices < 2:
            raise InputError(f"the mesh {mesh} is of a single rank, with nothing to compare; give one of at least 2.")
        needed = 1 if fake else mesh.num_devices
        if device == "cuda" and needed > torch.cuda.device_count():
            raise InputError(
                f"the mesh {mesh} needs {needed} GPUs, found {torch.cuda.device_count()}; give a smaller mesh, or "
                "device 'cpu'."
            )


def _run_conditions(cells: Sequence[Cell], load_before: float) -> dict[str, str]:
    """Return the conditions of the run that affect the numbers: machine, torch, date, step, profile, memory limit."""
    cell = cells[0]
    names = {"cpu": "CPU, one thread per rank, gloo", "cuda": "GPUs, NCCL"}
    kind = "one rank of a fake world, collectives do nothing" if cell.fake else names[cell.device]
    return {
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores (load {load_before:.1f}), {kind}",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "a step": f"forward, backward and fused AdamW; batch {cell.batch}, sequence {cell.sequence}, median of "
        f"{cell.steps}",
        "profile": ", ".join(dict.fromkeys(each.terms.hardware.name for each in cells)),
        **({} if cell.terms.memory is None else {"memory limit": f"{cell.terms.memory} bytes"}),
    }
