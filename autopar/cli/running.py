"""`autopar demo` and `autopar bench`: the commands that train on ranks of this machine."""

from __future__ import annotations

import argparse

from autopar.cli.meshes import parse_mesh
from autopar.console.names import PIPELINE
from autopar.errors import InputError
from autopar.ir.sharding.mesh import Mesh
from autopar.tools import demo
from autopar.tools.benchmarking import command as bench_command

DISAGREES = 1
"""The exit status of losses or bytes that are not as expected."""
MAX_RANKS = 64


def train_demo(options: argparse.Namespace) -> int:
    """Train the demonstration; return DISAGREES if its losses or bytes are not those of one process."""
    mesh = _demo_mesh(options.ranks, options.mesh)
    if mesh.num_devices > MAX_RANKS:
        raise InputError(f"{mesh.num_devices} ranks are as many processes on this machine; give at most {MAX_RANKS}.")
    settings = demo.DemoRun(mesh, options.steps, options.layers, options.batch, options.sequence)
    return 0 if demo.run(settings) else DISAGREES


def bench(options: argparse.Namespace) -> int:
    """Measure strategies; return DISAGREES if losses are not those of one process."""
    meshes = [parse_mesh(text) for text in options.mesh or ()]
    return 0 if bench_command.run(options, meshes) else DISAGREES


def _demo_mesh(ranks: int | None, text: str | None) -> Mesh:
    """Return the requested mesh, by default dp=2 with the rest on tp."""
    if text is None:
        num_ranks = 4 if ranks is None else ranks
        return parse_mesh(f"2x{num_ranks // 2}" if num_ranks > 2 and num_ranks % 2 == 0 else str(num_ranks))
    mesh = parse_mesh(text)
    if PIPELINE in mesh.axes:
        raise InputError(f"the demo trains no pipeline, and {text} has the axis {PIPELINE}; rename the axis.")
    if ranks not in (None, mesh.num_devices):
        raise InputError(f"--ranks {ranks} and --mesh {text} ({mesh.num_devices} ranks) differ; give one of them.")
    return mesh
