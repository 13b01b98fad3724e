"""Explanations: every number in them is that of a plan which is solved, or enumerated, without them."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.console.units import format_share
from autopar.costs.hardware.load import load
from autopar.costs.hardware.profile import Hardware
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.difference import Amount
from autopar.costs.plans.explanation import SHOWN_GAP, Explanation
from autopar.costs.plans.plan import Plan
from autopar.costs.space.space import Space
from autopar.errors import InputError, PlanError
from autopar.ir.sharding.annotation import ROLES
from autopar.ir.sharding.mesh import Mesh
from autopar.planning import planner
from autopar.planning.annotations.annotate import annotate, annotations_of, pins_of
from autopar.planning.options.groups import Memory
from autopar.planning.planner import make_plan
from autopar.planning.record import evaluate
from autopar.planning.settings import Settings, context_of
from autopar.views.inspection.breakdown import breakdown, parting
from autopar.views.inspection.explain import explain
from tests.support.families import FAMILIES
from tests.support.parity import SLOW_DEVICES
from tests.support.pinned import IDS_BS, Net
from tests.support.planned import SLOW_LINKS, X_BD, TwoLinears, TwoLinearsSquared, space_of

HARDWARE = pytest.mark.parametrize("hardware", [SLOW_DEVICES, SLOW_LINKS, load("cpu")], ids=lambda each: each.name)


def best_without(space: Space, number: int, choice: int) -> float:
    """The least seconds of all combinations of strategies without one of them, by enumeration."""
    candidate_lists = [range(len(decision.candidates.strategies)) for decision in space.decisions]
    return min(
        (evaluate(space, choices) for choices in itertools.product(*candidate_lists) if choices[number] != choice),
        default=math.inf,
    )


def plan_of(model: nn.Module, hardware: Hardware = SLOW_DEVICES, **axes: int) -> Plan:
    """The best plan of a net of two blocks, with its annotations."""
    space = space_of(model, (IDS_BS,), hardware, **axes)
    pins = pins_of(annotations_of(model), space, "auto", {})
    plan, _ = make_plan(space, pins)
    return replace(plan, context=replace(context_of(plan), annotations=annotations_of(model)))


@pytest.mark.sample(1)
@HARDWARE
def test_no_plan_without_the_strategy_is_better_than_the_runner_up(hardware: Hardware) -> None:
    space = space_of(TwoLinears(), (X_BD,), hardware)
    plan, choices = make_plan(space, {})
    for name in ("up", "down.weight"):
        found = explain(plan, name, alternatives=False)
        number = space.index[found.decision]
        assert found.runner_up is not None
        assert found.runner_up.step.after == pytest.approx(best_without(space, number, choices[number]), rel=1e-9)
        assert found.runner_up.step.after >= plan.seconds * (1 - 1e-12)


@pytest.mark.parametrize(("samples", "copies"), [(1, False), (2, True)])
def test_an_explanation_tells_what_copies_for_messages_take(samples: int, copies: bool) -> None:
    ids = torch.zeros(samples, 8, dtype=torch.int64)
    model = FAMILIES["llama"].build()
    plan = autopar.plan(model, Mesh({"tp": 2}), {"input_ids": ids, "labels": ids}, strategy="megatron_sequence")
    found = plan.explain("layers.0.mlp.up_proj")
    assert any(each.copied for each in found.reshards) is copies
    assert all(each.copied < each.seconds for each in found.reshards if each.moved)
    assert ("of which copies take" in str(found)) is copies


@pytest.fixture(scope="module")
def llama() -> Plan:
    family = FAMILIES["llama"]
    space = space_of(family.build(), family.inputs(0)[1], load("h100"), dp=2, tp=2)
    return make_plan(space, {})[0]


@pytest.fixture(scope="module")
def explained(llama: Plan) -> Explanation:
    return llama.explain("layers.1.mlp.up_proj")


def test_the_parts_of_a_cost_add_up_to_the_row_of_the_plan(llama: Plan) -> None:
    for name in ("layers.0.self_attn.q_proj", "lm_head", "model.embed_tokens"):
        found = llama.explain(name, alternatives=False)
        row = next(row for row in llama.rows if row.name == found.decision)
        inbound = sum(each.seconds for each in found.reshards if each.inbound and each.num_consumers == 1)
        parts = found.forward_seconds + found.backward_seconds + found.recompute_seconds + found.own_seconds + inbound
        assert parts == pytest.approx(row.seconds, rel=1e-9, abs=1e-12)
        assert (found.saved_bytes, found.stored_bytes) == (row.saved_bytes, row.stored_bytes)


def test_a_plan_is_broken_down_into_parts_that_add_up_to_its_step(llama: Plan) -> None:
    shares = breakdown(llama)
    assert sum(share.seconds for share in shares.values()) == pytest.approx(llama.seconds, rel=1e-9)
    for (collective, axis), num_bytes in llama.traffic.items():
        assert shares[f"{collective} {axis}"].num_bytes == num_bytes


def test_what_the_runner_up_takes_more_is_broken_down_without_a_rest(llama: Plan, explained: Explanation) -> None:
    second = explained.runner_up
    assert second is not None and second.parts == parting(llama, second.plan)
    assert sum(share.seconds for share in second.parts.values()) == pytest.approx(second.step.delta, rel=1e-6)
    assert second.step.delta > 0 and second.memory.after == second.plan.peak_bytes


def test_a_collective_that_costs_more_is_traced_to_modules_without_a_rest(explained: Explanation) -> None:
    second = explained.runner_up
    assert second is not None and second.places
    for part, where in second.places.items():
        assert sum(share.num_bytes for _, share in where) == second.parts[part].num_bytes
        assert sum(share.seconds for _, share in where) == pytest.approx(second.parts[part].seconds, abs=1e-12)
        assert f"· {where[0][0]}" in str(explained)


def test_the_runner_up_differs_in_the_decision_that_is_explained(llama: Plan, explained: Explanation) -> None:
    second = explained.runner_up
    assert second is not None
    assert second.plan.choices[explained.decision] != llama.choices[explained.decision]


def test_another_role_costs_what_a_plan_with_that_role_costs(llama: Plan, explained: Explanation) -> None:
    assert {(each.axis, each.role) for each in explained.alternatives} >= {
        ("tp", "column"),
        ("tp", "row"),
        ("dp", "row"),
    }
    for each in explained.alternatives:
        if each.role in ("column", "row"):
            again = llama.what_if("layers.1.mlp.up_proj", **{each.axis: each.role})
            assert (again.seconds, again.peak_bytes) == (pytest.approx(each.seconds, rel=1e-9), each.peak_bytes)


def test_no_alternative_is_better_than_the_plan_or_the_runner_up(llama: Plan, explained: Explanation) -> None:
    seconds = [each.seconds for each in explained.alternatives if each.seconds is not None]
    assert explained.runner_up is not None and min(seconds) >= explained.runner_up.step.after * (1 - 1e-12)


def test_an_explanation_is_read_as_text(llama: Plan, explained: Explanation) -> None:
    text = str(explained)
    assert text.startswith(f"model.layers.1.mlp.up_proj (linear, in the graph {explained.decision})\n  chosen   dp=")
    for line in ("compute, forward", "runner-up: ", "where it differs", "what it changes", "tp=column", "tp=row"):
        assert line in text
    assert str(llama.explain("layers.1.mlp.up_proj")) == text


def test_a_parameter_is_explained_by_its_storage(llama: Plan) -> None:
    found = llama.explain("lm_head.weight", alternatives=False)
    assert (found.operation, found.name) == ("parameter", "lm_head.weight")
    assert found.optimizer_seconds > 0 and found.stored_bytes > 0
    assert "optimizer step" in str(found) and "stored, with optimizer state" in str(found)


def test_a_module_stands_for_the_call_that_computes_most(llama: Plan) -> None:
    assert llama.explain("model.layers.0.self_attn", False).operation == "scaled_dot_product_attention"
    assert llama.explain("*0.mlp.down_proj", False).name == "model.layers.0.mlp.down_proj"
    one = llama.explain("layers.0.self_attn.k_proj", False)
    assert llama.explain(one.decision, False) == one


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layers.0.mlp.up_prj", "'layers.0.mlp.up_prj' names no module, parameter or operation of the model. Close"),
        ("up_proj", "'up_proj' names 2 modules: model.layers.0.mlp.up_proj, model.layers.1.mlp.up_proj. Name one"),
        ("layers.*.up_proj.weight", "names 2 parameters: "),
        ("layers.0.mlp", "model.layers.0.mlp holds several modules: model.layers.0.mlp.gate_proj, "),
        ("§", "The modules are "),
    ],
)
def test_a_name_that_means_none_or_several_is_refused(llama: Plan, name: str, text: str) -> None:
    with pytest.raises(InputError) as raised:
        llama.explain(name)
    assert text in str(raised.value)


def test_a_name_close_to_a_wrong_one_is_offered(llama: Plan) -> None:
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.up_proj"):
        llama.explain("model.layers.0.mlp.up_prj")


def test_a_pinned_decision_names_the_annotation_that_leaves_no_other() -> None:
    model = annotate(Net(), "layers.0.up", tp="column")
    found = plan_of(model, tp=2).explain("layers.0.up")
    assert found.runner_up is None and found.num_allowed == 1 < found.num_strategies
    assert 'pinned by annotate("layers.0.up", tp="column")' in found.reason
    assert f'of {found.num_strategies} strategies, 1 left by annotate("layers.0.up", tp="column")' in str(found)
    assert {each.reason for each in found.alternatives} == {"ruled out by annotations"}


def test_a_decision_with_one_strategy_has_no_runner_up() -> None:
    plan = plan_of(Net(), tp=2)
    number = next(n for n, d in enumerate(context_of(plan).space.decisions) if len(d.candidates.strategies) == 1)
    found = plan.explain(context_of(plan).space.decisions[number].name)
    assert found.runner_up is None and "there is no other strategy" in found.reason
    assert "no runner-up: there is no other strategy" in str(found)


def test_a_limit_that_decides_is_told_with_what_would_be_best_without_it() -> None:
    space = space_of(TwoLinearsSquared(), (X_BD,), load("h100"))
    free, _ = make_plan(space, {})
    plan, _ = make_plan(space, {}, Settings(Memory(int(0.7 * free.peak_bytes))))
    found = plan.explain("up")
    assert found.without_limit == ("tp=replicated", free.seconds) and free.seconds < plan.seconds
    assert "memory decides: without the limit it would be tp=replicated" in str(found)
    assert free.explain("up").without_limit is None
    replicated = next(each for each in found.alternatives if each.role == "replicated")
    assert replicated.seconds is None and replicated.reason.startswith("the memory limit is ")
    assert replicated.reason in " ".join(str(found).split())


class RemainingProblem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x).relu())
        return x


@pytest.fixture(scope="module")
def limited() -> Plan:
    space = space_of(RemainingProblem(), (torch.zeros(64, 64),), load("h100"), dp=2, tp=2)
    return make_plan(space, {}, Settings(Memory(int(0.6 * make_plan(space, {})[0].peak_bytes))))[0]


def test_within_a_limit_only_the_runner_up_is_searched_for(limited: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []
    search = planner.best_within
    monkeypatch.setattr(planner, "best_within", lambda *args: (limits.append(args[-1].tensor_limit), search(*args))[1])
    found = limited.explain("layers.1")
    assert limited.multiplier and found.runner_up is not None and len(found.alternatives) > 4
    assert sum(limit is not None for limit in limits) <= len(context_of(limited).settings.depths)


@pytest.mark.slow
def test_within_a_limit_no_plan_with_another_role_is_below_its_bound(limited: Plan) -> None:
    found = limited.explain("layers.1")
    requested = [each for each in found.alternatives if each.role in ROLES and each.seconds is not None]
    assert {each.is_bound for each in requested} == {True, False}
    for each in requested:
        assert each.seconds is not None
        again = limited.what_if("layers.1", **{each.axis: each.role})
        if each.is_bound:
            assert limited.seconds < each.seconds <= again.seconds < 1.2 * each.seconds
            assert re.search(rf"{each.axis}={each.role} +≥ \+", str(found))
        else:
            assert again.seconds == pytest.approx(each.seconds, rel=1e-9)
    assert str(found).endswith("≥: no plan with that role takes less; what_if plans it")


@pytest.mark.slow
def test_within_a_limit_the_same_question_has_the_same_answer(limited: Plan) -> None:
    assert str(limited.explain("layers.1")) == str(limited.explain("layers.1"))
    one, other = (limited.what_if("layers.*", tp="row") for _ in range(2))
    assert (one.seconds, one.bound, one.choices) == (other.seconds, other.bound, other.choices)


@pytest.mark.slow
def test_no_plan_within_the_limit_and_without_the_strategy_is_better_than_the_runner_up() -> None:
    space = space_of(TwoLinears(), (X_BD,), load("cpu"))
    limit = int(0.7 * make_plan(space, {})[0].peak_bytes)
    plan, choices = make_plan(space, {}, Settings(Memory(limit)))
    memory, number = context_of(plan).memory_model, space.index[plan.explain("up", False).decision]
    candidate_lists = [range(len(decision.candidates.strategies)) for decision in space.decisions]
    best = min(
        evaluate(space, each)
        for each in itertools.product(*candidate_lists)
        if each[number] != choices[number] and memory_use(memory, each, {})[0] <= limit
    )
    second = plan.explain("up", alternatives=False).runner_up
    assert second is not None and second.memory.after <= limit
    assert second.plan.bound <= best * (1 + 1e-9) and best <= second.step.after * (1 + 1e-9)
    if second.plan.gap > SHOWN_GAP:
        assert f"not proven best: at most {format_share(second.plan.gap)} of it could be saved" in str(
            plan.explain("up", False)
        )
    else:
        assert second.step.after == pytest.approx(best, rel=1e-9)


def test_a_strategy_without_which_nothing_fits_says_so() -> None:
    space = space_of(TwoLinears(), (X_BD,), load("cpu"))
    least = 2304  # bytes, of parameters in halves and their state
    plan, _ = make_plan(space, {}, Settings(Memory(least)))
    found = [plan.explain(row.name, alternatives=False) for row in plan.rows]
    reason = "without this strategy there is no plan: the memory limit is 2.30 kB (2304 bytes) per device, but every "
    forced = [each for each in found if each.reason.startswith(reason)]
    assert forced and all(each.runner_up is None and "no runner-up: without this" in str(each) for each in forced)


def test_an_equally_fast_runner_up_is_called_arbitrary(explained: Explanation) -> None:
    second = explained.runner_up
    assert second is not None
    tied = replace(explained, runner_up=replace(second, step=Amount(explained.seconds, explained.seconds)))
    assert "equally fast: the choice between them is arbitrary" in str(tied)
    assert "equally fast" not in str(explained)


def test_a_loaded_plan_says_how_it_is_requested(llama: Plan) -> None:
    loaded = Plan.from_json(llama.to_json())
    for ask in (lambda: loaded.explain("lm_head"), lambda: loaded.what_if("lm_head", tp="row"), loaded.verify):
        with pytest.raises(PlanError, match=r"plan\.attach\(model, example_inputs\)"):
            ask()
