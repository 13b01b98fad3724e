"""Buffers that are in no state dict, on a model that was made on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh

HIDDEN = 8


class Rotary(nn.Module):
    """A table of frequencies that is computed when the module is made."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        frequencies = 1.0 / 100 ** (torch.arange(HIDDEN, device=device) / HIDDEN)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("counted", torch.zeros((), device=device))

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD * self.get_buffer("frequencies").cos() + self.get_buffer("counted")


class Model(nn.Module):
    """A layer, the table, a layer."""

    def __init__(self, buffers: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.rotary, self.down = nn.Linear(HIDDEN, HIDDEN), Rotary(buffers), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(self.rotary(self.up(x_BD))).square().mean()


def made(buffers: str, strategy: str) -> Any:
    """A compiled model whose parameters, and perhaps its buffers, were on the meta device."""
    with torch.device("meta"):
        model = Model(buffers)
    batch = torch.zeros(4, HIDDEN)
    return autopar.compile(model, mesh((2,), ("dp",)), (batch,), hardware=SLOW_DEVICES, strategy=strategy)


def check(compiled: Any, eager: nn.Module) -> None:
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    loss, expected = compiled(x), eager(x)
    loss.backward()
    expected.backward()
    assert_close(whole(loss), expected.detach())
    for (name, p), q in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert_close(whole(p.grad), q.grad, msg=name)


def _kept(strategy: str) -> None:
    eager, compiled = Model(), made("cpu", strategy)
    compiled.to_empty(device="cpu")
    compiled.load_state_dict(eager.state_dict())
    check(compiled, eager)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
def test_values_that_there_are_stay_where_memory_is_emptied(ranks: Ranks, strategy: str) -> None:
    ranks.run(_kept, strategy)


def _refused(emptied: bool) -> str:
    eager, compiled = Model(), made("meta", "data_parallel")
    if emptied:
        compiled.to_empty(device="cpu")
        compiled.load_state_dict(eager.state_dict())
        compiled.to(torch.float32).double().float()  # other tensors, without values as before
    else:
        compiled.load_state_dict(eager.state_dict(), assign=True)
    with pytest.raises(InputError) as error:
        compiled(torch.zeros(4, HIDDEN))
    if emptied:
        compiled.get_buffer("rotary.frequencies").copy_(eager.get_buffer("rotary.frequencies"))
    else:
        compiled.get_submodule("rotary").frequencies = eager.get_buffer("rotary.frequencies").clone()
    check(compiled, eager)
    return str(error.value)


@pytest.mark.parametrize("emptied", [True, False])
def test_a_step_without_values_is_refused_until_they_are_given(ranks: Ranks, emptied: bool) -> None:
    for text in ranks.run(_refused, emptied):
        assert text == (
            "rotary.frequencies has no values: the model was made on the meta device, and a state dict has no buffers "
            "that are not persistent. Give each its values before the first step: "
            'model.get_submodule("rotary").frequencies = values. Or make the model so that its buffers have values, as '
            "accelerate.init_empty_weights(include_buffers=False) does."
        )
