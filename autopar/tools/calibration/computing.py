"""The numbers of a profile that one device has by itself: what it computes, reads and holds, without any other."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.console.units import format_bytes
from autopar.costs.hardware.profile import dtype_name
from autopar.tools.calibration.dtensors import PARAMETERS, dtensor_seconds
from autopar.tools.calibration.timing import LAYERS, SHORTER, Timer

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_OF_LENGTH = 0.5
"""Cap on the speedup of the longer sequence, as a share of the ratio of lengths.

A speedup equal to that ratio would leave the asymptotic rate undetermined.
"""
Profile = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stamp:
    """On what, and when, the numbers were measured."""

    text: str

    def number(self, value: float, how: str) -> dict[str, Any]:
        """Return a number of the profile, to three digits."""
        return {"value": float(f"{value:.3g}"), "source": f"{self.text}: {how}"}


def computing(timer: Timer, stamp: Stamp, local_ranks: int) -> Profile:
    """Return the numbers of one device."""
    device = timer.device.type
    threads = torch.get_num_threads()
    each = "one device" if device == "cuda" else f"{threads} thread{'s' * (threads > 1)} on each rank, all at once"
    flops, products = {}, {}
    for dtype in DTYPES:
        products[dtype] = rates = timer.matmul_flops(dtype)
        largest = max(rates, key=rates.__getitem__)
        flops[dtype_name(dtype)] = stamp.number(rates[largest], f"{largest}² matmuls, forward and backward, {each}")
    reached, length = attention_rate(timer.attention_flops())
    smallest = min(timer.effort.matmul_sizes)
    rows, size = timer.effort.product
    elementwise, of_what = timer.elementwise_bytes_per_s()
    latency, launch = timer.op_latency_s()
    memory, how = _memory_bytes(device, local_ranks)
    stepping = timer.optimizer_bytes_per_s()
    step = f"fused AdamW step of {LAYERS} parameters of {size}², read plus written"
    return {
        "flops": flops,
        "elementwise_bytes_per_s": stamp.number(
            elementwise,
            f"{of_what} of {format_bytes(timer.effort.elementwise_bytes)}, forward and backward, {each}",
        ),
        "product_bytes_per_s": stamp.number(
            timer.product_bytes_per_s(),
            f"{rows} rows by {size}² in float32, forward and backward, read plus written, {each}",
        ),
        "product_wave": stamp.number(
            product_wave(products[timer.effort.dtype]), f"{smallest}² matmuls beside the fastest, {each}"
        ),
        "attention_efficiency": stamp.number(
            min(1.0, reached / flops[dtype_name(timer.effort.dtype)]["value"]),
            f"scaled_dot_product_attention of {' × '.join(map(str, timer.effort.attention))} (batch, heads, sequence, "
            f"features){', causal' * timer.effort.causal}, forward and backward, overlapped with matmuls, {each}",
        ),
        "attention_length": stamp.number(length, f"the same beside {SHORTER} times as few queries, {each}"),
        "memory_bytes_per_s": stamp.number(stepping, f"{step}, in {dtype_name(timer.effort.dtype)}, {each}"),
        "memory_bytes": {"value": memory, "source": f"{stamp.text}: {how}"},
        "dtensor_s": stamp.number(
            dtensor_seconds(timer),
            f"{'fused' if timer.effort.fused else 'default'} AdamW step of {PARAMETERS} DTensors less that of plain "
            "tensors, for each",
        ),
        "op_latency_s": stamp.number(latency, "a product of two numbers, forward and backward"),
        "host_link_bytes_per_s": stamp.number(
            timer.host_link_bytes_per_s(),
            f"copies of {format_bytes(timer.effort.message_bytes[-1])} to the host and back",
        ),
        "host_memory_bytes_per_s": stamp.number(
            local_ranks * (stepping if device == "cpu" else timer.optimizer_bytes_per_s(torch.device("cpu"))),
            f"{step}, in float32, on the host by {local_ranks} ranks at once",
        ),
        "host_memory_bytes": {"value": _host_bytes(), "source": f"{stamp.text}: memory of the host"},
        "host_devices": {"value": local_ranks, "source": f"{stamp.text}: ranks of one node"},
        **({"launch_s": stamp.number(launch, "the same, launched one by one by the host")} if device == "cuda" else {}),
    }


def product_wave(rates: Mapping[int, float]) -> float:
    """Return `Hardware.product_wave`, fitted to the FLOP/s of square matmuls by their rows.

    A square one of n rows takes 2n³ + n · wave FLOPs at the full rate (see `costs.pricing.product_efficiency`).
    """
    smallest = min(rates)
    return 2 * smallest**2 * (max(rates.values()) / rates[smallest] - 1)


def attention_rate(rates: Mapping[int, float]) -> tuple[float, float]:
    """Return the FLOP/s of attention over long sequences, and `Hardware.attention_length`, from those of two lengths.

    Over s queries it reaches  rate / (1 + length / s).
    """
    short, long = sorted(rates)
    slower = min(max(rates[long] / rates[short], 1.0), MOST_OF_LENGTH * long / short)
    length = long * (slower - 1) / (long / short - slower)
    return rates[long] * (1 + length / long), length


def _memory_bytes(device: str, local_ranks: int) -> tuple[int, str]:
    """Return the bytes of one device, and how they were found."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory, "memory of the device"
    host = _host_bytes()
    return host // local_ranks, f"{host} bytes of the host, shared by {local_ranks} ranks"


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_name(device: str) -> str:
    """Return the name of the GPU, or the model of the CPU and its number of cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.processor() or 'CPU')}, {os.cpu_count()} cores"
