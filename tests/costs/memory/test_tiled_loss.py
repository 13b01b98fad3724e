"""Losses in tiles in a plan's memory: what stays is gradients, and of logits a tile; a limit takes as many as fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

import autopar
from autopar.costs.memory.moments import COMPUTING, FORWARD
from autopar.costs.memory.peak import memory_use
from autopar.costs.plans.plan import Plan
from autopar.errors import InfeasibleError, PlanError
from autopar.planning.settings import context_of
from tests.support.loss_alone import Reader, reading
from tests.support.moments import at_moment
from tests.support.options import by_flag

CLASSES, SIZE, BATCH, SEQUENCE = 4096, 64, 8, 64
RANK_ROWS = BATCH * SEQUENCE // 2
LOGITS = RANK_ROWS * CLASSES * 4


def planned(mesh: dict[str, int] | None = None, **options: Any) -> Plan:
    batch = reading(batch=BATCH, sequence=SEQUENCE, num_classes=CLASSES)
    return autopar.plan(Reader(CLASSES, SIZE), autopar.Mesh(mesh or {"dp": 2}), batch, **by_flag(**options))


def tiles_of(plan: Plan) -> str:
    return plan.choices["linear_cross_entropy_default"].rpartition("via ")[2]


def test_in_one_piece_there_are_all_logits_of_a_rank_once() -> None:
    # In the forward, together with the gradients of hidden states and weight.
    plan = planned(strategy="data_parallel", loss_tiles=1)
    assert plan.memory is not None
    assert plan.memory.parts["working set"] == LOGITS + RANK_ROWS * SIZE * 4
    assert plan.memory.parts["activations"] > RANK_ROWS * SIZE * 4 + CLASSES * SIZE * 4
    untiled = planned(strategy="data_parallel")
    # Logits and probabilities, and the gradients of both.
    assert untiled.peak_bytes - plan.peak_bytes > 0.7 * LOGITS


def test_a_tile_of_logits_is_all_that_counts_of_them() -> None:
    one, four = (planned(strategy="data_parallel", loss_tiles=number) for number in (1, 4))
    assert one.peak_bytes - four.peak_bytes == pytest.approx(LOGITS * 3 / 4, rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("strategy", "tiles", "kind"),
    [("data_parallel", 1, FORWARD), ("data_parallel", 8, COMPUTING), ("megatron", 64, COMPUTING)],
)
def test_choices_add_up_to_the_peak_at_its_moment(strategy: str, tiles: int, kind: int) -> None:
    plan = planned(strategy=strategy, loss_tiles=tiles)
    context = context_of(plan)
    memory, choices = context.memory_model, context.choices
    peak, _, moment = memory_use(memory, choices, {})
    assert at_moment(memory, choices, moment) == peak == plan.peak_bytes == plan.reprice().memory["memory"]
    assert memory.presence.moment(moment).kind == kind
    if strategy == "megatron":  # of the loss: kept gradients, and these scaled
        assert plan.memory is not None
        assert plan.memory.parts["working set"] == (CLASSES // 2 + 2 * RANK_ROWS) * SIZE * 4 + 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["data_parallel", "megatron", None])
def test_formulas_say_the_same(strategy: str | None) -> None:
    for tiles in (1, 3, 64):
        plan = planned({"dp": 2, "tp": 2}, strategy=strategy, loss_tiles=tiles)
        found = plan.reprice()
        assert found.memory["memory"] == plan.peak_bytes
        assert found.seconds == pytest.approx(plan.seconds)
        twice = plan.reprice(batch=2 * BATCH)
        assert plan.peak_bytes < twice.memory["memory"] < 2 * plan.peak_bytes


def test_a_plan_takes_as_few_tiles_as_fit() -> None:
    free = planned(loss_tiles="always")
    assert tiles_of(free) == "tiles=1"
    within = planned(loss_tiles="always", memory=int(free.peak_bytes * 0.6))
    assert tiles_of(within) in ("tiles=4", "tiles=16")
    assert within.peak_bytes <= free.peak_bytes * 0.6
    assert within.seconds > free.seconds
    with pytest.raises(InfeasibleError, match="every choice needs at least"):
        planned(memory=int(free.peak_bytes * 0.6), loss_tiles="none")


@pytest.mark.parametrize(
    ("options", "specified"),
    [
        (
            {"loss_tiles": 3},
            "the loss of head is taken in 3 tiles of 86 rows: 1.41 MB of logits at a time on each",
        ),
        ({"loss_tiles": 1}, "the loss of head is taken in 1 tile of 256 rows: 4.19 MB .* on each device, of 4.19 MB"),
    ],
)
def test_a_plan_says_how_many_logits_there_are(options: dict[str, Any], specified: str) -> None:
    plan = planned(strategy="data_parallel", **options)
    assert any(re.match(specified, note) for note in plan.notes), plan.notes
    assert not any("loss" in note for note in planned(strategy="data_parallel").notes)


def test_a_plan_with_tiles_is_read_again_and_refused_without_them() -> None:
    batch = reading(batch=BATCH, sequence=SEQUENCE, num_classes=CLASSES)
    plan = Plan.from_json(planned(loss_tiles="always").to_json())
    assert plan.attach(Reader(CLASSES, SIZE), batch, memory=autopar.Memory(loss_tiles="always")).choices == plan.choices
    with pytest.raises(PlanError, match=r"linear_cross_entropy \(loss_tiles=auto\)"):
        plan.attach(Reader(CLASSES, SIZE), batch, memory=autopar.Memory(loss_tiles=4))
