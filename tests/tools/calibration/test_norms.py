"""A norm that is measured has the bytes that a plan counts for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from autopar.tools.calibration.norms import counted_bytes, norm
from tests.support.parity import SLOW_DEVICES

ROWS, FEATURES = 512, 64
BYTES_PER_S = 1e6


class Normed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(FEATURES, dtype=dtype))

    def forward(self, x_ND: Tensor) -> Tensor:
        return norm(x_ND, self.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_is_counted_as_a_plan_counts_it(dtype: torch.dtype) -> None:
    x_ND = torch.zeros(ROWS, FEATURES, dtype=dtype, requires_grad=True)
    hardware = replace(SLOW_DEVICES, flops={"float32": 1e30}, elementwise_bytes_per_s=BYTES_PER_S)
    plan = autopar.plan(Normed(dtype), autopar.Mesh({"dp": 1}), (x_ND,), hardware=hardware)
    counted = BYTES_PER_S * sum(row.seconds for row in plan.rows if row.kind == "call")
    assert_close(counted, float(counted_bytes(x_ND)), rtol=6 / FEATURES, atol=0.0)


def test_the_norm_is_that_of_pytorch() -> None:
    x_ND, weight_D = torch.randn(ROWS, FEATURES), torch.rand(FEATURES)
    assert_close(norm(x_ND, weight_D), nn.functional.rms_norm(x_ND, (FEATURES,), weight_D, 1e-5))
