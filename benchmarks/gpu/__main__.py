"""Benchmarks of autopar on one GPU, in less than ten minutes: `make gpu`.

    make gpu                                                an environment of its own (5 GB), and all parts
    make gpu GPU_PYTHON=python3                             with a Python that has torch for CUDA and autopar's needs
    python -m benchmarks.gpu --only tp8 tests               some parts
    python -m benchmarks.gpu --resume                       what the last results lack (make gpu RESUME=--resume)
    python -m benchmarks.gpu --device cpu --small           the same code on tiny shapes, to try it without a GPU

The parts measure:

- a hardware profile of the device;
- the products, the attention and the optimizer's step of one of 8 ranks of Llama-3-8B, against that profile (within
  5 %);
- a training step of such a rank, and of one of 8 × 8 with data parallelism, against a hand-written one: eager (≥ 0.97
  of its speed) and with torch.compile (≥ 1.0), and its memory against the plan's (within 10 %);
- the tests that need CUDA;
- training on 2 and 4 ranks that share the device: presets, pipelines, experts, offload, checkpoints and families, each
  compared with one process (losses within 0.1 %).

Steps are measured with stubbed collectives, as one device cannot show how they overlap with computing. Ranks that share
the device communicate by gloo through the host: their values are judged, not their speed. Every part is a process of
its own with a time limit. A part that fails or hangs is reported with the cases that it has finished, and the others go
on; `--resume` measures the rest.

Results, with hardware and date, are written to benchmarks/results. The exit status is 0 if all parts were measured and
every goal was reached, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from autopar.costs.hardware.load import known_profiles
from benchmarks.gpu import results
from benchmarks.gpu.parts import PARTS, ROOT, measure, run_all
from benchmarks.gpu.setting import Setting

SECONDS = 590.0
"""Seconds for all parts together; `make gpu` subtracts the time that the environment took."""
NO_GPU = (
    "make gpu measures on an NVIDIA GPU, and torch {version} finds none here: nothing was measured. Run it on a "
    "machine with one; `python -m benchmarks.gpu --device cpu --small` tries the script itself."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all parts together ({SECONDS:.0f})")
    parser.add_argument("--profile", help="the profile whose links are taken (found by the device's name)")
    parser.add_argument("--results", type=Path, help="the folder for results (benchmarks/results; build/gpu of a CPU)")
    parser.add_argument("--resume", action="store_true", help="measure only what the last results of the device lack")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(NO_GPU.format(version=torch.__version__))
    if given.device == "cpu" and not given.small:
        raise SystemExit("--device cpu needs --small: a CPU would take hours for the shapes of Llama-3-8B.")
    setting = Setting(given.device, given.small, given.profile or _profile_of(given.device))
    parts = [part for part in PARTS if part.name in given.only]
    if given.part is not None:
        measure(next(part for part in PARTS if part.name == given.part), setting, given.output)
        return 0
    known = results.about(setting)
    written = given.results or ROOT / ("benchmarks/results" if given.device == "cuda" else "build/gpu")
    before = results.latest(written, known) if given.resume else {}
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-") as folder:
        outcomes = run_all(setting, parts, Path(folder), given.seconds, before)
    path = results.write(written, known, outcomes)
    print(f"\n{results.text(known, outcomes)}\nwritten to {path}")
    return 0 if results.is_whole(outcomes) else 1


def _profile_of(device: str) -> str:
    """The known profile of the device by its name ("NVIDIA H100 80GB HBM3" → "h100"), h100 where there is none."""
    if device == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name().lower()
    return next((known for known in known_profiles() if known in name), "h100")


if __name__ == "__main__":
    sys.exit(main())
