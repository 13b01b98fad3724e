"""A plan says where its figures hang on routing, and of experts that it could not find."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InputError, PlanError
from autopar.planning.expert_notes import BALANCED
from tests.support.experts import WithExperts, grouped
from tests.support.simulation.training import SLOW_DEVICES

MESH = autopar.Mesh({"ep": 2})
INPUTS = {"x": torch.zeros(4, 4, 8), "labels": torch.zeros(4, 4, dtype=torch.int64)}


@pytest.mark.parametrize(("choice", "expected"), [("factor:a0", False), ("factor:x", True), ("factor:a0+x", True)])
def test_a_plan_says_where_rows_are_those_of_balanced_routing(choice: str, expected: bool) -> None:
    model = WithExperts()
    autopar.annotate(model, "experts.dispatch", ep=choice)
    plan = autopar.plan(model, MESH, INPUTS, hardware=SLOW_DEVICES)
    assert (BALANCED in plan.notes, BALANCED in " ".join(str(plan).split())) == (expected, expected)


def test_padded_rows_are_priced_in_bytes_seconds_and_memory() -> None:
    model = autopar.annotate(WithExperts(), "experts.dispatch", ep="factor:a0+x")
    plans = [
        autopar.plan(model, MESH, INPUTS, hardware=SLOW_DEVICES, experts=experts)
        for experts in (autopar.Experts(), autopar.Experts(padded=2.0), autopar.Experts(imbalance=2.0))
    ]
    own, padded, uneven = ({(t.collective, t.num_bytes) for row in p.rows for t in row.transfers} for p in plans)
    counts = [("all_to_all", 8 * 4)]
    sent = [{num_bytes for name, num_bytes in each - {*counts} if name == "all_to_all"} for each in (own, padded)]
    assert own == uneven and sent[1] == {2 * each for each in sent[0]}
    assert plans[1].seconds == pytest.approx(plans[2].seconds) and plans[1].seconds > plans[0].seconds
    assert plans[1].peak_bytes == plans[2].peak_bytes > plans[0].peak_bytes
    assert any(note.startswith("each device has room for 2 times its share") for note in plans[1].notes)
    assert plans[1].attach(model, INPUTS, hardware=SLOW_DEVICES, experts=autopar.Experts(padded=2.0)).verify().ok
    sent, priced = (plans[1].reprice(batch=size) for size in (4, 8))
    exchanged, counts = ("all_to_all", "ep"), 8 * 4
    assert sent.traffic == plans[1].traffic and sent.seconds == pytest.approx(plans[1].seconds, rel=1e-4)
    assert priced.traffic[exchanged] - counts == 2 * (sent.traffic[exchanged] - counts)
    with pytest.raises(PlanError, match=r"dispatch \(padded=2.0\)"):
        plans[1].attach(model, INPUTS, hardware=SLOW_DEVICES)


def test_moves_of_padded_rows_have_the_bytes_of_the_padding() -> None:
    model = WithExperts()
    autopar.annotate(model, "experts.dispatch", ep="factor:a0+x", tp="factor:-")
    autopar.annotate(model, "experts", ep="expert", tp="row")
    mesh = autopar.Mesh({"ep": 2, "tp": 2})
    plans = [
        autopar.plan(model, mesh, INPUTS, hardware=SLOW_DEVICES, experts=experts)
        for experts in (autopar.Experts(), autopar.Experts(padded=1.5))
    ]
    own, padded = (plan.traffic["all_reduce", "tp"] for plan in plans)
    assert padded == 1.5 * own
    assert plans[1].reprice().traffic == plans[1].traffic


def test_padded_rows_are_refused_with_what_contradicts_them() -> None:
    with pytest.raises(InputError, match="says twice how many rows a device has"):
        autopar.plan(WithExperts(), MESH, INPUTS, experts=autopar.Experts(padded=2.0, imbalance=1.5))
    with pytest.raises(InputError, match=r"Experts\(padded=2\) pads the rows of sorted experts, and"):
        autopar.plan(nn.Linear(8, 8), MESH, (torch.zeros(16, 8),), experts=autopar.Experts(padded=2.0))


class Unknown(nn.Module):
    """Experts whose rows lie in the order of experts from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, rows: Tensor) -> Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32) * 4
        return grouped(rows, self.weight, ends).square().sum()


def test_experts_in_an_unknown_form_are_warned_of_with_their_place_and_cost() -> None:
    model = nn.Sequential(Unknown())
    with pytest.warns(UserWarning, match=r"the experts in 0 \(\d+% of the FLOPs\) are written in a form"):
        autopar.plan(model, MESH, (torch.zeros(16, 8),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".* splits nothing")  # the models are tiny
        autopar.plan(model, autopar.Mesh({"ep": 1}), (torch.zeros(16, 8),))
        autopar.plan(WithExperts(), MESH, INPUTS)


def test_a_plan_says_its_capacity_and_is_none_of_a_model_with_another() -> None:
    plan = autopar.plan(
        WithExperts(), MESH, INPUTS, experts=autopar.Experts(capacity_factor=1.25)
    )  # of 4 positions, 2 of 4 experts each
    specified = "each of 4 experts takes at most 3 of the 8 rows of each sample (capacity_factor=1.25)"
    assert any(note.startswith(specified) for note in plan.notes) and specified in " ".join(str(plan).split())
    assert plan.attach(WithExperts(), INPUTS, experts=autopar.Experts(capacity_factor=1.25)).verify().ok
    for other, here in ((None, "absent here"), (1.5, r"\(capacity_factor=1.5\) .* here")):
        with pytest.raises(PlanError, match=rf"within_capacity \(capacity_factor=1.25\) .* in the plan and .*{here}"):
            plan.attach(WithExperts(), INPUTS, experts=autopar.Experts(capacity_factor=other))


def test_a_capacity_may_be_a_whole_number() -> None:
    plan = autopar.plan(WithExperts(), MESH, INPUTS, experts=autopar.Experts(capacity_factor=1))
    note = "each of 4 experts takes at most 2 of the 8 rows of each sample (capacity_factor=1)"
    assert any(each.startswith(note) for each in plan.notes)
    assert plan.attach(WithExperts(), INPUTS, experts=autopar.Experts(capacity_factor=1.0)).verify().ok
