"""`loss_tiles=`: which forms of a loss are taken in tiles, that they compute the same, and what is refused and how."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import capture, trace
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.capture.tiles.tiled_losses import LossTiles
from autopar.errors import CaptureError
from autopar.ir.program.operators.linear_cross_entropy import CHOSEN, LINEAR_CROSS_ENTROPY
from autopar.ir.program.program import Program
from tests.support.eager import assert_as_eager, calls
from tests.support.families import FAMILIES
from tests.support.loss_alone import LOSS_ALONE, Reader, flattened, reading

aten = torch.ops.aten
Loss = Callable[[Tensor, Tensor], Any]


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of tokens by those before them, as GPT-2 has it."""
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def cut_twice(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[1:, 2:][:, :-1].flatten(0, 1), labels[1:, 2:-1].flatten(), reduction="sum")


def classes_second(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def classes_moved(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].movedim(-1, 1), labels[:, 1:])


def wider(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.double().reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=3)


class Product(nn.Module):
    """A head that is a matrix, over tokens in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x_ND = self.embed(ids).tanh().view(-1, 8)
        return F.cross_entropy(x_ND @ self.embed.weight.t(), labels.view(-1))


def captured(model: nn.Module, loss_tiles: LossTiles = 3, batch: dict[str, Tensor] | None = None) -> Program:
    return capture(model, (), batch or reading(), loss_tiles=loss_tiles)


def test_a_traced_model_stays_as_it_is_where_programs_in_tiles_are_made_of_it() -> None:
    traced = trace(Reader(), (), reading())
    made = [traced.program(Tiles(number)).fingerprint for number in (None, 3, 2, None, 3)]
    assert made == [captured(Reader(), number).fingerprint for number in (None, 3, 2, None, 3)]
    assert len(set(made)) == 3


def assert_same(model: nn.Module, batch: dict[str, Tensor]) -> Program:
    """The program in tiles gives the loss and gradients of the model, and takes samples and positions apart."""
    program = assert_as_eager(model, kwargs=batch, loss=lambda loss: loss, loss_tiles=3)
    (node,) = calls(program, LINEAR_CROSS_ENTROPY)
    assert not calls(program, aten.cross_entropy_loss.default)
    assert [x.meta["tensor"].shape[:2] for x in (node.args[0], node.args[3])] == [(4, 8)] * 2  # type: ignore[union-attr]
    return program


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "loss", [flattened, shifted, cut_twice, classes_second, classes_moved, wider], ids=lambda loss: loss.__name__
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_this_form_is_taken_in_tiles(loss: Loss, tied: bool) -> None:
    batch = reading()
    if loss is wider:
        batch["labels"].clamp_(min=0)
    assert_same(Reader(tied=tied, bias=not tied, loss=loss), batch)


def test_a_product_with_a_transposed_matrix_is_a_head_too() -> None:
    assert_same(Product(), reading())


@pytest.mark.parametrize("family", LOSS_ALONE)
def test_a_model_of_transformers_that_returns_its_loss_alone_is_taken_in_tiles(family: str) -> None:
    program = captured(LOSS_ALONE[family].build(), batch=LOSS_ALONE[family].inputs(0)[1])
    assert len(calls(program, LINEAR_CROSS_ENTROPY)) == 1


def test_autocast_is_seen_through() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (node,) = calls(captured(Reader()), LINEAR_CROSS_ENTROPY)
    assert [x.meta["tensor"].dtype for x in node.args[:2]] == [torch.bfloat16] * 2  # type: ignore[union-attr]
    assert node.meta["tensor"].dtype == torch.float32


def returning_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return flattened(logits, labels), logits


def counting_hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return flattened(logits, labels), (logits.argmax(-1) == labels).sum()


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return flattened(30 * (logits / 30).tanh(), labels)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def by_row(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").mean()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), torch.ones(24))


def of_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), logits.detach().flatten(0, 1).softmax(-1))


def positions_as_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.clamp(0, 7)[:, :1].expand(-1, 24))


def of_one_row(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[0, 5], labels[0, 5])


def without_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean()


REFUSED: dict[Loss, str] = {
    returning_logits: "its logits are returned, too; the loss alone is to be returned",
    counting_hits: r"its logits are read by others, too \(.*aten.argmax.default in the forward.*\); the loss alone",
    capped: "aten.mul.Tensor in the forward makes its logits; needed is a linear layer, with nothing but views",
    smoothed: r"it smooths labels \(label_smoothing=0.1\); give 0, or leave loss_tiles out",
    by_row: r'it has a number for each row \(reduction="none"\); take "mean" or "sum"',
    weighted: r"it has weights of classes \(weight=…\); leave them out",
    of_probabilities: "its targets are probabilities; give numbers of classes",
    positions_as_classes: r"its logits have the shape \[4, 8, 24\] and are made by aten.linear.default; give it the",
    of_one_row: "it has logits of one row alone; give it several rows",
    without_loss: r"loss_tiles=3\) computes the cross-entropy of a linear layer .* and the forward computes none",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_what_cannot_be_taken_in_tiles_is_refused(loss: Loss) -> None:
    with pytest.raises(CaptureError, match=REFUSED[loss]):
        captured(Reader(loss=loss))
    with pytest.warns(UserWarning, match=f"{REFUSED[loss].replace('=3', '=.always.')}.* It stays in one piece"):
        program = captured(Reader(loss=loss), "auto")
    assert not calls(program, LINEAR_CROSS_ENTROPY)


class OfItsInput(nn.Module):
    """A loss of logits that are given, scaled so that something is to be learned."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.scaled = scaled

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits * self.scale if self.scaled else logits, labels) * self.scale


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_of_what_is_given_stays_in_one_piece(scaled: bool) -> None:
    given = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    assert not capture(OfItsInput(scaled), given, {}).tileable
    with pytest.raises(CaptureError, match=r"makes its logits; needed is a linear layer"):
        capture(OfItsInput(scaled), given, {}, loss_tiles=2)


def test_a_model_that_returns_its_logits_says_what_to_do() -> None:
    with pytest.raises(CaptureError, match=r"a module whose forward returns model\(input_ids, labels=labels\).loss"):
        captured(FAMILIES["llama"].build(), batch=FAMILIES["llama"].inputs(0)[1])


@pytest.mark.parametrize("loss", [returning_logits, without_loss], ids=lambda loss: loss.__name__)
def test_in_evaluation_logits_may_be_returned(loss: Loss) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not calls(captured(Reader(loss=loss).eval()), LINEAR_CROSS_ENTROPY)


def test_programs_differ_by_their_tiles_and_are_as_before_without() -> None:
    programs = [captured(Reader(), tiles) for tiles in (2, 3, "auto", None)]
    assert len({program.fingerprint for program in programs}) == 4
    assert [calls(each, LINEAR_CROSS_ENTROPY)[0].args[-1] for each in programs[:3]] == [2, 3, CHOSEN]
    assert not calls(programs[3], LINEAR_CROSS_ENTROPY)
