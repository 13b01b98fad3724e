"""One request serves compile, plan and attach: what one takes, the others take, and it reaches the planner."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.export import capture, skeleton
from autopar.capture.tiles.requested_tiles import Tiles
from autopar.compiler.arguments import defaults, plan_request
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.plan import Plan
from autopar.errors import InputError, PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.options.groups import Capture, Experts, Memory, Pipeline, Search
from autopar.planning.request import PlanRequest
from autopar.planning.settings import Settings, context_of
from tests.support.families import FAMILIES
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, mesh
from tests.support.ranks import Ranks


def test_every_option_has_its_place_in_the_request() -> None:
    model = autopar.annotate(nn.Linear(2, 2), "*", dp="data")
    specified: dict[str, Any] = {
        "mode": "manual",
        "strategy": "zero3",
        "memory": Memory("1GB", recompute="full", prefetch=2, offload="auto", host_limit="3GB", conventions="megatron"),
        "precision": "bf16-mixed",
        "optimizer": autopar.Optimizer(master_copies=True),
        "hardware": "a100",
        "inputs": "local",
        "outputs": "full",
        "microbatches": 4,
        "pipeline": Pipeline("stages", "1f1b", 2, ["layers.1"]),
        "experts": Experts(1.25, 1.5),
        "search": Search(7.0, 0.25, "ilp"),
        "capture": Capture(["model.py:12=True"]),
        "training": True,  # without it most others are refused
    }
    assert specified.keys() == defaults().keys()
    request, plain = plan_request(model, **specified), PlanRequest()
    alike = [each.name for each in fields(request) if getattr(request, each.name) == getattr(plain, each.name)]
    # The implementations are those of a plan that is attached, tiles are chosen by the search, and copies of inputs are
    # of a graph that `run` asks for: no options.
    assert alike == ["training", "implementations", "chosen_tiles", "warm_start", "graph_input_bytes"]
    for name in ("pipeline", "experts", "capture"):
        assert getattr(request, name) is specified[name]
    assert (
        request.settings == Settings(specified["memory"], specified["search"]) and request.memory is specified["memory"]
    )
    assert request.memory.host_limit_bytes == 3 * 10**9
    assert not plan_request(model, training=False).training


@pytest.mark.parametrize(
    ("memory", "tiles"),
    [
        (Memory(), Tiles()),
        (Memory(loss_tiles="always", mlp_tiles="auto"), Tiles("auto", "auto")),
        (Memory(loss_tiles="none", mlp_tiles=3), Tiles(False, 3)),
        (Memory(loss_tiles=4), Tiles(4, None)),
    ],
)
def test_words_for_tiles_are_those_of_capture(memory: Memory, tiles: Tiles) -> None:
    assert plan_request(nn.Linear(2, 2), memory=memory).tiles == tiles


def test_static_arguments_are_those_of_forward() -> None:
    request = plan_request(nn.Linear(2, 2), capture=Capture(static_argnames=["input"]))
    assert request.static_argnames == ("input",)


def _settings_of(options: dict[str, Any]) -> Settings:
    compiled = autopar.compile(nn.Linear(4, 4), mesh((1,), ("tp",)), (torch.ones(2, 4),), **by_flag(**options))
    return context_of(compiled.plan).settings


def test_what_compile_is_told_reaches_the_solver(ranks: Ranks) -> None:
    options = {"time_limit": 7.0, "gap": 0.25, "memory": 10**6, "hardware": SLOW_DEVICES}
    (found,) = ranks.run(_settings_of, options, world_size=1)
    assert found == Settings(Memory(10**6), Search(time_limit=7.0, gap=0.25))


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
        ({"inputs": 3}, InputError, "inputs=3; give"),
        ({"mode": "hand"}, InputError, 'mode=\'hand\'; modes are "auto", "semi_auto" and "manual"'),
        ({"outputs": "none"}, InputError, "outputs='none'; outputs are"),
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
    ],
)
def test_a_word_that_is_not_known_is_refused_by_all(options: dict[str, Any], error: type, text: str) -> None:
    model, inputs = nn.Linear(4, 4), (torch.ones(2, 4),)
    plan = autopar.plan(model, Mesh({"dp": 2}), inputs)
    with pytest.raises(error) as planned:
        autopar.plan(model, Mesh({"dp": 2}), inputs, **by_flag(**options))
    with pytest.raises(error) as attached:
        plan.attach(model, inputs, **by_flag(**options))
    assert text in str(planned.value) and str(planned.value) == str(attached.value)


def test_a_plan_is_attached_with_every_option_that_it_was_made_with() -> None:
    family = FAMILIES["llama"]
    options: dict[str, Any] = {"strategy": "zero3", "microbatches": 2, "optimizer": "sgd", "hardware": SLOW_DEVICES}
    _, inputs = family.inputs(0)
    plan = autopar.plan(family.build(), Mesh({"dp": 2}), inputs, **by_flag(**options))
    attached = Plan.from_json(plan.to_json()).attach(family.build(), inputs, **by_flag(**options))
    assert attached == plan and attached.verify().ok
    assert context_of(attached).annotations == context_of(plan).annotations
    with pytest.raises(PlanError, match="Plan again"):
        Plan.from_json(plan.to_json()).attach(
            family.build(), inputs, **by_flag(**{**options, "microbatches": None})
        ).verify()


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
    space = PlanRequest(hardware=SLOW_DEVICES).space(program, plan.mesh, zigzag_axes=context_of(plan).space.zigzag_axes)
    context = replace(context_of(plan), space=space, memory_model=MemoryModel(space))
    assert replace(plan, context=context).verify().ok
