"""The parts of `make gpu`, each in a process of its own with a time box: none ends another by failing or by hanging."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from autopar.tools.calibration.calibrate import calibrate
from benchmarks.gpu import operations, ranks, steps
from benchmarks.gpu.setting import Finding, Row, Setting, stubbed

CALIBRATION = "calibration"
ROOT = Path(__file__).resolve().parents[2]
CUDA_TESTS = "tests/runtime/module/test_cuda.py"
TP, DP_TP = {"tp": 8}, {"dp": 8, "tp": 8}
LAST_LINES = 15  # of the output of a failed part


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement with its time limit in seconds."""

    name: str
    about: str
    box_s: float
    measure: Callable[[Setting], Finding]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a part: its finding, or the reason why it has none."""

    part: str
    about: str
    seconds: float
    finding: Finding | None = None
    reason: str = ""


def _calibrated(setting: Setting) -> Finding:
    """The profile of this device, links as the known profile has them."""
    with stubbed(setting.device, {"alone": 1}):
        name = torch.cuda.get_device_name() if setting.device == "cuda" else setting.device
        profile = calibrate(1, setting.device, setting.effort, f"{name}, measured", setting.profile)
    rows = [Row(f"matmul {dtype}", f"{number['value']:.3g} FLOP/s") for dtype, number in profile["flops"].items()]
    rows += [
        Row(name, f"{profile[name]['value']:.3g}")
        for name in (
            *("memory_bytes_per_s", "elementwise_bytes_per_s", "product_bytes_per_s", "attention_efficiency"),
            *("op_latency_s", "memory_bytes"),
        )
    ]
    return Finding((*rows, Row("links, not measured", f"as of {setting.profile}")), profile)


def _tested(setting: Setting) -> Finding:
    """The tests that are marked `cuda`; their failures are told, and the rest goes on."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", CUDA_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    last = lines[-1] if lines else done.stderr[-200:]
    rows = [Row("tests", last, "all pass", setting.judged(done.returncode == 0 and "passed" in last))]
    return Finding((*rows, *(Row("", line) for line in failed)), {"output": done.stdout[-20000:]})


def _compared(axes: Mapping[str, int], compiled: bool) -> Callable[[Setting], Finding]:
    return lambda setting: steps.compared(setting, axes, compiled)


PARTS: Sequence[Part] = (
    Part(CALIBRATION, "what the device computes, reads and holds", 90, _calibrated),
    Part("operations", "operations of a tp8 rank of Llama-3-8B beside that profile", 45, operations.against_profile),
    Part("tp8", "a step of a tp8 rank of Llama-3-8B beside one by hand", 75, _compared(TP, False)),
    Part("dp8-tp8", "the same of a dp8×tp8 rank", 75, _compared(DP_TP, False)),
    Part("tests", "tests on the device", 90, _tested),
    Part("ranks-2", "2 ranks that share the device, beside one process", 60, ranks.trained_as_one(ranks.TWO, 2)),
    Part("pipelines-2", "pipelines of 2 such ranks", 45, ranks.trained_as_one(ranks.PIPELINES, 2)),
    Part("ranks-4", "4 such ranks", 60, ranks.trained_as_one(ranks.FOUR, 4)),
    Part("tp8-compiled", "a step of a tp8 rank with torch.compile on both sides", 120, _compared(TP, True)),
    Part("dp8-tp8-compiled", "the same of a dp8×tp8 rank", 120, _compared(DP_TP, True)),
    Part("families-2", "families of models on 2 ranks", 60, ranks.trained_as_one(ranks.OF_FAMILIES, 2)),
)
"""Parts in order of importance; the last ones are skipped if time runs out."""


def measure(part: Part, setting: Setting, output: Path) -> None:
    """Measure a part here, and write down what it found."""
    if setting.device == "cpu":
        torch.set_num_threads(1)
    output.write_text(json.dumps(asdict(part.measure(setting))))


def run(part: Part, setting: Setting, folder: Path, left_s: float) -> Outcome:
    """Measure a part in a process of its own, for as long as it may take and time is left."""
    box_s = min(part.box_s, left_s)
    if box_s <= 0:
        return Outcome(part.name, part.about, 0.0, None, "left out: the time for all parts is over")
    output = folder / f"{part.name}.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, "--output", str(output)]
    command += ["--device", setting.device, "--profile", setting.profile, *(["--small"] if setting.small else [])]
    return of_command(part, command, output, box_s)


def of_command(part: Part, command: Sequence[str], output: Path, box_s: float) -> Outcome:
    """Run the command that measures a part; what it leaves in `output`, or why it left nothing."""
    start = time.monotonic()
    with open(output.with_suffix(".log"), "w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(box_s)
            reason = f"failed with status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            process.wait()
            reason, status = f"did not end in its {box_s:.0f} s", None
        log.seek(0)
        last = "".join(log.readlines()[-LAST_LINES:])
    seconds = time.monotonic() - start
    if status == 0 and output.exists():
        return Outcome(part.name, part.about, seconds, _finding(json.loads(output.read_text())))
    return Outcome(part.name, part.about, seconds, None, f"{reason}\n{last}".rstrip())


def of_json(values: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a part as results have it."""
    return Outcome(**{**values, "finding": None if values["finding"] is None else _finding(values["finding"])})


def _finding(values: Mapping[str, Any]) -> Finding:
    return Finding(tuple(Row(**row) for row in values["rows"]), values["data"])


def run_all(
    setting: Setting,
    parts: Sequence[Part],
    folder: Path,
    seconds: float,
    measured_before: Mapping[str, Outcome] = MappingProxyType({}),
) -> list[Outcome]:
    """Run all parts within so many seconds; those after the calibration predict with the profile that it wrote.

    Parts that were `measured_before` are taken from there.
    """
    end, outcomes = time.monotonic() + seconds, []
    for part in parts:
        if part.name in measured_before:
            outcome = measured_before[part.name]
        else:
            print(f"{part.name}: {part.about} …", flush=True)
            outcome = run(part, setting, folder, end - time.monotonic())
        outcomes.append(outcome)
        if part.name == CALIBRATION and outcome.finding is not None:
            measured = folder / "profile.json"
            measured.write_text(json.dumps(outcome.finding.data, indent=2, ensure_ascii=False))
            setting = replace(setting, profile=str(measured))
    return outcomes
