"""Hugging Face's plans of expert parallelism, in autopar's words: which ends are pinned, and to what."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.costs.plans.plan import Plan
from autopar.errors import AnnotationError
from autopar.planning.annotations.tp_plans import translate
from tests.support.simulation.training import SLOW_DEVICES

MESH = autopar.Mesh({"dp": 2, "ep": 2}, "cpu")
IDS = torch.zeros(4, 8, dtype=torch.int64)
PLAN = {"experts.up": "grouped_gemm", "experts": "ep_dispatch_experts", "gate": "ep_router"}


def dispatching(how: Any) -> nn.Module:
    """A model whose configuration names an implementation of expert parallelism."""
    model = nn.Module()
    model.config = SimpleNamespace(distributed_config=how)  # type: ignore[assignment]
    return model


@functools.cache
def mixtral(how: str) -> Plan:
    """The plan of a tiny Mixtral with its own plan of expert parallelism, dispatched so."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    model.config.distributed_config = {"ep_implementation": how}
    autopar.annotate_plan(model, "ep", axis="ep")
    inputs = {"input_ids": IDS, "labels": IDS}
    return autopar.plan(model, MESH, inputs, mode="semi_auto", hardware=SLOW_DEVICES)


def ends(plan: Plan) -> set[str]:
    """Return how dispatch and combine are split over the second axis."""
    return {plan.choices[row.name].split()[1] for row in plan.rows if row.operation in ("dispatch", "combine")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("how", "split"), [("all_to_all", {"a0+x"}), ("all_reduce", {"x"})])
def test_the_ends_of_experts_are_pinned_to_the_implementation(how: str, split: set[str]) -> None:
    plan = mixtral(how)
    products = {row.roles[1] for row in plan.rows if row.operation == "grouped_mm"}
    assert ends(plan) in (split, {each.replace("a0", "b0") for each in split})  # samples or positions
    assert products == {"expert"}


def test_the_planner_chooses_the_implementation_that_is_left_to_it() -> None:
    found = dict(translate(dispatching({"ep_implementation": "auto"}), PLAN))
    assert found == {"experts.up": "expert", "experts": "expert"}
    assert dict(translate(nn.Module(), PLAN)) == found
    assert ends(mixtral("auto")) in ({"a0+x"}, {"b0+x"}, {"x"})


@pytest.mark.parametrize("how", ["deepgemm_megamoe", 3])
def test_an_implementation_without_a_layout_is_refused(how: Any) -> None:
    message = (
        r'"experts" is dispatched by ep_implementation=.*; known are auto, all_to_all, all_reduce. '
        r'Set config.distributed_config.ep_implementation .* annotate\(model, "experts", ep="expert"\)'
    )
    with pytest.raises(AnnotationError, match=message):
        dict(translate(dispatching(SimpleNamespace(ep_implementation=how)), PLAN))


def test_experts_that_do_not_divide_are_named_with_their_number() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6, 8))

        def forward(self, x_ECD: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x_ECD, self.weight).square().mean()

    model = autopar.annotate(Model(), "bmm", ep="factor:b")
    with pytest.raises(AnnotationError, match=r'"factor:b" on axis ep splits 4 into 3 parts; 4 is divisible by 2, 4'):
        autopar.plan(model, autopar.Mesh({"ep": 3}, "cpu"), (torch.ones(4, 2, 6),), mode="semi_auto")
