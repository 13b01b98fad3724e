"""Kernels and clusters of published steps that neither models of transformers nor shipped profiles have.

RMSNorm, rotary embedding   one call each (`publications.kernels`), as Megatron-LM, TransformerEngine and
                            compiled layers of torchtitan run them
experts                     gate and up as two matrices, and their SwiGLU in one call; transformers pack them into one,
                            whose halves tensor parallelism would exchange
DeepEP, HybridEP            a token travels once to each device that has any of its experts, not once to each expert;
                            priced alone, and never run: autopar's runtime sends rows
NVIDIA's clusters           the network of the datasheet and punctual hosts; what a shipped profile's network
                            reaches, and how late its hosts come, is fitted to the cloud that nanotron ran on
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Efficiencies, Hardware
from autopar.ir.program.program import TensorInfo
from autopar.ir.sharding.operation import Call, Collective, LocalSizes
from autopar.strategies.rules import expert_rules as experts
from benchmarks.publications.kernels import rms_norm, rotary, swiglu

OF_NVIDIA = ("NVIDIA-NeMo", "MoE Parallel Folding")
"""Beginnings of sources that ran on NVIDIA's own clusters."""


def hardware_of(device: str, source: str) -> Hardware:
    """Return the profile of a device in the cluster of a source."""
    profile = load(device)
    if not source.startswith(OF_NVIDIA):
        return profile
    links = (replace(each, efficiencies=Efficiencies(), straggling_s=0.0) for each in profile.links)
    return replace(profile, links=tuple(links))


class RMSNorm(nn.Module):
    """A norm of transformers in one call; it keeps that one's weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Experts(nn.Module):
    """Gated experts with three matrices each; rows are sorted by expert."""

    def __init__(self, num_experts: int, hidden: int, features: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Parameter(torch.empty(num_experts, hidden, features)) for _ in range(2))
        self.down_proj = nn.Parameter(torch.empty(num_experts, features, hidden))

    def forward(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Tokens, the experts of each, and what these count for → tokens."""
        experts_R, num_experts = index_TK.flatten(), self.gate_proj.shape[0]
        order_R = experts_R.argsort(stable=True)
        tokens_R = order_R // index_TK.shape[1]
        ends_E = torch.histc(experts_R.float(), num_experts, 0, num_experts - 1).cumsum(0, dtype=torch.int32)
        rows_RD = x_TD[tokens_R]
        gate_RF = F.grouped_mm(rows_RD, self.gate_proj, offs=ends_E)
        up_RF = F.grouped_mm(rows_RD, self.up_proj, offs=ends_E)
        rows_RD = F.grouped_mm(swiglu(gate_RF, up_RF), self.down_proj, offs=ends_E)
        return torch.zeros_like(x_TD).index_add(0, tokens_R, rows_RD * weights_TK.flatten()[order_R].unsqueeze(-1))


def with_kernels(model: nn.Module) -> None:
    """Let modules of a model of transformers call the kernels, on the device and in the dtypes that they have."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            kind, names = type(child).__name__, set(dict(child.named_parameters()))
            if kind.endswith("RMSNorm"):
                setattr(module, name, RMSNorm(child))
            elif names == {"gate_up_proj", "down_proj"}:
                setattr(module, name, _experts(child))


def _experts(packed: Any) -> Experts:
    down_EDF: Tensor = packed.down_proj
    with torch.device(down_EDF.device), torch.no_grad():
        found = Experts(*down_EDF.shape).to(down_EDF.dtype)
        gate_EFD, up_EFD = packed.gate_up_proj.chunk(2, 1)
        for mine, theirs in ((found.gate_proj, gate_EFD), (found.up_proj, up_EFD), (found.down_proj, down_EDF)):
            mine.copy_(theirs.transpose(1, 2))
    return found


@contextmanager
def rotary_in_one_call(model: nn.Module) -> Iterator[None]:
    """Within this, models of one file of transformers turn queries, and keys, by one call each, if they turn any."""
    library = sys.modules[type(model).__module__]
    if not hasattr(library, "apply_rotary_pos_emb"):
        yield
        return

    def turned(q_BHSD: Tensor, k_BHSD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        halves = q_BHSD.shape[-1] // cos_BSD.shape[-1]  # GPT-OSS has the angles of the first half alone
        cos_SD, sin_SD = (torch.cat([x[0].to(q_BHSD.dtype)] * halves, -1) for x in (cos_BSD, sin_BSD))
        return rotary(q_BHSD, cos_SD, sin_SD), rotary(k_BHSD, cos_SD, sin_SD)

    with mock.patch.object(library, "apply_rotary_pos_emb", turned):
        yield


def devices_of_token(top_k: int, num_experts: int, num_devices: int) -> float:
    """Return the expected number of devices that have any of a token's experts, if routing is balanced.

    >>> devices_of_token(8, 128, 8) / 8  # the share of rows that travel
    0.667...
    """
    elsewhere = math.comb(num_experts - num_experts // num_devices, top_k) / math.comb(num_experts, top_k)
    return num_devices * (1 - elsewhere)


@contextmanager
def rows_once_per_device() -> Iterator[None]:
    """Within this, exchanges of experts are priced as if a token's rows for experts of one device travelled as one."""
    exchanged = experts._exchanged

    def fewer(call: Call, sizes: LocalSizes, rows: TensorInfo) -> tuple[Collective, ...]:
        top_k = call["index" if call.target is experts.DISPATCH else "route"].shape[-1]
        total = experts._num_experts(call)
        devices = sizes.get(experts.TOGETHER + experts.EXPERTS, 1)
        share = devices_of_token(top_k, total, devices) / top_k
        return tuple(replace(each, num_bytes=int(each.num_bytes * share)) for each in exchanged(call, sizes, rows))

    with mock.patch.object(experts, "_exchanged", fewer):
        yield
