"""Numbers among the inputs that change from step to step, such as a temperature or the tokens of a batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import autopar
from tests.support.parity import SLOW_DEVICES, whole
from tests.support.ranks import Ranks, mesh


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor, temperature: Any, num_items: Any, squared: bool = False) -> Tensor:
        scores_BD = (self.layer(x_BD) / temperature).log_softmax(-1)
        return (scores_BD.square() if squared else -scores_BD).sum() / num_items


VALUES = ((1.0, 32), (0.7, 30), (0.5, 31), (0.4, 29))
X_BD = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def _said(model: nn.Module, as_tensors: bool) -> list[str]:
    """Train on the values; return the warnings."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for temperature, num_items in VALUES:
            optimizer.zero_grad()
            numbers = (temperature, num_items)
            model(X_BD, *(map(torch.tensor, numbers) if as_tensors else numbers), squared=False).backward()
            optimizer.step()
    return [str(each.message) for each in found if "captured and planned" in str(each.message)]


def _numbers() -> None:
    alone = Tempered()
    assert not _said(alone, False)
    for as_tensors in (False, True):
        first = (X_BD, *(map(torch.tensor, VALUES[0]) if as_tensors else VALUES[0]), False)
        model: Any = autopar.compile(Tempered(), mesh((2,), ("dp",)), first, hardware=SLOW_DEVICES)
        said = _said(model, as_tensors)
        for name, parameter in alone.named_parameters():
            assert_close(whole(model.get_parameter(name)), parameter.detach())
        if as_tensors:  # as the warning advises
            assert not said
            assert len(model._known) == 1
        else:
            assert len(said) == 2
            assert (
                "as the number temperature changed (0.5, 0.7, 1.0). Give it as a tensor, torch.tensor(0.5)" in said[0]
            )
            assert "as the number num_items changed (30, 31, 32). Give it as a tensor, torch.tensor(31)" in said[1]


def test_a_number_that_changes_is_named_and_as_a_tensor_it_is_planned_once(ranks: Ranks) -> None:
    ranks.run(_numbers)
