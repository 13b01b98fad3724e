"""`train_step` without a pipeline: gradient accumulation over micro-batches, and how a batch is split into them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import autopar
from autopar.capture.export import capture
from autopar.errors import InputError
from autopar.runtime.collectives.mesh_axes import record_traffic
from autopar.runtime.module.batches import loss_position, split_batch
from tests.support.families import HIDDEN, MLP
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, assert_same_gradients, whole
from tests.support.pipeline_training import (
    PipelineCase,
    WithLoss,
    accumulated,
    batch_of,
    build,
    check,
    check_rounding,
    compiled,
    microbatches_of,
)
from tests.support.ranks import Ranks, mesh
from tests.support.slow_cases import slow_where

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def test_tensors_of_the_batchs_size_are_split_and_all_else_is_given_to_every_micro_batch() -> None:
    x, table, scale = torch.arange(8).reshape(4, 2), torch.ones(3, 4), torch.tensor(2.0)
    batch: Arguments = ((x, scale), {"more": {"y": x + 8, "table": table}, "flag": True, "none": None})
    parts = split_batch(batch, 2)
    for number, ((a, b), kwargs) in enumerate(parts):
        rows = slice(2 * number, 2 * number + 2)
        assert torch.equal(a, x[rows]) and torch.equal(kwargs["more"]["y"], x[rows] + 8)
        assert b is scale and kwargs["more"]["table"] is table and kwargs["flag"] is True and kwargs["none"] is None


def test_one_micro_batch_is_the_batch_as_it_is() -> None:
    batch: Arguments = ((torch.tensor(1.0),), {})
    assert split_batch(batch, 1) == [batch]


def _split_dtensors() -> None:
    line = mesh((2,), ("dp",))
    x = torch.arange(8.0).reshape(8, 1)
    for placement, expected in ((Replicate(), x.chunk(2)), (Shard(0), (x[[0, 1, 4, 5]], x[[2, 3, 6, 7]]))):
        batch: Arguments = ((distribute_tensor(x, line, [placement]),), {})
        for ((part,), _), rows in zip(split_batch(batch, 2), expected, strict=True):
            assert isinstance(part, DTensor) and part.placements == (placement,)
            assert torch.equal(part.full_tensor(), rows)
    message = "a batch of 8 samples, of which this rank holds 4 does not divide into 8"
    with pytest.raises(InputError, match=message):
        split_batch(((distribute_tensor(x, line, [Shard(0)]),), {}), 8)


def test_of_a_dtensor_every_rank_takes_parts_of_its_part(ranks: Ranks) -> None:
    ranks.run(_split_dtensors)


@pytest.mark.parametrize(
    ("batch", "count", "message"),
    [
        (
            ((torch.ones(6, 2),), {}),
            4,
            "a batch of 6 samples does not divide into 4 micro-batches of equal size; give a batch that does, or "
            "compile with another number of microbatches.",
        ),
        (
            ((torch.tensor(1.0), 3), {}),
            2,
            "no input is a tensor with dims, so there is no batch to split into micro-batches or parts.",
        ),
    ],
)
def test_a_batch_that_does_not_split_is_refused(batch: Arguments, count: int, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        split_batch(batch, count)


class Returning(nn.Module):
    """Returns what a function makes of the output of a linear layer."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self._make = make

    def forward(self, x_BD: Tensor) -> Any:
        return self._make(self.layer(x_BD))


@pytest.mark.parametrize(
    ("make", "position"),
    [
        (lambda y: y.sum(), 0),
        (lambda y: (y.sum(), y), 0),
        (lambda y: {"logits": y, "loss": y.sum()}, 1),
        (lambda y: [{"z": y.mean()}, y], 0),
    ],
)
def test_the_loss_is_what_is_called_so_or_the_first_output(make: Callable[[Tensor], Any], position: int) -> None:
    program = capture(Returning(make), (torch.ones(2, HIDDEN),), {}, training=True)
    assert loss_position(program) == position


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda y: y, "float32[2, 32]"),
        (lambda y: (y, y.sum()), "float32[2, 32]"),
        (lambda y: {"loss": y, "sum": y.sum()}, "float32[2, 32]"),
        (lambda y: y.detach().sum(), "float32[]"),
        (lambda y: (y.argmax(), y), "int64[]"),
        (lambda y: (1.5, y.sum()), "1.5"),
    ],
)
def test_a_model_without_a_loss_is_not_trained(make: Callable[[Tensor], Any], found: str) -> None:
    program = capture(Returning(make), (torch.ones(2, HIDDEN),), {}, training=True)
    message = (
        f"train_step needs a model that returns its loss, a number with a gradient; found {found}. "
        'Compute the loss in forward and return it: alone, first, or called "loss".'
    )
    with pytest.raises(InputError, match=re.escape(message)):
        loss_position(program)


