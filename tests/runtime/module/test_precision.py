"""Training in several dtypes: parameters stored in one, used in another, their gradients summed in a third.

What is stored in float64 and computed in float32 is compared tightly with one process that casts by hand; what is
computed in bfloat16 and float16 is held against what one process rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar import Precision
from tests.support import pipeline_training
from tests.support.parity import SLOW_DEVICES, Case, Training, build, compare, parallel, train
from tests.support.pipeline_training import PipelineCase, accumulated, held_by
from tests.support.ranks import Ranks

DOUBLE = Precision(parameters=torch.float64, compute=torch.float32, reduce=torch.float64)
MIXED = Precision(parameters=torch.float32, compute=torch.bfloat16, reduce=torch.float32)


class CastByHand:
    """A model as one process runs it in a precision: every parameter and input is cast before the forward."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.model, self.precision = model, precision
        self.named_parameters, self.named_buffers = model.named_parameters, model.named_buffers
        self.parameters = model.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def cast(x: Tensor) -> Tensor:
            return x.to(self.precision.compute) if x.is_floating_point() else x

        weights = {name: cast(each) for name, each in self.model.named_parameters()}
        args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
        return torch.func.functional_call(self.model, weights, args, kwargs, tie_weights=True)


def alone(case: Case) -> Training:
    torch.manual_seed(0)
    return train(case, CastByHand(build(case), case.options["precision"]))  # type: ignore[arg-type]


def case_of(family: str, shape: tuple[int, ...], annotations: Any = (), **options: Any) -> Case:
    options = {"hardware": SLOW_DEVICES, "precision": DOUBLE, **options}
    dtype = (options["precision"].parameters) or torch.float32
    return Case(family, shape, annotations, options, dtype, steps=3)


@pytest.mark.parametrize(
    "case",
    [
        case_of("llama", (2,), strategy="zero3"),
        case_of("llama", (2,), strategy="zero2"),
        case_of("llama", (2,), strategy="data_parallel"),
        case_of("llama", (2,), strategy="megatron"),
        case_of("llama", (2, 2), strategy="hsdp"),
        case_of("llama", (2, 2), strategy="fsdp_megatron"),
        case_of("llama", (2, 2)),
        case_of("gpt2", (2,), strategy="zero3", recompute="full"),
    ],
    ids=str,
)
def test_parameters_stored_in_one_dtype_and_used_in_another_train_as_on_one_process(ranks: Ranks, case: Case) -> None:
    expected = alone(case)
    for found in ranks.run(parallel, case, world_size=torch.Size(case.mesh).numel(), timeout=180):
        compare(found, expected, 1e-4, 1e-5, 0.05)


def by_hand(case: PipelineCase) -> Training:
    model = CastByHand(pipeline_training.build(case), case.options["precision"])
    return pipeline_training.train(case, model, lambda step: accumulated(case, model, step))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        PipelineCase("llama", "dp2", options={"strategy": "zero3"}),
        PipelineCase("llama", "dp2xtp2", options={"strategy": "fsdp_megatron"}),
        PipelineCase("llama", "dp2", options={"strategy": "data_parallel"}),
        PipelineCase("gpt2", "pp2", "1f1b"),
        PipelineCase("llama", "pp2xdp2", "interleaved_zero_bubble", options={"strategy": "zero3"}),
    ],
    ids=lambda case: f"{case}-{case.options.get('strategy')}",
)
def test_gradients_of_micro_batches_add_up_in_a_precision(ranks: Ranks, case: PipelineCase) -> None:
    case = replace(case, dtype=torch.float64, steps=3, options={"precision": DOUBLE, **case.options})
    expected = by_hand(case)
    for found in ranks.run(pipeline_training.parallel, case, world_size=case.world_size, timeout=180):
        compare(found, held_by(found, expected), 1e-4, 1e-5, 0.05)
