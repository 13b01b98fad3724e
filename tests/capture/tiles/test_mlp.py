"""`mlp_tiles=`: which forms of an MLP are taken in tiles, that they compute the same, and what is refused and how."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture
from autopar.capture.tiles.tiled_losses import AUTO
from autopar.errors import CaptureError
from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from tests.support.eager import assert_as_eager, calls
from tests.support.families import FAMILIES

Between = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """Two linear layers before one, and what a function makes of them."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 8)
        self.packed, self.between = nn.Linear(8, 24), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self, x)).square().mean()


def gated(m: Layers, x: Tensor) -> Tensor:
    return F.silu(m.gate(x)) * m.up(x)


def gated_last(m: Layers, x: Tensor) -> Tensor:
    return m.up(x) * F.relu(m.gate(x))


def swish_by_hand(m: Layers, x: Tensor) -> Tensor:
    gate = m.gate(x)
    return gate * torch.sigmoid(gate) * m.up(x)


def plain(m: Layers, x: Tensor) -> Tensor:
    return F.gelu(m.up(x))


def gelu_by_hand(m: Layers, x: Tensor) -> Tensor:
    h = m.gate(x)
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))


def packed(m: Layers, x: Tensor) -> Tensor:
    gate, up = m.packed(x).chunk(2, -1)
    return F.silu(gate) * up


def transposed(m: Layers, x: Tensor) -> Tensor:
    return F.relu(x @ m.down.weight + m.gate.bias)


FORMS: dict[Between, str] = {
    gated: "silu",
    gated_last: "relu",
    swish_by_hand: "silu",
    plain: "gelu",
    gelu_by_hand: "gelu_tanh",
    packed: "silu",
    transposed: "relu",
}


@pytest.mark.parametrize("between", FORMS, ids=lambda between: between.__name__)
def test_an_mlp_in_this_form_is_taken_in_tiles(between: Between) -> None:
    torch.manual_seed(0)
    model, x = Layers(between).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    program = assert_as_eager(model, (x,), loss=lambda loss: loss, tolerance=1e-7, mlp_tiles=4)
    (node,) = calls(program, MLP_IN_TILES)
    assert node.args[-2:] == (FORMS[between], 4)
    assert node.meta["tensor"].shape == (3, 5, 8)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "number", "activation"),
    [("gpt2", 2, "gelu_tanh"), ("llama", 2, "silu"), ("bert", 2, "gelu"), ("t5", 4, "relu"), ("mlp", 1, "gelu")],
)
def test_all_of_a_family_are_found(family: str, number: int, activation: str) -> None:
    args, kwargs = FAMILIES[family].inputs(0)
    found = calls(capture(FAMILIES[family].build(), args, kwargs, mlp_tiles=2), MLP_IN_TILES)
    assert [node.args[-2] for node in found] == [activation] * number


def test_autocast_is_seen_through() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (node,) = calls(capture(Layers(gated), (torch.randn(3, 5, 8),), {}, mlp_tiles=2), MLP_IN_TILES)
    assert {x.meta["tensor"].dtype for x in node.all_input_nodes} == {torch.bfloat16}


def test_what_is_dropped_out_in_training_alone_is_taken_in_tiles_in_evaluation() -> None:
    model = Layers(dropped)
    assert len(calls(capture(model.eval(), (torch.randn(3, 5, 8),), {}, mlp_tiles=2), MLP_IN_TILES)) == 1


def dropped(m: Layers, x: Tensor) -> Tensor:
    return F.dropout(gated(m, x), 0.5, m.training)


def bounded(m: Layers, x: Tensor) -> Tensor:
    return torch.tanh(m.up(x))


def of_other_inputs(m: Layers, x: Tensor) -> Tensor:
    return F.silu(m.gate(x)) * m.up(x.sin())


def wider(m: Layers, x: Tensor) -> Tensor:
    return (F.silu(m.gate(x).double()) * m.up(x)).float()


def read_twice(m: Layers, x: Tensor) -> Tensor:
    up = m.up(x)
    return F.silu(m.gate(x)) * up + up.mean()


def with_another_scale(m: Layers, x: Tensor) -> Tensor:
    return F.silu(m.gate(x)) * m.up(x) * 1.01


REFUSED = (dropped, bounded, of_other_inputs, wider, read_twice, with_another_scale)


@pytest.mark.parametrize("between", REFUSED, ids=lambda between: between.__name__)
def test_a_model_without_one_is_refused_a_number_of_tiles(between: Between) -> None:
    x = torch.randn(3, 5, 8)
    with pytest.raises(CaptureError, match=r"mlp_tiles=2\) computes MLPs tile by tile, and the forward has none"):
        capture(Layers(between), (x,), {}, mlp_tiles=2)
    assert not capture(Layers(between), (x,), {}, mlp_tiles=AUTO).mlp_tileable


class Returning(Layers):
    """Layers that also return their hidden activations."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = self.between(self, x)
        return self.down(h).square().mean(), h


def test_hidden_activations_that_are_returned_are_not_taken_away() -> None:
    with pytest.raises(CaptureError, match=r"nothing else that reads what lies there\. Write it so, or leave"):
        capture(Returning(gated), (torch.randn(3, 5, 8),), {}, mlp_tiles=2)


def test_where_memory_is_to_ask_the_model_stays_as_it_is_and_says_that_it_could() -> None:
    program = capture(Layers(gated), (torch.randn(3, 5, 8),), {}, mlp_tiles=AUTO)
    assert program.mlp_tileable and not calls(program, MLP_IN_TILES)
