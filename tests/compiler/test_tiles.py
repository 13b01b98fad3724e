"""Losses in tiles where a memory limit asks for them: without a word, and only there."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autopar
from autopar.benchmarking.meters import held_in_training, peak_bytes
from autopar.compiler import tiles
from autopar.errors import InfeasibleError
from autopar.plans.plan import Plan
from tests.support.loss_alone import Reader, flattened, reading
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.training import SLOW_DEVICES, Steps, fault_of, train_alone, train_on_ranks

CLASSES, SIZE = 512, 16
NAME = "linear_cross_entropy_default"


def batch(seed: int = 0) -> dict[str, Tensor]:
    return reading(seed, batch=8, sequence=32, num_classes=CLASSES)


def planned(model: Reader | None = None, given: dict[str, Tensor] | None = None, **options: Any) -> Plan:
    return autopar.plan(model or Reader(CLASSES, SIZE), autopar.Mesh({"dp": 2}), given or batch(), **options)


def test_a_plan_that_fits_as_it_is_has_no_tiles() -> None:
    free = planned()
    assert planned(memory=free.peak_bytes).choices == free.choices


@pytest.mark.parametrize("share", [0.95, 0.6])
def test_a_limit_that_costs_time_or_leaves_nothing_takes_them(share: float) -> None:
    limit = int(share * planned().peak_bytes)
    found = planned(memory=limit)
    assert NAME in found.choices
    assert found.peak_bytes <= limit
    assert any("is taken in" in note for note in found.notes)
    try:
        assert found.seconds < planned(memory=limit, loss_tiles=False).seconds
    except InfeasibleError:
        assert share == 0.6


def test_logits_that_are_a_small_part_of_the_limit_are_not_worth_a_second_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = int(0.95 * planned().peak_bytes)
    logits = 8 * 32 // 2 * CLASSES * 4
    for share, in_tiles in ((0.99, True), (1.01, False)):
        monkeypatch.setattr(tiles, "WORTHWHILE", share * logits / limit)
        assert (NAME in planned(memory=limit).choices) == in_tiles


def test_there_are_as_few_as_leave_less_of_logits_than_of_gradients() -> None:
    found = planned(memory=int(0.6 * planned().peak_bytes))
    rows = 8 * 32 // 2
    logits, gradients = rows * CLASSES, (rows + CLASSES) * SIZE
    assert f"(loss_tiles={-(-logits // gradients)})" in found.descriptions[NAME]


def returning_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return flattened(logits, labels), logits


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("loss", [returning_logits, smoothed])
def test_nothing_is_said_of_losses_that_cannot_be_taken_so(loss: Any) -> None:
    model = Reader(CLASSES, SIZE, loss=loss)
    limit = int(0.5 * planned(model).peak_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InfeasibleError, match="every choice needs at least"):
            planned(model, memory=limit)


def test_where_tiles_do_not_fit_either_the_refusal_is_that_of_the_model_as_it_is() -> None:
    texts = []
    for asked in (None, False):
        with pytest.raises(InfeasibleError) as caught:
            planned(memory=1000, loss_tiles=asked)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_a_saved_plan_brings_its_tiles_along(tmp_path: Path) -> None:
    made = planned(memory=int(0.6 * planned().peak_bytes))
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.attach(Reader(CLASSES, SIZE), batch()).verify().ok


def _within(share: float) -> tuple[int, int, int, bool]:
    """Bytes at the highest moment of a step on this rank, those of the plan, the limit, and whether it has tiles."""
    model, given = Reader(4096, 64), reading(batch=8, sequence=256, num_classes=4096)
    limit = int(share * planned(model, given).peak_bytes)
    compiled = autopar.compile(model, mesh((2,), ("dp",)), given, memory=limit)
    optimizer = torch.optim.AdamW(compiled.parameters())

    def step() -> None:
        compiled(**given).backward()

    step()
    optimizer.step()
    held = lambda: [*held_in_training(compiled, optimizer), *given.values()]  # noqa: E731
    return peak_bytes(step, optimizer.zero_grad, held), compiled.plan.peak_bytes, limit, NAME in compiled.plan.choices


def test_ranks_hold_what_is_predicted_and_no_more_than_the_limit(ranks: Ranks) -> None:
    for found, predicted, limit, in_tiles in ranks.run(_within, 0.4):
        assert in_tiles
        assert predicted == pytest.approx(found, rel=0.05)
        assert found <= 1.05 * limit


@pytest.mark.parametrize("given", [False, True])
def test_ranks_train_as_one_process(given: bool) -> None:
    torch.manual_seed(0)
    model = Reader(CLASSES, SIZE).double()
    alone, steps = copy.deepcopy(model), Steps([batch(seed) for seed in range(2)], "adamw")
    limit = int(0.6 * planned(copy.deepcopy(model), hardware=SLOW_DEVICES).peak_bytes)
    options = {"plan": planned(copy.deepcopy(model), memory=limit)} if given else {"memory": limit}
    found = train_on_ranks(model, steps, {"dp": 2}, options)
    assert fault_of(found, train_alone(alone, steps)) == ""
    assert found.plan is not None and NAME in found.plan.choices
