"""`autopar bench`: what each strategy costs for a model on a mesh, in prediction and in measurement.

autopar bench demo --mesh 2                                  all strategies on two processes of this machine
autopar bench mine:model --mesh 2x2 --strategies auto ddp    a model of your own, some strategies
autopar bench --suite small --csv small.csv --plots plots    a built-in suite; "experts" is another
autopar bench llama-1b --layers 2 --fake-world 64            what one rank of 64 computes, nothing moves
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.console.names import AUTO, EXPERT_PEERS, PEERS, PRESETS
from autopar.errors import InputError

if TYPE_CHECKING:
    from autopar.ir.sharding.mesh import Mesh
    from autopar.tools.benchmarking.bench import BenchResult

STRATEGIES = (AUTO, *PRESETS, *PEERS)


@dataclass(frozen=True, slots=True)
class Suite:
    """Models, meshes and strategies that are measured together."""

    models: tuple[str, ...]
    meshes: tuple[dict[str, int], ...]
    strategies: tuple[str, ...]


LEFT_OUT = ("zero1", "zero2", "tensor_2_5d", "tensor_3d")
"""Presets that the small suite does without: two that differ little from zero3, and two that need three axes."""

SUITES = {
    "small": Suite(
        ("tiny-gpt2", "tiny-llama", "tiny-vit", "tiny-cnn", "tiny-mlp"),
        ({"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}),
        tuple(name for name in STRATEGIES if name not in (*LEFT_OUT, *EXPERT_PEERS)),
    ),
    "experts": Suite(
        ("tiny-moe",),
        ({"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}),
        (
            *(AUTO, "data_parallel", "zero3", "megatron", "expert_data", "expert_model", "expert_folded"),
            *("ddp", "fsdp2", *EXPERT_PEERS),
        ),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autopar bench`."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a built-in model, or MODULE:FUNCTION, as for plan")
    parser.add_argument("--suite", choices=SUITES, help="a built-in choice of models and meshes")
    parser.add_argument("--mesh", nargs="+", help='one mesh or several: "2", "4", "2x2", "dp=2,tp=2"')
    parser.add_argument("--fake-world", type=int, metavar="RANKS", help="run one rank of so many; nothing moves")
    names = ", ".join(STRATEGIES)
    parser.add_argument(
        "--strategies", nargs="+", default=(), metavar="NAME", help=f"some of {names} (all, or the suite's)"
    )
    parser.add_argument("--steps", type=int, default=20, help="rounds that count, after two that do not (20)")
    parser.add_argument("--batch", type=int, default=8, help="samples of the global batch (8)")
    parser.add_argument("--sequence", type=int, default=64, help="tokens of a sequence (64)")
    parser.add_argument("--layers", type=int, help="layers of a built-in model, instead of its own number")
    parser.add_argument("--device", default="cpu", help="cpu with gloo, or cuda with NCCL (cpu)")
    parser.add_argument("--hardware", help="name or path of the profile for predictions (calibrates this machine)")
    parser.add_argument("--memory", help='limit per device of autopar\'s plans, such as "8GB"')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", metavar="FILE", help="write a line per measurement")
    parser.add_argument("--json", metavar="FILE", help="write everything, to be read with BenchResult.load")
    parser.add_argument("--plots", metavar="FOLDER", help="draw time, memory and moved bytes; needs matplotlib")


def run(options: argparse.Namespace, meshes: Sequence[Mesh]) -> bool:
    """Measure, print the tables, write the files; whether all losses agree. `meshes` are those of --mesh.

    Raises InputError for options that do not fit each other, and for files that cannot be written.
    """
    from autopar.ir.sharding.mesh import Mesh
    from autopar.tools.benchmarking.bench import bench  # not before, for --help does without PyTorch

    models, strategies = options.models, options.strategies
    if options.suite:
        if models or meshes or options.fake_world:
            raise InputError(
                f"--suite {options.suite} has models and meshes of its own; give it, or models and meshes."
            )
        suite = SUITES[options.suite]
        models, meshes = suite.models, [Mesh(axes) for axes in suite.meshes]
        strategies = strategies or suite.strategies
    if not models:
        raise InputError("no model is named; give some, or --suite small.")
    meshes = _of_fake_world(options, meshes) if options.fake_world else meshes
    if not meshes:
        raise InputError('no mesh is given; give --mesh with axes and sizes, "dp=2,tp=2" or "2x2".')
    _check_files(options)
    result = bench(
        models,
        meshes,
        strategies,
        steps=options.steps,
        batch=options.batch,
        sequence=options.sequence,
        layers=options.layers,
        device=options.device,
        hardware=options.hardware,
        memory=options.memory,
        fake=bool(options.fake_world),
        seed=options.seed,
    )
    print(result)
    _write(result, options)
    return result.agrees


def _of_fake_world(options: argparse.Namespace, meshes: Sequence[Mesh]) -> Sequence[Mesh]:
    """Return the meshes, each with as many devices as the fake world has ranks; by default all ranks on one axis."""
    from autopar.ir.sharding.mesh import Mesh

    if not meshes:
        return [Mesh({"dp": options.fake_world})]
    for mesh in meshes:
        if mesh.num_devices != options.fake_world:
            raise InputError(
                f"--fake-world {options.fake_world} and the mesh {mesh} ({mesh.num_devices} ranks) differ; make them "
                "equal."
            )
    return meshes


def _check_files(options: argparse.Namespace) -> None:
    """Raise InputError, before minutes of measuring, for files that could not be written after them."""
    for path in (options.csv, options.json):
        if path and not Path(path).absolute().parent.is_dir():
            raise InputError(f"the measurements cannot be saved: {path} is in no folder that exists; make it first.")
    if options.plots:
        from autopar.tools.benchmarking.plots import require_pyplot

        require_pyplot()


def _write(result: BenchResult, options: argparse.Namespace) -> None:
    for path, write in ((options.csv, result.save_csv), (options.json, result.save_json)):
        if path:
            try:
                write(path)
            except OSError as error:
                raise InputError(
                    f"the measurements cannot be saved: {error}; give a file that can be written."
                ) from error
            print(f"\nsaved in {path}")
    if options.plots:
        for path in result.save_plots(options.plots):
            print(f"\ndrawn in {path}")
