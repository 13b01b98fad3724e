"""The results as a text with hardware and date, and as JSON that has every number."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.gpu.parts import PARTS, Outcome, of_json
from benchmarks.gpu.setting import Setting

VERDICTS = {True: "met", False: "MISSED", None: ""}


def about(setting: Setting) -> dict[str, str]:
    """Return the conditions that the numbers depend on: date, device, host, versions, model."""
    known = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.gpu (make gpu)",
        "device": torch.cuda.get_device_name() if setting.device == "cuda" else f"{platform.machine()} CPU",
        "host": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "model": f"Llama-3-8B, {setting.num_layers(False)} layers ({setting.num_layers(True)} where compiled), "
        f"{setting.sequence} tokens a rank, {str(setting.dtype).removeprefix('torch.')}, fused AdamW",
        "collectives": "stubbed: rank 0 of a mesh whose collectives do nothing; ranks that share the device: gloo",
    }
    if setting.device == "cuda":
        known["CUDA"] = str(torch.version.cuda)
    if setting.small:
        known["sizes"] = "tiny: a trial of the script, whose numbers say nothing of autopar"
    return known


def text(known: Mapping[str, str], outcomes: Sequence[Outcome]) -> str:
    """All of it for people."""
    lines = [f"{name}: {value}" for name, value in known.items()]
    for outcome in outcomes:
        lines += ["", f"## {outcome.part}: {outcome.about} ({outcome.seconds:.0f} s)", ""]
        if outcome.finding is None:
            lines.append(f"nothing was measured; {outcome.reason}")
            continue
        rows = [(row.name, row.found, row.goal, VERDICTS[row.reached]) for row in outcome.finding.rows]
        lines.append(tabulate(rows, ("", "found", "goal", ""), tablefmt="plain", disable_numparse=True))
        lines += ["", f"more was not measured; {outcome.reason}"] if outcome.reason else []
    return "\n".join([*lines, "", verdict(outcomes)]) + "\n"


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Return one line: how many goals were reached, and which parts were not measured."""
    goals = [row.reached for each in outcomes if each.finding for row in each.finding.rows if row.reached is not None]
    missing = [each.part for each in outcomes if each.finding is None]
    begun = [each.part for each in outcomes if each.finding is not None and each.reason]
    reached = f"{sum(goals)} of {len(goals)} goals met"
    for what, parts in ("not measured", missing), ("in part", begun):
        reached += f"; {what}: {', '.join(parts)}" if parts else ""
    return reached


def is_whole(outcomes: Sequence[Outcome]) -> bool:
    """Return whether every part was measured and every goal reached."""
    rows = (row for each in outcomes if each.finding for row in each.finding.rows)
    return not any(each.reason for each in outcomes) and all(row.reached is not False for row in rows)


def latest(folder: Path, known: Mapping[str, str]) -> dict[str, Outcome]:
    """Return the parts of which the newest results of this device and these sizes have a finding, by name."""
    found = sorted(folder.glob(f"gpu-{_name(known)}*.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        values = json.loads(path.read_text())
        if values["about"].get("device") == known["device"] and values["about"].get("sizes") == known.get("sizes"):
            return {each["part"]: of_json(each) for each in values["parts"] if each["finding"] is not None}
    return {}


def _name(known: Mapping[str, str]) -> str:
    return re.sub(r"[^a-z0-9]+", "-", known["device"].lower()).strip("-")


def write(folder: Path, known: Mapping[str, str], outcomes: Sequence[Outcome]) -> Path:
    """Write gpu-NAME.txt and .json, with the parts in the name if not all ran; return the path of the text."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [outcome.part for outcome in outcomes]
    stem = "-".join(["gpu", _name(known), *([] if parts == [part.name for part in PARTS] else parts)])
    values = {"about": dict(known), "parts": [asdict(outcome) for outcome in outcomes]}
    (folder / f"{stem}.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    path = folder / f"{stem}.txt"
    path.write_text(text(known, outcomes))
    return path
