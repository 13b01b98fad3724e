"""Recurrent nets, bags, spectra, weight norms and attention with one key head: split, and as on one process."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.capture.export import capture
from autopar.ir.program.calls import is_call
from autopar.ir.sharding.operation import Call
from autopar.strategies.ruled import ruled
from tests.support.further_families import FURTHER
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, Case, check
from tests.support.ranks import Ranks

MAIN = {
    "lstm": ("lstm_input", "cross_entropy_loss_default"),
    "gru": ("gru_input", "gru_cell_default", "gru_cell_default_2", "cross_entropy_loss_default"),
    "weight_norm": ("conv1d_default", "batch_norm_default", "prelu_default", "conv_transpose1d_default"),
    "recommender": ("embedding_bags_default", "embedding_bags_default_1", "soft_margin_loss_default"),
    "spectra": ("fft_fft2_default", "fft_rfft_default", "cdist_default", "triplet_margin_loss_default"),
    "falcon": ("scaled_dot_product_attention_default", "cross_entropy_loss_default"),
}
"""Family → names of the calls in which it does most of its computing."""
PRESETS = (None, "data_parallel")


def options(preset: str | None) -> dict[str, Any]:
    return {"hardware": SLOW_DEVICES} | ({"strategy": preset} if preset else {})


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", FURTHER)
def test_a_further_family_trains_on_ranks_as_on_one_process(ranks: Ranks, family: str, preset: str | None) -> None:
    found, *_ = check(ranks, Case(family, (2, 2), options=options(preset), steps=3))
    assert {"dp", "tp"} <= {axis for kind, axis, role in found.roles if kind == "call" and role != "replicated"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", FURTHER)
def test_what_a_further_family_computes_most_with_is_split(family: str, preset: str | None) -> None:
    args, kwargs = FURTHER[family].inputs(0)
    mesh = autopar.Mesh({"dp": 2, "tp": 2})
    plan = autopar.plan(FURTHER[family].build(), mesh, kwargs or args, **by_flag(**options(preset)))
    roles = {row.name: row.roles for row in plan.rows if row.kind == "call"}
    for name in MAIN[family]:
        if preset:
            assert roles[name] == ("data", "data"), name
        else:
            assert not {"replicated", "partial"} & set(roles[name]), f"{name}: {roles[name]}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", FURTHER)
def test_every_call_of_a_further_family_has_a_rule(family: str) -> None:
    args, kwargs = FURTHER[family].inputs(0)
    program = capture(FURTHER[family].build(), args, kwargs, training=True)
    found = [ruled(Call.of(node)) for node in program.graph.nodes if is_call(node)]
    assert not [f"{one.call.target}: {one.reason}" for one in found if one.reason]
