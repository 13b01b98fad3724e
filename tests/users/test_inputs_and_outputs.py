"""Inputs and outputs of a model: dataclasses, and caches of transformers that training does not use."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import CaptureError
from autopar.ir.sharding.mesh import Mesh
from tests.support.eager import assert_as_eager
from tests.support.parity import mesh
from tests.support.ranks import Ranks

X_BH = torch.arange(12.0).reshape(4, 3).sin()


@dataclass
class Known:
    loss: Tensor
    logits: Tensor


@dataclass
class Unknown:
    loss: Tensor
    logits: Tensor


torch.export.register_dataclass(Known)


class Returning(nn.Linear):
    def __init__(self, kind: Any) -> None:
        super().__init__(3, 3)
        self.kind = kind

    def forward(self, input: Tensor) -> Any:
        logits = super().forward(input)
        return self.kind(logits.square().mean(), logits)


class Taking(nn.Linear):
    def forward(self, batch: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(batch.logits).square().mean() * batch.loss


def _trained() -> list[float]:
    torch.manual_seed(0)
    model = autopar.compile(Returning(Known), mesh((2,), ("dp",)), (X_BH,), run=autopar.Run(seed=0))
    output = model(X_BH)
    output.loss.backward()
    return [output.loss.item(), *(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)]


def test_a_dataclass_is_refused_by_the_call_that_makes_it_known() -> None:
    for model, args, word in (
        (Returning(Unknown), (X_BH,), "returns"),
        (Taking(3, 3), (Unknown(torch.ones(()), X_BH),), "is given"),
    ):
        with pytest.raises(
            CaptureError, match=rf"{word} a .*Unknown, .*Call torch\.export\.register_dataclass\(Unknown\)"
        ):
            autopar.plan(model, Mesh({"dp": 2}), args)


def test_a_dataclass_that_is_known_goes_in_and_comes_out(ranks: Ranks) -> None:
    assert_as_eager(Taking(3, 3), (Known(torch.ones(()), X_BH),))
    torch.manual_seed(0)
    model = Returning(Known)
    output = model(X_BH)
    output.loss.backward()
    expected = [output.loss.item(), *(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)]
    for found in ranks.run(_trained, world_size=2):
        assert found == pytest.approx(expected, rel=1e-4)


def test_packed_positions_that_a_cache_would_hide_are_stated_at_the_line_of_the_user() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    ids = torch.arange(16).reshape(2, 8)
    batch = {"input_ids": ids, "position_ids": torch.arange(4).repeat(2, 2), "labels": ids}
    with pytest.warns(
        UserWarning, match=r"use_cache=False, .* packed texts.*Set model\.config\.use_cache"
    ) as specified:
        autopar.plan(model, Mesh({"dp": 2}), batch)
    assert any(each.filename == __file__ for each in specified if "use_cache" in str(each.message))
    model.config.use_cache = False
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*use_cache")
        autopar.plan(model, Mesh({"dp": 2}), batch)
    assert_as_eager(model, kwargs=batch, loss=lambda output: output.loss, tolerance=1e-5)
