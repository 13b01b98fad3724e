"""Claims of a plan are verified without solving, and every claim that was tampered with is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from autopar.capture.export import capture
from autopar.console.units import format_seconds
from autopar.costs.hardware.load import load
from autopar.costs.plans.plan import Plan
from autopar.costs.space.build import build_space
from autopar.errors import AnnotationError, PlanError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.annotations.annotate import annotate, annotations_of, pins_of
from autopar.planning.memory_limit import memory_limit
from autopar.planning.options.groups import Memory
from autopar.planning.planner import make_plan
from autopar.planning.settings import Settings, context_of
from autopar.views.inspection.verify import check
from tests.support.families import FAMILIES
from tests.support.pinned import IDS_BS, Net
from tests.support.planned import X_BD, TwoLinearsSquared, space_of

H100 = load("h100")


def plan_of(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], mode: str = "auto") -> Plan:
    """The best plan on a mesh of 2×2 under the model's annotations."""
    space = build_space(capture(model, *inputs), Mesh({"dp": 2, "tp": 2}, "h100"), H100)
    annotations = annotations_of(model)
    plan, _ = make_plan(space, pins_of(annotations, space, mode, {}))  # type: ignore[arg-type]
    return replace(plan, mode=mode, context=replace(context_of(plan), annotations=annotations, mode=mode))


def _split_llama() -> nn.Module:
    """A Llama whose plan moves something however small the model is."""
    model = FAMILIES["llama"].build()
    annotate(model, "*", dp="data")
    return model


@pytest.fixture(scope="module")
def llama() -> Plan:
    plan = plan_of(_split_llama(), FAMILIES["llama"].inputs(0))
    assert plan.traffic
    return plan


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "llama", "gpt2", "resnet"])
def test_a_plan_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    plan = plan_of(family.build(), family.inputs(0))
    for name in ("solve", "search"):
        monkeypatch.setattr(memory_limit, name, None)  # whatever solves fails
    found = plan.verify()
    assert found.ok and not found.problems and found.unproven == 0
    assert found.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert found.bound == pytest.approx(plan.bound, rel=1e-9)
    assert found.num_bytes == plan.peak_bytes
    assert str(found).startswith("the plan holds: ")


def test_a_loaded_plan_holds_with_its_model(llama: Plan) -> None:
    family = FAMILIES["llama"]
    loaded = Plan.from_json(llama.to_json())
    attached = loaded.attach(_split_llama(), family.inputs(0)[1])
    assert attached == loaded and attached.verify() == llama.verify()
    assert attached.explain("lm_head", False) == llama.explain("lm_head", False)


def test_a_plan_is_not_attached_to_another_model(llama: Plan) -> None:
    family = FAMILIES["mlp"]
    with pytest.raises(PlanError, match="belongs to another model"):
        llama.attach(family.build(), family.inputs(0)[0])


def test_a_plan_attached_with_other_options_does_not_hold(llama: Plan) -> None:
    family = FAMILIES["llama"]
    loaded = Plan.from_json(llama.to_json()).attach(_split_llama(), family.inputs(0)[1], optimizer="sgd")
    with pytest.raises(PlanError, match=r"it says .*, its choices take "):
        loaded.verify()


def other_choice(plan: Plan) -> dict[str, str]:
    """The choices with another strategy for one of them."""
    number = next(n for n, d in enumerate(context_of(plan).space.decisions) if d.name.startswith("linear"))
    decision = context_of(plan).space.decisions[number]
    other = next(str(s) for s in decision.candidates.strategies if str(s) != plan.choices[decision.name])
    return {**plan.choices, decision.name: other}


