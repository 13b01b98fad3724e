"""Losses in tiles only if a memory limit requires them, without a warning; MLPs in tiles only with "auto"."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.export import Traced, trace
from autopar.compiler import plan_cache, tiles
from autopar.costs.plans.plan import Plan
from autopar.errors import CutOffError, InfeasibleError, PipelineError, TimeLimitError
from autopar.planning import planner
from autopar.planning import request as plan_request
from autopar.planning.memory_limit.answers import Answer
from autopar.planning.memory_limit.memory_limit import best_within
from tests.support.gated_mlps import Gated, tokens
from tests.support.loss_alone import Reader, flattened, reading
from tests.support.measured_bytes import peak_of_step
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.training import SLOW_DEVICES, Steps, train_alike

CLASSES, SIZE = 512, 16
NAME = "linear_cross_entropy_default"


def batch(seed: int = 0) -> dict[str, Tensor]:
    return reading(seed, batch=8, sequence=32, num_classes=CLASSES)


def planned(model: Reader | None = None, given: dict[str, Tensor] | None = None, **options: Any) -> Plan:
    return autopar.plan(model or Reader(CLASSES, SIZE), autopar.Mesh({"dp": 2}), given or batch(), **by_flag(**options))


def test_a_plan_that_fits_as_it_is_has_no_tiles() -> None:
    free = planned()
    assert planned(memory=free.peak_bytes).choices == free.choices


def test_a_model_is_traced_once_for_plans_with_and_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, traced = int(0.95 * planned().peak_bytes), []

    def counted(model: nn.Module, *args: Any, **options: Any) -> Traced:
        traced.append(model)
        return trace(model, *args, **options)

    monkeypatch.setattr(plan_request, "trace", counted)
    assert NAME in planned(memory=limit).choices
    assert len(traced) == 1


@pytest.mark.parametrize("share", [0.95, 0.6])
def test_a_limit_that_costs_time_or_leaves_nothing_takes_them(share: float) -> None:
    limit = int(share * planned().peak_bytes)
    found = planned(memory=limit)
    assert NAME in found.choices
    assert found.peak_bytes <= limit
    assert any("is taken in" in note for note in found.notes)
    try:
        assert found.seconds < planned(memory=limit, loss_tiles="none").seconds
    except InfeasibleError:
        assert share == 0.6


def test_logits_that_are_a_small_part_of_the_limit_are_not_worth_a_second_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = int(0.95 * planned().peak_bytes)
    logits = 8 * 32 // 2 * CLASSES * 4
    for share, in_tiles in ((0.99, True), (1.01, False)):
        monkeypatch.setattr(tiles, "WORTHWHILE", share * logits / limit)
        assert (NAME in planned(memory=limit).choices) == in_tiles


@contextmanager
def searches(in_full: bool = False) -> Iterator[list[str]]:
    """Yield a list of how each search for a plan within a limit ended: found, refused or cut off.

    With `in_full`, no search is cut off by the result of another one.
    """
    ended: list[str] = []

    def within(*args: Any) -> Answer:
        *requested, settings = args
        cutoff, search = settings.cutoff, cast(Any, best_within)
        try:
            found = search(*requested, replace(settings, cutoff=math.inf) if in_full else settings)
        except CutOffError as error:
            ended.append(CUT_OFF if cutoff else MEMORY_COSTS_TIME)
            assert error.seconds >= cutoff
            raise
        except InfeasibleError:
            ended.append("refused")
            raise
        ended.append("found")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "best_within", within)
        yield ended


FOUND, CUT_OFF, MEMORY_COSTS_TIME = "found", "cut off", "memory costs time"


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1, 10])
@pytest.mark.parametrize("options", [{"gap": 0.05}, {"recompute": "none"}, {"microbatches": 2}])
def test_searches_that_end_early_leave_the_plan_that_whole_ones_find(
    weight: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tiles are the slower, by a weight on their seconds."""
    free = planned(**options).peak_bytes
    _weigh_tiles(monkeypatch, weight)
    for limit in (int(0.95 * free), int(0.5 * free)):
        with searches() as ended:
            found = _plan_or_refusal(memory=limit, **options)
        with searches(in_full=True) as in_full:
            assert found == _plan_or_refusal(memory=limit, **options)
        assert not {CUT_OFF, MEMORY_COSTS_TIME}.intersection(in_full)
        assert MEMORY_COSTS_TIME in ended and ended.count(FOUND) <= in_full.count(FOUND)


