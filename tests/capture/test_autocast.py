"""Whose policy autocast regions are captured with: that of the type of device that the program is for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.capture.passes.autocast import autocasting
from autopar.runtime.module.inputs import kind_of

CUDA = torch.device("cuda")
FULL_ON_CUDA: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "pow": lambda x: x.pow(2),
    "exp": lambda x: x.exp(),
    "rsqrt": lambda x: x.rsqrt(),
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: x.norm(),
    "softplus": F.softplus,
}
"""float32 under autocast on CUDA, by ATen/autocast_mode.h (AT_FORALL_FP32), and as they come on the CPU."""
ALIKE: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "linear": (lambda x: x, torch.bfloat16),
    "relu": (F.relu, torch.bfloat16),
    "attention": (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), torch.bfloat16),
    "mse_loss": (lambda x: F.mse_loss(x, torch.zeros(4, 8)), torch.float32),
}


class _Of(nn.Module):
    """A linear layer and some operations on its output, optionally in an autocast region."""

    def __init__(self, *made: Callable[[Tensor], Tensor], region: str | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self._made, self._region = made, region

    def forward(self, x: Tensor) -> list[Tensor]:
        if self._region is None:
            return [each(self.layer(x)) for each in self._made]
        with torch.autocast(self._region, torch.bfloat16):
            return [each(self.layer(x)) for each in self._made]


def _dtypes(model: nn.Module, device: str, on: str | None = None, example: str = "cpu") -> list[torch.dtype]:
    """Return the dtypes of the outputs, captured for a device type, in an autocast region of the type `on` if given."""
    with autocasting(on or "cpu", torch.bfloat16, on is not None):
        found: Any = capture(model, (torch.zeros(4, 8, device=example),), {}, device=torch.device(device)).output
    return [each.meta["tensor"].dtype for each in found]


@pytest.mark.parametrize("example", ["cpu", "meta"])
def test_a_region_has_the_policy_of_the_meshs_device_whatever_the_example_is_on(example: str) -> None:
    model = _Of(*FULL_ON_CUDA.values())
    assert _dtypes(model, "cuda", "cuda", example) == [torch.float32] * len(FULL_ON_CUDA)
    assert _dtypes(model, "cpu", "cpu", example) == [torch.bfloat16] * len(FULL_ON_CUDA)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_both_policies_say_alike(device: str) -> None:
    made, expected = zip(*ALIKE.values(), strict=True)
    assert _dtypes(_Of(*made), device, device) == list(expected)


def test_a_region_of_the_forward_that_asks_its_tensors_has_the_policy_of_the_mesh() -> None:
    model = _Of(FULL_ON_CUDA["softmax"], region="cpu")  # as x.device.type says while it is traced
    assert _dtypes(model, "cuda") == [torch.float32] and _dtypes(model, "cpu") == [torch.bfloat16]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_region_of_another_device_changes_nothing() -> None:
    model = _Of(FULL_ON_CUDA["softmax"], region="cuda")
    assert _dtypes(model, "cpu") == [torch.float32] and _dtypes(model, "cpu", "cpu") == [torch.bfloat16]


@pytest.mark.parametrize(("device", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_call_is_told_apart_by_what_is_captured(device: str, other: str) -> None:
    model, inputs = _Of(FULL_ON_CUDA["exp"]), ((torch.zeros(4, 8),), {})
    plain = kind_of(inputs, device)
    with autocasting(other, torch.bfloat16, True):
        assert kind_of(inputs, device) == plain and _dtypes(model, device, other) == [torch.float32]
    with autocasting(device, torch.bfloat16, True):
        assert kind_of(inputs, device) != plain
    assert _dtypes(_Of(F.relu), device, device) == [torch.bfloat16] == _dtypes(_Of(ALIKE["linear"][0]), device, device)


def test_calls_that_are_tried_for_autocast_and_fail_are_not_logged() -> None:
    def of_two_dtypes(x: Tensor) -> Tensor:  # x is bf16, and einsum without autocast refuses two dtypes
        return torch.einsum("ab,bc->ac", x, torch.ones(8, 8))

    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        assert _dtypes(_Of(of_two_dtypes), "cpu", "cpu") == [torch.bfloat16]
    finally:
        log.removeHandler(handler)
    assert not seen and not log.disabled
