"""Rows of experts are resident where they are sent from and where they arrive, while other calls run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.costs.memory.model import MemoryModel
from autopar.costs.memory.moments import KINDS
from autopar.costs.memory.peak import bytes_by_moment, memory_use
from autopar.ir.program.effects import EXCHANGES
from autopar.planning.settings import context_of
from autopar.views.formulas.formulas import with_formulas
from autopar.views.formulas.reprice import reprice
from tests.costs.space.test_exchanges import NUM_DEVICES, SHARED, planned
from tests.support.divided_experts import BATCH, LENGTH, D, Form

ROWS = BATCH * LENGTH * SHARED.top_k * D * torch.float64.itemsize // NUM_DEVICES


@pytest.mark.parametrize("learns", [True, False])
def test_rows_count_twice_during_the_calls_that_run_meanwhile_and_nowhere_else(learns: bool) -> None:
    plan = planned(SHARED if learns else replace(SHARED, frozen=("",)), 1e8)
    context = context_of(plan)
    memory, space = context.memory_model, context.space
    alone = MemoryModel(replace(space, meanwhile={}), memory.microbatches, memory.prefetch)
    found, expected = (bytes_by_moment(each, context.choices, plan.recompute) for each in (memory, alone))
    moments, places = memory.presence.moments, np.zeros(len(memory.lifetimes.calls), dtype=int)
    during = [space.index[node.name] for nodes in space.meanwhile.values() for node in nodes]
    places[[memory.lifetimes.position[number] for number in during]] = 2 * ROWS
    assert (memory.live is None) == learns and len(space.meanwhile) == 4
    assert (found - expected == (places * moments).reshape(-1)).all()
    assert moments.shape == (len(KINDS), len(places))


def test_formulas_count_rows_on_their_way() -> None:
    plan = with_formulas(planned(replace(SHARED, hidden=2), 1e8))
    context = context_of(plan)
    peak, _, moment = memory_use(context.memory_model, context.choices, plan.recompute)
    fullest = context.space.decisions[
        context.memory_model.lifetimes.calls[context.memory_model.presence.moment(moment).place]
    ]
    assert any(fullest.node in nodes for nodes in context.space.meanwhile.values())
    assert reprice(plan, dict(plan.symbols)).memory["memory"] == peak


def test_without_a_shared_expert_no_rows_count_besides() -> None:
    memory = context_of(planned(Form(num_layers=2), 1e8)).memory_model
    exchanges = [n for n, each in enumerate(memory.space.decisions) if each.node.target in EXCHANGES]
    assert exchanges
    assert not any(memory.tensors.travelling(number) is not None for number in exchanges)


def test_the_busiest_device_has_more_rows_on_one_side_of_an_exchange() -> None:
    context = context_of(planned(SHARED, 1e8))
    memory, space = context.memory_model, context.space
    alone = MemoryModel(replace(space, meanwhile={}), memory.microbatches, memory.prefetch)
    last = [space.decisions[space.index[nodes[-1].name]].name for nodes in space.meanwhile.values()]
    for imbalance, rows in ((1.0, 2.0), (1.5, 2.5)):
        found, without = (
            {
                (each.name, each.backward): each.num_bytes
                for each in memory_use(model, context.choices, {}, imbalance)[1].timeline
            }
            for model in (memory, alone)
        )
        for name in last:
            assert found[name, False] - without[name, False] == rows * ROWS
