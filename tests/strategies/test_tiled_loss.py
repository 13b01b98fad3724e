"""The place of a loss in tiles among columns and rows: a head of its own, where its classes divide."""

from __future__ import annotations

import pytest

import autopar
from autopar.capture.export import capture
from autopar.planning.settings import context_of
from autopar.strategies.presets.regions import LOSS, regions_of
from autopar.strategies.roles import RoledProgram
from tests.support.loss_alone import LOSS_ALONE, Reader, reading

NAME = "linear_cross_entropy_default"


@pytest.mark.parametrize(("num_classes", "parts", "divides"), [(24, 4, True), (9, 4, True), (3, 4, False)])
def test_a_preset_of_columns_splits_its_classes_where_they_divide(num_classes: int, parts: int, divides: bool) -> None:
    program = capture(Reader(num_classes), (), reading(num_classes=num_classes), loss_tiles=2)
    regions = regions_of(RoledProgram.of(program), parts)
    assert regions.names(LOSS) == [NAME] * divides
    assert regions.factors.get(NAME) == ("o" if divides else None)
    assert (NAME in regions.heads) is divides


def test_its_dims_have_the_roles_that_annotations_name() -> None:
    program = capture(Reader(), (), reading(), loss_tiles=2)
    assert RoledProgram.of(program).calls[NAME].roles == {"a": "data", "b": "sequence", "o": "column"}


def test_positions_that_attention_shards_by_zigzag_stay_zigzag() -> None:
    family = LOSS_ALONE["llama_loss"]
    mesh = autopar.Mesh({"cp": 2})
    plan = autopar.plan(family.build(), mesh, family.inputs(0)[1], strategy="ring", memory=autopar.Memory(loss_tiles=2))
    space = context_of(plan).space
    decision = space.decisions[space.index[NAME]]
    strategy = next(each for each in decision.candidates.strategies if str(each) == plan.choices[NAME])
    assert [str(layout) for layout in strategy.inputs] == ["Z(1)", "R", "Z(1)"]
