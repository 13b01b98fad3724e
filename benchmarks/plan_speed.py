"""Seconds and memory of `autopar.plan` on models as they are trained: captured whole, nothing synthetic.

Models are Hugging Face's on the meta device (and a UNet), fp32 parameters under bf16 autocast, 64×4096 tokens or as
many patches. Every row is planned in a process of its own, once without a memory limit and once with one, small models
with several; rows of the group "limits" have limits of their own.

    python -m benchmarks.plan_speed                         all rows: a few minutes
    python -m benchmarks.plan_speed --quick                 two layers of each model
    python -m benchmarks.plan_speed --only layers devices   some groups of rows, or models by name
    python -m benchmarks.plan_speed --peer PATH             with AutoParallel, whose sources lie at PATH

target: Llama-3-8B on 8×8 builds and solves in 2 s, the whole plan takes 9 s and 1 GB; Llama-3-405B on 16×8×8 builds
and solves in 10 s, the other models in 3 s, with and without a limit in 15 s where graphs are wide, and proven within
0.5%; small models are proven best at every limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.plan_row import Measured, Row

TEXTS, TOKENS = 64, 4096
GB = 10**9
MINUTE = 60.0
ROOT = Path(__file__).parent.parent
PEER = "https://github.com/meta-pytorch/autoparallel"

GROUPS: dict[str, tuple[Row, ...]] = {
    "models": (
        Row("llama-8b", (8, 8), TEXTS, TOKENS),
        Row("llama-70b", (8, 8), TEXTS, TOKENS),
        Row("llama-70b", (4, 8, 8), TEXTS, TOKENS),
        Row("llama-405b", (16, 8, 8), TEXTS, TOKENS),
        Row("t5-large", (8, 8), TEXTS * TOKENS // 512, 512),  # its texts are of 512 tokens
        Row("vit-h", (8, 8), TEXTS * TOKENS // 256, 0),  # 16×16 patches an image
        Row("unet", (8, 8), TEXTS * TOKENS // 64**2, 0),  # 64×64 positions an image
        Row("mixtral-dense", (8, 8), TEXTS, TOKENS),
    ),
    "wide": (
        *(Row("gpt2", (side,) * 3, TEXTS, 1024, time_limit=MINUTE) for side in (2, 4)),
        *(Row("t5-large", (side,) * 3, TEXTS * TOKENS // 512, 512, time_limit=MINUTE) for side in (2, 4)),
        Row("densenet-121", (8, 8), TEXTS * TOKENS // 256, 0, time_limit=MINUTE),
        Row("mamba2-1.3b", (8, 8), TEXTS, TOKENS, time_limit=MINUTE),
        Row("rwkv-4-169m", (8, 8), 1024, 16, time_limit=MINUTE),  # captured token by token
        Row("pegasus-x-large", (8, 8), TEXTS, TOKENS, time_limit=MINUTE),
        Row("qwen3-next-80b", (8, 8), TEXTS, 512, 4, time_limit=MINUTE),  # captured chunk by chunk
        Row("granite-4-h-micro", (8, 8), TEXTS, TOKENS, time_limit=MINUTE),
    ),
    "tiny": tuple(
        Row(name, mesh, 8, 64, hardware="cpu", time_limit=MINUTE)
        for name in ("tiny-llama", "tiny-moe", "tiny-gpt2", "tiny-vit", "tiny-cnn", "tiny-mlp")
        for mesh in ((2, 2), (2, 2, 2))
    ),
    "layers": tuple(Row("llama-8b", (8, 8), TEXTS, TOKENS, layers) for layers in (8, 16, 32, 64)),
    "devices": tuple(Row("llama-8b", (side, side), TEXTS, TOKENS) for side in (2, 4, 8, 16, 32)),
    "limits": (
        Row("llama-8b", (8, 8), TEXTS, TOKENS, memory=20 * GB),
        Row("llama-70b", (8, 8), TEXTS, TOKENS, memory=40 * GB),
        Row("llama-70b", (4, 8, 8), TEXTS, TOKENS, memory=20 * GB),
        *(Row("llama-405b", (16, 8, 8), TEXTS, TOKENS, memory=size * GB) for size in (80, 70, 60)),
        *(
            Row("llama-405b", (16, 8, 8), 256, 8192, memory=80 * GB, schedule=name, microbatches=32, time_limit=300)
            for name in ("1f1b", "interleaved_1f1b")
        ),
        Row("llama-8b", (64,), TEXTS, TOKENS, memory=40 * GB, is_searched=True),
        Row("llama-405b", (1024,), 256, 8192, memory=80 * GB, is_searched=True, pipeline="pp", time_limit=290),
    ),
}
SHARES = {"tiny": (0.95, 0.9, 0.8, 0.7)}
"""Group → its limits, as shares of the free plan's memory, where it has some of its own."""
WHOLE = ("models", "wide", "tiny")
"""Groups whose rows are also selected by the name of a model."""
QUICK_LAYERS = 2
PEER_LAYERS = (2, 32)
TITLES = {
    "models": "models",
    "wide": "wide and irregular graphs",
    "tiny": "small models, within ever less memory",
    "layers": "the same model with more layers",
    "devices": "the same model on more devices",
    "limits": "within so much memory: sharded, in a pipeline, and on the best of all meshes",
    "peer": "beside AutoParallel",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A row and what was measured, or the reason why nothing was."""

    row: Row
    measured: Measured | None = None
    failure: str = ""

    def cells(self) -> tuple[object, ...]:
        mesh = "×".join(map(str, self.row.mesh)) + (" devices" if self.row.is_searched else "")
        limit = "-" if self.row.memory is None else f"{self.row.memory / 1e9:.1f}"
        layers = "all" if self.row.layers is None else self.row.layers
        found = self.measured
        if found is None:
            return (self.row.model, mesh, layers, None, limit, *(None,) * 10, self.failure)
        return (
            self.row.model,
            mesh,
            layers,
            found.nodes,
            limit,
            *(None if seconds is None else f"{seconds:.2f}" for seconds in (found.capture, found.build, found.solve)),
            *(f"{seconds:.2f}" for seconds in (found.total, found.cpu)),
            None if found.cpu_of_planning is None else f"{found.cpu_of_planning:.2f}",
            f"{found.rss_bytes / 1e6:.0f}",
            None if found.step is None else f"{found.step * 1e3:.1f}",
            None if found.peak_bytes is None else f"{found.peak_bytes / 1e9:.1f}",
            None if found.gap is None else f"{found.gap:.0e}" if found.gap else "0",
            found.solver,
        )


HEADERS = (
    "model",
    "mesh",
    "layers",
    "nodes",
    "limit GB",
    "capture s",
    "build s",
    "solve s",
    "total s",
    "CPU s",
    "of it planning",
    "RSS MB",
    "step ms",
    "plan GB",
    "gap",
    "solver",
)


def selected(only: Sequence[str], quick: bool) -> dict[str, tuple[Row, ...]]:
    """Group → its rows: all, those of the groups and models named in `only`, with few layers where it must be quick.

    Raises SystemExit where a name in `only` is neither a group nor a model.
    """
    models = {row.model for rows in GROUPS.values() for row in rows}
    unknown = [name for name in only if name not in GROUPS and name not in models]
    if unknown:
        known = ", ".join([*GROUPS, *sorted(models)])
        raise SystemExit(f"--only {unknown[0]}: no such group or model; there are {known}.")
    groups = {
        group: tuple(row for row in rows if not only or group in only or (row.model in only and group in WHOLE))
        for group, rows in GROUPS.items()
        if not quick or group == "models" or group in only
    }
    if quick:
        groups = {
            group: tuple(replace(row, layers=row.layers or QUICK_LAYERS) for row in groups[group]) for group in groups
        }
    return {group: rows for group, rows in groups.items() if rows}


def lines(rows: Iterable[Row], shares: Iterable[float]) -> Iterator[Line]:
    """Each row without a limit and with some, shares of what the plan without a limit takes, unless it has its own."""
    for row in rows:
        free = planned(row)
        yield free
        if row.memory is None and free.measured is not None and free.measured.peak_bytes:
            for share in shares:
                yield planned(replace(row, memory=int(share * free.measured.peak_bytes)))


def planned(row: Row) -> Line:
    """The row, planned by autopar in a process of its own."""
    return _run(row, ["benchmarks.plan_row", json.dumps(asdict(row))])


def planned_by_peer(row: Row, path: Path) -> Line:
    """The row, planned by AutoParallel in a process of its own."""
    return _run(row, ["benchmarks.autoparallel_row", json.dumps(asdict(row)), str(path)])


def peer_lines(path: Path, quick: bool) -> Iterator[Line]:
    """autopar and AutoParallel on the same models."""
    for layers in (QUICK_LAYERS,) if quick else PEER_LAYERS:
        row = Row("llama-8b", (8, 8), TEXTS, TOKENS, layers)
        yield planned(row)
        yield planned_by_peer(row, path)


def _run(row: Row, module: list[str]) -> Line:
    done = subprocess.run([sys.executable, "-m", *module], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Line(row, failure=f"failed with status {done.returncode}: {last[:100]}")
    return Line(row, Measured(**json.loads(done.stdout.strip().splitlines()[-1])))


def show(title: str, found: Iterable[Line]) -> None:
    """Print the table of a group once it is complete, and each row on the way to stderr."""
    rows = []
    for line in found:
        rows.append(line.cells())
        print("  ".join("-" if cell is None else str(cell) for cell in rows[-1]), file=sys.stderr, flush=True)
    print(f"\n{title}\n\n{tabulate(rows, headers=HEADERS, missingval='-')}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help=f"of {', '.join(GROUPS)}, or a model")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers of each model, and no sweeps")
    parser.add_argument("--memory", type=float, default=0.9, help="limit, as a share of the free plan's; 0: no limit")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="a checkout of AutoParallel, to measure it too")
    options = parser.parse_args(arguments)
    if options.peer is not None and not (options.peer / "autoparallel" / "api.py").is_file():
        raise SystemExit(f"--peer {options.peer}: no autoparallel/api.py there; give a checkout of {PEER}.")
    for group, rows in selected(options.only, options.quick).items():
        shares = SHARES.get(group, (options.memory,)) if options.memory else ()
        show(TITLES[group], lines(rows, shares))
    if options.peer is None:
        print(f"\nAutoParallel was skipped: git clone {PEER}, pip install pulp, and give --peer PATH.")
    else:
        show(TITLES["peer"], peer_lines(options.peer.resolve(), options.quick))


if __name__ == "__main__":
    main()