TAMPERED = {
    "seconds": lambda plan: replace(plan, seconds=plan.seconds * 0.9, bound=plan.bound * 0.9),
    "bound": lambda plan: replace(plan, bound=plan.bound * 1.1),
    "peak": lambda plan: replace(plan, peak_bytes=plan.peak_bytes - 1),
    "limit": lambda plan: replace(plan, memory_limit=plan.peak_bytes - 1),
    "traffic": lambda plan: replace(plan, traffic={key: num_bytes + 1 for key, num_bytes in plan.traffic.items()}),
    "choices": lambda plan: replace(plan, choices=other_choice(plan)),
    "rows": lambda plan: replace(plan, rows=(replace(plan.rows[0], roles=("column", "row")), *plan.rows[1:])),
    "row order": lambda plan: replace(plan, rows=plan.rows[::-1]),
    "transfers": lambda plan: replace(plan, rows=tuple(replace(row, transfers=()) for row in plan.rows)),
    "memory": lambda plan: replace(plan, memory=replace(plan.memory, parts={"parameters": 1})),
    "fingerprint": lambda plan: replace(plan, fingerprint="0"),
    "mesh": lambda plan: replace(plan, mesh=Mesh({"dp": 2, "tp": 2}, "a100")),
    "recompute": lambda plan: replace(plan, recompute={"no.such.layer": "full"}),
    "another mesh": lambda plan: replace(plan, mesh=Mesh({"dp": 4, "tp": 2}, "h100")),
    "no such strategy": lambda plan: replace(plan, choices={**plan.choices, "linear_default": "z z"}),
}


@pytest.mark.parametrize("claim", TAMPERED)
def test_a_claim_that_was_tampered_with_is_found(claim: str, llama: Plan) -> None:
    tampered = TAMPERED[claim](llama)
    assert tampered != llama
    with pytest.raises(PlanError):
        tampered.verify()


def test_a_plan_worse_than_the_best_does_not_pass_for_the_best(llama: Plan) -> None:
    worse = llama.what_if("mlp.down_proj", tp="row")
    claimed = replace(worse, context=llama.context)
    with pytest.raises(PlanError, match="it says no plan takes less than"):
        claimed.verify()
    honest = replace(claimed, bound=llama.bound)
    assert honest.verify().bound == pytest.approx(llama.seconds, rel=1e-9)


def test_a_choice_that_an_annotation_rules_out_is_found(llama: Plan) -> None:
    pinned = llama.what_if("layers.0.mlp.down_proj", tp="row")
    found = check(replace(llama, bound=0.0), context_of(pinned))
    assert "which its annotations rule out" in found.problems[0]
    assert "and what keeps to its pins and limit at least" in found.problems[1]


def test_all_claims_that_do_not_hold_are_in_one_error(llama: Plan) -> None:
    with pytest.raises(PlanError) as raised:
        replace(llama, seconds=1.0, peak_bytes=1).verify()
    assert str(raised.value) == (
        f"the plan does not hold: it says 1.00 s, its choices take {format_seconds(llama.seconds)}; it says 1 bytes "
        f"per device, its choices take {llama.peak_bytes}. Plan again, or load a plan that was not changed."
    )


# What would a plan be.


@pytest.fixture(scope="module")
def net() -> Plan:
    return plan_of(Net(), ((IDS_BS,), {}))


@pytest.mark.parametrize(
    ("pattern", "specified"),
    [
        ("layers.*.down", {"tp": "row"}),
        ("layers.0.up", {"dp": "column", "tp": None}),
        ("head", {"slices": ((2, 1, 1), (2, 1))}),
        ("layers.*.up.weight", {"storage": "dp"}),
    ],
)
def test_what_if_is_the_plan_of_the_annotated_model(pattern: str, specified: dict[str, Any], net: Plan) -> None:
    before = net.to_json()
    requested = net.what_if(pattern, **specified)
    assert requested == plan_of(annotate(Net(), pattern, **specified), ((IDS_BS,), {}))
    assert requested.seconds >= net.seconds * (1 - 1e-12)
    assert requested.verify().ok and net.to_json() == before and context_of(net).annotations == ()


def test_what_is_requested_one_after_the_other_is_what_is_requested_together(net: Plan) -> None:
    one, two = annotations_of(annotate(annotate(Net(), "layers.*.up", tp="column"), "head", dp="data"))
    assert (
        net.what_if(one).what_if(two) == net.what_if(one, two) == net.what_if("layers.*.up", tp="column").what_if(two)
    )


def test_what_is_requested_does_not_loosen_pins_that_no_annotation_made(net: Plan) -> None:
    space, name = context_of(net).space, next(row.name for row in net.rows if row.module == "layers.0.up")
    decision = space.decisions[space.index[name]]
    rows = [[decision.role(choice, axis) for axis in range(2)] for choice in range(len(decision.candidates.strategies))]
    pinned, _ = make_plan(space, {space.index[name]: np.array([dp == "row" for dp, _ in rows])})
    requested = pinned.what_if("layers.0.up", tp="column")
    assert [row.roles for row in requested.rows if row.name == name] == [("row", "column")]
    assert net.what_if("layers.0.up", tp="column").seconds <= requested.seconds


