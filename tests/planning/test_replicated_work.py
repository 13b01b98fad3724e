"""A preset that leaves the main computation whole says so, with its share; one that splits it says nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.models.catalogue import built_in
from autopar.planning import replicated_work
from autopar.sharding.mesh import Mesh


@torch.library.custom_op("replicated_work::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


project.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[-1]))
project.register_autograd(
    lambda context, grad: (grad @ context.saved_tensors[1].mT, context.saved_tensors[0].mT @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Unruled(nn.Module):
    """Three quarters of the products are in an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(16, 16, bias=False), nn.Parameter(torch.ones(16, 48))

    def forward(self, x: Tensor) -> Tensor:
        return project(self.up(x), self.weight).square().mean()


def _said(
    model: nn.Module, inputs: tuple[Tensor, ...], strategy: str, axes: dict[str, int], **options: Any
) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        autopar.plan(model, Mesh(axes), inputs, strategy=strategy, **options)
    return [str(each.message) for each in found if "replicated" in str(each.message)]


def test_a_product_without_a_rule_is_named_with_its_share() -> None:
    (text,) = _said(Unruled(), (torch.ones(4, 16),), "data_parallel", {"dp": 2})
    assert "strategy='data_parallel' leaves 75% of the FLOPs replicated over dp: project" in text
    assert "which has no rule. Each of its devices computes them whole" in text


def test_convolutions_that_megatron_leaves_whole_are_named() -> None:
    model, inputs = built_in("tiny-cnn", 8, 8)
    (text,) = _said(model, inputs, "megatron", {"dp": 2, "tp": 2})
    assert "of the FLOPs replicated over tp: conv2d in blocks.0.conv" in text


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
@pytest.mark.parametrize("strategy", ["data_parallel", "zero3", "megatron", "fully_replicated"])
def test_nothing_is_said_where_the_main_computation_is_split_or_meant_to_be_whole(name: str, strategy: str) -> None:
    model, inputs = built_in(name, 8, 16)
    assert not _said(model, inputs, strategy, {"dp": 2, "tp": 2})


@pytest.mark.slow
def test_the_stages_of_a_pipeline_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built_in("tiny-llama", 8, 16)
    assert not _said(model, inputs, "data_parallel", {"pp": 2, "dp": 2}, schedule="gpipe", microbatches=2)
    monkeypatch.setattr(replicated_work, "MEANT", ())
    (text,) = _said(model, inputs, "fully_replicated", {"pp": 2, "dp": 2}, schedule="gpipe", microbatches=2)
    assert "leaves 100% of the FLOPs replicated over dp" in text
