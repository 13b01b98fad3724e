"""Gradients that an optimizer frees in the backward: in rows, predictions and formulas alike, and on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.peak import bytes_by_moment, memory_use
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError, InputError
from autopar.models.named import named
from autopar.optim import GaLoreAdamW
from autopar.planning.settings import context_of
from tests.costs.memory.test_microbatches import at_moment
from tests.support.measured_bytes import filled, peak_of_step
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh

RANK = 8


def _plan(in_backward: bool, strategy: str | None, mesh: autopar.Mesh | None = None, **options: Any) -> Plan:
    model, inputs = named("tiny-llama", 4, 8)
    optimizer = autopar.Optimizer("galore", rank=RANK, in_backward=in_backward)
    plan = autopar.plan(
        model, mesh or autopar.Mesh({"dp": 2}), inputs, strategy=strategy, **by_flag(optimizer=optimizer, **options)
    )
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["data_parallel", "zero3"])
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_rows_and_formulas_count_what_the_prediction_counts(strategy: str, recompute: str) -> None:
    plan = _plan(True, strategy, recompute=recompute)
    assert plan.peak_bytes < _plan(False, strategy, recompute=recompute).peak_bytes
    context = context_of(plan)
    memory = MemoryModel(context.space)
    by_moment = bytes_by_moment(memory, context.choices, {})
    moments = [number for number, num_bytes in enumerate(by_moment) if num_bytes]
    assert [at_moment(memory, context.choices, number) for number in moments] == by_moment[moments].tolist()
    assert memory_use(memory, context.choices, {})[0] == by_moment.max()
    assert plan.reprice().memory["memory"] == plan.peak_bytes
    assert plan.verify().ok


def test_no_more_than_one_layers_gradients_are_ever_there() -> None:
    use, all_of_them = (_plan(each, "data_parallel").memory for each in (True, False))
    assert use is not None and all_of_them is not None
    model, _ = named("tiny-llama", 4, 8)
    layer = sum(each.nbytes for name, each in model.named_parameters() if ".layers.0." in name)
    largest = max(layer, *(each.nbytes for each in model.parameters()))
    # As they were made, and as they are reduced, of the layer that the peak falls into.
    assert 0 < use.parts["gradients"] <= 2 * largest < all_of_them.parts["gradients"]


@pytest.mark.slow
def test_a_limit_that_only_this_keeps_is_kept() -> None:
    at_once, saved = (_plan(each, "data_parallel").peak_bytes for each in (True, False))
    limit = (at_once + saved) // 2
    assert _plan(True, "data_parallel", memory=limit).peak_bytes == at_once
    with pytest.raises(InfeasibleError, match="the memory limit is"):
        _plan(False, "data_parallel", memory=limit)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=["data", "pipeline"])
def test_several_micro_batches_are_refused(axes: dict[str, int]) -> None:
    specified = (
        r"optimizer='galore' with in_backward=True .* the step has 4 micro-batches.*give microbatches=1, or leave"
    )
    with pytest.raises(InputError, match=specified):
        _plan(True, None, autopar.Mesh(axes), microbatches=4)


def _measured(shape: tuple[int, ...], strategy: str, in_backward: bool) -> tuple[int, int]:
    """Bytes at the highest moment of the second step on this rank, and those of the plan."""
    model, inputs = named("tiny-llama", 4, 8)
    optimizer = autopar.Optimizer("galore", rank=RANK, in_backward=in_backward)
    assert isinstance(inputs, tuple)
    on = mesh(shape, ("dp", "tp")[: len(shape)])
    compiled: Any = autopar.compile(model, on, inputs, strategy=strategy, optimizer=optimizer)
    filled(compiled)
    values = tuple(torch.randint(0, 200, each.shape) for each in inputs)
    galore = GaLoreAdamW(compiled.named_parameters(), rank=RANK, update_proj_gap=1000)
    if in_backward:
        galore.step_in_backward()
    return peak_of_step(compiled, values, galore), compiled.plan.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ((2,), "data_parallel"),
        ((2,), "zero3"),
        pytest.param((2, 2), "fsdp_megatron", marks=pytest.mark.slow),
        pytest.param((2, 2), "data_parallel", marks=pytest.mark.slow),
    ],
)
def test_ranks_hold_what_the_plan_predicts(ranks: Ranks, shape: tuple[int, ...], strategy: str) -> None:
    world = torch.Size(shape).numel()
    saved = ranks.run(_measured, shape, strategy, False, world_size=world)
    for (found, predicted), (_, without) in zip(
        ranks.run(_measured, shape, strategy, True, world_size=world), saved, strict=True
    ):
        assert predicted == pytest.approx(found, rel=0.1)
        assert predicted < without


def test_a_step_on_the_host_is_refused_next_to_it_without_gradients_there() -> None:
    with pytest.raises(InputError, match=r'offload was given with in_backward=True, .* give gradients="host", too, or'):
        model, inputs = named("tiny-llama", 4, 8)
        requested = autopar.Optimizer("adamw", in_backward=True)
        autopar.plan(
            model, autopar.Mesh({"dp": 2}), inputs, optimizer=requested, memory=autopar.Memory(offload="optimizer")
        )
