"""One request serves compile, plan and attach: what one takes, the others take, and it reaches the planner."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export import capture, skeleton
from autopar.compiler.arguments import plan_request
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.plan import Plan
from autopar.errors import InputError, PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings, context_of
from tests.support.families import FAMILIES
from tests.support.parity import SLOW_DEVICES, mesh
from tests.support.ranks import Ranks

BOTH = {"model", "mesh", "example_inputs", "plan_cache"}
RUN_ALONE = BOTH | {"plan", "deterministic", "seed", "check_inputs", "buckets"}
SEARCH_ALONE = BOTH | {"devices", "max_axes"}


def _options(function: Any, without: set[str]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: (each.default, each.annotation) for each in parameters if each.name not in without}


def test_compile_and_plan_take_the_same_options_with_the_same_defaults() -> None:
    assert _options(autopar.compile, RUN_ALONE) == _options(autopar.plan, SEARCH_ALONE)
    assert _options(autopar.plan, SEARCH_ALONE) == _options(plan_request, {"model"})


def test_every_option_has_its_place_in_the_request() -> None:
    model = autopar.annotate(nn.Linear(2, 2), "*", dp="data")
    said: dict[str, Any] = {
        "mode": "manual",
        "strategy": "zero3",
        "memory": "1GB",
        "recompute": "full",
        "optimizer": "adamw",
        "master_copies": True,
        "inputs": "local",
        "outputs": "full",
        "hardware": "a100",
        "solver": "ilp",
        "time_limit": 7.0,
        "gap": 0.25,
        "microbatches": 4,
        "pipeline": "stages",
        "schedule": "1f1b",
        "chunks": 2,
        "stages": ["layers.1"],
        "assume": ["model.py:12=True"],
        "static_argnames": [],  # refused with micro-batches
        "capacity_factor": 1.25,
        "loss_tiles": 3,
        "mlp_tiles": 5,
        "weight_tiles": True,
        "imbalance": 1.5,
        "precision": "bf16-mixed",
        "prefetch": 2,
        "offload": "auto",
        "host_memory": "3GB",
        "memory_conventions": "megatron",
        "training": True,  # without it most others are refused
    }
    assert said.keys() == _options(plan_request, {"model"}).keys()
    request, plain = plan_request(model, **said), PlanRequest()
    alike = [each.name for each in fields(request) if getattr(request, each.name) == getattr(plain, each.name)]
    # The implementations are those of a plan that is attached, no option.
    assert alike == ["training", "implementations", "static_argnames"]
    assert plan_request(model, static_argnames=["input"]).static_argnames == ("input",)
    assert not plan_request(model, training=False).training
    assert request.settings == Settings(10**9, "full", "ilp", 7.0, 0.25, 2) and request.stages == ("layers.1",)
    assert request.host_memory == 3 * 10**9


def _settings_of(options: dict[str, Any]) -> Settings:
    compiled = autopar.compile(nn.Linear(4, 4), mesh((1,), ("tp",)), (torch.ones(2, 4),), **options)
    return context_of(compiled.plan).settings


def test_what_compile_is_told_reaches_the_solver(ranks: Ranks) -> None:
    options = {"time_limit": 7.0, "gap": 0.25, "memory": 10**6, "hardware": SLOW_DEVICES}
    (found,) = ranks.run(_settings_of, options, world_size=1)
    assert found == Settings(memory=10**6, time_limit=7.0, gap=0.25)


def _refused_before_any_input() -> str:
    with pytest.raises(PlanError) as refused:
        autopar.compile(nn.Linear(4, 4), mesh((1,), ("tp",)), hardware="z100")
    return str(refused.value)


def test_a_profile_that_is_not_known_is_refused_before_there_are_inputs(ranks: Ranks) -> None:
    (text,) = ranks.run(_refused_before_any_input, world_size=1)
    assert text.startswith("hardware 'z100' is not known; use one of")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gap": 1.5}, PlanError, "gap=1.5; give a share of the step, 0 for a plan that is proven best"),
        ({"mode": "hand"}, InputError, 'mode=\'hand\'; modes are "auto", "semi_auto" and "manual"'),
        ({"outputs": "none"}, InputError, "outputs='none'; outputs are"),
        ({"solver": "lp"}, InputError, 'solver=\'lp\'; solvers are "auto" and "ilp"'),
        (
            {"precision": "bf8"},
            InputError,
            "precision='bf8' is not known; names are 'bf16-mixed', 'fp16-mixed'",
        ),
        (
            {"precision": 16},
            InputError,
            "precision=16; give one of 'bf16-mixed', 'fp16-mixed', 'bf16', 'fp32', or an autopar",
        ),
        (
            {"recompute": "some"},
            PlanError,
            "recompute='some'; give 'auto', 'none', 'selective', 'full_save_collectives', 'full'",
        ),
    ],
)
def test_a_word_that_is_not_known_is_refused_by_all(options: dict[str, Any], error: type, text: str) -> None:
    model, inputs = nn.Linear(4, 4), (torch.ones(2, 4),)
    plan = autopar.plan(model, Mesh({"dp": 2}), inputs)
    with pytest.raises(error) as planned:
        autopar.plan(model, Mesh({"dp": 2}), inputs, **options)
    with pytest.raises(error) as attached:
        plan.attach(model, inputs, **options)
    assert text in str(planned.value) and str(planned.value) == str(attached.value)


def test_a_plan_is_attached_with_every_option_that_it_was_made_with() -> None:
    family = FAMILIES["llama"]
    options: dict[str, Any] = {"strategy": "zero3", "microbatches": 2, "optimizer": "sgd", "hardware": SLOW_DEVICES}
    _, inputs = family.inputs(0)
    plan = autopar.plan(family.build(), Mesh({"dp": 2}), inputs, **options)
    attached = Plan.from_json(plan.to_json()).attach(family.build(), inputs, **options)
    assert attached == plan and attached.verify().ok
    assert context_of(attached).annotations == context_of(plan).annotations
    with pytest.raises(PlanError, match="Plan again"):
        Plan.from_json(plan.to_json()).attach(family.build(), inputs, **{**options, "microbatches": None}).verify()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_plan_made_on_meta_holds_for_the_program_of_another_device(name: str) -> None:
    family = FAMILIES[name]
    args, kwargs = family.inputs(0)
    model = skeleton(family.build())
    plan = autopar.plan(model, Mesh({"tp": 2}), kwargs or args, hardware=SLOW_DEVICES)
    program = capture(model, args, kwargs, training=model.training, device=torch.device("cuda"))
    made = {node.kwargs["device"] for node in program.graph.nodes if node.kwargs.get("device") is not None}
    assert made <= {torch.device("cuda")}
    assert program.fingerprint == plan.fingerprint
    space = PlanRequest(hardware=SLOW_DEVICES).space(program, plan.mesh)
    context = replace(context_of(plan), space=space, memory_model=MemoryModel(space))
    assert replace(plan, context=context).verify().ok