def test_a_manual_plan_takes_what_is_stated_in_place_of_data_parallel() -> None:
    manual = plan_of(Net(), ((IDS_BS,), {}), mode="manual")
    requested = manual.what_if("layers.0.up", tp="column")
    model = annotate(Net(), "layers.0.up", tp="column")
    assert requested == plan_of(model, ((IDS_BS,), {}), mode="manual")


@pytest.mark.parametrize(
    ("specified", "options", "text"),
    [
        (("nowhere",), {"tp": "row"}, "matches"),
        (("layers.0.up",), {"pp": "row"}, 'the mesh has no axis "pp"'),
        (("layers.0.up",), {}, "the annotation is empty"),
        ((), {}, "give a pattern and an annotation of it"),
        (("head", "layers.0.up"), {"tp": "row"}, "give a pattern"),
    ],
)
def test_what_cannot_be_requested_is_refused(specified: tuple, options: dict[str, Any], text: str, net: Plan) -> None:
    with pytest.raises(AnnotationError) as raised:
        net.what_if(*specified, **options)
    assert text in str(raised.value)


def test_what_contradicts_an_annotation_names_both() -> None:
    plan = plan_of(annotate(Net(), "layers.0.up", tp="column"), ((IDS_BS,), {}))
    with pytest.raises(AnnotationError) as raised:
        plan.what_if("layers.0.up", tp="row")
    assert 'tp="row"' in str(raised.value) and 'tp="column"' in str(raised.value)


# Under a memory limit.


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_a_plan_within_a_limit_holds_with_a_bound_of_its_own(share: float) -> None:
    space = space_of(TwoLinearsSquared(), (X_BD,), H100)
    free, _ = make_plan(space, {})
    plan, _ = make_plan(space, {}, Settings(Memory(int(share * free.peak_bytes))))
    found = plan.verify()
    assert free.seconds * (1 - 1e-9) <= found.bound <= plan.bound * (1 + 1e-9)
    assert found.bound + found.unproven == pytest.approx(plan.bound, rel=1e-8)
    assert found.num_bytes <= int(share * free.peak_bytes)


def test_a_multiplier_that_was_tampered_with_proves_no_more() -> None:
    space = space_of(TwoLinearsSquared(), (X_BD,), H100)
    plan, _ = make_plan(space, {}, Settings(Memory(int(0.7 * make_plan(space, {})[0].peak_bytes))))
    multipliers = [factor * plan.multiplier for factor in (-1.0, 0.0, 0.5, 1.0, 2.0)]
    bounds = [replace(plan, multiplier=multiplier).verify().bound for multiplier in multipliers]
    assert plan.multiplier > 0 and max(bounds) <= plan.seconds * (1 + 1e-9)
    assert bounds[3] >= max(bounds) * (1 - 1e-6) and bounds[0] == bounds[1] < bounds[3]


@pytest.mark.slow
def test_a_loaded_plan_within_a_limit_holds_with_a_bound_that_knows_no_limit() -> None:
    family = FAMILIES["llama"]
    space = space_of(family.build(), family.inputs(0)[1], H100, dp=2)
    free, _ = make_plan(space, {})
    plan, _ = make_plan(space, {}, Settings(Memory(int(0.8 * free.peak_bytes))))
    loaded = Plan.from_json(plan.to_json()).attach(family.build(), family.inputs(0)[1], hardware="h100")
    found = loaded.verify()
    assert found.bound == pytest.approx(free.seconds, rel=1e-9)
    assert found.unproven == pytest.approx(plan.bound - free.seconds, rel=1e-6) and found.unproven > 0
    assert "less than the search found" in str(found)
    for claim in ({"seconds": plan.seconds * 0.99}, {"memory_limit": plan.peak_bytes - 1}, {"bound": plan.seconds * 2}):
        with pytest.raises(PlanError):
            replace(loaded, **claim).verify()


def test_a_plan_that_computes_again_holds_and_not_without_it() -> None:
    family = FAMILIES["llama"]
    space = space_of(family.build(), family.inputs(0)[1], H100, dp=2)
    plan, _ = make_plan(space, {}, Settings(Memory(recompute="full")))
    assert plan.verify().ok and set(plan.recompute.values()) == {"full"}
    with pytest.raises(PlanError, match=r"it says .*, its choices take "):
        replace(plan, recompute=dict.fromkeys(plan.recompute, "none")).verify()