REGATHERED = (("*", {"storage": "dp", "regather": True}),)
CASES = {
    "auto": PipelineCase("gpt2", "dp2", steps=2),
    "buffers": PipelineCase("resnet", "dp2", steps=2),
    "frozen": PipelineCase("lora", "dp2", steps=2),
    "two axes": PipelineCase("mlp", "dp2xtp2", steps=2),
    "whole": PipelineCase("mlp", "dp2", options={"strategy": "data_parallel"}, steps=2),
    "zero3": PipelineCase("mlp", "dp2", options={"strategy": "zero3"}, steps=2),
    "zero2": PipelineCase("gpt2", "dp2", options={"strategy": "zero2"}, steps=2),
    "regathered": PipelineCase("mlp", "dp2", annotations=REGATHERED, steps=2),
    "recomputed": PipelineCase("gpt2", "dp2", options={"recompute": "full"}, steps=2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_where(CASES, "auto", "buffers", "frozen"))
def test_a_step_of_micro_batches_trains_as_accumulation_on_one_process(ranks: Ranks, name: str) -> None:
    check(ranks, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["one", "dp2", "dp4", "dp2xtp2"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "unet", "mlp", "resnet", "lora"])
def test_every_family_accumulates_on_ranks_as_on_one_process(ranks: Ranks, family: str, mesh: str) -> None:
    check(ranks, PipelineCase(family, mesh))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:zero1", "ignore:megatron")
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero2", "zero3", "fsdp_megatron"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_presets_accumulate_on_ranks_as_on_one_process(ranks: Ranks, family: str, strategy: str) -> None:
    check(ranks, PipelineCase(family, "dp2xtp2", options={"strategy": strategy}))


@pytest.mark.slow
def test_bfloat16_rounds_no_worse_over_micro_batches_than_on_one_process(ranks: Ranks) -> None:
    check_rounding(ranks, PipelineCase("llama", "dp2", dtype=torch.bfloat16, steps=2))


MANY = 300


def summed(model: nn.Module) -> WithLoss:
    """A model whose loss is the sum of its outputs."""
    return WithLoss(model, torch.sum)


def _times_many(y_BD: Tensor) -> Tensor:
    return MANY * y_BD.sum()


def _many_small_gradients() -> Tensor:
    """The gradient of a bias to which each of 300 micro-batches adds as much: a bfloat16 would stop growing."""
    model = WithLoss(nn.Linear(HIDDEN, HIDDEN), _times_many).to(torch.bfloat16)
    x = torch.ones(MANY, HIDDEN, dtype=torch.bfloat16)
    parallel = autopar.compile(model, mesh((1,), ("dp",)), (x,), hardware=SLOW_DEVICES, microbatches=MANY)
    parallel.train_step(x)
    found = whole(parallel.get_parameter("model.bias").grad)
    assert found is not None and found.dtype == torch.bfloat16
    return found.float()


def test_gradients_of_low_precision_are_added_up_in_float32(ranks: Ranks) -> None:
    [found] = ranks.run(_many_small_gradients, world_size=1)
    assert_close(found, torch.full((HIDDEN,), float(MANY)), rtol=0.01, atol=0.0)


def _counted(strategy: str, count: int) -> dict[tuple[str, str], int]:
    """Return the number of collectives that a step of `count` micro-batches runs."""
    x = torch.ones(4 * count, HIDDEN)
    on = mesh((2,), ("dp",))
    model = autopar.compile(summed(MLP()), on, (x,), hardware=SLOW_DEVICES, microbatches=count, strategy=strategy)
    with record_traffic() as traffic:
        model.train_step(x)
    return dict(traffic.calls)


@pytest.mark.filterwarnings("ignore:zero1")
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1"])
def test_weights_are_gathered_and_gradients_reduced_once_for_all_micro_batches(ranks: Ranks, strategy: str) -> None:
    few, many = (Counter(ranks.run(_counted, strategy, count)[0]) for count in (2, 6))
    assert few.total() > 1
    assert many == few


def test_zero2_gathers_weights_once_and_reduces_gradients_of_every_micro_batch(ranks: Ranks) -> None:
    few, many = (Counter(ranks.run(_counted, "zero2", count)[0]) for count in (2, 6))
    assert few["all_gather", "dp"] == many["all_gather", "dp"]
    assert 2 * many["reduce_scatter", "dp"] == 6 * few["reduce_scatter", "dp"]


def _again() -> None:
    case = PipelineCase("mlp", "dp2")
    model, alone = compiled(case), build(case)
    for step in range(2):
        args, kwargs = batch_of(microbatches_of(case, step))
        loss = model.train_step(*args, **kwargs)
        assert not loss.requires_grad and loss.ndim == 0
        assert_close(float(loss), accumulated(case, alone, step), rtol=1e-6, atol=1e-6)
    assert_same_gradients(model, alone)


def test_gradients_of_several_steps_add_up(ranks: Ranks) -> None:
    ranks.run(_again)


def _distributed() -> None:
    case = PipelineCase("mlp", "dp2", options={"strategy": "data_parallel"})
    (x,), _ = batch_of(microbatches_of(case, 0))
    plain = compiled(case)
    line = mesh((2,), ("dp",))
    model = autopar.compile(
        build(case),
        line,
        (distribute_tensor(x, line, [Shard(0)]),),
        hardware=SLOW_DEVICES,
        microbatches=case.microbatches,
        **by_flag(**case.options),
    )
    with record_traffic() as traffic:
        loss = model.train_step(distribute_tensor(x, line, [Shard(0)]))
    assert_close(loss, plain.train_step(x))
    assert ("all_gather", "dp") not in traffic.calls
    assert_same_gradients(model, plain)


def test_a_distributed_batch_gives_the_step_of_the_whole_one(ranks: Ranks) -> None:
    ranks.run(_distributed)


def _refused() -> None:
    line = mesh((2,), ("dp",))
    x = torch.ones(8, HIDDEN)
    model = autopar.compile(MLP(), line, (x,), hardware=SLOW_DEVICES, microbatches=2)
    with pytest.raises(InputError, match=r"a number with a gradient; found float32\[4, 32\]\."):
        model.train_step(x)
    with pytest.raises(InputError, match="a batch of 7 samples does not divide into 2 micro-batches"):
        model.train_step(x[:7])
    with pytest.raises(InputError, match="a batch of 7 samples does not divide into 2 micro-batches"):
        autopar.compile(MLP(), line, (x[:7],), hardware=SLOW_DEVICES, microbatches=2)


def test_errors_of_a_step_are_raised_on_every_rank(ranks: Ranks) -> None:
    ranks.run(_refused)