def _weigh_tiles(monkeypatch: pytest.MonkeyPatch, weight: float) -> None:
    """Count plans in tiles as slower by a factor."""
    for name in ("seconds_of_microbatch", "simulated_seconds"):
        seconds = getattr(tiles, name)
        weighed = lambda p, of=seconds: of(p) * (weight if NAME in p.choices else 1)  # noqa: E731
        monkeypatch.setattr(tiles, name, weighed)


def _plan_or_refusal(**options: Any) -> str:
    try:
        return planned(**options).to_json()
    except InfeasibleError as error:
        return str(error)


def test_of_a_model_as_it_is_a_bound_is_enough_where_tiles_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = int(0.95 * planned().peak_bytes)
    _weigh_tiles(monkeypatch, 0.1)
    with searches() as ended:
        assert NAME in planned(memory=limit).choices
    assert ended == [MEMORY_COSTS_TIME, FOUND]


def test_where_tiles_are_the_slower_the_model_as_it_is_is_planned_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = int(0.95 * planned().peak_bytes)
    _weigh_tiles(monkeypatch, 10)
    with searches() as ended:
        assert NAME not in planned(memory=limit).choices
    assert ended[:3] == [MEMORY_COSTS_TIME, FOUND, FOUND]
    assert set(ended[3:]) == {FOUND}, "the same, with parameters stored whole"


