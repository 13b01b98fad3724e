"""Losses whose rows keep samples and positions: which forms are found, that they compute the same, and train split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.export import capture
from autopar.ir.program.operators.row_cross_entropy import CROSS_ENTROPY
from autopar.ir.program.program import Program
from tests.support.eager import assert_as_eager, calls
from tests.support.families import FAMILIES
from tests.support.loss_alone import Reader, flattened, reading
from tests.support.simulation.training import Steps, train_alike

aten = torch.ops.aten
Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = 24


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of tokens by those before them, as GPT-2 had it."""
    logits, labels = logits.float()[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def cast_once_cut(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits[:, 1:].contiguous().double().view(-1, CLASSES)
    return F.cross_entropy(rows, labels[:, :-1].reshape(-1), reduction="sum", ignore_index=3)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    """Scaled and capped rows, as those of Cohere and Gemma 2, with all that a loss may be told."""
    rows = 30 * torch.tanh(logits.view(-1, CLASSES) / 2 / 30)
    weight = torch.linspace(0.5, 2, CLASSES, dtype=logits.dtype)
    return F.cross_entropy(rows, labels.view(-1), weight, label_smoothing=0.1)


def by_row(logits: Tensor, labels: Tensor) -> Tensor:
    of_rows = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    counted = labels.flatten() >= 0
    return (of_rows * counted).sum() / counted.sum()


def in_two(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.view(-1, CLASSES), -1), labels.view(-1))


class Rows(Reader):
    """A model that flattens tokens before its head."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h_TD = self.embed(ids).tanh().view(-1, 8)
        return F.cross_entropy((F.layer_norm(h_TD, (8,)) + h_TD) @ self.head.weight.t(), labels.view(-1))


FORMS: dict[str, Callable[[], nn.Module]] = {
    **{
        loss.__name__: lambda loss=loss: Reader(loss=loss)
        for loss in (flattened, shifted, cast_once_cut, capped, by_row, in_two)
    },
    "rows before the head": Rows,
}


def batch(form: str, seed: int = 0) -> dict[str, Tensor]:
    found = reading(seed)
    if form == "cast_once_cut":
        found["labels"].clamp_(min=0)
    return found


def captured(model: nn.Module, given: dict[str, Tensor] | None = None) -> Program:
    return capture(model, (), given or reading())


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_over_flattened_rows_takes_them_by_samples_and_positions(form: str) -> None:
    torch.manual_seed(0)
    program = assert_as_eager(FORMS[form](), kwargs=batch(form), loss=lambda loss: loss, tolerance=1e-7)
    (node,) = calls(program, CROSS_ENTROPY)
    assert [x.meta["tensor"].shape for x in node.args[:2]] == [(4, 8, CLASSES), (4, 8)]  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_models_of_transformers_keep_positions_too(family: str) -> None:
    args, kwargs = FAMILIES[family].inputs(0)
    (node,) = calls(capture(FAMILIES[family].build(), args, kwargs), CROSS_ENTROPY)
    assert [len(x.meta["tensor"].shape) for x in node.args[:2]] == [3, 2]  # type: ignore[union-attr]


def half(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 4:].flatten(0, 1), labels[:, 4:].flatten())


def cut_by_row(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").square().sum()


@pytest.mark.parametrize(("loss", "positions"), [(half, 4), (cut_by_row, 7)])
def test_positions_stay_cut_off_where_they_are_many_or_the_loss_of_each_is_read(loss: Loss, positions: int) -> None:
    (node,) = calls(captured(Reader(loss=loss)), CROSS_ENTROPY)
    assert node.args[0].meta["tensor"].shape == (4, positions, CLASSES)  # type: ignore[union-attr]


def of_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), logits.detach().flatten(0, 1).softmax(-1))


def normed_over_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).softmax(0), labels.flatten())


@pytest.mark.parametrize("loss", [of_probabilities, normed_over_rows], ids=lambda loss: loss.__name__)
def test_what_does_not_treat_rows_alone_stays_as_it_is(loss: Loss) -> None:
    program = captured(Reader(loss=loss))
    assert not calls(program, CROSS_ENTROPY)
    assert len(calls(program, aten.cross_entropy_loss.default)) == 1


def read_twice(logits: Tensor, labels: Tensor) -> Tensor:
    logs = F.log_softmax(logits.view(-1, CLASSES), -1)
    return F.nll_loss(logs, labels.view(-1)) + logs.square().mean()


def along_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.view(-1, CLASSES), 0), labels.view(-1))


@pytest.mark.parametrize("loss", [read_twice, along_rows], ids=lambda loss: loss.__name__)
def test_a_loss_of_other_logarithms_stays_one(loss: Loss) -> None:
    program = captured(Reader(loss=loss))
    assert len(calls(program, aten.nll_loss_nd.default)) == 1
    assert not calls(program, CROSS_ENTROPY, aten.cross_entropy_loss.default)


SPLITS: dict[str, dict[str, Any]] = {
    "positions": {"dp": "sequence", "tp": "sequence"},
    "samples and positions": {"dp": "data", "tp": "sequence"},
    "positions and classes": {"dp": "sequence", "tp": "column"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "specified", [name if name != "positions" else pytest.param(name, marks=pytest.mark.slow) for name in SPLITS]
)
@pytest.mark.parametrize("form", FORMS)
def test_any_split_trains_as_one_process(form: str, specified: str) -> None:
    torch.manual_seed(0)
    model = FORMS[form]().double()
    steps = Steps([batch(form, seed) for seed in range(2)], "adamw", evaluated=True)
    autopar.annotate(model, "cross_entropy_loss", **SPLITS[specified])
    train_alike(model, steps, {"dp": 2, "tp": 2}, {})
