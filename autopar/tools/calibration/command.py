"""`autopar calibrate` on the command line: its options, and the profile in words."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from autopar.console.units import format_bytes, format_seconds
from autopar.costs.hardware.load import parse
from autopar.errors import InputError
from autopar.files.replace import replace_text

if TYPE_CHECKING:
    from autopar.tools.calibration.computing import Profile

PER_COLLECTIVE = {"efficiencies": "bandwidth reached", "latencies": "latency", "fit_error": "error of the fit"}
"""Fields of a link that was measured, in words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `autopar calibrate`."""
    parser.add_argument("output", metavar="FILE", help="the profile to write, a .json file")
    parser.add_argument("--device", default="cpu", help="cpu with gloo, or cuda with NCCL (cpu)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start here, if torchrun has not (2)")
    parser.add_argument("--links", help="with --ranks 1: the profile (name or path) whose links are taken")
    parser.add_argument("--quick", action="store_true", help="few and small messages: seconds, and rough numbers")


def run(options: argparse.Namespace) -> int:
    """Measure, write the profile, print it; 0. Raises InputError for what cannot be measured or written."""
    from autopar.tools.calibration.calibrate import calibrate  # not before, for --help does without PyTorch
    from autopar.tools.calibration.timing import QUICK

    output = Path(options.output)
    if output.suffix != ".json":
        raise InputError(f"the profile {options.output!r} would not be found again; give it a name that ends in .json.")
    if not output.parent.is_dir() or output.is_dir():
        raise InputError(f"the profile {options.output!r} cannot be written; give a file in a folder that exists.")
    profile = calibrate(options.ranks, options.device, QUICK if options.quick else None, output.stem, options.links)
    if int(os.environ.get("RANK", 0)) == 0:
        try:
            replace_text(output, json.dumps(profile, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise InputError(f"the profile cannot be written: {error}; give a file that can.") from error
        print(f"{summary(profile)}\n\nsaved in {output}; use it with --hardware {output}")
    return 0


def summary(profile: Profile) -> str:
    """Return the profile as people read it, with the error of the fits and the load before."""
    hardware = parse(profile)
    rows = [(f"matmul {dtype}", f"{value:.3g} FLOP/s") for dtype, value in hardware.flops.items()]
    rows.append(("optimizer", f"{format_bytes(hardware.memory_bytes_per_s)}/s"))
    rows.append(("elementwise", f"{format_bytes(hardware.elementwise_bytes_per_s)}/s"))
    rows.append(("products of few rows", f"{format_bytes(hardware.product_bytes_per_s)}/s"))
    rows.append(("a wave of products", f"{hardware.product_wave:.3g} elements"))
    half = f", half of that at {hardware.attention_length:.0f} queries" if hardware.attention_length else ""
    rows.append(("attention", f"{hardware.attention_efficiency:.0%} of a matmul's FLOP/s{half}"))
    host = f"{format_bytes(hardware.host_memory_bytes_per_s)}/s of {hardware.host_devices} devices"
    rows.append(("link to the host", f"{format_bytes(hardware.host_link_bytes_per_s)}/s"))
    rows.append(("steps on the host", host))
    rows.append(("one operation", format_seconds(hardware.op_latency_s)))
    stated = {each["name"]: each for each in profile["links"]}
    for link in hardware.links:
        written = stated.get(link.name, {})  # a spine is not stated as a link
        rows.append((link.name, f"{format_bytes(link.bytes_per_s)}/s"))
        for each in link.protocols:
            start = f"{format_seconds(each.base_latency_s)} + {format_seconds(each.step_latency_s)} a step"
            rows.append((f"  {each.name}", f"{start}, {each.efficiency:.1%} of the bandwidth"))
        rows += [(f"  {what}", _percents(written[field])) for field, what in PER_COLLECTIVE.items() if field in written]
    rows.append(("a running collective", f"takes {hardware.communication_share:.0%} of overlapped compute"))
    source = profile["op_latency_s"]["source"].removeprefix("measured: ").rpartition(":")[0]
    return f"{source}\n{tabulate(rows, tablefmt='plain')}"


def _percents(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number['value']:.0%}" for name, number in numbers.items())
