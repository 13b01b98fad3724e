"""MLPs in tiles in a plan's memory: nothing hidden is kept, and of hidden activations a tile is worked on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import autopar
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError, PlanError
from autopar.planning.settings import context_of
from tests.support.gated_mlps import Gated, tokens
from tests.support.moments import at_moment
from tests.support.options import by_flag

SIZE, HIDDEN, ROWS = 64, 512, 8 * 64 // 2
OF_HIDDEN = ROWS * HIDDEN * 4


def planned(mesh: dict[str, int] | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Plan:
    x = tokens(batch=8, sequence=64, size=SIZE)["x"].to(dtype)
    return autopar.plan(Gated(SIZE, HIDDEN).to(dtype), autopar.Mesh(mesh or {"dp": 2}), {"x": x}, **by_flag(**options))


def test_four_tensors_of_hidden_features_are_there_of_a_tile_and_none_is_kept() -> None:
    for tiles in (1, 4, 5):
        plan = planned(strategy="data_parallel", mlp_tiles=tiles)
        assert plan.memory is not None
        rows = -(-ROWS // tiles)
        other = (ROWS * SIZE + 3 * SIZE * HIDDEN) * 4  # the gradients of the first layer's output and weights
        assert plan.memory.parts["working set"] == 4 * rows * HIDDEN * 4 + other
        assert plan.memory.parts.get("activations", 0) < OF_HIDDEN
    whole = planned(strategy="data_parallel")
    assert whole.memory is not None and whole.memory.parts["activations"] > 6 * OF_HIDDEN


def test_gradients_in_low_precision_are_added_up_in_float32() -> None:
    plan = planned(strategy="data_parallel", mlp_tiles=64, dtype=torch.bfloat16)
    assert plan.memory is not None
    of_a_tile, product = 4 * 4 * HIDDEN * 2, SIZE * HIDDEN * 2
    sums = 3 * SIZE * HIDDEN * 4
    assert plan.memory.parts["working set"] == of_a_tile + product + sums + ROWS * SIZE * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["data_parallel", "megatron", "zero3", None])
def test_choices_add_up_to_the_peak_and_formulas_say_the_same(strategy: str | None) -> None:
    for tiles in (1, 3, 64):
        plan = planned({"dp": 2, "tp": 2}, strategy=strategy, mlp_tiles=tiles)
        context = context_of(plan)
        memory, choices = context.memory_model, context.choices
        peak, _, moment = memory_use(memory, choices, {})
        repriced = plan.reprice()
        assert at_moment(memory, choices, moment) == peak == plan.peak_bytes == repriced.memory["memory"]
        assert repriced.seconds == pytest.approx(plan.seconds)
        assert plan.peak_bytes < plan.reprice(batch=16).memory["memory"] < 2 * plan.peak_bytes


def least(**options: Any) -> float:
    """The least limit in bytes, as the refusal of a smaller one says it."""
    with pytest.raises(InfeasibleError) as refused:
        planned(memory=1000, **options)
    (found,) = re.findall(r"at least [^(]*\((\d+) bytes\)", str(refused.value)) or re.findall(
        r"found is [^(]*\((\d+) bytes\)", str(refused.value)
    )
    return int(found)


def test_the_least_limit_is_smaller_by_what_a_layer_that_is_computed_again_holds() -> None:
    assert least(mlp_tiles=16) < 0.5 * least()


def test_a_plan_with_tiles_is_read_again_and_refused_without_them() -> None:
    x = tokens(batch=8, sequence=64, size=SIZE)["x"].float()
    plan = Plan.from_json(planned(mlp_tiles=3).to_json())
    assert plan.attach(Gated(SIZE, HIDDEN), {"x": x}, memory=autopar.Memory(mlp_tiles=3)).choices == plan.choices
    with pytest.raises(PlanError, match=r"mlp_in_tiles \(mlp_tiles=3\)"):
        plan.attach(Gated(SIZE, HIDDEN), {"x": x}, memory=autopar.Memory(mlp_tiles=4))
