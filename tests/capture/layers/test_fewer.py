"""A model without some of its layers: those that remain keep their names, and what is no list stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.layers.fewer import without_layers


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return self.tail(x_BD)


def test_the_layers_that_remain_run_in_their_order_under_their_names() -> None:
    model = Listed()
    kept = [model.layers[0], model.layers[4]]
    assert without_layers(model, ["layers.1", "layers.2", "layers.3"])
    assert [name for name, _ in model.named_parameters() if name.startswith("layers") and "bias" in name] == [
        "layers.0.bias",
        "layers.4.bias",
    ]
    x_BD = torch.randn(2, 4)
    assert torch.equal(model(x_BD), model.tail(kept[1](kept[0](x_BD))))


@pytest.mark.parametrize("names", [["layers.1", "missing.2"], ["layers.1", "layers.7"], ["layers.1", "tail"]])
def test_a_name_of_no_entry_leaves_the_model_as_it_was(names: list[str]) -> None:
    model = Listed()
    assert not without_layers(model, names)
    assert len(model.layers) == 5
