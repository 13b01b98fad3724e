"""The parts of `make gpu`, each in a process of its own with a time box: none ends another by failing or by hanging."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from autopar.tools.calibration.calibrate import calibrate
from benchmarks.gpu import operations, ranks, steps
from benchmarks.gpu.setting import Draft, Finding, Row, Setting, stubbed

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
    measure: Callable[[Setting, Draft], Finding]
    """Measure what the draft lacks, and add each finished case to it; return all that was found."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a part: its finding, and the reason why that is none, or lacks cases."""

    part: str
    about: str
    seconds: float
    finding: Finding | None = None
    reason: str = ""


def _calibrated(setting: Setting, _: Draft) -> Finding:
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


def _tested(setting: Setting, draft: Draft) -> Finding:
    """The tests that are marked `cuda`; their failures are told, and the rest goes on."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-o", "addopts=-v", "-p", "no:cacheprovider", CUDA_TESTS]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None, "it is a pipe"
        for line in filter(str.strip, running.stdout):
            lines.append(line.rstrip())
            results = Counter(re.findall(r"::.* (PASSED|FAILED|ERROR) +\[", "\n".join(lines)))
            so_far = ", ".join(f"{number} {result.lower()}" for result, number in results.items())
            draft.write(Finding((Row("tests so far", so_far, "all pass", None),)))
    last = lines[-1].strip("= ")
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    rows = [Row("tests", last, "all pass", setting.judged(running.returncode == 0 and "passed" in last))]
    return Finding((*rows, *(Row("", line) for line in failed)), {"output": "\n".join(lines)[-20000:]})


def _compared(axes: Mapping[str, int], compiled: bool) -> Callable[[Setting, Draft], Finding]:
    return lambda setting, _: steps.compared(setting, axes, compiled)


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
    draft = Draft(output)
    draft.write(part.measure(setting, draft))


def run(part: Part, setting: Setting, folder: Path, left_s: float, before: Finding | None = None) -> Outcome:
    """Measure a part in a process of its own, for as long as it may take and time is left; what `before` lacks."""
    box_s = min(part.box_s, left_s)
    if box_s <= 0:
        return Outcome(part.name, part.about, 0.0, before, "left out: the time for all parts is over")
    output = folder / f"{part.name}.json"
    if before is not None:
        Draft(output).write(before)
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
    finding = Draft(output).read() if output.exists() else None
    ended = status == 0 and finding is not None
    return Outcome(part.name, part.about, seconds, finding, "" if ended else f"{reason}\n{last}".rstrip())


def of_json(values: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a part as results have it."""
    return Outcome(**{**values, "finding": None if values["finding"] is None else Finding.of(values["finding"])})


def run_all(
    setting: Setting,
    parts: Sequence[Part],
    folder: Path,
    seconds: float,
    measured_before: Mapping[str, Outcome] = MappingProxyType({}),
) -> list[Outcome]:
    """Run all parts within so many seconds; those after the calibration predict with the profile that it wrote.

    Parts that were `measured_before` are taken from there, and the cases of parts that did not end.
    """
    end, outcomes = time.monotonic() + seconds, []
    for part in parts:
        outcome = measured_before.get(part.name)
        if outcome is None or outcome.reason:
            print(f"{part.name}: {part.about} …", flush=True)
            outcome = run(part, setting, folder, end - time.monotonic(), outcome and outcome.finding)
        outcomes.append(outcome)
        if part.name == CALIBRATION and outcome.finding is not None:
            measured = folder / "profile.json"
            measured.write_text(json.dumps(outcome.finding.data, indent=2, ensure_ascii=False))
            setting = replace(setting, profile=str(measured))
    return outcomes
