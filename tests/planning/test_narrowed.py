"""Plans in the space that a preset leaves: few strategies are looked at, and views show all that there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

import autopar
from autopar import Mesh
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.plan import Plan
from autopar.costs.space import narrowed as narrowing
from autopar.costs.space.narrowed import narrowed
from autopar.costs.space.space import Decision, Space, TensorEdge
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.models.catalogue import LanguageModel
from autopar.planning.formulation import Formulation
from autopar.planning.memory_limit.memory_limit import best_within
from autopar.planning.options.groups import Memory, Offloaded
from autopar.planning.settings import PlanContext, Settings, context_of
from autopar.views.inspection.verify import check
from tests.support.parity import SLOW_DEVICES
from tests.support.pinned import IDS_BS, Net
from tests.support.planned import X_BD, TwoLinears, space_of

AXES = {"dp": 2, "tp": 2}


def _plan(hardware: Any = SLOW_DEVICES, **options: Any) -> Plan:
    return autopar.plan(Net(), Mesh(AXES), (IDS_BS,), hardware=hardware, **options)


def _decision(space: Space, name: str) -> Decision:
    return space.decisions[space.index[name]]


def test_a_preset_leaves_few_strategies_to_look_at() -> None:
    preset, free = (context_of(_plan(strategy=each)) for each in ("zero3+megatron", None))
    assert 20 * sum(preset.space.entries) < sum(preset.widened().space.entries) == sum(free.space.entries)
    assert free.space.kept is None


def test_shared_reshards_with_too_many_layouts_keep_placements_of_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    free = _plan(strategy="megatron_sequence")
    monkeypatch.setattr(narrowing, "MAX_ENTRIES", 16)
    plan = _plan(strategy="megatron_sequence")
    (note,) = set(plan.notes) - set(free.notes)
    assert "only placements that its producer or a consumer has" in note
    assert free.seconds < plan.seconds == plan.bound, "a sum may go by way of a dim that no call splits on this axis"
    space = context_of(plan).space
    left = space.decisions[space.index["embedding_default/reshard"]].candidates.strategies
    assert [str(each.outputs[0]) for each in left] == ["S(0) P", "S(0) S(1)"]
    assert plan.verify().ok and plan.what_if("layers.0.up", tp="row").verify().ok


def test_neighbouring_axes_split_alike_where_the_problem_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model = autopar.annotate(Net(), "layers.1.up", tp="row")
    free = autopar.plan(model, Mesh(AXES), (IDS_BS,), hardware=SLOW_DEVICES)
    monkeypatch.setattr(narrowing, "MAX_ENTRIES", 600)
    plan = autopar.plan(model, Mesh(AXES), (IDS_BS,), hardware=SLOW_DEVICES)
    (note,) = set(plan.notes) - set(free.notes)
    assert note.startswith("dp and tp split tensors alike") and "without other choices" in note
    space, choices = context_of(plan).space, context_of(plan).choices
    for decision, choice in zip(space.decisions, choices, strict=True):
        strategy = decision.candidates.strategies[choice]
        chosen = strategy.choices if decision.kind == "call" else strategy.outputs[0]
        assert chosen[0] == chosen[1] or decision.node.meta["module"] == "layers.1.up"
    assert free.seconds <= plan.seconds == plan.bound and plan.verify().ok
    assert plan.explain("layers.1.up").strategy == "dp=data, tp=row"
    assert plan.what_if("layers.0.up", tp="row").verify().ok


def test_a_plan_of_a_narrowed_space_is_verified_and_explained_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the whole space on four axes that takes longer than the plan."""
    monkeypatch.setattr(narrowing, "MAX_ENTRIES", 600)
    plan = _plan()
    context = context_of(plan)
    assert context.space.limited
    whole = context.widened()
    name = "linear_default"
    offered = [str(each) for each in _decision(context.space, name).candidates.strategies]
    other = next(s for s in map(str, _decision(whole.space, name).candidates.strategies) if s not in offered)
    with monkeypatch.context() as here:
        here.setattr(PlanContext, "widened", None)
        assert plan.verify().ok
        assert plan.explain("layers.0.up").num_strategies == len(offered)
    with pytest.raises(PlanError, match="its choices take"):
        replace(plan, choices={**plan.choices, name: other}).verify()


def test_a_choice_that_a_preset_rules_out_is_found() -> None:
    plan = _plan(strategy="zero3+megatron")
    context, name = context_of(plan), "linear_default"
    offered = [str(each) for each in _decision(context.space, name).candidates.strategies]
    every = _decision(context.widened().space, name).candidates.strategies
    other = next(str(each) for each in every if str(each) not in offered)
    with pytest.raises(PlanError, match="which its annotations rule out"):
        replace(plan, choices={**plan.choices, name: other}).verify()