@pytest.mark.parametrize(("weight", "in_tiles"), [(0.1, True), (10.0, False)])
def test_the_plan_of_the_shorter_simulated_step_is_kept(
    weight: float, in_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums may be of other costs: here that of tiles is less in any case."""
    made, given = plan_cache.plan_as_memory_asks, list[Any]()
    monkeypatch.setattr(plan_cache, "plan_as_memory_asks", lambda *args: given.append(args) or made(*args))
    planned(memory=int(0.99 * planned().peak_bytes), recompute="none")
    request, space, spaces, storage = given[-1]
    seconds = tiles.simulated_seconds
    monkeypatch.setattr(tiles, "simulated_seconds", lambda p: seconds(p) * (weight if NAME in p.choices else 1))
    turns = tiles._Turns(request, storage)
    turns.take(space)
    turns.take_in_tiles(spaces, request.tiles._replace(loss=tiles.Fitting(2)))
    assert turns.best is not None and (NAME in turns.best.plan.choices) == in_tiles


def test_a_plan_that_pays_nothing_for_memory_is_the_only_one_that_is_made() -> None:
    limit = planned().peak_bytes
    with searches() as ended:
        planned(memory=limit)
    assert ended == [FOUND]


def test_where_only_tiles_fit_no_refusal_is_worked_out() -> None:
    limit = int(0.4 * planned(recompute="none").peak_bytes)
    with searches() as ended:
        assert NAME in planned(memory=limit, recompute="none").choices
    assert ended == [MEMORY_COSTS_TIME, FOUND, CUT_OFF]


def test_where_the_time_is_over_no_model_in_tiles_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, requested, made = int(0.95 * planned().peak_bytes), plan_cache.plan_as_memory_asks, []

    def noted(request: Any, space: Any, spaces: Any, storage: Any) -> Plan:
        return requested(request, space, lambda wanted: made.append(wanted) or spaces(wanted), storage)

    def late(*given: Any) -> Answer:
        raise TimeLimitError("the time limit passed")

    monkeypatch.setattr(plan_cache, "plan_as_memory_asks", noted)
    planned(memory=limit)
    assert made, "the model as it is was enough"
    made.clear()
    monkeypatch.setattr(planner, "best_within", late)
    with pytest.raises(TimeLimitError):
        planned(memory=limit)
    assert not made


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
def test_nothing_is_stated_of_losses_that_cannot_be_taken_so(loss: Any) -> None:
    model = Reader(CLASSES, SIZE, loss=loss)
    limit = int(0.3 * planned(model).peak_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InfeasibleError, match="every choice needs at least"):
            planned(model, memory=limit)


def test_where_tiles_do_not_fit_either_the_refusal_is_that_of_the_model_as_it_is() -> None:
    texts = []
    for requested in ("auto", "none"):
        with pytest.raises(InfeasibleError) as caught:
            planned(memory=1000, loss_tiles=requested)
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
    return peak_of_step(compiled, given), compiled.plan.peak_bytes, limit, NAME in compiled.plan.choices


def test_ranks_hold_what_is_predicted_and_no_more_than_the_limit(ranks: Ranks) -> None:
    for found, predicted, limit, in_tiles in ranks.run(_within, 0.4):
        assert in_tiles
        assert predicted == pytest.approx(found, rel=0.05)
        assert found <= 1.05 * limit


@pytest.mark.sample(1)
@pytest.mark.parametrize("given", [False, True])
def test_ranks_train_as_one_process(given: bool) -> None:
    torch.manual_seed(0)
    model = Reader(CLASSES, SIZE).double()
    steps = Steps([batch(seed) for seed in range(2)], "adamw")
    limit = int(0.6 * planned(copy.deepcopy(model), hardware=SLOW_DEVICES).peak_bytes)
    options = {"plan": planned(copy.deepcopy(model), memory=limit)} if given else {"memory": limit}
    plan = train_alike(model, steps, {"dp": 2}, options)
    assert NAME in plan.choices


MLP = "mlp_in_tiles_default"


def planned_mlps(**options: Any) -> Plan:
    x = tokens(batch=8, sequence=64, size=16)["x"].float()
    return autopar.plan(Gated(16, 512), autopar.Mesh({"dp": 2}), {"x": x}, **by_flag(**options))


def test_mlps_are_taken_in_tiles_where_the_limit_leaves_no_other_plan_and_that_is_requested() -> None:
    free = planned_mlps(mlp_tiles="auto")
    assert MLP not in free.choices
    assert planned_mlps(memory=free.peak_bytes, mlp_tiles="auto").choices == free.choices
    limit = int(0.4 * free.peak_bytes)
    with pytest.raises(InfeasibleError):
        planned_mlps(memory=limit)
    found = planned_mlps(memory=limit, mlp_tiles="auto")
    assert MLP in found.choices and found.peak_bytes <= limit


def test_mlps_have_as_few_tiles_as_leave_less_of_them_than_of_gradients() -> None:
    limit = int(0.4 * planned_mlps().peak_bytes)
    found = planned_mlps(memory=limit, mlp_tiles="auto")
    worked_on, gradients = 4 * (8 * 64 // 2) * 512, 3 * 16 * 512
    assert f"(mlp_tiles={-(-worked_on // gradients)})" in found.descriptions[MLP]


def test_of_plans_with_and_without_them_the_faster_is_kept() -> None:
    free = planned_mlps().peak_bytes
    for options, in_tiles, ends in (({}, False, [FOUND, FOUND]), ({"recompute": "none"}, True, ["refused", FOUND])):
        with searches() as ended:
            found = planned_mlps(memory=int(0.7 * free), mlp_tiles="auto", **options)
        assert (MLP in found.choices) == in_tiles
        assert ended == ends
    apart, in_tiles = (planned_mlps(memory=int(0.7 * free), mlp_tiles=tiles) for tiles in ("none", 22))
    assert apart.seconds < in_tiles.seconds


def test_losses_and_mlps_may_both_be_taken_in_tiles() -> None:
    model = Reader(CLASSES, SIZE)
    model.up, model.down = nn.Linear(SIZE, 512), nn.Linear(512, SIZE)
    limit = int(0.4 * planned(model, recompute="none").peak_bytes)
    found = planned(model, memory=limit, recompute="none", mlp_tiles="auto")
    assert {NAME, MLP} <= found.choices.keys()
    loaded = Plan.from_json(found.to_json())
    assert loaded.attach(model, batch(), memory=autopar.Memory(recompute="none", mlp_tiles="auto")).verify().ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("given", [False, True])
def test_ranks_train_with_mlps_in_tiles_as_one_process(given: bool) -> None:
    torch.manual_seed(0)
    model = Gated(16, 64).double()
    steps = Steps([tokens(seed, size=16) for seed in range(2)], "adamw")
    options: dict[str, Any] = {"recompute": "none", "mlp_tiles": "auto", "hardware": SLOW_DEVICES}
    on, example = autopar.Mesh({"dp": 2}), steps.batches[0]
    options["memory"] = int(0.8 * autopar.plan(model, on, example, **by_flag(**options)).peak_bytes)
    if given:
        options = {"plan": autopar.plan(copy.deepcopy(model), on, example, **by_flag(**options)), "mlp_tiles": "auto"}
    plan = train_alike(model, steps, {"dp": 2}, options)
    assert MLP in plan.choices


def test_plans_of_stages_are_not_compared() -> None:
    x = {"x": tokens()["x"].float()}
    with pytest.raises(PipelineError, match=r"mlp_tiles=.auto.\) .* pipeline; give a number of tiles, as in Memory"):
        autopar.plan(Gated(), autopar.Mesh({"pp": 2}), x, memory=autopar.Memory(mlp_tiles="auto"))
