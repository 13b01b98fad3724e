"""autopar plans the table of published recipes, and prints one line for each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.costs.plans.plan import Plan
from autopar.errors import TimeLimitError
from autopar.models.catalogue import BUILT_IN, built_in
from autopar.planning.pipeline.stage_seconds import stage_seconds
from autopar.strategies.presets import preset_named
from benchmarks import recipes
from tests.support.options import by_flag

TINY = recipes.Recipe(
    name="tiny",
    model="tiny-llama",
    device="h100",
    memory="1GB",
    gpus=4,
    sequence=32,
    batch=8,
    microbatches=2,
    dp=2,
    ep=1,
    cp=1,
    tp=1,
    pp=2,
    chunks=1,
    schedule="1f1b",
    strategy="zero1",
    recompute="none",
    precision="bf16-mixed",
    seconds=None,
    mfu=0.4,
    gib=1.0,
    source="",
    assumed="",
)


def test_every_recipe_has_a_model_a_strategy_and_a_source() -> None:
    found = recipes.recipes()
    assert len(found) > 20 and len({each.name for each in found}) == len(found)
    for each in found:
        assert each.model in BUILT_IN or each.model in recipes.CONFIGS, each.name
        assert preset_named(each.strategy) and each.source, each.name
        assert each.seconds or each.mfu or each.assumed.startswith("no seconds are known"), each.name
        assert each.batch % (each.dp * each.microbatches) == 0, each.name


def test_a_recipe_whose_degrees_are_not_its_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match="tiny: dp 3 × cp 1 × tp 1 × pp 2 must be 4 GPUs"):
        replace(TINY, dp=3)
    with pytest.raises(ValueError, match="no recipe nowhere; recipes are llama-8b-fsdp8, "):
        recipes.recipes(["nowhere"])


def test_axes_go_from_the_slowest_and_those_of_experts_are_a_part_of_the_batch_s() -> None:
    wide = replace(TINY, gpus=64, dp=8, ep=4, cp=2, tp=2)
    assert list(wide.axes.items()) == [("pp", 2), ("dp", 2), ("ep", 4), ("cp", 2), ("tp", 2)]


def test_a_recipe_that_fits_is_accepted_and_one_that_does_not_is_priced_without_a_limit() -> None:
    accepted, refused = (recipes.requested(replace(TINY, memory=memory), 10.0) for memory in ("4GB", "1MB"))
    assert (accepted.verdict, refused.verdict) == (recipes.ACCEPTED, recipes.REFUSED)
    assert "1.32 GB of it are no tensors" in refused.reason and refused.seconds == accepted.seconds
    assert accepted.ratio and accepted.memory_ratio and accepted.measured_seconds
    text = recipes.line(TINY, accepted)
    assert "tiny (pp2 dp2; zero1; 2 micro-batches); accepted; " in text and "GB of 1.1 measured" in text


def test_a_recipe_whose_time_ran_out_has_no_answer_and_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = recipes.planned

    def late(recipe: recipes.Recipe, memory: int | None, time_limit: float) -> Any:
        if memory is not None:
            raise TimeLimitError("the time limit passed")
        return planned(recipe, memory, time_limit)

    monkeypatch.setattr(recipes, "planned", late)
    found = recipes.requested(replace(TINY, memory="4GB"), 10.0)
    assert found.verdict == recipes.NO_ANSWER and found.reason.startswith("TimeLimitError") and found.seconds


@pytest.mark.slow
def test_a_step_in_one_piece_is_that_of_all_its_micro_batches() -> None:
    model, inputs = built_in("tiny-llama", 8, 32)
    options = {"strategy": "ddp", "recompute": "none"}
    several, one = (
        autopar.plan(model, autopar.Mesh({"dp": 2}, hardware="h100"), inputs, microbatches=count, **by_flag(**options))  # pyright: ignore
        for count in (2, 1)
    )
    assert isinstance(one, Plan) and isinstance(several, Plan)
    assert recipes.step_seconds(one) == pytest.approx(one.timeline().seconds, rel=0.1)
    assert recipes.step_seconds(several) > 1.8 * several.timeline().seconds - stage_seconds(several).once


def test_what_autopar_cannot_be_requested_is_listed_with_the_reason() -> None:
    found = recipes.requested(replace(TINY, precision="fp8"), 10.0)
    assert found.verdict == recipes.NOT_EXPRESSED and "FP8" in found.reason and found.seconds is None


def test_the_summary_has_the_verdicts_and_the_errors() -> None:
    text = recipes.summary(
        [
            recipes.Found("a", recipes.ACCEPTED, "", 1.1, 90, 1.0, 100.0, 2.0),
            recipes.Found("b", recipes.REFUSED, "why", 1.3, 120, 1.0, 100.0, 4.0),
            recipes.Found("c", recipes.NOT_EXPRESSED, "FP8"),
        ]
    )
    assert "accepted: 1, refused: 1, no answer: 0, not expressed: 1" in text
    assert "seconds, all that are priced  2          1.20      20.0%" in text
    assert "bytes, accepted               1          0.90      10.0%" in text
    assert "bytes, all that are priced    2          1.05      15.0%" in text
    assert "longest 4 s (b)" in text and text.endswith("left out, in FP8 or MXFP8: c")


def test_only_the_recipes_named_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    recipes.main(["--list", "--only", "gpt-22b-full"])
    printed = capsys.readouterr().out
    assert "gpt-22b-full" in printed and "2205.05198" in printed and "llama" not in printed


def test_what_was_found_is_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "requested", lambda recipe, limit: recipes.Found(recipe.name, recipes.ACCEPTED))
    recipes.main(["--here", "--only", "gpt-22b-full", "--json", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text())[0]["name"] == "gpt-22b-full"
