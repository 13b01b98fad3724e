"""Ring self-attention is offered on request, priced by its scores, and trains as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.costs.plans.plan import Plan
from autopar.costs.space.call_candidates import Candidates
from autopar.errors import AnnotationError, StrategyError
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from tests.costs.space.test_in_order import Text, batch
from tests.support.simulation.training import SLOW_DEVICES, Steps, fault_of, train_alike, train_alone, train_on_ranks

NAME = "ring_self_attention"
REQUESTED = f"s+t via {NAME}"
ATTENTION = "scaled_dot_product_attention"


def planned(model: nn.Module, positions: int = 16, strategy: str | None = None) -> Plan:
    return autopar.plan(model, Mesh({"cp": 2}), batch(positions), strategy=strategy, hardware=SLOW_DEVICES)


def requested(specified: str) -> nn.Module:
    return autopar.annotate(Text(), ATTENTION, cp=f"factor:{specified}")


def candidates_of(plan: Plan) -> Candidates:
    space = context_of(plan).space
    return space.decisions[space.index[f"{ATTENTION}_default"]].candidates


def test_it_stands_among_candidates_only_where_it_is_requested() -> None:
    before = [str(each) for each in candidates_of(planned(Text())).strategies]
    assert "s+t" in before and not any(NAME in each for each in before)
    plan = planned(requested(REQUESTED))
    names = [str(each) for each in candidates_of(plan).strategies]
    assert [each for each in names if NAME not in each] == before and REQUESTED in names
    assert plan.choices[f"{ATTENTION}_default"] == REQUESTED
    assert planned(requested("s+t")).choices[f"{ATTENTION}_default"] == "s+t"
    assert set(planned(Text(), strategy=NAME).choices.values()) >= {REQUESTED}


def test_an_implementation_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(AnnotationError, match=r'which offers .*"factor:s", .*"factor:s[+]t" on axis cp. Name one of'):
        planned(requested("s+t via a_gather"))
    both = autopar.annotate(requested(REQUESTED), f"%{ATTENTION}_default", cp="factor:s+t via a_gather")
    with pytest.raises(
        AnnotationError, match=rf'"factor:s", .*"factor:s[+]t", "factor:s[+]t via {NAME}" on axis cp. N'
    ):
        planned(both)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mesh", "causal", "positions"),
    [({"cp": 2}, False, 14), ({"cp": 4}, True, 16), ({"cp": 4}, True, 12), ({"dp": 2, "cp": 2}, True, 16)],
    ids=["not causal", "zigzag", "in order", "with samples"],
)
def test_it_trains_as_one_process_does(mesh: dict[str, int], causal: bool, positions: int) -> None:
    steps = Steps([batch(positions), batch(positions)])
    expected = train_alone(Text(causal).double(), steps)
    trained = train_on_ranks(Text(causal).double(), steps, mesh, {"strategy": NAME})
    assert fault_of(trained, expected) == ""
    assert trained.plan is not None
    assert trained.plan.choices[f"{ATTENTION}_default"] == ("a0 " if "dp" in mesh else "") + REQUESTED


def test_a_plan_that_has_it_is_loaded_attached_and_run(tmp_path: Path) -> None:
    model = Text().double()
    planned(model, strategy=NAME).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    attached = plan.attach(model, batch(16), hardware=SLOW_DEVICES)
    assert REQUESTED in [str(each) for each in candidates_of(attached).strategies]
    steps = Steps([batch(16)])
    train_alike(Text().double(), steps, {"cp": 2}, {"plan": plan})


def test_scores_that_go_through_memory_are_priced() -> None:
    def forward(positions: int) -> float:
        candidates = candidates_of(planned(Text(), positions, NAME))
        return float(candidates.forward_seconds[[str(each) for each in candidates.strategies].index(REQUESTED)])

    tensors, scores = 4 * 2 * 8 * 8 * 4, 2 * 2 * 8 * 16 * 4  # of half of 16 positions: 2 samples of 2 heads
    assert forward(16) == pytest.approx((tensors + 6 * scores) / SLOW_DEVICES.product_bytes_per_s)
    assert forward(32) == pytest.approx((2 * tensors + 4 * 6 * scores) / SLOW_DEVICES.product_bytes_per_s)


def test_formulas_say_what_it_costs() -> None:
    plan = planned(Text(), strategy=NAME)
    again = plan.reprice()
    assert again.seconds == pytest.approx(plan.seconds, rel=1e-9) and again.memory["memory"] == plan.peak_bytes
    assert plan.reprice(sequence=32).seconds == pytest.approx(planned(Text(), 32, NAME).seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("why", "dropout_p", "mask"),
    [
        ("has dropout, which is worked out block by block, and never has whole rows; ring takes it", 0.1, None),
        ("has a mask that is worked out block by block, and never has whole rows; ring takes it", 0.0, "window"),
    ],
)
def test_what_has_no_whole_rows_is_refused(why: str, dropout_p: float, mask: str | None) -> None:
    class Other(Text):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.table(x).unflatten(-1, (2, -1)).transpose(1, 2)
            places = torch.arange(x.shape[1])
            seen = places.unsqueeze(-1) - places < 4 if mask else None
            h = F.scaled_dot_product_attention(h, h, h, seen, dropout_p).transpose(1, 2).flatten(2)
            return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    size = 8192 if mask else 16  # masks are read back where they are large
    with pytest.raises(StrategyError) as caught:
        planned(Other(), size, NAME)
    assert f"{why}. Use gather_kv or ulysses or megatron_sequence." in str(caught.value)