def test_the_axes_of_the_fewest_devices_split_alike_first(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(TwoLinears(), (X_BD,), SLOW_DEVICES, dp=4, cp=2, one=1, tp=2)
    for allowed, alike in ((8, "cp and tp"), (200, "cp and tp, dp and cp")):
        monkeypatch.setattr(narrowing, "MAX_ENTRIES", max(space.entries) // allowed)
        (note,) = narrowing.notes_on_narrowing(narrowed(space, {})[0])
        assert note.startswith(f"{alike} split tensors alike")


def test_a_mesh_of_too_many_axes_is_refused() -> None:
    mesh = Mesh({f"axis{number}": 2 for number in range(6)})
    with pytest.raises(MeshError, match=r"a tensor of 3 dims has up to 46656 layouts .* axis0 and axis1 to"):
        autopar.plan(Net(), mesh, (IDS_BS,), hardware="h100")


def test_one_device_is_what_it_is_without_a_preset() -> None:
    ours, theirs = (_plan(strategy=each).workload for each in ("zero3+megatron", None))
    assert ours is not None and theirs is not None and ours.one_device == theirs.one_device


def test_an_explanation_names_the_roles_that_a_preset_rules_out() -> None:
    found = _plan(strategy="zero3+megatron").explain("layers.0.up")
    ruled_out = {each.role for each in found.alternatives if each.reason == "ruled out by annotations"}
    assert "row" in ruled_out


def test_a_preset_gives_way_to_what_if() -> None:
    plan = _plan(strategy="zero3+megatron")
    found = plan.what_if("layers.0.up", tp="row")
    assert found.explain("layers.0.up").strategy != plan.explain("layers.0.up").strategy
    assert found.verify().ok and plan.verify().ok


@pytest.mark.parametrize("strategy", ["zero3+megatron", "megatron_sequence", "zero1+megatron"])
@pytest.mark.parametrize("offload", ["none", "activations"])
def test_a_plan_of_a_preset_holds_in_the_whole_space(strategy: str, offload: Offloaded) -> None:
    plan = _plan("h100", strategy=strategy, memory=Memory(offload=offload), precision="bf16-mixed", microbatches=2)
    assert set(plan.recompute.values()) == ({"none"} if offload == "none" else {"offload"}) or not plan.recompute
    assert context_of(plan).space.kept is not None
    assert check(plan, context_of(plan).widened()).ok


@pytest.mark.parametrize("strategy", ["zero3+megatron", "expert_data", "zero1"])
def test_a_plan_of_experts_holds_with_several_micro_batches(strategy: str) -> None:
    with torch.device("meta"):
        model = LanguageModel(
            Qwen3MoeConfig(
                vocab_size=64,
                num_hidden_layers=2,
                hidden_size=64,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=16,
                moe_intermediate_size=32,
                num_experts=4,
                num_experts_per_tok=2,
            )
        )
        ids = torch.zeros(8, 32, dtype=torch.int64)
    axes = {"dp": 2, "ep": 2} if strategy == "expert_data" else AXES
    for count in (1, 2):
        options: dict[str, Any] = {"strategy": strategy, "precision": "bf16-mixed", "microbatches": count}
        plan = autopar.plan(model, Mesh(axes), (ids, ids), hardware="h100", **options)
        assert check(plan, context_of(plan).widened()).ok


def test_pins_that_contradict_each_other_are_named_though_nothing_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(TwoLinears(), (X_BD,), SLOW_DEVICES)
    edge = next(each for each in space.edges if space.decisions[each.source].kind == "parameter")
    ends = edge.source, edge.target

    def seconds(own: Space, each: TensorEdge) -> np.ndarray:
        found = given(own, each)
        if (each.source, each.target) == ends and space is own:
            found[1:, 1:] = np.inf
        return np.full_like(found, np.inf) if (each.source, each.target) == ends and space is not own else found

    given = Space.reshard_seconds
    monkeypatch.setattr(Space, "reshard_seconds", seconds)
    pins = {end: np.arange(len(space.decisions[end].candidates.strategies)) > 0 for end in ends}
    messages = []
    for each, others in ((space, pins), (space.keeping(pins), {})):
        with pytest.raises(InfeasibleError) as raised:
            best_within(Formulation(each, MemoryModel(each)), others, Settings())
        messages.append(str(raised.value))
    assert messages[0] == messages[1] and "forbids every pair of strategies allowed for them" in messages[0]


def test_a_refusal_within_a_limit_says_what_the_pins_of_a_preset_are_worth() -> None:
    with pytest.raises(InfeasibleError, match=r"without the pin on '.*' the least is|without any pin the least is"):
        _plan(strategy="data_parallel", memory=Memory(4000, recompute="none"))


def test_a_refusal_states_no_problem_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Formulation.problems

    def stated(self: Formulation, *arguments: Any) -> object:
        assert not narrowing.is_large(self.space)
        return state(self, *arguments)

    monkeypatch.setattr(narrowing, "MAX_ENTRIES", 600)
    monkeypatch.setattr(Formulation, "problems", stated)
    with pytest.raises(InfeasibleError, match="without any pin the least is"):
        _plan(strategy="data_parallel", memory=Memory(2000, recompute="none"))


def test_a_space_stays_of_which_pins_leave_more_than_half() -> None:
    space = space_of(TwoLinears(), (X_BD,), SLOW_DEVICES)
    number = len(space.decisions) - 1
    pins = {number: torch.arange(len(space.decisions[number].candidates.strategies)).numpy() > 0}
    assert narrowed(space, pins) == (space, pins)
