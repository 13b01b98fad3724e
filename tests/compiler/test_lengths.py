"""Padding that would change what a model returns is refused before it is used, with the call that mixes it in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.export import skeleton
from autopar.compiler.arguments import plan_request
from autopar.compiler.lengths import SmallSizes
from autopar.errors import InputError
from autopar.runtime.lengths.length_buckets import Buckets
from autopar.runtime.lengths.outputs import Counted
from tests.support.language_models import language_model, texts

LENGTHS, BATCHES = Buckets(), Buckets(lengths=None, batches="largest", padding={"input_ids": 0, "labels": -100, "x": 0})


def _counted(model: nn.Module, inputs: dict[str, Any], buckets: Buckets) -> tuple[Counted, ...]:
    small = SmallSizes(skeleton(model), True, buckets, plan_request(model))
    return small.counted(((), inputs), dict(model.named_buffers()))


def _masked() -> dict[str, Tensor]:
    given = texts(4, 6)
    return given | {"attention_mask": torch.ones_like(given["input_ids"])}


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}], ids=["plain", "dropout"])
def test_positions_behind_a_text_change_nothing_where_attention_is_causal(options: dict[str, Any]) -> None:
    found = _counted(language_model(**options), texts(4, 6), LENGTHS)
    assert found == (Counted(), Counted(positions=((1, 0),)))


def test_positions_that_a_mask_hides_change_nothing() -> None:
    assert _counted(language_model(causal=False), _masked(), LENGTHS)[1].positions == ((1, 0),)


def test_samples_whose_labels_are_ignored_change_nothing() -> None:
    assert _counted(language_model(), texts(4, 6), BATCHES) == (Counted(), Counted(samples=((0, 0),)))


def test_attention_to_all_positions_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"output 0 .*scaled_dot_product_attention.default of the model mixes padded"):
        _counted(language_model(causal=False), texts(4, 6), LENGTHS)


def _mean_over_all(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none").mean()


def _mean_over_counted(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    losses = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none")
    return losses.sum() / (labels_BS != -100).sum()


@pytest.mark.parametrize("buckets", [LENGTHS, BATCHES], ids=["length", "batch"])
def test_a_loss_that_is_a_mean_over_all_rows_is_refused(buckets: Buckets) -> None:
    with pytest.raises(InputError, match=r"output 0 of the model differs if the .* is padded"):
        _counted(language_model(loss=_mean_over_all), texts(4, 6), buckets)


@pytest.mark.parametrize("buckets", [LENGTHS, BATCHES], ids=["length", "batch"])
def test_a_loss_that_is_a_mean_over_labels_that_count_is_taken(buckets: Buckets) -> None:
    _counted(language_model(loss=_mean_over_counted), texts(4, 6), buckets)


def test_whoever_knows_better_may_say_so() -> None:
    unchecked = Buckets(check=False)
    assert _counted(language_model(causal=False), texts(4, 6), unchecked)[1].positions == ((1, 0),)


class _OfSamples(nn.Module):
    """A loss over samples, whose features go through some function first."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.norm = function, nn.BatchNorm1d(4)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.function(self, x, labels)


def _classes(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels)


SAMPLES = {"x": torch.ones(6, 4), "labels": torch.zeros(6, dtype=torch.long)}
REFUSED: dict[str, tuple[Any, str]] = {
    "statistics": (
        lambda module, x, labels: _classes(module.norm(x), labels),
        "aten.batch_norm.default of norm mixes padded places with others",
    ),
    "not a number": (
        lambda module, x, labels: _classes(x / x.sum(1, keepdim=True), labels),
        "aten.div.Tensor of the model has values that are no numbers at padded places",
    ),
    "derivative": (
        lambda module, x, labels: _classes((x * module.norm.weight).square().sum(1, keepdim=True).sqrt() * x, labels),
        "aten.sqrt.default of the model has derivatives that are no finite numbers at padded places",
    ),
    "draws": (
        lambda module, x, labels: _classes(F.rrelu(x, training=True), labels),
        "draws random numbers, so whether padding changes outputs is not known",
    ),
    "number": (
        lambda module, x, labels: (_classes(x, labels), len(x)),
        "output 1 of the model differs if the batch is padded",
    ),
    "undefined": (
        lambda module, x, labels: _classes((x - 100).log(), labels),
        "output 0 is no number with made-up inputs and weights",
    ),
    "program": (
        lambda module, x, labels: _classes(x.tanh() if len(x) > 2 else x, labels),
        "the model computes other things for other sizes",
    ),
    "refused": (
        lambda module, x, labels: _classes(x if x.sum() > 0 else -x, labels),
        "for which the model cannot be captured; give lengths that it takes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_padded_samples_would_change_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(InputError) as caught:
        _counted(_OfSamples(function), SAMPLES, BATCHES)
    assert message in str(caught.value)


def test_noise_is_left_out() -> None:
    def noisy(module: _OfSamples, x: Tensor, labels: Tensor) -> Tensor:
        return _classes(F.dropout(x, 0.3) + torch.randn_like(x), labels)

    assert _counted(_OfSamples(noisy), SAMPLES, BATCHES) == (Counted(),)


def test_a_norm_in_evaluation_mixes_nothing() -> None:
    model = _OfSamples(lambda module, x, labels: _classes(module.norm(x), labels))
    model.norm.eval()
    assert _counted(model, SAMPLES, BATCHES) == (Counted(),)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda module, x, labels: x.repeat(3, 1),
            "dim 0 of output 0 has 6 elements for 2",
        ),
        (lambda module, x, labels: len(x), "output 0 is the number 2 or 4, as there are more samples with padding"),
    ],
)
def test_outputs_that_cannot_be_cut_are_refused(function: Any, message: str) -> None:
    unchecked = Buckets(lengths=None, batches="largest", padding=BATCHES.padding, check=False)
    with pytest.raises(InputError, match=message):
        _counted(_OfSamples(function), SAMPLES, unchecked)
